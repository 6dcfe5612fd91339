"""Speculation of an accelerated model: its verifier, drafters, and what is learned from the model itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import AUTO, PASS, SpeculationConfig, cache_dir
from retrieve_spec.datastore.dense import check_model, model_fingerprint
from retrieve_spec.datastore.store import Datastore, check_tokenizer, open_datastore
from retrieve_spec.drafting.calibration import put_array
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.drafters import Drafters
from retrieve_spec.engine.engine import Engine
from retrieve_spec.engine.report import GenerationReport, together
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.errors import require
from retrieve_spec.kernels.recycling import MOST
from retrieve_spec.model_layers import embedded_tokens
from retrieve_spec.recorded.verdicts import KeptFindings
from retrieve_spec.recorded.verifier_factory import VerifierFactory
from retrieve_spec.sources.recycling import Bigrams
from retrieve_spec.verify.interface import ModelInterface, input_device, new_cache
from retrieve_spec.verify.padded_batch import PaddedBatch, why_not_shared
from retrieve_spec.verify.probe import read_prompt
from retrieve_spec.verify.steps import keeping_texts, sample_tokens, vocabulary
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
        self._model, self._passes = model, passes
        self._make_verifier: Callable[[], Verifier] = passes
        known = embedded_tokens(model)
        self.drafters = Drafters(config, datastores, drafter, _model_key(model), tokenizer, known)
        self.engine = Engine(in_step=self.ranks is not None)
        self._padded = PaddedBatch(model, passes.finding.interface)
        self._not_padded: str | None = None  # not tried yet
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
        functions and classes, values behind several containers or closures.
        """
        with self.engine.alone():
            self._passes.invalidate()

    def assume_frozen(self) -> None:
        """Promise that nobody edits the model from now on: one that is recorded is not looked at before generations.

        For programs that hold the model themselves, as the server does. `invalidate` takes the promise back.
        """
        with self.engine.alone():
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
        given = store if isinstance(store, list | tuple) else [] if store is None else [store]
        opened = [open_store(one, self.tokenizer) for one in given]
        check_stores(self._model, self.config, opened)
        return opened

    def new_cache(self) -> Any:
        """An empty cache for the model."""
        return new_cache(self._model)

    def use_datastores(self, datastores: Many[Any]) -> None:
        """Draft from these open datastores instead, from the next call on; what was learned is kept where it can be."""
        with self.engine.alone():
            check_stores(self._model, self.config, datastores)
            self.drafters.use(datastores)

    def forget(self, scope: str | None = None) -> None:
        """Drop what was learned from earlier generations (texts, calibration), in files, too; measured costs stay.

        Of one `scope`: its texts, and all phrases, since whose they are is not kept.
        """
        with self.engine.alone():
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
        with self.engine.alone():  # probing and recording a model that has changed
            first = self._make_verifier()
            made = [first, *(first.fresh() for _ in range(count - 1))]
            if together and first.batching == "padded" and not self._why_not_padded():
                for verifier in made:
                    verifier.share(self._padded)
            return made

    def _why_not_padded(self) -> str:
        """Why texts do not share passes of the model's own forward, which is tried out once."""
        if self._padded.interface is not self.interface:
            self._padded = PaddedBatch(self._model, self.interface)
            self._not_padded = None
        if self._not_padded is None:
            with keeping_texts(self._model):  # the call at hand may have been prepared already
                self._not_padded = why_not_shared(self._model, self.interface)
        return self._not_padded

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
        with self.engine.alone():
            verifier = self._make_verifier()
            if verifier.batching == "padded":
                return self._why_not_padded()
            return "" if verifier.batching == "packed" else verifier.reason or "its verifier serves one text"


def open_store(store: Any, tokenizer: Any) -> Datastore:
    """Open a folder, or check that an open store was built with the tokenizer."""
    if isinstance(store, (str, os.PathLike)):
        return open_datastore(store, tokenizer=tokenizer)
    if tokenizer is not None and isinstance(store, Datastore):
        check_tokenizer(store.path, store.manifest, tokenizer)
    require(hasattr(store, "segments"), "a datastore's folder, or an open one", store, "Give its path.")
    return store  # type: ignore[no-any-return]


def check_stores(model: Any, config: SpeculationConfig, stores: Many[Any]) -> None:
    """Refuse text in tokens that the model does not embed, and dense indexes of another model that is drafted from."""
    known = embedded_tokens(model)
    for store in stores:
        if isinstance(store, Datastore):
            store.check_ids(known)
        if config.dense == AUTO and store.dense:
            check_model(store.manifest.dense, model)


