"""A GPU that is not there: tensors that say `cuda`, hold their data in host memory and keep a GPU's rules.

Within `PretendCuda()` a tensor moved to `cuda` is computed with as on a GPU: an operation that mixes it with a host
tensor fails, every wait of the host for the device is counted, a host buffer that is written while a copy from it is
under way is noticed, and Triton's and CUDA's objects have stand-ins. While a graph is captured nothing is written, and
what a capture forbids (reading data, copies from or to the host, work on another device) fails. A replay runs the
recorded operations on the very tensors they were recorded with, and spoils the results of all other graphs of its pool.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
META = torch.device("meta")
FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
MOVES = (aten._to_copy.default, aten.to.device, aten.to.dtype_layout, aten.to.other)
BY_INDEX = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


_addressed: dict[int, Any] = {}
"""Tensors whose addresses were asked for; a kernel that is given one after the tensor is gone fails."""


class CudaError(RuntimeError):
    """What would be wrong on a GPU."""


class CudaTensor(torch.Tensor):
    """A tensor on a pretended GPU; torch's own code sees a `meta` tensor, which dispatch gives its data."""

    host: torch.Tensor
    index: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=META
        )
        made.host, made.index = host, index
        return made

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def data_ptr(self) -> int:
        _addressed[self.host.data_ptr()] = weakref.ref(self.host)
        return self.host.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        return memo.setdefault(id(self), self.clone())

    def __repr__(self) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CudaError(f"{func} outside of PretendCuda")


def _no_inference(on: bool = True) -> torch.no_grad:
    return torch.no_grad()


class Event:
    """Waits for all that was enqueued when it was recorded."""

    def __init__(self, gpu: PretendCuda) -> None:
        self._gpu, self._upon = gpu, None

    def record(self) -> None:
        self._gpu.forbid_in_capture("an event is recorded")
        self._upon = (self._gpu.current, list(self._gpu.in_flight))

    def synchronize(self) -> None:
        self._gpu.forbid_in_capture("an event is waited for")
        if self._upon is not None:
            index, copies = self._upon
            self._gpu.landed([copy for copy in copies if copy[0] == index])


class Graph:
    """What was captured: operations, by the tensors they read and write."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor] | None]] = []
        self.made: list[torch.Tensor] = []
        self.pool: Any = None
        self.siblings: weakref.WeakSet[Graph] = weakref.WeakSet()

    def replay(self) -> None:
        for graph in self.siblings:
            if graph is not self:
                graph.spoil()
        for func, args, kwargs, outs in self.steps:
            new = func(*args, **kwargs)
            for out, value in zip(outs or (), tree_flatten(new)[0], strict=True) if outs else ():
                out.copy_(value)

    def spoil(self) -> None:
        for tensor in self.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


class _Api(TorchFunctionMode):
    """Lets torch's functions be asked for tensors on a GPU."""

    def __init__(self, gpu: PretendCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device or getattr(func, "__name__", "") == "_parse_to":
            return func(*args, **kwargs)
        if func is torch.Tensor.tolist and isinstance(args[0], CudaTensor):
            self._gpu.wait("tolist")
            return args[0].host.tolist()
        pinned = kwargs.pop("pin_memory", False)
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], torch.device("cuda"))
        index = next((i for i in map(self._index, (*args, *kwargs.values())) if i is not None), None)
        if index is None:
            out = func(*args, **kwargs)
            if pinned:
                self._gpu.pinned[out.untyped_storage().data_ptr()] = weakref.ref(out)
            return out
        if func in FROM_DATA:
            own = isinstance(args[0], CudaTensor)
            args = (args[0] if own else func(*args, **{**kwargs, "device": "cpu"}), META)
            func, kwargs = torch.Tensor.to, {"dtype": kwargs.get("dtype")} if own and "dtype" in kwargs else {}
        args, kwargs = ([META if self._index(a) is not None else a for a in args], {
            key: META if self._index(a) is not None else a for key, a in kwargs.items()
        })  # fmt: skip
        before, self._gpu.target = self._gpu.target, index
        try:
            return func(*args, **kwargs)
        finally:
            self._gpu.target = before

    def _index(self, given: Any) -> int | None:
        """Index of the GPU that an argument names."""
        if isinstance(given, str) and given.startswith("cuda"):
            given = torch.device(given)
        if isinstance(given, torch.device) and given.type == "cuda":
            return self._gpu.current if given.index is None else given.index
        return None


