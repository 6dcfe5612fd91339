"""Ctrl-C at any instant of a step that serves several texts: it ends its own generation, the others stay right."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

import retrieve_spec as rs
from retrieve_spec.config import PassConfig
from retrieve_spec.errors import ConfigError, InterruptedPassError
from retrieve_spec.recorded import recorded_verifier, slab
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.verifier import VerifierInputs

MOST = 7
"""Instants that are tried in each test; all of them take minutes."""
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
PACKAGE = Path(rs.__file__).parent
ROOMS = {
    "sequences": ["engine/sequence.py"],
    "own forward": [
        "verify/hf.py",
        "verify/kept_rows.py",
        "verify/cache.py",
        "verify/recurrent.py",
        "verify/mixer_site.py",
        "verify/row_mixer.py",
        "verify/row_state.py",
    ],
    "recorded pass": ["recorded/recorded_verifier.py", "recorded/kv_buffer.py", "recorded/slab.py"],
}


class CutShort:
    """KeyboardInterrupt at the n-th line of these files, or of none; `lines` counts those that ran.

    With `within`, only lines that run inside of a function of one of these names count.
    """

    def __init__(self, files: list[str], line: int = 0, within: tuple[str, ...] = ()) -> None:
        self._files, self._within = {str(PACKAGE / name) for name in files}, within
        self.line, self.lines, self.where = line, 0, ""

    @contextlib.contextmanager
    def set(self) -> Iterator[CutShort]:
        sys.settrace(self._call)
        try:
            yield self
        finally:
            sys.settrace(None)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in self._files else None

    def _step(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and self._counts(frame):
            self.lines += 1
            if self.lines == self.line:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._step

    def _counts(self, frame: Any) -> bool:
        inside = not self._within
        while frame is not None and not inside:
            inside, frame = frame.f_code.co_name in self._within, frame.f_back
        return inside


def small(kind: str) -> Any:
    """A tiny model: all keys visible, sliding windows as well, or recurrent layers as well."""
    torch.manual_seed(0)
    extra: dict[str, Any] = {
        "llama": {},
        "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "qwen3_next": {
            "layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "mlp_only_layers": [0, 1],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    }[kind]  # fmt: skip
    settings = AutoConfig.for_model(
        kind, vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
        pad_token_id=0, eos_token_id=None, **extra,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()


def tokens(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 199, (1, length), generator=torch.Generator().manual_seed(seed))


PROMPTS = [tokens(40, 1), tokens(9, 2), tokens(14, 3)]
"""The last is that of the generation that is interrupted."""


def instants(count: int, most: int) -> list[int]:
    """Which of so many lines to try: all, or as many as there may be, the same every time."""
    step = max(count // most, 1)
    return list(range(1 + count % step // 2, count + 1, step))


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buffers grow, and the rows of their windows move, in every generation."""
    for module in (slab, recorded_verifier):
        monkeypatch.setattr(module, "PASS", PassConfig(cache_block=1))
    monkeypatch.setattr(slab, "MAX_NODES", 8)


def interrupted(model: Any, cut: CutShort) -> list[list[int] | Exception]:
    """What two streams say, of which one still reads, when a third text's generation is interrupted between them."""
    streams = [rs.generate_stream(model, ids, **GREEDY) for ids in PROMPTS[:2]]
    said: list[Any] = [next(stream).token_ids.tolist() for stream in streams]
    with cut.set(), contextlib.suppress(KeyboardInterrupt):
        model.generate(PROMPTS[2], **GREEDY)
    for i, stream in enumerate(streams):
        try:
            for piece in stream:
                said[i] += piece.token_ids.tolist()
        except Exception as error:
            said[i] = error
    return said


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_other_texts_stay_right(kind: str, room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row, piece and token of theirs is there once, wherever in reading, verifying and committing it comes."""
    if room == "recorded pass" and kind == "qwen3_next":
        pytest.skip("models with recurrent layers are not recorded")
    model = small(kind)
    expected = [model.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist() for ids in PROMPTS[:2]]
    recorded = "always" if room == "recorded pass" else "off"
    small_blocks(monkeypatch)
    rs.accelerate(model, recorded_pass=recorded, nodes=8, prefill_chunk=5)
    cut = CutShort(ROOMS[room])
    assert interrupted(model, cut) == expected
    bad = []
    for line in instants(cut.lines, MOST):
        cut = CutShort(ROOMS[room], line)
        said = interrupted(model, cut)
        for ours, theirs in zip(said, expected, strict=True):
            may_fail = kind == "qwen3_next" and isinstance(ours, InterruptedPassError)
            if ours != theirs and not may_fail:
                bad.append((line, cut.where, repr(ours)[:200]))
        if model.speculation.engine._sequences:
            bad.append((line, cut.where, "left over"))
            model.speculation.engine._sequences.clear()
    assert not bad, f"{len(bad)}: {bad[:20]}"


def test_a_piece_that_pushed_rows_out_of_a_window_is_read_again() -> None:
    """The pass was over when it was cut short: the rows that left the window with it are back."""
    model = small("gemma3_text")
    ids = torch.cat([PROMPTS[0], PROMPTS[1]], dim=1)
    text = ids[0].numpy().astype(np.int32)
    first = int(model.config.sliding_window) + 2  # the window is full when the second piece comes
    logits = []
    for times in (1, 2):
        verifier = HFVerifier(model, read_interface(model))
        with torch.no_grad():
            verifier.start(
                VerifierInputs(ids, {"past_key_values": DynamicCache(config=model.config)}, max_length=64 + len(text))
            )
            verifier.forward(text[:first])
            verifier.commit(np.empty(0, np.int32))
            assert verifier.takes_back
            for _ in range(times):
                output = verifier.forward(text[first:])
        logits.append(output.logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("room", ["own forward", "recorded pass"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_what_is_kept_is_kept_whole(kind: str, room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's cache goes on wherever in taking it over, committing and handing it back the interruption comes."""
    if room == "recorded pass" and kind == "qwen3_next":
        pytest.skip("models with recurrent layers are not recorded")
    model = small(kind)
    plain = copy.deepcopy(model)
    whole = model.generate(PROMPTS[2], **GREEDY)
    small_blocks(monkeypatch)
    recorded = "always" if room == "recorded pass" else "off"
    drafter = ScriptedDrafter(whole[0], "branchy")
    rs.accelerate(model, recorded_pass=recorded, drafter=drafter, nodes=16)

    def cache_after(cut: CutShort) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with cut.set(), contextlib.suppress(KeyboardInterrupt):
            model.generate(PROMPTS[2], past_key_values=cache, **GREEDY)
        return cache

    within = ("commit", "finish", "_adopt", "make_room")
    cut = CutShort(ROOMS[room], within=within)
    assert cache_after(cut).get_seq_length() == whole.shape[1] - 1
    bad = []
    for line in instants(cut.lines, MOST):
        cut = CutShort(ROOMS[room], line, within)
        cache = cache_after(cut)
        held = cache.get_seq_length()
        rows = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer)]
        if set(rows) != {held}:
            bad.append((line, cut.where, str(rows)))
        elif not 0 < held < whole.shape[1] - 1:
            continue  # nothing was kept, or it was over
        else:
            theirs = DynamicCache(config=plain.config)
            length = held + 1 - PROMPTS[2].shape[1]
            if length > 0:
                plain.generate(PROMPTS[2], past_key_values=theirs, do_sample=False, max_new_tokens=length)
            else:  # a part of the prompt
                plain(whole[:, :held], past_key_values=theirs)
            more: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
            expected = plain.generate(whole[:, : held + 1], past_key_values=theirs, **more)
            if not torch.equal(plain.generate(whole[:, : held + 1], past_key_values=cache, **more), expected):
                bad.append((line, cut.where, "another text"))
    assert not bad, f"{len(bad)}: {bad[:20]}"


