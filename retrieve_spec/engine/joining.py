"""Joining: a sequence for each row of a prepared call, with a verifier, rules, and a drafter on loan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.config import dial
from retrieve_spec.datastore.store import sourced_runs
from retrieve_spec.drafting.drafter import Drafter, VerifiedPass
from retrieve_spec.engine.drafters import OFF, Drafters, Siblings
from retrieve_spec.engine.sequence import DrafterLease, Limits, Sequence
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.errors import require
from retrieve_spec.sampling.acceptance import Stopper
from retrieve_spec.sampling.guides import guide_of
from retrieve_spec.sampling.samplers import make_sampler, processors_of_row, whole_seed
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
    """The rows of a prepared call, those of a batch without the padding in front and over caches of their own."""
    whole = prepared.inputs
    texts = whole.input_ids if prepared.ids is None else prepared.ids
    fewer = texts.shape[1] - whole.input_ids.shape[1]
    if len(texts) == 1:
        return [Row(0, texts, fewer, whole, processors_of_row(prepared.processors, 0))]
    rows = []
    mask = whole.model_kwargs.get("attention_mask")
    for index, padding in enumerate(padding_in_front(whole) or []):
        kwargs = {**whole.model_kwargs, cache_name: new_cache()}
        if mask is not None:  # what is behind the padding may have holes
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
    """Padding tokens in front of every row of a batch; None when a row has nothing else, or the mask is no row's."""
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
    """Whether tokens are all that a model is given."""
    known = OF_TEXT | {cache_name}
    return all(name in known or value is None for name, value in inputs.model_kwargs.items())


@runtime_checkable
class CopiesRows(Protocol):
    """A verifier that can hand out what its cache holds."""

    def copy_rows(self) -> DynamicCache | None:
        """The rows held between two passes, in a cache that nothing writes to; None where rows are not all there is."""


class SharedPrompt:
    """One prompt of several sequences, for models that take the cache as the argument `cache_name`."""

    def __init__(self, cache_name: str) -> None:
        self.members = 0
        self._cache_name = cache_name
        self._is_read: Callable[[], bool] | None = None  # asks the sequence that reads it whether it still does
        self._rows: DynamicCache | None = None
        self._last_pass: tuple[VerifierOutput, int] | None = None  # and the row of it that follows the prompt

    def must_wait(self, is_reading: Callable[[], bool]) -> bool:
        """Whether another sequence is reading the prompt; if nobody is, the one that asks does from now on."""
        if self._last_pass is not None:
            return False
        if self._is_read is not None and self._is_read != is_reading and self._is_read():
            return True
        self._is_read = is_reading
        return False

    def keep(self, verifier: Any, output: VerifierOutput, first_row: int) -> None:
        """Keep what has been read and committed, unless nobody else will ask for it."""
        self._is_read = None
        if self.members < 2 or self._last_pass is not None or not isinstance(verifier, CopiesRows):
            return
        self._rows = verifier.copy_rows()
        if self._rows is not None:
            hidden = None if output.hidden is None else output.hidden.clone()
            self._last_pass = VerifierOutput(output.logits.clone(), hidden), first_row

    def taken(self, inputs: VerifierInputs) -> tuple[VerifierInputs, tuple[VerifierOutput, int] | None]:
        """What a sequence with these inputs starts from.

        Returns
        -------
        inputs
            Those that begin behind the prompt if it was kept, else the same.
        last_pass
            What the prompt's last pass gave, and the row of it that follows the prompt; None where it was not kept.
        """
        if self._last_pass is None or self._rows is None:
            return inputs, None
        kwargs = {**inputs.model_kwargs, self._cache_name: same_rows(self._rows)}
        past = inputs.input_ids.shape[1]
        behind = replace(inputs, model_kwargs=kwargs, past_length=past, holds_past=True)
        return behind, self._last_pass


