"""Memory of generations: no cache is held twice, none is put together for nobody, growth is by parts."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from small_decoders import accelerate, build, ids
from transformers import DynamicCache, LlamaConfig

from retrieve_spec.recorded import kv_buffer
from retrieve_spec.recorded.kv_buffer import SLABS_PER_WINDOW, KVBuffer, Slab

LAYERS, ROWS = 16, 700


def filled(rows: int = ROWS, layers: int = LAYERS) -> DynamicCache:
    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=layers))
    for layer in range(layers):
        states = torch.arange(rows, dtype=torch.float32).view(1, 1, rows, 1).expand(1, 2, rows, 8) + 1000 * layer
        cache.update(states.clone(), -states, layer)
    return cache


def sizes(buffer: KVBuffer) -> int:
    return sum(tensor.nbytes for slab in buffer.slabs for tensor in slab.tensors)


def check(buffer: KVBuffer, rows: int = ROWS) -> None:
    for layer, (keys, values) in enumerate(buffer.layer_slabs):
        wanted = torch.arange(rows, dtype=torch.float32) + 1000 * layer
        assert torch.equal(keys[0, 1, :rows, 3], wanted) and torch.equal(values[0, 0, :rows, 0], -wanted)


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of slabs that live after each allocation of one."""
    made: list[weakref.ref[Any]] = []
    live: list[int] = []
    empty = kv_buffer._empty

    def counted(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = empty(like, shape)
        made.append(weakref.ref(tensor))
        live.append(sum(t.nbytes for ref in made if (t := ref()) is not None))
        return tensor

    monkeypatch.setattr(kv_buffer, "_empty", counted)
    return live


def test_growing_replaces_one_tensor_after_another(allocations: list[int]) -> None:
    buffer = KVBuffer([0] * LAYERS, ROWS)
    buffer.load(filled(), ROWS)
    before = sizes(buffer)
    assert len(buffer.slabs) == SLABS_PER_WINDOW
    allocations.clear()
    buffer.make_room(60)
    assert len(allocations) == 2 * SLABS_PER_WINDOW
    assert max(allocations) <= sizes(buffer) + before / (2 * SLABS_PER_WINDOW)
    assert sizes(buffer) < 1.5 * before  # 700 rows become 1,024, not 1,400 and more
    check(buffer)


def test_a_cache_is_taken_over_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    buffer = KVBuffer([0] * LAYERS, ROWS)
    alive: list[int] = []
    theirs = [weakref.ref(layer.keys) for layer in cache.layers]
    fit = Slab.fit

    def counted(slab: Slab, keys: torch.Tensor, values: torch.Tensor) -> None:
        fit(slab, keys, values)
        alive.append(sum(ref() is not None for ref in theirs) + len(alive))

    monkeypatch.setattr(Slab, "fit", counted)
    buffer.load(cache, ROWS)
    assert max(alive) <= LAYERS + 1  # what is taken over is gone before the next is
    check(buffer)


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


def test_buffers_of_a_generation_are_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate(build("llama"))
    buffers: list[weakref.ref[Any]] = []
    made = KVBuffer.__init__

    def noted(self: KVBuffer, *arguments: Any, **named: Any) -> None:
        buffers.append(weakref.ref(self))
        made(self, *arguments, **named)

    monkeypatch.setattr(KVBuffer, "__init__", noted)
    model.generate(ids(20), max_new_tokens=8, do_sample=False)
    gc.collect()
    assert buffers and all(ref() is None for ref in buffers)
