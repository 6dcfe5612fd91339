"""Tracing: what a model's forward does, as a graph of operations for any number of rows.

The forward is traced on fake tensors for a few rows and for many. Numbers that differ between the two graphs are
computed from the number of rows. A forward whose graphs differ in anything else depends on the number of rows in some
other way, and is refused. Symbolic shapes would find that out in one trace, but take twice as long.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from retrieve_spec.config import PASS

aten = torch.ops.aten
Node = Any
"""An `fx.Node`; its arguments are of any type, which a static checker cannot follow."""
_ROWS = (PASS.max_rows, 3)
"""Rows of the two traces."""
CONSTANT = "constant_"
"""How the names of tensors begin that a forward reads and are no weights."""
_DEPENDS = "it does something else for another number of rows"


@dataclass(frozen=True, slots=True)
class Trace:
    """What a forward does.

    Attributes
    ----------
    graph
        Takes the weights, token ids and positions. A node's `meta["val"]` is what it was for many rows.
    weights
        By name, the live parameters and buffers, then what else the forward reads: constants.
    inside
        What the forward handed out besides its results: nodes of the graph.
    """

    graph: fx.Graph
    weights: dict[str, torch.Tensor]
    inside: list[Node]


def trace(forward: nn.Module, results: int, device: torch.device) -> Trace:
    """Trace a forward of token ids and positions, (1, rows) each, to a tuple of tensors.

    Parameters
    ----------
    forward
        The forward, with its weights.
    results
        How many of the tensors are its results; it hands out the others besides.
    device
        Of token ids and positions.

    Raises
    ------
    NotImplementedError
        It does what a graph of operations does not say, or something else for another number of rows.
    """
    weights = _weights(forward)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in weights.items()}
    traced, other = (_trace_rows(forward, mode, fakes, rows, device) for rows in _ROWS)
    if len(traced.nodes) != len(other.nodes):
        raise NotImplementedError(_DEPENDS)
    graph, made = fx.Graph(), dict[Node, Node]()
    inputs = [node for node in traced.nodes if node.op == "placeholder"]
    constants = [node for node in traced.nodes if node.op == "get_attr"]
    for node in constants:
        name = f"{CONSTANT}{len(weights)}"
        weights[name] = node.meta["constant"]
    names = [f"weight_{number}" for number in range(len(weights))] + ["input_ids", "position_ids"]
    for node, name in zip([*inputs[:-2], *constants, *inputs[-2:]], names, strict=True):
        made[node] = graph.placeholder(name)
        made[node].meta = dict(node.meta)
    arguments = _Arguments(graph, made, made[inputs[-1]])
    for node, twin in zip(traced.nodes, other.nodes, strict=True):
        arguments.twins[node] = twin
        same = node.op == twin.op and node.target == twin.target
        if node.op == "get_attr":
            one, another = node.meta["constant"], twin.meta["constant"]
            same = one is another or torch.equal(one, another)
        if not same:
            raise NotImplementedError(_DEPENDS)
        if node.op in ("call_function", "output"):
            made[node] = graph.create_node(node.op, node.target, *arguments.of(node, twin))
            made[node].meta = dict(node.meta)
    *_, output = graph.nodes
    handed_out = list(output.args[0])
    output.args = (tuple(handed_out[:results]),)
    return Trace(graph, weights, handed_out[results:])


def _weights(forward: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of each module, once for each that has them, by name."""
    return {
        f"{path}.{name}".removeprefix("."): tensor
        for path, module in forward.named_modules()
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(recurse=False)
    }


def _trace_rows(
    forward: nn.Module, mode: FakeTensorMode, weights: dict[str, torch.Tensor], rows: int, device: torch.device
) -> fx.Graph:
    """Trace a forward of some rows over fake weights, in order, token ids and positions."""
    with torch._C._AutoDispatchBelowAutograd(), mode:
        inputs = torch.zeros((1, rows), dtype=torch.long, device=device), torch.arange(rows, device=device)[None]
        recorder = _GraphRecorder([*weights.values(), *inputs])
        with _restoring(forward), recorder, _exporting():
            results = torch.func.functional_call(forward, weights, inputs, tie_weights=False)
    return recorder.finish(results)


