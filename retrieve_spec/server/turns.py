"""Scheduling of passes: which of the tasks under way take part in the model's next one, and which may begin.

Whoever types waits for a whole answer, and on a processor a pass takes longer with every row. So of those at a cursor
only as many are under way together as are done sooner on average than one behind the other, by what passes have taken.
The others wait in line, where a newer key replaces them at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retrieve_spec.config import MAX_NODES
from retrieve_spec.server.jobs import Job

_TYPES_ON_S = 2.0
"""Seconds after a key within which the next one is waited for."""
_SHORT = 64
"""Tokens of a chat's prompt that are read in a pass meanwhile: the next key may come during any pass."""
_FEW_NODES = 16
"""Nodes that a chat drafts in a pass meanwhile."""
_MOST_TYPING = 16
"""Completions at a cursor that take part in one pass."""
_PAUSE_S = 1.5
"""Seconds without a next key after which somebody has paused, and comes first."""
_MEMORY = 0.995
"""How much of what a pass took is still believed a pass later."""
_KNOWN = 4.0
"""Passes over a number of texts that tell what such passes take."""


class Paces:
    """Seconds that a token of each text takes in passes over so many texts, by passes as they happen."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float, float]] = {}  # by texts: passes, seconds, tokens of each

    def note(self, texts: int, seconds: float, tokens: int) -> None:
        """Learn from a pass that brought `tokens` to so many texts together; older ones count less and less."""
        self._seen = {n: (p * _MEMORY, s * _MEMORY, t * _MEMORY) for n, (p, s, t) in self._seen.items()}
        passes, before, brought = self._seen.get(texts, (0.0, 0.0, 0.0))
        self._seen[texts] = passes + 1.0, before + seconds, brought + tokens / texts

    def of(self, texts: int) -> float | None:
        """Seconds per token, None where too few passes tell."""
        passes, seconds, tokens = self._seen.get(texts, (0.0, 0.0, 0.0))
        return seconds / tokens if passes >= _KNOWN and tokens else None

    def together(self) -> int:
        """Texts that go side by side: two, and more that are done sooner on average so than one behind the other.

        A key that comes while another answer is under way finds a place. Of n texts behind one another the middle one
        is done after (n + 1) / 2 times what one takes. A number that is not known is tried.
        """
        alone, texts = self.of(1), 2
        if alone is None:
            return 1
        while texts < _MOST_TYPING:
            pace = self.of(texts + 1)
            if pace is None:
                return texts + 1
            if pace > alone * (texts + 2) / 2:
                return texts
            texts += 1
        return texts


class Turns:
    """Decides who takes part in the next pass."""

    def __init__(self, chunk: int, clock: Callable[[], float]) -> None:
        self._chunk, self._clock = chunk, clock
        self._read_s = 0.0  # how much longer prompts were read than texts decoded, while both were to be done
        self._token_s = 0.0  # seconds that a token of a prompt takes to read
        self._paces = Paces()
        self._typed_at = -_TYPES_ON_S

    def typed(self) -> None:
        """Note that a key was pressed."""
        self._typed_at = self._clock()

    def has_room(self, under_way: Sequence[Job]) -> bool:
        """Whether one more completion at a cursor may begin; those whose long prompts are read hold nobody up."""
        typing = [job for job in under_way if job.task.rank == 0]
        decoding = sum(not job.begun.is_reading for job in typing)
        return decoding < self._paces.together() and len(typing) < _MOST_TYPING

    def order(self, job: Job) -> tuple[int, int, float]:
        """What waiting tasks are begun in the order of, least first.

        Somebody who has just pressed a key comes first: the others will soon press the next one. Unless they pause, and
        look at the screen: then who has waited longest comes before all.
        """
        if job.task.rank > 0:
            return job.task.rank, 0, job.submitted
        pauses = self._clock() - job.submitted > _PAUSE_S
        return (0, 0, job.submitted) if pauses else (0, 1, -job.submitted)

    def next(self, under_way: Sequence[Job]) -> list[Job]:
        """Who takes part in the next pass.

        All of the first rank that have read their prompts. Of the others as many as have a piece of a prompt together,
        but only as often as leaves to those who have read theirs as much time: what is begun is soon done.
        """
        first = min(job.task.rank for job in under_way)
        mine = [job for job in under_way if job.task.rank == first]
        turn = [job for job in mine if not job.begun.is_reading]
        reading = sorted((job for job in mine if job.begun.is_reading), key=self._read_by)
        if not (turn and reading):
            self._read_s = 0.0
        for job in turn:
            if first > 0 and job.begun.text is not None:
                job.begun.text.nodes = _FEW_NODES if self._somebody_types else MAX_NODES
        if turn and self._read_s > 0.0:
            return turn
        left = piece = self.piece(first)
        for job in reading:
            if left > 0:
                turn.append(job)
                if job.begun.text is not None:
                    job.begun.text.piece = piece
                left -= min(left, unread(job))
        return turn

    @property
    def _somebody_types(self) -> bool:
        return self._clock() - self._typed_at < _TYPES_ON_S

    def piece(self, rank: int) -> int:
        """Tokens of prompts of a rank that are read in the next pass."""
        return min(_SHORT, self._chunk) if rank > 0 and self._somebody_types else self._chunk

    def _read_by(self, job: Job) -> float:
        """The first to read is who came first, later by as long as reading takes: short ones pass, but not for ever."""
        return job.submitted + unread(job) * self._token_s

    def note(self, turn: Sequence[Job], read: int, said: int, seconds: float) -> None:
        """Learn from a pass over some tasks, which had so many tokens to read and said so many."""
        self._read_s += seconds if read else -seconds
        if read >= (piece := self.piece(turn[0].task.rank)):
            self._token_s += (seconds / piece - self._token_s) / 8
        if not read and said and turn[0].task.rank == 0:
            self._paces.note(len(turn), seconds, said)


def unread(job: Job) -> int:
    """Tokens of a prompt that are still to be read."""
    if job.begun.text is None:
        return len(job.task.prompt_ids)
    return int(job.begun.text.unread)
