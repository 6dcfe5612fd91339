"""Which earlier places the newest tokens run beside, by definition: lists of outcomes."""

from __future__ import annotations

WINDOW, KEPT, ANCHOR, OUTCOMES, RECENT, FEWEST = 1 << 16, 4, 2, 24, 8, 2
REACH, LONGEST, FARTHEST = 24, 16, WINDOW - 64


class Alignment:
    """A place, the outcomes of its predictions (oldest first), tokens since the text differed."""

    def __init__(self, place, matched):
        self.place, self.outcomes = place, [True] * matched
        self.same = min(matched, RECENT)
        self.broke = self.since = None

    def copy(self):
        other = Alignment(self.place, 0)
        other.outcomes, other.same = self.outcomes.copy(), self.same
        return other

    def pass_expected(self):
        """Go on behind the expected token."""
        self.outcomes = [*self.outcomes, True][-OUTCOMES:]
        self.place, self.same = self.place + 1, min(self.same + 1, RECENT)

    def follow(self, text, token):
        if self.broke is not None:
            self.since += 1
        if self.place >= len(text):
            self.outcomes = []
        elif text[self.place] == token:
            self.broke = self.since = None
            self.pass_expected()
        else:
            self.differ(text, token)

    def differ(self, text, token):
        if self.broke is None or self.since > LONGEST:
            self.broke, self.since = self.place, 1
        self.outcomes = [*self.outcomes, False][-OUTCOMES:]
        while self.outcomes and not self.outcomes[0]:  # what is not behind a token that came true is not remembered
            del self.outcomes[0]
        self.same = 0
        found = [place for place in range(self.broke, min(self.broke + REACH, len(text))) if text[place] == token]
        self.place = found[0] + 1 if found else self.place + 1

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
        if not earlier or end - earlier[-1] > FARTHEST or any(self._at(k, earlier[-1]) for k in range(KEPT)):
            return
        place, matched = earlier[-1], ANCHOR
        while matched < min(OUTCOMES, place) and self.text[place - 1 - matched] == self.text[end - 1 - matched]:
            matched += 1
        worst = min(range(KEPT), key=lambda k: (self.kept[k].worth() if self.kept[k] else (0, 0), k))
        self.kept[worst] = Alignment(place, matched)

    def _at(self, k, place):
        return self.kept[k] and self.kept[k].place == place

    def levels(self, text):
        """What the best alignment says behind a draft."""
        if not self.kept[0] or not self.kept[0].outlived():
            return
        best = self.kept[0].copy()
        for token in text[len(self.text) :]:
            if best.place >= len(self.text) or self.text[best.place] != token:
                return
            best.pass_expected()
        if best.place >= len(self.text) or self.text[best.place] < 0 or best.same == RECENT:
            return
        differed = RECENT - best.recent()
        distinct = 1 + (differed > 1) + (differed > 3)
        yield best.recent(), best.run() + 1, distinct, [(self.text[best.place], 1.0)], None
