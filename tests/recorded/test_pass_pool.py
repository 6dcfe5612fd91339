"""Bucket passes and the pool that lends them, with a plain call in place of the CUDA graph and torch's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter
from small_decoders import ATTENTIONS, VOCAB, build, ids
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.config import PassConfig
from retrieve_spec.recorded import recorded_verifier
from retrieve_spec.recorded.cuda import cuda_graphs, pass_pool
from retrieve_spec.recorded.cuda.pass_pool import PassPool
from retrieve_spec.recorded.kv_buffer import KVBuffer, cache_windows
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.recorded.slab import Slab
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import read_interface


class Capture:
    """Counts what is captured; a replay is a call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        run()
        return run


def use_pool(model: Any, answer: Any, script: str, capture: Capture) -> PassPool:
    """Accelerate a model whose verifiers share a pool."""
    rs.accelerate(model, drafter=ScriptedDrafter(answer, script, vocab=VOCAB), nodes=24, recorded_pass="always")
    recorded = RecordedPass(model, 2)
    pool = PassPool(recorded, capture, triton=False)
    interface = read_interface(model)
    model.speculation._make_verifier = lambda: RecordedVerifier(model, HFVerifier(model, interface), recorded, pool)
    return pool


@pytest.mark.parametrize("model_type", ATTENTIONS)
def test_buckets_say_what_generate_says_and_are_reused(model_type: str) -> None:
    """Several prompts, one continued from the cache of the one before; nothing is captured twice."""
    model, capture = build(model_type), Capture()
    longest = model.generate(ids(30), max_new_tokens=60, do_sample=False)
    use_pool(model, longest[0], "branchy", capture)
    cache = DynamicCache(config=model.config)
    first = model.generate(ids(30), max_new_tokens=24, do_sample=False, past_key_values=cache)
    assert torch.equal(first, longest[:, :54])
    captured = capture.count
    assert 0 < captured <= 5
    held = [layer.keys.clone() for layer in cache.layers]
    other = ids(17)
    model.generate(other, max_new_tokens=8, do_sample=False)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, held, strict=True))
    again = model.generate(first, max_new_tokens=36, do_sample=False, past_key_values=cache)
    assert torch.equal(again, longest)
    assert capture.count <= captured + 3  # sizes not met before
    rs.restore(model)
    assert torch.equal(model.generate(other, max_new_tokens=8, do_sample=False)[0, :17], other[0])


def test_growth_captures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that outgrows the slabs moves them; passes captured before are not replayed on the old ones."""
    monkeypatch.setattr(recorded_verifier, "MAX_NODES", 0)
    monkeypatch.setattr(recorded_verifier, "PASS", PassConfig(cache_block=8, graph_rows=(1, 2, 4, 8, 16)))
    monkeypatch.setattr(cuda_graphs, "PASS", PassConfig(graph_rows=(1, 2, 4, 8, 16)))
    monkeypatch.setattr(pass_pool, "FIRST_ROWS", 64)
    model, capture = build("gemma3_text"), Capture()
    expected = model.generate(ids(20), max_new_tokens=200, do_sample=False)
    pool = use_pool(model, expected[0], "half", capture)
    assert torch.equal(model.generate(ids(20), max_new_tokens=200, do_sample=False), expected)
    grown = capture.count
    assert pool._idle is not None and grown > len(pool._idle._made)
    counts = []
    for _ in range(2):
        assert torch.equal(model.generate(ids(20), max_new_tokens=200, do_sample=False), expected)
        counts.append(capture.count)
    assert counts[0] == counts[1] <= grown + 2  # the second text finds room, and sizes not met since the last growth
    rs.restore(model)


def test_slabs_made_in_inference_mode_serve_outside_of_it() -> None:
    """The next generation writes to the slabs and the buffers of the one before, whatever modes they run in."""
    model, capture = build("llama"), Capture()
    expected = model.generate(ids(20), max_new_tokens=24, do_sample=False)
    use_pool(model, expected[0], "branchy", capture)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids(20), max_new_tokens=24, do_sample=False), expected)
    assert torch.equal(model.generate(ids(20), max_new_tokens=24, do_sample=False), expected)
    rs.restore(model)


def test_a_cache_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_pool, "PASS", PassConfig(pool_bytes=1))
    model, capture = build("llama"), Capture()
    expected = model.generate(ids(20), max_new_tokens=12, do_sample=False)
    pool = use_pool(model, expected[0], "right", capture)
    for _ in range(2):
        assert torch.equal(model.generate(ids(20), max_new_tokens=12, do_sample=False), expected)
        assert pool._idle is None
    rs.restore(model)


def test_the_graphs_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is spent, further sizes run without a graph."""
    held = iter(range(0, 10**6, 400))
    monkeypatch.setattr(cuda_graphs, "_gpu_bytes", lambda _device: next(held))
    monkeypatch.setattr(cuda_graphs, "PASS", PassConfig(graph_bytes=300))
    model, capture = build("llama"), Capture()
    expected = model.generate(ids(20), max_new_tokens=30, do_sample=False)
    use_pool(model, expected[0], "branchy", capture)
    assert torch.equal(model.generate(ids(20), max_new_tokens=30, do_sample=False), expected)
    assert capture.count == 1
    rs.restore(model)


