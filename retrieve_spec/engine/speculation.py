"""What an accelerated model carries: its verifier, drafters, measured costs and the report of the last generation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import AUTO, MAX_NODES, PASS, SpeculationConfig
from retrieve_spec.datastore.change import ChangeReport
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.drafting.drafter import Drafter, Preparable, VerifiedPass
from retrieve_spec.engine.cost import CostModel
from retrieve_spec.engine.drafters import Drafters
from retrieve_spec.engine.loop import Decoding, Limits
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.request import Prepared
from retrieve_spec.engine.running import Running
from retrieve_spec.engine.turns import Turns
from retrieve_spec.errors import ConfigError
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.recorded.verifier_factory import VerifierFactory
from retrieve_spec.sampling.samplers import make_sampler
from retrieve_spec.sampling.stopping import Stopper
from retrieve_spec.sources.session import SessionMemory
from retrieve_spec.sources.session_store import load_session, save_session
from retrieve_spec.verify.interface import ModelInterface
from retrieve_spec.verify.probe import Finding
from retrieve_spec.verify.tensor_parallel import Ranks
from retrieve_spec.verify.verifier import PassKind, Verifier

logger = logging.getLogger(__name__)


class Speculation:
    """State of an accelerated model, found at `model.speculation`.

    Attributes
    ----------
    config
        How the model drafts unless a call says otherwise.
    mode, reason
        How drafts are verified ("tree", "chain" or "plain") and why not better; "delegated" where calls with text
        alone are left to the original `generate`.
    cost
        Measured seconds per pass.
    last
        Report of the last generation, None before the first.
    model_key
        Name under which what was learned about the model is kept beside a store.
    check_stores
        Raises a typed error for stores that are not for this model.
    turns
        Whose turn it is to decode.
    ranks
        Processes that hold the model together, None where this one holds it alone.
    prepare_seconds
        How long kernels took to get ready at `accelerate` (compiled, or loaded from Numba's cache).
    """

    def __init__(
        self,
        config: SpeculationConfig,
        finding: Finding,
        passes: VerifierFactory,
        tokenizer: Any = None,
        datastores: Sequence[Any] = (),
        drafter: Drafter | None = None,
        model_key: str = "model",
    ) -> None:
        self.config = config
        self.mode: str = finding.mode
        self.reason = finding.reason
        self.tokenizer = tokenizer
        self.cost = CostModel()
        self.last: GenerationReport | None = None
        self.model_key = model_key
        self.prepare_seconds = 0.0
        self.check_stores: Callable[[Sequence[Any]], None] = lambda stores: None
        self.ranks: Ranks | None = None
        self._passes = passes
        self._make_verifier: Callable[[], Verifier] = passes
        self._drafters = Drafters(config, datastores, drafter, model_key)
        self._batch_costs: dict[int, CostModel] = {}
        self.turns = Turns()
        self._said: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of an accelerated model is not accelerated."""

    def __reduce__(self) -> Any:
        """Pickle as nothing: a saved model is not accelerated."""
        return type(None), ()

    @property
    def interface(self) -> ModelInterface:
        """What the model's forward takes, as last seen."""
        return self._passes.finding.interface

    @property
    def pass_kind(self) -> PassKind:
        """What runs the model, as last seen: see `GenerationReport.pass_kind`."""
        return self._passes.pass_kind

    @property
    def pass_reason(self) -> str:
        """Why nothing faster does; empty for the recorded pass."""
        return self._passes.pass_reason

    def invalidate(self) -> None:
        """Look at the model anew at the next generation: probe and record it again.

        Needed after edits that torch does not count: docs/verifier.md says which.
        """
        with self.turns.lock:
            self._passes.invalidate()

    @property
    def datastores(self) -> list[Any]:
        """Open stores that are drafted from."""
        return self._drafters.datastores

    def drafter(self, draft: str | None = None) -> Drafter | None:
        """Drafter for a call: the one given to `accelerate`, a preset's, or None when drafting is off.

        Raises
        ------
        UnknownPresetError
            No preset has the name.
        MissingSourceError
            The preset needs a source that was not given.
        """
        return self._drafters.of(draft)

    def prepare(self) -> None:
        """Make the configured drafter ready (kernels compiled or loaded); the time is added to `prepare_seconds`."""
        began = perf_counter()
        drafter = self.drafter()
        if isinstance(drafter, Preparable):
            drafter.prepare()
        self.prepare_seconds += perf_counter() - began

    def use_datastores(self, datastores: Sequence[Any]) -> None:
        """Draft from these open datastores instead, from the next call on; what was learned is kept where it can be."""
        with self.turns.lock:
            self.check_stores(datastores)
            self._drafters.use(datastores)

    def session(self) -> SessionMemory:
        """Memory of earlier generations that the configured drafter drafts from.

        Raises
        ------
        ConfigError
            The drafter has none.
        """
        memory = getattr(self.drafter(), "session", None)
        if not isinstance(memory, SessionMemory):
            raise ConfigError("a drafter with a session", "one without", "Use accelerate(model, session=True).")
        return memory

    def save_session(self, path: str | os.PathLike[str]) -> ChangeReport:
        """Add the remembered generations to a datastore (`retrieve_spec.sources.session_store.save_session`)."""
        if self.tokenizer is None:
            raise ConfigError("a tokenizer to save texts with", "none", "Give one to accelerate.")
        with self.turns.lock:
            return save_session(self.session(), path, self.tokenizer)

    def load_session(self, store: str | os.PathLike[str] | Datastore) -> int:
        """Remember a store's documents as earlier generations, the newest as far as they fit; tokens remembered."""
        if not isinstance(store, Datastore):
            store = open_datastore(store, tokenizer=self.tokenizer)
        self.check_stores([store])
        with self.turns.lock:
            return load_session(self.session(), store)

    def forget(self) -> None:
        """Drop what was learned from earlier generations (texts, calibration); measured costs stay."""
        with self.turns.lock:
            self._drafters.forget()

    def delegated(self, reason: str) -> None:
        """Record a call that the original `generate` decodes; the first time for each reason, say so in the log."""
        self.last = GenerationReport(mode="delegated", reason=reason, pass_kind="plain", pass_reason=reason)
        self.say_once(f"left to the original generate: {reason}")

    def say_once(self, message: str) -> None:
        """Log a line unless this model has logged it before."""
        if message not in self._said:
            self._said.add(message)
            logger.info(message)

    def decode(
        self,
        prepared: Prepared,
        *,
        draft: str | None,
        nodes: int | str | None,
        prediction_ids: NDArray[np.int32] | None,
        seed: int | None,
        context_ids: NDArray[np.int32] | None = None,
        on_pass: Callable[[VerifiedPass], None] | None = None,
        keep_scores: bool = False,
        keep_raw: bool = False,
    ) -> Running:
        """Set up the decoding of a prepared call; nothing runs before the first item is asked for."""
        most = self.dial(nodes)
        drafter = self.drafter(draft) if most != 0 else None
        seed, criteria = self.draw_seed(prepared, seed), prepared.criteria
        if self.ranks is not None:
            drafter, seed, criteria = self.ranks.drafter(drafter), self.ranks.seed(seed), self.ranks.criteria(criteria)
        stopper = Stopper(criteria)
        device = prepared.inputs.input_ids.device
        sampler = make_sampler(prepared.processors, seed, keep_scores=keep_scores, keep_raw=keep_raw, device=device)
        verifier = self._make_verifier()  # looks at the model, and so comes before what its interface allows
        limits = self.limits(prepared, stopper, most, provenance=self.config.provenance)
        decoding = Decoding(
            prepared.inputs,
            verifier,
            drafter,
            sampler,
            stopper,
            limits,
            self.cost,
            prediction_ids=prediction_ids,
            context_ids=context_ids,
            on_pass=on_pass,
        )
        return Running(self, decoding)

    def dial(self, nodes: int | str | None) -> int | None:
        """Nodes per pass that a call asks for, None where measured cost decides.

        Raises
        ------
        ConfigError
            It asks for something else.
        """
        nodes = self.config.nodes if nodes is None else nodes
        if nodes == AUTO:
            return None
        if isinstance(nodes, int) and 0 <= nodes <= MAX_NODES:
            return nodes
        raise ConfigError(f"nodes to be 'auto' or 0 … {MAX_NODES}", repr(nodes), "Leave it at 'auto'.")

    @staticmethod
    def draw_seed(prepared: Prepared, seed: int | None) -> int | None:
        """Seed of a call's noise: the one given or one from torch's generator; None when it decodes greedily."""
        if not prepared.config.do_sample:
            return None
        return int(torch.randint(2**62, (), dtype=torch.int64).item()) if seed is None else seed

    def limits(
        self,
        prepared: Prepared,
        stopper: Stopper,
        nodes: int | None,
        *,
        padding: int = 0,
        provenance: bool = False,
    ) -> Limits:
        """How much a pass of a call may draft; `padding` tokens in front of the row take no positions."""
        inputs = prepared.inputs
        unseen = 0 if inputs.holds_past else inputs.past_length
        ends = [self.interface.max_positions] if self.interface.max_positions else []
        if self.interface.rope_switch and not self.interface.rope_rescans:
            ends.append(self.interface.rope_switch)
        return Limits(
            nodes=nodes,
            max_depth=self.config.max_depth,
            max_length=stopper.max_length if stopper.max_length is not None else prepared.config.max_length,
            draft_end=max(min(ends) - unseen, 1) + padding if ends else 0,
            prefill_chunk=self.config.prefill_chunk,
            prompt_logits=self.config.prompt_logits,
            provenance=provenance,
        )

    @property
    def max_rows(self) -> int:
        """Rows of a batch that can be decoded together."""
        if (
            self._drafters.given is not None
            or self.interface.rope_switch
            or not isinstance(self._make_verifier(), RecordedVerifier)
        ):
            return 1
        return PASS.batch_rows

    def make_verifier(self) -> Verifier:
        """A verifier for one generation."""
        return self._make_verifier()

    def row_drafters(self, draft: str | None, rows: int) -> list[Drafter] | list[None]:
        """A drafter for every row of a batch, with one session and one calibration (Nones when drafting is off)."""
        return self._drafters.of_rows(draft, rows)

    def batch_costs(self, rows: int) -> dict[int, CostModel]:
        """By number of rows, up to `rows`, the cost of passes over so many; what is not measured yet is as for one."""
        for count in range(1, rows + 1):
            if count not in self._batch_costs:
                self._batch_costs[count] = CostModel(self.cost)
        return self._batch_costs
