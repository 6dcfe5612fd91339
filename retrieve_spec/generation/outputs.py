"""Outputs: what `generate` returns of sequences that have ended."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from retrieve_spec.engine.rows import Prepared
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.errors import ConfigError
from retrieve_spec.generation.request import setting
from retrieve_spec.sampling.samplers import LogProbSampler
from retrieve_spec.sampling.text import RowText

_KEPT = ("output_scores", "output_logits")


@dataclass
class DecoderOnlyOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `generate(…, return_dict_in_generate=True, return_logprobs=True)` returns.

    Attributes
    ----------
    logprobs
        (rows, new) float32, log-probability of every new token under the distribution it was chosen by: softmax of the
        scores behind all logits processors (temperature and truncation too, where tokens are sampled). 0 behind the
        end of a row; the end-of-text token itself has one.
    raw_logprobs
        (rows, new) float32, the same under softmax of the model's own logits.
    """

    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


@dataclass
class EncoderDecoderOutput(GenerateEncoderDecoderOutput):  # type: ignore[misc]
    """The same of an encoder–decoder; see `DecoderOnlyOutput`."""

    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


def noted(sequence: Sequence, first: int = 0, count: int | None = None) -> NDArray[np.float32] | None:
    """(2, n) float32 of a sequence's new tokens from `first` on, processed and raw; None where not asked for."""
    sampler = sequence.sampler
    return sampler.log_probs(first, count) if isinstance(sampler, LogProbSampler) else None


def by_row(sequences: Many[Sequence], device: torch.device) -> dict[str, torch.Tensor]:
    """Fields of the output of a call, (rows, new) float32 each; none where they were not asked for."""
    rows = [row for row in map(noted, sequences) if row is not None]
    if not rows:
        return {}
    whole = torch.zeros((2, len(rows), max(row.shape[1] for row in rows)))
    for i, row in enumerate(rows):
        whole[:, i, : row.shape[1]] = torch.from_numpy(row)
    return dict(zip(("logprobs", "raw_logprobs"), whole.to(device), strict=True))