class PretendCuda(TorchDispatchMode):
    """A GPU for a while; see the module.

    Attributes
    ----------
    waits
        What made the host wait for the device, and how often.
    uploads
        Copies from the host, by whether the host waited ("blocking"), memory was pinned, or neither ("pageable").
    launches
        Launches of the attention kernel's stand-in, while graphs are captured, too.
    ran
        Operations that compute something, but for those of replays.
    numbers
        Numbers in all that these made and that was copied from the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.current = self.target = self.numbers = 0
        self.in_flight: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.pinned: dict[int, Any] = {}
        self._capturing: Graph | None = None
        self._pools: dict[Any, weakref.WeakSet[Graph]] = {}
        self._stream: Any = SimpleNamespace(wait_stream=lambda other: None)

    def __enter__(self) -> PretendCuda:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(mock.patch.multiple(torch.cuda, **self._stand_ins()))
        # inference tensors do not go with wrappers of tensors
        self._stack.enter_context(mock.patch.object(torch, "inference_mode", _no_inference))
        self._stack.enter_context(_Api(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _stand_ins(self) -> dict[str, Any]:
        return {
            "Event": lambda: Event(self),
            "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "CUDAGraph": Graph,
            "graph": self._capture,
            "stream": self._on_stream,
            "device": self._on_device,
            "current_stream": lambda device=None: self._stream,
            "current_device": lambda: self.current,
            "graph_pool_handle": lambda: object(),
            "memory_reserved": lambda device=None: 0,
            "empty_cache": lambda: self.forbid_in_capture("memory is given back"),
            "synchronize": lambda device=None: self.wait("synchronize"),
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=8, major=9, minor=0),
        }

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The data of a tensor, for a test to look at."""
        return tensor.host if isinstance(tensor, CudaTensor) else tensor

    def forbid_in_capture(self, what: str) -> None:
        if self._capturing is not None:
            raise CudaError(f"{what} while a graph is captured")

    def wait(self, what: str) -> None:
        """The host waits until the device has done all it was given."""
        self.forbid_in_capture(what)
        self.waits[what] += 1
        self.landed(list(self.in_flight))

    def landed(self, copies: list[Any]) -> None:
        """Copies are done: what they read must be what was there when they were enqueued."""
        for copy in copies:
            if copy not in self.in_flight:
                continue
            self.in_flight = [other for other in self.in_flight if other is not copy]
            if not torch.equal(copy[1], copy[2]):
                raise CudaError("a host buffer was written while a copy from it was under way")

    @contextlib.contextmanager
    def _on_device(self, device: Any) -> Iterator[None]:
        before = self.current
        self.current = device if isinstance(device, int) else torch.device(device).index or 0
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _on_stream(self, stream: Any) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    @contextlib.contextmanager
    def _capture(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
        self.wait("capture")
        graph.pool = object() if pool is None else pool
        if graph.pool in self._pools and not self._pools[graph.pool]:
            raise CudaError("use_count > 0 INTERNAL ASSERT FAILED: no graph of the pool is left")
        graph.siblings = self._pools.setdefault(graph.pool, weakref.WeakSet())
        graph.siblings.add(graph)
        self._capturing = graph
        before, self._stream = self._stream, stream or SimpleNamespace(wait_stream=lambda other: None)
        try:
            yield
        finally:
            self._capturing = None
            graph.spoil()
        self._stream = before  # as torch does: a capture that failed leaves its stream behind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        there = [a for a in tensors if isinstance(a, CudaTensor)]
        here = [a for a in tensors if not isinstance(a, CudaTensor)]
        if func in MOVES and (target := self._target(args, kwargs)) is not None:
            return self._move(func, args, kwargs, target)
        elif func is aten.copy_.default and here and there:
            return self._copy(*args, **kwargs)
        if not there and kwargs.get("device") != META:
            if self._capturing is not None and any(a.ndim for a in here):
                raise CudaError(f"{func} runs on the host while a graph is captured")
            return func(*args, **kwargs)
        if any(a.ndim or torch.Tag.pointwise not in func.tags for a in here):
            raise CudaError(f"{func} mixes cuda and cpu tensors")
        if len({a.index for a in there}) > 1:
            raise CudaError(f"{func} mixes tensors of several GPUs")
        index = self.target = there[0].index if there else self.target  # torch's own code names no GPU
        if self._reads(func, args):
            self.wait(str(func))
        return self._run(func, args, kwargs, index)

    @staticmethod
    def _target(args: Any, kwargs: Any) -> Any:
        """Where a tensor is moved to: "cpu", or "meta" for the GPU; None when it is not moved."""
        given = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.device)]
        if given:
            return None if given[0].type not in ("cpu", "meta") else given[0].type
        others = [a for a in args[1:] if isinstance(a, torch.Tensor)]
        return ("meta" if isinstance(others[0], CudaTensor) else "cpu") if others else None

    @staticmethod
    def _reads(func: Any, args: Any) -> bool:
        """Whether the host must see an operation's data before it can go on."""
        if func in BY_INDEX:
            return any(isinstance(a, torch.Tensor) and a.dtype in (torch.bool, torch.uint8) for a in args[1])
        tags = func.tags
        return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags

    def _move(self, func: Any, args: Any, kwargs: Any, target: str) -> Any:
        source = args[0]
        dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), source.dtype)
        if target == "meta":
            index = self.target
            if isinstance(source, CudaTensor):
                if source.index == index:
                    return self._run(aten._to_copy.default, (source,), {"dtype": dtype}, index)
                raise CudaError("a copy from one GPU to another")
            made = CudaTensor(torch.empty_strided(source.size(), source.stride(), dtype=dtype), index)
            self._upload(made, source, kwargs.get("non_blocking", False) or True in args[1:])
            return made
        if not isinstance(source, CudaTensor):
            return func(*args, **kwargs)
        self.wait("copy to the host")
        return source.host.to(dtype, copy=True)

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        if isinstance(target, CudaTensor):
            self._upload(target, source, non_blocking)
        else:
            self.wait("copy to the host")
            target.copy_(source.host)
        return target

    def _upload(self, target: CudaTensor, source: torch.Tensor, non_blocking: bool) -> None:
        self.forbid_in_capture("a copy from the host")
        pinned = (made := self.pinned.get(source.untyped_storage().data_ptr())) is not None and made() is not None
        target.host.copy_(source)
        self.numbers += source.numel()
        self.uploads["blocking" if not non_blocking else "pinned" if pinned else "pageable"] += 1
        if not non_blocking:
            self.wait("blocking copy from the host")
        elif pinned:
            self.in_flight.append((target.index, source, source.clone()))

    def _run(self, func: Any, args: Any, kwargs: Any, index: int) -> Any:
        """Run or capture an operation on the data."""
        graph = self._capturing
        if graph is not None and index != self.current:
            raise CudaError(f"{func} runs on another GPU than the one that captures")
        wrappers = {id(a.host): a for a in tree_flatten((args, kwargs))[0] if isinstance(a, CudaTensor)}
        args, kwargs = tree_map(lambda a: a.host if isinstance(a, CudaTensor) else a, (args, kwargs))
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") == META:
            kwargs["device"] = torch.device("cpu")
        if func._schema.is_mutable:
            self.ran[str(func)] += 1
        if graph is not None and func._schema.is_mutable:
            graph.steps.append((func, args, kwargs, None))
            changed = kwargs["out"] if "out" in kwargs else args[0]
            if any(changed.untyped_storage().data_ptr() == a.untyped_storage().data_ptr() for a in graph.made):
                func(*args, **kwargs)
            return wrappers[id(changed)] if func._schema.returns else None
        if func is aten.histc.default:  # a GPU counts integers, too
            args = (args[0].float(), *args[1:])
        out = func(*args, **kwargs)
        flat = [a for a in tree_flatten(out)[0] if isinstance(a, torch.Tensor)]
        held = {a.untyped_storage().data_ptr() for a in tree_flatten((args, kwargs))[0] if hasattr(a, "shape")}
        if not all(a.untyped_storage().data_ptr() in held for a in flat):
            self.ran[str(func)] += 1
            self.numbers += sum(a.numel() for a in flat)
            if graph is not None:
                graph.steps.append((func, args, kwargs, flat))
                graph.made += flat

        def wrap(given: Any) -> Any:
            if not isinstance(given, torch.Tensor):
                return given
            return wrappers[id(given)] if id(given) in wrappers else CudaTensor(given, index)

        return tree_map(wrap, out)


