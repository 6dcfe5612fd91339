"""Vector units: registers and instructions for products of the CPU that Numba compiles for.

Each product is described once for all units (`retrieve_spec.kernels.cpu.vector_code`). A unit has the width of its
registers, the numbers of results they hold, and the ways to multiply bytes and pairs of bfloat16.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from retrieve_spec.kernels.compiled_code import cpu_features
from retrieve_spec.kernels.cpu.vector_ir import (
    BFLOAT16,
    BYTE,
    FLOAT,
    SHORT,
    WORD,
    call,
    constant,
    keep_order,
    lanes_of,
    load,
    splat,
    vector,
)

Word = Callable[[int, int], Any]
"""Returns four bytes of a row's group, by row and index, in every lane."""
AddGroup = Callable[[Any, int, Callable[[int], Any], list[Any], Word], list[Any]]
"""Adds the products of a group of weights and rows' bytes to the rows' sums. Takes the builder, the bits per weight, a
function that loads a vector of weights by index, the rows' initial sums (words), and the rows' bytes."""


@dataclass(frozen=True, eq=False)
class VectorUnit:
    """A target of compiled products.

    Parameters
    ----------
    lanes
        Number of 32-bit lanes in a register.
    add_group
        Multiplies groups of bytes.
    blocks
        Numbers of rows that products of bytes compute together. Few integer sums are in registers; float sums may be in
        memory.
    attention_blocks
        The same for attention, which uses all of its sums all the time.
    tiles
        Number of rows of weights that products with unpacked weights take, by number of rows they compute together.
    widened_tiles
        The same for rows that were converted to float32 (`retrieve_spec.kernels.cpu.vector_code.is_widened`).
    add_pairs
        Adds two products of bfloat16 to each sum by one instruction; None if there is none.
    is_signed
        Whether it multiplies signed by signed bytes, instead of unsigned by signed ones.
    multiplies_by_lane
        Whether instructions can multiply by one lane of a register.
    has_amx
        Whether it has matrix instructions for bfloat16 (`retrieve_spec.kernels.cpu.amx_code`).
    """

    lanes: int
    add_group: AddGroup
    blocks: tuple[int, ...] = (1, 2, 3, 4)
    attention_blocks: tuple[int, ...] = (1, 2, 3, 4)
    tiles: Mapping[int, int] = field(default_factory=lambda: {1: 16, 2: 8, 4: 4})
    widened_tiles: Mapping[int, int] = field(default_factory=lambda: {1: 16, 2: 8, 4: 4})
    add_pairs: Callable[..., Any] | None = None
    is_signed: bool = False
    multiplies_by_lane: bool = False
    has_amx: bool = False

    def word(self, builder: Any, address: Any, index: int, kind: Any) -> Any:
        """Load a 32-bit number by index from an address into every lane."""
        if not self.multiplies_by_lane:
            return splat(builder, load(builder, address, 4 * index, kind, 4), self.lanes)
        four = load(builder, address, 16 * (index // 4), vector(kind, 4), 4)
        return builder.shuffle_vector(four, four, lanes_of([index % 4] * self.lanes))


def _nibbles(builder: Any, bytes_: Any) -> tuple[Any, Any]:
    """Return the lower and the upper halves of bytes."""
    shorts = builder.bitcast(bytes_, vector(SHORT, bytes_.type.count // 2))
    upper = builder.bitcast(builder.lshr(shorts, constant(shorts.type, 4)), bytes_.type)
    low = constant(bytes_.type, 15)
    return builder.and_(bytes_, low), builder.and_(upper, low)


def _fours(builder: Any, bits: int, weights: Callable[[int], Any]) -> list[Any]:
    """Return the weights of a group as bytes, in eight vectors of four consecutive weights per row."""
    if bits == 8:
        return [weights(i) for i in range(8)]
    halves = [_nibbles(builder, weights(i)) for i in range(4)]
    return [low for low, _ in halves] + [high for _, high in halves]


def group_by_fours(add_bytes: Callable[..., Any]) -> AddGroup:
    """Return `add_group` for a unit that adds four products of bytes to a word (`add_bytes`)."""

    def add_group(builder: Any, bits: int, weights: Callable[[int], Any], sums: list[Any], word: Word) -> list[Any]:
        fours, sums = _fours(builder, bits, weights), list(sums)
        for row in range(len(sums)):
            for i, four in enumerate(fours):
                sums[row] = add_bytes(builder, sums[row], four, word(row, i))
        return sums

    return add_group


def group_by_pairs(multiply: str, widen: str) -> AddGroup:
    """Return `add_group` for a unit that adds two products of unsigned and signed bytes to 16 bits.

    Sums do not overflow: they have at most 16 products of 4-bit with 7-bit numbers. Weights of 8 bits are split into
    their lower halves and 16 times their upper halves.

    Parameters
    ----------
    multiply
        LLVM's name of the instruction that multiplies bytes and adds pairs.
    widen
        LLVM's name of the instruction that multiplies 16-bit numbers and adds pairs.
    """

    def add_halves(builder: Any, halves: list[Any], factor: int, sums: list[Any], word: Word) -> list[Any]:
        """Add the products of eight vectors of 4-bit weights to sums, multiplied by a factor."""
        added, shorts = [], vector(SHORT, halves[0].type.count // 2)
        for row, before in enumerate(sums):
            total = None
            for i, half in enumerate(halves):
                products = call(builder, multiply, shorts, half, builder.bitcast(word(row, i), half.type))
                total = products if total is None else builder.add(total, products)
            words = call(builder, widen, before.type, total, constant(shorts, factor))
            added.append(builder.add(before, words))
        return added

    def add_group(builder: Any, bits: int, weights: Callable[[int], Any], sums: list[Any], word: Word) -> list[Any]:
        if bits == 4:
            return add_halves(builder, _fours(builder, bits, weights), 1, sums, word)
        lower = [_nibbles(builder, weights(i))[0] for i in range(8)]
        sums = add_halves(builder, lower, 1, sums, word)
        keep_order(builder)
        upper = [_nibbles(builder, weights(i))[1] for i in range(8)]
        return add_halves(builder, upper, 16, sums, word)

    return add_group


def _add_bytes_by(name: str, builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """Return a function that adds 4 products of unsigned and signed bytes to each sum, by an x86 instruction."""
    return call(builder, name, sums.type, sums, builder.bitcast(weights, sums.type), activations)


def _add_signed_bytes(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """Add 4 products of signed bytes to each sum (Arm's dot products)."""
    name, bytes_ = "llvm.aarch64.neon.sdot.v4i32.v16i8", vector(BYTE, 16)
    return call(builder, name, sums.type, sums, builder.bitcast(weights, bytes_), builder.bitcast(activations, bytes_))


def add_bytes(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """Add 4 products of unsigned and signed bytes to each sum, by operations that every CPU has."""
    lanes = sums.type.count
    shorts, wide = vector(SHORT, 2 * lanes), vector(WORD, 2 * lanes)
    eight = constant(shorts, 8)
    weights, activations = builder.bitcast(weights, shorts), builder.bitcast(activations, shorts)
    evens = builder.and_(weights, constant(shorts, 255)), builder.shl(activations, eight)
    odds = builder.lshr(weights, eight), activations
    for ours, theirs in (evens, odds):
        products = builder.mul(builder.sext(ours, wide), builder.sext(builder.ashr(theirs, eight), wide))
        for first in (0, 1):
            picked = lanes_of(range(first, 2 * lanes, 2))
            sums = builder.add(sums, builder.shuffle_vector(products, products, picked))
    return sums


def _add_pairs_avx512(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """Add 2 products of bfloat16 to each of 16 sums; the first product is not rounded separately."""
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, weights, activations)


def _add_pairs_arm(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """Add 2 products of bfloat16 to each of 4 sums."""
    given = (builder.bitcast(each, vector(BFLOAT16, 8)) for each in (weights, activations))
    return call(builder, "llvm.aarch64.neon.bfdot.v4f32.v8bf16", sums.type, sums, *given)


def portable(lanes: int) -> VectorUnit:
    """Return a unit with operations that every CPU has."""
    return VectorUnit(lanes, group_by_fours(add_bytes))


def units_of(has: Callable[[str], bool], is_x86: bool) -> Iterator[VectorUnit]:
    """The units of a CPU with some of LLVM's features, fastest first."""
    blocks = (1, 2, 3, 4, 6, 8, 9)
    tiles = {"tiles": {1: 8, 2: 4, 3: 4}, "widened_tiles": {1: 8, 2: 4, 4: 2, 5: 2, 6: 2}}
    narrow = {"blocks": blocks, "attention_blocks": (1, 2, 3, 4, 6), **tiles}
    if not is_x86:
        if has("dotprod"):
            by_lane = group_by_fours(_add_signed_bytes)
            pairs = _add_pairs_arm if has("bf16") else None
            yield VectorUnit(4, by_lane, blocks, add_pairs=pairs, is_signed=True, multiplies_by_lane=True)
        yield portable(4)
        return
    if not all(map(has, ("avx2", "fma", "f16c"))):
        return
    if all(map(has, ("avx512f", "avx512bw", "avx512vl"))):
        pairs = _add_pairs_avx512 if has("avx512bf16") else None
        if has("avx512vnni"):
            fours = group_by_fours(partial(_add_bytes_by, "llvm.x86.avx512.vpdpbusd.512"))
            blocks, attention = (1, 2, 4, 8, 9, 12, 16), (1, 2, 4, 8, 12, 16)
            if pairs and has("amx-tile") and has("amx-bf16"):
                yield VectorUnit(16, fours, blocks, attention, add_pairs=pairs, has_amx=True)
            yield VectorUnit(16, fours, blocks, attention, add_pairs=pairs)
        by_pairs = group_by_pairs("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
        yield VectorUnit(16, by_pairs, (1, 2, 4, 8), (1, 2, 4, 8), add_pairs=pairs)
    if has("avxvnni"):
        fours = group_by_fours(partial(_add_bytes_by, "llvm.x86.avx512.vpdpbusd.256"))
        yield VectorUnit(8, fours, **narrow)
    by_pairs = group_by_pairs("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
    yield VectorUnit(8, by_pairs, **narrow)


def _may_use_amx() -> bool:
    """Whether Linux lets this process use tiles; asked once, before any thread uses them."""
    if sys.platform != "linux":
        return False
    arch_prctl, require_permission, of_tiles = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, require_permission, of_tiles) == 0  # type: ignore[no-any-return]


def units_here() -> list[VectorUnit]:
    """Return the units of the CPU that Numba compiles for."""
    is_x86, features = cpu_features()
    if "amx-bf16" in features and not _may_use_amx():
        features -= {"amx-bf16"}
    return list(units_of(features.__contains__, is_x86))


UNITS = units_here()
"""Units that this process can use, fastest first; empty on an x86 CPU without AVX2."""


def unit_here() -> VectorUnit:
    """Return the unit that products are compiled for."""
    return UNITS[0] if UNITS else portable(4)


def has_bfloat16_products() -> bool:
    """Whether the unit has an instruction for products of bfloat16."""
    return unit_here().add_pairs is not None


@dataclass(frozen=True)
class Numbers:
    """Number format of rows in memory, and its conversions.

    Parameters
    ----------
    kind
        LLVM type of a number in memory.
    size
        Bytes of a number.
    """

    kind: Any
    size: int

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """Load contiguous numbers as floats."""
        return self.widened(builder, load(builder, address, 0, vector(self.kind, lanes)))

    def widened(self, builder: Any, numbers: Any) -> Any:
        """Convert numbers of the format to floats."""
        floats = vector(FLOAT, numbers.type.count)
        if self.kind == FLOAT:
            return numbers
        if self.kind == SHORT:
            words = builder.zext(numbers, vector(WORD, floats.count))
            return builder.bitcast(builder.shl(words, constant(words.type, 16)), floats)
        return builder.fpext(numbers, floats)

    def narrowed(self, builder: Any, floats: Any) -> Any:
        """Round floats to the format, to nearest, ties to even."""
        lanes = floats.type.count
        if self.kind == FLOAT:
            return floats
        if self.kind != SHORT:
            return builder.fptrunc(floats, vector(self.kind, lanes))
        words = vector(WORD, lanes)
        bits = builder.bitcast(floats, words)
        even = builder.and_(builder.lshr(bits, constant(words, 16)), constant(words, 1))
        rounded = builder.add(builder.add(bits, even), constant(words, 0x7FFF))
        return builder.trunc(builder.lshr(rounded, constant(words, 16)), vector(SHORT, lanes))

    def in_words(self, builder: Any, words: Any) -> list[Any]:
        """Convert the first and the second number in each 32-bit word to floats."""
        lanes = words.type.count
        floats, sixteen = vector(FLOAT, lanes), constant(words.type, 16)
        if self.kind == FLOAT:
            return [builder.bitcast(words, floats)]
        if self.kind == SHORT:
            upper = builder.and_(words, constant(words.type, 0xFFFF0000))
            return [builder.bitcast(each, floats) for each in (builder.shl(words, sixteen), upper)]
        shorts, halves = vector(SHORT, lanes), vector(self.kind, lanes)
        both = (builder.trunc(each, shorts) for each in (words, builder.lshr(words, sixteen)))
        return [builder.fpext(builder.bitcast(each, halves), floats) for each in both]
