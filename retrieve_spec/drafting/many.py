"""Rows of many requests: what all of them draft, chains by one compiled call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels import many as kernels
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

NOTHING = DraftTree()
NO_COST = np.empty(0, np.float32)
NO_HOPE = 0, 0.0
"""What a draft would begin with where there is none: no token, and how probable that is."""
ANYTHING = 1 << 31
"""More tokens than any model has."""
_NO_TOKENS = np.empty(0, np.int32)
_LINE, _NOWHERE = np.arange(-1, MAX_NODES + 1, dtype=np.int32), np.full(MAX_NODES, -1, np.int64)
"""Parents of a chain, which are its depths but for two, and origins of nodes that have none."""
_FIRST_SAID = 1024


class Row(MixtureDrafter):
    """The drafter of one of many requests; those of one session are asked together.

    It drafts what a `MixtureDrafter` without recycling does. Given tokens are followed when rows are next asked.

    Attributes
    ----------
    hoped
        The token that a draft would begin with, made or not, and how probable that is (0 where there is none): as of
        the last time that it was asked with a cost, or for a tree.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        session: SessionMemory | None,
        datastores: Many[Datastore],
        calibration: Calibration,
    ) -> None:
        super().__init__(config, recycling=False, session=session, datastores=datastores, calibration=calibration)
        self.record: NDArray[np.int64] = np.zeros(kernels.RECORD, np.int64)
        words = self.record.view(np.int32)
        self._end = words[2 * kernels.END : 2 * kernels.IDS]
        self._ids = words[2 * kernels.IDS : 2 * kernels.LOG_P]
        self._log_p = self.record[kernels.LOG_P : kernels.SOURCE].view(np.float32)
        self._source = self.record[kernels.SOURCE :].view(np.uint8)
        self._said: NDArray[np.int32] = np.empty(_FIRST_SAID, np.int32)
        self.hoped = NO_HOPE

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: see `MixtureDrafter.start`."""
        super().start(prompt_ids, prediction_ids)
        self._sync()  # a long prompt's automaton has moved
        record = self.record
        record[kernels.REQUEST] = _address(self._request.words)
        record[kernels.LENGTH] = len(prompt_ids)
        record[kernels.NUM_SAID : kernels.END] = 0
        self._hold(_FIRST_SAID)
        self._end[:] = np.pad(prompt_ids[-kernels.COMPARED :], (kernels.COMPARED, 0))[-kernels.COMPARED :]

    def _hold(self, room: int) -> None:
        """Have room for so many generated tokens."""
        if room > len(self._said):
            self._said = np.concatenate([self.said, np.empty(room - self.record[kernels.NUM_SAID], np.int32)])
        self.record[kernels.SAID], self.record[kernels.SAID_ROOM] = _address(self._said), len(self._said)

    @property
    def said(self) -> NDArray[np.int32]:
        """(n,) int32, what was generated and followed."""
        return self._said[: self.record[kernels.NUM_SAID]]

    def hear(self, emitted: NDArray[np.int32], tree: DraftTree = NOTHING, accepted: int = 0) -> None:
        """Be given the next tokens (n,) int32, of which the first came as the verified `tree` said.

        Their learning waits until rows are next asked, and so until no pass of a model waits for it.
        """
        if len(emitted):
            self._fresh.append(emitted)
        if len(tree):
            self.calibration.drafted(tree.expected_accepted, accepted, False)

    @property
    def length(self) -> int:
        """Tokens of the text, those included that are not followed yet."""
        return int(self.record[kernels.LENGTH]) + sum(map(len, self._fresh))

    @property
    def unheard(self) -> bool:
        """Whether it was given something that it has not followed."""
        return bool(self._fresh)

    def taken(self) -> NDArray[np.int32]:
        """What it was given and has not followed yet, (n,) int32."""
        if len(self._fresh) > 1:
            self._fresh = [np.concatenate(self._fresh)]
        return self._fresh[0] if self._fresh else _NO_TOKENS

    def extended(self) -> None:
        """Take into the text's automaton what it had no room for when that was followed."""
        room, told = int(self.record[kernels.ROOM]), int(self.record[kernels.GIVEN])
        if room < told:
            self.context.extend(self.said[len(self.said) - told + room :])
            self._sync()
        self.record[kernels.ROOM] = self.record[kernels.GIVEN] = 0

    def chain(self) -> DraftTree:
        """The branch that it drafted, and no longer waits to see verified."""
        n = int(self.record[kernels.DRAFTED])
        self.hoped = (int(self._ids[0]), math.exp(self._log_p[0])) if self.record[kernels.HOPED] else NO_HOPE
        self.record[kernels.DRAFTED] = self.record[kernels.HOPED] = 0
        ids, log_p, source = self._ids[:n].copy(), self._log_p[:n].copy(), self._source[:n].copy()
        return DraftTree(ids, _LINE[:n], _LINE[2 : n + 2], log_p, source, _NOWHERE[:n]) if n else NOTHING

    def leave(self, keep: bool = True) -> None:
        """End the request, and forget its text; unless it is to `keep`, nobody learns what was generated.

        Parameters
        ----------
        keep
            Let the session and the phrases learn from it.
        """
        follow_all([self])
        self._history = [self.said.copy()] if keep else []
        self.finish()
        self.start(_NO_TOKENS)


