"""Which earlier places the newest tokens run beside, by definition: lists of outcomes, dictionaries of replacements."""

from __future__ import annotations

WINDOW, KEPT, ANCHOR, OUTCOMES, RECENT, FEWEST = 1 << 16, 4, 2, 31, 8, 2


class Alignment:
    """A place, the outcomes of its predictions (oldest first) and what was replaced by what (newest last)."""

    def __init__(self, place, matched):
        self.place, self.outcomes, self.replaced = place, [True] * matched, {}

    def copy(self):
        other = Alignment(self.place, 0)
        other.outcomes, other.replaced = self.outcomes.copy(), self.replaced.copy()
        return other

    def expected(self, text):
        return self.replaced.get(text[self.place], text[self.place])

    def follow(self, text, token):
        hit = self.expected(text) == token
        if not hit and text[self.place] >= 0 and token >= 0:
            self.replaced.pop(text[self.place], None)
            self.replaced[text[self.place]] = token
            while len(self.replaced) > 3:
                del self.replaced[next(iter(self.replaced))]
        self.outcomes = [*self.outcomes, hit][-OUTCOMES:]
        while self.outcomes and not self.outcomes[0]:  # what is not behind a token that came true is not remembered
            del self.outcomes[0]
        self.place += 1

    def recent(self):
        return sum(self.outcomes[-RECENT:])

    def run(self):
        return [*self.outcomes[::-1], False].index(False)

    def outlived(self):
        return False in self.outcomes

    def worth(self):
        return self.recent(), sum(self.outcomes)


class NaiveAlignments:
    number = 9

    def __init__(self):
        self.text, self.kept = [], [None] * KEPT

    def extend(self, tokens, generated):
        if not generated:
            self.kept = [None] * KEPT
        for i, token in enumerate(tokens):
            if generated:
                for k, alignment in enumerate(self.kept):
                    if alignment:
                        alignment.follow(self.text, token)
                        if alignment.recent() < FEWEST:
                            self.kept[k] = None
            self.text.append(token)
            if generated or i == len(tokens) - 1:
                self._anchor()
        outlived = [k for k in range(KEPT) if self.kept[k] and self.kept[k].outlived()]
        best = max(outlived, key=lambda k: (self.kept[k].worth(), -k), default=0)
        self.kept[0], self.kept[best] = self.kept[best], self.kept[0]

    def _anchor(self):
        """Follow the newest earlier place behind the newest tokens, instead of the worst that is followed."""
        end, newest = len(self.text), self.text[-ANCHOR:]
        earlier = [place for place in range(ANCHOR, end) if self.text[place - ANCHOR : place] == newest]
        if not earlier or end - earlier[-1] > WINDOW - OUTCOMES or any(a and a.place == earlier[-1] for a in self.kept):
            return
        place, matched = earlier[-1], ANCHOR
        while matched < min(OUTCOMES, place) and self.text[place - 1 - matched] == self.text[end - 1 - matched]:
            matched += 1
        worst = min(range(KEPT), key=lambda k: (self.kept[k].worth() if self.kept[k] else (0, 0), k))
        self.kept[worst] = Alignment(place, matched)

    def levels(self, text):
        """What the best alignment says behind a draft."""
        if not self.kept[0] or not self.kept[0].outlived():
            return
        best = self.kept[0].copy()
        for token in text[len(self.text) :]:
            if best.place >= len(self.text) or best.expected(self.text) != token:
                return
            best.follow(self.text, token)
        if best.place >= len(self.text):
            return
        said, token = self.text[best.place], best.expected(self.text)
        if token < 0 or (said not in best.replaced and best.recent() == RECENT):
            return
        differed = RECENT - best.recent()
        kinds = (4, 6, 9) if said in best.replaced else (1, 2, 3)
        yield best.recent(), best.run() + 1, kinds[(differed > 1) + (differed > 3)], [(token, 1.0)], None
