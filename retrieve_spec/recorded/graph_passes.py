"""Graph passes: an exported program becomes a short Python function over live weights, by rewriting its graph.

Knows tensor operations, not models.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from retrieve_spec.recorded.graph_rewrites import (
    Inputs,
    Node,
    fuse_half,
    fuse_rms_norm,
    fuse_rotary,
    is_call,
    lay_out_weights,
    nodes_of,
    value,
)
from retrieve_spec.recorded.weight_layout import Layouts, WeightCopies, packed_linear

aten = torch.ops.aten

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
    program: torch.export.ExportedProgram, owner: torch.nn.Module, layouts: Layouts, row_kernels: Any = None
) -> tuple[Callable[..., Any], list[torch.Tensor], WeightCopies]:
    """Rewrite a program and compile it; `row_kernels`: with these for what a 16-bit model does to rows.

    Returns
    -------
    function
        Takes the weights, the program's inputs, the attention `(query, keys, values, layer) -> output` and the rows
        that logits are wanted for.
    weights
        The live parameters, buffers and constants it reads, in order.
    copies
        Which of them are copies of weights.
    """
    graph = program.graph_module.graph
    weights = _weights(program, owner)
    inputs = Inputs(graph, weights)
    drop_noops(graph)
    merge_equal(graph)
    if _is_float32(weights):
        fuse_rms_norm(graph, inputs)
        fuse_rotary(graph, inputs)
        lay_out_weights(graph, inputs, layouts)
    elif row_kernels is not None:
        fuse_half(graph, row_kernels)
    _open_attention(graph)
    _open_rows(graph)
    for node in nodes_of(graph):
        if node.op == "call_function" and node.target in BINDINGS:
            node.target = BINDINGS[node.target]
        elif node.op == "call_function" and node.target is aten.view.default:
            node.op, node.target, node.args = "call_method", "view", (node.args[0], *node.args[1])
    graph.eliminate_dead_code()
    graph.lint()
    module = fx.GraphModule(program.graph_module, graph)
    return module.forward, weights, WeightCopies(inputs.copies)


def packed_share(code: Callable[..., Any]) -> float:
    """Share of the weights of a compiled program's linear layers, but for the last one, that it reads packed.

    The last one, which makes logits, is given few rows of a prompt.
    """
    nodes = [node for node in code.__self__.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
    layers = [node for node in nodes if node.target in (packed_linear, functional.linear)][:-1]
    sizes = [int(value(node.args[1]).numel()) for node in layers]
    packed = sum(size for node, size in zip(layers, sizes, strict=True) if node.target is packed_linear)
    return packed / max(sum(sizes), 1)


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


def check_repeatable(graph: fx.Graph) -> None:
    """Look for what gives another result each time.

    Raises
    ------
    NotImplementedError
        When there is any.
    """
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        if target is aten.dropout.default and not _changes_nothing(node):
            raise NotImplementedError("its forward drops values at random")
        if torch.Tag.nondeterministic_seeded in target.tags and target is not aten.dropout.default:
            raise NotImplementedError(f"its forward draws random numbers ({target})")


def drop_noops(graph: fx.Graph) -> None:
    """Remove shape assertions, conversions to what a tensor already is, products by one and idle dropout."""
    for node in nodes_of(graph):
        if node.op != "call_function":
            continue
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _changes_nothing(node: Node) -> bool:
    """Whether the result is the first argument: copies to the same type and place, products with 1, no dropout."""
    if node.target in COPIES:
        before, after = value(node.args[0]), value(node)
        if before is None or after is None:
            return False
        same = before.dtype == after.dtype and before.device == after.device
        return same and (node.target is not aten.contiguous.default or before.is_contiguous())
    if node.target is aten.mul.Tensor:
        return isinstance(node.args[1], float) and node.args[1] == 1.0 and value(node.args[0]).is_floating_point()
    return node.target is aten.dropout.default and (node.args[1] == 0.0 or node.args[2] is False)


def merge_equal(graph: fx.Graph) -> None:
    """Compute equal expressions once; the graph is functional, so equal inputs give equal outputs."""
    first: dict[Any, Node] = {}
    for node in nodes_of(graph):
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


def _open_attention(graph: fx.Graph) -> None:
    """Call the attention that is given when the function is run."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        attend = graph.placeholder("attend")
    for node in nodes_of(graph):
        if is_call(node, torch.ops.retrieve_spec.attend.default):
            node.target, node.args = operator.call, (attend, *node.args)


def _open_rows(graph: fx.Graph) -> None:
    """Compute logits only for the rows that are given when the function is run."""
    attend = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(attend):
        wanted = graph.placeholder("wanted")
    output = next(node for node in graph.nodes if node.op == "output")
    logits, *others = output.args[0]
    head = logits
    while isinstance(head, fx.Node) and head.target in ROW_BY_ROW:
        head = head.args[0]
    if head.op == "call_function" and head.target in (aten.linear.default, packed_linear):
        with graph.inserting_before(head):
            head.update_arg(0, graph.call_function(rows_of, (head.args[0], wanted)))
    else:
        with graph.inserting_before(output):
            output.update_arg(0, (graph.call_function(rows_of, (logits, wanted)), *others))


def rows_of(x: torch.Tensor, wanted: int | torch.Tensor) -> torch.Tensor:
    """Rows of (1, rows, d) from one on, or those of an index."""
    if isinstance(wanted, torch.Tensor):
        return x.index_select(1, wanted)
    return x[:, wanted:] if wanted else x
