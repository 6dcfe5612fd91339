"""Which tokens may come anywhere, by definition: the recent and the frequent ones of a list of tokens."""

from __future__ import annotations

from collections import Counter

RECENT, FREQUENT, RATE_PRIOR, RATE_MEMORY = 32, 24, 20.0, 4000.0
AGES = [1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 128]


def place(starts, n):
    return max(i for i, start in enumerate(starts) if n >= start)


class NaiveUnigrams:
    """A text of (token, generated), and rates by (age, count, generated)."""

    number = 0

    def __init__(self, rates=None):
        self.text, self.generated, self.order = [], set(), []
        self.rates = {} if rates is None else rates

    def extend(self, tokens, generated):
        for token in tokens:
            self.text.append(token)
            if generated:
                self.generated.add(token)
            self._rise(token)

    def _rise(self, token):
        """The frequent ones: a token rises above others when it is said more often, and enters when it is so."""
        counts = Counter(self.text)
        if token in self.order:
            self.order.remove(token)
        elif len(self.order) == FREQUENT:
            if counts[self.order[-1]] >= counts[token]:
                return
            self.order.pop()
        at = len(self.order)
        while at > 0 and counts[self.order[at - 1]] < counts[token]:
            at -= 1
        self.order.insert(at, token)

    def cell(self, token):
        age = len(self.text) - max(i for i, t in enumerate(self.text) if t == token)
        return place(AGES, age), place(COUNTS, self.text.count(token)), token in self.generated

    def listed(self):
        recent = list(dict.fromkeys(reversed(self.text)))[:RECENT]
        return recent + [token for token in self.order if token not in recent]

    def shares(self):
        n = len(self.text)
        out = {}
        for token in self.listed():
            age = n - max(i for i, t in enumerate(self.text) if t == token)
            prior = 0.7 * self.text.count(token) / (n + 1) + 0.3 / (age + 16)
            came, chances = self.rates.get(self.cell(token), (0.0, 0.0))
            out[token] = (came + RATE_PRIOR * prior) / (chances + RATE_PRIOR)
        total = sum(out.values())
        return {token: share / total for token, share in out.items()}

    def learn(self, token, reached, explained):
        for listed in self.listed():
            cell = self.cell(listed)
            came, chances = self.rates.get(cell, (0.0, 0.0))
            fade = 1 - 1 / RATE_MEMORY if chances > RATE_MEMORY else 1.0
            self.rates[cell] = came * fade + explained * (listed == token), chances * fade + reached

    def levels(self, _text):
        """As the sources of `naive_blend`."""
        if self.text:
            yield 0, len(self.text), len(set(self.text)), list(self.shares().items()), None
