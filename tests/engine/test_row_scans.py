"""Row scans beside recurrences that go from state to state, one row of a draft tree after another."""

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.interface import Recurrence
from retrieve_spec.verify.mixers import find_mixers
from retrieve_spec.verify.recurrent import RecurrentState, RowMixer, replaceable
from retrieve_spec.verify.row_scans import RowTree, convolve, scan_delta, scan_ssd, unit

TREES = ([[1, 2, 3], [1, 4], [5, 6]], [[7]], [], [[1, 2, 3, 4, 5, 6]], [[1], [2], [3]])
CPU = torch.device("cpu")


def row_tree(texts: int, roots: int = 1) -> tuple[RowTree, list[DraftTree]]:
    trees = [DraftTree.from_paths(TREES[text]) for text in range(texts)]
    return RowTree.of([roots + text for text in range(texts)], trees, CPU), trees


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def path_to(tree: RowTree, text: int, row: int) -> list[int]:
    path = [row]
    while (row := int(tree.parent[text, row])) >= 0:
        path.insert(0, row)
    return path


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def in_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees whose matrices are float64."""
    seeing = RowTree._seeing.__func__  # type: ignore[attr-defined]

    def doubled(cls: Any, *rows: Any) -> RowTree:
        tree: RowTree = seeing(cls, *rows)
        tree.above, tree.shut = tree.above.double(), tree.shut.double()
        return tree

    monkeypatch.setattr(RowTree, "_seeing", classmethod(doubled))


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


@pytest.mark.usefixtures("in_doubles")
@pytest.mark.parametrize(("held", "length"), [(4, 4), (3, 4), (4, 3), (2, 2)])
@pytest.mark.parametrize("texts", [1, 5])
def test_convolution(texts: int, held: int, length: int) -> None:
    tree, _ = row_tree(texts)
    x, state, weight, bias = random(texts, 6, tree.width), random(texts, 6, held), random(6, length), random(6)
    out, rows = convolve(tree, x, state, weight, bias)
    for text in range(texts):
        for row in range(tree.width):
            seen = torch.cat([state[text], x[text][:, path_to(tree, text, row)]], 1)
            torch.testing.assert_close(out[text, :, row], (seen[:, -length:] * weight).sum(1) + bias)
            torch.testing.assert_close(rows.behind(tree, text, row)[0], seen[:, -held:])


def naive_ssd(state: torch.Tensor, x: Any, steps: Any, decay: Any, keys: Any, queries: Any) -> tuple[Any, Any]:
    """One row of Mamba-2, of one text: (heads, p, n) states."""
    each = len(decay) // len(keys)
    keys, queries = keys.repeat_interleave(each, 0), queries.repeat_interleave(each, 0)
    state = state * (steps * decay).exp()[:, None, None] + (steps[:, None] * x)[..., None] * keys[:, None]
    return state, (state * queries[:, None]).sum(-1)


@pytest.mark.usefixtures("in_doubles")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("texts", [1, 5])
def test_ssd(texts: int, groups: int) -> None:
    tree, _ = row_tree(texts, roots=2)
    heads, p, n = 4, 3, 5
    x, steps, decay = random(texts, tree.width, heads, p), random(texts, tree.width, heads).exp(), -random(heads).exp()
    keys, queries = random(texts, tree.width, groups, n), random(texts, tree.width, groups, n)
    state = random(texts, heads, p, n)
    before = state.clone()
    out, rows = scan_ssd(tree, x, steps, keys, queries, state, decay)
    for text in range(texts):
        for row in range(tree.width):
            path, wanted = path_to(tree, text, row), state[text]
            for at in path:
                wanted, said = naive_ssd(wanted, x[text, at], steps[text, at], decay, keys[text, at], queries[text, at])
            torch.testing.assert_close(out[text, row], said)
            only = slice(text, text + 1)
            torch.testing.assert_close(rows.behind(state[only], only, torch.tensor(path))[0], wanted)
    assert torch.equal(state, before)


def naive_delta(state: torch.Tensor, query: Any, key: Any, value: Any, decay: Any, beta: Any) -> tuple[Any, Any]:
    """One row of the gated delta rule, of one text: (heads, dk, dv) states."""
    state = state * decay.exp()[:, None, None]
    written = (value - (state * key[..., None]).sum(1)) * beta[:, None]
    state = state + key[..., None] * written[:, None]
    return state, (state * query[..., None]).sum(1)


@pytest.mark.usefixtures("in_doubles")
@pytest.mark.parametrize("texts", [1, 5])
def test_gated_delta_rule(texts: int) -> None:
    tree, _ = row_tree(texts, roots=2)
    heads, dk, dv = 3, 4, 5
    query, key = random(texts, tree.width, heads, dk), unit(random(texts, tree.width, heads, dk))
    value, decay = random(texts, tree.width, heads, dv), -random(texts, tree.width, heads).exp()
    beta, state = random(texts, tree.width, heads).sigmoid(), random(texts, heads, dk, dv)
    out, rows = scan_delta(tree, query, key, value, decay, beta, state)
    for text in range(texts):
        for row in range(tree.width):
            path, wanted = path_to(tree, text, row), state[text]
            for at in path:
                wanted, said = naive_delta(
                    wanted, query[text, at], key[text, at], value[text, at], decay[text, at], beta[text, at]
                )
            torch.testing.assert_close(out[text, row], said)
            only = slice(text, text + 1)
            torch.testing.assert_close(rows.behind(state[only], only, torch.tensor(path))[0], wanted)


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
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64, hidden_size=32, num_heads=4, head_dim=16, state_size=8, num_hidden_layers=2, n_groups=2,
        chunk_size=8,
    )  # fmt: skip
    return Mamba2ForCausalLM(config).eval()


def qwen3_next() -> Any:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "cache"), [(mamba2, "cache_params"), (qwen3_next, "past_key_values")])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
def test_prompts_and_steps_are_the_models_own(make: Any, cache: str, length: int) -> None:
    """Logits and states of a prompt, in pieces as well, and of steps behind it."""
    model = make()
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
    torch.testing.assert_close(torch.cat(texts[1]), torch.cat(texts[0]), atol=1e-4, rtol=1e-4)
    for own, other in zip(caches[1].layers, caches[0].layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for i, state in getattr(other, name, {}).items():
                if state is not None:
                    torch.testing.assert_close(getattr(own, name)[i], state, atol=1e-4, rtol=1e-4)


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
