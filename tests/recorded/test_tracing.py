"""Traces: a graph that does for any number of rows what the forward does, over the tensors of that moment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_decoders import OPTIONS, accelerate, build, check, ids, says
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.llama.modeling_llama import LlamaMLP

from retrieve_spec.recorded.tracing import trace

WIDTH, TOKENS = 6, 512


class Forward(nn.Module):
    """Sizes that are made of the rows, and numbers that only look like it; a shared part, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.first = self.second = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("offset", torch.ones(WIDTH))
        self.factor = torch.tensor(3.0)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(input_ids) + position_ids[..., None] * self.factor + self.offset
        x = x.masked_fill((input_ids == 3)[..., None], 512) + torch.arange(1, input_ids.shape[1] + 1)[:, None]
        inner = self.first(x).view(2 * input_ids.shape[1], WIDTH)
        inner = self.second(inner).reshape(1, 4 * input_ids.shape[1], WIDTH)[:, : input_ids.shape[1]]
        return self.head(inner), inner


def function(graph: fx.Graph) -> Callable[..., Any]:
    made: Callable[..., Any] = fx.GraphModule({}, graph).forward
    return made


@pytest.mark.parametrize("rows", [1, 2, 7, 510])
@torch.no_grad()
def test_a_graph_does_for_any_rows_what_the_forward_does(rows: int) -> None:
    forward = Forward().eval()
    before = dict(forward.named_parameters(remove_duplicate=False)) | dict(forward.named_buffers())
    traced = trace(forward, 1, torch.device("cpu"))
    after = dict(forward.named_parameters(remove_duplicate=False)) | dict(forward.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items()) and not isinstance(forward.factor, FakeTensor)
    forward.second.weight.mul_(2)  # weights are the live ones
    ids, positions = torch.arange(rows)[None] % TOKENS, torch.arange(rows)[None] + 5
    (ours,) = function(traced.graph)(*traced.weights.values(), ids, positions)
    assert torch.equal(ours, forward(ids, positions)[0])
    assert [node.meta["val"].shape[2] for node in traced.inside] == [WIDTH]


class Keeping(Forward):
    """Keeps a table for as many rows as it has seen, as a buffer and in containers, and its last input."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = input_ids.shape[1]
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.most, self.tables["last"], self.last = rows, torch.ones(rows), input_ids
        logits, inner = super().forward(input_ids, position_ids)
        return logits, inner * self.table


@torch.no_grad()
def test_a_trace_leaves_nothing_in_the_modules() -> None:
    forward = Keeping().eval()
    forward.tables, forward.most = {}, 0
    before = dict(vars(forward))
    trace(forward, 2, torch.device("cpu"))
    assert vars(forward) == before and forward.tables == {}
    assert set(dict(forward.named_buffers())) == {"offset"}


_tables: dict[str, torch.Tensor] = {}
_last: tuple[torch.Tensor, ...] = ()


class Sharing(LlamaMLP):  # type: ignore[misc]
    """Keeps what it computes of its weights where all of its class find it: tables of more rows than it had."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _last
        rows = x.shape[-2]
        if Sharing.table is None or len(Sharing.table) < rows:
            Sharing.table = self.up_proj.weight[:1, 0] + torch.zeros(rows)
            _tables["more"] = Sharing.table + 1
            _last = (Sharing.table,)
        return super().forward(x) * (Sharing.table[:rows, None] + _tables["more"][:rows, None] + _last[0][:rows, None])


@pytest.mark.parametrize("length", [3, 20])
def test_tables_that_all_modules_of_a_class_share_stay_real(length: int) -> None:
    """What an earlier text has left there is too short for the rows of a trace, or for those of one trace only."""
    model = build("llama")
    for block in model.model.layers:
        block.mlp.__class__ = Sharing
    model.generate(ids(length), **OPTIONS | {"max_new_tokens": 1})
    accelerate(model)
    assert not any(isinstance(kept, FakeTensor) for kept in (Sharing.table, *_tables.values(), *_last))
    assert torch.equal(model.generate(ids(20), **OPTIONS), says(model))


@torch.no_grad()
def test_a_class_may_name_a_file_that_is_not_loaded() -> None:
    forward = type("Made", (Forward,), {"__module__": "not.loaded"})().eval()
    assert len(trace(forward, 2, torch.device("cpu")).graph.nodes) == len(
        trace(Forward().eval(), 2, torch.device("cpu")).graph.nodes
    )