class _GraphRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that are run as a graph.

    Constants, which depend on no weight and no input, are computed all the same: the forward may read their numbers,
    and keep them where they outlive the trace. Composite operations remain whole below autograd. `make_fx` records the
    same, but takes three times as long.

    Parameters
    ----------
    given
        The inputs of the graph.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = fx.Graph()
        self._nodes: dict[int, Node] = {}  # by the id of a tensor, which its node or `_constants` holds
        self._constants: dict[Node, torch.Tensor] = {}
        self._own: set[int] = set()  # storages of constants that the forward makes
        self._unknown: set[int] = set()  # storages of constants that a call would overwrite with other numbers
        for number, tensor in enumerate(given):
            self._record(self._graph.placeholder(f"given_{number}"), tensor)

    def finish(self, results: Any) -> fx.Graph:
        """Return the graph with these results."""
        self._graph.output(map_aggregate(results, self._node_of))
        return self._graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if torch._C._is_any_autocast_enabled():
            raise NotImplementedError("it switches autocast on")
        # a number of the code is copied, as the forward may change it in place
        func = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node = self._graph.call_function(func, *(map_aggregate(given, self._node_of) for given in (args, kwargs)))
        constants = [self._constants[given] for given in node.all_input_nodes if given in self._constants]
        storages = set(map(_storage, constants))
        if len(constants) == len(node.all_input_nodes) and self._may_compute(func, storages):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
            self._record_constant(node, result, storages)
            return result
        if func._schema.is_mutable:
            self._unknown |= storages
        if torch.Tag.inplace_view in func.tags:
            self._nodes[id(args[0])].meta["val"] = args[0].detach()
        if constants:
            args, kwargs = (map_aggregate(given, _fake) for given in (node.args, node.kwargs))
        result = func(*args, **kwargs)
        self._record(node, result)
        return result

    def _may_compute(self, func: Any, storages: set[int]) -> bool:
        """Whether an operation on constants gives a constant, and changes none that was there before."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if torch.Tag.inplace_view in func.tags:
            return storages <= self._own
        return not storages & self._unknown and (storages <= self._own or not func._schema.is_mutable)

    def _record(self, node: Node, result: Any) -> None:
        """Record what a node returns, a tensor or several."""
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._nodes[id(result)] = node
        for number, part in enumerate(_parts(result)):
            self._record(self._graph.call_function(operator.getitem, (node, number)), part)

    def _record_constant(self, node: Node, result: Any, storages: set[int]) -> None:
        """Record a constant, or several, that a node makes of some storages."""
        if isinstance(result, torch.Tensor):
            stand_in = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
            self._record(node, stand_in)
            self._nodes[id(result)], self._constants[node] = node, result
            self._own |= {_storage(result)} - storages
        for number, part in enumerate(_parts(result)):
            self._record_constant(self._graph.call_function(operator.getitem, (node, number)), part, storages)

    def _node_of(self, given: Any) -> Any:
        """Return the node of a tensor, which is a constant if no node returned it; other arguments unchanged."""
        if not isinstance(given, torch.Tensor):
            return given
        if id(given) not in self._nodes:
            node = self._graph.get_attr(f"{CONSTANT}{len(self._nodes)}")
            node.meta["constant"] = given
            if type(given) in (torch.Tensor, nn.Parameter) and given.layout is torch.strided:
                self._record_constant(node, given, {_storage(given)})
            else:
                self._record(node, given)
        return self._nodes[id(given)]


def _parts(result: Any) -> Sequence[Any]:
    """Return what an operation returns where that is several."""
    return result if isinstance(result, (list, tuple)) else ()


def _fake(given: Any) -> Any:
    """Return what a node returned, or what stands for it where that is a constant; other arguments unchanged."""
    return given.meta["val"] if isinstance(given, fx.Node) else given


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor."""
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def _restoring(forward: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules afterwards: a forward may keep tensors or sizes of its last call, which are
    fake in a trace. Of classes and the files that define them, only what is fake is restored, as others use them too.
    """
    held = [
        (entries, dict(entries))
        for module in forward.modules()
        for entries in (vars(module), *(value for value in vars(module).values() if isinstance(value, dict)))
    ]
    classes = {cls for module in forward.modules() for cls in type(module).__mro__}.difference(nn.Module.__mro__)
    files = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}  # a class may have none
    owners = [(owner, dict(vars(owner))) for owner in classes | files]
    tables = [(table, dict(table)) for _, before in owners for table in before.values() if type(table) is dict]
    try:
        yield
    finally:
        for entries, before in held:
            for name in entries.keys() - before.keys():
                del entries[name]
            entries.update(before)
        for owner, before in owners:
            for name in _fakes(vars(owner), before):
                setattr(owner, name, before[name]) if name in before else delattr(owner, name)
        for table, before in tables:
            for name in _fakes(table, before):
                table.pop(name)
            table.update({name: before[name] for name in before.keys() - table.keys()})


def _fakes(entries: Mapping[Any, Any], before: Mapping[Any, Any]) -> list[Any]:
    """Return the names of new values that are fake tensors, or hold some."""
    return [
        name
        for name, value in entries.items()
        if value is not before.get(name) and any(isinstance(leaf, FakeTensor) for leaf in tree_flatten(value)[0])
    ]


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Let models ask `torch.compiler.is_exporting()` and take what can be traced where they have a choice."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


class _Arguments:
    """Arguments of a graph's nodes that hold for any number of rows, from traces of two numbers of rows.

    Parameters
    ----------
    graph, positions
        The graph, and its last input, whose rows they are.
    made
        By node of the first trace, that of the graph.

    Attributes
    ----------
    twins
        By node of the first trace, that of the second; filled in their order.
    """

    def __init__(self, graph: fx.Graph, made: Mapping[Node, Node], positions: Node) -> None:
        self.twins: dict[Node, Node] = {}
        self._graph, self._made = graph, made
        self._counts = {(1, 0): graph.call_function(aten.sym_size.int, (positions, 1))}
        self._counts[1, 0].meta["val"] = _ROWS[0]

    def of(self, node: Node, twin: Node) -> Any:
        """Return the positional and keyword arguments of a node, as nodes of the graph."""
        (leaves, spec), (twins, twin_spec) = (tree_flatten((each.args, each.kwargs)) for each in (node, twin))
        if spec != twin_spec:
            raise NotImplementedError(_DEPENDS)
        return tree_unflatten([self._leaf(*pair) for pair in zip(leaves, twins, strict=True)], spec)

    def _leaf(self, leaf: Any, twin: Any) -> Any:
        if type(leaf) is type(twin) is int and leaf != twin:
            return self._count(leaf, twin)
        is_node = isinstance(leaf, fx.Node)
        if (self.twins[leaf] is not twin) if is_node else repr(leaf) != repr(twin):
            raise NotImplementedError(_DEPENDS)
        return self._made[leaf] if is_node else leaf

    def _count(self, many: int, few: int) -> Node:
        """Return the node of a number that is so many rows with many rows and so few with few."""
        times, left = divmod(many - few, _ROWS[0] - _ROWS[1])
        if left:
            raise NotImplementedError(_DEPENDS)
        key = times, many - times * _ROWS[0]
        if key not in self._counts:
            first = self._counts[1, 0]
            with self._graph.inserting_after(first):
                product = self._graph.call_function(operator.mul, (first, times))
            with self._graph.inserting_after(product):
                self._counts[key] = self._graph.call_function(operator.add, (product, key[1]))
            product.meta["val"], self._counts[key].meta["val"] = times * _ROWS[0], many
        return self._counts[key]
