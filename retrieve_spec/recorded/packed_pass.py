"""Packed pass: the rows of one text or of several in one recorded pass, every text over its own KV buffer."""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention import visibility_bits
from retrieve_spec.config import PASS
from retrieve_spec.errors import in_a_line
from retrieve_spec.kernels.attention_inputs import LayerRule, PackedTexts
from retrieve_spec.recorded.kv_buffer import KEY_BLOCK, KVBuffer
from retrieve_spec.recorded.recorded_pass import ALL, RecordedPass
from retrieve_spec.verify.verifier import Ran

logger = logging.getLogger(__name__)


class DeviceFields:
    """Named int32 arrays in one block of host memory and one of device memory.

    Parameters
    ----------
    sizes
        By name, how many numbers; fields of 64-bit numbers, which count twice, come first.

    Attributes
    ----------
    device
        By name, the array that kernels read.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        pinned = device.type == "cuda"
        with torch.inference_mode(False):  # the buffer may outlive the current mode
            self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=pinned)
            self._device = torch.empty(self._host.shape, dtype=torch.int32, device=device)
        self.device = dict(zip(sizes, torch.split(self._device, list(sizes.values())), strict=True))
        ends = np.cumsum(list(sizes.values()))[:-1]
        self._fields = dict(zip(sizes, np.split(self._host.numpy(), ends), strict=True))
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def writable(self) -> dict[str, NDArray[np.int32]]:
        """By name, the array to write to; the device may still be reading what was written for the last pass."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._fields

    def send(self) -> None:
        """Copy all fields to the device."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@dataclass(frozen=True, slots=True)
class LaidOut:
    """One text's part of a pass, for which its cache has room.

    Attributes
    ----------
    ids, depths
        (rows,) each: tokens, and positions relative to the first row.
    seen
        (rows, rows) bool: who sees whom.
    position
        Position of the first row.
    cache, held
        Where keys and values are written, and how many rows of text that holds.
    drafts
        Whether there are drafted rows among them.
    """

    ids: NDArray[np.int32]
    depths: NDArray[np.int64]
    seen: NDArray[np.bool_]
    position: int
    cache: KVBuffer
    held: int
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class PassShape:
    """The shape of a pass.

    Attributes
    ----------
    rows, texts
        Rows of the pass and texts at most, padding included.
    block
        Queries that one program of the attention takes.
    splits
        By slab, how many programs share one context.
    logits
        How many rows logits are computed for; which ones is written with each pass. 0 for all.
    exact
        Whether a row's attention is independent, bit for bit, of the other rows.
    """

    rows: int
    texts: int
    block: int
    splits: tuple[int, ...]
    logits: int = 0
    exact: bool = False


class PackedBuffer:
    """The inputs of one pass over the rows of several texts, each with slabs of its own.

    Padding rows belong to the last text: they see themselves only and are written after its real rows.

    Parameters
    ----------
    shape
        Of the pass.
    slabs
        Slabs of a text.
    groups
        Query heads per key head.

    Attributes
    ----------
    moves
        Rows that all texts together can have moved before the pass (`KVBuffer.take_moves`).
    """

    moves = PASS.max_rows

    def __init__(self, shape: PassShape, slabs: int, groups: int, device: torch.device) -> None:
        rows, texts = shape.rows, shape.texts
        words, tiles = -(-rows // 32), -(-groups * rows // shape.block) + texts
        sizes = {
            "slabs": 6 * slabs * texts, "ids": 2 * rows, "positions": 2 * rows, "wanted": 2 * (shape.logits or rows),
            "depths": rows, "held": slabs * texts, "starts": texts + 1, "tiles": 2 * tiles, "words": rows * words,
            "move_starts": texts + 1, "sources": self.moves,
        }  # fmt: skip
        self._fields = DeviceFields(sizes, device)
        self._shape, self._groups = shape, groups
        on_device = self._fields.device
        wide = (on_device[name].view(torch.int64) for name in ("ids", "positions", "wanted"))  # as models take them
        self.ids, self.positions, self.wanted = wide
        self.depths, self.starts = on_device["depths"], on_device["starts"]
        self.words, self.tiles = on_device["words"].view(rows, words), on_device["tiles"].view(tiles, 2)
        self.held = on_device["held"].view(slabs, texts)
        self.slabs = on_device["slabs"].view(torch.int64).view(slabs, texts, 3)
        self.move_starts, self.sources = on_device["move_starts"], on_device["sources"]

    def texts(self, slab: int) -> PackedTexts:
        """Return the texts of the pass with the keys and values of one of their slabs."""
        return PackedTexts(self.words, self.depths, self.held[slab], self.starts, self.tiles, self.slabs[slab])

    def fill(self, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None = None) -> None:
        """Write a pass over at most `texts` texts with at most `rows` rows together, and what their commits move."""
        host = self._fields.writable()
        rows = self._shape.rows
        counts = [len(text.ids) for text in laid]
        real = sum(counts)
        counts[-1] += rows - real
        starts = np.concatenate([[0], np.cumsum(counts)])
        host["starts"][:] = rows
        host["starts"][: len(starts)] = starts
        ids, positions, rows_wanted = (host[name].view(np.int64) for name in ("ids", "positions", "wanted"))
        ids[:real], ids[real:] = np.concatenate([text.ids for text in laid]), 0
        host["depths"][:real], host["depths"][real:] = np.concatenate([text.depths for text in laid]), 0
        positions[:] = host["depths"] + np.repeat([text.position for text in laid], counts)
        if wanted is not None:
            rows_wanted[: len(wanted)], rows_wanted[len(wanted) :] = wanted, 0
        self._write_words(host["words"].reshape(rows, -1), laid, starts)
        self._write_tiles(host["tiles"].reshape(-1, 2), counts)
        self._write_slabs(host, laid)
        self._write_moves(host["move_starts"], host["sources"], laid)
        self._fields.send()

    def _write_words(self, words: NDArray[np.int32], laid: Sequence[LaidOut], starts: NDArray[np.int64]) -> None:
        words[:] = 0
        for text, start in zip(laid, starts.tolist(), strict=False):
            bits = visibility_bits(text.seen)
            words[start : start + len(bits), : bits.shape[1]] = bits
        own = np.arange(len(laid[-1].ids), self._shape.rows - starts[-2])  # padding, counted as part of the last text
        words.view(np.uint32)[starts[-2] + own, own // 32] = np.uint32(1) << (own % 32).astype(np.uint32)

    def _write_tiles(self, tiles: NDArray[np.int32], counts: Sequence[int]) -> None:
        firsts = [np.arange(0, self._groups * count, self._shape.block) for count in counts]
        used = sum(map(len, firsts))
        tiles[:used, 0] = np.repeat(np.arange(len(counts)), [len(first) for first in firsts])
        tiles[:used, 1] = np.concatenate(firsts)
        tiles[used:] = -1

    def _write_slabs(self, host: dict[str, NDArray[np.int32]], laid: Sequence[LaidOut]) -> None:
        held = host["held"].reshape(-1, self._shape.texts)
        places = host["slabs"].view(np.int64).reshape(-1, self._shape.texts, 3)
        for i, text in enumerate(laid):
            held[:, i] = [text.held - slab.offset for slab in text.cache.slabs]
            places[:, i] = text.cache.addresses[text.cache.first_layers]

    def _write_moves(self, starts: NDArray[np.int32], sources: NDArray[np.int32], laid: Sequence[LaidOut]) -> None:
        end = 0
        for i, text in enumerate(laid):
            moved = text.cache.take_moves(len(sources) - end)
            sources[end : end + len(moved)] = moved
            starts[i], end = end, end + len(moved)
        starts[len(laid) :] = end


EXACT_ROWS = KEY_BLOCK
"""Most rows of an exact pass, except of those that read prompts."""
_CONTEXTS = (4096, 16384)
"""Tokens of contexts that are split over as many programs as fill a GPU; others are split like the next shorter one."""


class PackedPass:
    """A recorded pass of one shape on a GPU, whose attention is one launch for all texts.

    It reads the places of the texts' rows and slabs from device memory, so it serves any texts, however their slabs
    grow.

    Parameters
    ----------
    recorded
        The recorded pass.
    cache
        A KV buffer like those of the texts to come: layers and shapes are read from it.
    shape
        What it is made for.
    """

    def __init__(self, recorded: RecordedPass, cache: KVBuffer, shape: PassShape) -> None:
        self._recorded, self._shape = recorded, shape
        self._slab_of, self._layer_in_slab = cache.slab_of, cache.layer_in_slab
        self._buffer = PackedBuffer(shape, len(cache.slabs), recorded.groups, recorded.device)
        self._kind = cache.slabs[0].tensors[0][:1, :, :1].clone()
        places = torch.tensor([cache.slab_of, cache.layer_in_slab], dtype=torch.int32)
        self._places = places.to(recorded.device, non_blocking=True)
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill(self, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None = None) -> None:
        """Write a pass to the device, and which rows' logits are wanted of those that have any."""
        self._buffer.fill(laid, wanted)

    def run(self) -> None:
        """Run the pass that was written last."""
        from retrieve_spec.kernels.triton_tree_attention import move_rows

        buffer = self._buffer
        move_rows(self._kind, self._places, buffer.slabs, buffer.held, buffer.move_starts, buffer.sources)
        wanted = buffer.wanted if self._shape.logits else ALL
        self._outputs = self._recorded.run(buffer.ids[None], buffer.positions[None], self._attend, wanted)

    @property
    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, vocab) logits and (rows, d) states, padding included, valid until the next pass."""
        assert self._outputs is not None
        return self._outputs[0][0], self._outputs[1][0]

    def chosen(self, count: int) -> torch.Tensor:
        """(count, vocab), the logits of the rows that were wanted, of a pass that computes those of all."""
        return self.outputs[0].index_select(0, self._buffer.wanted[:count])

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        from retrieve_spec.kernels.triton_tree_attention import packed_tree_attention

        at, rule = self._slab_of[layer], self._recorded.rules[layer]
        query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
        return packed_tree_attention(
            query[0], keys[0], values[0], self._buffer.texts(at), rule, layer=self._layer_in_slab[layer],
            block=self._shape.block, splits=self._shape.splits[at], exact=self._shape.exact,
        )[None]  # fmt: skip


def shape_of(recorded: RecordedPass, laid: Sequence[LaidOut], rows: int, texts: int, logits: int = 0) -> PassShape:
    """What a pass like one that is laid out is made for, with so many rows and texts at most.

    Programs take as many queries as a text has: those of one text fill blocks, those of many with a few rows each
    would leave them empty. What is exact has one shape for all of its passes; pieces of prompts can be longer.
    """
    from retrieve_spec.kernels.triton_tree_attention import launch_options, num_splits

    keys = laid[0].cache.slabs[0].tensors[0]
    heads, width, count = keys.shape[1], keys.shape[3], processors(recorded.device)
    exact = recorded.exact > 0 and rows <= EXACT_ROWS
    height = recorded.groups * (1 if exact else -(-rows // len(laid)))
    wide = min(height, 32) if width > 128 else height  # additional addresses leave fewer registers
    small = launch_options(1, width, keys.element_size())["BLOCK_M"]
    block = launch_options(wide, width, keys.element_size())["BLOCK_M"] if height > 2 * small else small
    queries = recorded.groups * (1 if exact else rows)
    is_long = not exact and max(text.held for text in laid) >= _CONTEXTS[1]
    context = _CONTEXTS[is_long]
    splits = tuple(
        1 if exact and slab.window  # rows that leave a window would change the blocks
        else num_splits(heads, queries, min(slab.window or context, context), count)
        for slab in laid[0].cache.slabs
    )  # fmt: skip
    return PassShape(rows, texts, block, splits, logits, exact)


def packs(recorded: RecordedPass, laid: Sequence[LaidOut]) -> bool:
    """Whether one launch can serve all texts of a pass; else each layer attends text by text."""
    if why_not_triton(recorded.device.type):
        return False
    kinds = {text.cache.kind for text in laid}
    return len(kinds) == 1 and all(kind is not None and kind[1] <= 256 for kind in kinds)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def why_not_triton(device: str) -> str:
    """Why the GPU kernels cannot be used on a kind of device, tried once on small caches; empty when they can."""
    if device != "cuda":
        return f"the kernels run on a GPU, the model on {device}"
    try:
        wrong = _deviation(torch.device(device))
        why = "" if wrong < 1e-2 else f"they give something else (off by {wrong:.2g})"
    except Exception as error:  # imports and the compiler may raise anything; torch's operations compute the same
        why = in_a_line(error)
    if why:
        logger.warning("passes attend without Triton's kernels: %s", why)
    return why


def _deviation(device: torch.device) -> float:
    """Largest error over two texts whose values are all one and two."""
    from retrieve_spec.kernels.triton_tree_attention import packed_tree_attention

    caches = [KVBuffer([0], 16) for _ in range(2)]
    states = torch.ones((1, 1, 3, 16), dtype=torch.float16, device=device)
    laid = []
    for i, cache in enumerate(caches):
        cache.slabs[0].fit(states, states)
        cache.refresh()
        for tensor in cache.slabs[0].tensors:
            tensor.fill_(i + 1)
        rows = i + 1
        laid.append(LaidOut(np.zeros(rows, np.int32), np.arange(rows), np.tri(rows, dtype=np.bool_), 5, cache, 5))
    buffer = PackedBuffer(PassShape(3, 2, 16, (1,)), 1, 1, device)
    buffer.fill(laid)
    values = torch.ones_like(states)
    values[:, :, 1:] = 2
    got = packed_tree_attention(states[0], states[0], values[0], buffer.texts(0), LayerRule(1.0), layer=0, block=16)
    return float((got[:, 0] - values[0, 0]).abs().max())


Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


class CudaGraphCapture:
    """Records a call on a side stream, after a warm-up, and returns what repeats it.

    All graphs share one memory pool: a graph's outputs are read before any graph is replayed again. They share the
    stream, too, as cuBLAS keeps a workspace for each.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Record one call of `run`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if not self._graphs:  # torch refuses a pool without live graphs
            self._pool = torch.cuda.graph_pool_handle()
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a failed capture leaves its stream current
            run()
            # "thread_local": other threads may use the GPU during the capture
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs.add(graph)
        return graph.replay