def naive_attention(
    query: Any, keys: Any, values: Any, words: Any, depths: Any, prefix: Any,
    scale: float, softcap: float, window: int, sinks: Any,
) -> Any:  # fmt: skip
    """(heads, rows, d) queries over (kv_heads, capacity, d): (rows, heads, d)."""
    rows = query.shape[1]
    column = torch.arange(keys.shape[1], device=query.device) - prefix
    drafted = (column >= 0) & (column < rows)
    at = torch.where(drafted, column, 0)
    seen = (column < 0) | (drafted & (((words[:, at // 32] >> (at % 32)) & 1) == 1))
    if window:
        seen = seen & (depths[:, None] - torch.where(drafted, depths[at], column) < window)
    groups = query.shape[0] // keys.shape[0]
    known = seen.any(0)[:, None]
    keys, values = (torch.where(known, a, 0).float().repeat_interleave(groups, 0) for a in (keys, values))
    scores = query.float() @ keys.transpose(1, 2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, rows, 1)], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]]
    return (weights @ values).transpose(0, 1).to(query.dtype).contiguous()


def _slab(address: int, capacity: int) -> torch.Tensor:
    slab = _addressed[address]()
    if slab is None or slab.shape[2] != capacity:
        raise CudaError("a kernel is given the address of a slab that is gone")
    return slab


@torch.library.custom_op("pretended::store_rows", mutates_args=("slabs",))
def _store_rows(
    slabs: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, text_of: torch.Tensor, starts: torch.Tensor,
    prefix: torch.Tensor, layer: int,
) -> None:  # fmt: skip
    for row, text in enumerate(text_of.tolist()):
        *addresses, capacity = slabs[text].tolist()
        for address, new in zip(addresses, (keys, values), strict=True):
            _slab(address, capacity)[layer, :, int(prefix[text]) + row - int(starts[text])] = new[:, row]


@torch.library.custom_op("pretended::move_rows", mutates_args=("slabs",))
def _move_rows(
    places: torch.Tensor, slabs: torch.Tensor, prefix: torch.Tensor, starts: torch.Tensor, sources: torch.Tensor
) -> None:
    for text in range(slabs.shape[1]):
        moved = sources[int(starts[text]) : int(starts[text + 1])]
        if not len(moved):
            continue
        for k, place in places.T.tolist():
            *addresses, capacity = slabs[k, text].tolist()
            first = int(prefix[k, text]) - len(moved)
            for address in addresses:
                slab = _slab(address, capacity)
                slab[place, :, first : first + len(moved)] = slab[place, :, moved.long() + first]


@torch.library.custom_op("pretended::attend_rows", mutates_args=())
def _attend_rows(
    query: torch.Tensor, words: torch.Tensor, depths: torch.Tensor, prefix: torch.Tensor, starts: torch.Tensor,
    tiles: torch.Tensor, slabs: torch.Tensor, sinks: torch.Tensor | None, layer: int, block: int, scale: float,
    softcap: float, window: int,
) -> torch.Tensor:  # fmt: skip
    heads, total, width = query.shape
    out = torch.full((total, heads, width), float("nan"), dtype=query.dtype)  # what no tile names stays so
    for text, first in tiles.tolist():
        if text < 0:
            continue
        *addresses, capacity = slabs[text].tolist()
        keys, values = (_slab(address, capacity)[layer] for address in addresses)
        span = slice(*starts[text : text + 2].tolist())
        rows, groups = span.stop - span.start, heads // len(keys)
        whole = naive_attention(
            query[:, span], keys, values, words[span], depths[span], prefix[text], scale, softcap, window, sinks
        )
        for m in range(first, min(first + block, groups * rows)):
            group, row = divmod(m, rows)
            out[span.start + row, group::groups] = whole[row, group::groups]
    return out


def triton_stand_in(gpu: PretendCuda) -> ModuleType:
    """What `retrieve_spec.kernels.triton_tree_attention` computes, with a launch's rules: one GPU, the current one."""
    module: Any = ModuleType("retrieve_spec.kernels.triton_tree_attention")

    def check(*given: Any) -> None:
        if any(not isinstance(a, CudaTensor) or a.index != gpu.current for a in given if a is not None):
            raise CudaError("a kernel is launched with tensors that are not on the current GPU")

    def packed_tree_attention(
        query: Any, keys: Any, values: Any, words: Any, depths: Any, prefix: Any, starts: Any, text_of: Any, tiles: Any,
        slabs: Any, *, layer: int, block: int, scale: float, softcap: float = 0.0, window: int = 0, sinks: Any = None,
        splits: int = 1, exact: bool = False,
    ) -> Any:  # fmt: skip
        check(query, keys, values, words, depths, prefix, starts, text_of, tiles, slabs, sinks)
        assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
        assert {a.dtype for a in (words, depths, prefix, starts, text_of, tiles)} == {torch.int32}
        assert slabs.dtype == torch.int64
        gpu.launches["attention"] += 1
        own = torch.ops.pretended
        own.store_rows(slabs, keys, values, text_of, starts, prefix, layer)
        return own.attend_rows(
            query, words, depths, prefix, starts, tiles, slabs, sinks, layer, block, scale, softcap, window
        )

    def move_rows(kind: Any, places: Any, slabs: Any, prefix: Any, starts: Any, sources: Any) -> None:
        check(kind, places, slabs, prefix, starts, sources)
        assert {a.dtype for a in (places, prefix, starts, sources)} == {torch.int32} and slabs.dtype == torch.int64
        torch.ops.pretended.move_rows(places, slabs, prefix, starts, sources)

    module.packed_tree_attention, module.move_rows = packed_tree_attention, move_rows
    module.num_splits = lambda _heads, queries, *_: queries
    module.launch_options = lambda height, *_: {"BLOCK_M": min(16, height)}  # rows of tiny models fill several
    return module


def move_recording(recorded: Any, model: Any, index: int = 0) -> None:
    """Let a recording that was made on the host stand for a model on a GPU; within `PretendCuda`."""
    device = torch.device("cuda", index)
    moved: dict[int, torch.Tensor] = {}
    recorded._weights = [
        moved.setdefault(id(w), w if isinstance(w, CudaTensor) else w.detach().to(device)) for w in recorded._weights
    ]
    recorded.device = device
    recorded.rules = [
        rule if rule.sinks is None else replace(rule, sinks=rule.sinks.detach().to(device)) for rule in recorded.rules
    ]
    module = recorded._compiled.run.__self__
    for node in module.graph.nodes:
        if node.kwargs.get("device") == torch.device("cpu"):
            node.kwargs = {**node.kwargs, "device": device}
        node.args = tree_map(lambda a: device if a == torch.device("cpu") else a, node.args)
    module.recompile()
    recorded._compiled = replace(recorded._compiled, run=module.forward)
