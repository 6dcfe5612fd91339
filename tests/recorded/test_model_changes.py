"""What is done to a model after `accelerate`: every pass is the model's as it is now, and says which pass it was."""

from __future__ import annotations

import copy
import enum
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small_decoders import OPTIONS, VOCAB, accelerate, build, check, ids, says
from test_quantised import WeightOnly, replace_linears
from torch import nn
from torch.nn.utils import parametrize

import retrieve_spec as rs
from retrieve_spec.recorded.model_state import ModelState
from retrieve_spec.recorded.verifier_factory import VerifierFactory


def _counted_entry(model: Any, where: str) -> None:
    with torch.no_grad():
        model.get_submodule(where).weight[3, 9] = 40.0


def _uncounted_entry(model: Any, where: str) -> None:
    model.get_submodule(where).weight.data[3, 9] = 40.0


def _replaced_twice(model: Any, where: str) -> None:
    weight = model.get_submodule(where).weight
    for _ in range(2):
        weight.data = weight.data.clone()
    _uncounted_entry(model, where)


def _layer(model: Any) -> nn.Module:
    layer: nn.Module = model.model.layers[0].mlp.up_proj
    return layer


def _swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * self.scale


class Negated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def _step_of_an_optimizer(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(ids(20), labels=ids(20)).loss.backward()
    optimizer.step()


def _patch_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x, before=mlp.forward: 2 * before(x)


def _frequencies(model: Any) -> Any:
    return model.model.rotary_emb.inv_freq


EDITED = ("model.layers.1.mlp.down_proj", "lm_head")
CHANGES: dict[str, Callable[[Any], object]] = {
    "in half precision": lambda model: model.to(torch.bfloat16),
    "in double precision": lambda model: model.double(),
    "down and up": lambda model: model.half().float(),
    "another attention": lambda model: model.set_attn_implementation("eager"),
    "gradient checkpointing": lambda model: (model.gradient_checkpointing_enable(), model.requires_grad_(False)),
    "another module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "layers swapped": _swap_layers,
    "another class": lambda model: setattr(_layer(model), "__class__", Negated),
    "a forward patched": _patch_forward,
    "parametrised": lambda model: parametrize.register_parametrization(_layer(model), "weight", Halved()),
    "untied": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach().flip(0))),
    "another head": lambda model: setattr(model, "lm_head", nn.Linear(32, VOCAB, bias=False)),
    "quantised": lambda model: replace_linears([model.model.layers[1].mlp], WeightOnly),
}
"""What is done to a model, one after another."""
EDITS: dict[str, Callable[[Any], object]] = {
    "doubled weights": lambda model: [weight.detach().mul_(2.0) for weight in model.parameters()],
    "a state loaded": lambda model: model.load_state_dict({n: 0.5 * w for n, w in model.state_dict().items()}),
    "a step of an optimizer": _step_of_an_optimizer,
    "another buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", 0.5 * _frequencies(model)),
    "a buffer edited": lambda model: _frequencies(model).mul_(0.5),
    **{f"an entry of {name}": partial(_counted_entry, where=name) for name in EDITED},
    **{f"an uncounted entry of {name}": partial(_uncounted_entry, where=name) for name in EDITED},
    **{f"{name} replaced": partial(_replaced_twice, where=name) for name in EDITED},
}
"""What changes numbers alone."""


def test_changes_are_followed_and_the_pass_recorded_again() -> None:
    model = accelerate(build("llama", tie_word_embeddings=True))
    check(model)
    for name, change in CHANGES.items():
        change(model)
        check(model)
        assert (model.speculation.pass_kind, model.speculation.pass_reason) == ("recorded", ""), name
        check(model)


