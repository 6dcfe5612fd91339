"""What the recycling table remembers, by definition: a dict of contexts."""

import math

ORDERS = 3


class NaiveTable:
    """Averages of the target's top probabilities per context of 1-3 tokens, and per skip-gram: any token after one."""

    def __init__(self, k):
        self.k = k
        self.seen = {}
        self.kept = {}

    def learn(self, newest, ids, logits):
        """`newest`: tokens of the context, newest first."""
        weights = [math.exp(logit - max(logits)) for logit in logits]
        new = {token: w / sum(weights) for token, w in zip(ids, weights, strict=True)}
        contexts = [tuple(newest[:order]) for order in range(1, min(ORDERS, len(newest)) + 1)]
        for context in [*contexts, *((None, token) for token in newest[1:2])]:
            seen = self.seen.get(context, 0)
            rate = max(1 / (seen + 1), 0.25)
            old = self.kept.get(context, {})
            mixed = {t: (1 - rate) * old.get(t, 0.0) + rate * new.get(t, 0.0) for t in {*old, *new}}
            best = sorted(mixed.items(), key=lambda item: (-item[1], item[0]))[: self.k]
            self.kept[context] = {token: p for token, p in best if p > 0}
            self.seen[context] = seen + 1

    def lookup(self, context):
        """(tokens with probabilities, order) of the longest known end of `context`, oldest token first."""
        newest = context[::-1]
        for order in range(min(ORDERS, len(newest)), 0, -1):
            if tuple(newest[:order]) in self.kept:
                return self.kept[tuple(newest[:order])], order
        return {}, 0
