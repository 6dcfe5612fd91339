from __future__ import annotations

import numpy as np
import pytest

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.server.branches import Branch, BranchCollector


def tree_of(*nodes):
    token_ids, parent = (np.array(column, np.int32) for column in zip(*nodes, strict=True))
    n = len(nodes)
    depth = np.ones(n, np.int32)
    for i, p in enumerate(parent):
        depth[i] = 1 if p < 0 else depth[p] + 1
    return DraftTree(token_ids, parent, depth, np.zeros(n, np.float32), np.zeros(n, np.uint8), np.full(n, -1, np.int64))


def shown(tree, path, emitted, top):
    ids = np.array([[i for i, _ in row] for row in top], np.int32)
    logits = np.array([[x for _, x in row] for row in top], np.float32)
    return VerifiedPass(tree, np.array(path, np.int32), np.array(emitted, np.int32), ids, logits)


# Beside 10 the tree holds 20, behind it 21 and 22, of which the target says 21, then 29.
TREE = tree_of((10, -1), (20, -1), (21, 1), (22, 1))
TOP = [
    [(10, 2.0), (20, 1.5), (30, -9.0)],
    [(11, 3.0), (12, 2.9), (13, -9.0)],
    [(21, 1.0), (22, 0.9), (23, -9.0)],
    [(29, 1.0), (28, -9.0), (27, -9.0)],
    [(26, 1.0), (25, -9.0), (24, -9.0)],
]


def test_a_branch_is_followed_by_what_the_target_says_there():
    collector = BranchCollector(follow=True)
    collector(shown(DraftTree(), [], [5], [[(5, 1.0), (6, 0.0), (7, -9.0)]]))
    collector(shown(TREE, [0], [10, 11], TOP))
    assert collector.likeliest() == [
        Branch(2, (12,), pytest.approx(np.exp(-0.1), abs=1e-6)),
        Branch(1, (20, 21, 29), pytest.approx(np.exp(-0.5), abs=1e-6)),
        Branch(0, (6,), pytest.approx(np.exp(-1.0), abs=1e-6)),
    ]


def test_sampled_text_is_not_followed_by_the_likeliest_tokens():
    collector = BranchCollector(follow=False)
    collector(shown(TREE, [0], [10, 11], TOP))
    assert [branch.token_ids for branch in collector.likeliest()] == [(12,), (20,)]


def test_a_run_cut_by_a_stop_has_no_branches_behind_it():
    collector = BranchCollector(follow=True)
    collector(shown(TREE, [0], [10], TOP))
    assert [branch.at for branch in collector.likeliest()] == [0]


def test_a_pass_without_logits_only_counts():
    collector = BranchCollector(follow=True)
    collector(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([1, 2, 3], np.int32)))
    collector(shown(TREE, [0], [10, 11], TOP))
    assert {branch.at for branch in collector.likeliest()} == {3, 4}
