"""Batches: requests of an engine that keeps their texts, drafted for by one compiled call."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels import batch as kernels
from retrieve_spec.kernels import request
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

_FIRST_SAID = 1024


class BatchRow(MixtureDrafter):
    """A `MixtureDrafter` without recycling that can also be one of the rows of a compiled call (`Slots`)."""

    _as_with_stores = True

    def __init__(
        self,
        config: SpeculationConfig,
        session: SessionMemory | None,
        datastores: Many[Datastore],
        calibration: Calibration,
    ) -> None:
        super().__init__(config, recycling=False, session=session, datastores=datastores, calibration=calibration)
        self._said: NDArray[np.int32] = np.empty(_FIRST_SAID, np.int32)

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: see `MixtureDrafter.start`."""
        super().start(prompt_ids, prediction_ids)
        self._hold(_FIRST_SAID)

    def _hold(self, room: int) -> None:
        """Have room for so many tokens that are generated in compiled calls."""
        words = self._request.words
        if room > len(self._said):
            self._said = np.concatenate([self._said, np.empty(room - len(self._said), np.int32)])
        words[request.SAID], words[request.SAID_ROOM] = self._said.ctypes.data, len(self._said)

    def _collect(self) -> None:
        """Take over what compiled calls have kept."""
        self._history.append(self._said[: self._request.words[request.NUM_SAID]].copy())
        self._request.words[request.NUM_SAID] = 0

    def _accepted(self, verified: VerifiedPass) -> int:
        return len(verified.path)  # engines may give more than these and one

    def observe(self, verified: VerifiedPass) -> None:
        """Take tokens into the text; all that come between two drafts are learned at once."""
        self._collect()
        self._request.words[request.DRAFTED] = 0  # what a compiled call has drafted is not what was verified
        if self._shown and not self._asked:
            self._shown[-1] = self._shown[-1].followed_by(verified.emitted)
        else:
            super().observe(verified)

    def look(self, budget: Budget, chain: bool = False) -> DraftTree:
        """Draft within the budget: see `MixtureDrafter.look`; the draft of a compiled call is forgotten."""
        self._request.words[request.DRAFTED] = 0
        return super().look(budget, chain)

    def make_room(self, length: int) -> None:
        """Make room for a text of so many tokens, and take into its automaton what that had no room for."""
        words = self._request.words
        left, held = int(words[request.LEFT]), int(words[request.NUM_SAID])
        if left:
            self._extend(self._said[held - left : held])
            words[request.LEFT] = 0
        self._hold(2 * (held + length - int(words[request.LENGTH])))

    def finish(self, keep: bool = True) -> None:
        """End the request; with `keep`, session and phrases learn what was generated."""
        self._collect()
        self._catch_up()
        if not keep:
            self._history = []
        super().finish()


class RequestDiverged(Exception):
    """A row's text does not go on from what its request was given.

    Attributes
    ----------
    row
        Its number.
    """

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Slots:
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

    def __init__(self, rows: Many[BatchRow], texts: Many[int], places: Many[int], longest: Many[int]) -> None:
        self.rows = rows
        for row in rows:
            row._catch_up()
        addresses = [row._request.words.ctypes.data for row in rows]
        self._calls = np.array([addresses, texts, places, longest], np.int64).reshape(kernels.CALL, -1).T.copy()
        self._out: NDArray[np.int32] = np.empty(len(rows) + MAX_NODES, np.int32)
        self._session = rows[0]._shared if rows else None
        self._min_p = rows[0].config.min_path_probability if rows else 1.0

    def step(self, plan: NDArray[np.int64], lengths: NDArray[np.int32], cost: NDArray[np.float32]) -> list[list[int]]:
        """Follow what the texts say, learn from it, and draft: the tokens for each row (`kernels.batch.step_chains`).

        Raises
        ------
        RequestDiverged
            A text does not go on from what was followed; nothing was done.
        """
        if self._session is None:
            return self._step(plan, lengths, cost)
        with self._session:  # kept as it is while kernels read it
            for row in self.rows:
                row._sync()
            return self._step(plan, lengths, cost)

    def _step(self, plan: NDArray[np.int64], lengths: NDArray[np.int32], cost: NDArray[np.float32]) -> list[list[int]]:
        """Call the kernel until it has found room for all that came."""
        plan[kernels.BEGIN] = 0
        while (drafted := kernels.step_chains(plan, self._calls, lengths, self._min_p, cost, self._out)) < 0:
            if drafted == kernels.DIVERGED:
                raise RequestDiverged(int(plan[kernels.WHO]))
            for row, place in zip(self.rows, self._calls[:, kernels.PLACE], strict=True):
                row.make_room(int(lengths[place]))
        count = len(self.rows)
        found: list[int] = self._out[: count + drafted].tolist()
        if count == 1:
            return [found[1:]]
        drafts, begin = [], count
        for n in found[:count]:
            drafts.append(found[begin : begin + n])
            begin += n
        return drafts

    def skip(self, plan: NDArray[np.int64]) -> None:
        """Count a step without a look: what it verified is judged at the next one."""
        for row in self.rows:
            words = row._request.words
            words[request.STEP] += words[request.STEP] == plan[kernels.NOW] - 1
        plan[kernels.NOW] += 1
        plan[kernels.STEPS] += 1
        plan[kernels.ROWS] += len(self.rows)
