"""`generate_stream`: pieces as they are accepted, and a usable model however the stream ends."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.generation.streams import Piece, TextDecoder

GREEDY = {"do_sample": False, "max_new_tokens": 24}


def scripted(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    expected = model.generate(prompt, **GREEDY)
    rs.accelerate(model, drafter=ScriptedDrafter(expected[0], length=5), nodes=16, **options)
    return expected


def test_pieces_are_the_accepted_runs(tiny: Any, prompt: torch.Tensor) -> None:
    expected = scripted(tiny, prompt)
    runs = [piece.token_ids for piece in rs.generate_stream(tiny, prompt, **GREEDY)]
    assert [len(run) for run in runs] == [1, 6, 6, 6, 5]
    assert np.concatenate(runs).tolist() == expected[0, 12:].tolist()
    assert all(run.dtype == np.int32 for run in runs)
    assert tiny.speculation.last.passes == 5


def test_closing_early_leaves_model_cache_and_report_in_order(tiny: Any, prompt: torch.Tensor) -> None:
    expected = scripted(tiny, prompt)
    cache = DynamicCache()  # without the model's config
    stream = rs.generate_stream(tiny, prompt, past_key_values=cache, **GREEDY)
    seen = [*next(stream).token_ids, *next(stream).token_ids]
    stream.close()
    assert tiny.speculation.engine._sequences == []
    assert seen == expected[0, 12:19].tolist()
    assert tiny.speculation.last.new_tokens == 7
    assert cache.get_seq_length() == 18, "all but the last visible token"
    so_far = torch.cat([prompt, torch.tensor([seen])], dim=1)
    rest = tiny.generate(so_far, past_key_values=cache, do_sample=False, max_new_tokens=17)
    assert torch.equal(rest, expected), "the cache can be continued from"


NOTHING = Piece(np.empty(0, np.int32))


def ids_of(pieces: Any) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids.tolist()]


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_closing_one_stream_leaves_the_other_alone(tiny: Any, prompt: torch.Tensor, recorded_pass: Any) -> None:
    """Each has a drafter and a report of its own; `last` belongs to the one that ended last."""
    first, second = prompt, prompt.flip(1)
    expected = [tiny.generate(ids, **GREEDY)[0, 12:].tolist() for ids in (first, second)]
    rs.accelerate(tiny, recorded_pass=recorded_pass, nodes=16)
    prediction = expected[1]
    a = rs.generate_stream(tiny, first, **GREEDY)
    next(a)
    b = rs.generate_stream(tiny, second, prediction=prediction, **GREEDY)
    seen = next(b).token_ids.tolist()
    a.close()
    closed = tiny.speculation.last
    assert closed is a.report
    assert seen + ids_of(b) == expected[1]
    assert tiny.speculation.last is b.report
    assert b.report.accepted_by_source["prediction"] > 10, "its drafter was not ended by the other's end"
    assert a.report is closed and 1 <= closed.new_tokens < 24 == b.report.new_tokens


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_streams_read_in_turn_share_passes(tiny: Any, prompt: torch.Tensor, recorded_pass: Any) -> None:
    prompts = [prompt, prompt.flip(1), prompt[:, :5]]
    expected = [tiny.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist() for ids in prompts]
    rs.accelerate(tiny, recorded_pass=recorded_pass)
    streams = [rs.generate_stream(tiny, ids, **GREEDY) for ids in prompts]
    before = tiny.speculation.engine.steps
    turns = list(itertools.zip_longest(*streams, fillvalue=NOTHING))
    assert [ids_of(pieces) for pieces in zip(*turns, strict=True)] == expected
    assert tiny.speculation.engine.steps - before < sum(stream.report.passes for stream in streams)


@pytest.mark.parametrize(("own", "tokens"), [(False, 3), (True, 1)], ids=["", "over the caller's cache"])
def test_an_abandoned_stream_costs_two_passes_at_most(tiny: Any, prompt: torch.Tensor, own: bool, tokens: int) -> None:
    rs.accelerate(tiny, draft="off")
    cache = DynamicCache(config=tiny.config) if own else None
    stream = rs.generate_stream(tiny, prompt, past_key_values=cache, **GREEDY)
    next(stream)
    tiny.generate(prompt, **GREEDY)
    assert stream.report.new_tokens == tokens
    del stream
    assert tiny.speculation.last.new_tokens == tokens, "losing it ends it"
    tiny.generate(prompt, **GREEDY)
    assert tiny.speculation.last.new_tokens == 24


def test_chunked_prompt_can_be_cancelled(tiny: Any, prompt: torch.Tensor) -> None:
    expected = scripted(tiny, prompt, prefill_chunk=5)
    stream = rs.generate_stream(tiny, prompt, **GREEDY)
    assert len(next(stream).token_ids) == 0
    stream.close()
    runs = [piece.token_ids for piece in rs.generate_stream(tiny, prompt, **GREEDY)]
    assert [len(run) for run in runs[:3]] == [0, 0, 1]
    assert np.concatenate(runs).tolist() == expected[0, 12:].tolist()


def test_delegated_calls_come_in_one_piece(tiny: Any, prompt: torch.Tensor) -> None:
    expected = tiny.generate(prompt, num_beams=2, **GREEDY)
    rs.accelerate(tiny, draft="off")
    (piece,) = rs.generate_stream(tiny, prompt, num_beams=2, **GREEDY)
    assert piece.token_ids.tolist() == expected[0, 12:].tolist()
    assert tiny.speculation.last.mode == "delegated"


@pytest.mark.parametrize("size", [1, 3, 7])
def test_streamed_text_is_the_decoded_whole(reference_tokenizer: Any, size: int) -> None:
    text = "def größe(x: int) -> str:\n    return '😀' * x  # done\n"
    ids = reference_tokenizer(text)["input_ids"]
    decoder = TextDecoder(reference_tokenizer.decode)
    pieces = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + decoder.flush() == text
    assert decoder.push(reference_tokenizer("😀", add_special_tokens=False)["input_ids"][:1]) == ""
    assert decoder.flush() == "\ufffd"
