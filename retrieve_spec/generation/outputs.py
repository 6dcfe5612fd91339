"""Outputs: what `generate` returns of sequences that have ended."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Many
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from retrieve_spec.engine.rows import Prepared
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.generation.logprobs import DecoderOnlyOutput, EncoderDecoderOutput, by_row
from retrieve_spec.sampling.text import RowText


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
    unwritten = 0 if prepared.ids is None else ids.shape[1] - prepared.ids.shape[1]
    return kind(
        sequences=output,
        scores=_by_step([sequence.sampler.scores for sequence in sequences]),
        logits=_by_step([sequence.sampler.raw for sequence in sequences]),
        past_key_values=sequences[0].cache if one else _one_cache(sequences, output.shape[1] - 1, unwritten),
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


def _one_cache(sequences: Many[Sequence], length: int, unwritten: int) -> DynamicCache | None:
    """The caches of rows in one, behind their padding: `length` columns behind those of places without a token."""
    if any(sequence.cache is None for sequence in sequences):
        return None
    length += unwritten
    ends = [sequence.text.length - 1 + unwritten for sequence in sequences]
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