def test_other_numbers_are_read_by_the_next_pass() -> None:
    model = accelerate(build("llama"))
    before = check(model)
    numbers = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    for name, edit in EDITS.items():
        edit(model)
        assert not torch.equal(check(model), before), name
        assert (model.speculation.pass_kind, model.speculation.pass_reason) == ("recorded", ""), name
        with torch.no_grad():
            for tensor, was in zip((*model.parameters(), *model.buffers()), numbers, strict=True):
                tensor.copy_(was)
        assert torch.equal(check(model), before), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_move_within_a_generation_are_read_where_they_are(dtype: torch.dtype) -> None:
    """Where they were, there may be no memory, or other numbers."""
    model = accelerate(build("llama", dtype))
    stream = rs.generate_stream(model, ids(20), max_new_tokens=30, do_sample=False)
    said, before = list(next(stream).token_ids), [weight.data for weight in model.parameters()]
    for weight, old in zip(model.parameters(), before, strict=True):
        weight.data = old.clone()
        old.fill_(torch.nan)
    said += [token for piece in stream for token in piece.token_ids]
    assert model.speculation.last.pass_kind == "recorded"
    assert said == model.generate(ids(20), max_new_tokens=30, do_sample=False)[0, 20:].tolist()


def test_attributes_that_have_no_truth_value_may_change() -> None:
    model = build("llama")
    model.memo = np.arange(3)
    accelerate(model)
    check(model)
    model.memo = np.arange(1, 4)
    check(model)


def test_another_attention_is_followed_where_passes_are_the_models_own() -> None:
    """Which takes masks in another form."""
    model = accelerate(build("llama"), recorded_pass="off")
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        check(model, "model's own")
        assert model.speculation.last.mode == "tree"


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
def test_tokens_that_the_model_got_are_said(recorded_pass: str) -> None:
    model = accelerate(build("llama"), recorded_pass)
    kind = "recorded" if recorded_pass == "always" else "model's own"
    check(model, kind)
    model.resize_token_embeddings(VOCAB + 30)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 3.0 * model.lm_head.weight[:30]
    assert (check(model, kind)[:, 20:] >= VOCAB).any()


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
def test_tokens_that_the_model_lost_are_not_drafted(recorded_pass: str) -> None:
    """Though a memory of earlier answers has them."""
    model = rs.accelerate(build("llama"), session=True, nodes=8, recorded_pass=recorded_pass)
    prompt = ids(20) % 40
    said = model.generate(prompt, **OPTIONS)
    lost = said[:, 20:][said[:, 20:] >= 50]
    assert len(lost)
    model.resize_token_embeddings(50)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, **OPTIONS), says(model, prompt))


def test_training_and_hooks_for_a_while() -> None:
    model = build("llama")
    model.train()
    accelerate(model)
    assert model.speculation.pass_reason == "the model is in training mode"
    model.eval()
    check(model)
    model.model.layers[0].mlp.train()
    check(model)
    model.eval()
    hook = model.model.layers[0].register_forward_hook(lambda _m, _a, out: out * 0.5)
    check(model, "model's own")
    assert model.speculation.last.pass_reason == "LlamaDecoderLayer has forward hooks"
    hook.remove()
    check(model)
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda _m, _a, out: None)
    try:
        check(model, "model's own")
        assert model.speculation.last.pass_reason == "torch has forward hooks for all modules"
    finally:
        everywhere.remove()
    check(model)


def test_dropout_in_a_layer_that_trains_is_not_recorded_and_goes_on_to_train() -> None:
    model = build("llama")
    part = model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5)).train()
    accelerate(model)
    assert model.speculation.pass_kind != "recorded"
    assert [module for module in model.modules() if module.training] == list(part.modules())


def test_autocast_leaves_passes_to_the_model() -> None:
    model = accelerate(build("llama"))
    check(model)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(ids(20), **OPTIONS)
    assert model.speculation.last.pass_reason == "autocast is on"
    check(model)


def test_a_frozen_model_is_not_looked_at_until_the_promise_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = accelerate(build("llama"))
    model.speculation.assume_frozen()
    with monkeypatch.context() as patched:
        patched.setattr(ModelState, "holds", lambda _: pytest.fail("the model is looked at"))
        check(model)
    _uncounted_entry(model, EDITED[0])
    model.speculation.invalidate()
    check(model)
    _counted_entry(model, EDITED[1])
    check(model)