def check_call(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse a call of `generate` whose output has no place for log-probabilities, or that searches beams.

    Raises
    ------
    ConfigError
        It returns a tensor, or decodes several beams.
    """
    if not setting(model, arguments, "return_dict_in_generate"):
        raise ConfigError(
            "return_dict_in_generate=True with return_logprobs=True",
            "an output of token ids alone",
            "Ask for the output as a whole: log-probabilities are its fields logprobs and raw_logprobs.",
        )
    check_decoder(model, arguments)


def check_decoder(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse a call whose tokens are chosen by more than their own distribution.

    Raises
    ------
    ConfigError
        It searches beams.
    """
    beams = setting(model, arguments, "num_beams") or 1
    if beams > 1:
        raise ConfigError("one beam with return_logprobs=True", f"num_beams={beams}", "Sample, or decode greedily.")


def of_original(model: Any, original: Any, arguments: dict[str, Any]) -> Any:
    """What the original `generate` says to a call, with log-probabilities from its scores and logits.

    Raises
    ------
    ConfigError
        It hands out no scores.
    """
    output = original(**arguments | dict.fromkeys(_KEPT, True) | {"return_dict_in_generate": True})
    scores, logits = getattr(output, "scores", None), getattr(output, "logits", None)
    if not scores or not logits or len(scores[0]) != len(output.sequences):
        raise ConfigError(
            "a decoder that returns scores with return_logprobs=True",
            type(output).__name__,
            f"Leave it out: {model.speculation.last.reason}.",
        )
    new = output.sequences[:, -len(scores) :]
    shown = _shown(model, arguments, new)
    fields = {
        name: torch.stack([_log_prob(step, new[:, i]) for i, step in enumerate(steps)], dim=1).where(shown, 0.0)
        for name, steps in (("logprobs", scores), ("raw_logprobs", logits))
    }
    kind = DecoderOnlyOutput if isinstance(output, GenerateDecoderOnlyOutput) else EncoderDecoderOutput
    asked = {name.removeprefix("output_"): bool(setting(model, arguments, name)) for name in _KEPT}
    kept = {name: value for name, value in output.items() if asked.get(name, True)}
    return kind(**kept, **fields)


def _log_prob(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(rows,) float32 log-probabilities of tokens (rows,) under softmax of (rows, vocab)."""
    scores = scores.float()
    chosen: torch.Tensor = scores.gather(1, tokens[:, None].to(scores.device))[:, 0]
    log_prob: torch.Tensor = chosen - torch.logsumexp(scores, dim=-1)
    return log_prob


def _shown(model: Any, arguments: dict[str, Any], new: torch.Tensor) -> torch.Tensor:
    """(rows, new) bool: tokens up to the first end-of-text token, or up to padding at the end of a row."""
    ends, pad = setting(model, arguments, "eos_token_id"), setting(model, arguments, "pad_token_id")
    stops = torch.as_tensor([] if ends is None else ends, device=new.device, dtype=new.dtype).reshape(-1)
    over = torch.isin(new, stops).long().cumsum(dim=1)
    before = (over - torch.isin(new, stops).long()) == 0
    if pad is None:
        return before
    padding = (new == pad).flip(1).long().cumprod(dim=1).flip(1).bool() & ~torch.isin(new, stops)
    shown: torch.Tensor = before & ~padding
    return shown


def result_of(sequences: list[Sequence], prepared: Prepared) -> Any:
    """Put the output together as `generate` returns it.

    Of a row of a batch that has ended, scores and logits are zero, and so are the cache's rows, where plain `generate`
    goes on with padding; its recurrent state is that of its end.
    """
    ids = prepared.inputs.input_ids  # narrower prompts become int64, as in plain decoding
    pad = prepared.config._pad_token_tensor
    output = _padded([sequence.text for sequence in sequences], pad).to(ids.device)
    if not prepared.config.return_dict_in_generate:
        return output
    encoded = prepared.inputs.model_kwargs.get("encoder_outputs")
    logprobs = by_row(sequences, output.device)
    kind: Any = GenerateDecoderOnlyOutput if encoded is None else GenerateEncoderDecoderOutput
    if logprobs:
        kind = DecoderOnlyOutput if encoded is None else EncoderDecoderOutput
    one = len(sequences) == 1
    return kind(
        sequences=output,
        scores=_by_step([sequence.sampler.scores for sequence in sequences]),
        logits=_by_step([sequence.sampler.raw for sequence in sequences]),
        past_key_values=sequences[0].cache if one else _one_cache(sequences, output.shape[1] - 1),
        **logprobs,
    )


def _padded(texts: Many[RowText], pad: Any) -> torch.Tensor:
    """(rows, longest) long: texts of one prompt length, ended ones filled up with the padding token."""
    longest = max(text.length for text in texts)
    whole = torch.full((len(texts), longest), int(pad) if pad is not None else 0, dtype=torch.long)
    for row, text in zip(whole, texts, strict=True):
        row[: text.length] = torch.from_numpy(text.ids)
    return whole


def _by_step(rows: Many[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """(rows, vocab) of every step, of (1, vocab) of every row's steps; None where they were not asked for."""
    kept = [row for row in rows if row is not None]
    if len(kept) < len(rows):
        return None
    none = torch.zeros_like(kept[0][0])
    longest = max(map(len, kept))
    return tuple(torch.cat([row[step] if step < len(row) else none for row in kept]) for step in range(longest))


def _one_cache(sequences: Many[Sequence], length: int) -> DynamicCache | None:
    """The caches of rows in one of `length` columns, behind their padding."""
    if any(sequence.cache is None for sequence in sequences):
        return None
    ends = [sequence.text.length - 1 for sequence in sequences]
    whole = DynamicCache()
    whole.layers = [copy.copy(layer) for layer in sequences[0].cache.layers]
    for index, layer in enumerate(whole.layers):
        theirs = [sequence.cache.layers[index] for sequence in sequences]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in ("conv_states", "recurrent_states"):
                setattr(layer, name, _side_by_side([getattr(one, name) for one in theirs]))
        if getattr(theirs[0], "keys", None) is None:
            continue
        layer.keys, layer.values = (
            _columns([getattr(one, name) for one in theirs], ends, length) for name in ("keys", "values")
        )
        if isinstance(layer, DynamicSlidingWindowLayer):
            first = max(length - layer.sliding_window + 1, 0)
            layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
            layer.cumulative_length = length
    return whole


def _side_by_side(states: Many[dict[int, Any]]) -> dict[int, Any]:
    """Recurrent states of rows in one tensor each, by their numbers."""
    return {i: state if state is None else torch.cat([row[i] for row in states]) for i, state in states[0].items()}


def _columns(parts: Many[torch.Tensor], ends: Many[int], length: int) -> torch.Tensor:
    """(rows, heads, length, d): the last rows that each text holds, up to its end."""
    like = parts[0]
    whole = like.new_zeros((len(parts), like.shape[1], length, like.shape[3]))
    for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
        whole[row, :, end - part.shape[2] : end] = part[0]
    return whole