class SharedPrompts:
    """The prompts of sequences that go together, by their tokens."""

    def __init__(self, cache_name: str) -> None:
        self.cache_name = cache_name
        self._known: dict[bytes, SharedPrompt] = {}

    def of(self, inputs: VerifierInputs) -> SharedPrompt | None:
        """What sequences with these inputs share; None where they hold more than tokens."""
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
    rows: Many[Row],
    drafters: Drafters,
    draft: str | None,
    cache_name: str,
    vocabulary: int,
    scope: str = "",
    stores: Many[Any] = (),
) -> list[Siblings | None]:
    """By row, what those with its prompt share; None for a row that has nothing but its own text.

    `vocabulary`: tokens that the model knows; `scope`: whose rows these are. A prompt of more than tokens has no
    answers in a memory of rollouts.
    """
    prompts = [_shown(row) for row in rows]
    keys = [prompt.tobytes() for prompt in prompts]
    counts, made = Counter(keys), dict[bytes, Siblings]()
    for row, prompt, key in zip(rows, prompts, keys, strict=True):
        inputs = row.inputs
        whole = is_text_alone(inputs, cache_name) and (inputs.holds_past or not inputs.past_length)
        if key not in made and (counts[key] > 1 or (whole and drafters.rollouts is not None)):
            answers_to = prompt if whole else None
            made[key] = drafters.siblings(draft, answers_to, vocabulary, scope, counts[key] > 1, stores)
    return [made.get(key) for key in keys]


def _shown(row: Row) -> NDArray[np.int32]:
    """(n,) int32 the prompt of a row without its padding."""
    ids: NDArray[np.int32] = row.inputs.input_ids[0].cpu().numpy().astype(np.int32)
    mask = row.inputs.model_kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2 or mask.shape[1] != len(ids):
        return ids
    shown: NDArray[np.int32] = ids[mask[0].bool().cpu().numpy()]
    return shown


