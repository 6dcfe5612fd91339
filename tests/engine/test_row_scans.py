"""Row scans beside recurrences that go from state to state, one row of a draft tree after another."""

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import MAMBA2, small_model

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.interface import Recurrence
from retrieve_spec.verify.mixers import find_mixers
from retrieve_spec.verify.recurrent import RecurrentState, RowMixer, replaceable
from retrieve_spec.verify.row_scans import RowTree, convolve, scan_delta, scan_ssd, unit

TREES = ([[1, 2, 3], [1, 4], [5, 6]], [[7]], [], [[1, 2, 3, 4, 5, 6]], [[1], [2], [3]])
CPU = torch.device("cpu")
QWEN3_NEXT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def row_tree(texts: int, roots: int = 1) -> tuple[RowTree, list[DraftTree]]:
    trees = [DraftTree.from_paths(TREES[text]) for text in range(texts)]
    return RowTree.of([roots + text for text in range(texts)], trees, CPU), trees


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def assert_alike(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def path_to(tree: RowTree, text: int, row: int) -> list[int]:
    path = [row]
    while (row := int(tree.parent[text, row])) >= 0:
        path.insert(0, row)
    return path


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_parents_are_those_of_the_trees_at_the_left_of_a_pass() -> None:
    tree, trees = row_tree(5, roots=2)
    assert tree.width == 5 + 6
    for text, draft in enumerate(trees):
        roots = 2 + text
        size = roots + len(draft)
        assert tree.parent[text, size:].tolist() == [-1] * (tree.width - size)
        assert path_to(tree, text, roots - 1) == list(range(roots))
        for node, parent in enumerate(draft.parent):
            assert tree.parent[text, roots + node] == roots + (parent if parent >= 0 else -1)
        for row in range(tree.width):
            assert np.flatnonzero(tree.above[text, row]).tolist() == sorted(path_to(tree, text, row))


@pytest.mark.parametrize(("held", "length"), [(4, 4), (3, 4), (4, 3), (2, 2)])
@pytest.mark.parametrize("texts", [1, 5])
def test_convolution(texts: int, held: int, length: int) -> None:
    tree, _ = row_tree(texts)
    x, state, weight, bias = random(texts, 6, tree.width), random(texts, 6, held), random(6, length), random(6)
    out, rows = convolve(tree, x, state, weight, bias)
    for text in range(texts):
        for row in range(tree.width):
            seen = torch.cat([state[text], x[text][:, path_to(tree, text, row)]], 1)
            assert_alike(out[text, :, row], (seen[:, -length:] * weight).sum(1) + bias)
            torch.testing.assert_close(rows.state_after(tree, text, row)[0], seen[:, -held:])


def along_paths(tree: RowTree, state: torch.Tensor, out: torch.Tensor, rows: Any, step: Any) -> None:
    """Check what rows say, and the states behind them, against `step` from row to row of every path.

    `step` has the state (of one text), the text and the row, and gives the state behind it and what it says.
    """
    for text in range(len(state)):
        for row in range(tree.width):
            path, wanted, said = path_to(tree, text, row), state[text], None
            for at in path:
                wanted, said = step(wanted, text, at)
            assert_alike(out[text, row], said)
            only = slice(text, text + 1)
            assert_alike(rows.state_after(state[only], only, torch.tensor(path))[0], wanted)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("texts", [1, 5])
def test_ssd(texts: int, groups: int) -> None:
    """Mamba-2: states (heads, p, n)."""
    tree, _ = row_tree(texts, roots=2)
    heads, p, n = 4, 3, 5
    x, steps, decay = random(texts, tree.width, heads, p), random(texts, tree.width, heads).exp(), -random(heads).exp()
    keys, queries = random(texts, tree.width, groups, n), random(texts, tree.width, groups, n)
    state = random(texts, heads, p, n)
    before = state.clone()

    def step(state: torch.Tensor, text: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, query = (of[text, row].repeat_interleave(heads // groups, 0)[:, None] for of in (keys, queries))
        kept = state * (steps[text, row] * decay).exp()[:, None, None]
        state = kept + (steps[text, row][:, None] * x[text, row])[..., None] * key
        return state, (state * query).sum(-1)

    along_paths(tree, state, *scan_ssd(tree, x, steps, keys, queries, state, decay), step)
    assert torch.equal(state, before)


@pytest.mark.parametrize("texts", [1, 5])
def test_gated_delta_rule(texts: int) -> None:
    """States (heads, dk, dv)."""
    tree, _ = row_tree(texts, roots=2)
    heads, dk, dv = 3, 4, 5
    query, key = random(texts, tree.width, heads, dk), unit(random(texts, tree.width, heads, dk))
    value, decay = random(texts, tree.width, heads, dv), -random(texts, tree.width, heads).exp()
    beta, state = random(texts, tree.width, heads).sigmoid(), random(texts, heads, dk, dv)

    def step(state: torch.Tensor, text: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = state * decay[text, row].exp()[:, None, None]
        written = (value[text, row] - (state * key[text, row][..., None]).sum(1)) * beta[text, row][:, None]
        state = state + key[text, row][..., None] * written[:, None]
        return state, (state * query[text, row][..., None]).sum(1)

    along_paths(tree, state, *scan_delta(tree, query, key, value, decay, beta, state), step)


def test_scans_under_autocast_are_what_they_are_without() -> None:
    tree, _ = row_tree(2, roots=2)
    query, key, value = (torch.randn(2, tree.width, 3, 4) for _ in range(3))
    decay, beta, state = -torch.rand(2, tree.width, 3), torch.rand(2, tree.width, 3), torch.randn(2, 3, 4, 4)

    def scanned() -> list[torch.Tensor]:
        delta = scan_delta(tree, query, unit(key), value, decay, beta, state)[0]
        return [delta, scan_ssd(tree, value, beta, key, query, state, decay[0, 0])[0]]

    with torch.autocast("cpu", torch.bfloat16):
        found = scanned()
    for ours, wanted in zip(found, scanned(), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_decays_of_rows_far_apart_are_zero_and_no_numbers_are_lost() -> None:
    """Rows that are not on one path may be any number of powers of ten apart."""
    tree = RowTree.of([1], [DraftTree.from_paths([[1, 2], [3, 4]])], CPU)
    x, steps = torch.ones(1, 5, 1, 1), torch.tensor([[[1.0], [1e4], [1.0], [1.0], [1.0]]])
    keys = torch.ones(1, 5, 1, 1)
    out, _ = scan_ssd(tree, x, steps, keys, keys, torch.ones(1, 1, 1, 1), torch.tensor([-10.0]))
    assert torch.isfinite(out).all()
    assert out[0, 1, 0, 0] == 1e4


def mamba2() -> Any:
    return small_model("mamba2", **MAMBA2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "settings", "cache"),
    [("mamba2", MAMBA2, "cache_params"), ("qwen3_next", QWEN3_NEXT, "past_key_values")],
)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
def test_prompts_and_steps_are_the_models_own(
    model_type: str, settings: dict[str, Any], cache: str, length: int
) -> None:
    """Logits and states of a prompt, in pieces as well, and of steps behind it."""
    model = small_model(model_type, **settings)
    ids = torch.randint(1, 64, (1, length + 3))
    state = RecurrentState(Recurrence(tuple(find_mixers(model, cache, ids[:, :3])), "rows"))
    texts: list[list[torch.Tensor]] = [[], []]
    caches = []
    for ours in (False, True):
        held = None
        for piece in (ids[:, : length // 2], ids[:, length // 2 : length], *ids[:, length:].split(1, 1)):
            if not piece.shape[1]:
                continue
            given = {cache: held} if held is not None else {}
            undrafted = state.verifying(held, [held], [piece.shape[1]], [DraftTree()], CPU)
            with undrafted if ours else contextlib.nullcontext(), torch.no_grad():
                out = model(piece, use_cache=True, **given)
            held = getattr(out, cache)
            texts[ours].append(out.logits[0])
        caches.append(held)
    assert_alike(torch.cat(texts[1]), torch.cat(texts[0]))
    for own, other in zip(caches[1].layers, caches[0].layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for i, state in getattr(other, name, {}).items():
                if state is not None:
                    assert_alike(getattr(own, name)[i], state)


@pytest.mark.filterwarnings("ignore")
def test_other_threads_run_the_mixer_itself_and_the_model_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mamba2()
    ids = torch.randint(1, 64, (1, 5))
    wanted = model(ids).logits
    said: list[torch.Tensor] = []
    monkeypatch.setattr(RowMixer, "scan_ssd", lambda *args, **kwargs: 1 / 0)
    rows = RecurrentState(Recurrence(tuple(find_mixers(model, "cache_params", ids)), "rows"))
    with rows.verifying(None, [None], [5], [DraftTree()], CPU):
        other = threading.Thread(target=lambda: said.append(model(ids).logits))
        other.start()
        other.join()
        with pytest.raises(ZeroDivisionError):
            model(ids)
    assert torch.equal(said[0], wanted) and torch.equal(model(ids).logits, wanted)
    assert "forward" not in vars(model.backbone.layers[0].mixer)


def test_mixers_with_a_forward_of_somebody_else_are_left_alone() -> None:
    mixer = mamba2().backbone.layers[0].mixer
    assert set(replaceable(mixer).values()) == {"convolve", "convolve_step", "scan_ssd", "step_ssd"}
    mixer.conv1d._hf_hook = object()  # accelerate's, which moves weights
    assert not replaceable(mixer)
    del mixer.conv1d._hf_hook
    mixer.forward = mixer.forward
    assert not replaceable(mixer)
