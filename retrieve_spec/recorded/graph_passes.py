"""Graph passes: a trace becomes a short Python function over live weights, by rewriting its graph.

It knows tensor operations, not models. Rewrites for 16-bit graphs keep where the model rounds to 16 bits.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from retrieve_spec.kernels.attention_inputs import LayerRule
from retrieve_spec.kernels.cpu import CAN_RUN, RowProgram, layer_rows
from retrieve_spec.recorded.position_tables import PositionTables
from retrieve_spec.recorded.row_segments import PACKED_PRODUCT, fuse_rows
from retrieve_spec.recorded.tracing import Node, Trace

aten = torch.ops.aten
ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
COPIES = {
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.contiguous.default,
    aten.type_as.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
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
"""Operations of models on logits: they do not mix rows, and the logits are their first argument."""


@dataclass(frozen=True, slots=True)
class CompiledPass:
    """A trace as Python functions.

    Attributes
    ----------
    run
        Takes token ids, positions, the attention `(query, keys, values, layer) -> output` and the rows that logits are
        wanted for; reads the live parameters, buffers and constants.
    run_rows
        The same with a `RowTexts` in place of the attention, on a CPU; None where there is none.
    program_share
        Share of the weights of linear layers, but for the last one, that programs over rows multiply by.
    programs
        The programs of `run` and of `run_rows`.
    """

    run: Callable[..., Any]
    run_rows: Callable[..., Any] | None
    program_share: float
    programs: list[RowProgram]


def compile_trace(
    trace: Trace, row_kernels: Any = None, rules: Sequence[LayerRule] = (), exact: bool = False
) -> CompiledPass:
    """Rewrite the graph of a trace, and compile it.

    Parameters
    ----------
    trace
        The trace.
    row_kernels
        Module of the kernels that stand for what a model does to rows.
    rules
        What every layer's attention does.
    exact
        Make a row's logits independent, bit for bit, of the other rows.
    """
    graph, weights = trace.graph, list(trace.weights.values())
    drop_noops(graph)
    merge_equal(graph)
    single = all(weight.dtype == torch.float32 for weight in weights if weight.is_floating_point())
    if row_kernels is not None:
        fuse_kernels(graph, row_kernels, half=not single)
    sizes = layer_sizes(graph)
    _open_attention(graph)
    _open_rows(graph)
    run_rows, programs = None, list[RowProgram]()
    if row_kernels is layer_rows and CAN_RUN:
        dtype = next(
            (weight.dtype for weight in weights if weight.dtype in (torch.bfloat16, torch.float16)), torch.float32
        )
        whole = fx.Graph()
        whole.output(whole.graph_copy(graph, {}))
        look_angles_up(whole, weights)
        if fuse_rows(whole, dict(zip(whole.nodes, weights, strict=False)), dtype, rules, exact):
            run_rows = _function(whole, weights)
            programs += _programs(whole)
        fuse_rows(graph, dict(zip(graph.nodes, weights, strict=False)), dtype)
        programs += _programs(graph)
    left = sum(sizes.get(node, 0) for node in graph.nodes if node.target is aten.linear.default)
    by_programs = 1 - left / max(sum(sizes.values()), 1)
    if row_kernels is not None and row_kernels is not layer_rows:
        fuse_linears(graph, row_kernels)
    return CompiledPass(_function(graph, weights), run_rows, by_programs, programs)


def _programs(graph: fx.Graph) -> list[RowProgram]:
    """Return the programs that a graph runs."""
    owners = [getattr(node.target, "__self__", None) for node in graph.nodes]
    return [owner for owner in owners if isinstance(owner, RowProgram)]


def look_angles_up(graph: fx.Graph, weights: Sequence[torch.Tensor]) -> None:
    """Take rotary angles that depend on a row's position alone from tables, instead of computing them in every pass."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    positions = next(node for node in inputs if node.name == "position_ids")
    rows = value(positions).shape[1]
    fixed, known = set(inputs[: len(weights)]), {*inputs[: len(weights)], positions}
    for node in graph.nodes:
        needed = set(node.all_input_nodes)
        if needed and needed <= fixed:
            fixed.add(node)
        # without rows it is of all positions, such as the highest: tables have others
        if needed and needed <= known and (node in fixed or rows in getattr(value(node), "shape", (rows,))):
            known.add(node)
    rotations = [node for node in graph.nodes if node.target in (layer_rows.rotate, layer_rows.rotate_both)]
    angles = dict.fromkeys(
        angle
        for rotation in rotations
        for angle in rotation.args[-2:]
        if angle in known and value(angle).shape[:3] == (1, 1, rows)
    )
    if not angles:
        return
    apart, made = fx.Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in known:
            made[node] = apart.node_copy(node, made.__getitem__)
    apart.output(tuple(made[angle] for angle in angles))
    with graph.inserting_before(inputs[-1].next):
        tables = graph.call_function(PositionTables(_function(apart, weights)).look_up, (positions,))
        numbers = graph.call_function(operator.getitem, (tables, 0))
        numbers.meta["val"] = value(positions)
        rest = [graph.call_function(operator.getitem, (tables, number + 1)) for number in range(len(angles))]
    for angle, table in zip(angles, rest, strict=True):
        with graph.inserting_before(angle):
            taken = graph.call_function(aten.embedding.default, (table, numbers))
            taken.meta["val"] = value(angle)[:, 0]
            _replace(angle, graph.call_function(aten.unsqueeze.default, (taken, 1)))
    graph.eliminate_dead_code()