def test_a_step_that_was_over_but_not_noted_as_such_keeps_nobody_from_stepping(tiny: Any, prompt: torch.Tensor) -> None:
    """As Ctrl-C leaves it inside of `with`, while somebody holds the traceback (a notebook does)."""
    wanted = tiny.generate(prompt, **GREEDY)
    rs.accelerate(tiny, nodes=4)

    def interrupted() -> Any:
        turn = tiny.speculation.engine.alone()
        turn.__enter__()
        return turn

    held = interrupted()
    assert torch.equal(tiny.generate(prompt, **GREEDY), wanted)
    assert "middle" not in tiny.speculation.last.reason
    with tiny.speculation.engine.alone():
        held.__exit__(None, None, None)  # as when the traceback goes, at any time
        with pytest.raises(ConfigError):
            tiny.speculation.invalidate()
    assert torch.equal(tiny.generate(prompt, **GREEDY), wanted)


def test_a_call_from_inside_of_what_is_done_alone_is_refused(tiny: Any) -> None:
    rs.accelerate(tiny, nodes=4)
    with tiny.speculation.engine.alone(), pytest.raises(ConfigError, match="inside a pass"):
        tiny.speculation.invalidate()


@pytest.mark.parametrize("recorded", ["always", "off"])
def test_a_shared_prompt_is_read_to_its_end(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it, and who begins behind it, is cut short; now and then who reads it is cancelled besides."""
    model, ids = small("llama"), tokens(18, 4)
    options = GREEDY | {"max_new_tokens": 6}
    requests = [ids, ids, tokens(4, 5)]
    expected = [model.generate(own, **options)[0, own.shape[1] :].tolist() for own in requests]
    small_blocks(monkeypatch)
    rs.accelerate(model, recorded_pass=recorded, nodes=4, prefill_chunk=5)
    files, within = ["engine/sequence.py", "engine/shared_prompt.py"], ("read", "recover")

    def others(cut: CutShort, cancelled: bool) -> list[list[int]]:
        """What the two with one prompt say, which one has begun to read when another generation is cut short."""
        asked = [{"inputs": own, **options, "max_new_tokens": 6 if own is ids else 2} for own in requests]
        many = rs.generate_many(model, asked, order="completed", rows=3)
        assert next(many).token_ids.tolist() == expected[2][:2]
        assert [sequence.is_reading for sequence in model.speculation.engine._sequences] == [True, True]
        with cut.set(), contextlib.suppress(KeyboardInterrupt):
            model.generate(PROMPTS[2], **options)
        if cancelled:
            many.cancel(0)
        said = {one.index: one for one in many}
        return [said[i].token_ids.tolist() for i in (0, 1) if not (cancelled and i == 0)]

    cut, bad = CutShort(files, within=within), []
    assert others(cut, False) == expected[:2]
    for n, line in enumerate(instants(cut.lines, 8 * MOST)):
        cut, cancelled = CutShort(files, line, within), n % 4 == 3
        said = others(cut, cancelled)
        if said != expected[cancelled:2] or model.speculation.engine._sequences:
            bad.append((line, cut.where, cancelled, repr(said)[:200]))
    assert not bad, f"{len(bad)}: {bad[:20]}"
