"""What the mixture's kernels compute, by definition: levels of all sources, one distribution, one best-first tree.

A source answers `levels(text)`: (match length, total, distinct, [(token, share)], most recent token or None), longest
match first.
"""

import bisect
import heapq
import math
from collections import Counter

import numpy as np

NEGLIGIBLE = 0.2
PRIOR_WEIGHT, CELL_MEMORY, SCALE_PRIOR, SCALE_MEMORY, USE_MEMORY = 6.0, 400.0, 8.0, 1000.0, 512.0
LENGTHS = [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 40]
COUNTS = [1, 2, 3, 4, 6, 9, 17, 65]
DISTINCT = [1, 2, 3, 4, 6, 9]


def bucket(starts, n):
    return max([i for i, start in enumerate(starts) if n >= start], default=0)


def cell_of(number, length, total, distinct):
    at = number * len(LENGTHS) + bucket(LENGTHS, length)
    return (at * len(COUNTS) + bucket(COUNTS, total)) * len(DISTINCT) + bucket(DISTINCT, distinct)


def prior(number, length, total, distinct):
    if number in (3, 11):
        return (0.3, 0.6, 0.75)[min(length, 2)]
    if number == 12:
        return 0.6 if length <= 3 else 0.75
    if number == 2:
        return 0.9 - 0.5 / (1 + length)
    if number == 10:
        return 0.5
    if number == 9:
        return 0.1 + 0.06 * length
    if number == 8:
        return 0.75 * total / (total + 10)
    if number > 3:
        a = 3.0 if number == 6 and length < 6 else 1.0
    else:
        first = 6.0 if number == 0 else 4.0
        a = {0: 20.0, 1: first, 2: 2.5, 3: 1.5, 4: 1.0}.get(length) or max(0.15, 3.5 / length)
    return total / (total + a * distinct)


class Trust:
    """The request's factors on the odds of the weights, one per source, one per source and length class."""

    def __init__(self):
        self.factor = Counter()  # logarithms
        self.variance = {}

    def names(self, number, length):
        return (number,), (number, bisect.bisect_right([4, 12], length))

    def weight(self, number, length, weight):
        log_odds = math.log(weight / (1 - weight)) + sum(self.factor[name] for name in self.names(number, length))
        return 1 / (1 + math.exp(-log_odds))

    def adapt(self, number, length, weight, explained, reached):
        for name in self.names(number, length):
            precision = 1 / self.variance.get(name, 1.0) + weight * (1 - weight) * reached
            self.variance[name] = 1 / precision
            moved = self.factor[name] + (explained - weight * reached) / precision
            self.factor[name] = min(max(moved, -math.log(500)), math.log(500))

    def table(self):
        out = np.empty((13, 4, 2))
        out[..., 0], out[..., 1] = 1, 1
        for name in self.variance:
            at = (name[0], 0) if len(name) == 1 else (name[0], 1 + name[1])
            out[at] = math.exp(self.factor[name]), self.variance[name]
        return out


class Automaton:
    def __init__(self, number, text, shortest=0):
        self.number, self.text, self.shortest = number, text, shortest

    def levels(self, text):
        for length, continuations in self.text.levels(text):
            if length < self.shortest:
                continue
            total = sum(count for _, count in continuations)
            shares = [(token, count / total) for token, count in continuations]
            yield length, total, len(continuations), shares, continuations[0][0]


class Recycling:
    number, orders = 3, 3

    def __init__(self, table):
        self.table = table

    def known(self, context):
        """Shares of what followed a context, and how often it was observed."""
        return self.table.kept.get(context), self.table.seen.get(context)

    def contexts(self, text):
        """Contexts of a text, newest token first, and their lengths; that of the skip-gram is 0."""
        for order in range(min(self.orders, len(text)), 0, -1):
            yield tuple(text[: -order - 1 : -1]), order
        if self.number in (Recycling.number, Distilled.number) and len(text) > 1:
            yield (None, text[-2]), 0

    def levels(self, text):
        for context, order in self.contexts(text):
            shares, observed = self.known(context)
            if shares:
                top = max(shares.values())
                distinct = 1 if top > 0.9 else 2 if top > 0.7 else 3 if top > 0.5 else 5 if top > 0.3 else 9
                yield order, observed, distinct, list(shares.items()), None


class Bigrams(Recycling):
    number = 10


class Distilled(Recycling):
    number = 11