def _function(graph: fx.Graph, weights: Sequence[torch.Tensor]) -> functools.partial[Any]:
    """A rewritten graph as a function of its placeholders after the weights."""
    for node in nodes_of(graph):
        if node.op == "call_function" and node.target in BINDINGS:
            node.target = BINDINGS[node.target]
        elif node.op == "call_function" and node.target is aten.view.default:
            node.op, node.target, node.args = "call_method", "view", (node.args[0], *node.args[1])
    graph.eliminate_dead_code()
    used = []
    for node, weight in zip(nodes_of(graph), weights, strict=False):
        if node.users:
            used.append(weight)
        else:
            graph.erase_node(node)
    graph.lint()
    return functools.partial(fx.GraphModule({}, graph).forward, *used)


def layer_sizes(graph: fx.Graph) -> dict[Node, int]:
    """Return the sizes of the weights of a graph's linear layers, without the last one, which gets few rows of a
    prompt.
    """
    layers = [node for node in graph.nodes if node.target in (PACKED_PRODUCT, aten.linear.default)][:-1]
    return {node: int(value(node.args[1]).numel()) for node in layers}


def check_repeatable(graph: fx.Graph) -> None:
    """Refuse operations whose result differs from call to call.

    Raises
    ------
    NotImplementedError
        There is one.
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
    changed = changed_in_place(graph)
    for node in nodes_of(graph):
        if node.op != "call_function":
            continue
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif _changes_nothing(node) and changed.isdisjoint((node, node.args[0])):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _changes_nothing(node: Node) -> bool:
    """Whether the result is the first argument, as of copies to the same type and device, products by 1 and idle
    dropout.
    """
    if node.target in COPIES:
        before, after = value(node.args[0]), value(node)
        if before is None or after is None:
            return False
        same = before.dtype == after.dtype and before.device == after.device
        return same and (node.target is not aten.contiguous.default or before.is_contiguous())
    if node.target is aten.mul.Tensor:
        return isinstance(node.args[1], float) and node.args[1] == 1.0 and value(node.args[0]).is_floating_point()
    return node.target is aten.dropout.default and (node.args[1] == 0.0 or node.args[2] is False)


def changed_in_place(graph: fx.Graph) -> set[Node]:
    """Return the nodes whose results are in memory that an operation changes in place."""
    owners: dict[Node, Node] = {}
    changed: set[Node] = set()
    for node in graph.nodes:
        owners[node] = owners[node.args[0]] if node.target is operator.getitem else node
        schema = getattr(node.target, "_schema", None)
        for number, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is None:
                continue
            given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            for shared in given if isinstance(given, list) else [given]:
                owners[node] = owners.get(shared, node)
                if argument.alias_info.is_write:
                    changed.add(owners[node])
    return {node for node, owner in owners.items() if owner in changed}


def merge_equal(graph: fx.Graph) -> None:
    """Compute equal expressions once, but for those of memory that is changed in place."""
    first: dict[Any, Node] = {}
    changed = changed_in_place(graph)
    for node in nodes_of(graph):
        if node.op != "call_function" or node.target is torch.ops.retrieve_spec.attend.default:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or not changed.isdisjoint((node, *node.all_input_nodes)):
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
    while isinstance(head, fx.Node) and head.target in ROW_BY_ROW and not any(map(_has_rows, head.args[1:])):
        head = head.args[0]
    if head.op == "call_function" and head.target in (aten.linear.default, PACKED_PRODUCT):
        with graph.inserting_before(head):
            rows = graph.call_method("__getitem__", (head.args[0], (slice(None), wanted)))
            rows.meta["val"] = value(head.args[0])  # only their number differs
            head.update_arg(0, rows)
    else:
        with graph.inserting_before(output):
            output.update_arg(0, (graph.call_method("__getitem__", (logits, (slice(None), wanted))), *others))


def _has_rows(given: Any) -> bool:
    """Whether an argument of an operation on logits has more than one row."""
    return getattr(value(given), "ndim", 0) > 1 and value(given).shape[-2] > 1


def value(node: Any) -> Any:
    """Return the value of a node in the trace: a fake tensor, or a number."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def nodes_of(graph: fx.Graph) -> list[Node]:
    """Return the nodes of a graph as a list, so that the graph can change meanwhile."""
    return list(graph.nodes)


