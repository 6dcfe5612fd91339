"""Joining: a sequence for each row of a prepared call, with its verifier, drafter, sampler and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.config import OFF, dial
from retrieve_spec.datastore.store import sourced_runs
from retrieve_spec.drafting.drafter import Drafter, VerifiedPass
from retrieve_spec.engine.drafters import Drafters, DraftOptions
from retrieve_spec.engine.limits import Limits
from retrieve_spec.engine.sequence import PromptPass, Sequence
from retrieve_spec.engine.sessions import Siblings
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.engine.text_drafter import TextDrafter
from retrieve_spec.errors import require
from retrieve_spec.sampling.acceptance import Sampler, Stopper
from retrieve_spec.sampling.guides import guide_of
from retrieve_spec.sampling.samplers import make_sampler, processors_of_row, whole_seed
from retrieve_spec.sources.session import SessionMemory
from retrieve_spec.verify.cache import same_rows
from retrieve_spec.verify.verifier import OF_TEXT, VerifierInputs, VerifierOutput


class DelegatedCall(Exception):
    """A call is left to the original `generate`; the message says why."""


@dataclass(slots=True)
class Prepared:
    """What `generate` prepared for decoding.

    Attributes
    ----------
    inputs
        Where the verifier starts from.
    processors
        Logits processors in order, warpers included when sampling.
    criteria
        Stopping criteria in order.
    config
        The merged generation config.
    callers_cache
        Whether the cache is the caller's own.
    context_ids
        (n,) int32 what a drafter reads in place of the prompt, where that is not the prompt alone.
    ids
        (rows, L) long, the text as processors and criteria see it, where a prompt of embeddings is no part of it.
    """

    inputs: VerifierInputs
    processors: Any
    criteria: Any
    config: Any
    callers_cache: bool = False
    context_ids: NDArray[np.int32] | None = None
    ids: torch.Tensor | None = None


@dataclass(slots=True)
class Row:
    """One row of a prepared call.

    Attributes
    ----------
    index
        In the call; the noise its tokens are drawn with is its own.
    ids
        (1, L) long, its text as processors and criteria see it.
    padding
        Tokens in front of it that it is decoded without.
    inputs
        Where its verifier starts from.
    processors
        Its logits processors in order.
    """

    index: int
    ids: torch.Tensor
    padding: int
    inputs: VerifierInputs
    processors: Any


def rows_of(prepared: Prepared, cache_name: str, new_cache: Callable[[], Any]) -> list[Row]:
    """Return the rows of a prepared call; those of a batch without padding in front and with their own caches."""
    whole = prepared.inputs
    texts = whole.input_ids if prepared.ids is None else prepared.ids
    fewer = texts.shape[1] - whole.input_ids.shape[1]
    if len(texts) == 1:
        return [Row(0, texts, fewer, whole, processors_of_row(prepared.processors, 0))]
    rows = []
    mask = whole.model_kwargs.get("attention_mask")
    for index, padding in enumerate(padding_in_front(whole) or []):
        kwargs = {**whole.model_kwargs, cache_name: new_cache()}
        if mask is not None:  # there may also be padding inside the text
            rest = mask[index : index + 1, padding:]
            kwargs["attention_mask"] = None if bool(rest.all()) else rest
        if (positions := kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = positions[..., index : index + 1, padding:]
        ids = whole.input_ids[index : index + 1]
        inputs = VerifierInputs(ids[:, padding:], kwargs, max_length=whole.max_length - padding, returns_cache=False)
        processors = processors_of_row(prepared.processors, index)
        rows.append(Row(index, texts[index : index + 1], padding + fewer, inputs, processors))
    return rows


def padding_in_front(inputs: VerifierInputs) -> list[int] | None:
    """Count the padding in front of each row; None if a row has nothing else, or the mask is of another shape."""
    mask = inputs.model_kwargs.get("attention_mask")
    rows, length = inputs.input_ids.shape
    if mask is None:
        return [0] * rows
    if mask.shape != (rows, length):
        return None
    shown = mask.bool().cpu().numpy()
    return shown.argmax(axis=1).tolist() if shown.any(axis=1).all() else None


KEPT = 4
"""Prompts of `generate_many` whose readings are kept for later requests."""


def is_text_alone(inputs: VerifierInputs, cache_name: str) -> bool:
    """Whether the model is given tokens only."""
    known = OF_TEXT | {cache_name}
    return all(name in known or value is None for name, value in inputs.model_kwargs.items())


@runtime_checkable
class CopiesRows(Protocol):
    """A verifier that can copy the rows of its cache."""

    def copy_rows(self) -> DynamicCache | None:
        """Return the cache's rows in a cache that nothing writes to; None where it holds more than rows."""


