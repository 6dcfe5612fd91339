import naive_blend as naive
import numpy as np
from doors import expand
from doors import step as order
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.drafting.tree import DraftTree

SHAPES = st.lists(st.integers(0, 10**6), max_size=40).map(
    lambda picks: [pick % (i + 1) - 1 for i, pick in enumerate(picks)]
)
"""Parent of every node, each after its parent."""


def best_first(shape, seed=0):
    """Nodes of a shape with falling probabilities."""
    rng = np.random.default_rng(seed)
    p = np.sort(rng.uniform(0.01, 1, len(shape)))[::-1].astype(np.float32)
    depth = []
    for parent in shape:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    rows = rng.integers(0, 3, len(shape)).tolist()
    return list(zip(range(100, 100 + len(shape)), shape, depth, rows, p.tolist(), strict=True))


def in_order(nodes, origin=()):
    n = len(nodes)
    types = (np.int32, np.int32, np.int32, np.float32, np.uint8, np.int64)
    tree = DraftTree(*(np.empty(n, dtype) for dtype in types))
    order.depth_first(
        np.array([node[:4] for node in nodes], np.int64).reshape(-1, 4),
        np.array([node[4] for node in nodes], np.float32),
        np.array([5, 6, 7], np.uint8),
        np.array(origin, np.int64),
        tree.token_ids,
        tree.parent,
        tree.depth,
        tree.log_p,
        tree.source,
        tree.origin,
    )
    return tree


@given(SHAPES, st.integers(0, 40), st.data())
def test_depth_first_order(shape, verify, data):
    """Where a first branch can be read in one piece of a store, its origins say so."""
    nodes = best_first(shape)[:verify]
    place = st.one_of(st.just(-1), st.builds(lambda s, p: s << 40 | p, st.integers(0, 1), st.integers(100, 110)))
    origin = [data.draw(place) for _ in nodes]
    tree = in_order(nodes, origin)
    tree.validate()
    order = naive.depth_first(nodes)
    assert tree.token_ids.tolist() == [nodes[i][0] for i in order]
    assert tree.parent.tolist() == [order.index(nodes[i][1]) if nodes[i][1] >= 0 else -1 for i in order]
    assert tree.depth.tolist() == [nodes[i][2] for i in order]
    assert tree.source.tolist() == [nodes[i][3] + 5 for i in order]
    np.testing.assert_allclose(np.exp(tree.log_p), [nodes[i][4] for i in order], rtol=1e-5)
    branch = tree.first_branch()
    assert (tree.token_ids[: len(branch)] == branch.token_ids).all(), "the first branch comes first"
    expected = [origin[i] for i in order]
    for at in range(len(order) - 1, 0, -1):
        above = expected[at - 1]
        if tree.parent[at] == at - 1 and min(expected[at], above) >= 0 and expected[at] >> 40 == above >> 40:
            expected[at - 1] = expected[at] - 1
    assert tree.origin.tolist() == expected
    assert (in_order(nodes).origin == -1).all()


@given(SHAPES, st.lists(st.integers(0, 5), max_size=12), st.integers(1, 8))
def test_node_tails(shape, text, width):
    nodes = best_first(shape)
    tree = in_order(nodes)
    tail = np.zeros((1, 8), np.int32)
    newest = text[::-1][:8]
    tail[0, : len(newest)] = newest
    tails, lens = np.empty((len(tree) + 1, width), np.int32), np.empty(len(tree) + 1, np.int32)
    order.node_tails(tree.token_ids, tree.parent, tail, len(text), tails, lens)
    for i in range(-1, len(tree)):
        path, at = [], i
        while at >= 0:
            path.append(int(tree.token_ids[at]))
            at = int(tree.parent[at])
        context = [*path, *text[::-1]][:width]
        assert lens[i + 1] == len(context)
        assert tails[i + 1, : len(context)].tolist() == context


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.25, 0.5]), st.integers(0, 3)), max_size=60), st.data())
def test_heap_breaks_ties_by_token_then_order(items, data):
    pool_p = np.array([p for p, _ in items], np.float32)
    pool_ids = np.array([[token, 0, 0] for _, token in items], np.int32).reshape(-1, 3)
    heap = np.empty(len(items) + 1, np.int32)
    size, waiting = 0, []
    for i in range(len(items)):
        expand._push(heap, size, i, pool_p, pool_ids)
        size += 1
        waiting.append(i)
        if data.draw(st.booleans()):
            first = min(waiting, key=lambda j: (-items[j][0], items[j][1], j))
            assert heap[0] == first
            expand._pop(heap, size, pool_p, pool_ids)
            waiting.remove(first)
            size -= 1