def _bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Memory that keys and values of one token take, as far as a configuration tells."""

    def number(name: str, otherwise: int) -> int:
        try:
            return int(getattr(config, name, None) or otherwise)
        except (AttributeError, RuntimeError, TypeError):  # layers that differ in it
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


_CONTEXT = 128
_WIDTHS = (0, 15, 63, 3)
_REPEATS = 3
_SECONDS = 0.6
_ROOT, _NOTHING = np.array([1], np.int32), np.empty(0, np.int32)


@torch.no_grad()
def measure_passes(model: Any, speculation: Speculation, kept: KeptFindings) -> None:
    """Begin to know what passes cost, by those of an earlier process on this CPU or by trying some."""
    if speculation.mode in ("plain", "delegated"):
        return
    limits = (speculation.interface.max_positions, speculation.interface.max_slots)
    positions = min((limit for limit in limits if limit), default=_CONTEXT + max(_WIDTHS) + 1)
    context = max(min(_CONTEXT, positions - max(_WIDTHS) - 1), 1)
    found = kept.seconds if input_device(model).type == "cpu" else {}  # a GPU's first passes compile and capture
    if not found:
        found = _time_passes(model, speculation, context, positions)
        kept.keep_seconds(found)
    costs = speculation.engine.costs.of(1)
    costs.begin(context, found)
    costs.seconds(context, 0)  # takes them in: no call waits for the kernel that does


def _time_passes(model: Any, speculation: Speculation, context: int, positions: int) -> dict[int, float]:
    """Seconds of passes over chains of a few widths: of the first two at least, of others until time runs out."""
    seconds = _SECONDS if speculation.ranks is None else math.inf  # ranks must run the same passes
    ids = sample_tokens(model, context)
    verifier = speculation.verifiers()[0]
    read_prompt(model, verifier, ids)
    verifier.forward(_ROOT)  # the first pass of a kind pays for set-up
    verifier.commit(_NOTHING)
    began, found = perf_counter(), dict[int, float]()
    for width in _WIDTHS:
        if width > positions - context - 8 or (len(found) > 1 and perf_counter() - began > seconds):
            continue
        tree = DraftTree.from_paths([[(i * 17 + 3) % vocabulary(model) for i in range(width)]])
        times: list[float] = []
        is_ready = ids.device.type != "cuda"  # the first pass of a width may compile kernels and capture a graph
        while len(times) < _REPEATS and (not times or perf_counter() - began <= seconds):
            started = perf_counter()
            float(verifier.forward(_ROOT, tree).logits[0, 0])  # waits for the device
            took = perf_counter() - started
            verifier.commit(_NOTHING)
            if is_ready:
                times.append(took)
            else:
                began, is_ready = began + took, True
        found[width] = min(times)
    verifier.finish()
    return found


ASKED_SECONDS, ASKED_AGAIN_SECONDS = 1.0, 0.2
"""How long a model is asked when it is accelerated first, and each time after, until all its tokens are known."""
_FIRST_NODES, _MOST_NODES, _SHORT = 8, PASS.tree_rows - 1, 0.125
"""Tokens that a CPU is asked for in the first pass; the next ones have four times as many while they take less than so
many seconds."""
_NEVER_KEPT = 0.1
"""Seconds of asking that are not worth a file."""


def bigrams_of(model: Any, verifier: Verifier, tokenizer: Any, kept: KeptFindings) -> Bigrams:
    """What a model says after each of its tokens, as far as it is known.

    Parameters
    ----------
    model
        A causal language model. It is asked for tokens in the order of their ids, which is that of their frequency in
        vocabularies of merges, for `ASKED_SECONDS`, in later processes for `ASKED_AGAIN_SECONDS`.
    verifier
        Of the model, for trees.
    tokenizer
        The model's, which says what ends a line.
    kept
        What passes took in an earlier process: nothing is asked again where one takes longer than there is time.

    Returns
    -------
    Bigrams
        With those that were kept before.
    """
    path = cache_dir() / "bigrams" / f"{model_fingerprint(model).partition(':')[2]}.npy"
    entries, began = _kept(path, embedded_tokens(model)), perf_counter()
    seconds = ASKED_AGAIN_SECONDS if (entries[:, 0] >= 0).any() else ASKED_SECONDS
    if max(kept.seconds.values(), default=0.0) < seconds:
        _ask(model, verifier, _line_end(tokenizer), entries, seconds)
    if perf_counter() - began > _NEVER_KEPT:
        with contextlib.suppress(OSError):  # which is logged when the file cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
        put_array(path, entries, "bigrams")
    return Bigrams(entries)


def _line_end(tokenizer: Any) -> list[int]:
    """The token that ends a line; none of a vocabulary that has no such sign."""
    try:
        return [int(token) for token in tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]]
    except Exception:  # some tokenizers fail on what they do not know
        return []


def _kept(path: Path, vocabulary: int) -> NDArray[np.int32]:
    """(vocabulary, 2k) int32 entries of `Bigrams` that a file has; none are known where it is another or no file."""
    k, entries = min(MOST, vocabulary), np.empty((0, 0), np.int32)
    with contextlib.suppress(Exception), open(path, "rb") as file:  # a damaged head is read as Python, and so fails
        entries = np.lib.format.read_array(file, allow_pickle=False)
    whole = entries.shape == (vocabulary, 2 * k) and entries.dtype == np.int32 and (entries[:, :k] < vocabulary).all()
    return entries if whole else np.full((vocabulary, 2 * k), -1, np.int32)


@torch.no_grad()
def _ask(model: Any, verifier: Verifier, line_end: list[int], entries: NDArray[np.int32], seconds: float) -> None:
    """Ask for tokens of which nothing is known, side by side behind two ends of a line, for so many seconds."""
    device, missing, k = input_device(model), np.flatnonzero(entries[:, 0] < 0), entries.shape[1] // 2
    nodes, end = _MOST_NODES if device.type == "cuda" else _FIRST_NODES, perf_counter() + seconds
    while len(missing) and line_end and perf_counter() < end:
        tokens, began = missing[:nodes].astype(np.int32), perf_counter()
        read_prompt(model, verifier, torch.tensor([line_end], device=device))
        if verifier.mode != "tree":  # which a prompt can show
            break
        siblings = DraftTree.from_paths([[token] for token in tokens.tolist()])
        best = verifier.forward(np.array(line_end, np.int32), siblings).logits[1:].float().topk(k)
        entries[tokens, :k] = best.indices.cpu().numpy()
        entries[tokens, k:] = best.values.cpu().numpy().view(np.int32)
        verifier.finish()
        missing = missing[nodes:]
        if perf_counter() - began < _SHORT:
            nodes = min(4 * nodes, _MOST_NODES)
