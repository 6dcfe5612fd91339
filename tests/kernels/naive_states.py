"""What similar hidden states predict, by definition: a list of rows, all of which are compared."""

import math

TEMPERATURE, LEAST_WEIGHT, LEAST_SHARE = 0.07, 0.003, 2


class NaiveStates:
    """Rows of (token, key, parent's key, shares of next tokens); `length` is that of a key."""

    def __init__(self, length, neighbours, width):
        self.length, self.neighbours, self.width = length, neighbours, width
        self.rows = []

    def add(self, token, key, parent_key, shares):
        self.rows.append((token, key, parent_key, shares))

    def predict(self, key, token):
        """(next tokens with probabilities, the key of the state after the token, highest cosine), or None."""
        compared = [
            (sum(a * b for a, b in zip(key, parent_key, strict=True)), after, shares)
            for of, after, parent_key, shares in self.rows
            if of == token and parent_key is not None
        ]
        nearest = sorted(compared, key=lambda row: -row[0])[: self.neighbours]
        if not nearest:
            return None
        square = self.length**2
        best = nearest[0][0]
        weights = [math.exp((product - best) / (TEMPERATURE * square)) for product, _, _ in nearest]
        total = sum(weights)
        probs, average = {}, [0.0] * len(key)
        for weight, (_, after, shares) in zip(weights, nearest, strict=True):
            if weight / total < LEAST_WEIGHT:
                continue
            average = [a + weight / total * b for a, b in zip(average, after, strict=True)]
            for token_id, share in ((t, s) for t, s in shares.items() if s >= LEAST_SHARE):
                probs[token_id] = probs.get(token_id, 0.0) + weight / total * share / 255
        norm = math.sqrt(sum(a * a for a in average)) or 1.0
        state = [max(min(round(a * self.length / norm), 127), -127) for a in average]
        likely = sorted(probs.items(), key=lambda item: (-item[1], item[0]))[: self.width]
        return dict(likely), state, best / square
