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
from retrieve_spec.drafting.mixture import NO_HOPE, MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels import many as kernels
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

NOTHING = DraftTree()
_NO_COST = np.empty(0, np.float32)
_NO_TOKENS = np.empty(0, np.int32)
_LINE, _NOWHERE = np.arange(-1, MAX_NODES + 1, dtype=np.int32), np.full(MAX_NODES, -1, np.int64)
"""Parents of a chain, which are its depths but for two, and origins of nodes that have none."""


class Row(MixtureDrafter):
    """The drafter of one of many requests; those of one calibration and one session are asked together.

    It drafts what a `MixtureDrafter` without recycling does. Given tokens are followed when rows are next asked.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        session: SessionMemory | None,
        datastores: Many[Datastore],
        calibration: Calibration,
    ) -> None:
        super().__init__(config, recycling=False, session=session, datastores=datastores, calibration=calibration)
        self._address = 0, 0, 0
        self._address_of: tuple[object, int] = None, 0

    @property
    def hoped(self) -> tuple[int, float]:
        """The token that a draft would begin with, made or not, and how probable that is (0 where there is none): as of
        the last time that it was asked with a cost."""
        return self._hoped

    def hear(self, emitted: NDArray[np.int32], tree: DraftTree = NOTHING, accepted: int = 0) -> None:
        """Be given the next tokens (n,) int32, of which the first came as the verified `tree` said.

        Their learning waits until rows are next asked, and so until no pass of a model waits for it.
        """
        if len(emitted):
            self._fresh.append(emitted)
        if len(tree):
            self.calibration.drafted(tree.expected_accepted, accepted, False)

    def taken(self) -> NDArray[np.int32]:
        """What it was given and has not followed yet, (n,) int32."""
        if len(self._fresh) == 1:
            return self._fresh[0]
        return np.concatenate(self._fresh) if self._fresh else _NO_TOKENS

    def followed(self, text: NDArray[np.int32], room: int) -> None:
        """Be told that what it was given is followed, for so much of which there was room in the text's automaton."""
        self._fresh = []
        self._history.append(text)
        if room < len(text):
            self.context.extend(text[room:])

    def address(self) -> tuple[int, int, int]:
        """Address of its table, how many sources that has, address of the request: for a kernel that is called now."""
        known = self._table, self.context.moved
        if self._shared is not None or known[1] != self._address_of[1] or known[0] is not self._address_of[0]:
            self._sync()
            table, request = self._table.words, self._request.words
            self._address = table.ctypes.data, len(table), request.ctypes.data
            self._address_of = known
        return self._address

    def leave(self, keep: bool = True) -> None:
        """End the request, and forget its text; unless it is to `keep`, nobody learns what was generated.

        Parameters
        ----------
        keep
            Let the session and the phrases learn from it.
        """
        self._catch_up()
        if not keep:
            self._history = []
        self.finish()
        self.start(np.empty(0, np.int32))


def follow_all(rows: Many[Row]) -> None:
    """Let rows of one calibration and one session take in what they were given since the last time."""
    behind = [row for row in rows if row._fresh]
    if behind:
        with _at_rest(behind[0]):
            _chains(behind, [0] * len(behind), _NO_COST)


def propose_all(
    rows: Many[Row], nodes: Many[int], depths: Many[int], cost: NDArray[np.float32] | None = None, chains: bool = True
) -> list[DraftTree]:
    """Draft what follows each text; all rows have one calibration and one session.

    Parameters
    ----------
    rows
        Whom to ask. What they were given is followed first.
    nodes, depths
        Nodes and depth at most, of each.
    cost
        (MAX_NODES + 1,) float32 seconds of a pass over 0 … n nodes of one row, or None to fill the budgets.
    chains
        Draft one branch each.
    """
    if not rows:
        return []
    deepest = min(MAX_NODES, rows[0].config.max_depth)
    if chains:
        lengths = [max(min(n, d, deepest), 0) for n, d in zip(nodes, depths, strict=True)]
        with _at_rest(rows[0]):
            return _chains(rows, lengths, _NO_COST if cost is None else cost[: max(lengths) + 1])
    limits = [(max(min(n, MAX_NODES), 0), max(min(d, deepest), 0)) for n, d in zip(nodes, depths, strict=True)]
    follow_all(rows)
    with _at_rest(rows[0]):
        return _trees(rows, limits, _NO_COST if cost is None else cost[: max(n for n, _ in limits) + 1])


def _chains(rows: Many[Row], most: Many[int], cost: NDArray[np.float32]) -> list[DraftTree]:
    """Follow what rows were given, and draft a branch of so many nodes at most for each."""
    texts = [row.taken() for row in rows]
    asked = np.array(
        [(*row.address(), len(text), n, 0) for row, text, n in zip(rows, texts, most, strict=True)], np.int64
    )
    shape = len(rows), max(most)
    ids, log_p, source = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape, np.uint8)
    calibration, least = rows[0].calibration, rows[0].config.min_path_probability
    whole = kernels.step_chains(
        asked,
        calibration.cells,
        calibration.scale,
        least,
        texts[0] if len(texts) == 1 else np.concatenate(texts),
        cost,
        calibration.promise(False),
        ids,
        log_p,
        source,
    )
    counts = asked[:, kernels.NODES].tolist()
    for row, text, room in zip(rows, texts, asked[:, kernels.ROOM].tolist(), strict=True):
        if len(text):
            row.followed(text, room)
    if not whole:  # now there is room
        return _chains(rows, most, cost)
    if len(cost):
        for i, (row, n) in enumerate(zip(rows, most, strict=True)):
            row._hoped = (int(ids[i, 0]), math.exp(log_p[i, 0])) if n else NO_HOPE
    return [
        DraftTree(ids[i, :n], _LINE[:n], _LINE[2 : n + 2], log_p[i, :n], source[i, :n], _NOWHERE[:n]) if n else NOTHING
        for i, n in enumerate(counts)
    ]


def _trees(rows: Many[Row], limits: Many[tuple[int, int]], cost: NDArray[np.float32]) -> list[DraftTree]:
    trees = []
    for row, (nodes, depth) in zip(rows, limits, strict=True):
        row._sync()
        if not (nodes and depth):
            trees.append(NOTHING)
            row._hoped = NO_HOPE
            continue
        _, _, first, first_p, block = row._kernel(cost, nodes, depth)
        trees.append(DraftTree.of_block(block))
        row._hoped = first, first_p
    return trees


def _at_rest(row: Row) -> contextlib.AbstractContextManager[object]:
    """A row's session, if there is one, kept as it is while kernels read it."""
    return contextlib.nullcontext() if row._shared is None else row._shared
