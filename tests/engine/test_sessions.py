"""Sessions by scope, kept in a file for later processes: what is drafted for whom, and that no text changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import retrieve_spec as rs
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.engine.drafters import Drafters
from retrieve_spec.errors import ConfigError, StoreCorruptError

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 3, "top_k": 0}
PROMPT = "class Stack:\n    def __init__(self, items):\n"


@pytest.fixture
def day(reference_model: Any, reference_tokenizer: Any, tmp_path: Path) -> Any:
    """Begin a day: the model as a process has it that starts with what is in the file."""

    def begin(**options: Any) -> Any:
        rs.restore(reference_model)
        given = {"nodes": 32, "recorded_pass": "off", "session": tmp_path / "day.bin"} | options
        return rs.accelerate(reference_model, reference_tokenizer, **given)

    yield begin
    rs.restore(reference_model)


@pytest.fixture
def ask(reference_tokenizer: Any) -> Any:
    def ask(model: Any, **options: Any) -> tuple[list[int], int]:
        ids = reference_tokenizer(PROMPT, return_tensors="pt").input_ids
        out = model.generate(ids, **OPTIONS | options)
        return out[0].tolist(), model.speculation.last.passes

    return ask


def test_the_second_day_is_faster_and_says_the_same(day: Any, ask: Any, tmp_path: Path) -> None:
    first, passes = ask(day())
    again, fewer = ask(day())
    assert again == first == ask(day(), draft="off")[0]
    assert fewer < passes / 2
    assert list(tmp_path.glob("day.bin.*.npy")), "what was learned about the model is kept beside it"
    day().speculation.forget()
    assert ask(day())[1] > fewer


def test_a_scope_drafts_from_its_own_answers_alone(day: Any, ask: Any) -> None:
    text, passes = ask(day(), scope="alice")
    model = day()
    bob, bobs = ask(model, scope="bob")
    nobody, nobodys = ask(model)
    alice, alices = ask(model, scope="alice")
    assert alice == bob == nobody == text
    assert alices < passes / 2 < min(bobs, nobodys)
    assert ask(model, scope="alice", num_return_sequences=2)[0] == text, "siblings, too"
    model.speculation.forget("alice")
    assert ask(model, scope="alice")[1] > alices
    nobodys = ask(model)[1]
    model.speculation.forget("")
    assert ask(model)[1] > nobodys, "what has no scope is one"
    (stream,) = [list(rs.generate_stream(model, PROMPT, **OPTIONS, scope="carol"))]
    (many,) = rs.generate_many(model, [{"inputs": PROMPT, "scope": "carol"}], **OPTIONS)
    assert np.concatenate([piece.token_ids for piece in stream]).tolist() == many.token_ids.tolist()
    assert many.outputs[0].report.passes < passes / 2
    assert len(model.speculation.drafters.sessions.get("dave").texts) == 0


def test_what_cannot_be_kept_is_said(day: Any, reference_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a tokenizer to keep a session with"):
        rs.accelerate(reference_model, session=tmp_path / "day.bin")
    with pytest.raises(ConfigError, match="session True, False or a path"):
        day(session=3)
    with pytest.raises(ConfigError, match="scope to be a string"):
        day().generate(torch.tensor([[1, 2]]), **OPTIONS, scope=3)
    (tmp_path / "day.bin").write_bytes(b"somebody else's")
    with pytest.raises(StoreCorruptError):
        day()


def test_what_was_not_saved_yet_is_when_a_model_goes(reference_tokenizer: Any, tmp_path: Path) -> None:
    """As when a process ends."""
    config = SpeculationConfig(session=str(tmp_path / "day.bin"))
    drafters = Drafters(config, [], None, "model", reference_tokenizer)
    drafters.sessions.get("alice").remember(np.arange(5, dtype=np.int32))  # type: ignore[union-attr]
    assert not (tmp_path / "day.bin").exists()
    del drafters
    session = Drafters(config, [], None, "model", reference_tokenizer).sessions.get("alice")
    assert session is not None and [text.tolist() for text in session.texts] == [[0, 1, 2, 3, 4]]


def test_logits_of_one_scope_are_not_drafted_for_another(day: Any, ask: Any) -> None:
    model = day(session=True)
    text, _ = ask(model, scope="alice")
    recycling = model.speculation.drafter().sources.recycling

    def known() -> int:
        return sum(recycling.lookup(text[at - 3 : at])[2] == 3 for at in range(len(text) - 30, len(text)))

    assert known() > 5
    ask(model, scope="bob", max_new_tokens=1)
    assert known() < 5