def is_call(node: Any, target: Any) -> bool:
    """Whether a node calls a function."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _replace(node: Node, by: Node) -> None:
    by.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(by)


def _match_norm(node: Node, half: bool = False) -> tuple[Node, Node, float] | None:
    """(x, weight, eps) when a node is the last product of an RMS normalisation over the last axis.

    `half`: x, weight and result are of one 16-bit type, and all but the product with the weight is computed in float32.
    """
    if not is_call(node, aten.mul.Tensor) or (half and value(node).dtype.itemsize != 2):
        return None
    for weight, normed in (node.args, node.args[::-1]):
        vector = isinstance(weight, fx.Node) and getattr(value(weight), "ndim", 0) == 1  # not a constant
        if not (vector and (_is_cast(normed) or not half)):
            continue
        normed = normed.args[0] if half else normed
        if not (is_call(normed, aten.mul.Tensor) and is_call(normed.args[1], aten.rsqrt.default)):
            continue
        x, eps = normed.args[0], _mean_square(normed.args[1], normed.args[0])
        if half:
            if not (_is_cast(x) and value(x).dtype == torch.float32):
                continue
            x = x.args[0]
            if not (value(x).dtype == value(node).dtype == value(weight).dtype and value(x).shape == value(node).shape):
                continue
        if eps is not None and value(x).shape[-1] == value(weight).shape[0]:
            return x, weight, eps
    return None


def _match_rotary(node: Node) -> tuple[Node, Node, Node, int] | None:
    """(x, cos, sin, half) when a node is the sum of a rotary embedding by halves."""
    if not (is_call(node, aten.add.Tensor) and all(is_call(side, aten.mul.Tensor) for side in node.args)):
        return None
    (x, cos), (turned, sin) = node.args[0].args, node.args[1].args
    if not (is_call(turned, aten.cat.default) and _last_axis(turned.args[1:], turned) and len(turned.args[0]) == 2):
        return None
    negated, first = turned.args[0]
    half = value(x).shape[-1] // 2
    if not (is_call(negated, aten.neg.default) and value(x).shape[-1] == 2 * half == value(sin).shape[-1]):
        return None
    if _is_part(first, x, 0, half) and _is_part(negated.args[0], x, half, 2 * half):
        return x, cos, sin, half
    return None


def _last_axis(args: tuple[Any, ...], node: Node) -> bool:
    return bool(args) and args[0] in (-1, value(node).ndim - 1)


def _is_part(node: Any, x: Node, start: int, stop: int) -> bool:
    """Whether a node is x[..., start:stop]."""
    if not (is_call(node, aten.slice.Tensor) and node.args[0] is x and _last_axis(node.args[1:], node)):
        return False
    return bool(node.args[2] == start and min(node.args[3], value(x).shape[-1]) == stop and len(node.args) == 4)


def fuse_kernels(graph: fx.Graph, kernels: Any, half: bool) -> None:
    """Fuse normalisations, rotary embeddings and gates of a graph into one call each; `half`: of 16-bit numbers."""
    for node in nodes_of(graph):
        call: tuple[Any, tuple[Any, ...]] | None = None
        if (norm := _match_norm(node, half)) is not None:
            call = (kernels.rms_norm, norm)
        elif (rotary := _match_rotary(node)) is not None and _is_by_heads(*rotary[:3]):
            call = (kernels.rotate, rotary[:3])
        elif (gate := _match_gate(node)) is not None:
            call = (kernels.gate, gate)
        if call is not None:
            with graph.inserting_before(node):
                _replace(node, graph.call_function(*call))
    _transpose_normed(graph, kernels)
    _fuse_sums(graph, kernels)
    _pair_rotary(graph, kernels)
    graph.eliminate_dead_code()


def _transpose_normed(graph: fx.Graph, kernels: Any) -> None:
    """Normalise rows before the axes of heads and rows are transposed."""
    for norm in nodes_of(graph):
        transposed: Node = norm.args[0] if is_call(norm, kernels.rms_norm) else None
        if is_call(transposed, aten.transpose.int) and transposed.args[1:] == (1, 2):
            with graph.inserting_before(norm):
                normed = graph.call_function(kernels.rms_norm, (transposed.args[0], *norm.args[1:]))
                normed.meta["val"] = value(transposed.args[0])
                _replace(norm, graph.call_function(aten.transpose.int, (normed, 1, 2)))


def _fuse_sums(graph: fx.Graph, kernels: Any) -> None:
    """Fuse residual sums of one shape and type into the launch that normalises them."""
    for norm in nodes_of(graph):
        total: Node = norm.args[0] if is_call(norm, kernels.rms_norm) else None
        if not (is_call(total, aten.add.Tensor) and len(total.args) == 2 and not total.kwargs):
            continue
        if any(getattr(value(side), "shape", None) != value(total).shape for side in total.args):
            continue
        if {value(side).dtype for side in total.args} != {value(total).dtype}:
            continue
        weight = norm.args[1]
        if any(needed.op != "placeholder" for needed in weight.all_input_nodes):
            continue
        if weight.op != "placeholder":  # such as a parameter plus one
            total.prepend(weight)
        with graph.inserting_before(total):
            both = graph.call_function(kernels.add_rms_norm, (*total.args, *norm.args[1:]))
            _take(graph, both, (total, norm))


def fuse_linears(graph: fx.Graph, kernels: Any) -> None:
    """Fuse linear layers of one 16-bit input into one launch with the gate or the rotation of their results, and others
    with the normalisation of a sum after them.
    """
    from retrieve_spec.kernels import triton_products

    for norm in nodes_of(graph):
        if not is_call(norm, kernels.add_rms_norm):
            continue
        for layer, other in (norm.args[:2], norm.args[1::-1]):
            if _is_served(layer, triton_products.STEP) and _bias(layer) is None and len(layer.users) == 1:
                norm.target = triton_products.linear_add_rms_norm
                norm.args = (*layer.args[:2], other, *norm.args[2:])
                graph.erase_node(layer)
                break
    groups: dict[tuple[Node, bool, int, torch.dtype], list[Node]] = {}
    for layer in nodes_of(graph):
        if _is_served(layer, triton_products.STEP):
            weight = value(layer.args[1])  # width and type tell formats apart, as inputs are the same
            key = layer.args[0], _bias(layer) is None, int(weight.shape[1]), weight.dtype
            groups.setdefault(key, []).append(layer)
    for (x, *_), layers in groups.items():
        for at in range(0, len(layers), triton_products.LAYERS):
            group = layers[at : at + triton_products.LAYERS]
            weights, biases = [layer.args[1] for layer in group], [_bias(layer) for layer in group]
            with graph.inserting_before(group[0]):
                _take(graph, graph.call_function(triton_products.linears, (x, weights, biases)), group)
    graph.eliminate_dead_code()
    for node in nodes_of(graph):
        if is_call(node, kernels.gate):
            _gate_linears(node, triton_products.linears)
        elif is_call(node, kernels.rotate_both):
            _rotate_linears(node, triton_products.linears)
    graph.eliminate_dead_code()


def _gate_linears(gate: Node, linears: Callable[..., Any]) -> None:
    """Gate the results of two linear layers in the launch that computes them."""
    layers = {_only_used(out, i) for i, out in enumerate(gate.args)}
    call = layers.pop()
    if not layers and is_call(call, linears) and len(call.args[1]) == 2:
        call.kwargs = {"is_gated": True}
        gate.replace_all_uses_with(gate.args[0])
        gate.graph.erase_node(gate)


def _rotate_linears(rotation: Node, linears: Callable[..., Any]) -> None:
    """Rotate queries and keys, the first two results of some linear layers, in the launch that computes them."""
    *heads, cos, sin = rotation.args
    layers = {_product_of_heads(each, i) for i, each in enumerate(heads)}
    call, width = layers.pop(), value(cos).shape[-1]
    if layers or not is_call(call, linears) or any(value(each).shape[-1] != width for each in heads):
        return
    if any(len(value(out)[0, 0]) % width for out in call.users):
        return
    before = list(itertools.takewhile(lambda node: node is not call, rotation.graph.nodes))
    for angles in (cos, sin):
        if angles not in before and all(needed in before for needed in angles.all_input_nodes):
            call.prepend(angles)
        elif angles not in before:
            return
    call.kwargs = {"angles": (cos, sin)}
    for rotated in list(rotation.users):
        rotated.replace_all_uses_with(heads[rotated.args[1]])


def _product_of_heads(heads: Node, number: int) -> Node:
    """Return the call whose result of a number, (1, rows, heads · d), is only used by heads; else None."""
    if not (is_call(heads, aten.transpose.int) and heads.args[1:] == (1, 2) and len(heads.users) == 1):
        return None
    view = heads.args[0]
    if view.target not in (aten.view.default, aten.reshape.default) or len(view.users) > 1 or value(view).ndim != 4:
        return None
    return _only_used(view.args[0], number) if value(view.args[0]).ndim == 3 else None


def _only_used(result: Node, number: int) -> Node:
    """Return the call of which a node is the result of a number, where it is used once; else None."""
    is_it = is_call(result, operator.getitem) and result.args[1] == number and len(result.users) == 1
    return result.args[0] if is_it else None


def _is_served(node: Node, step: int) -> bool:
    """Whether a node is a linear layer that `triton_products` takes."""
    packed = is_call(node, PACKED_PRODUCT)
    if not (packed or is_call(node, aten.linear.default)) or node.args[1].op != "placeholder":
        return False
    x, weight = value(node.args[0]), value(node.args[1])
    if x.dtype.itemsize != 2 or x.ndim != 3:
        return False
    plain = isinstance(weight, FakeTensor) and weight.is_contiguous() and weight.dtype == x.dtype
    return packed or (plain and weight.shape[1] % step == 0)


def _bias(layer: Node) -> Node | None:
    """Return the bias of a linear layer; None where it has none."""
    return layer.args[2] if len(layer.args) > 2 else None


def _pair_rotary(graph: fx.Graph, kernels: Any) -> None:
    """Fuse the rotations of queries and keys by the same angles into one launch."""
    waiting: dict[tuple[Node, Node], Node] = {}
    places = {node: i for i, node in enumerate(graph.nodes)}
    for node in nodes_of(graph):
        if not is_call(node, kernels.rotate):
            continue
        first = waiting.pop(node.args[1:], None)
        if first is None or any(places[user] < places[node] for user in first.users):
            waiting[node.args[1:]] = node
            continue
        with graph.inserting_before(node):
            both = graph.call_function(kernels.rotate_both, (first.args[0], node.args[0], *node.args[1:]))
            _take(graph, both, (first, node))


def _take(graph: fx.Graph, call: Node, nodes: Sequence[Node]) -> None:
    """Replace some nodes by the results of one call."""
    for i, node in enumerate(nodes):
        with graph.inserting_after(call):
            _replace(node, graph.call_function(operator.getitem, (call, i)))


def _is_by_heads(x: Node, cos: Node, sin: Node) -> bool:
    """Whether x is (1, heads, rows, d), and cosine and sine are the same for all heads."""
    if value(x).ndim != 4 or any(value(a).ndim != 4 or value(a).shape[1] != 1 for a in (cos, sin)):
        return False
    return bool(value(x).dtype == value(cos).dtype == value(sin).dtype)


def _mean_square(factor: Node, x: Node) -> float | None:
    """Return eps when a node is rsqrt(mean(x²) + eps) over the last axis."""
    if not is_call(factor.args[0], aten.add.Tensor):
        return None
    mean, eps = factor.args[0].args
    if not (is_call(mean, aten.mean.dim) and isinstance(eps, float) and list(mean.args[1]) == [-1]):
        return None
    square = mean.args[0]
    return eps if is_call(square, aten.pow.Tensor_Scalar) and square.args == (x, 2) else None


def _is_cast(node: Any) -> bool:
    return is_call(node, aten.to.dtype) or is_call(node, aten._to_copy.default)


def _match_gate(node: Node) -> tuple[Node, Node] | None:
    """(gate, up) when a node is silu(gate) · up of one shape and type."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for opened, up in (node.args, node.args[::-1]):
        if is_call(opened, aten.silu.default) and isinstance(up, fx.Node) and len(opened.users) == 1:
            gate = opened.args[0]
            if value(gate).shape == value(up).shape and value(gate).dtype == value(up).dtype == value(node).dtype:
                return gate, up
    return None
