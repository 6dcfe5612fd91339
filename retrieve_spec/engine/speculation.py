"""Speculation of an accelerated model: its verifier, drafters, and what is learned from the model itself."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

import torch

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.datastore.dense import check_model, model_fingerprint
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.engine.drafters import Drafters
from retrieve_spec.engine.engine import Engine
from retrieve_spec.engine.report import GenerationReport, together
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.errors import require
from retrieve_spec.model_layers import embedded_tokens
from retrieve_spec.recorded.verdicts import KeptFindings
from retrieve_spec.recorded.verifier_factory import VerifierFactory
from retrieve_spec.verify.interface import ModelInterface, new_cache
from retrieve_spec.verify.padded_batch import PaddedBatch, why_not_shared
from retrieve_spec.verify.steps import keeping_texts
from retrieve_spec.verify.tensor_parallel import Ranks
from retrieve_spec.verify.trials import read_prompt
from retrieve_spec.verify.verifier import PassKind, Verifier

logger = logging.getLogger(__name__)


class Speculation:
    """State of an accelerated model, found at `model.speculation`.

    Attributes
    ----------
    model
        The model.
    config
        How the model drafts unless a call says otherwise.
    mode, reason
        How drafts are verified ("tree", "chain" or "plain") and why not better; "delegated" where calls with text
        alone are left to the original `generate`.
    engine
        Takes the model's sequences from pass to pass.
    drafters
        What drafts for them.
    last
        Report of the generation that ended last, None before the first.
    ranks
        Processes that hold the model together, None where this one holds it alone.
    bytes_per_token
        Memory that keys and values of one token take.
    """

    def __init__(
        self,
        model: Any,
        config: SpeculationConfig,
        passes: VerifierFactory,
        tokenizer: Any,
        datastores: Many[Any],
        drafter: Drafter | None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.mode: str = passes.finding.mode
        self.reason = passes.finding.reason
        self.last: GenerationReport | None = None
        self.bytes_per_token = _bytes_per_token(model.config.get_text_config(decoder=True), model.dtype)
        self.ranks = Ranks.of(model)
        self.model, self._passes = model, passes
        self._make_verifier: Callable[[], Verifier] = passes
        self.drafters = Drafters(
            config,
            datastores,
            drafter,
            _model_key(model),
            tokenizer,
            passes.finding.interface.vocabulary,
            partial(model_fingerprint, model),
        )
        self.engine = Engine(in_step=self.ranks is not None)
        self._padded: tuple[PaddedBatch, str] | None = None  # last result, and why not to use it
        self._said: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of an accelerated model, whose weights may go their own way, is not accelerated."""
        logger.warning("a deep copy of an accelerated model decodes plainly: call retrieve_spec.accelerate on it")

    def __reduce__(self) -> Any:
        """Pickle as nothing: a saved model is not accelerated."""
        return type(None), ()

    @property
    def interface(self) -> ModelInterface:
        """What the model's forward takes, as last seen."""
        return self._passes.finding.interface

    @property
    def kept(self) -> KeptFindings:
        """What is kept of the model between processes."""
        return self._passes.kept

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

        Needed after what torch does not count: edits of weights through `.data`, NumPy or another process, patched
        functions and classes, values inside several containers or closures.
        """
        with self.engine.exclusive():
            self._passes.invalidate()

    def assume_frozen(self) -> None:
        """Promise that nobody edits the model from now on: one that is recorded is not looked at before generations.

        For programs that hold the model themselves, as the server does. `invalidate` takes the promise back.
        """
        with self.engine.exclusive():
            self._passes.assume_frozen()

    @property
    def datastores(self) -> list[Any]:
        """Open stores that are drafted from."""
        return self.drafters.datastores

    def drafter(self, draft: str | None = None) -> Drafter | None:
        """Drafter for a call: the one given to `accelerate`, a preset's, or None when drafting is off.

        Raises
        ------
        UnknownPresetError
            No preset has the name.
        MissingSourceError
            The preset needs a source that was not given.
        """
        return self.drafters.get(draft)

    def open_stores(self, store: Any) -> list[Datastore]:
        """The store of a call, or several: folders, or stores opened before; none for None (errors: `accelerate`)."""
        if store is None:
            return []
        given = store if isinstance(store, list | tuple) else [store]
        opened = [open_store(one, self.tokenizer) for one in given]
        check_stores(self.model, embedded_tokens(self.model), self.config, opened)
        return opened

    def new_cache(self) -> Any:
        """An empty cache for the model."""
        return new_cache(self.model)

    def use_datastores(self, datastores: Many[Any]) -> None:
        """Draft from these open datastores instead, from the next call on; what was learned is kept where it can be."""
        with self.engine.exclusive():
            check_stores(self.model, embedded_tokens(self.model), self.config, datastores)
            self.drafters.use(datastores)

    def forget(self, scope: str | None = None) -> None:
        """Drop what was learned from earlier generations (texts, calibration), in files, too; measured costs stay.

        Of one `scope`: its texts, and all phrases, since whose they are is not kept.
        """
        with self.engine.exclusive():
            self.drafters.forget(scope)

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

    def verifiers(self, count: int = 1, together: bool = False) -> list[Verifier]:
        """Verifiers for the sequences of one call, which may share passes with others' where they go `together`."""
        with self.engine.exclusive():  # probing and recording a model that has changed
            first = self._make_verifier()
            made = [first, *(first.fresh() for _ in range(count - 1))]
            if together and first.batching == "padded":
                padded, why_not = self._padded_batch()
                for verifier in () if why_not else made:
                    verifier.share(padded)
            return made

    def read(self, verifier: Verifier, ids: torch.Tensor) -> None:
        """Let a fresh verifier read a prompt of (1, L) tokens."""
        read_prompt(self.model, verifier, ids)

    def _padded_batch(self) -> tuple[PaddedBatch, str]:
        """Return the passes of the model's own forward that texts can share, and why not to use them; tried once."""
        if self._padded is None or self._padded[0].interface is not self.interface:
            with keeping_texts(self.model):  # the present call may already have been prepared
                self._padded = PaddedBatch(self.model, self.interface), why_not_shared(self.model, self.interface)
        return self._padded

    def ended(self, *sequences: Sequence) -> None:
        """Let `last` be the report of a generation of these sequences; what they wrote may be due to be saved."""
        self.drafters.keep()
        if len(sequences) == 1:
            self.last = sequences[0].report
            return
        steps = set().union(*(sequence.steps for sequence in sequences))
        self.last = together([sequence.report for sequence in sequences], 1 + len(steps))

    def batching_blocker(self) -> str:
        """Why several sequences cannot be verified in one pass; empty when they can."""
        if self.drafters.given is not None:
            return "the drafter that was given serves one text"
        if self.interface.rope_switch:
            return "rotary frequencies change with the length of a text"
        with self.engine.exclusive():
            verifier = self._make_verifier()
            if verifier.batching == "padded":
                return self._padded_batch()[1]
            return "" if verifier.batching == "packed" else verifier.reason or "its verifier serves one text"