def sequences_of(
    speculation: Speculation,
    prepared: Prepared,
    predictions: Many[NDArray[np.int32] | None],
    *,
    draft: str | None = None,
    nodes: int | str | None = None,
    context_ids: NDArray[np.int32] | None = None,
    seed: int | None = None,
    on_pass: Callable[[VerifiedPass], None] | None = None,
    siblings: str | None = None,
    scope: str | None = None,
    store: Any = None,
    return_logprobs: bool = False,
    together: SharedPrompts | None = None,
    on_loan: Callable[[Drafter], None] | None = None,
) -> list[Sequence]:
    """A sequence for every row of a prepared call; nothing runs before the engine takes them along.

    Arguments are those of `generate` and `generate_stream`; `predictions` has one for each row. `together`: prompts of
    other calls, whose sequences will share passes with these. `on_loan`: called with each drafter that is lent, before
    it reads anything.
    """
    most, criteria = dial(speculation.config.nodes if nodes is None else nodes), prepared.criteria
    context_ids = prepared.context_ids if context_ids is None else context_ids
    require(siblings in (None, "share", "off"), "siblings to be 'share' or 'off'", siblings, "Leave it at 'share'.")
    require(isinstance(scope, str | None), "scope to be a string", scope, "Name whoever the text belongs to.")
    stores = speculation.open_stores(store)
    like = speculation.drafters.of(draft, stores)  # an unknown preset is an error now
    cache_name, ranks = speculation.interface.cache_name, speculation.ranks
    rows = rows_of(prepared, cache_name, speculation.new_cache)
    seed = _seed(prepared, seed)
    if ranks is not None:
        seed, criteria = ranks.seed(seed), ranks.criteria(criteria)
    if together is None and len(rows) > 1:
        together = SharedPrompts(cache_name)
    verifiers = speculation.verifiers(len(rows), together is not None)  # looks at the model, then interface
    config, interface, whole = speculation.config, speculation.interface, prepared.inputs
    wants_dict = bool(prepared.config.return_dict_in_generate)
    call = uuid4().hex if len(rows) > 1 else None
    # One that others watch, or that must see every pass, comes at once.
    may_wait = like is not None and like is not speculation.drafters.given and like.wants_hidden is None
    may_wait &= most is None and ranks is None and on_pass is None and on_loan is None
    shared: list[Siblings | None] = [None] * len(rows)
    if siblings != "off" and most != 0 and draft != OFF:
        shared = siblings_of(rows, speculation.drafters, draft, cache_name, interface.vocabulary, scope or "", stores)
    unseen = 0 if whole.holds_past else whole.past_length
    ends = [interface.max_positions] if interface.max_positions else []
    if interface.rope_switch and not interface.rope_rescans:
        ends.append(interface.rope_switch)
    made = []
    for row, verifier, prediction, group in zip(rows, verifiers, predictions, shared, strict=True):
        lend, give_back = loan(speculation, OFF if most == 0 else draft, call, group, on_loan, scope or "", stores)
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
        read = row.inputs.input_ids[0].cpu().numpy().astype(np.int32) if context_ids is None else context_ids
        sequence = Sequence(
            row.inputs,
            verifier,
            DrafterLease(lend, read, prediction, on_pass, may_wait),
            sampler,
            stopper,
            Limits(
                nodes=most,
                max_depth=config.max_depth,
                max_length=stopper.max_length if stopper.max_length is not None else prepared.config.max_length,
                draft_end=max(min(ends) - unseen, 1) + row.padding if ends else 0,
                slot_end=max(interface.max_slots - unseen, 1) if interface.max_slots else 0,
                prefill_chunk=config.prefill_chunk,
                prompt_logits=-(-config.prompt_logits // len(rows)),  # with many rows what is learned there drafts less
                provenance=config.provenance,
                positions=interface.max_positions,
                padding=row.padding - unseen,  # which take no positions
                bytes_per_token=speculation.bytes_per_token,
                vocabulary=interface.vocabulary,
            ),
            ids=row.ids,
            on_end=give_back,
            waits_for_reader=prepared.callers_cache,
            prompt=together.of(row.inputs) if together else None,
            guide=guide_of(row.processors),
        )
        made.append(sequence)
    return made


def loan(
    speculation: Speculation,
    draft: str | None,
    call: str | None,
    siblings: Siblings | None,
    on_loan: Callable[[Drafter], None] | None = None,
    scope: str = "",
    stores: Many[Any] = (),
) -> tuple[Callable[[], Drafter | str], Callable[[Sequence], None]]:
    """What lends a sequence its drafter, and what takes it back when it has ended."""
    drafters, ranks, read = speculation.drafters, speculation.ranks, [*speculation.datastores, *stores]
    began, lent = drafters.times_forgotten(scope), list[Drafter]()

    def lend() -> Drafter | str:
        if drafters.times_forgotten(scope) > began:  # one that comes late would take in what was said before
            return "what was said in its scope was to be forgotten meanwhile"
        drafter = drafters.lend(draft, call, siblings, scope, stores)
        if isinstance(drafter, str):
            return drafter
        lent.append(drafter)
        if on_loan is not None:
            on_loan(drafter)
        shared = drafter if ranks is None else ranks.drafter(drafter)
        assert shared is not None
        return shared

    def give_back(sequence: Sequence) -> None:
        for drafter in lent:
            drafters.give_back(drafter, sequence.lease.spoiled)
        said_all = sequence.stopped and sequence.error is None and drafters.times_forgotten(scope) == began
        if lent and siblings is not None and said_all:
            siblings.answer(sequence.text.new_ids)
        lent.clear()
        sequence.report.provenance = sourced_runs(sequence.report.origins, read)

    return lend, give_back


def _seed(prepared: Prepared, seed: int | None) -> int | None:
    """Seed of a call's noise: the one given or one from torch's generator; None when it decodes greedily."""
    seed = whole_seed(seed)
    if not prepared.config.do_sample:
        return None
    return int(torch.randint(2**62, (), dtype=torch.int64).item()) if seed is None else seed
