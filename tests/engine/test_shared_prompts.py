"""One prompt of several sequences is read once; each goes on from there as it would alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interrupting import ctrl_c, python_handles_it
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor

import retrieve_spec as rs
from retrieve_spec.engine import joining
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.recorded import recorded_verifier
from retrieve_spec.sampling.samplers import make_sampler

OPTIONS: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 4, "max_new_tokens": 16}
WAYS = ["always", "off"]


def prompt_of(length: int, row: int = 0) -> torch.Tensor:
    return torch.tensor([[3 + (i * 37 + 11 * row + 7) % 190 for i in range(length)]])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prompt, or end of one, that a model read."""
    sizes: list[int] = []
    has_read = Sequence.has_read

    def counted(self: Sequence, piece: Any, output: Any) -> None:
        if len(piece) == len(self.unread):
            sizes.append(len(piece))
        has_read(self, piece, output)

    monkeypatch.setattr(Sequence, "has_read", counted)
    return sizes


def alone(model: Any, ids: torch.Tensor, row: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """What a row says that reads its prompt itself."""
    with monkeypatch.context() as patch:
        patch.setattr(joining, "make_sampler", lambda *given, **named: make_sampler(*given, **{**named, "row": row}))
        return model.generate(ids, **options)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("recorded", WAYS)
@pytest.mark.parametrize("draft", ["auto", "off"])
@pytest.mark.parametrize("length", [1, 6, 70])
def test_samples_of_one_prompt(
    tiny: Any, recorded: str, draft: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a prompt that the recorded pass reads, of which the cache is no more by then."""
    rs.accelerate(tiny, recorded_pass=recorded, draft=draft)
    ids = prompt_of(length)
    expected = [alone(tiny, ids, row, monkeypatch, **OPTIONS) for row in range(5)]
    assert len({tuple(text) for text in expected}) == 5
    rows = tiny.generate(ids, num_return_sequences=5, **OPTIONS)
    assert rows[:, length:].tolist() == expected


@pytest.mark.parametrize("recorded", WAYS)
def test_a_prompt_is_read_once(tiny: Any, recorded: str, read: list[int]) -> None:
    rs.accelerate(tiny, recorded_pass=recorded, draft="off")
    ids = torch.cat([prompt_of(30), prompt_of(30, row=1)])
    options = OPTIONS | {"max_new_tokens": 2, "num_return_sequences": 4}
    tiny.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert read == [30, 30], "two prompts, each once"
    tiny.generate(ids, **options, draft="auto")
    assert read == [30] * 4


def test_samples_attend_to_their_prompt_at_one_place(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that did not read it themselves; samples of one prompt stand side by side, however the call has them."""
    seen: list[list[list[int]]] = []
    attend = recorded_verifier.attend_single_rows

    def noted(*given: Any) -> None:
        seen.append(given[5].tolist())
        attend(*given)

    monkeypatch.setattr(recorded_verifier, "attend_single_rows", noted)
    rs.accelerate(tiny, recorded_pass="always", draft="off")
    requests = [{"inputs": prompt_of(30, row=i % 2)[0].tolist(), "max_new_tokens": 9} for i in range(6)]
    expected = [tiny.generate(prompt_of(30, row=row), max_new_tokens=9)[0, 30:].tolist() for row in range(2)]
    seen.clear()
    done = list(rs.generate_many(tiny, requests))
    assert [one.outputs[0].token_ids.tolist() for one in done] == expected * 3
    for prefixes in seen[-4:]:
        assert sorted(rows for *_, rows in prefixes) == [0, 0, 30, 30, 30, 30]
        keys = [keys for keys, _, rows in prefixes if rows]
        assert keys[0] == keys[1] != keys[2] == keys[3]


def test_windows_hold_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.2, pad_token_id=0,
        eos_token_id=None, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = prompt_of(20)
    for recorded in WAYS:
        rs.accelerate(model, recorded_pass=recorded)
        expected = [alone(model, ids, row, monkeypatch, **OPTIONS) for row in range(3)]
        rows = model.generate(ids, num_return_sequences=3, **OPTIONS)
        assert rows[:, 20:].tolist() == expected


class Failing(LogitsProcessor):
    """Raises the first time it is asked."""

    calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise ArithmeticError("not this one")
        return scores


@pytest.mark.parametrize("recorded", WAYS)
def test_requests_with_one_prompt(tiny: Any, recorded: str, read: list[int]) -> None:
    """Some wait for room until the first is over; the one that reads may fail, and another reads then."""
    rs.accelerate(tiny, recorded_pass=recorded)
    requests: list[dict[str, Any]] = [
        {"inputs": prompt_of(25, row=i % 2), **OPTIONS, "seed": i, "max_new_tokens": 4 + 5 * (i % 3)} for i in range(8)
    ]
    expected = [tiny.generate(r["inputs"], **{k: v for k, v in r.items() if k != "inputs"}) for r in requests]
    requests[0] |= {"logits_processor": [Failing()]}
    read.clear()
    finished = list(rs.generate_many(tiny, requests, rows=3))
    assert isinstance(finished[0].error, ArithmeticError)
    for one, whole in list(zip(finished, expected, strict=True))[1:]:
        assert one.token_ids.tolist() == whole[0, 25:].tolist()
    assert read == [25] * 3, "two prompts, and the one whose reading failed once more"


def test_ctrl_c_between_a_prompt_and_its_first_token(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's text stays what it is."""
    rs.accelerate(tiny, recorded_pass="off", draft="off")
    ids = prompt_of(9)
    expected = tiny.generate(ids, num_return_sequences=3, **OPTIONS)
    accept, calls = Sequence.accept, 0

    def interrupted(self: Sequence) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            ctrl_c()
        accept(self)

    monkeypatch.setattr(Sequence, "accept", interrupted)
    engine, mine = tiny.speculation.engine, rs.generate_stream(tiny, prompt_of(3), max_new_tokens=9, do_sample=False)
    next(mine)
    calls = 0
    with python_handles_it(), pytest.raises(KeyboardInterrupt):
        tiny.generate(ids, num_return_sequences=3, **OPTIONS)
    assert len(engine._sequences) == 1
    mine.close()
    assert np.array_equal(tiny.generate(ids, num_return_sequences=3, **OPTIONS), expected)