class Phrases(Recycling):
    number, orders = 8, 2

    def known(self, context):
        return self.table.known(context[::-1]), self.table.counts.get(context, Counter()).total()


class Prediction:
    """One cursor: `position` in the expected text when `start` tokens had been written, `matched` before it."""

    number = 2

    def __init__(self, expected, start, position, matched):
        self.expected, self.start, self.position, self.matched = expected, start, position, matched

    def levels(self, text):
        followed = text[self.start :]
        at = self.position + len(followed)
        if self.matched >= 0 and at < len(self.expected) and self.expected[self.position : at] == followed:
            yield self.matched + len(followed), 1, 1, [(self.expected[at], 1.0)], None


class Ngram:
    number = 4

    def __init__(self, documents, kept=12):
        self.documents, self.kept = documents, kept

    def levels(self, text):
        for order in range(min(5, len(text)), 0, -1):
            counts = Counter(next_tokens(self.documents, text[-order:]))
            total = sum(counts.values())
            if total >= (2 if order > 1 else 1):
                best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: self.kept]
                yield order, total, len(counts), [(token, count / total) for token, count in best], None


class Exact:
    number = 5

    def __init__(self, documents, min_depth, start):
        self.documents, self.min_depth, self.start = documents, min_depth, start

    def levels(self, text):
        """The longest match of the text that was written, as far as the draft goes on with it."""
        written = text[: self.start]
        longest = max(n for n in range(len(written) + 1) if n == 0 or places(self.documents, written[-n:]))
        match = text[self.start - longest :]
        ends = places(self.documents, match)
        if longest < self.min_depth or not ends:
            return
        after = [document[end] if end < len(document) else None for document, end in ends]
        distinct = 1 if len(set(after)) == 1 else min(len(ends), 2 + len(ends) // 8)
        counts = Counter(token for token in after if token is not None)
        yield len(match), len(ends), distinct, [(t, n / len(ends)) for t, n in sorted(counts.items())], None


class Silent:
    """A source that rests."""

    def __init__(self, number):
        self.number = number

    def levels(self, text):
        return iter(())


def places(documents, context):
    """(document, index after the match) of every place of a context."""
    n = len(context)
    return [(d, i + n) for d in documents for i in range(len(d) - n + (n > 0)) if d[i : i + n] == context]


def next_tokens(documents, context):
    return [document[end] for document, end in places(documents, context) if end < len(document)]


def merged(sources, text, cells, trust, floor):
    """[(row, weight, cell, recency, shares, recent, (number, length, learned weight))], longest match first."""
    levels = [(row, *level) for row, source in enumerate(sources) for level in source.levels(text)]
    levels.sort(key=lambda level: (-level[1], level[0]))
    out, mass = [], 1.0
    for row, length, total, distinct, shares, recent in levels[:24]:
        if mass <= floor:
            break
        number = sources[row].number
        cell = cell_of(number, length, total, distinct)
        weight = (cells[cell][0] + PRIOR_WEIGHT * prior(number, length, total, distinct)) / (
            cells[cell][1] + PRIOR_WEIGHT
        )
        learned, weight = weight, trust.weight(number, length, weight)
        recency = 0.0
        if recent is not None:
            recency = (cells[cell][2] + 0.15 * PRIOR_WEIGHT) / (cells[cell][3] + PRIOR_WEIGHT)
        out.append((row, weight, cell, recency, shares, recent, (number, length, learned)))
        mass *= 1 - weight
    return out


def distribution(levels, negligible=0.0):
    """{token: (probability, row that gave most)}; shares below `negligible` are not added up."""
    mass, parts = 1.0, {}
    for row, weight, _cell, recency, shares, recent, *_ in levels:
        for token, share in shares:
            p = mass * weight * ((1 - recency) * share + (recency if token == recent else 0.0))
            if p >= negligible:
                parts.setdefault(token, []).append((p, row))
        mass *= 1 - weight
    best = {token: max(given, key=lambda part: part[0])[1] for token, given in parts.items()}
    return {token: (sum(p for p, _ in given), best[token]) for token, given in parts.items()}


def couple(given, noise):
    """Probabilities when the noise of the sample is known: the target takes the largest p / E, E exponential.

    Estimates of p are off, so half of log E counts.
    """
    scores = {token: p / math.sqrt(-math.log(noise(token))) for token, (p, _) in given.items()}
    others = max(1 - sum(p for p, _ in given.values()), 0.0) / math.sqrt(0.6931)  # at the median of their noise
    total = others + sum(scores.values())
    return {token: (scores[token] / total, row) for token, (_, row) in given.items()}


def bins(p):
    """[(bin, share)] of a probability on the log-odds scale, half a unit wide from -8 to 8."""
    p = min(max(p, 1e-6), 1 - 1e-6)
    x = (min(max(math.log(p / (1 - p)), -7.999), 7.999) + 8) * 2
    return [(int(x), 1 - (x - int(x))), (int(x) + 1, x - int(x))]


def scaled(scale, number, p):
    ratio = sum(w * (scale[number][b][0] + SCALE_PRIOR) / (scale[number][b][1] + SCALE_PRIOR) for b, w in bins(p))
    return min(p * ratio, 0.9999)


def expand(sources, text, cells, scale, max_nodes, max_depth, min_p=0.0, cost=None, noise=None, trust=None):
    """[(token, parent, depth, row, path probability)], best first, and how many of them to verify."""
    nodes, heap, order = [], [], 0
    trust = trust or Trust()

    def offer(at, path, path_p):
        nonlocal order
        worth = min_p / path_p
        if noise is None:
            given = distribution(merged(sources, text + path, cells, trust, max(worth, 0.01)), NEGLIGIBLE * worth)
        else:
            given = distribution(merged(sources, text + path, cells, trust, 0.01))
            given = couple(given, noise(len(path)))
        for token, (p, row) in given.items():
            if p >= worth:
                p = path_p * scaled(scale, sources[row].number + (13 if noise else 0), p)
                heapq.heappush(heap, (-p, token, order, at, path, row))
                order += 1

    offer(-1, [], 1.0)
    while heap and len(nodes) < max_nodes:
        p, token, _, parent, path, row = heapq.heappop(heap)
        nodes.append((token, parent, len(path) + 1, row, -p))
        if len(path) + 1 < max_depth:
            offer(len(nodes) - 1, [*path, token], -p)
    if cost is None:
        return nodes, len(nodes)
    gains = [1 + sum(node[4] for node in nodes[:n]) for n in range(len(nodes) + 1)]
    return nodes, max(range(len(gains)), key=lambda n: (gains[n] / cost[n], -n))


def depth_first(nodes):
    """Indices of best-first nodes in depth-first order, first-born children first."""

    def below(at):
        for i, node in enumerate(nodes):
            if node[1] == at:
                yield i
                yield from below(i)

    return list(below(-1))


def learn_weights(cells, trust, use, levels, token, sources=(), text=()):
    """Credit every level, and every source, with its part of the token's probability (modifies all but the levels).

    Sources that learn themselves do so.
    """
    mass, given, parts = 1.0, [], []
    for _row, weight, _cell, recency, shares, recent, *_ in levels:
        count_part = (1 - recency) * dict(shares).get(token, 0.0)
        recent_part = recency if recent is not None and token == recent else 0.0
        given.append(mass * weight * (count_part + recent_part))
        parts.append(recent_part / (count_part + recent_part) if count_part + recent_part else None)
        mass *= 1 - weight
    total = sum(given) + mass * 1e-4
    reached = 1.0
    use *= 1 - 1 / USE_MEMORY
    for (row, _weight, cell, *_, (number, length, learned)), joint, part in zip(levels, given, parts, strict=True):
        r = joint / total
        use[row] += r / USE_MEMORY
        if sources and hasattr(sources[row], "learn"):
            sources[row].learn(token, reached, r, text)
        keep = 1 - reached / CELL_MEMORY if cells[cell][1] >= CELL_MEMORY else 1.0
        old = [float(value) for value in cells[cell]]
        cells[cell][0] = old[0] * keep + r
        cells[cell][1] = old[1] * keep + reached
        if part is not None:
            cells[cell][2] = old[2] * keep + r * part
            cells[cell][3] = old[3] * keep + r
        trust.adapt(number, length, trust.weight(number, length, learned), r, reached)
        reached -= r
        if reached <= 1e-9:
            break


def learn_scale(scale, sources, given, min_p, token, first=0):
    """Compare the probability of every candidate with what came (modifies `scale`)."""
    for candidate, (p, row) in given.items():
        if p >= min_p:
            for b, w in bins(p):
                cell = scale[first + sources[row].number][b]
                if cell[1] > SCALE_MEMORY:
                    cell[0] *= 0.999
                    cell[1] *= 0.999
                cell[0] += w * (candidate == token)
                cell[1] += w * p
