"""What the suffix automaton answers, by definition: every context of every document in a dict."""

from collections import defaultdict

BOUNDARY = -1
COUNTED = 32


class NaiveText:
    """Documents, one token at a time; the last one is still being written.

    Exact: every context counts every token that follows. Else the longest one (of at most `COUNTED` tokens) that knows
    the token counts it, with those that ended at the same places only; shorter ones just take it for the most recent.
    """

    def __init__(self, exact=True):
        self.exact = exact
        self.documents = [[]]
        self.counts = defaultdict(dict)  # context → {token: count}, most recent continuation last
        self.ends = defaultdict(set)  # context → {(document, end)}
        self._end()

    def append(self, token):
        if token == BOUNDARY:
            self.documents.append([])
            return self._end()
        document = self.documents[-1]
        known = None  # where the longest context that knows the token has ended
        for start in range(len(document) + 1):
            context = tuple(document[start:])
            counts = self.counts[context]
            more = 1
            if token in counts and len(context) <= COUNTED and not self.exact:
                known = known or self.ends[context]
                more = int(self.ends[context] == known)
            counts[token] = counts.pop(token, 0) + more
        document.append(token)
        return self._end()

    def extend(self, tokens):
        for token in tokens:
            self.append(token)

    def _end(self):
        document = self.documents[-1]
        for start in range(len(document) + 1):
            self.ends[tuple(document[start:])].add((len(self.documents) - 1, len(document)))

    def contexts(self):
        """Every string that occurs inside a document, the empty one included."""
        return list(self.ends)

    def continuations(self, context):
        """[(token, count)], most recent first; where counts are not exact, the others by count."""
        found = list(self.counts.get(tuple(context), {}).items())[::-1]
        return found if self.exact else found[:1] + sorted(found[1:], key=lambda item: -item[1])

    def longest_suffix(self, text):
        """Length of the longest end of `text` that occurs inside a document."""
        return max(n for n in range(len(text) + 1) if tuple(text[len(text) - n :]) in self.ends)

    def levels(self, text):
        """Ends of `text` that occur and go on, longest first, one per set of places where they end."""
        found, places = [], None
        for n in range(self.longest_suffix(text), -1, -1):
            context = tuple(text[len(text) - n :])
            if self.ends[context] != places and context in self.counts:
                found.append((n, self.continuations(context)))
            places = self.ends[context]
        return found

    def states(self):
        """Number of distinct sets of ending places: the states of the smallest automaton that knows them."""
        return len({frozenset(places) for places in self.ends.values()})
