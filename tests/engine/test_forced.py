"""Where few tokens may come, those that must are drafted; the text is that of the same rules without drafts."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import CHAINS, left_padded, small_model

import retrieve_spec as rs
from retrieve_spec import errors
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree

SCHEMA = {
    "type": "object",
    "properties": {
        "function_name": {"enum": ["area", "volume"]},
        "argument_names": {"type": "array", "items": {"enum": ["width", "height"]}, "minItems": 2, "maxItems": 3},
        "returns_number": {"type": "boolean"},
    },
    "required": ["function_name", "argument_names", "returns_number"],
    "additionalProperties": False,
}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 5}


def rails(row: int, ids: torch.Tensor) -> list[int]:
    """Five of seven tokens are forced; they depend on the row and on the last free token."""
    turn = len(ids) % 7
    if turn < 2:
        return list(range(3 + row, 150, 3))
    return [(int(ids[-1]) * 5 + turn) % 190 + 3]


FORCED = {"prefix_allowed_tokens_fn": rails, "do_sample": False}
CASES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"max_new_tokens": 70}, {}, 36),  # in each round one of them may be the token behind a draft
    ({"max_new_tokens": 70, "nodes": 8}, {}, 36),
    ({"max_new_tokens": 70, **SAMPLED}, {}, 36),
    ({"max_new_tokens": 70, **SAMPLED, "nodes": 8}, {}, 36),
    ({"max_new_tokens": 40}, {"draft": "prompt-lookup", "nodes": 16}, 15),
    *(({"max_new_tokens": most}, {}, 0) for most in (1, 2, 3, 9, 10)),
]


@pytest.mark.parametrize(("asked", "options", "forced"), CASES, ids=str)
def test_one_allowed_token_is_drafted(
    tiny: Any, prompt: torch.Tensor, asked: dict[str, Any], options: dict[str, Any], forced: int
) -> None:
    """With presets that look at no rules too, and where a limit ends the text inside of what is forced."""
    asked = FORCED | asked
    plain = tiny.generate(prompt, **{name: asked[name] for name in asked.keys() - {"nodes", "seed"}})
    rs.accelerate(tiny, **options)
    off = tiny.generate(prompt, **asked, draft="off")
    assert torch.equal(tiny.generate(prompt, **asked), off)
    assert asked["do_sample"] or torch.equal(plain, off)
    report = tiny.speculation.last
    assert report.accepted_by_source.get("forced", 0) >= forced
    assert forced < 36 or report.tokens_per_pass > 2.3


@pytest.mark.parametrize(
    ("model_type", "settings", "recorded_pass", "mode"),
    [("llama", {}, "auto", "tree"), ("llama", {}, "off", "tree"), ("gpt_neo", CHAINS, "off", "chain")],
)
def test_rows_of_a_batch_have_rails_of_their_own(
    model_type: str, settings: dict[str, Any], recorded_pass: str, mode: str
) -> None:
    """A model that verifies chains takes one row."""
    model = small_model(model_type, **settings)
    inputs = left_padded() if mode == "tree" else left_padded((9,))
    asked = FORCED | {"max_new_tokens": 30, "eos_token_id": 77}
    plain = model.generate(**inputs, **asked)
    rs.accelerate(model, recorded_pass=recorded_pass)
    assert torch.equal(model.generate(**inputs, **asked), plain)
    assert model.speculation.last.mode == mode and model.speculation.last.accepted_by_source["forced"] > 0


def test_a_stop_inside_of_what_is_forced_leaves_no_more_in_the_session(tiny: Any, prompt: torch.Tensor) -> None:
    options = FORCED | {"max_new_tokens": 70}
    text = tiny.generate(prompt, **options)[0]
    ends = next(i for i in range(30, 60) if i % 7 == 5 and int(text[i]) not in text[:i].tolist())
    rs.accelerate(tiny, session=True)
    stopped = tiny.generate(prompt, **options, eos_token_id=int(text[ends]))
    assert torch.equal(stopped[0], text[: ends + 1])
    told = tiny.speculation.drafter().session.automata[-1]
    assert len(told) <= ends + 2 - prompt.shape[1], "what was drafted and not said"


def test_a_function_is_asked_about_nothing_that_does_not_come(tiny: Any, prompt: torch.Tensor) -> None:
    """One that looks texts up knows no others; drafts that it does not allow are none of them."""
    options = {"max_new_tokens": 40, "do_sample": False}
    repeated = torch.cat([prompt, prompt, prompt[:, :6]], dim=1)
    text = tiny.generate(repeated, prefix_allowed_tokens_fn=rails, **options)[0]
    known = {tuple(text[:end].tolist()) for end in range(repeated.shape[1], len(text) + 1)}

    def strict(row: int, ids: torch.Tensor) -> list[int]:
        assert tuple(ids.tolist()) in known
        return rails(row, ids)

    rs.accelerate(tiny, nodes=32)
    assert torch.equal(tiny.generate(repeated, prefix_allowed_tokens_fn=strict, **options)[0], text)


@pytest.fixture
def grammar(reference_tokenizer: Any) -> Any:
    pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    return lambda: rs.GrammarProcessor.of(reference_tokenizer, json_schema=SCHEMA)


def test_a_schema_holds_with_transformers_alone_and_with_drafts(
    reference_model: Any, reference_tokenizer: Any, grammar: Any
) -> None:
    prompts = ["def area(width, height):", "import json\nshape = "]
    inputs = reference_tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 100, "do_sample": False}
    held = grammar()
    reference_model.generate(
        **{name: part[:, 1:] for name, part in inputs.items()}, max_new_tokens=3, logits_processor=[held]
    )
    plain = reference_model.generate(**inputs, **options, logits_processor=[held])
    rs.accelerate(reference_model, tokenizer=reference_tokenizer)
    for _ in range(2):  # one processor for any number of calls
        assert torch.equal(reference_model.generate(**inputs, **options, logits_processor=[held]), plain)
    last = reference_model.speculation.last
    assert last.mode == "tree" and last.accepted_by_source["forced"] > 20


def test_samples_and_requests_under_a_schema_are_those_without_drafts(
    reference_model: Any, reference_tokenizer: Any, grammar: Any
) -> None:
    rs.accelerate(reference_model, tokenizer=reference_tokenizer)
    inputs = reference_tokenizer("shape = ", return_tensors="pt")
    options = {**SAMPLED, "max_new_tokens": 90, "logits_processor": [grammar()]}
    samples = reference_model.generate(**inputs, **options, num_return_sequences=3)
    assert reference_model.speculation.last.accepted_by_source["forced"] > 20
    assert torch.equal(reference_model.generate(**inputs, **options, num_return_sequences=3, draft="off"), samples)
    many = [done.text for done in rs.generate_many(reference_model, ["shape = ", "x = "] * 2, **options)]
    assert many == [
        done.text for done in rs.generate_many(reference_model, ["shape = ", "x = "] * 2, **options, draft="off")
    ]
    assert all(set(json.loads(text)) == set(SCHEMA["properties"]) for text in many)


def test_another_prompt_that_is_a_token_longer_than_the_last_text_is_a_prompt(
    reference_model: Any, reference_tokenizer: Any
) -> None:
    held = rs.GrammarProcessor.of(reference_tokenizer, regex=r"[0-9]{4}")
    for length in (3, 6):
        ids = torch.arange(40 + length, 40 + 2 * length)[None]
        text = reference_model.generate(ids, logits_processor=[held], max_new_tokens=3, do_sample=False)
        assert reference_tokenizer.decode(text[0, length:]).strip().isdigit()


def test_other_grammars(reference_model: Any, reference_tokenizer: Any, grammar: Any) -> None:
    rs.accelerate(reference_model, tokenizer=reference_tokenizer)
    inputs = reference_tokenizer("# phone: ", return_tensors="pt")
    for held in (
        rs.GrammarProcessor.of(reference_tokenizer, regex=r"the number is \+49 [0-9]{4}"),
        rs.GrammarProcessor.of(reference_tokenizer, lark='start: "the number is " /[0-9]{4}/'),
    ):
        text = reference_model.generate(**inputs, logits_processor=[held], max_new_tokens=30, do_sample=False)
        said = reference_tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert said.startswith("the number is ") and said[-4:].isdigit()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "0 of them"),
        ({"regex": "a", "json_schema": {}}, "2 of them"),
        ({"regex": "((("}, "unclosed group|invalid regex"),
        ({"lark": "((("}, "expecting rule"),
        ({"json_schema": {"type": "no such type"}}, "type"),
    ],
)
def test_what_is_no_grammar_is_an_error(reference_tokenizer: Any, grammar: Any, given: Any, told: str) -> None:
    with pytest.raises(errors.ConfigError, match=told):
        rs.GrammarProcessor.of(reference_tokenizer, **given)


def test_the_extra_is_named(reference_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(errors.ConfigError, match=r"retrieve-spec\[json\]"):
        rs.GrammarProcessor.of(reference_tokenizer, regex="a")


def test_a_draft_behind_what_is_forced_is_not_more_probable_than_that() -> None:
    """Also where more of drafts was right than was expected: what is kept of a tree are its most probable nodes."""
    drafter = MixtureDrafter(recycling=False)
    drafter.calibration.drafts[:] = 500.0, 100.0
    drafter.start(np.array([5, 6, 7, 8] * 12, np.int32))
    ahead = DraftTree.from_paths([[5, 6]])
    ahead.log_p[:] = -1.0, -2.0
    tree = drafter.propose(Budget(16, 12, ahead=ahead))
    assert tree.token_ids[:4].tolist() == [5, 6, 7, 8]
    assert (np.diff(tree.log_p[:4]) <= 1e-6).all()
