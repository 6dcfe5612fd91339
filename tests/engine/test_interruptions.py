"""An exception at any instant: a caller's cache holds whole rows of the text, and other sequences go on."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_drafter import ScriptedDrafter
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import retrieve_spec as rs

GREEDY = {"do_sample": False, "max_new_tokens": 14}
PACKAGE = str(Path(rs.__file__).parent)


class InterruptAt:
    """Ctrl-C at the n-th line that is executed in the library and in caches, or at none of them.

    Signals are handled where Python calls or jumps back, not between any two lines: who drives is left out.
    """

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        traced = name.startswith(PACKAGE) or name.endswith("cache_utils.py")
        return self._line if traced and frame.f_code.co_name not in ("alone", "leave") else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and self.left > 0:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def windowed() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["full", "windows"])
@pytest.mark.parametrize("script", ["right", "branchy"])
def test_a_callers_cache_is_whole_whenever_an_interruption_comes(
    tiny: Any, prompt: torch.Tensor, kind: str, script: str
) -> None:
    """On the model's own forward: every layer holds as many rows, and the text can be continued from them."""
    model = tiny if kind == "full" else windowed()
    whole = model.generate(prompt, **GREEDY)
    rs.accelerate(model, drafter=ScriptedDrafter(whole[0], script), nodes=16, recorded_pass="off")

    def interrupted(line: int) -> tuple[DynamicCache, int]:
        cache = DynamicCache(config=model.config)
        with InterruptAt(line) as trace:
            try:
                model.generate(prompt, past_key_values=cache, **GREEDY)
            except KeyboardInterrupt:
                return cache, 0
        return cache, trace.left

    left = interrupted(1 << 40)[1]
    lines = (1 << 40) - left
    for line in range(lines // 5, lines, max(lines // 90, 1)):
        cache, _ = interrupted(line)
        held = cache.get_seq_length()
        assert held <= 25
        for layer in cache.layers:
            assert layer.get_seq_length() == held, line
            assert not held or layer.keys.shape == layer.values.shape, line
        so_far = whole[:, : held + 1] if held >= 12 else prompt
        if held == 25:
            continue  # it was over
        rest = model.generate(so_far, past_key_values=cache, do_sample=False, max_length=26)
        assert torch.equal(rest, whole), line


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_an_interruption_ends_the_generation_it_hit_alone(
    tiny: Any, prompt: torch.Tensor, recorded_pass: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a step that serves several streams it comes."""
    others = [prompt.flip(1), prompt[:, :5]]
    expected = [tiny.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist() for ids in others]
    for line in range(20, 2200, 110):
        rs.accelerate(tiny, recorded_pass=recorded_pass, nodes=8)
        streams = [rs.generate_stream(tiny, ids, **GREEDY) for ids in others]
        shown = [next(stream).token_ids.tolist() for stream in streams]
        with InterruptAt(line), contextlib.suppress(KeyboardInterrupt):
            tiny.generate(prompt, **GREEDY)
        for i in (0, 1):
            for piece in streams[i]:
                shown[i] += piece.token_ids.tolist()
        assert shown == expected, line
        assert not tiny.speculation.engine._sequences


class Fails:
    """A processor that fails at its n-th call."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise ArithmeticError("this one only")
        return scores


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_a_sequence_fails_alone(tiny: Any, prompt: torch.Tensor, recorded_pass: Any) -> None:
    expected = tiny.generate(prompt, **GREEDY)[0, 12:].tolist()
    rs.accelerate(tiny, recorded_pass=recorded_pass)
    good = rs.generate_stream(tiny, prompt, **GREEDY)
    bad = rs.generate_stream(tiny, prompt.flip(1), logits_processor=[Fails(5)], **GREEDY)
    shown, of_bad = next(good).token_ids.tolist(), next(bad).token_ids.tolist()
    shown += [token for piece in good for token in piece.token_ids.tolist()]
    assert shown == expected
    with pytest.raises(ArithmeticError, match="this one only"):
        of_bad += [token for piece in bad for token in piece.token_ids.tolist()]
    assert len(of_bad) < 5
    assert torch.equal(tiny.generate(prompt, **GREEDY)[0, 12:], torch.tensor(expected))
