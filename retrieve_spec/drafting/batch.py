"""Batches: drafts for requests of an engine that keeps their texts, by one compiled call."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels import batch as kernels
from retrieve_spec.sources.rows import address_of
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore
    from retrieve_spec.sources.distilled import ModelTables

_FIRST_OUTPUT = 1024
_CONTEXTS = 1 << 14
"""Of a row's recycling table."""


class SeenPass(NamedTuple):
    """What the model said in a pass, in rows: of each request after its last token and after each token of its draft.

    Attributes
    ----------
    top_ids, top_logits
        (n, k) int32 and float32: its most probable next tokens, most probable first, and their raw logits.
    hidden
        (n, d) float32, what its output embeddings read, or None.
    """

    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    hidden: NDArray[np.float32] | None = None


_NOTHING_SEEN = SeenPass(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32))
_NO_KEYS = np.empty((0, 1), np.int8)


class BatchRow(MixtureDrafter):
    """A `MixtureDrafter` that can be a row of a compiled call (`Slots`)."""

    _always_reads_stores = True

    def __init__(
        self,
        config: SpeculationConfig,
        session: SessionMemory | None,
        datastores: Many[Datastore],
        calibration: Calibration,
        recycling: bool = False,
        distilled: ModelTables | None = None,
    ) -> None:
        super().__init__(
            config,
            recycling=recycling,
            contexts=_CONTEXTS,
            session=session,
            datastores=datastores,
            calibration=calibration,
            distilled=distilled,
        )
        self._output: NDArray[np.int32] = np.empty(_FIRST_OUTPUT, np.int32)

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: see `MixtureDrafter.start`."""
        super().start(prompt_ids, prediction_ids)
        fields = self._state.fields
        fields["output_length"] = fields["num_unread"] = fields["num_drafted"] = fields["step"] = 0
        self._reserve(_FIRST_OUTPUT)

    def _reserve(self, capacity: int) -> None:
        """Make room for tokens that are generated in compiled calls."""
        if capacity > len(self._output):
            self._output = np.concatenate([self._output, np.empty(capacity - len(self._output), np.int32)])
        fields = self._state.fields
        fields["output"], fields["output_capacity"] = address_of(self._output), len(self._output)

    def _collect(self) -> None:
        """Append the tokens that compiled calls have stored."""
        fields = self._state.fields
        self._transcript.append(self._output[: fields["output_length"]].copy())
        fields["output_length"] = 0

    def _accepted(self, verified: VerifiedPass) -> int:
        return len(verified.path)  # engines may emit more than path plus one

    def observe(self, verified: VerifiedPass) -> None:
        """Append tokens to the text; all tokens between two drafts are learned at once."""
        self._collect()
        self._state.fields["num_drafted"] = 0  # a draft of a compiled call was not verified
        if self._asked or not self._pending.extend_last(verified.emitted):
            super().observe(verified)

    def draft(self, budget: Budget, chain: bool = False) -> DraftTree:
        """Draft within the budget: see `MixtureDrafter.draft`; the draft of a compiled call is dropped."""
        self._state.fields["num_drafted"] = 0
        return super().draft(budget, chain)

    def make_room(self, length: int) -> None:
        """Make room for a text of that many tokens, and append to its automaton what did not fit before."""
        fields = self._state.fields
        unread, held = int(fields["num_unread"]), int(fields["output_length"])
        if unread:
            self._state.extend(self._output[held - unread : held])
            fields["num_unread"] = 0
        self._reserve(2 * (held + length - int(fields["length"])))

    def prepare_step(self) -> int:
        """Learn from pending passes, and return the address of the request for compiled calls."""
        self._learn_pending()
        return self._state.address

    def refresh_sessions(self) -> None:
        """See `RequestState.refresh_sessions`."""
        self._state.refresh_sessions()

    def skip_step(self, now: int) -> None:
        """Let the draft of the previous step be verified by the next one."""
        fields = self._state.fields
        fields["step"] += fields["step"] == now - 1

    def finish(self, keep: bool = True) -> None:
        """End the request; with `keep`, session and phrases learn what was generated."""
        self._collect()
        self._learn_pending()
        if not keep:
            self._transcript.take()
        super().finish()


class RequestDiverged(Exception):
    """The text of a row does not continue the tokens that its request was given.

    Attributes
    ----------
    row
        Its number.
    """

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Slots:
    """Rows of an engine's steps: the arrays of a compiled call, reused while the rows stay the same.

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
        self._places = list(places)
        self._calls = np.zeros(len(rows), kernels.CALL)
        self._calls["request"] = [row.prepare_step() for row in rows]
        self._calls["text"], self._calls["place"], self._calls["longest"] = texts, places, longest
        self._out: NDArray[np.int32] = np.empty(len(rows) + MAX_NODES, np.int32)
        self._session = rows[0].session if rows else None

    def step(
        self,
        plan: NDArray[Any],
        lengths: NDArray[np.int32],
        cost: NDArray[np.float32],
        seen: SeenPass | None = None,
    ) -> list[list[int]]:
        """Append the texts' new tokens, learn from them, and draft a chain per row (`kernels.batch.step_chains`).

        Raises
        ------
        RequestDiverged
            A text does not go on from what was followed; nothing was done.
        """
        seen = seen or _NOTHING_SEEN
        if self._session is None:
            return self._step(plan, lengths, cost, seen)
        with self._session:  # no change while kernels read it
            for row in self.rows:
                row.refresh_sessions()
            return self._step(plan, lengths, cost, seen)

    def _step(
        self, plan: NDArray[Any], lengths: NDArray[np.int32], cost: NDArray[np.float32], seen: SeenPass
    ) -> list[list[int]]:
        """Call the kernel again until there is room for all tokens."""
        plan["begin"], count = -1, len(self.rows)
        addresses, said = (address_of(plan), address_of(self._calls)), (*seen[:2], self._keys_of(seen.hidden))
        while (drafted := kernels.step_chains(*addresses, count, lengths, cost, *said, self._out)) < 0:
            if drafted == kernels.DIVERGED:
                raise RequestDiverged(int(plan["diverged_row"][0]))
            for row, place in zip(self.rows, self._places, strict=True):
                row.make_room(int(lengths[place]))
        found: list[int] = self._out[: count + drafted].tolist()
        if count == 1:
            return [found[1:]]
        drafts, begin = [], count
        for n in found[:count]:
            drafts.append(found[begin : begin + n])
            begin += n
        return drafts

    def _keys_of(self, hidden: NDArray[np.float32] | None) -> NDArray[np.int8]:
        """Return the keys of hidden states (n, d), none if no rows of a store are compared with them."""
        states = self.rows[0].sources.states if self.rows else None  # all rows have the same stores
        keys = None if states is None or hidden is None else states.keys(hidden)
        return _NO_KEYS if keys is None else keys

    def skip(self, plan: NDArray[Any]) -> None:
        """Count a step that was not observed; the next step judges what it verified."""
        for row in self.rows:
            row.skip_step(int(plan["now"][0]))
        plan["now"] += 1
        plan["steps"] += 1
        plan["rows"] += len(self.rows)
