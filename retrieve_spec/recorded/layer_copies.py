"""A deep model's trace from that of its first layers: layers of one kind differ in their weights alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, TensorArgument

from retrieve_spec.errors import UnsupportedModelError
from retrieve_spec.recorded.graph_passes import Node, is_call, value
from retrieve_spec.verify.shrink import layer_kinds


def copied_layers(model: Any) -> list[int]:
    """Return, for each layer, which of a model's first layers is of its kind; empty where that saves nothing.

    Layers up to the last such one stand for themselves. The first one, whose input comes from no layer, stands for no
    other.
    """
    try:
        kinds = layer_kinds(model)
    except UnsupportedModelError:
        return []
    like = [0, *(kinds.index(kind, 1) for kind in kinds[1:])]
    traced = max(like) + 1
    return [*range(traced), *like[traced:]] if traced < len(like) else []


@contextlib.contextmanager
def only_first(blocks: nn.ModuleList, count: int) -> Iterator[None]:
    """Leave a decoder its first blocks for a while."""
    others = list(blocks)[count:]
    del blocks[count:]
    try:
        yield
    finally:
        blocks.extend(others)


def append_copies(program: torch.export.ExportedProgram, path: str, like: Sequence[int]) -> None:
    """Append the other layers to a trace of a model's first ones, in place.

    Parameters
    ----------
    program
        What was exported.
    path
        Name of the list of blocks in what was exported.
    like
        As `copied_layers` returns it.

    Raises
    ------
    NotImplementedError
        A layer takes or returns more than hidden states, or has tensors that are no weights.
    """
    graph = program.graph_module.graph
    traced = _nodes_by_layer(graph, path, max(like) + 1)
    handed_on = [_handed_on(nodes) for nodes in traced]
    shared = set(takewhile(lambda node: node is not traced[0][0], graph.nodes))
    last, following = handed_on[-1], traced[-1][-1].next
    readers, hidden = set(last.users) - set(traced[-1]), last
    for layer in range(len(traced), len(like)):
        at = like[layer]
        new = _add_weights(program, f"{path}.{at}.", f"{path}.{layer}.") | {handed_on[at - 1]: hidden}
        with graph.inserting_before(following):
            for node in traced[at]:
                if not all(given in new or given in shared or _counts(given) for given in node.all_input_nodes):
                    raise NotImplementedError("a layer takes more than hidden states")
                new[node] = graph.node_copy(node, lambda given, new=new: new.get(given, given))
                if is_call(node, torch.ops.retrieve_spec.attend.default):
                    new[node].update_arg(3, layer)
        hidden = new[handed_on[at]]
    for reader in readers:
        reader.replace_input_with(last, hidden)


def _nodes_by_layer(graph: fx.Graph, path: str, count: int) -> list[list[Node]]:
    """Return the nodes of each traced layer, in order."""
    layers: list[list[Node]] = [[] for _ in range(count)]
    for node in graph.nodes:
        modules = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
        if modules and modules[-1].startswith(f"{path}.") and not _counts(node):
            layers[int(modules[-1].removeprefix(f"{path}.").split(".")[0])].append(node)
    return layers


def _counts(node: Node) -> bool:
    """Whether a node is a number of rows, or computed from it, and the same in all layers."""
    return isinstance(value(node), int | torch.SymInt)


def _handed_on(layer: list[Node]) -> Node:
    """Return the results of a layer that others use."""
    inside = set(layer)
    taken = [node for node in layer if any(user not in inside and not _counts(user) for user in node.users)]
    if len(taken) != 1:
        raise NotImplementedError("a layer hands on more than hidden states")
    return taken[0]


def _add_weights(program: torch.export.ExportedProgram, path: str, other: str) -> dict[Node, Node]:
    """Add inputs for what one layer owns; return them by those of another layer. The paths of both end in a dot."""
    graph, specs = program.graph_module.graph, program.graph_signature.input_specs
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    owned = sum(spec.kind is not InputKind.USER_INPUT for spec in specs)
    added: dict[Node, Node] = {}
    for node, spec in zip(nodes, list(specs), strict=True):
        if spec.target is not None and spec.target.startswith(path):
            if spec.kind is InputKind.CONSTANT_TENSOR:
                raise NotImplementedError("a layer has a tensor that is no weight")
            with graph.inserting_before(nodes[owned]):
                added[node] = own = graph.placeholder(f"{node.name}_{len(nodes)}")
            own.meta = dict(node.meta)
            target = other + spec.target.removeprefix(path)
            specs.insert(owned + len(added) - 1, replace(spec, arg=TensorArgument(own.name), target=target))
    return added
