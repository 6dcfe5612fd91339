"""KV buffers: rows held by window, and what a commit keeps, at once or with the next pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retrieve_spec.recorded.kv_buffer import KVBuffer, Slab


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
    assert sliding.capacity == 256 < Slab(1, window, 10_000).capacity < 600


@pytest.mark.parametrize("taken", [True, False])
def test_rows_may_move_with_the_next_pass(taken: bool) -> None:
    """Whoever runs the next pass is told which rows to move; any other look at the buffer moves them first."""
    at_once, later = KVBuffer([0, 0], 64), KVBuffer([0, 0], 64, moves_later=True)
    for cache in (at_once, later):
        for layer in range(2):
            states = torch.arange(9.0).view(1, 1, 9, 1).expand(1, 2, 9, 4) + 100 * layer
            cache.update(states, -states, layer)
        cache.commit(0, 3, np.array([0, 2, 5], np.int32))
    assert at_once.length == later.length == 6 and not len(at_once.take_moves(9))
    if taken:
        moves = later.take_moves(9)
        assert moves.tolist() == [1, 4], "the first node stands where it belongs"
        first = later.length - len(moves)
        for slab in later.slabs:
            slab.move(moves.astype(np.int64) + first, first)
    else:
        later.settle()
    assert not len(later.take_moves(9))
    for ours, theirs in zip(later.slabs, at_once.slabs, strict=True):
        for one, other in zip(ours.tensors, theirs.tensors, strict=True):
            assert torch.equal(one[:, :, :6], other[:, :, :6])
    assert at_once.slabs[0].tensors[0][0, 0, :6, 0].tolist() == [0, 1, 2, 3, 5, 8]
