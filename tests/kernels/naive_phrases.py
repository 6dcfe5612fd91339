"""What the phrase memory knows, by definition: counters of continuations, and who was given what alone."""

from collections import Counter

ORDERS, HALVED_AT, FADE_EVERY = 2, 1 << 12, 1024


class NaivePhrases:
    """Counts of what follows 1-2 tokens, once two requesters were given it, without a bound on contexts."""

    def __init__(self):
        self.counts = {}  # context, newest token first → Counter
        self.first = {}  # (context, continuation) → the requester that was given it first
        self.requests = 0

    def learn(self, text, key=None):
        self.requests += 1
        requester = self.requests if key is None else key
        for i in range(1, len(text)):
            for order in range(1, ORDERS + 1):
                context = tuple(text[i - order : i][::-1])
                if order > i or min(context) < 0 or text[i] < 0:
                    break
                self.count(context, text[i], requester)
        if self.requests % FADE_EVERY == 0:
            for context in list(self.counts):
                self.halve(context)

    def count(self, context, token, requester):
        known = self.counts.get(context, Counter())
        times = 1
        if token not in known:
            if self.first.setdefault((context, token), requester) == requester:
                return
            times = 2
        known[token] += times
        self.counts[context] = known
        if known.total() >= HALVED_AT:
            self.halve(context)

    def halve(self, context):
        self.counts[context] = +Counter({token: n // 2 for token, n in self.counts[context].items()})
        if not self.counts[context]:
            del self.counts[context]

    def known(self, context):
        """Continuations and their shares after exactly this context (oldest token first)."""
        counts = self.counts.get(tuple(context[::-1]), Counter())
        return {token: n / counts.total() for token, n in counts.items()}
