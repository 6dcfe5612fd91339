"""Classes that decode in their own manner: what they do around decoding is done, what they do themselves is theirs."""

from typing import Any

import pytest
import torch
from batch_rows import small_model
from census import Planted, build, prompt
from transformers import GenerationConfig, LlamaForCausalLM

import retrieve_spec as rs

pytestmark = pytest.mark.filterwarnings("ignore")
GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 14, "do_sample": True, "top_k": 0, "seed": 3}


class Around(LlamaForCausalLM):  # type: ignore[misc]
    """Adds to the weights of its head while it decodes, and to what was decoded."""

    def generate(self, *args: Any, added: int = 0, alone: bool = False, wide: bool = False, **kwargs: Any) -> Any:
        if alone:
            return args[0]
        if wide:
            config = GenerationConfig(num_beams=3, max_new_tokens=14, pad_token_id=0)
            return super().generate(args[0], generation_config=config, **kwargs)
        with torch.no_grad():
            self.lm_head.weight[7] += 5.0 * added
        try:
            told = super().generate(*args, **kwargs)
        finally:
            with torch.no_grad():
                self.lm_head.weight[7] -= 5.0 * added
        return told + added if added else told


class Other(LlamaForCausalLM):  # type: ignore[misc]
    """Calls its arguments by other names, and draws before it decodes."""

    def generate(self, *inputs: Any, **options: Any) -> Any:
        first = torch.randint(3, 60, (1, 1))
        return super().generate(torch.cat([inputs[0], first], dim=-1), **options)


class Streamer:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.numel())

    def end(self) -> None:
        self.heard.append(-1)


class Inside(LlamaForCausalLM):  # type: ignore[misc]
    """Lets another model decode."""

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.other[0].generate(input_ids, **kwargs)


class Draws(LlamaForCausalLM):  # type: ignore[misc]
    """Decodes by itself behind transformers' own `generate`."""

    def _sample(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.cat([input_ids, input_ids.flip(-1)], dim=-1)


def test_what_a_class_does_around_decoding_is_done() -> None:
    model, ids, planted = small_model(Around), torch.arange(5, 25)[None], Planted()
    calls: list[dict[str, Any]] = [
        {},
        {"added": 1},
        {"alone": True},
        {"num_beams": 2},
        {"return_dict_in_generate": True},
    ]
    wanted = [Around.generate(model, ids, **GREEDY, **call) for call in calls]
    assert not torch.equal(wanted[0], wanted[1])
    rs.accelerate(model, drafter=planted, nodes=12)
    assert model.speculation.mode == "tree"
    for call, answer, mode in zip(calls, wanted, ("tree", "tree", "delegated", "delegated", "tree"), strict=True):
        text = answer.sequences if "return_dict_in_generate" in call else answer
        planted.plant(text[0] - call.get("added", 0), 20, "branchy")
        output = model.generate(ids, **GREEDY, **call)
        assert type(output) is type(answer)
        assert torch.equal(output.sequences if text is not answer else output, text)
        assert model.speculation.last.mode == mode
    assert model.generate(ids, **GREEDY).shape == wanted[0].shape


def test_rows_of_a_batch_and_samples() -> None:
    model = small_model(Around)
    ids = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    wanted, wide = Around.generate(model, ids, **GREEDY), Around.generate(model, ids[:1], wide=True)
    rs.accelerate(model, nodes=8)
    assert torch.equal(model.generate(ids, **GREEDY), wanted)
    assert (model.speculation.last.mode, model.speculation.last.rows) == ("tree", 3)
    assert torch.equal(model.generate(ids, **SAMPLED), model.generate(ids, **SAMPLED, draft="off"))
    assert torch.equal(model.generate(ids[:1], wide=True), wide)
    assert "beams" in model.speculation.last.reason


@pytest.mark.parametrize(
    "call", [{}, {"streamer": Streamer}, {"num_beams": 2}, {"custom_generate": lambda model, input_ids, **_: input_ids}]
)
def test_arguments_by_any_name_are_heard(call: dict[str, Any]) -> None:
    model, ids = small_model(Other), torch.arange(5, 25)[None]

    def said() -> tuple[list[int], list[int]]:
        given = {name: value() if value is Streamer else value for name, value in call.items()}
        torch.manual_seed(2)
        text = model.generate(ids, **GREEDY, **given)[0].tolist()
        return text, given["streamer"].heard if "streamer" in given else []

    wanted = said()
    rs.accelerate(model, nodes=8)
    assert said() == wanted
    assert model.speculation.last.mode == ("delegated" if call else "tree")


@pytest.mark.parametrize("kind", [Draws, Inside])
def test_what_a_class_decodes_itself_is_left_to_it(kind: type) -> None:
    model, ids = small_model(kind), torch.arange(5, 25)[None]
    model.other = [small_model(LlamaForCausalLM)]
    wanted = kind.generate(model, ids, **GREEDY)  # type: ignore[attr-defined]
    rs.accelerate(model, nodes=8)
    assert (model.speculation.mode, model.speculation.reason[:5]) == ("delegated", kind.__name__[:5])
    assert torch.equal(model.generate(ids, **GREEDY), wanted)
    assert model.speculation.last.mode == "delegated"
    stream = list(rs.generate_stream(model, ids, **GREEDY))
    assert [token for piece in stream for token in piece.token_ids.tolist()] == wanted[0, 20:].tolist()


def test_a_translator_with_a_generate_of_its_own_is_drafted_for() -> None:
    model, planted = build("seamless_m4t", "seq2seq"), Planted()
    ids = prompt(model, 20)
    wanted = type(model).generate(model, ids, **GREEDY)
    rs.accelerate(model, drafter=planted, nodes=12)
    planted.plant(wanted[0], wanted.shape[1] - 14, "right")
    assert torch.equal(model.generate(ids, **GREEDY), wanted)
    assert model.speculation.last.tokens_per_pass > 3
