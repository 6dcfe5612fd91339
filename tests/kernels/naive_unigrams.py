"""Which tokens may come anywhere, by definition: the recent and the frequent ones of a list of tokens."""

from collections import Counter

RECENT, FREQUENT, RATE_PRIOR, RATE_MEMORY = 32, 32, 20.0, 4000.0
AGES = [1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 128]
FACTOR_PRIOR = 2.0


def place(starts, n):
    return max(i for i, start in enumerate(starts) if n >= start)


class NaiveUnigrams:
    """A text of (token, generated), rates by (age, count, generated), and factors by classes (of the newest, of both)
    and the token's own."""

    number = 0

    def __init__(self, classes=None):
        self.text, self.generated, self.order = [], set(), []
        self.rates, self.factors = {}, {}
        self.classes = {} if classes is None else classes
        self.known = {}  # shares by place: those of one list stay as they are while factors are learned

    def extend(self, tokens, generated):
        self.known = {}
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

    def behind(self, text):
        """Classes of the last two tokens; what came before the text counts as token 0."""
        older, newer = [self.classes.get(token, 0) for token in [0, 0, *text][-2:]]
        return (newer,), (older, newer)

    def shares(self, text=None):
        behinds = self.behind(self.text if text is None else text)
        return self.known.setdefault(behinds, self._shares(behinds))

    def _shares(self, behinds):
        shares = self.by_rates()
        for token in shares:
            factor = 1.0
            for behind in behinds:
                came, expected = self.factors.get((behind, self.classes.get(token, 0)), (0.0, 0.0))
                factor = (came + FACTOR_PRIOR * factor) / (expected + FACTOR_PRIOR)
            shares[token] *= factor
        total = sum(shares.values())
        return {token: share / total for token, share in shares.items()}

    def by_rates(self):
        if "rates" not in self.known:
            self.known["rates"] = self._by_rates()
        return dict(self.known["rates"])

    def _by_rates(self):
        n = len(self.text)
        out = {}
        for token in self.listed():
            age = n - max(i for i, t in enumerate(self.text) if t == token)
            prior = 0.7 * self.text.count(token) / (n + 1) + 0.3 / (age + 16)
            came, chances = self.rates.get(self.cell(token), (0.0, 0.0))
            out[token] = (came + RATE_PRIOR * prior) / (chances + RATE_PRIOR)
        total = sum(out.values())
        return {token: share / total for token, share in out.items()}

    def learn(self, token, reached, explained, text=None):
        shares = self.by_rates()
        for behind in self.behind(self.text if text is None else text):
            for k in range(16):
                of_class = [t for t in shares if self.classes.get(t, 0) == k]
                came, expected = self.factors.get((behind, k), (0.0, 0.0))
                fade = 1 - 1 / RATE_MEMORY if expected > RATE_MEMORY else 1.0
                came = came * fade + explained * (token in of_class)
                self.factors[behind, k] = came, expected * fade + reached * sum(shares[t] for t in of_class)
        for listed in self.listed():
            cell = self.cell(listed)
            came, chances = self.rates.get(cell, (0.0, 0.0))
            fade = 1 - 1 / RATE_MEMORY if chances > RATE_MEMORY else 1.0
            self.rates[cell] = came * fade + explained * (listed == token), chances * fade + reached

    def levels(self, text):
        """As the sources of `naive_blend`."""
        if self.text:
            yield 0, len(self.text), len(set(self.text)), list(self.shares(text).items()), None