class SharedPrompt:
    """One prompt of several sequences, for models that take the cache as the argument `cache_name`."""

    def __init__(self, cache_name: str) -> None:
        self.members = 0
        self._cache_name = cache_name
        self._is_read: Callable[[], bool] | None = None  # whether the sequence that reads it still does
        self._rows: DynamicCache | None = None
        self._last_pass: PromptPass | None = None

    def must_wait(self, is_reading: Callable[[], bool]) -> bool:
        """Whether another sequence is reading the prompt; if none is, the caller becomes its reader."""
        if self._last_pass is not None:
            return False
        if self._is_read is not None and self._is_read != is_reading and self._is_read():
            return True
        self._is_read = is_reading
        return False

    def keep(self, verifier: Any, output: VerifierOutput, first_row: int) -> None:
        """Keep what has been read and committed, if others share the prompt."""
        self._is_read = None
        if self.members < 2 or self._last_pass is not None or not isinstance(verifier, CopiesRows):
            return
        self._rows = verifier.copy_rows()
        if self._rows is not None:
            hidden = None if output.hidden is None else output.hidden.clone()
            self._last_pass = PromptPass(VerifierOutput(output.logits.clone(), hidden), first_row)

    def taken(self, inputs: VerifierInputs) -> tuple[VerifierInputs, PromptPass | None]:
        """Return what a sequence with these inputs starts from.

        Returns
        -------
        inputs
            Those that begin after the prompt if it was kept, else the same.
        last_pass
            The prompt's last pass; None where it was not kept.
        """
        if self._last_pass is None or self._rows is None:
            return inputs, None
        kwargs = {**inputs.model_kwargs, self._cache_name: same_rows(self._rows)}
        past = inputs.input_ids.shape[1]
        continued = replace(inputs, model_kwargs=kwargs, past_length=past, holds_past=True)
        return continued, self._last_pass


class SharedPrompts:
    """Prompts that several sequences share, by their tokens."""

    def __init__(self, cache_name: str) -> None:
        self.cache_name = cache_name
        self._known: dict[bytes, SharedPrompt] = {}

    def of(self, inputs: VerifierInputs) -> SharedPrompt | None:
        """Return the prompt that sequences with these inputs share; None where they hold more than tokens."""
        if not is_text_alone(inputs, self.cache_name) or inputs.past_length or inputs.returns_cache:
            return None
        parts = [inputs.input_ids, *(inputs.model_kwargs.get(name) for name in ("attention_mask", "position_ids"))]
        key = b"|".join(b"" if part is None else part.cpu().numpy().tobytes() for part in parts)
        shared = self._known.pop(key, None) or SharedPrompt(self.cache_name)
        shared.members += 1
        self._known[key] = shared
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return shared


def siblings_of(
    rows: Many[Row], drafters: Drafters, options: DraftOptions, cache_name: str, vocabulary: int
) -> list[Siblings | None]:
    """Return, by row, the memory that rows with its prompt share; None for a row that shares none.

    `vocabulary`: tokens that the model knows. A prompt of more than tokens has no answers in a memory of rollouts.
    """
    prompts = [_shown(row) for row in rows]
    keys = [prompt.tobytes() for prompt in prompts]
    counts, made = Counter(keys), dict[bytes, Siblings]()
    for row, prompt, key in zip(rows, prompts, keys, strict=True):
        inputs = row.inputs
        whole = is_text_alone(inputs, cache_name) and (inputs.holds_past or not inputs.past_length)
        if key not in made and (counts[key] > 1 or (whole and drafters.rollouts is not None)):
            made[key] = drafters.siblings(options, prompt if whole else None, vocabulary, counts[key] > 1)
    return [made.get(key) for key in keys]