class PassGraphs:
    """Captured passes of one recording, made when first needed, within `config.PASS.graph_bytes`.

    Parameters
    ----------
    recorded
        The recorded pass.
    capture
        Makes a replay of a call; tests pass the identity.

    Attributes
    ----------
    captures
        Passes captured so far.
    problem
        Why the last pass that was not replayed was not.
    """

    def __init__(self, recorded: RecordedPass, capture: Capture | None = None) -> None:
        self._recorded, self._capture = recorded, CudaGraphCapture() if capture is None else capture
        self._made: dict[PassShape, tuple[PackedPass, Replay]] = {}
        self._bytes = 0
        self._failed = ""
        self.captures = 0
        self.problem = ""

    def clear(self) -> None:
        """Drop what was captured: the weights' addresses hold no longer."""
        self._made.clear()
        self._bytes = 0

    def run(
        self, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, Ran] | None:
        """What `run_pass` returns; None where no graph serves the pass."""
        real = sum(len(text.ids) for text in laid)
        at = bisect_left(PASS.graph_rows, real)
        if at == len(PASS.graph_rows) or not packs(self._recorded, laid):
            wide = f"a pass of {real} rows is wider than any graph"
            self.problem = wide if at == len(PASS.graph_rows) else "its layers do not attend in one launch"
            return None
        rows = PASS.graph_rows[at]
        few = 0 if wanted is None or rows < PASS.graph_rows[-1] else len(wanted)
        few = few if few <= PASS.graph_logits else 0
        shape = shape_of(self._recorded, laid, rows, min(rows, PASS.batch_rows), PASS.graph_logits if few else 0)
        last = laid[-1]
        last.cache.make_room(len(last.ids) + rows - real)  # padding is written, too
        made, ran = self._made.get(shape), Ran.REPLAYED
        if made is None:
            if (made := self._make(shape, laid, wanted)) is None:
                return None
            ran = Ran.CAPTURED
        packed, replay = made
        packed.fill(laid, wanted)
        replay()
        logits, hidden = packed.outputs
        if few:
            logits = logits[:few]
        elif wanted is None or len(wanted) == real - wanted[0]:
            logits = logits[0 if wanted is None else int(wanted[0]) : real]
        else:
            logits = packed.chosen(len(wanted))
        return logits, hidden[:real], ran

    def _make(
        self, shape: PassShape, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None
    ) -> tuple[PackedPass, Replay] | None:
        """Capture a pass of a shape; None when its memory is spent or a capture has failed."""
        if self._failed or self._bytes > PASS.graph_bytes:
            self.problem = self._failed or f"graphs hold {PASS.graph_bytes >> 20} MiB"
            return None
        before = _gpu_bytes(self._recorded.device)
        for text in laid:
            text.cache.settle()  # a captured pass runs more than once
        packed = PackedPass(self._recorded, laid[0].cache, shape)
        packed.fill(laid, wanted)
        try:
            made = self._made[shape] = packed, self._capture(packed.run)
        except Exception as error:  # CUDA may fail to record, and Triton to compile
            self._failed = self.problem = f"capturing {shape.rows} rows failed ({in_a_line(error, 200)})"
            logger.warning("passes run without CUDA graphs: %s", self._failed)
            return None
        self._bytes += max(0, _gpu_bytes(self._recorded.device) - before)
        self.captures += 1
        return made


def _gpu_bytes(device: torch.device) -> int:
    """Memory that torch holds on a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