def open_store(store: Any, tokenizer: Any) -> Datastore:
    """Open a folder, or check that an open store was built with the tokenizer."""
    if isinstance(store, (str, os.PathLike)):
        return open_datastore(store, tokenizer=tokenizer)
    if tokenizer is not None and isinstance(store, Datastore):
        store.check_tokenizer(tokenizer)
    require(hasattr(store, "segments"), "a datastore's folder, or an open one", store, "Give its path.")
    return store  # type: ignore[no-any-return]


def check_stores(model: Any, vocabulary: int, config: SpeculationConfig, stores: Many[Any]) -> None:
    """Refuse text in tokens that the model does not embed, and dense indexes of another model that is drafted from."""
    for store in stores:
        if isinstance(store, Datastore):
            store.check_ids(vocabulary)
        if config.dense == AUTO and store.dense:
            check_model(store.manifest.dense, model)


def _bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Memory that keys and values of one token take, as far as a configuration tells."""

    def number(name: str, otherwise: int) -> int:
        try:
            return int(getattr(config, name, None) or otherwise)
        except (AttributeError, RuntimeError, TypeError):  # layers differ
            return otherwise

    heads = number("num_attention_heads", 1)
    width = number("head_dim", number("hidden_size", 0) // heads)
    return 2 * number("num_hidden_layers", 1) * number("num_key_value_heads", heads) * width * dtype.itemsize


def _model_key(model: Any) -> str:
    """Name under which what was learned about a model is kept: its kind and a hash of its configuration."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    text = json.dumps(config, sort_keys=True, default=str)
    return f"{model.config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