class TakenBack(Exception):
    """A row's text does not go on from what its request was given.

    Attributes
    ----------
    row
        Its number.
    """

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Seats:
    """Rows of an engine's steps: all that a compiled call needs of them, made once for as long as they stay.

    Parameters
    ----------
    rows
        Whom to ask; all have one session.
    texts
        Address of the first token (int32) of each one's text.
    places
        Which of the engine's lengths is that of each.
    longest
        Tokens that each one's text may have at most.
    """

    def __init__(self, rows: Many[Row], texts: Many[int], places: Many[int], longest: Many[int]) -> None:
        self.rows = rows
        addresses = [_address(row.record) for row in rows]
        self._calls = np.array([addresses, texts, places, longest], np.int64).reshape(kernels.CALL, -1).T.copy()
        self.out: NDArray[np.int32] = np.empty(len(rows) + MAX_NODES, np.int32)
        self._session = rows[0]._shared if rows else None
        self._min_p = rows[0].config.min_path_probability if rows else 1.0

    def step(self, plan: NDArray[np.int64], lengths: NDArray[np.int32], cost: NDArray[np.float32]) -> int:
        """Follow what the texts say, learn from it, and draft; returns how many nodes (`kernels.many.step_chains`).

        Raises
        ------
        TakenBack
            A text does not go on from what was followed; nothing was done.
        """
        if self._session is None:
            return self._call(plan, lengths, cost)
        with self._session:  # kept as it is while kernels read it
            for row in self.rows:
                row._sync()
            return self._call(plan, lengths, cost)

    def _call(self, plan: NDArray[np.int64], lengths: NDArray[np.int32], cost: NDArray[np.float32]) -> int:
        """Call the kernel until it has found room for all that came."""
        while (drafted := kernels.step_chains(plan, self._calls, lengths, self._min_p, cost, self.out)) < 0:
            self._make_room(drafted, int(plan[kernels.WHO]), lengths)
        return int(drafted)

    def _make_room(self, failed: int, who: int, lengths: NDArray[np.int32]) -> None:
        """Make room where a call has found none; `TakenBack` where that is not what was in the way."""
        if failed == kernels.ELSEWHERE:
            raise TakenBack(who)
        if failed == kernels.UNHELD:
            more = int(lengths[self._calls[who, kernels.PLACE]] - self.rows[who].record[kernels.LENGTH])
            self.rows[who]._hold(2 * len(self.rows[who].said) + more)
        else:
            for row in self.rows:
                row.extended()

    def pass_by(self, plan: NDArray[np.int64]) -> None:
        """Count a step without a look: what it verified is judged at the next one."""
        for row in self.rows:
            row.record[kernels.STEP] += row.record[kernels.STEP] == plan[kernels.NOW] - 1
        plan[kernels.NOW] += 1
        plan[kernels.STEPS] += 1
        plan[kernels.ROWS] += len(self.rows)

    def drafts(self, drafted: int) -> list[list[int]]:
        """The tokens drafted for each row, as many in all."""
        count = len(self.rows)
        found: list[int] = self.out[: count + drafted].tolist()
        if count == 1:
            return [found[1:]]
        drafts, begin = [], count
        for n in found[:count]:
            drafts.append(found[begin : begin + n])
            begin += n
        return drafts