def test_two_generations_at_once_have_slabs_of_their_own() -> None:
    model = build("llama")
    pool = PassPool(RecordedPass(model, 2), Capture(), triton=False)
    first, second = pool.take((0, 0), 64), pool.take((0, 0), 64)
    assert first.cache is not second.cache
    pool.give_back(first)
    assert pool.take((0, 8), 64).cache is not first.cache  # other windows, other slabs


def test_sliding_slab_holds_a_window() -> None:
    """However long the text is, a slab with a window keeps its size and the rows that the window shows."""
    window = 40
    cache = KVBuffer([0, window], 64)
    kept: list[float] = []
    rng = np.random.default_rng(3)
    for turn in range(300):
        nodes = int(rng.integers(0, 9))
        values = torch.arange(1 + nodes, dtype=torch.float32) + 100 * turn
        for layer in range(2):
            states = values.view(1, 1, -1, 1).expand(1, 2, -1, 4)
            keys, _ = cache.update(states, -states, layer)
            shown = kept[-window + 1 :] if layer else kept
            assert keys[0, 1, :, 3].tolist()[-(len(shown) + 1 + nodes) :] == shown + values.tolist()
        path = np.flatnonzero(rng.random(nodes) < 0.5).astype(np.int32)
        cache.commit(len(kept), 1, path)
        kept += [100.0 * turn, *(100.0 * turn + 1 + path).tolist()]
    full, sliding = cache.slabs
    assert len(kept) > 600 and full.capacity >= len(kept)
    assert sliding.capacity == 64 < Slab(1, window, 10_000).capacity < 600


def test_windows_are_read_from_the_cache() -> None:
    model = build("gemma3_text")
    assert cache_windows(DynamicCache(config=model.config)) == (8, 0)


def test_a_failed_capture_leaves_passes_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """Said once, and tried no more; the text goes on where it was."""
    model, tried = build("llama"), []

    class Refused(Capture):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            tried.append(1)
            if len(tried) == 2:
                run()
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
            return super().__call__(run)

    expected = model.generate(ids(20), max_new_tokens=30, do_sample=False)
    pool = use_pool(model, expected[0], "branchy", Refused())
    with caplog.at_level("WARNING", "retrieve_spec"):
        for _ in range(2):
            assert torch.equal(model.generate(ids(20), max_new_tokens=30, do_sample=False), expected)
    assert len(tried) == 2
    assert len([record for record in caplog.records if "not permitted" in record.message]) == 1
    assert pool._idle is not None and "not permitted" in pool._idle.problem
    rs.restore(model)
