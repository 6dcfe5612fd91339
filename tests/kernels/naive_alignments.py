"""Which earlier places the newest tokens run beside, by definition: lists of outcomes, dictionaries of edits."""

WINDOW, KEPT, ANCHOR, OUTCOMES, RECENT, FEWEST = 1 << 16, 4, 2, 24, 8, 2
REACH, LONGEST, FARTHEST = 24, 16, WINDOW - 64
MORE, PASSED, ID = 7, 31, (1 << 24) - 1


class Alignment:
    """A place, the outcomes of its predictions (oldest first), its edits {old: (new, more, passed)} (newest last)."""

    def __init__(self, place, matched):
        self.place, self.outcomes, self.edits = place, [True] * matched, {}
        self.same, self.coming = min(matched, RECENT), 0
        self.broke = self.since = None

    def copy(self):
        other = Alignment(self.place, 0)
        other.outcomes, other.edits = self.outcomes.copy(), self.edits.copy()
        other.same, other.coming = self.same, self.coming
        return other

    def edited(self, text):
        return text[self.place] in self.edits

    def expected(self, text):
        return self.edits[text[self.place]][0] if self.edited(text) else text[self.place]

    def pass_expected(self, text):
        """Go on behind the expected token."""
        self.outcomes = [*self.outcomes, True][-OUTCOMES:]
        if self.edited(text):
            _, self.coming, passed = self.edits[text[self.place]]
            self.place, self.same = self.place + passed, 0
        else:
            self.place, self.same = self.place + 1, min(self.same + 1, RECENT)

    def follow(self, text, token):
        if self.broke is not None:
            self.since += 1
        if self.coming:
            self.coming -= 1
            return
        if self.place >= len(text):
            self.outcomes = []
            return
        old = text[self.place]
        if self.expected(text) == token:
            edited = self.edited(text)
            self.broke, self.since = (self.place, 1) if edited else (None, None)
            self.pass_expected(text)
            if edited:
                self.edits[old] = self.edits.pop(old)
            return
        if self.broke is None or self.since > LONGEST:
            self.broke, self.since = self.place, 1
            self.edits.pop(old, None)
            self.edits[old if old >= 0 and 0 <= token <= ID else ("unknown", len(text))] = (token, 0, 1)
            while len(self.edits) > 3:
                del self.edits[next(iter(self.edits))]
        self.outcomes = [*self.outcomes, False][-OUTCOMES:]
        while self.outcomes and not self.outcomes[0]:  # what is not behind a token that came true is not remembered
            del self.outcomes[0]
        self.same = 0
        self.look_for(text, token)

    def look_for(self, text, token):
        found = [place for place in range(self.broke, min(self.broke + REACH, len(text))) if text[place] == token]
        self.place = found[0] + 1 if found else self.place + 1
        more, passed = self.since - 1, self.place - self.broke
        if found and more and found[0] > self.broke:
            more, passed = more - 1, passed - 1
        if more > MORE or passed > PASSED:
            more, passed = 0, 1
        newest = next(reversed(self.edits))
        self.edits[newest] = (self.edits[newest][0], more, passed)

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
        return self.kept[k] and not self.kept[k].coming and self.kept[k].place == place

    def levels(self, text):
        """What the best alignment says behind a draft."""
        if not self.kept[0] or not self.kept[0].outlived():
            return
        best = self.kept[0].copy()
        for token in text[len(self.text) :]:
            if best.coming:
                best.coming -= 1
                continue
            if best.place >= len(self.text) or best.expected(self.text) != token:
                return
            best.pass_expected(self.text)
        if best.coming or best.place >= len(self.text):
            return
        token, edited = best.expected(self.text), best.edited(self.text)
        if token < 0 or (not edited and best.same == RECENT):
            return
        differed = RECENT - best.recent()
        kinds = (4, 6, 9) if edited else (1, 2, 3)
        yield best.recent(), best.run() + 1, kinds[(differed > 1) + (differed > 3)], [(token, 1.0)], None
