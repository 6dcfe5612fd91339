"""Triton tree attention: queries of draft trees over prefix and tree in one launch, then a merge.

Queries that share a key head are stacked, so a key is read once per group. The mask within the tree has one bit per
pair of rows; the prefix has no mask. A long context is split over programs, whose partial results are merged by
log-sum-exp. Lengths are read from device memory, so that a captured CUDA graph can be replayed while the cache grows,
and numbers that change from pass to pass cause no recompilation. Trees of several texts, each with its own cache, take
the same launches as one: positions of rows and slabs are also read from device memory. The first launch also writes the
pass's keys and values to the slabs, which it reads only for the prefix. With TRITON_INTERPRET=1, the kernels run on the
CPU.

Exact attention adds up a query's keys in an order that depends on its position only, so that results are bitwise
independent of the other rows in a pass: first, in fixed blocks, the keys that precede any pass with this query, then
the last keys before it one by one, since rows of other branches lie between those that it sees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from retrieve_spec.kernels.attention_inputs import LayerRule, PackedTexts
from retrieve_spec.kernels.triton_rows import overlap, take_turn

MAX_SPLITS = 64
_KEYS_PER_SPLIT = 256
ZONE: tl.constexpr = tl.constexpr(64)
"""Number of keys before a query (up to twice as many) that are added one by one; a multiple of all key blocks.

A text has at most so many rows in an exact pass, so that all full blocks precede the pass.
"""


def num_splits(kv_heads: int, height: int, capacity: int, processors: int) -> int:
    """Return the number of programs per context: enough to fill the GPU once, each with at least a few key blocks."""
    wanted = 2 * processors // max(1, kv_heads * -(-height // 64))
    return max(1, min(MAX_SPLITS, -(-capacity // _KEYS_PER_SPLIT), wanted))


def launch_options(height: int, width: int, itemsize: int) -> dict[str, int]:
    """Return block sizes and pipeline depth that fit the shared memory of GPUs since 2020 (99 KiB per program).

    Float32 products do not use tensor cores and are fully unrolled, so small blocks keep compilation short.
    """
    block_d = max(16, triton.next_power_of_2(width))
    if itemsize > 2:
        return {"BLOCK_D": block_d, "BLOCK_M": 16, "BLOCK_N": 32 if block_d <= 128 else 16, "num_stages": 2}
    block_m = min(64, max(16, triton.next_power_of_2(height)))
    return {"BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": 64 if block_d <= 128 else 32, "num_stages": 2}


def packed_tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    texts: PackedTexts,
    rule: LayerRule,
    *,
    layer: int,
    block: int,
    splits: int = 1,
    exact: bool = False,
) -> torch.Tensor:
    """Write the keys and values of a pass over several texts to their slabs, then compute attention.

    Parameters
    ----------
    query
        (heads, rows, d), last axis contiguous; the rows of a text are adjacent.
    keys, values
        (kv_heads, rows, d) of the pass, last axis contiguous.
    texts, rule
        Masks and slabs of the texts, and parameters of the layer's scores.
    layer
        Index of the layer in the slabs.
    block
        Queries per tile: `BLOCK_M` of the `launch_options` for which the tiles were made.
    splits
        Programs per context, at most `MAX_SPLITS`.
    exact
        Whether results of a row are bitwise independent of other rows, in passes with equal `block` and `splits`; a
        text then has at most `ZONE` rows.

    Returns
    -------
    Tensor
        (rows, heads, d) of the query's type.
    """
    kv_heads, rows, width = keys.shape
    options = launch_options(block, width, query.element_size())
    height = query.shape[0] // kv_heads * rows
    parts = torch.empty((splits, kv_heads, height, width), dtype=torch.float32, device=query.device)
    lse = torch.empty((splits, kv_heads, height), dtype=torch.float32, device=query.device)
    out = torch.empty((rows, query.shape[0], width), dtype=query.dtype, device=query.device)
    attend_split[(kv_heads, len(texts.tiles), splits)](
        query, keys, values, texts.words, texts.depths, texts.prefix, texts.starts, texts.tiles, texts.slabs, parts,
        lse, rule.scale, rule.softcap, rows, query.shape[0] // kv_heads, texts.words.shape[1], layer,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], D=width, WINDOW=rule.window,
        CAPPED=rule.softcap > 0.0, EXACT=exact, **options, **overlap(query.device, rows),
    )  # fmt: skip
    sinks = rule.sinks
    merge_splits[(height, kv_heads)](
        parts, lse, out if sinks is None else sinks, out, rows, height, splits,
        D=width, BLOCK_D=options["BLOCK_D"], BLOCK_S=max(2, triton.next_power_of_2(splits)), SINKS=sinks is not None,
        **overlap(query.device, rows),
    )  # fmt: skip
    return out


def move_rows(
    kind: torch.Tensor,
    places: torch.Tensor,
    slabs: torch.Tensor,
    prefix: torch.Tensor,
    starts: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """Move the rows that the last commits kept to their final positions, for all texts and layers.

    Parameters
    ----------
    kind
        (…, kv_heads, …, d) tensor of the slabs' dtype and of any size, which is not read.
    places
        (2, layers) int32 slab of each layer, and its index there.
    slabs, prefix
        (slabs, texts, 3) and (slabs, texts): for each slab, as for `packed_tree_attention`.
    starts
        (texts + 1,) int32 start of each text's part of `sources`.
    sources
        int32 present positions of each text's last n rows, ascending, relative to the first; n is the length of its
        part.
    """
    width = kind.shape[-1]
    move_kept_rows[(places.shape[1], kind.shape[-3], slabs.shape[1])](
        kind, places, slabs, prefix, starts, sources,
        D=width, BLOCK_D=max(16, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _capped(s, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the soft cap to scores, if there is one."""
    if CAPPED:
        s = softcap * (2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0)
    return s


