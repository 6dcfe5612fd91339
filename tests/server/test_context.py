"""How much is shown to the model: bounds of positions, of time and of memory, on the bundled model."""

from __future__ import annotations

import pytest
from scripted import ScriptedBackend

from retrieve_spec.config import ServeConfig
from retrieve_spec.server import run
from retrieve_spec.server.backend import Backend


def test_what_a_token_costs_is_measured_and_fewer_positions_are_used_where_that_is_asked_for(reference):
    backend, config = reference[0].backend, reference[0].backend.model.config
    assert backend.measure() > 0
    assert backend.token_bytes == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    for asked, used in ((512, 512), (1 << 20, config.max_position_embeddings)):
        assert Backend(backend.model, reference[2], asked).n_ctx == used


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
