"""Row segments: the row operations of a recorded pass on a CPU, compiled to as few `RowProgram`s as possible.

A segment collects operations that programs have steps for, until another operation needs one of its results. It runs
before that operation, and views of its results are taken after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from retrieve_spec.kernels.attention_inputs import LayerRule
from retrieve_spec.kernels.cpu import (
    GROUP,
    LANES,
    NOWHERE,
    UNPACKED,
    ZEROS,
    RowProgram,
    Step,
    bits_of,
    is_fast_for_many,
    layer_rows,
    serves,
)
from retrieve_spec.recorded.tracing import Node

aten = torch.ops.aten
PACKED_PRODUCT = torch.ops.retrieve_spec.packed_product.default
_PACKED_ROWS = torch.ops.retrieve_spec.packed_rows.default
_VIEWS = {aten.view.default, aten.reshape.default, aten.transpose.int, aten.unsqueeze.default}
_PRODUCTS = {PACKED_PRODUCT, aten.linear.default}
_PAIRS = {layer_rows.add_rms_norm, layer_rows.rotate_both}
_ROTATIONS = {layer_rows.rotate, layer_rows.rotate_both}
_STEPS = {
    PACKED_PRODUCT: 1, aten.linear.default: 1, layer_rows.rms_norm: 1, layer_rows.add_rms_norm: 2,
    layer_rows.gate: 2, layer_rows.rotate: 1, layer_rows.rotate_both: 2,
}  # fmt: skip
"""Operations that programs have a step for, and how many of their leading arguments are rows."""
_LOOKUPS = {aten.embedding.default, _PACKED_ROWS}
_ANY = 1 << 62
"""More rows than a table has."""


def fuse_rows(
    graph: fx.Graph,
    weights: Mapping[Node, torch.Tensor],
    dtype: torch.dtype,
    rules: Sequence[LayerRule] = (),
    exact: bool = False,
) -> bool:
    """Replace a graph's operations on rows by segments.

    Parameters
    ----------
    graph
        A graph with its attention open.
    weights
        The live tensors that its placeholders stand for.
    dtype
        Of the rows.
    rules
        What every layer's attention does, to run it in segments too; then the graph gets a `RowTexts` as its attention.
    exact
        With a product outside of segments `whole` is False: the order of its sums depends on the number of rows.

    Returns
    -------
    whole
        Whether all attention is part of segments.
    """
    rows = next(node for node in graph.nodes if node.name == "position_ids").meta["val"].shape[1]
    segment = Segment(rows, weights, dtype, rules)
    for node in list(graph.nodes):
        if node.op == "output" or (segment.feeds(node) and not segment.take(node)):
            segment.close(node)
            segment = Segment(rows, weights, dtype, rules)
        if not segment.feeds(node):
            segment.take(node)
    left = (operator.call, aten.linear.default) if exact else (operator.call,)
    return not any(node.target in left for node in graph.nodes)


def _shape(node: Node) -> Any:
    return node.meta["val"].shape


def _row_width(node: Node) -> int:
    """Return the numbers in a row of (1, rows, …) or of (1, heads, rows, d)."""
    shape = _shape(node)
    return int(shape[1] * shape[3] if _is_transposed(node) else np.prod([int(size) for size in shape[2:]]))


def _is_transposed(node: Node) -> bool:
    """Whether a node is a result of a rotary embedding: (1, heads, rows, d)."""
    return node.target in _ROTATIONS or (node.target is operator.getitem and node.args[0].target in _ROTATIONS)


class Segment:
    """Operations that follow each other, and the views of their results.

    Parameters
    ----------
    rows
        Rows of the pass, as a symbol of the trace.
    weights
        The live tensors that placeholders stand for.
    dtype
        Of these.
    rules
        By layer, what its attention does, where segments may include it.
    """

    def __init__(
        self, rows: Any, weights: Mapping[Node, torch.Tensor], dtype: torch.dtype, rules: Sequence[LayerRule]
    ) -> None:
        self._rows, self._weights, self._dtype, self._rules = str(rows), weights, dtype, rules
        self._nodes: dict[Node, None] = {}  # in order
        self._steps: list[Node] = []
        self._chosen: dict[Node, None] = {}  # have only the rows that logits are wanted for

    def feeds(self, node: Node) -> bool:
        """Whether a node needs a result of the segment."""
        return any(needed in self._nodes for needed in node.all_input_nodes)

    def take(self, node: Node) -> bool:
        """Add the next node if there is a step for it or it is a view of a node in the segment; return whether it was
        added.
        """
        is_choice = self._chooses(node)
        if node.op != "call_function" and not is_choice:
            return False
        is_chosen = any(needed in self._chosen for needed in node.all_input_nodes)
        step = is_choice or (self._has_step(node) and is_chosen == bool(self._chosen))
        views = node.target in _VIEWS and self.feeds(node)
        if step or views or (node.target is operator.getitem and node.args[0] in self._steps):
            self._nodes[node] = None
            self._steps += [node] * step
            self._chosen |= {node: None} if is_choice or is_chosen else {}
            return True
        return False

    def _chooses(self, node: Node) -> bool:
        """Whether a node chooses the rows of the segment that logits are wanted for."""
        return bool(self._rules) and node.op == "call_method" and node.args[0] in self._nodes

    def _has_step(self, node: Node) -> bool:
        """Whether a node is an operation that programs have a step for, on contiguous rows."""
        if node.target is operator.call:
            return self._attends(node)
        if node.target in _LOOKUPS:
            return self._looks_up(node)
        if node.target not in _STEPS:
            return False
        if node.target is aten.linear.default and not self._serves(node):
            return False
        tensors = [value for arg in node.args if isinstance(arg, fx.Node) and (value := arg.meta["val"]) is not None]
        if any(tensor.dtype not in (self._dtype, torch.uint8) for tensor in tensors):
            return False
        if node.target in _PRODUCTS and len(_shape(node.args[0])) != 3:
            return False
        given = node.args[: _STEPS[node.target]]
        if node.target in _ROTATIONS:
            if any(arg.target is not aten.transpose.int or arg.args[1:] != (1, 2) for arg in given):
                return False
            given = [arg.args[0] for arg in given]
        in_rows = all(_shape(arg)[0] == 1 and str(_shape(arg)[1]) == self._rows for arg in given)
        return in_rows and all(self._base(arg) is not None for arg in given)

    def _looks_up(self, node: Node) -> bool:
        """Whether a node takes rows of a table by the numbers of all rows."""
        table, numbers = _lookup(node)
        in_rows = len(self._rules) > 0 and tuple(map(str, _shape(numbers))) == ("1", self._rows)
        if not in_rows or node.meta["val"].dtype != self._dtype:
            return False
        if node.target is _PACKED_ROWS:
            return bool(table.meta["val"].dtype == torch.uint8)
        return table not in self._weights or serves(self._weights[table])

    def _serves(self, linear: Node) -> bool:
        """Whether a product with unpacked weights is one that programs have a step for, and fast.

        Passes that read prompts have many rows, and attend otherwise.
        """
        weight = linear.args[1]
        fast = len(self._rules) > 0 or is_fast_for_many(self._dtype)
        return fast and weight.op == "placeholder" and serves(weight.meta["val"])

    def _products(self) -> list[Node]:
        return [step for step in self._steps if step.target in _PRODUCTS]

    def _attends(self, node: Node) -> bool:
        """Whether a node is an attention that programs have a step for."""
        _, *states, layer = node.args
        if layer >= len(self._rules):
            return False
        _, keys, values = (int(_shape(state)[3]) for state in states)
        if self._rules[layer].sinks is not None or keys * self._dtype.itemsize % 64 or values % LANES:
            return False
        return all(self._transposed_base(state) is not None for state in states)

    def _transposed_base(self, node: Node) -> Node | None:
        """Return the node of the segment that (1, heads, rows, d) is a transposed view of; None where there is none."""
        if node not in self._nodes or node.meta["val"].dtype != self._dtype:
            return None
        if _is_transposed(node):
            return node
        return self._base(node.args[0]) if node.target is aten.transpose.int and node.args[1:] == (1, 2) else None

    def _base(self, node: Node) -> Node | None:
        """Return what a node is a view of, row for row; None where the view mixes rows."""
        while node in self._nodes and node.target in _VIEWS:
            if node.target is aten.transpose.int:
                return None
            node = node.args[0]
        return node

    def _is_needed(self, node: Node) -> bool:
        """Whether a node outside of the segment uses a result or a view of it."""
        views = [user for user in node.users if user.target in _VIEWS and user in self._nodes]
        return any(user not in self._nodes for user in node.users) or any(map(self._is_needed, views))

    def close(self, following: Node) -> None:
        """Run the program before the next node."""
        if not self._products():
            return
        graph = following.graph
        results = [node for node in self._nodes if node.target not in _VIEWS and node.target not in _PAIRS]
        outputs = [node for node in results if self._is_needed(node)]
        inputs, function = self._compile(outputs)
        attention = next((step.args[0] for step in self._steps if step.target is operator.call), None)
        with graph.inserting_before(following):
            call = graph.call_function(function, (attention, *inputs))
            for i, node in enumerate(outputs):
                item = graph.call_function(operator.getitem, (call, i))
                if _is_transposed(node):
                    item = graph.call_function(transposed, (item, int(_shape(node)[1])))
                item.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(item)
        for node in reversed(self._nodes):
            if not node.users:
                graph.erase_node(node)
        for node in self._nodes:
            if node.users:
                following.prepend(node)

    def _compile(self, outputs: Sequence[Node]) -> tuple[list[Node], Callable[..., list[torch.Tensor]]]:
        """Return the nodes whose tensors the program takes, rows first, and the function that runs it."""
        program, places, inputs, choice = RowProgram(self._dtype), dict[Node, int](), list[Node](), 0

        def given(node: Node) -> int:
            """Return the place of a tensor."""
            base = self._base(node)
            weight = self._weights.get(base)
            if base not in places and weight is not None and weight.is_contiguous():
                places[base] = program.weight(weight)
            elif base not in places:
                inputs.append(base)
                places[base] = program.place()
            return places[base]

        def result(step: Node, width: int, item: int | None = None) -> int:
            """Return the place of a step's result, or of one of its two results."""
            place = program.place(width)
            for node in [step] if item is None else step.users:
                if item is None or node.args[1] == item:
                    places[node] = place
            return place

        for step in self._steps:
            if step in places:
                continue  # part of an earlier step's products
            x, *others = step.args
            if step.target in _LOOKUPS:
                table, numbers = _lookup(step)
                bits, width = 8 if step.target is _PACKED_ROWS else UNPACKED, _row_width(step)
                most = int(_shape(table)[0]) if "val" in table.meta else _ANY  # tables by position have every row
                program.add(Step.TAKE, given(numbers), given(table), result(step, width), width, bits, most)
            elif step.op == "call_method":
                rows, width, wanted = given(x), _row_width(x), others[0][1]
                program.add(Step.CHOOSE, given(wanted), rows, result(step, width), width, UNPACKED, _ANY)
                choice = inputs.index(wanted)
            elif step.target is operator.call:
                *states, layer = others
                query, keys, values = (places[self._transposed_base(state)] for state in states)
                (heads, d), (kv_heads, _), (_, dv) = (map(int, _shape(state)[1::2]) for state in states)
                program.add(Step.KEEP, keys, values, layer, kv_heads, d, dv)
                out = result(step, heads * dv)
                rule = self._rules[layer]
                numbers = rule.window, rule.scale, float(rule.softcap)
                program.add(Step.ATTEND, query, out, layer, heads, kv_heads, d, dv, *numbers)
            elif step.target in _PRODUCTS:
                rows, kind = given(x), _bits(step)
                same = [each for each in self._products() if self._base(each.args[0]) is self._base(x)]
                parts = [
                    (given(each.args[1]), _bias(each, given), result(each, _row_width(each)), _row_width(each))
                    for each in same
                    if _bits(each) == kind
                ]
                program.multiply(rows, int(_shape(x)[-1]), kind, parts)
            elif step.target is layer_rows.gate:
                program.add(Step.GATE, given(x), given(others[0]), result(step, _row_width(x)), _row_width(x))
            elif step.target in _ROTATIONS:
                *more, cos, sin = others
                for i, each in enumerate((x, *more)):
                    heads, half = int(_shape(each)[1]), int(_shape(each)[3]) // 2
                    out = result(step, 2 * heads * half, i if more else None)
                    program.add(Step.ROTATE, given(each.args[0]), given(cos), given(sin), out, heads, half)
            else:
                *more, weight, eps = others
                whole, width = _row_width(x), int(_shape(weight)[0])
                other, total = (given(more[0]), result(step, whole, 0)) if more else (NOWHERE, NOWHERE)
                out = result(step, whole, 1 if more else None)
                program.add(Step.NORMALISE, given(x), other, given(weight), total, out, width, whole // width, eps)
        program.finish([places[node] for node in (*inputs, *outputs)])
        shapes = [
            (_row_width(node),) if _is_transposed(node) else tuple(map(int, _shape(node)[2:])) for node in outputs
        ]
        results = [(shape, node in self._chosen) for shape, node in zip(shapes, outputs, strict=True)]
        return inputs, program.over(_row_width(inputs[0]), results, choice).run_over


def _lookup(node: Node) -> Sequence[Node]:
    """Return the table of a node that takes rows of it, and their numbers."""
    first, second = node.args[:2]
    return (second, first) if node.target is _PACKED_ROWS else (first, second)


def _bias(product: Node, given: Callable[[Node], int]) -> int:
    """Return the place of a product's bias."""
    return given(product.args[2]) if product.args[2:] and product.args[2] is not None else ZEROS


def _bits(product: Node) -> int:
    """Return the bits of a product's weights."""
    x, weight = product.args[:2]
    if product.target is aten.linear.default:
        return UNPACKED
    return bits_of(int(_shape(weight)[1]), int(_shape(x)[-1]) // GROUP)


def transposed(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (1, heads, rows, d), given (1, rows, heads · d)."""
    return rows.view(1, rows.shape[1], heads, -1).transpose(1, 2)
