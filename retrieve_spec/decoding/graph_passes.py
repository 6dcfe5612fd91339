"""Turns an exported program into a short Python function over live weights, by rewriting its graph.

Knows tensor operations, not models. Rewrites that change how floats are rounded (normalisation in one call, products
over weights in another layout) are applied to float32 graphs only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from retrieve_spec.config import PASS
from retrieve_spec.decoding.weight_layout import Layouts, packed_linear

aten = torch.ops.aten
Node = Any
"""An `fx.Node`; its arguments are of any type, which a static checker cannot follow."""

ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
COPIES = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.contiguous.default}
BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.cat.default: torch.cat,
    aten.neg.default: torch.neg,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.reshape.default: torch.reshape,
    aten.silu.default: functional.silu,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.matmul.default: torch.matmul,
    aten.linear.default: functional.linear,
}
"""Overloads whose Python binding costs less per call and takes the same positional arguments."""
ROW_BY_ROW = {aten.div.Tensor, aten.mul.Tensor, aten.tanh.default, aten.to.dtype, aten._to_copy.default}
"""What models do to logits: rows do not mix, and the first argument is the logits."""


def compile_program(
    program: torch.export.ExportedProgram, owner: torch.nn.Module
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Rewrite a program and compile it.

    Returns
    -------
    function
        Takes the weights, the program's inputs, the attention `(query, keys, values, layer) -> output` and the first
        row that logits are wanted for.
    weights
        The live parameters, buffers and constants it reads, in order.
    """
    graph = program.graph_module.graph
    weights = _weights(program, owner)
    drop_noops(graph)
    merge_equal(graph)
    if _is_float32(weights):
        inputs = Inputs(graph, weights)
        fuse_rms_norm(graph, inputs)
        fuse_rotary(graph, inputs)
        lay_out_weights(graph, inputs)
    _open_attention(graph)
    _open_rows(graph)
    for node in _nodes(graph):
        if node.op == "call_function" and node.target in BINDINGS:
            node.target = BINDINGS[node.target]
        elif node.op == "call_function" and node.target is aten.view.default:
            node.op, node.target, node.args = "call_method", "view", (node.args[0], *node.args[1])
    graph.eliminate_dead_code()
    graph.lint()
    module = fx.GraphModule(program.graph_module, graph)
    return module.forward, weights


