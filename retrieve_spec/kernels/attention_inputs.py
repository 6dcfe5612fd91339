"""What attention over the texts of a pass takes besides queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What one layer's attention does beyond softmax(q·k) v.

    Attributes
    ----------
    scale
        Factor of the scores.
    window
        Keys a query sees at most, itself included; 0 for all.
    softcap
        Scores s become softcap · tanh(s / softcap); 0 for none.
    sinks
        (heads,) logits of a key without a value that every query also attends to, or None.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """The texts of one pass, one after the other, and the slabs of keys and values of one group of layers.

    Attributes
    ----------
    words
        (rows, num_words) int32, bit j of row i: row i sees row j of its text.
    depths
        (rows,) int32, position of a row minus the position of its text's first row in the pass.
    prefix
        (texts,) int32, rows a text's slab holds before the pass.
    starts
        (texts + 1,) int32, where the rows of a text begin and end.
    text_of
        (rows,) int32, the text a row belongs to.
    tiles
        (tiles, 2) int32: which text's queries a program takes, and from which of its groups · rows on; text -1 for
        programs with nothing to do.
    slabs
        (texts, 3) int64: addresses of a text's keys and of its values, (layers, kv_heads, capacity, d) each, aligned to
        16 bytes and of the type of the pass's keys, and the capacity.
    """

    words: torch.Tensor
    depths: torch.Tensor
    prefix: torch.Tensor
    starts: torch.Tensor
    text_of: torch.Tensor
    tiles: torch.Tensor
    slabs: torch.Tensor
