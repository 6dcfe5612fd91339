"""Triton tree attention: queries of draft trees over prefix and tree in one launch, a merge in another.

The trees of several texts take the same launches as one, behind one that writes their keys and values to their slabs.
With TRITON_INTERPRET=1 the kernels run on the CPU.
"""

from __future__ import annotations

import torch
import triton

from retrieve_spec.kernels.triton_tree_kernels import attend_split, merge_splits, move_kept_rows, store_rows

MAX_SPLITS = 32
_KEYS_PER_SPLIT = 256


def num_splits(kv_heads: int, height: int, capacity: int, processors: int) -> int:
    """How many programs share one context: enough to fill the GPU, none with less than a few key blocks."""
    wanted = -(-2 * processors // max(1, kv_heads * -(-height // 64)))
    return max(1, min(MAX_SPLITS, -(-capacity // _KEYS_PER_SPLIT), wanted))


def launch_options(height: int, width: int, itemsize: int) -> dict[str, int]:
    """Block sizes and pipeline depth that fit the shared memory of GPUs since 2020 (99 KiB a program).

    Float32 products run without tensor cores, fully unrolled: small blocks keep their compilation short.
    """
    block_d = max(16, triton.next_power_of_2(width))
    if itemsize > 2:
        return {"BLOCK_D": block_d, "BLOCK_M": 16, "BLOCK_N": 32 if block_d <= 128 else 16, "num_stages": 2}
    block_m = min(64, max(16, triton.next_power_of_2(height)))
    return {"BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": 64 if block_d <= 128 else 32, "num_stages": 2}


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    depths: torch.Tensor,
    prefix: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Attention of one pass over one text.

    Parameters
    ----------
    query
        (heads, rows, d), last axis contiguous; the heads that share a key head stand together.
    keys, values
        (kv_heads, capacity, d), last axis contiguous; the pass's own rows stand behind the prefix.
    words
        (rows, ceil(rows / 32)) int32, bit j of row i: row i sees row j of the pass.
    depths
        (rows,) int32, position of a row minus the position of the pass's first row.
    prefix
        (1,) int32, cached rows before the pass, on the device.
    sinks
        (heads,) logits of a key without a value that every query also attends to.
    splits
        Programs that share one context, at most `MAX_SPLITS`.

    Returns
    -------
    Tensor
        (rows, heads, d) of the query's type.
    """
    height = query.shape[0] // keys.shape[0] * query.shape[1]
    options = launch_options(height, query.shape[2], query.element_size())
    nothing = (prefix, prefix, prefix)
    blocks = triton.cdiv(height, options["BLOCK_M"])
    return _launch(
        query, keys, values, (words, depths, prefix, *nothing), 0, blocks, scale, softcap, window, sinks, splits,
        options, packed=False,
    )  # fmt: skip


def packed_tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    depths: torch.Tensor,
    prefix: torch.Tensor,
    starts: torch.Tensor,
    text_of: torch.Tensor,
    tiles: torch.Tensor,
    slabs: torch.Tensor,
    *,
    layer: int,
    block: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Attention of one pass over several texts, whose keys and values are written to their slabs first.

    Parameters
    ----------
    query
        (heads, rows, d), last axis contiguous; the rows of a text stand together.
    keys, values
        (kv_heads, rows, d) of the pass, last axis contiguous.
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
        16 bytes and of the type of `keys`, and the capacity.
    layer
        Which layer of the slabs.
    block
        Queries of a tile: `BLOCK_M` of the `launch_options` that the tiles were made for.
    splits
        As for `tree_attention`.

    Returns
    -------
    Tensor
        (rows, heads, d) of the query's type.
    """
    kv_heads, rows, width = keys.shape
    options = launch_options(block, width, query.element_size())
    store_rows[(rows, kv_heads)](
        keys, values, text_of, starts, prefix, slabs, layer,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        D=width, BLOCK_D=options["BLOCK_D"], num_warps=1,
    )  # fmt: skip
    described = (words, depths, prefix, starts, tiles, slabs)
    return _launch(
        query, keys, values, described, layer, len(tiles), scale, softcap, window, sinks, splits, options, packed=True
    )


def move_rows(
    kind: torch.Tensor,
    places: torch.Tensor,
    slabs: torch.Tensor,
    prefix: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """Move the rows of all texts, in all layers, that their last commits kept out of place.

    Parameters
    ----------
    kind
        (…, kv_heads, …, d) of the type that slabs hold, of any size; not read.
    places
        (2, layers) int32: which slab holds a layer, and its place there.
    slabs, prefix
        (slabs, texts, 3) and (slabs, texts), by slab as for `packed_tree_attention`.
    starts
        (texts + 1,) int32, where a text's part of `sources` begins.
    sources
        int32: where the last n rows that a text holds stand, ascending, counted from the first of them; n is the length
        of its part.
    """
    width = kind.shape[-1]
    move_kept_rows[(places.shape[1], kind.shape[-3], slabs.shape[1])](
        kind, places, slabs, prefix, starts, sources,
        D=width, BLOCK_D=max(16, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    described: tuple[torch.Tensor, ...],
    layer: int,
    blocks: int,
    scale: float,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
    splits: int,
    options: dict[str, int],
    packed: bool,
) -> torch.Tensor:
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    height = heads // kv_heads * rows
    parts = torch.empty((splits, kv_heads, height, width), dtype=torch.float32, device=query.device)
    lse = torch.empty((splits, kv_heads, height), dtype=torch.float32, device=query.device)
    out = torch.empty((rows, heads, width), dtype=query.dtype, device=query.device)
    attend_split[(kv_heads, blocks, splits)](
        query, keys, values, *described, parts, lse,
        scale, softcap, rows, heads // kv_heads, described[0].shape[1], layer,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        D=width, WINDOW=window, CAPPED=softcap > 0.0, PACKED=packed, **options,
    )  # fmt: skip
    merge_splits[(height, kv_heads)](
        parts, lse, out if sinks is None else sinks, out, rows, height, splits,
        D=width, BLOCK_D=options["BLOCK_D"], BLOCK_S=max(2, triton.next_power_of_2(splits)), SINKS=sinks is not None,
    )  # fmt: skip
    return out