def plan_of(deepest: int, vocabulary: int | None) -> NDArray[np.int64]:
    """(PLAN,) int64 for steps whose texts an engine keeps: the longest draft, and how many tokens the model has."""
    plan = np.zeros(kernels.PLAN, np.int64)
    plan[kernels.DEEPEST], plan[kernels.VOCABULARY] = deepest, ANYTHING if vocabulary is None else vocabulary
    return plan


def follow_all(rows: Many[Row]) -> None:
    """Let rows of one session take in what they were given since the last time."""
    behind = [row for row in rows if row._fresh]
    if behind:
        _told(behind, plan_of(-1, None), [0] * len(behind), NO_COST)


def propose_all(
    rows: Many[Row],
    nodes: Many[int],
    depths: Many[int],
    cost: NDArray[np.float32] | None = None,
    vocabulary: int | None = None,
) -> list[DraftTree]:
    """Draft a branch for each text; all rows have one session.

    Parameters
    ----------
    rows
        Whom to ask. What they were given is followed first.
    nodes, depths
        Nodes and depth at most, of each.
    cost
        (MAX_NODES + 1,) float32 seconds of a pass over all rows and 0 … n nodes, or None to draft all there may be.
    vocabulary
        Tokens of the model, if others may not be drafted.
    """
    if not rows:
        return []
    deepest = min(MAX_NODES, rows[0].config.max_depth)
    most = [max(min(n, d, deepest), 0) for n, d in zip(nodes, depths, strict=True)]
    _told(rows, plan_of(deepest, vocabulary), most, NO_COST if cost is None else cost)
    return [row.chain() for row in rows]


def _told(rows: Many[Row], plan: NDArray[np.int64], most: Many[int], cost: NDArray[np.float32]) -> None:
    """Follow what rows were given, not what an engine keeps, and draft so many nodes of each at most."""
    plan[kernels.NOW] = -1
    known = [int(row.record[kernels.LENGTH]) for row in rows]
    texts = [row.taken() for row in rows]
    lengths = np.array([at + len(text) for at, text in zip(known, texts, strict=True)], np.int32)
    begins = [_address(text) - 4 * at for at, text in zip(known, texts, strict=True)]
    longest = (lengths + np.array(most) + 1).tolist()
    Seats(rows, begins, range(len(rows)), longest).step(plan, lengths, cost)
    for row in rows:
        row._fresh = []


def trees_of(
    rows: Many[Row], nodes: Many[int], depths: Many[int], cost: NDArray[np.float32] | None = None
) -> list[DraftTree]:
    """Draft a tree for each text; parameters are those of `propose_all`."""
    follow_all(rows)
    trees = []
    for row, most, deepest in zip(rows, nodes, depths, strict=True):
        limit, depth = max(min(most, MAX_NODES), 0), max(min(deepest, MAX_NODES, row.config.max_depth), 0)
        if not (limit and depth):
            trees.append(NOTHING)
            row.hoped = NO_HOPE
            continue
        with contextlib.nullcontext() if row._shared is None else row._shared:
            row._sync()
            _, _, block = row._kernel(NO_COST if cost is None else cost[: limit + 1], limit, depth)
        trees.append(DraftTree.of_block(block))
        row.hoped = row._take_hope()
    return trees


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])