def _shown(row: Row) -> NDArray[np.int32]:
    """Return the (n,) int32 prompt of a row without its padding."""
    ids = row.inputs.token_ids
    mask = row.inputs.model_kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2 or mask.shape[1] != len(ids):
        return ids
    shown: NDArray[np.int32] = ids[mask[0].bool().cpu().numpy()]
    return shown


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call that are this library's own; `generate` and `generate_stream` say what they mean.

    Attributes
    ----------
    prediction
        As the caller gave it, not encoded.
    session
        Memory that a drafter uses in place of its scope's; False for none.
    """

    draft: str | None = None
    nodes: int | str | None = None
    context_ids: NDArray[np.int32] | None = None
    seed: int | None = None
    on_pass: Callable[[VerifiedPass], None] | None = None
    prediction: Any = None
    siblings: str | None = None
    scope: str | None = None
    store: Any = None
    return_logprobs: bool | None = False
    session: SessionMemory | bool = True

    def __post_init__(self) -> None:
        siblings, scope = self.siblings, self.scope
        require(siblings in (None, "share", "off"), "siblings to be 'share' or 'off'", siblings, "Leave it at 'share'.")
        require(isinstance(scope, str | None), "scope to be a string", scope, "Name whoever the text belongs to.")


def sequences_of(
    speculation: Speculation,
    prepared: Prepared,
    predictions: Many[NDArray[np.int32] | None],
    options: CallOptions,
    prompts: SharedPrompts | None = None,
) -> list[Sequence]:
    """Make a sequence for every row of a prepared call; nothing runs before the engine includes them.

    Parameters
    ----------
    predictions
        Token ids (m,) that each row is expected to follow, or None.
    prompts
        Prompts of other calls, whose sequences may share passes with these.
    """
    nodes = dial(speculation.config.nodes if options.nodes is None else options.nodes)
    stores = speculation.open_stores(options.store)
    drafter = speculation.drafters.get(options.draft, stores)  # raises for an unknown preset
    rows = rows_of(prepared, speculation.interface.cache_name, speculation.new_cache)
    seed, criteria = _seed(prepared, options.seed), prepared.criteria
    if speculation.ranks is not None:
        seed, criteria = speculation.ranks.seed(seed), speculation.ranks.criteria(criteria)
    if prompts is None and len(rows) > 1:
        prompts = SharedPrompts(speculation.interface.cache_name)
    verifiers = speculation.verifiers(len(rows), prompts is not None)  # checks the model before `interface` is used
    drafts = DraftOptions(
        draft=OFF if nodes == 0 else options.draft,
        scope=options.scope or "",
        call=uuid4().hex if len(rows) > 1 else None,
        stores=stores,
        session=options.session,
    )
    may_defer = nodes is None and _may_defer(speculation, drafter, options)
    drafters = _text_drafters(speculation, prepared, rows, predictions, options, drafts, may_defer)
    limits = _limits(speculation, prepared, len(rows), nodes)
    made = []
    for row, verifier, text_drafter in zip(rows, verifiers, drafters, strict=True):
        stopper = Stopper(criteria)
        sequence = Sequence(
            row.inputs,
            verifier,
            text_drafter,
            _sampler(row, prepared, seed, bool(options.return_logprobs)),
            stopper,
            limits.of_row(row.padding, stopper.max_length),
            ids=row.ids,
            documents_of=partial(sourced_runs, datastores=[*speculation.datastores, *stores]),
            on_demand=prepared.callers_cache,
            prompt=None if prompts is None else prompts.of(row.inputs),
        )
        made.append(sequence)
    return made


def _text_drafters(
    speculation: Speculation,
    prepared: Prepared,
    rows: list[Row],
    predictions: Many[NDArray[np.int32] | None],
    options: CallOptions,
    drafts: DraftOptions,
    may_defer: bool,
) -> list[TextDrafter]:
    """Make the drafter of each row; nothing is opened yet."""
    drafters, interface, ranks = speculation.drafters, speculation.interface, speculation.ranks
    siblings: list[Siblings | None] = [None] * len(rows)
    may_share = len(rows) > 1 or drafters.rollouts is not None
    if may_share and options.siblings != "off" and drafts.draft != OFF:
        siblings = siblings_of(rows, drafters, drafts, interface.cache_name, interface.vocabulary)
    context_ids = prepared.context_ids if options.context_ids is None else options.context_ids
    return [
        TextDrafter(
            drafters,
            replace(drafts, siblings=shared),
            row.inputs.token_ids if context_ids is None else context_ids,
            prediction,
            on_pass=options.on_pass,
            wrap=None if ranks is None else ranks.drafter,
            may_defer=may_defer,
            guide=guide_of(row.processors),
        )
        for row, prediction, shared in zip(rows, predictions, siblings, strict=True)
    ]


def _may_defer(speculation: Speculation, drafter: Drafter | None, options: CallOptions) -> bool:
    """Whether the drafters of a call may be opened later than its texts: nobody but the model must see every pass."""
    is_own = drafter is not None and drafter is not speculation.drafters.given and drafter.wants_hidden is None
    return is_own and speculation.ranks is None and options.on_pass is None and options.session is True


def _sampler(row: Row, prepared: Prepared, seed: int | None, log_probs: bool) -> Sampler:
    """Make the sampler of a row."""
    config = prepared.config
    wants_dict = bool(config.return_dict_in_generate)
    return make_sampler(
        row.processors,
        seed,
        row=row.index,
        keep_scores=wants_dict and bool(config.output_scores),
        keep_raw=wants_dict and bool(config.output_logits),
        log_probs=log_probs,
        device=row.ids.device,
    )


@dataclass(frozen=True, slots=True)
class _CallLimits:
    """Limits that the rows of a call share, whose lengths count without padding in front."""

    limits: Limits
    unseen: int

    def of_row(self, padding: int, max_length: int | None) -> Limits:
        """Return the limits of a row with so much padding; its criteria may set its maximum length."""
        limits = self.limits
        return replace(
            limits,
            max_length=limits.max_length if max_length is None else max_length,
            draft_end=limits.draft_end + padding if limits.draft_end else 0,
            padding=padding - self.unseen,  # padding takes no positions
        )


def _limits(speculation: Speculation, prepared: Prepared, num_rows: int, nodes: int | None) -> _CallLimits:
    """Return how much one pass of a call's sequences may draft, and what their caches take."""
    config, interface, whole = speculation.config, speculation.interface, prepared.inputs
    unseen = 0 if whole.holds_past else whole.past_length
    ends = [interface.max_positions] if interface.max_positions else []
    if interface.rope_switch and not interface.rope_rescans:
        ends.append(interface.rope_switch)
    limits = Limits(
        nodes=nodes,
        max_depth=config.max_depth,
        max_length=prepared.config.max_length,
        draft_end=max(min(ends) - unseen, 1) if ends else 0,
        slot_end=max(interface.max_slots - unseen, 1) if interface.max_slots else 0,
        prefill_chunk=config.prefill_chunk,
        prompt_logits=-(-config.prompt_logits // num_rows),  # with many rows, prompts' logits help less
        provenance=config.provenance,
        positions=interface.max_positions,
        bytes_per_token=speculation.bytes_per_token,
        vocabulary=interface.vocabulary,
    )
    return _CallLimits(limits, unseen)


def _seed(prepared: Prepared, seed: int | None) -> int | None:
    """Return the seed of a call's noise: the given one, else one from torch's generator; None for greedy decoding."""
    seed = whole_seed(seed)
    if not prepared.config.do_sample:
        return None
    return int(torch.randint(2**62, (), dtype=torch.int64).item()) if seed is None else seed
