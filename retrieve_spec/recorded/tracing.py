"""Tracing: what a model's forward does, as a graph of operations for any number of rows.

The forward is traced on fake tensors for one number of rows, a prime that divides no size of its weights: multiples of
it are multiples of the rows. A forward that does something else for another number of rows fails its trial, or gives
other logits there. Symbolic shapes would find that out while they trace, and take four times as long for it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

aten = torch.ops.aten
Node = Any
"""An `fx.Node`; its arguments are of any type, which a static checker cannot follow."""
_PRIMES = (509, 503, 499, 491, 487, 479, 467)
CONSTANT = "constant_"
"""How the names of tensors begin that a forward reads and are no weights."""
_GRAD_MODE = torch._C._set_grad_enabled
_AUTOCAST = (_enter_autocast, _exit_autocast)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a forward does.

    Attributes
    ----------
    graph
        Takes the weights, token ids and positions. A node's `meta["val"]` is what it was for some number of rows.
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
        It does what a graph of operations does not say.
    """
    weights = _weights(forward)
    rows = next(
        prime for prime in _PRIMES if all(size % prime for weight in weights.values() for size in weight.shape if size)
    )
    traced = _trace_rows(forward, weights, rows, device)
    graph, made = fx.Graph(), dict[Node, Node]()
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    constants = [node for node in traced.graph.nodes if node.op == "get_attr"]
    for node in constants:
        name = f"{CONSTANT}{len(weights)}"
        weights[name] = getattr(traced, node.target)
    names = [f"weight_{number}" for number in range(len(weights))] + ["input_ids", "position_ids"]
    for node, name in zip([*inputs[:-2], *constants, *inputs[-2:]], names, strict=True):
        made[node] = graph.placeholder(name)
        made[node].meta = dict(node.meta)
    numbers = _Multiples(graph, made[inputs[-1]], rows)
    for node in traced.graph.nodes:
        if node.op in ("call_function", "output") and not _switches(node):
            made[node] = graph.node_copy(node, made.__getitem__)
            numbers.replace_in(made[node])
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
    forward: nn.Module, weights: dict[str, torch.Tensor], rows: int, device: torch.device
) -> fx.GraphModule:
    """Trace a forward of some rows over its weights, in order, token ids and positions."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ids = torch.zeros((1, rows), dtype=torch.long, device=device)
    given = [mode.from_tensor(tensor) for tensor in (*weights.values(), ids, torch.arange(rows, device=device)[None])]

    def call(*tensors: torch.Tensor) -> Any:
        own = dict(zip(weights, tensors, strict=False))
        return torch.func.functional_call(forward, own, tensors[-2:], tie_weights=False)

    with mode, _exporting():
        traced: fx.GraphModule = make_fx(call, pre_dispatch=True)(*given)
    return traced


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Let models ask `torch.compiler.is_exporting()` and take what can be traced where they have a choice."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


class _Multiples:
    """Numbers of a graph that are multiples of its rows.

    Parameters
    ----------
    graph
        A graph of so many `rows`.
    positions
        Its last input, whose rows they are.
    """

    def __init__(self, graph: fx.Graph, positions: Node, rows: int) -> None:
        self._graph, self._rows = graph, rows
        self._nodes = {rows: graph.call_function(aten.sym_size.int, (positions, 1))}
        self._nodes[rows].meta["val"] = rows

    def replace_in(self, node: Node) -> None:
        """Let a node take multiples of however many rows there are."""
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), self._replaced)

    def _replaced(self, leaf: Any) -> Any:
        if type(leaf) is not int or not leaf or leaf % self._rows:
            return leaf
        if leaf not in self._nodes:
            first = self._nodes[self._rows]
            with self._graph.inserting_after(first):
                self._nodes[leaf] = self._graph.call_function(operator.mul, (first, leaf // self._rows))
            self._nodes[leaf].meta["val"] = leaf
        return self._nodes[leaf]


def _switches(node: Node) -> bool:
    """Whether a node switches what is off while a recorded pass runs.

    Raises
    ------
    NotImplementedError
        It switches autocast on.
    """
    if node.target is _AUTOCAST[0] and node.args[2]:
        raise NotImplementedError("it switches autocast on")
    return node.target is _GRAD_MODE or node.target in _AUTOCAST