class InPlace(Forward):
    """Changes a number that it makes, and a shape, in place."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, inner = super().forward(input_ids, position_ids)
        factor = torch.tensor(2.0)
        factor.mul_(3)
        return logits.unsqueeze_(0)[0] * factor, inner


@torch.no_grad()
def test_what_a_forward_changes_in_place_is_its_own_each_time() -> None:
    forward = InPlace().eval()
    traced = trace(forward, 2, torch.device("cpu"))
    ids = torch.arange(4)[None]
    for _ in range(2):
        assert torch.equal(function(traced.graph)(*traced.weights.values(), ids, ids)[0], forward(ids, ids)[0])
    (head,) = [node for node in traced.graph.nodes if node.target is torch.ops.aten.linear.default][-1:]
    assert head.meta["val"].shape == (1, 512, TOKENS)


@functools.cache
def factors(rows: int) -> torch.Tensor:
    """A table that outlives every call, as of rotary angles."""
    return torch.linspace(1, 2, 2 * TOKENS).cumsum(0)[:rows, None].mul_(torch.tensor([2.0, 3.0]).prod().item())


class Constants(Forward):
    """Reads the numbers of constants, and keeps some outside of modules."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, inner = super().forward(input_ids, position_ids)
        chosen = torch.arange(WIDTH)[torch.tensor([True, False] * (WIDTH // 2))]
        return logits * factors(input_ids.shape[1]), inner[..., chosen]


@torch.no_grad()
def test_constants_are_computed_in_a_trace_and_may_outlive_it() -> None:
    forward = Constants().eval()
    traced = trace(forward, 2, torch.device("cpu"))
    for rows in (3, 4, 512):
        given = torch.arange(rows)[None] % TOKENS, torch.arange(rows)[None]
        ours = function(traced.graph)(*traced.weights.values(), *given)
        assert not isinstance(factors(rows), FakeTensor)
        assert all(map(torch.equal, ours, forward(*given)))


@pytest.mark.parametrize("write", [torch.Tensor.copy_, torch.Tensor.add_])
def test_numbers_that_come_from_weights_are_not_read_from_what_a_forward_makes(write: Callable[..., Any]) -> None:
    class Written(Forward):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits, inner = super().forward(input_ids, position_ids)
            made = torch.zeros(2)
            write(made[1:], self.offset[:1])
            return logits * made[1].item(), inner

    with torch.no_grad(), pytest.raises(Exception, match="_local_scalar_dense"):
        trace(Written().eval(), 2, torch.device("cpu"))


@torch.no_grad()
def test_tensors_that_a_forward_reads_are_left_as_they_were() -> None:
    class Counting(Forward):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.factor += 1
            logits, inner = super().forward(input_ids, position_ids)
            return logits, inner * self.factor.view(1)

    forward = Counting().eval()
    traced = trace(forward, 2, torch.device("cpu"))
    assert float(forward.factor) == 3
    given = torch.arange(4)[None], torch.arange(4)[None]
    ours = function(traced.graph)(*traced.weights.values(), *given)
    forward.factor.fill_(3)
    assert all(map(torch.equal, ours, forward(*given)))


class Autocast(Forward):
    """Switches autocast, on or off."""

    enabled = True

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return super().forward(input_ids, position_ids)


@torch.no_grad()
def test_a_forward_that_switches_autocast_on_is_refused() -> None:
    forward = Autocast().eval()
    with pytest.raises(NotImplementedError, match="autocast"):
        trace(forward, 2, torch.device("cpu"))
    forward.enabled = False
    traced = trace(forward, 2, torch.device("cpu"))
    ids = torch.arange(4)[None]
    for ours, theirs in zip(function(traced.graph)(*traced.weights.values(), ids, ids), forward(ids, ids), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "of_rows",
    [lambda rows: rows / 7, lambda rows: torch.tensor(float(rows)), lambda rows: rows // 2, lambda rows: rows > 4],
)
def test_a_forward_that_makes_other_numbers_of_the_rows_is_refused(of_rows: Callable[[int], Any]) -> None:
    class Scaled(Forward):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits, inner = super().forward(input_ids, position_ids)
            return logits * of_rows(input_ids.shape[1]), inner

    with torch.no_grad(), pytest.raises(NotImplementedError, match="another number of rows"):
        trace(Scaled().eval(), 2, torch.device("cpu"))


class ManyRows(LlamaMLP):  # type: ignore[misc]
    """Does something else from some number of rows on."""

    most = 100

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (2 if x.shape[1] > self.most else 1)


@pytest.mark.parametrize(("most", "kind"), [(5, "model's own"), (500, "model's own"), (1000, "recorded")])
def test_a_forward_that_does_something_else_with_more_rows_is_not_recorded(most: int, kind: str) -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.most = ManyRows, most
    accelerate(model)
    check(model, kind)


class Apart(LlamaMLP):  # type: ignore[misc]
    """Changes in place what begins equal, and a copy."""

    def forward(self, x: torch.Tensor) -> Any:
        even, odd, copied = torch.zeros(x.shape), torch.zeros(x.shape), x * 1.0
        even[..., ::2] += 1
        odd[..., 1::2] -= 1
        copied.mul_(even + odd)
        return super().forward(x + copied)


def test_what_is_changed_in_place_is_not_taken_for_its_equal() -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = Apart
    check(accelerate(model))


class Tempered(nn.Linear):
    """A head whose logits have a scale for each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.abs().mean(-1, keepdim=True)


def test_logits_of_some_rows_have_the_scales_of_these_rows() -> None:
    model = build("llama")
    model.lm_head.__class__ = Tempered
    accelerate(model)
    for length in (20, 50):
        said = model.generate(ids(length), max_new_tokens=10, do_sample=False)
        assert torch.equal(said, says(model, ids(length)))
    assert model.speculation.pass_kind == "recorded"
