"""A deep model's trace from that of its first layers: layers of one kind differ in their weights alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from retrieve_spec.errors import UnsupportedModelError
from retrieve_spec.recorded.graph_passes import is_call, value
from retrieve_spec.recorded.tracing import CONSTANT, Node, Trace
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


@contextlib.contextmanager
def catch_layers(blocks: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Catch what the first of some blocks is given while a decoder runs, and what each of them hands on."""
    caught: list[torch.Tensor] = []

    def catch_inputs(_block: nn.Module, args: Any, kwargs: Any) -> None:
        caught.extend(part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor))

    def catch_output(_block: nn.Module, _args: Any, out: Any) -> None:
        caught.append(out[0] if isinstance(out, tuple) else out)

    with contextlib.ExitStack() as hooks:
        for block in blocks[:1]:
            hooks.enter_context(block.register_forward_pre_hook(catch_inputs, with_kwargs=True))
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(catch_output))
        yield caught


def append_copies(trace: Trace, owner: nn.Module, blocks: nn.ModuleList, like: Sequence[int]) -> None:
    """Append the other layers to a trace of a model's first ones, in place.

    Parameters
    ----------
    trace
        The trace, which handed out what `catch_layers` caught.
    owner, blocks
        What was traced, and the list of all blocks inside of it.
    like
        As `copied_layers` returns it.

    Raises
    ------
    NotImplementedError
        A layer takes or returns more than hidden states, or has tensors that are no weights.
    """
    path = next(name for name, part in owner.named_modules() if part is blocks)
    count, graph = max(like) + 1, trace.graph
    nodes, handed_on = list(graph.nodes), trace.inside[-count:]
    begin = max(map(nodes.index, trace.inside[:-count])) + 1
    bounds = [begin, *(nodes.index(node) + 1 for node in handed_on)]
    traced = [nodes[start:end] for start, end in pairwise(bounds)]
    for inside, result in zip(traced, handed_on, strict=True):
        _check_alone(inside, result)
    shared, last, following = set(nodes[:begin]), handed_on[-1], nodes[bounds[-1]]
    inputs = dict(zip(trace.weights, nodes, strict=False))
    shared -= {node for name, node in inputs.items() if name.startswith((CONSTANT, f"{path}."))}
    readers, hidden = set(last.users), last
    for layer in range(count, len(like)):
        at = like[layer]
        prefix = f"{path}.{at}."
        owned = {name.removeprefix(prefix): node for name, node in inputs.items() if name.startswith(prefix)}
        new = _add_weights(trace, blocks[layer], f"{path}.{layer}", owned, nodes[len(inputs)])
        new[handed_on[at - 1]] = hidden
        with graph.inserting_before(following):
            for node in traced[at]:
                if not all(given in new or given in shared or _counts(given) for given in node.all_input_nodes):
                    raise NotImplementedError("a layer takes more than hidden states")
                new[node] = graph.node_copy(node, partial(_in_layer, new))
                if is_call(node, torch.ops.retrieve_spec.attend.default):
                    new[node].update_arg(3, layer)
        hidden = new[handed_on[at]]
    for reader in readers:
        reader.replace_input_with(last, hidden)


def _in_layer(new: Mapping[Node, Node], given: Node) -> Node:
    """Return what stands for a node in a layer: a new one, or what all layers share."""
    return new.get(given, given)


def _counts(node: Node) -> bool:
    """Whether a node is a number of rows or made of it, and the same in all layers."""
    return isinstance(value(node), int)


def _check_alone(layer: Sequence[Node], last: Node) -> None:
    """Look whether others take something of a layer that is not the last it computes."""
    inside = set(layer)
    for node in layer:
        if node is not last and not _counts(node) and any(user not in inside for user in node.users):
            raise NotImplementedError("a layer hands on more than hidden states")


def _add_weights(trace: Trace, block: nn.Module, path: str, owned: Mapping[str, Node], ids: Node) -> dict[Node, Node]:
    """Inputs, before the token ids, for what a block with this path owns, by those for what another one owns."""
    own = dict(block.named_parameters(remove_duplicate=False)) | dict(block.named_buffers(remove_duplicate=False))
    added: dict[Node, Node] = {}
    with trace.graph.inserting_before(ids):
        for name, node in owned.items():
            trace.weights[f"{path}.{name}"] = own[name]
            added[node] = trace.graph.placeholder(f"{node.name}_{path.rpartition('.')[2]}")
            added[node].meta = dict(node.meta)
    return added
