"""`generate_stream`: pieces as they are accepted, and a usable model however the stream ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec import errors
from retrieve_spec.engine.streaming import TextDecoder

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
    for same in (prompt[0], prompt[0].tolist(), {"input_ids": prompt}):
        runs = [piece.token_ids for piece in rs.generate_stream(tiny, same, **GREEDY)]
        assert np.concatenate(runs).tolist() == expected[0, 12:].tolist()


def test_closing_early_leaves_model_cache_and_report_in_order(tiny: Any, prompt: torch.Tensor) -> None:
    expected = scripted(tiny, prompt)
    cache = DynamicCache(config=tiny.config)
    stream = rs.generate_stream(tiny, prompt, past_key_values=cache, **GREEDY)
    seen = [*next(stream).token_ids, *next(stream).token_ids]
    stream.close()
    assert seen == expected[0, 12:19].tolist()
    assert tiny.speculation.last.new_tokens == 7
    assert cache.get_seq_length() == 18, "all but the last visible token"
    so_far = torch.cat([prompt, torch.tensor([seen])], dim=1)
    rest = tiny.generate(so_far, past_key_values=cache, do_sample=False, max_new_tokens=17)
    assert torch.equal(rest, expected), "the cache can be continued from"


def test_interrupt_inside_a_pass_leaves_the_model_usable(tiny: Any, prompt: torch.Tensor) -> None:
    expected = scripted(tiny, prompt)
    stream = rs.generate_stream(tiny, prompt, **GREEDY)
    next(stream)
    handle = tiny.model.layers[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    handle.remove()
    assert tiny.speculation.last.new_tokens == 1
    assert torch.equal(tiny.generate(prompt, **GREEDY), expected)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_a_stream_ends_when_another_generation_begins(tiny: Any, prompt: torch.Tensor) -> None:
    expected = scripted(tiny, prompt)
    stream = rs.generate_stream(tiny, prompt, **GREEDY)
    next(stream)
    assert torch.equal(tiny.generate(prompt, **GREEDY), expected)
    with pytest.raises(errors.SupersededError):
        next(stream)


def test_a_stream_never_started_costs_nothing(tiny: Any, prompt: torch.Tensor) -> None:
    scripted(tiny, prompt)
    rs.generate_stream(tiny, prompt, **GREEDY).close()
    assert tiny.speculation.last is None


def test_chunked_prompt_can_be_cancelled(tiny: Any, prompt: torch.Tensor) -> None:
    expected = scripted(tiny, prompt, prefill_chunk=5)
    stream = rs.generate_stream(tiny, prompt, **GREEDY)
    assert len(next(stream).token_ids) == 0
    stream.close()
    runs = [piece.token_ids for piece in rs.generate_stream(tiny, prompt, **GREEDY)]
    assert [len(run) for run in runs[:3]] == [0, 0, 1]
    assert np.concatenate(runs).tolist() == expected[0, 12:].tolist()


def test_delegated_calls_come_in_one_piece(tiny: Any, prompt: torch.Tensor) -> None:
    scripted(tiny, prompt)
    rs.restore(tiny)
    expected = tiny.generate(prompt, num_beams=2, **GREEDY)
    rs.accelerate(tiny, draft="off")
    (piece,) = rs.generate_stream(tiny, prompt, num_beams=2, **GREEDY)
    assert piece.token_ids.tolist() == expected[0, 12:].tolist()
    assert tiny.speculation.last.mode == "delegated"


class Utf8:
    """One token per byte."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_characters_spread_over_tokens_appear_whole() -> None:
    text = "naïve 😀 €"
    decoder = TextDecoder(Utf8())
    pieces = [decoder.push([byte]) for byte in text.encode()]
    assert "".join(pieces) + decoder.flush() == text
    assert "\ufffd" not in "".join(pieces)
    decoder = TextDecoder(Utf8())
    assert decoder.push("€".encode()[:2]) == ""
    assert decoder.flush() == "\ufffd"


@pytest.mark.parametrize("size", [1, 3, 7])
def test_streamed_text_is_the_decoded_whole(reference_tokenizer: Any, size: int) -> None:
    text = "def größe(x: int) -> str:\n    return '😀' * x  # done\n"
    ids = reference_tokenizer(text)["input_ids"]
    decoder = TextDecoder(reference_tokenizer)
    pieces = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + decoder.flush() == text
