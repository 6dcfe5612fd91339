"""A batch that `generate` prepared in, its rows decoded together out: each drafts for itself, one pass verifies all."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from retrieve_spec.config import MAX_NODES
from retrieve_spec.engine.cost import CostModel
from retrieve_spec.engine.loop import Decoding
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.request import Prepared
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.recorded.cuda.packed_graphs import GraphedTexts
from retrieve_spec.recorded.packed_pass import forward_together
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.sampling.samplers import make_sampler, processors_of_row
from retrieve_spec.sampling.stopping import Stopper
from retrieve_spec.sampling.text import RowText
from retrieve_spec.verify.verifier import VerifierInputs

ROW_BY_ROW = (
    hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor, hf.NoBadWordsLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensLogitsProcessor, hf.SuppressTokensAtBeginLogitsProcessor, hf.ForcedEOSTokenLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor, hf.ExponentialDecayLengthPenalty, hf.InfNanRemoveLogitsProcessor,
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.LogitNormalization,
)  # fmt: skip
"""Processors that say the same of a row alone as in company; others may count rows or calls."""
_STOPS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


def why_not_together(prepared: Prepared, arguments: dict[str, Any], cache_name: str) -> str:
    """Why a prepared batch is left to the original `generate`; empty when its rows can be decoded together."""
    kwargs, criteria = prepared.inputs.model_kwargs, list(prepared.criteria)
    if prepared.config.return_dict_in_generate or arguments.get("past_key_values") is not None:
        return "more than the tokens of a batch is handed back"
    if arguments.get("streamer") is not None:
        return "a batch is streamed"
    if (positions := kwargs.get("position_ids")) is not None and len(positions) != len(prepared.inputs.input_ids):
        return "a batch has positions of its own"
    if type(kwargs.get(cache_name)) is not DynamicCache or kwargs[cache_name].offloading:
        return f"a batch is kept in a {type(kwargs.get(cache_name)).__name__}"
    others = [p for p in prepared.processors if type(p) not in ROW_BY_ROW]
    others += [c for c in criteria if type(c) not in _STOPS]
    if others:
        return f"a {type(others[0]).__name__} may tell the rows of a batch apart"
    kinds = [type(criterion) for criterion in criteria]
    if StopStringCriteria in kinds and EosTokenCriteria not in kinds:
        return "rows of a batch go on behind a stop string where there is no end-of-text token"
    return "" if left_padding(prepared.inputs) is not None else "a batch is padded elsewhere than on the left"


def left_padding(inputs: VerifierInputs) -> list[int] | None:
    """Padding tokens in front of every row of a batch; None when some stand elsewhere, or a row has nothing else."""
    mask = inputs.model_kwargs.get("attention_mask")
    rows, length = inputs.input_ids.shape
    if mask is None:
        return [0] * rows
    if mask.shape != (rows, length):
        return None
    shown = mask.bool().cpu().numpy()
    padding = length - shown.sum(axis=1)
    as_expected = np.arange(length) >= padding[:, None]
    return padding.tolist() if (shown == as_expected).all() and padding.max() < length else None


def row_inputs(inputs: VerifierInputs, row: int, padding: int, cache_name: str, cache: Any) -> VerifierInputs:
    """One row of a batch without its padding, over a cache of its own."""
    kwargs = {**inputs.model_kwargs, "attention_mask": None, cache_name: cache}
    if (positions := kwargs.get("position_ids")) is not None:
        kwargs["position_ids"] = positions[row : row + 1, padding:]
    ids = inputs.input_ids[row : row + 1, padding:]
    return VerifierInputs(ids, kwargs, max_length=inputs.max_length - padding, returns_cache=False)


class Batch:
    """Rows that are decoded in step: one pass of the model verifies the drafts of all rows that have not ended.

    Parameters
    ----------
    rows
        The decodings, by row.
    verifiers
        Theirs.
    costs
        By number of rows that have not ended: what such passes cost. Rows are taken to draft alike, so that n nodes
        of one row cost what a pass with n nodes in every row does.
    auto
        Whether budgets follow these costs.
    graphs
        Captured passes over several rows.
    """

    def __init__(
        self,
        rows: Sequence[Decoding],
        verifiers: Sequence[RecordedVerifier],
        costs: Mapping[int, CostModel],
        auto: bool,
        graphs: GraphedTexts | None = None,
    ) -> None:
        self._rows, self._verifiers, self._costs, self._auto = rows, verifiers, costs, auto
        self._graphs = graphs
        self._passes = 1

    def run(self) -> None:
        """Read the prompts, one after another, and decode all rows to their ends."""
        live = [i for i, row in enumerate(self._rows) if not _to_end(row.prefill()).stopped]
        while live:
            live = self._step(live)

    def _step(self, live: list[int]) -> list[int]:
        """One pass over the rows `live`; which of them go on."""
        rows, verifiers = [self._rows[i] for i in live], [self._verifiers[i] for i in live]
        context = sum(row.text.length for row in rows)
        began = perf_counter()
        cost, most = self._budget(len(live), context)
        trees = [row.draft(cost, most) for row in rows]
        roots, hidden, captured = [row.text.last_ids for row in rows], rows[0].wants_hidden, self._captures
        drafted = perf_counter()
        with torch.no_grad():
            outputs = forward_together(verifiers, roots, trees, hidden, self._graphs)
        for row in rows:
            row.log.take_down()
        logits = [row.read(output, tree) for row, output, tree in zip(rows, outputs, trees, strict=True)]
        checked = perf_counter()
        walks = [row.accept(tree, seen) for row, tree, seen in zip(rows, trees, logits, strict=True)]
        committed = perf_counter()
        for row, tree, verified, seen, output in zip(rows, trees, walks, logits, outputs, strict=True):
            row.learn(tree, verified, seen, output)
        times = np.diff([began, drafted, checked, committed, perf_counter()])
        share = tuple((times / len(rows)).tolist())
        for row, tree, verified in zip(rows, trees, walks, strict=True):
            row.log.note(tree, verified, share, row.text.length)
        nodes = sum(map(len, trees)) + len(rows) - 1
        if captured == self._captures:  # capturing takes longer than the pass
            self._costs[len(rows)].observe(nodes, context, float(times[1]), float(times.sum() - times[1]))
        self._passes += 1
        return [i for i, verified in zip(live, walks, strict=True) if not verified.stopped]

    @property
    def _captures(self) -> int:
        """Passes captured so far."""
        return 0 if self._graphs is None else self._graphs.captures

    def _budget(self, rows: int, context: int) -> tuple[NDArray[np.float32] | None, int]:
        """Cost of 0 … n nodes in every row, and the n that one pass has room for."""
        most = (MAX_NODES + 1) // rows - 1
        seconds = self._costs[rows].seconds(context, MAX_NODES) if self._auto else None
        return None if seconds is None else seconds[rows - 1 :: rows][: most + 1], most

    def finish(self, seconds: float) -> GenerationReport:
        """End all rows; their reports as one."""
        for row in self._rows:
            row.finish()
        parts = [row.log.summary() for row in self._rows]
        first = parts[0]
        merged = GenerationReport(
            first.mode, first.reason, first.pass_kind, first.pass_reason, rows=len(parts), seconds=seconds
        )
        for part in parts:
            for name in ("new_tokens", "nodes", "prefill_ms", "draft_ms", "verify_ms", "commit_ms", "learn_ms"):
                setattr(merged, name, getattr(merged, name) + getattr(part, name))
            merged.per_pass += part.per_pass
            for source, count in part.accepted_by_source.items():
                merged.accepted_by_source[source] = merged.accepted_by_source.get(source, 0) + count
        merged.passes = self._passes
        return merged


def generate_batch(
    speculation: Speculation,
    prepared: Prepared,
    arguments: dict[str, Any],
    *,
    draft: str | None,
    nodes: int | str | None,
    predictions: Sequence[NDArray[np.int32] | None],
    seed: int | None,
) -> torch.Tensor | str:
    """Decode a prepared batch: (rows, length) token ids as `generate` returns them, or why it should do it itself.

    Parameters
    ----------
    speculation
        The model's.
    prepared, arguments
        The call as `generate` prepared it, and its arguments by name.
    draft, nodes, seed
        As for `generate` of an accelerated model.
    predictions
        By row, the text it is expected to follow, or None.
    """
    cache_name = speculation.interface.cache_name
    if why := why_not_together(prepared, arguments, cache_name):
        return why
    inputs, nodes = prepared.inputs, speculation.dial(nodes)
    first = speculation.make_verifier()
    assert isinstance(first, RecordedVerifier)
    padding = left_padding(inputs) or []
    drafters = speculation.row_drafters(draft, len(padding)) if nodes != 0 else [None] * len(padding)
    if drafters[0] is not None and drafters[0].wants_hidden not in (None, first.recorded.layer):
        return f"hidden states of layer {drafters[0].wants_hidden} are not recorded"
    seed = speculation.draw_seed(prepared, seed)
    rows, verifiers = [], []
    for i, drafter in enumerate(drafters):
        cache = DynamicCache(config=first.model.config.get_text_config(decoder=True))
        own = row_inputs(inputs, i, padding[i], cache_name, cache)
        verifiers.append(first.alone())
        verifiers[i].start(own)
        if verifiers[i].not_recorded:
            return verifiers[i].not_recorded
        stopper = Stopper(prepared.criteria)
        limits = speculation.limits(prepared, stopper, nodes, padding=padding[i])
        text = RowText(inputs.input_ids[i : i + 1], limits.max_length + 1)
        sampler = make_sampler(processors_of_row(prepared.processors, i), seed, row=i, device=inputs.input_ids.device)
        given = text.prompt_ids[padding[i] :]
        rows.append(
            Decoding(
                own,
                verifiers[i],
                drafter,
                sampler,
                stopper,
                limits,
                None,
                prediction_ids=predictions[i],
                context_ids=given,
                text=text,
            )
        )
    graphs = None if first.pool is None else first.pool.take_texts()
    batch = Batch(rows, verifiers, speculation.batch_costs(len(rows)), nodes is None, graphs)
    speculation.turns.begin()
    began = perf_counter()
    try:
        batch.run()
    finally:
        speculation.last = batch.finish(perf_counter() - began)
        if first.pool is not None and graphs is not None:
            first.pool.give_back_texts(graphs)
    pad = prepared.config._pad_token_tensor
    return padded_together([row.text for row in rows], pad).to(inputs.input_ids.device)


def _to_end(prefill: Generator[Any, None, Any]) -> Any:
    """Run a generator to its end and return what it returns."""
    while True:
        try:
            next(prefill)
        except StopIteration as end:
            return end.value


def padded_together(texts: Sequence[RowText], pad: Any) -> torch.Tensor:
    """(rows, longest) long: rows of one prompt length, ended ones filled up with the padding token."""
    longest = max(text.length for text in texts)
    whole = torch.full((len(texts), longest), int(pad) if pad is not None else 0, dtype=torch.long)
    for row, text in zip(whole, texts, strict=True):
        row[: text.length] = torch.from_numpy(text.ids)
    return whole
