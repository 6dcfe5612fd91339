"""Rows of many requests: what all of them draft, chains by one compiled call."""

from __future__ import annotations

import contextlib
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
_NO_COST = np.empty(0, np.float32)


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

    def hear(self, emitted: NDArray[np.int32], tree: DraftTree = NOTHING, accepted: int = 0) -> None:
        """Be given the next tokens (n,) int32, of which the first came as the verified `tree` said.

        Their learning waits until rows are next asked, and so until no pass of a model waits for it.
        """
        if len(emitted):
            self._fresh.append(np.ascontiguousarray(emitted, np.int32))
        if len(tree):
            self.calibration.drafted(tree.expected_accepted, accepted, False)

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
    if not behind:
        return
    texts = [row._fresh[0] if len(row._fresh) == 1 else np.concatenate(row._fresh) for row in behind]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    first = behind[0]
    with _at_rest(first):
        appended = kernels.observe_many(
            _addresses(behind),
            first.calibration.cells,
            first.calibration.scale,
            first.config.min_path_probability,
            np.concatenate(texts),
            ends,
        )
    for row, text, room in zip(behind, texts, appended.tolist(), strict=True):
        row._fresh = []
        row._history.append(text)
        if room < len(text):
            row.context.extend(text[room:])


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
    follow_all(rows)
    deepest = min(MAX_NODES, rows[0].config.max_depth)
    limits = [(max(min(n, MAX_NODES), 0), max(min(d, deepest), 0)) for n, d in zip(nodes, depths, strict=True)]
    if chains:
        limits = [(min(limit), min(limit)) for limit in limits]
    most = max(n for n, _ in limits)
    seconds = _NO_COST if cost is None else cost[: most + 1]
    if most == 0:
        return [NOTHING] * len(rows)
    with _at_rest(rows[0]):
        return _chains(rows, limits, seconds, most) if chains else _trees(rows, limits, seconds)


def _chains(rows: Many[Row], limits: Many[tuple[int, int]], cost: NDArray[np.float32], most: int) -> list[DraftTree]:
    shape = len(rows), most
    ids, log_p, source = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape, np.uint8)
    calibration, least = rows[0].calibration, rows[0].config.min_path_probability
    counts = kernels.propose_chains(
        _addresses(rows),
        calibration.cells,
        calibration.scale,
        cost,
        np.array([n for n, _ in limits], np.int64),
        least,
        calibration.promise(False),
        ids,
        log_p,
        source,
    )
    line, nowhere = np.arange(-1, most + 1, dtype=np.int32), np.full(most, -1, np.int64)
    return [
        DraftTree(ids[i, :n], line[:n], line[2 : n + 2], log_p[i, :n], source[i, :n], nowhere[:n]) if n else NOTHING
        for i, n in enumerate(counts.tolist())
    ]


def _trees(rows: Many[Row], limits: Many[tuple[int, int]], cost: NDArray[np.float32]) -> list[DraftTree]:
    trees = []
    for row, (nodes, depth) in zip(rows, limits, strict=True):
        row._sync()
        trees.append(DraftTree(*row._kernel(cost, nodes, depth)[2:]) if nodes and depth else NOTHING)
    return trees


def _addresses(rows: Many[Row]) -> NDArray[np.int64]:
    """(r, 3) int64 as the kernels take it, of arrays that the rows hold until these return."""
    found = np.empty((len(rows), 3), np.int64)
    for i, row in enumerate(rows):
        row._sync()
        table, request = row._table.words, row._request.words
        found[i] = table.__array_interface__["data"][0], len(table), request.__array_interface__["data"][0]
    return found


def _at_rest(row: Row) -> contextlib.AbstractContextManager[object]:
    """A row's session, if there is one, kept as it is while kernels read it."""
    return contextlib.nullcontext() if row._shared is None else row._shared
