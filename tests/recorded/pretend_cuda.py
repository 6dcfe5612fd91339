"""A GPU that is not there: tensors that say `cuda`, hold their data in host memory and keep a GPU's rules.

Within `PretendCuda()` a tensor moved to `cuda` is computed with as on a GPU: an operation that mixes it with a host
tensor fails, every wait of the host for the device is counted, a host buffer that is written while a copy from it is
under way is noticed, and Triton's and CUDA's objects have stand-ins. While a graph is captured nothing is written, and
what a capture forbids (reading data, copies from or to the host, work on another device) fails. A replay runs the
recorded operations on the very tensors they were recorded with, and spoils the results of all other graphs of its pool.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from retrieve_spec import quantized
from retrieve_spec.attention import TreeMask, attend
from retrieve_spec.kernels.attention_inputs import LayerRule, PackedTexts

aten = torch.ops.aten
META = torch.device("meta")
HOST = torch.device("cpu")
FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
BY_INDEX = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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

    def tolist(self) -> Any:
        return self.to(HOST).tolist()

    def data_ptr(self) -> int:
        _addressed[self.host.data_ptr()] = weakref.ref(self.host)
        return self.host.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        return memo.setdefault(id(self), self.clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CudaError(f"{func} outside of PretendCuda")


@dataclass(eq=False)
class Upload:
    """A copy from the host that may still be under way to a GPU, and what was there when it was asked for."""

    index: int
    source: torch.Tensor
    read: torch.Tensor


class Event:
    """Waits for the copies that were under way on the current GPU when it was recorded."""

    def __init__(self, gpu: PretendCuda) -> None:
        self._gpu, self._copies = gpu, list[Upload]()

    def record(self) -> None:
        self._gpu.forbid_in_capture("an event is recorded")
        self._copies = [copy for copy in self._gpu.in_flight if copy.index == self._gpu.current]

    def synchronize(self) -> None:
        self._gpu.forbid_in_capture("an event is waited for")
        self._gpu.land(self._copies)


class Graph:
    """What was captured: operations, by the tensors they read and write."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.pool: weakref.WeakSet[Graph] = weakref.WeakSet()

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in what the graph makes, which is written to, as indices must be such already now."""
        place = tensor.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == place for *_, made in self.steps for each in made)

    def replay(self) -> None:
        for graph in self.pool:
            if graph is not self:
                graph.spoil()
        for func, args, kwargs, made in self.steps:
            for tensor, value in zip(made, tree_leaves(func(*args, **kwargs)), strict=False):
                tensor.copy_(value)

    def spoil(self) -> None:
        for *_, made in self.steps:
            for tensor in made:
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))


def _no_inference(on: bool = True) -> torch.no_grad:
    return torch.no_grad()


class _Api(TorchFunctionMode):
    """Lets torch's functions be asked for tensors on a GPU."""

    def __init__(self, gpu: PretendCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device or getattr(func, "__name__", "") == "_parse_to":
            return func(*args, **kwargs)
        if str(func).startswith("retrieve_spec.packed_product") and isinstance(args[0], CudaTensor):
            return quantized.product_on_gpu(*args, **kwargs)  # what is registered for a GPU
        pinned = kwargs.pop("pin_memory", False)
        index = next((i for i in map(self._index, (*args, *kwargs.values())) if i is not None), None)
        if index is None:
            out = func(*args, **kwargs)
            if pinned:
                self._gpu.pinned[out.untyped_storage().data_ptr()] = weakref.ref(out)
            return out
        if func in FROM_DATA:
            func, args, kwargs = torch.Tensor.to, (func(*args, **{**kwargs, "device": HOST}), META), {}
        args = [META if self._index(a) is not None else a for a in args]
        kwargs = {name: META if self._index(a) is not None else a for name, a in kwargs.items()}
        with mock.patch.object(self._gpu, "target", index):
            return func(*args, **kwargs)

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
        self.waits, self.uploads, self.launches, self.ran = (Counter[str]() for _ in range(4))
        self.current = self.target = self.numbers = 0
        self.in_flight: list[Upload] = []
        self.pinned: dict[int, Any] = {}
        self._capturing: Graph | None = None
        self._pools: dict[Any, weakref.WeakSet[Graph]] = {}
        self._stream = self._new_stream()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PretendCuda:
        self._stack.enter_context(mock.patch.multiple(torch.cuda, **self._stand_ins()))
        # inference tensors do not go with wrappers of tensors
        self._stack.enter_context(mock.patch.object(torch, "inference_mode", _no_inference))
        self._stack.enter_context(_Api(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @staticmethod
    def _new_stream() -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def _stand_ins(self) -> dict[str, Any]:
        return {
            "Event": lambda: Event(self),
            "Stream": self._new_stream,
            "CUDAGraph": Graph,
            "graph": self._capture,
            "stream": lambda stream: mock.patch.object(self, "_stream", stream),
            "device": lambda given: mock.patch.object(self, "current", torch.device(given).index or 0),
            "current_stream": lambda device=None: self._stream,
            "graph_pool_handle": object,
            "memory_reserved": lambda device=None: 0,
            "synchronize": lambda device=None: self.wait("synchronize"),
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=8, major=9, minor=0),
        }

    def forbid_in_capture(self, what: str) -> None:
        if self._capturing is not None:
            raise CudaError(f"{what} while a graph is captured")

    def wait(self, what: str) -> None:
        """The host waits until the device has done all it was given."""
        self.forbid_in_capture(what)
        self.waits[what] += 1
        self.land(self.in_flight)

    def land(self, copies: list[Upload]) -> None:
        """Copies are done: what they read must be what was there when they were enqueued."""
        done = [copy for copy in self.in_flight if copy in copies]
        self.in_flight = [copy for copy in self.in_flight if copy not in copies]
        if not all(torch.equal(copy.source, copy.read) for copy in done):
            raise CudaError("a host buffer was written while a copy from it was under way")

    @contextlib.contextmanager
    def _capture(self, graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.wait("capture")
        if pool in self._pools and not self._pools[pool]:
            raise CudaError("use_count > 0 INTERNAL ASSERT FAILED: no graph of the pool is left")
        graph.pool = self._pools.setdefault(pool, weakref.WeakSet())
        graph.pool.add(graph)
        before, self._stream, self._capturing = self._stream, stream, graph
        try:
            yield
        finally:
            self._capturing = None
            graph.spoil()
        self._stream = before  # as torch does: a capture that failed leaves its stream behind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        there = [a for a in tensors if isinstance(a, CudaTensor)]
        here = [a for a in tensors if not isinstance(a, CudaTensor)]
        if func is aten._to_copy.default and (there or kwargs.get("device") == META):
            return self._move(args[0], **kwargs)
        if func is aten.copy_.default and here and there:
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
        masks = [a for a in args[1] if a is not None and a.dtype == torch.bool] if func in BY_INDEX else ()
        if masks or (func not in BY_INDEX and READS.intersection(func.tags)):
            self.wait(str(func))
        return self._run(func, args, kwargs, index)

    def _move(self, source: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        """Copy a tensor to a device or into a format."""
        dtype = dtype or source.dtype
        if device == HOST:
            return self._copy(torch.empty_like(source.host, dtype=dtype), source)
        if not isinstance(source, CudaTensor):
            made = CudaTensor(torch.empty_strided(source.size(), source.stride(), dtype=dtype), self.target)
            return self._copy(made, source, non_blocking)
        if device == META and source.index != self.target:
            raise CudaError("a copy from one GPU to another")
        return self._run(aten._to_copy.default, (source,), {"dtype": dtype}, source.index)

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """Copy from the host, or to it."""
        if isinstance(source, CudaTensor):
            self.wait("copy to the host")
            return target.copy_(source.host)
        self.forbid_in_capture("a copy from the host")
        pinned = self.pinned.get(source.untyped_storage().data_ptr(), lambda: None)() is not None
        target.host.copy_(source)
        self.numbers += source.numel()
        self.uploads["blocking" if not non_blocking else "pinned" if pinned else "pageable"] += 1
        if not non_blocking:
            self.wait("blocking copy from the host")
        elif pinned:
            self.in_flight.append(Upload(target.index, source, source.clone()))
        return target

    def _run(self, func: Any, args: Any, kwargs: Any, index: int) -> Any:
        """Run or capture an operation on the data."""
        graph, writes = self._capturing, func._schema.is_mutable
        if graph is not None and index != self.current:
            raise CudaError(f"{func} runs on another GPU than the one that captures")
        wrappers = {id(a.host): a for a in tree_leaves((args, kwargs)) if isinstance(a, CudaTensor)}
        args, kwargs = tree_map(lambda a: a.host if isinstance(a, CudaTensor) else a, (args, kwargs))
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") == META:
            kwargs["device"] = HOST
        if func is aten.histc.default:  # a GPU counts integers, too
            args = (args[0].float(), *args[1:])
        target = kwargs.get("out", args[0] if args else None)
        if writes and graph is not None and not graph.made(target):
            out = target if func._schema.returns else None
        else:
            out = func(*args, **kwargs)
        made = [a for a in tree_leaves(out) if isinstance(a, torch.Tensor)]
        held = {a.untyped_storage().data_ptr() for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
        if all(a.untyped_storage().data_ptr() in held for a in made):
            made = []  # views, or what was written to
        if made or writes:
            self.ran[str(func)] += 1
            self.numbers += sum(a.numel() for a in made)
            if graph is not None:
                graph.steps.append((func, args, kwargs, made))

        def wrap(given: Any) -> Any:
            if not isinstance(given, torch.Tensor):
                return given
            return wrappers[id(given)] if id(given) in wrappers else CudaTensor(given, index)

        return tree_map(wrap, out)


def _slab(address: int, capacity: int) -> torch.Tensor:
    slab = _addressed[address]()
    if slab is None or slab.shape[2] != capacity:
        raise CudaError("a kernel is given the address of a slab that is gone")
    return slab


@torch.library.custom_op("pretended::store_rows", mutates_args=("slabs",))
def _store_rows(
    slabs: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, prefix: torch.Tensor,
    layer: int,
) -> None:  # fmt: skip
    for text, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        *addresses, capacity = slabs[text].tolist()
        for address, new in zip(addresses, (keys, values), strict=True):
            if first < end:
                held = int(prefix[text])
                _slab(address, capacity)[layer, :, held : held + end - first] = new[:, first:end]


@torch.library.custom_op("pretended::move_rows", mutates_args=("slabs",))
def _move_rows(
    places: torch.Tensor, slabs: torch.Tensor, prefix: torch.Tensor, starts: torch.Tensor, sources: torch.Tensor
) -> None:
    for text, moved in enumerate(sources.long().tensor_split(starts.long())[1:-1]):
        for k, place in places.T.tolist() if len(moved) else ():
            *addresses, capacity = slabs[k, text].tolist()
            first = int(prefix[k, text]) - len(moved)
            for address in addresses:
                slab = _slab(address, capacity)[place]
                slab[:, first : first + len(moved)] = slab[:, moved + first]


@torch.library.custom_op("pretended::attend_rows", mutates_args=())
def _attend_rows(
    query: torch.Tensor, words: torch.Tensor, depths: torch.Tensor, prefix: torch.Tensor, starts: torch.Tensor,
    slabs: torch.Tensor, sinks: torch.Tensor | None, layer: int, scale: float, softcap: float, window: int,
) -> torch.Tensor:  # fmt: skip
    out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    columns = torch.arange(32 * words.shape[1])
    sees = (words[:, columns // 32] >> columns % 32) & 1 == 1
    for text, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        *addresses, capacity = slabs[text].tolist()
        if first == end:
            continue
        behind = int(prefix[text]) + end - first
        keys, values = (_slab(address, capacity)[layer : layer + 1, :, :behind] for address in addresses)
        mask = TreeMask(len(query) // keys.shape[1], query.dtype, HOST)
        mask.set(int(prefix[text]), sees[first:end, : end - first].numpy(), depths[first:end].long().numpy())
        out[first:end] = attend(query[None, :, first:end], keys, values, mask, LayerRule(scale, window, softcap, sinks))
    return out


def triton_stand_in(gpu: PretendCuda) -> ModuleType:
    """What `retrieve_spec.kernels.triton_tree_attention` computes, with a launch's rules: one GPU, the current one."""
    module: Any = ModuleType("retrieve_spec.kernels.triton_tree_attention")

    def check(*given: Any) -> None:
        if any(not isinstance(a, CudaTensor) or a.index != gpu.current for a in given if a is not None):
            raise CudaError("a kernel is launched with tensors that are not on the current GPU")

    def packed_tree_attention(
        query: Any, keys: Any, values: Any, texts: PackedTexts, rule: LayerRule, *, layer: int, **_options: Any
    ) -> Any:
        check(query, keys, values, *(getattr(texts, part.name) for part in fields(texts)), rule.sinks)
        gpu.launches["attention"] += 1
        torch.ops.pretended.store_rows(texts.slabs, keys, values, texts.starts, texts.prefix, layer)
        return torch.ops.pretended.attend_rows(
            query, texts.words, texts.depths, texts.prefix, texts.starts, texts.slabs, rule.sinks, layer, rule.scale,
            rule.softcap, rule.window,
        )  # fmt: skip

    def move_rows(kind: Any, *given: Any) -> None:
        check(kind, *given)
        torch.ops.pretended.move_rows(*given)

    module.packed_tree_attention, module.move_rows = packed_tree_attention, move_rows
    module.num_splits = lambda _heads, queries, *_: queries
    module.launch_options = lambda height, *_: {"BLOCK_M": min(16, height)}  # rows of tiny models fill several
    return module


def moved_recording(recorded: Any, index: int = 0) -> Any:
    """A copy, on a GPU, of a recording that was made on the host; within `PretendCuda`."""
    device = torch.device("cuda", index)
    moved: dict[int, torch.Tensor] = {}
    copied = copy.copy(recorded)
    run = recorded._compiled.run
    weights = [moved.setdefault(id(w), w if isinstance(w, CudaTensor) else w.detach().to(device)) for w in run.args]
    copied.device = device
    copied.rules = [
        rule if rule.sinks is None else replace(rule, sinks=rule.sinks.detach().to(device)) for rule in recorded.rules
    ]
    module = copy.deepcopy(run.func.__self__)
    for node in module.graph.nodes:
        node.args, node.kwargs = tree_map(lambda a: device if a == HOST else a, (node.args, node.kwargs))
    module.recompile()
    copied._compiled = replace(recorded._compiled, run=functools.partial(module.forward, *weights))
    return copied
