"""The scheduler: in what order texts begin, whether there is room for one more, and which of them share the next pass.

Each text has a `Turn`, made by whoever asks for it: its rank, what it needs, and whether anybody still wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, TypeVar

from retrieve_spec.config import MAX_NODES

TYPING, ORDINARY, AHEAD = 0, 1, 2
"""Ranks: text at somebody's cursor, other text, prompts that are only read ahead."""
_PAUSE_S = 1.5
"""Seconds without a next key after which somebody has paused, and comes first."""
_TYPES_ON_S = 2.0
"""Seconds after a key within which the next one is waited for."""
_MAX_TYPING = 16
"""Texts at a cursor that are under way at once: a pass over many costs each of them less."""
_SHORT_PIECE, _FEW_NODES = 64, 16
"""Prompt tokens that other texts read in a pass in that time, and nodes they draft: the key may come in any pass."""


@dataclass(slots=True, eq=False)
class Turn:
    """What the scheduler knows of one text.

    Attributes
    ----------
    rank
        Texts of the lowest rank have every pass to themselves; the others wait.
    submitted
        When it was asked for, by the scheduler's clock.
    cache_bytes
        Memory that its keys and values take.
    deadline_s, worked_s
        Seconds of work after which it ends with what there is (None: none), and how many it has had.
    most_piece, most_nodes
        Prompt tokens to read (0: no limit) and nodes to draft in the next pass, at most; set by the scheduler.
    has_begun
        Whether the server's queue has let it begin.
    cancelled
        Whether nobody wants more of it: no pass after the current one includes it. Any thread may set it.
    """

    rank: int = ORDINARY
    submitted: float = 0.0
    cache_bytes: int = 0
    deadline_s: float | None = None
    worked_s: float = 0.0
    most_piece: int = 0
    most_nodes: int = MAX_NODES
    has_begun: bool = False
    cancelled: bool = False

    @property
    def is_past_deadline(self) -> bool:
        """Whether it has had more seconds of work than it may."""
        return self.deadline_s is not None and self.worked_s > self.deadline_s


class HasTurn(Protocol):
    """Something that is scheduled."""

    @property
    def turn(self) -> Turn:
        """What the scheduler knows of it."""


T = TypeVar("T", bound=HasTurn)


class Scheduler:
    """Decides which texts begin, and which of those that have begun share the next pass.

    Parameters
    ----------
    max_running
        Texts of one rank that may be under way at once, those at a cursor aside.
    cache_bytes
        Memory that the keys and values of texts under way may take, where there are several of one rank.
    prefill_chunk
        Prompt tokens of each text per pass; 0 for no limit.
    clock
        Seconds, monotonic; a simulation gives its own.
    """

    def __init__(
        self,
        *,
        max_running: int = 1 << 31,
        cache_bytes: int = 1 << 62,
        prefill_chunk: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.clock = clock
        self._max_running, self._cache_bytes, self._prefill_chunk = max_running, cache_bytes, prefill_chunk
        self._last_key = -float("inf")

    def submit(self, turn: Turn) -> None:
        """Note that a text has been asked for."""
        turn.submitted = self.clock()
        if turn.rank == TYPING:
            self._last_key = turn.submitted

    def in_order(self, waiting: Many[T]) -> list[T]:
        """Return texts in the order in which they may begin.

        Of those at a cursor, whoever has just pressed a key comes first: the others will soon press the next one.
        Unless they pause, and look at the screen: then whoever has waited longest comes before all.
        """
        now = self.clock()

        def order(text: T) -> tuple[int, int, float]:
            rank, submitted = text.turn.rank, text.turn.submitted
            just_typed = rank == TYPING and now - submitted <= _PAUSE_S
            return (rank, 1, -submitted) if just_typed else (rank, 0, submitted)

        return sorted(waiting, key=order)

    def may_begin(self, turn: Turn, running: Many[Turn]) -> bool:
        """Whether a text may begin beside those under way: none comes before it, and there is room."""
        if any(other.rank < turn.rank for other in running):
            return False
        held = [other.cache_bytes for other in running if other.rank == turn.rank]
        most = _MAX_TYPING if turn.rank == TYPING else self._max_running
        return has_room(held, turn.cache_bytes, most, self._cache_bytes)

    def next_pass(self, texts: Many[T]) -> list[T]:
        """Return the texts that share the next pass, after limiting what it may take of each."""
        chosen = of_lowest_rank(texts)
        is_short = self.clock() - self._last_key < _TYPES_ON_S
        for text in chosen:
            turn, makes_room = text.turn, is_short and text.turn.rank != TYPING
            turn.most_piece = (
                min(_SHORT_PIECE, self._prefill_chunk or _SHORT_PIECE) if makes_room else self._prefill_chunk
            )
            turn.most_nodes = _FEW_NODES if makes_room else MAX_NODES
        return chosen


def of_lowest_rank(texts: Many[T]) -> list[T]:
    """Return the texts before which no other comes."""
    lowest = min((text.turn.rank for text in texts), default=ORDINARY)
    return [text for text in texts if text.turn.rank == lowest]


def has_room(held: Many[int], needed: int, max_running: int, cache_bytes: int) -> bool:
    """Whether one more text can begin beside those whose caches take `held` bytes; the first always can."""
    return not held or (len(held) < max_running and sum(held) + needed <= cache_bytes)
