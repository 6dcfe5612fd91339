"""One prompt of several sequences is read once; each goes on from there as it would alone."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import KINDS, small_model
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.engine import engine, joining
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.sampling.samplers import make_sampler
from retrieve_spec.verify.verifier import VerifierInputs

OPTIONS: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 4, "max_new_tokens": 16}
WAYS = ["always", "off"]


def prompt_of(length: int, row: int = 0) -> torch.Tensor:
    return torch.tensor([[3 + (i * 37 + 11 * row + 7) % 190 for i in range(length)]])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prompt, or end of one, that a model read."""
    sizes: list[int] = []
    record_piece = engine.record_piece

    def counted(sequence: Sequence, piece: Any, output: Any) -> None:
        if len(piece) == len(sequence.unread):
            sizes.append(len(piece))
        record_piece(sequence, piece, output)

    monkeypatch.setattr(engine, "record_piece", counted)
    return sizes


def alone(model: Any, ids: torch.Tensor, row: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """What a row says that reads its prompt itself."""
    with monkeypatch.context() as patch:
        patch.setattr(joining, "make_sampler", lambda *given, **named: make_sampler(*given, **{**named, "row": row}))
        return model.generate(ids, **options)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("recorded", WAYS)
@pytest.mark.parametrize(("draft", "length"), [("auto", 1), ("auto", 70), ("off", 70)])
@pytest.mark.parametrize("kind", KINDS[:2], ids=["llama", "windows"])
def test_samples_of_one_prompt(
    kind: tuple[str, dict[str, Any]],
    recorded: str,
    draft: str,
    length: int,
    shared: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a prompt that the recorded pass reads, of which the cache is no more by then, and one beyond a window."""
    model = shared(small_model, kind[0], **kind[1])
    rs.accelerate(model, recorded_pass=recorded, draft=draft)
    ids = prompt_of(length)
    expected = [alone(model, ids, row, monkeypatch, **OPTIONS) for row in range(5)]
    assert len({tuple(text) for text in expected}) == 5
    rows = model.generate(ids, num_return_sequences=5, **OPTIONS)
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


@pytest.mark.parametrize("recorded", WAYS)
def test_the_same_tokens_under_another_mask_or_at_other_positions_are_another_prompt(tiny: Any, recorded: str) -> None:
    ids, options = prompt_of(20).repeat(2, 1), {"max_new_tokens": 12, "do_sample": False}
    mask, positions = torch.ones_like(ids), torch.arange(20).repeat(2, 1)
    mask[1, 4:9] = 0
    positions[1] *= 2
    calls: list[dict[str, Any]] = [{"attention_mask": mask}, {"position_ids": positions}]
    plain = [tiny.generate(ids, **given, **options) for given in calls]
    assert all(not torch.equal(*rows) for rows in plain)
    rs.accelerate(tiny, recorded_pass=recorded)
    for given, wanted in zip(calls, plain, strict=True):
        assert torch.equal(tiny.generate(ids, **given, **options), wanted)
        assert tiny.speculation.last.mode == "tree"


def test_rows_that_are_handed_to_others_are_copies(tiny: Any) -> None:
    rs.accelerate(tiny, recorded_pass="always")
    (verifier,) = tiny.speculation.verifiers()
    ids = prompt_of(40)
    verifier.start(VerifierInputs(ids, {"past_key_values": DynamicCache(config=tiny.config)}, max_length=60))
    for tokens in (ids[0].numpy().astype(np.int32), np.array([5], np.int32)):
        with torch.no_grad():
            verifier.forward(tokens)
        verifier.commit(np.empty(0, np.int32))
    layer = verifier.copy_rows().layers[0]
    before = layer.keys.clone()
    verifier.finish().layers[0].keys.zero_()
    assert torch.equal(layer.keys, before)


@pytest.mark.parametrize("recorded", WAYS)
def test_requests_with_one_prompt(tiny: Any, recorded: str, read: list[int]) -> None:
    """Some wait for room until the first is over; the one that reads may fail, and another reads then."""
    rs.accelerate(tiny, recorded_pass=recorded)
    requests: list[dict[str, Any]] = [
        {"inputs": prompt_of(25, row=i % 2), **OPTIONS, "seed": i, "max_new_tokens": 4 + 5 * (i % 3)} for i in range(8)
    ]
    expected = [tiny.generate(r["inputs"], **{k: v for k, v in r.items() if k != "inputs"}) for r in requests]
    calls = itertools.count()

    def fails_once(_ids: Any, scores: Any) -> Any:
        if not next(calls):
            raise ArithmeticError("not this one")
        return scores

    requests[0] |= {"logits_processor": [fails_once]}
    read.clear()
    finished = list(rs.generate_many(tiny, requests, rows=3))
    assert isinstance(finished[0].error, ArithmeticError)
    for one, whole in list(zip(finished, expected, strict=True))[1:]:
        assert one.token_ids.tolist() == whole[0, 25:].tolist()
    assert read == [25] * 3, "two prompts, and the one whose reading failed once more"
