"""Models whose parts are in several places (`device_map`): the same tokens, drafted for, or a reason why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import retrieve_spec as rs

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offloaded", "recorded"),
    [(("model.layers.1", "lm_head"), "always"), (("model.embed_tokens",), "auto"), (PARTS, "auto")],
)
def test_offloaded_parts(tmp_path: Path, tiny: Any, prompt: Any, offloaded: tuple[str, ...], recorded: str) -> None:
    pytest.importorskip("accelerate")
    places = {part: "disk" if part in offloaded else "cpu" for part in PARTS}
    tiny.save_pretrained(tmp_path / "model")
    given = {"device_map": places, "offload_folder": tmp_path / "kept"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **given).eval()
    looping = prompt[:, :6].repeat(1, 6)
    expected = tiny.generate(looping, max_new_tokens=24, do_sample=False)
    rs.accelerate(model, recorded_pass=recorded)
    assert torch.equal(model.generate(looping, max_new_tokens=24, do_sample=False), expected)
    assert model.speculation.last.mode == "tree", model.speculation.last.reason
    streamed = [token for piece in rs.generate_stream(model, looping, max_new_tokens=24) for token in piece.token_ids]
    assert streamed == expected[0, looping.shape[1] :].tolist()
