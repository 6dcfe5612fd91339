"""How much is shown to the model: bounds of positions, of time and of memory, on the bundled model."""

from __future__ import annotations

import pytest
from scripted import ScriptedBackend

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.server import run
from retrieve_spec.server.backend import Backend, SlotPool
from retrieve_spec.server.prompts import FimAssembler, FimParts, find_format


def test_what_a_token_costs_is_measured_and_fewer_positions_are_used_where_that_is_asked_for(reference):
    backend, config = reference[0].backend, reference[0].backend.model.config
    assert backend.measure() > 0
    assert backend.token_bytes == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    for asked, used in ((512, 512), (1 << 20, config.max_position_embeddings)):
        assert Backend(backend.model, reference[2], asked).n_ctx == used


def test_one_prompt_fits_the_memory_of_the_caches(reference):
    backend = Backend(reference[0].backend.model, reference[2])
    run._fit(backend, ServeConfig(cache_bytes=300 * backend.token_bytes))
    assert backend.n_ctx == 300
    with pytest.raises(ServeError, match="--cache-mib"):
        run._fit(backend, ServeConfig(cache_bytes=1000))


@pytest.mark.parametrize(
    ("seconds", "n_ctx", "window"),
    [(1e-3, 32_768, 2048), (1e-4, 32_768, 6000), (1e-6, 32_768, 16_384), (1e-3, 2048, 1024)],
)
def test_the_window_follows_the_speed(seconds, n_ctx, window):
    class Measured(ScriptedBackend):
        def measure(self):
            return seconds

    backend = Measured(lambda prompt: [0], n_ctx=n_ctx)
    assert run._fit(backend, ServeConfig()).fim_window == pytest.approx(window, rel=0.01)
    assert run._fit(backend, ServeConfig(fim_window=100)).fim_window == 100


def test_shares_of_prefix_and_suffix(codec):
    found = find_format(codec)
    code = "".join(f"value_{i} = compute({i})\n" for i in range(4000))
    lengths = {}
    for share in (0.25, 0.75):
        ids = FimAssembler(codec, found, 8192, 2000, share).assemble(FimParts(code, code), 64).token_ids
        lengths[share] = ids.index(found.suffix)
        assert len(ids) < 2100
    assert lengths[0.25] < 550 < 1000 < lengths[0.75] < 1600


def test_kept_caches_keep_to_a_bound_of_bytes():
    backend = ScriptedBackend(lambda prompt: [0])
    pool = SlotPool(backend, 100, most_bytes=8 * 250)
    for number in range(6):
        prompt = list(range(1000 * number, 1000 * number + 101))
        slot, _ = pool.take(prompt)
        slot.cache.extend(prompt[:100])
        pool.settle(slot, prompt[:100])
        pool.release(slot)
    assert pool.count("") == 2
    _, cached = pool.take(list(range(5000, 5200)))
    assert cached == 100