@triton.jit
def _scores(q, keys, stride, n, inside, d, scale, softcap, D: tl.constexpr, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scores of a block of keys."""
    k = tl.load(keys + n[:, None] * stride + d[None, :], inside[:, None] & (d[None, :] < D), 0.0)
    return _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, softcap, CAPPED)


@triton.jit
def _fold(s, values, stride, n, inside, d, best, weight, acc, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Update the running maximum, sum and output of an online softmax by a block of values."""
    top = tl.maximum(best, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp(s - base[:, None])
    shrink = tl.exp(best - base)
    v = tl.load(values + n[:, None] * stride + d[None, :], inside[:, None] & (d[None, :] < D), 0.0)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return top, weight * shrink + tl.sum(p, 1), acc


@triton.jit
def _slab_of(slabs, text, layer, head, heads, keys, values, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to a text's keys and values of one head of a layer, with the dtypes of `keys` and `values`."""
    at = (layer * heads + head) * tl.load(slabs + 3 * text + 2) * D
    key_slab = tl.multiple_of(tl.load(slabs + 3 * text).to(keys.dtype), 16)
    value_slab = tl.multiple_of(tl.load(slabs + 3 * text + 1).to(values.dtype), 16)
    return key_slab + at, value_slab + at


@triton.jit(
    do_not_specialize=["total", "groups", "num_words", "layer"],
    do_not_specialize_on_alignment=["words", "depths", "prefix", "starts", "tiles", "slabs"],
)
def attend_split(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    query,  # (heads, total, d), strides given; the heads of a group stand together
    keys,  # (kv_heads, total, d) of the pass, strides given
    values,
    words,  # (total, num_words) int32: bit j of row i: row i sees row j of its text in the pass
    depths,  # (total,) int32: position of a row minus the position of its text's first row in the pass
    prefix,  # (texts,) int32: rows a text's slab holds before the pass
    starts,  # (texts + 1,) int32: where a text's rows begin
    tiles,  # (tiles, 2) int32: text and first query of a program's block, text -1 where there is none
    slabs,  # (texts, 3) int64: addresses of keys and values (layers, kv_heads, capacity, d), capacity
    out,  # (splits, kv_heads, groups * total, d) float32, not written for splits without keys
    lse,  # (splits, kv_heads, groups * total) float32
    scale,
    softcap,
    total,
    groups,
    num_words,
    layer,
    query_head_stride,
    query_row_stride,
    key_head_stride,
    key_row_stride,
    value_head_stride,
    value_row_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Compute attention of a block of queries to a split of the keys, and the log of the softmax denominator.

    The last split's programs append the pass's keys and values to the slabs, where no program reads them.
    """
    take_turn(OVERLAP)
    head = tl.program_id(0).to(tl.int64)  # a long cache of many heads has more than 2^31 elements
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    d = tl.arange(0, BLOCK_D)
    text = tl.load(tiles + 2 * tl.program_id(1))
    if text < 0:
        return
    m = tl.load(tiles + 2 * tl.program_id(1) + 1) + tl.arange(0, BLOCK_M)
    begin = tl.load(starts + text)
    rows = tl.load(starts + text + 1) - begin
    past = tl.load(prefix + text)
    held_keys, held_values = _slab_of(slabs, text, layer, head, tl.num_programs(0), keys, values, D)
    keys += head * key_head_stride + begin * key_row_stride
    values += head * value_head_stride + begin * value_row_stride
    words += begin * num_words
    depths += begin
    query += begin * query_row_stride
    row = m % rows
    height = groups * rows
    query_head = head * groups + m // rows
    q = tl.load(
        query + query_head[:, None] * query_head_stride + row[:, None] * query_row_stride + d[None, :],
        (m[:, None] < height) & (d[None, :] < D),
        0.0,
    )
    if split == splits - 1:  # every row is once among the first of the heads that are stacked
        own_row = (m[:, None] < rows) & (d[None, :] < D)
        slot = (past + m).to(tl.int64)[:, None] * D + d[None, :]
        tl.store(held_keys + slot, tl.load(keys + m[:, None] * key_row_stride + d[None, :], own_row), own_row)
        tl.store(held_values + slot, tl.load(values + m[:, None] * value_row_stride + d[None, :], own_row), own_row)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if EXACT or WINDOW > 0:
        depth = tl.load(depths + row)
    stop = past
    if EXACT:
        own = tl.maximum((past + depth) // ZONE - 1, 0) * ZONE  # first key that is added one by one
        stop = tl.max(own, 0)
    start = 0
    if WINDOW > 0:  # no row sees further back than the first one
        start = tl.maximum(past - WINDOW + 1, 0) // BLOCK_N
    start += (split - start % splits + splits) % splits  # splits take blocks in turn, for any length of text
    at_out = (split * tl.num_programs(0) + head) * groups * total + m // rows * total + begin + row
    if (start * BLOCK_N >= stop) & (split < splits - 1):
        tl.store(lse + at_out, float("-inf"), m < height)
        return
    for block in range(start, tl.cdiv(stop, BLOCK_N), splits):
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < stop
        s = _scores(q, held_keys, D, n, inside, d, scale, softcap, D, CAPPED)
        seen = inside[None, :]
        if EXACT:
            seen = n[None, :] < own[:, None]
        if WINDOW > 0:
            seen = seen & (depth[:, None] + past - n[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        best, weight, acc = _fold(s, held_values, D, n, inside, d, best, weight, acc, D)

    if EXACT:
        wide = q.to(tl.float32)
        first = tl.maximum(past // ZONE - 1, 0) * ZONE
        for n in range(tl.where(split == splits - 1, first, past + rows), past + rows):
            drafted = tl.maximum(n - past, 0)
            k = tl.where(n < past, held_keys + n * D, keys + drafted * key_row_stride)
            k = tl.load(k + d, d < D, 0.0).to(tl.float32)
            s = _capped(tl.sum(wide * k[None, :], 1) * scale, softcap, CAPPED)
            bits = tl.load(words + row * num_words + drafted // 32)
            seen = tl.where(n < past, n >= own, ((bits >> (drafted % 32)) & 1) == 1)
            if WINDOW > 0:
                at = tl.where(n < past, n, past + tl.load(depths + drafted))
                seen = seen & (past + depth - at < WINDOW)
            s = tl.where(seen, s, float("-inf"))
            top = tl.maximum(best, s)
            base = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp(s - base)
            shrink = tl.exp(best - base)
            v = tl.where(n < past, held_values + n * D, values + drafted * value_row_stride)
            v = tl.load(v + d, d < D, 0.0).to(tl.float32)
            best, weight, acc = top, weight * shrink + p, acc * shrink[:, None] + p[:, None] * v[None, :]
    else:
        tl.static_assert(BLOCK_N <= 64, "a block of the tree has two words of bits at most")
        for first in range(0, tl.where(split == splits - 1, rows, 0), BLOCK_N):  # the last split is the smallest
            n = first + tl.arange(0, BLOCK_N)
            inside = n < rows
            s = _scores(q, keys, key_row_stride, n, inside, d, scale, softcap, D, CAPPED)
            word = first // 32
            bits = tl.load(words + row * num_words + word)[:, None]
            if BLOCK_N > 32:
                more = tl.load(words + row * num_words + word + 1, word + 1 < num_words, 0)[:, None]
                bits = tl.where((n // 32)[None, :] == word, bits, more)
            seen = inside[None, :] & (((bits >> (n % 32)[None, :]) & 1) == 1)
            if WINDOW > 0:
                seen = seen & (depth[:, None] - tl.load(depths + n, inside, 0)[None, :] < WINDOW)
            s = tl.where(seen, s, float("-inf"))
            best, weight, acc = _fold(s, values, value_row_stride, n, inside, d, best, weight, acc, D)

    share_of_row = tl.where(weight > 0.0, weight, 1.0)
    tl.store(
        out + at_out[:, None] * D + d[None, :], acc / share_of_row[:, None], (m[:, None] < height) & (d[None, :] < D)
    )
    tl.store(lse + at_out, tl.where(weight > 0.0, best + tl.log(share_of_row), float("-inf")), m < height)


@triton.jit(do_not_specialize=["rows", "height", "splits"])
def merge_splits(  # type: ignore[no-untyped-def]
    parts,  # (splits, kv_heads, groups * rows, d) float32
    lse,  # (splits, kv_heads, groups * rows) float32
    sinks,  # (heads,) logits of a key without a value, any float type; not read unless SINKS
    out,  # (rows, heads, d)
    rows,
    height,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Merge partial outputs, weighted by their shares of the softmax denominator."""
    take_turn(OVERLAP)
    m = tl.program_id(0)  # the first axis, as others are limited to 65,535
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    groups = height // rows
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    at = (s * kv_heads + head) * height + m
    share = tl.load(lse + at, s < splits, float("-inf"))
    best = tl.max(share, 0)
    if SINKS:
        sink = tl.load(sinks + head * groups + m // rows).to(tl.float32)
        best = tl.maximum(best, sink)
    weight = tl.exp(share - best)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - best)
    written = (share > float("-inf"))[:, None] & (d[None, :] < D)
    part = tl.load(parts + at[:, None] * D + d[None, :], written, 0.0)
    merged = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + ((m % rows) * kv_heads * groups + head * groups + m // rows) * D + d, merged, d < D)


@triton.jit(do_not_specialize_on_alignment=["places", "slabs", "prefix", "starts", "sources"])
def move_kept_rows(  # type: ignore[no-untyped-def]
    kind,  # of the type that slabs hold; not read
    places,  # (2, layers) int32: the slab of a layer, and its place there
    slabs,  # (slabs, texts, 3) int64: as for attend_split
    prefix,  # (slabs, texts) int32: rows a text's slab holds before the pass
    starts,  # (texts + 1,) int32: where a text's sources begin
    sources,  # int32, ascending: present positions of the last rows, relative to the first of them
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move the last rows of one text, for one head of a layer, to their final positions.

    No row moves backwards past another, so moving them in order overwrites none that is still to be read.
    """
    layer = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    text = tl.program_id(2)
    texts = tl.num_programs(2)
    begin = tl.load(starts + text)
    count = tl.load(starts + text + 1) - begin
    if count == 0:
        return
    slab = tl.load(places + layer)
    place = tl.load(places + tl.num_programs(0) + layer)
    own = slabs + 3 * slab * texts
    keys, values = _slab_of(own, text, place, head, tl.num_programs(1), kind, kind, D)
    first = tl.load(prefix + slab * texts + text) - count
    d = tl.arange(0, BLOCK_D)
    for i in range(count):
        source = (first + tl.load(sources + begin + i)).to(tl.int64) * D + d
        target = (first + i).to(tl.int64) * D + d
        tl.store(keys + target, tl.load(keys + source, d < D), d < D)
        tl.store(values + target, tl.load(values + source, d < D), d < D)