def packed_share(code: Callable[..., Any]) -> float:
    """Share of a compiled program's linear layers that read packed weights."""
    targets = [node.target for node in code.__self__.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
    packed = targets.count(packed_linear)
    return packed / max(packed + targets.count(functional.linear), 1)


def _weights(program: torch.export.ExportedProgram, owner: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors of a program's lifted inputs, live ones where the owner still has them."""
    live = dict(owner.named_parameters(remove_duplicate=False)) | dict(owner.named_buffers(remove_duplicate=False))
    weights = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is not torch.export.graph_signature.InputKind.USER_INPUT:
            weights.append(live[spec.target] if spec.target in live else program.constants[spec.target])
    return weights


def _is_float32(weights: list[torch.Tensor]) -> bool:
    return all(w.dtype == torch.float32 for w in weights if w.is_floating_point())


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _nodes(graph: fx.Graph) -> list[Node]:
    return list(graph.nodes)


def drop_noops(graph: fx.Graph) -> None:
    """Remove shape assertions, conversions to what a tensor already is, products by one and idle dropout."""
    for node in _nodes(graph):
        if node.op != "call_function":
            continue
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _changes_nothing(node: Node) -> bool:
    if node.target in COPIES:
        before, after = _value(node.args[0]), _value(node)
        if before is None or after is None:
            return False
        same = before.dtype == after.dtype and before.device == after.device
        return same and (node.target is not aten.contiguous.default or before.is_contiguous())
    if node.target is aten.mul.Tensor:
        return isinstance(node.args[1], float) and node.args[1] == 1.0 and _value(node.args[0]).is_floating_point()
    return node.target is aten.dropout.default and (node.args[1] == 0.0 or node.args[2] is False)


def merge_equal(graph: fx.Graph) -> None:
    """Compute equal expressions once; the graph is functional, so equal inputs give equal outputs."""
    first: dict[Any, Node] = {}
    for node in _nodes(graph):
        if node.op != "call_function" or node.target is torch.ops.retrieve_spec.attend.default:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def normalise_rows(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, share: float) -> torch.Tensor:
    """RMS normalisation of (…, d) with weight (d,): five small operations where the reference takes eight."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.rsqrt(torch.addcmul(eps, norm, norm, value=share)).mul(x).mul_(weight)


def rotate_rows(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, half: int) -> torch.Tensor:
    """Rotary embedding of (…, 2 · half): the halves change places, the sine carries the sign."""
    return torch.addcmul(torch.mul(x, cos), torch.roll(x, half, -1), signed_sin)


class Inputs:
    """The weights of a program, to which rewrites add constants and copies of their own."""

    def __init__(self, graph: fx.Graph, weights: list[torch.Tensor]) -> None:
        self.graph, self.weights = graph, weights
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._last = placeholders[len(weights) - 1]
        self.of_node = dict(zip(placeholders, weights, strict=False))
        self._added: dict[Any, Node] = {}

    def add(self, key: Any, tensor: torch.Tensor) -> Node:
        """Node of a further input; equal keys share one."""
        if key not in self._added:
            with self.graph.inserting_after(self._last):
                self._last = self.graph.placeholder(f"added_{len(self.weights)}")
            self._last.meta["val"] = tensor
            self._added[key] = self._last
            self.weights.append(tensor)
        return self._added[key]


def fuse_rms_norm(graph: fx.Graph, inputs: Inputs) -> None:
    """Rewrite weight · (x · rsqrt(mean(x²) + eps))."""
    for node in _nodes(graph):
        match = _match_rms_norm(node)
        if match is None:
            continue
        x, weight, eps = match
        eps_node = inputs.add(("eps", eps), torch.tensor(eps, device=_value(x).device))
        with graph.inserting_before(node):
            fused = graph.call_function(normalise_rows, (x, weight, eps_node, 1.0 / _value(x).shape[-1]))
        _replace(node, fused)
    graph.eliminate_dead_code()


def _replace(node: Node, by: Node) -> None:
    by.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(by)


def _match_rms_norm(node: Node) -> tuple[Node, Node, float] | None:
    """(x, weight, eps) when a node is the last product of an RMS normalisation over the last axis."""
    if not _is_call(node, aten.mul.Tensor):
        return None
    for weight, normed in (node.args, node.args[::-1]):
        if not (_is_call(normed, aten.mul.Tensor) and isinstance(weight, fx.Node) and _value(weight).ndim == 1):
            continue
        x, factor = normed.args
        if not (_is_call(factor, aten.rsqrt.default) and _is_call(factor.args[0], aten.add.Tensor)):
            continue
        mean, eps = factor.args[0].args
        if not (_is_call(mean, aten.mean.dim) and isinstance(eps, float) and list(mean.args[1]) == [-1]):
            continue
        square = mean.args[0]
        if (
            _is_call(square, aten.pow.Tensor_Scalar)
            and square.args == (x, 2)
            and _value(x).shape[-1] == _value(weight).shape[0]
        ):
            return x, weight, eps
    return None


def fuse_rotary(graph: fx.Graph, inputs: Inputs) -> None:
    """Rewrite x · cos + [−x₂, x₁] · sin, where x₁ and x₂ are the halves of x."""
    signed: dict[Node, Node] = {}
    for node in _nodes(graph):
        match = _match_rotary(node)
        if match is None:
            continue
        x, cos, sin, half = match
        if sin not in signed:
            signs = torch.ones(2 * half, device=_value(x).device)
            signs[:half] = -1.0
            signs_node = inputs.add(("signs", half), signs)
            with graph.inserting_after(sin):
                signed[sin] = graph.call_function(torch.mul, (sin, signs_node))
            signed[sin].meta["val"] = _value(sin)
        with graph.inserting_before(node):
            _replace(node, graph.call_function(rotate_rows, (x, cos, signed[sin], half)))
    graph.eliminate_dead_code()


def _match_rotary(node: Node) -> tuple[Node, Node, Node, int] | None:
    """(x, cos, sin, half) when a node is the sum of a rotary embedding by halves."""
    if not (_is_call(node, aten.add.Tensor) and all(_is_call(side, aten.mul.Tensor) for side in node.args)):
        return None
    (x, cos), (turned, sin) = node.args[0].args, node.args[1].args
    if not (_is_call(turned, aten.cat.default) and _last_axis(turned.args[1:], turned) and len(turned.args[0]) == 2):
        return None
    negated, first = turned.args[0]
    half = _value(x).shape[-1] // 2
    if not (_is_call(negated, aten.neg.default) and _value(x).shape[-1] == 2 * half == _value(sin).shape[-1]):
        return None
    if _is_part(first, x, 0, half) and _is_part(negated.args[0], x, half, 2 * half):
        return x, cos, sin, half
    return None


def _last_axis(args: tuple[Any, ...], node: Node) -> bool:
    return bool(args) and args[0] in (-1, _value(node).ndim - 1)


def _is_part(node: Any, x: Node, start: int, stop: int) -> bool:
    """Whether a node is x[..., start:stop]."""
    if not (_is_call(node, aten.slice.Tensor) and node.args[0] is x and _last_axis(node.args[1:], node)):
        return False
    return bool(node.args[2] == start and min(node.args[3], _value(x).shape[-1]) == stop and len(node.args) == 4)


def _open_attention(graph: fx.Graph) -> None:
    """Call the attention that is given when the function is run."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        attend = graph.placeholder("attend")
    for node in _nodes(graph):
        if _is_call(node, torch.ops.retrieve_spec.attend.default):
            node.target, node.args = operator.call, (attend, *node.args)


def _open_rows(graph: fx.Graph) -> None:
    """Compute logits only from the row on that is given when the function is run."""
    attend = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(attend):
        first = graph.placeholder("first")
    output = next(node for node in graph.nodes if node.op == "output")
    logits, *others = output.args[0]
    head = logits
    while isinstance(head, fx.Node) and head.target in ROW_BY_ROW:
        head = head.args[0]
    if head.op == "call_function" and head.target in (aten.linear.default, packed_linear):
        with graph.inserting_before(head):
            head.update_arg(0, graph.call_function(rows_from, (head.args[0], first)))
    else:
        with graph.inserting_before(output):
            output.update_arg(0, (graph.call_function(rows_from, (logits, first)), *others))


def rows_from(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rows of (1, rows, d) from one on."""
    return x[:, first:] if first else x


def lay_out_weights(graph: fx.Graph, inputs: Inputs) -> None:
    """Let linear layers read copies of their weights in a faster layout, up to `config.PASS.layout_bytes` of them."""
    layouts = Layouts(PASS.layout_bytes)
    for node in _nodes(graph):
        if not _is_call(node, aten.linear.default) or node.args[1] not in inputs.of_node:
            continue
        weight = inputs.of_node[node.args[1]]
        layout = layouts.of(weight)
        if layout is None or _value(node.args[0]).ndim < 2:
            continue
        copy = inputs.add(id(weight), layout.tensor)
        if not layout.from_rows:
            node.replace_input_with(node.args[1], copy)
            continue
        bias = node.args[2] if len(node.args) > 2 else None
        with graph.inserting_before(node):
            product = graph.call_function(packed_linear, (node.args[0], node.args[1], copy, bias, layout.from_rows))
        _replace(node, product)
    graph.eliminate_dead_code()