def test_weights_of_a_frozen_model_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate(build("llama", hidden_size=64, intermediate_size=96, head_dim=32))
    model.speculation.assume_frozen()
    check(model)
    monkeypatch.setattr(nn.Parameter, "data_ptr", lambda _: pytest.fail("a weight is looked for"), raising=False)
    model.generate(ids(20), **OPTIONS)
    assert model.speculation.last.pass_kind == "recorded"


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_a_frozen_model_that_is_not_recorded_is_looked_at_all_the_same(recorded_pass: str) -> None:
    model = rs.accelerate(build("llama"), recorded_pass=recorded_pass)
    if recorded_pass == "always":
        model.speculation.invalidate()
    model.speculation.assume_frozen()
    _counted_entry(model, EDITED[0])
    check(model, "recorded" if recorded_pass == "always" else "model's own")
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(ids(20), **OPTIONS)
    assert model.speculation.last.pass_reason in ("autocast is on", "recorded_pass is off")


def test_numbers_read_from_tensors_are_followed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(1.0)
            self.shift: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = nn.functional.silu(x) * self.scale.item()
            return scaled if self.shift is None else scaled + self.shift[:48]

    model = build("llama")
    scaled = model.model.layers[0].mlp.act_fn = Scaled()
    accelerate(model)
    check(model)
    scaled.scale.fill_(0.3)
    check(model)
    scaled.scale = torch.tensor(0.7)
    check(model)
    scaled.shift = torch.ones(5000)  # where nothing was
    check(model)
    scaled.shift += 0.5
    check(model)


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
@pytest.mark.parametrize("lengths", [(40, 70), (70, 100, 70), (90, 66, 20)])
def test_dynamic_frequencies_stay_those_of_the_longest_text(recorded_pass: str, lengths: tuple[int, ...]) -> None:
    """Until a short text comes: what the model says depends on the texts before."""
    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, twin = (build("llama", max_position_embeddings=64, rope_parameters=settings) for _ in range(2))
    rs.accelerate(model, nodes=8, recorded_pass=recorded_pass)
    for length in lengths:
        ours, plain = (one.generate(ids(length), max_new_tokens=30, do_sample=False) for one in (model, twin))
        assert torch.equal(ours, plain)


class Strength(enum.Enum):
    HALF = 0.5
    DOUBLE = 2.0


class Times(enum.IntEnum):
    ONCE = 1
    TWICE = 2


class Name(str):
    """Of a kind of text."""


