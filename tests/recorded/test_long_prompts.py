"""Prompts longer than the widest graph, on a pretended GPU: captured pieces, which cost the same behind any context."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from placed_models import Placed
from pretend_cuda import PretendCuda
from small_decoders import ids

from retrieve_spec.config import PassConfig
from retrieve_spec.recorded import kv_buffer, packed_pass, recorded_verifier
from retrieve_spec.recorded.packed_pass import PassGraphs
from retrieve_spec.verify.verifier import Ran


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_pieces_of_a_long_prompt_are_replayed(
    gpu: PretendCuda, with_triton: None, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Windows included; nobody waits for a piece, and nothing as long as the context is made or copied."""
    for module in (packed_pass, recorded_verifier, kv_buffer):
        monkeypatch.setattr(module, "PASS", PassConfig(graph_rows=(1, 2, 4, 8, 32), tree_rows=32, cache_block=8))
    placed, options = Placed(gpu, family), {"max_new_tokens": 8, "do_sample": False}
    expected = placed.host.generate(ids(330), **options)
    placed.accelerate(expected[0])
    pieces: list[tuple[int, Ran, int, int, int]] = []
    run = PassGraphs.run

    def counted(self: PassGraphs, laid: Any, wanted: Any) -> Any:
        before = gpu.numbers, gpu.uploads.total(), gpu.waits.total()
        out = run(self, laid, wanted)
        assert out is not None, self.problem
        pieces.append((laid[0].held, out[2], *before))
        return out

    with mock.patch.object(PassGraphs, "run", counted):
        assert placed.generate(ids(330), **options).equal(expected)
    begins, ran, numbers, uploads, waits = zip(*pieces[:11], strict=True)
    assert begins == tuple(range(0, 330, 32)) and ran[:-1] == (Ran.CAPTURED, *[Ran.REPLAYED] * 9)
    made = np.diff(numbers[1:])
    assert made[5:].max() <= made[:5].max()
    assert set(np.diff(uploads[1:])) == {1} and len(set(waits[1:])) == 1
