"""A cache is put together for those who ask for one, and for nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_decoders import accelerate, build, ids
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.recorded.kv_buffer import KVBuffer


@pytest.mark.parametrize("asked", ["nothing", "dictionary", "own cache"])
def test_the_cache_is_put_together_for_those_who_ask(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(ids(20), return_dict_in_generate=True, **options)
    accelerate(model)
    unloads: list[bool] = []
    unload = KVBuffer.unload
    monkeypatch.setattr(KVBuffer, "unload", lambda *a, **k: (unloads.append(True), unload(*a, **k))[1])
    cache = DynamicCache(config=model.config)
    if asked == "own cache":
        options["past_key_values"] = cache
    ours = model.generate(ids(20), return_dict_in_generate=asked == "dictionary", **options)
    assert torch.equal(ours if asked != "dictionary" else ours.sequences, plain.sequences)
    assert len(unloads) == (asked != "nothing")
    handed = {"dictionary": getattr(ours, "past_key_values", None), "own cache": cache}.get(asked)
    if handed is not None:
        assert handed.get_seq_length() == plain.past_key_values.get_seq_length()
        torch.testing.assert_close(handed.layers[1].keys, plain.past_key_values.layers[1].keys, atol=2e-5, rtol=2e-5)
    rs.restore(model)
