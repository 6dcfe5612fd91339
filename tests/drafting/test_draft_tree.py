import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_paths import paths_of

from retrieve_spec.drafting.tree import FIELDS, DraftTree
from retrieve_spec.kernels import treemask as order
from retrieve_spec.kernels.treemask import unpacked

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=8)


@given(PATHS)
def test_paths_are_merged(paths):
    tree = DraftTree.from_paths(paths)
    tree.validate()
    found = paths_of(tree)
    prefixes = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    assert len(found) == len(prefixes) and {tuple(path) for path in found} == prefixes
    assert tree.depth.tolist() == [len(path) for path in found]
    assert tree.is_chain == (found == [found[-1][:n] for n in range(1, len(found) + 1)] if found else True)
    branch = tree.first_branch()
    branch.validate()
    assert branch.is_chain
    first = paths[0] if paths else []
    assert branch.token_ids[: len(first)].tolist() == first
    assert tree.expected_accepted == len(tree)


@given(PATHS, st.lists(st.integers(0, 3), max_size=8))
def test_tokens_are_followed_as_far_as_the_tree_has_them(paths, tokens):
    tree = DraftTree.from_paths(paths)
    found = paths_of(tree)
    known = max((n for n in range(1, len(tokens) + 1) if tokens[:n] in found), default=0)
    path = tree.path_along(np.array(tokens, np.int32))
    assert path.dtype == np.int32
    assert [found[node] for node in path] == [tokens[:n] for n in range(1, known + 1)]


@given(PATHS, st.integers(0, 70))
def test_a_pass_sees_its_root_tokens_first_and_a_node_its_ancestors_and_itself(paths, roots):
    tree = DraftTree.from_paths(paths)
    rows = roots + len(tree)
    found = paths_of(tree)
    seen = np.tri(rows, dtype=np.bool_)
    seen[roots:, roots:] = [[path[: len(other)] == other for other in found] for path in found] if found else False
    assert (unpacked(tree.ancestors) == seen[roots:, roots:]).all()
    words = tree.visible_rows(roots)
    assert words.dtype == np.int32 and words.shape == (rows, -(-rows // 32))
    assert (unpacked(words) == seen).all()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("parent", [-1, 1, 0], "does not come first"),
        ("parent", [-2, 0, 0], "does not come first"),
        ("depth", [1, 2, 3], "depth"),
        ("depth", [0, 1, 1], "depth"),
        ("token_ids", [1, 2, 2], "same token"),
        ("log_p", [0.0], "log_p has 1 entries for 3 nodes"),
        ("origin", [], "origin has 0 entries"),
    ],
)
def test_a_broken_tree_is_told(field, value, message):
    tree = DraftTree.from_paths([[1, 2], [1, 3]])
    tree.validate()
    setattr(tree, field, np.array(value, getattr(tree, field).dtype))
    with pytest.raises(AssertionError, match=message):
        tree.validate()


def test_a_block_is_the_tree_that_was_written_into_it():
    block = np.zeros((order.BLOCK_ROWS, 3), np.int32)
    block[order.TOKENS], block[order.PARENTS], block[order.DEPTHS] = [7, 8, 9], [-1, 0, -1], [1, 2, 1]
    block[order.LOG_P] = np.array([-0.5, -1.0, -2.0], np.float32).view(np.int32)
    block[order.SOURCES].view(np.uint8)[:3] = [4, 5, 6]
    block[order.ORIGINS : order.ORIGINS + 2].reshape(-1).view(np.int64)[:] = [1 << 40, -1, 3]
    tree = DraftTree.of_block(block)
    assert len(tree) == 3 and tree.expected_accepted == pytest.approx(np.exp([-0.5, -1.0, -2.0]).sum())
    made = DraftTree(*(getattr(tree, name) for name in FIELDS))
    assert [getattr(made, name).tolist() for name in FIELDS] == [
        [7, 8, 9], [-1, 0, -1], [1, 2, 1], [-0.5, -1.0, -2.0], [4, 5, 6], [1 << 40, -1, 3]
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'tokens'"):
        _ = tree.tokens
    assert len(DraftTree.of_block(block[:, :0].copy()).origin) == 0


def test_a_subtree_is_a_tree_of_its_own() -> None:
    tree = DraftTree.from_paths([[1, 2], [3, 4, 5], [6]])
    left = tree.subtree(np.array([2, 3, 4, 5]))
    left.validate()
    wanted = DraftTree.from_paths([[3, 4, 5], [6]])
    assert left.token_ids.tolist() == wanted.token_ids.tolist() and left.parent.tolist() == wanted.parent.tolist()
    assert len(tree.subtree(np.array([], np.int64))) == 0
