"""Tree attention: queries of a draft tree attend to preallocated keys and values, without a copy of the prefix.

Every row of a pass sees the whole committed prefix, so only the last `rows × rows` block of scores needs a mask. Two
backends compute what `attend` returns where neither programs over rows (`retrieve_spec.kernels.cpu`) nor
Triton's kernels (`retrieve_spec.kernels.triton_tree_attention`) do:

masked
    one `scaled_dot_product_attention`; queries that share a key head are stacked, so keys are never repeated.
split
    tree block with a mask and prefix without, block by block (`attend_blocks`); also applies
    soft-capping and sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from retrieve_spec.config import PASS
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.attention_inputs import LayerRule
from retrieve_spec.kernels.treemask import unpacked

Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys, values, and an additive mask or None."""


def attend_blocks(packed: torch.Tensor, blocks: Iterable[Block], rule: LayerRule) -> torch.Tensor:
    """Attend to all blocks: (1, kv_heads, height, d) in, (1, kv_heads, height, d_v) out.

    A running maximum m and sum of exp(score - m) are kept per query; what was summed is rescaled when m grows, so that
    the result is that of one softmax over all scores, but for rounding.
    """
    lowest = torch.finfo(torch.float32).min  # instead of -inf, whose differences are NaN
    greatest = total = out = None
    for keys, values, additive in blocks:
        scores = torch.matmul(packed, keys.transpose(2, 3)).float().mul_(rule.scale)
        if rule.softcap:
            scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        if additive is not None:
            scores = scores.add_(additive)
        top = scores.amax(-1, keepdim=True).clamp_min_(lowest)
        if greatest is not None:
            top = torch.maximum(top, greatest)
        weights = scores.sub_(top).exp_()
        part, share = torch.matmul(weights.to(values.dtype), values).float(), weights.sum(-1, keepdim=True)
        if greatest is None or total is None or out is None:
            greatest, total, out = top, share, part
        else:
            kept = torch.exp(greatest - top)
            greatest, total, out = top, total.mul_(kept).add_(share), out.mul_(kept).add_(part)
    assert greatest is not None and total is not None and out is not None, "a query sees itself at least"
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(1, packed.shape[1], -1, 1)
        sinks = sinks.repeat_interleave(packed.shape[2] // sinks.shape[2], dim=2)
        top = torch.maximum(greatest, sinks)
        kept = torch.exp(greatest - top)
        total, out = total * kept + torch.exp(sinks - top), out * kept
    return (out / total).to(packed.dtype)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: TreeMask, rule: LayerRule
) -> torch.Tensor:
    """Attention of one pass in one layer.

    Parameters
    ----------
    query
        (1, heads, rows, d), rotated already.
    keys, values
        (1, kv_heads, held + rows, d), the rows of the pass last; all of the prefix, or all in the layer's window.
    mask
        The mask of the pass.
    rule
        The layer's rule.

    Returns
    -------
    Tensor
        (1, rows, heads, d_v).
    """
    batch, heads, rows, width = query.shape
    kv_heads = keys.shape[1]
    if start := mask.first_key(rule.window):
        columns = mask.prefix + mask.rows - start
        keys, values = keys[:, :, -columns:], values[:, :, -columns:]
    packed = query.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    split = rule.softcap or rule.sinks is not None or mask.device.type != "cpu" or not (mask.fits or rule.window)
    backend = attend_split if split else attend_masked
    out = backend(packed, keys, values, mask, rule)
    return out.reshape(batch, heads, rows, values.shape[-1]).transpose(1, 2)


def attend_by_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: TreeMask, rule: LayerRule
) -> torch.Tensor:
    """Attend row by row, each by the fused call that decodes it alone; the arguments are those of `attend`.

    The order of sums over keys depends on their number and addresses, and 16-bit results differ by it. So each row gets
    the keys that it sees, contiguous, as if it were the last token of a text. This also excludes infinities in rows
    that it does not see, which a mask would turn into NaN (0 · inf).
    """
    _, heads, rows, width = query.shape
    held = keys.shape[2] - rows
    out = query.new_empty((1, rows, heads, values.shape[3]))
    for row in range(rows):
        seen = mask.seen[row]
        if seen[: row + 1].all():
            own_keys, own_values = (x[:, :, : held + row + 1] for x in (keys, values))
        else:
            places = torch.from_numpy(np.concatenate([np.arange(held), held + np.flatnonzero(seen)]))
            own_keys, own_values = (x.index_select(2, places.to(x.device)) for x in (keys, values))
        if rule.window:
            own_keys, own_values = (x[:, :, -rule.window :] for x in (own_keys, own_values))
        packed = query[:, :, row].view(1, keys.shape[1], -1, width)
        if rule.softcap or rule.sinks is not None:
            part = attend_blocks(packed, [(own_keys, own_values, None)], rule)
        else:
            part = functional.scaled_dot_product_attention(packed, own_keys, own_values, scale=rule.scale)
        out[:, row] = part.view(1, heads, -1)
    return out