class Switched(nn.Module):
    """Another activation by each plain attribute, as adapters that are written by hand are switched; counts calls."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.slot: float | None = None
        self.name: str | None = "a"
        self.scales = {"a": 1.0, "b": 0.4}
        self.active = ["a"]
        self.strength = Strength.DOUBLE
        self.form = nn.functional.silu
        self.calls, self._number, self.is_off = 0, 1, False
        self.chosen: str | None = None
        self.limit, self.exactly, self.times, self.kind = float("nan"), True, Times.ONCE, Name("a")
        self.after = self.leave
        self.before = partial(torch.mul, other=1.0)

    @property
    def number(self) -> int:
        return self._number

    @number.setter
    def number(self, number: int) -> None:
        self._number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.chosen is None:
            self.chosen = "a"
        if self.is_off:
            return x
        x = self.after(self.before(x)) * {"a": 1.0, "b": 0.3}[self.chosen] * self.times * len(self.kind)
        x = x * (1.0 if math.isnan(self.limit) else self.limit) * (1.0 if self.exactly is True else 0.3)
        scale = self.scales.get(self.name or "", 3.0) * self.strength.value * self.number
        scale *= 1.0 if self.slot is None else self.slot
        return self.form(x) * scale * len(self.active) * getattr(self, "later", 1.0)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def halve(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x


ATTRIBUTES: dict[str, Callable[[Switched], object]] = {
    "a text": lambda part: setattr(part, "name", "b"),
    "nothing": lambda part: setattr(part, "name", None),
    "a bool": lambda part: setattr(part, "is_off", True),
    "a number behind a property": lambda part: setattr(part, "number", 2),
    "an enum": lambda part: setattr(part, "strength", Strength.HALF),
    "an enum of numbers": lambda part: setattr(part, "times", Times.TWICE),
    "a kind of text": lambda part: setattr(part, "kind", Name("bb")),
    "a number that equals another": lambda part: setattr(part, "exactly", 1),
    "a NaN": lambda part: setattr(part, "limit", 0.5),
    "one that the first call sets": lambda part: setattr(part, "chosen", "b"),
    "a function": lambda part: setattr(part, "form", torch.tanh),
    "a method": lambda part: setattr(part, "after", part.halve),
    "a function with arguments": lambda part: setattr(part, "before", partial(torch.mul, other=0.5)),
    "an entry of a dict": lambda part: part.scales.update(a=2.0),
    "an entry of a list": lambda part: part.active.append("b"),
    "another list": lambda part: setattr(part, "active", ["a", "b", "c"]),
    "a slot": lambda part: setattr(part, "slot", 0.5),
    "one that was not there": lambda part: setattr(part, "later", 0.1),
}


@pytest.fixture(scope="module")
def switched() -> dict[str, Any]:
    """Accelerated models with a part that plain attributes switch, by the kind of their passes."""
    models = {kind: build("llama", num_hidden_layers=1) for kind in ("recorded", "model's own")}
    for kind, model in models.items():
        model.model.layers[0].mlp.act_fn = nn.Sequential(Switched())
        rs.accelerate(model, nodes=8, recorded_pass="always" if kind == "recorded" else "off")
    return models


@pytest.mark.parametrize(
    ("change", "kind"),
    [(change, "recorded") for change in ATTRIBUTES]
    + [("a text", "model's own"), ("one that the first call sets", "model's own")],
)
def test_plain_attributes_of_modules_are_followed(
    switched: dict[str, Any], change: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back, too, for which nothing is examined: what a model was is remembered."""
    model = switched[kind]
    part = model.model.layers[0].mlp.act_fn[0]
    before = check(model, kind)
    attributes = {n: copy.copy(value) if isinstance(value, dict | list) else value for n, value in vars(part).items()}
    with monkeypatch.context() as patched:
        patched.setattr(VerifierFactory, "_examine", lambda _: pytest.fail("the model is examined again"))
        check(model, kind)  # though calls are counted
    ATTRIBUTES[change](part)
    assert not torch.equal(check(model, kind), before)
    vars(part).clear()
    vars(part).update(attributes)
    part.slot = None
    monkeypatch.setattr(VerifierFactory, "_examine", lambda _: pytest.fail("the model is examined again"))
    assert torch.equal(check(model, kind), before)


def test_a_table_that_grows_with_texts_goes_on_to_fit_its_length() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.length, self.table = 0, torch.empty(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-2] > self.length:
                self.length = x.shape[-2]
                self.table = torch.ones(self.length)
            return nn.functional.silu(x) * self.table[: x.shape[-2], None]

    model = build("llama")
    model.model.layers[1].mlp.act_fn = Tabled()
    accelerate(model)
    for _ in range(2):
        assert torch.equal(model.generate(ids(20), **OPTIONS), says(model))


def test_a_model_that_nobody_holds_goes() -> None:
    model = accelerate(build("llama"))
    check(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def _live_bytes() -> int:
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]  # not the stand-ins of traces
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_restore_gives_back_memory() -> None:
    model = build("llama")
    gc.collect()
    before = _live_bytes()
    accelerate(model)
    check(model)
    rs.restore(model)
    gc.collect()
    assert _live_bytes() <= before


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(torch.jit.script, id="scripted"),
        pytest.param(lambda module: torch.jit.trace(module, torch.ones(1, 3, 48)), id="traced"),
        pytest.param(partial(torch.compile, backend="eager"), id="compiled"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_that_torch_has_compiled_is_followed(made: Callable[[nn.Module], Any]) -> None:
    model = build("llama")
    model.model.layers[1].mlp.act_fn = made(Scaled().eval())
    accelerate(model)
    before = model.generate(ids(20), **OPTIONS)
    assert torch.equal(before, says(model))
    with torch.no_grad():
        model.model.layers[1].mlp.act_fn.scale.mul_(-9.0)
    after = model.generate(ids(20), **OPTIONS)
    assert torch.equal(after, says(model)) and not torch.equal(after, before)
