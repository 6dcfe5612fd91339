"""What an accelerated model carries: its verifier, drafters, measured costs and the report of the last generation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.config import SpeculationConfig, dial
from retrieve_spec.datastore.change import ChangeReport
from retrieve_spec.datastore.provenance import sourced_runs
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.drafting.drafter import Drafter, Preparable, VerifiedPass
from retrieve_spec.engine.budget import Costs
from retrieve_spec.engine.company import Company
from retrieve_spec.engine.cost import CostModel
from retrieve_spec.engine.drafters import OFF, Drafters
from retrieve_spec.engine.engine import Engine
from retrieve_spec.engine.families import Family, families
from retrieve_spec.engine.limits import limits_of
from retrieve_spec.engine.report import GenerationReport, together
from retrieve_spec.engine.request import Prepared, rows_of
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.engine.shared_prompt import SharedPrompts
from retrieve_spec.errors import ConfigError
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
    engine, company
        Takes the model's sequences from pass to pass; says which of them share passes.
    last
        Report of the generation that ended last, None before the first.
    model_key
        Name under which what was learned about the model is kept beside a store.
    check_stores
        Raises a typed error for stores that are not for this model.
    ranks
        Processes that hold the model together, None where this one holds it alone.
    new_cache
        Makes an empty cache for the model.
    bytes_per_token
        Memory that keys and values of one token take.
    vocabulary
        Tokens that the model embeds.
    prepare_seconds
        How long kernels took to get ready at `accelerate` (compiled, or loaded from Numba's cache).
    """

    def __init__(
        self,
        config: SpeculationConfig,
        finding: Finding,
        passes: VerifierFactory,
        tokenizer: Any = None,
        datastores: Many[Any] = (),
        drafter: Drafter | None = None,
        model_key: str = "model",
    ) -> None:
        self.config = config
        self.mode: str = finding.mode
        self.reason = finding.reason
        self.tokenizer = tokenizer
        self.last: GenerationReport | None = None
        self.model_key = model_key
        self.prepare_seconds = 0.0
        self.bytes_per_token = 0
        self.vocabulary = 1 << 31
        self.new_cache: Callable[[], Any] = DynamicCache
        self.check_stores: Callable[[Many[Any]], None] = lambda stores: None
        self.ranks: Ranks | None = None
        self._passes = passes
        self._make_verifier: Callable[[], Verifier] = passes
        self._drafters = Drafters(config, datastores, drafter, model_key)
        self.engine = Engine(Costs())
        self.company = Company(self.engine)
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
        with self.engine.alone():
            self._passes.invalidate()

    @property
    def cost(self) -> CostModel:
        """Measured seconds of passes over one sequence."""
        return self.engine.costs.alone

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        self.engine.costs.alone = cost

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

    def use_datastores(self, datastores: Many[Any]) -> None:
        """Draft from these open datastores instead, from the next call on; what was learned is kept where it can be."""
        with self.engine.alone():
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
        with self.engine.alone():
            return save_session(self.session(), path, self.tokenizer)

    def load_session(self, store: str | os.PathLike[str] | Datastore) -> int:
        """Remember a store's documents as earlier generations, the newest as far as they fit; tokens remembered."""
        if not isinstance(store, Datastore):
            store = open_datastore(store, tokenizer=self.tokenizer)
        self.check_stores([store])
        with self.engine.alone():
            return load_session(self.session(), store)

    def forget(self) -> None:
        """Drop what was learned from earlier generations (texts, calibration); measured costs stay."""
        with self.engine.alone():
            self._drafters.forget()

    def delegated(self, reason: str) -> GenerationReport:
        """Report a call that the original `generate` decodes; the first time for each reason, say so in the log."""
        self.last = report = GenerationReport(mode="delegated", reason=reason, pass_kind="plain", pass_reason=reason)
        self.say_once(f"left to the original generate: {reason}")
        return report

    def say_once(self, message: str) -> None:
        """Log a line unless this model has logged it before."""
        if message not in self._said:
            self._said.add(message)
            logger.info(message)

    def sequences(
        self,
        prepared: Prepared,
        predictions: Many[NDArray[np.int32] | None],
        *,
        draft: str | None = None,
        nodes: int | str | None = None,
        context_ids: NDArray[np.int32] | None = None,
        seed: int | None = None,
        on_pass: Callable[[VerifiedPass], None] | None = None,
        siblings: str | None = None,
        return_logprobs: bool = False,
        together: SharedPrompts | None = None,
    ) -> list[Sequence]:
        """A sequence for every row of a prepared call; nothing runs before the engine takes them along.

        Arguments are those of `generate` and `generate_stream`; `predictions` has one for each row. `together`: prompts
        of other calls, whose sequences will share passes with these.
        """
        most, criteria = dial(self.config.nodes if nodes is None else nodes), prepared.criteria
        context_ids = prepared.context_ids if context_ids is None else context_ids
        if siblings not in (None, "share", "off"):
            raise ConfigError("siblings to be 'share' or 'off'", repr(siblings), "Leave it at 'share'.")
        self.drafter(draft)  # an unknown preset is an error now
        rows = rows_of(prepared, self.interface.cache_name, self.new_cache)
        seed = self.draw_seed(prepared, seed)
        if self.ranks is not None:
            seed, criteria = self.ranks.seed(seed), self.ranks.criteria(criteria)
        if together is None and len(rows) > 1:
            together = SharedPrompts(self.interface.cache_name)
        verifiers = self._verifiers(len(rows), together is not None)  # looks at the model, before its interface is read
        wants_dict = bool(prepared.config.return_dict_in_generate)
        call = uuid4().hex if len(rows) > 1 else None
        shared: list[Family | None] = [None] * len(rows)
        if siblings != "off" and most != 0 and draft != OFF:
            shared = families(rows, self._drafters, draft, self.interface.cache_name, self.vocabulary)
        made = []
        for row, verifier, prediction, family in zip(rows, verifiers, predictions, shared, strict=True):
            lend, give_back = self._loan(OFF if most == 0 else draft, call, family)
            stopper = Stopper(criteria)
            sampler = make_sampler(
                row.processors,
                seed,
                row=row.index,
                keep_scores=wants_dict and bool(prepared.config.output_scores),
                keep_raw=wants_dict and bool(prepared.config.output_logits),
                log_probs=return_logprobs,
                device=row.ids.device,
            )
            limits = limits_of(prepared, self.config, self.interface, stopper, most, row.padding)
            sequence = Sequence(
                row.inputs,
                verifier,
                lend,
                sampler,
                stopper,
                limits,
                ids=row.ids,
                prediction_ids=prediction,
                context_ids=context_ids,
                on_pass=on_pass,
                on_end=give_back,
                waits_for_reader=prepared.callers_cache,
                bytes_per_token=self.bytes_per_token,
                prompt=None if together is None else together.of(row.inputs),
                siblings=family.siblings if family is not None and family.heard else None,
                call=call,
            )
            made.append(sequence)
        return made

    def _verifiers(self, count: int, together: bool) -> list[Verifier]:
        """Verifiers for the sequences of one call, which may share passes with others' where they go `together`."""
        with self.engine.alone():  # probing and recording a model that has changed
            if together:
                return self.company.verifiers(self._make_verifier, count)
            return [self._make_verifier() for _ in range(count)]

    def _loan(
        self, draft: str | None, call: str | None, family: Family | None
    ) -> tuple[Callable[[], Drafter | str], Callable[[Sequence], None]]:
        """What lends a sequence its drafter, and what takes it back when it has ended."""
        lent: list[Drafter] = []
        stores = self.datastores

        def lend() -> Drafter | str:
            drafter = self._drafters.lend(draft, call, None if family is None else family.siblings)
            if isinstance(drafter, str):
                return drafter
            lent.append(drafter)
            shared = drafter if self.ranks is None else self.ranks.drafter(drafter)
            assert shared is not None
            return shared

        def give_back(sequence: Sequence) -> None:
            for drafter in lent:
                self._drafters.give_back(drafter, sequence.spoiled)
            if lent and family is not None and sequence.stopped and sequence.error is None:
                family.remember(sequence.text.new_ids)  # of equal answers one is kept: done twice it is the same
            sequence.report.provenance = sourced_runs(sequence.report.origins, stores)

        return lend, give_back

    def ended(self, *sequences: Sequence) -> None:
        """Let `last` be the report of a generation of these sequences; what they wrote may be due to be saved."""
        if self._drafters.rollouts is not None:
            self._drafters.rollouts.keep()
        if len(sequences) == 1:
            self.last = sequences[0].log.summary()
            return
        steps = set().union(*(sequence.steps for sequence in sequences))
        self.last = together([sequence.report for sequence in sequences], 1 + len(steps))

    @staticmethod
    def draw_seed(prepared: Prepared, seed: int | None) -> int | None:
        """Seed of a call's noise: the one given or one from torch's generator; None when it decodes greedily."""
        if not prepared.config.do_sample:
            return None
        return int(torch.randint(2**62, (), dtype=torch.int64).item()) if seed is None else seed

    def why_alone(self) -> str:
        """Why several sequences cannot be verified in one pass; empty when they can."""
        if self._drafters.given is not None:
            return "the drafter that was given serves one text"
        if self.interface.rope_switch:
            return "rotary frequencies change with the length of a text"
        with self.engine.alone():
            return self.company.why_alone(self._make_verifier())

    def make_verifier(self) -> Verifier:
        """A verifier for one sequence."""
        return self._make_verifier()