def attend_masked(
    packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: TreeMask, rule: LayerRule
) -> torch.Tensor:
    """Attend to prefix and tree block in one fused call: (1, kv_heads, groups · rows, d) in and out."""
    hides = mask.rows > 1 or mask.cuts(rule.window)
    additive = mask.additive(rule.window, mask.first_key(rule.window)) if hides else None
    return functional.scaled_dot_product_attention(packed, keys, values, attn_mask=additive, scale=rule.scale)


def attend_split(
    packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: TreeMask, rule: LayerRule
) -> torch.Tensor:
    """Attend to the tree block, then to blocks of the prefix, by online softmax; shapes as in `attend_masked`."""
    prefix = keys.shape[2] - mask.rows
    size = max(PASS.score_bytes // (4 * packed.shape[1] * packed.shape[2]), 64)  # number of keys whose scores fit
    windowed = mask.additive(rule.window, mask.first_key(rule.window)) if mask.cuts(rule.window) else None
    drafted = mask.additive(0, mask.prefix) if windowed is None else windowed[..., prefix:]

    def blocks() -> Iterator[Block]:
        yield keys[:, :, prefix:], values[:, :, prefix:], drafted
        for start in range(0, prefix, size):
            part = slice(start, min(start + size, prefix))
            yield keys[:, :, part], values[:, :, part], None if windowed is None else windowed[..., part]

    return attend_blocks(packed, blocks(), rule)


KNOWN_RULES = ("sliding_window", "softcap", "s_aux")
IGNORED_ARGUMENTS = (
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "is_causal", "cu_seq_lens_q",
)  # fmt: skip


def rule_from_call(scaling: float | None, width: int, arguments: dict[str, Any]) -> LayerRule:
    """Return a layer's rule from the arguments of its attention function.

    Raises
    ------
    NotImplementedError
        The arguments are not supported here.
    """
    for name, value in arguments.items():
        if value is None or name in KNOWN_RULES or name in IGNORED_ARGUMENTS:
            continue
        if isinstance(value, torch.Tensor) or name in ("position_bias", "cache", "head_mask"):
            raise NotImplementedError(f"its attention takes {name}")
    return LayerRule(
        scale=width**-0.5 if scaling is None else float(scaling),
        window=int(arguments.get("sliding_window") or 0),
        softcap=float(arguments.get("softcap") or 0.0),
        sinks=arguments.get("s_aux"),
    )


def visible_rows(roots: int, tree: DraftTree | None) -> NDArray[np.bool_]:
    """Return which rows of a pass see which: (roots + n, roots + n) bool over root tokens, then nodes."""
    if tree is None or not len(tree):
        return np.tri(roots, dtype=np.bool_)
    return unpacked(tree.visible_rows(roots))


def row_depths(roots: int, tree: DraftTree | None) -> NDArray[np.int64]:
    """Return the position of every row of a pass relative to its first row: (roots + n,) int64."""
    head = np.arange(roots, dtype=np.int64)
    return head if tree is None or not len(tree) else np.concatenate([head, tree.depth.astype(np.int64) + roots - 1])


def visibility_bits(seen: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return (rows, ceil(rows / 32)) int32: bit j of row i is set if row i sees row j of the pass."""
    rows = len(seen)
    padded = np.zeros((rows, -(-rows // 32) * 32), np.bool_)
    padded[:, :rows] = seen
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


class TreeMask:
    """The mask of one pass, shared by all layers with the same window.

    Parameters
    ----------
    groups
        Query heads per key head.
    dtype, device
        Of the queries.
    """

    def __init__(self, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.groups = groups
        self.dtype, self.device = dtype, device
        self.rows = self.prefix = 0
        self.seen: NDArray[np.bool_] = np.ones((1, 1), np.bool_)
        self._depths: NDArray[np.int64] = np.zeros(1, np.int64)
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def set(self, prefix: int, seen: NDArray[np.bool_], depths: NDArray[np.int64]) -> None:
        """Set the next pass: committed rows before it, visibility, and positions relative to its first row."""
        self.rows, self.prefix, self.seen, self._depths = len(seen), prefix, seen, depths
        self._made.clear()

    @property
    def fits(self) -> bool:
        """Whether a mask over all keys fits `config.PASS.mask_bytes`."""
        columns = self.prefix + self.rows
        return self.groups * self.rows * columns * self.dtype.itemsize <= PASS.mask_bytes

    def first_key(self, window: int) -> int:
        """Return the first cached row that any row of the pass sees with this window; 0 without one."""
        return max(0, self.prefix - window + 1) if window else 0

    def cuts(self, window: int) -> bool:
        """Whether a window hides any row."""
        return 0 < window <= self.prefix + self.rows

    def additive(self, window: int, first: int) -> torch.Tensor:
        """Return the (1, 1, groups · rows, columns) additive mask for this window, from column `first` on."""
        if (window, first) not in self._made:
            position = np.concatenate([np.arange(first, self.prefix), self.prefix + self._depths])
            seen = position > (self.prefix + self._depths - (window or np.inf))[:, None]
            seen[:, self.prefix - first :] &= self.seen
            mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
            self._made[window, first] = mask.repeat(self.groups, 1).to(self.device, non_blocking=True)[None, None]
        return self._made[window, first]
