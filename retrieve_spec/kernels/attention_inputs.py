"""Inputs of attention over the texts of a pass, other than queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Parameters of a layer's attention beyond softmax(q·k) v.

    Attributes
    ----------
    scale
        Factor of the scores.
    window
        Most keys that a query sees, including itself; 0 for all.
    softcap
        Scores s become softcap · tanh(s / softcap); 0 for none.
    sinks
        (heads,) logits of an additional key without a value, or None.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """The texts of one pass, concatenated, and the slabs of keys and values of one group of layers.

    Attributes
    ----------
    words
        (rows, num_words) int32, bit j of row i: row i sees row j of its text.
    depths
        (rows,) int32 position of a row relative to its text's first row in the pass.
    prefix
        (texts,) int32 number of rows in a text's slab before the pass.
    starts
        (texts + 1,) int32 boundaries of the texts' rows.
    tiles
        (tiles, 2) int32 text of a program's queries, and the first of its groups · rows; -1 for programs without work.
    slabs
        (texts, 3) int64 addresses of a text's keys and values, (layers, kv_heads, capacity, d) each, aligned to 16
        bytes and of the dtype of the pass's keys, and the capacity.
    """

    words: torch.Tensor
    depths: torch.Tensor
    prefix: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    slabs: torch.Tensor
