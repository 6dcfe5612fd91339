"""What holds for every draft."""

import numpy as np

from retrieve_spec.kernels.treemask import unpacked
from retrieve_spec.sources import SOURCE_NAMES


def check_draft(tree, budget):
    tree.validate()
    assert len(tree) <= budget.max_nodes
    assert (tree.depth <= budget.max_depth).all()
    assert (tree.log_p <= 0).all() and np.isfinite(tree.log_p).all()
    assert (tree.source < len(SOURCE_NAMES)).all()
    siblings: dict[int, float] = {}
    for parent, log_p in zip(tree.parent.tolist(), tree.log_p.tolist(), strict=True):
        assert log_p <= siblings.get(parent, 0.0) + 1e-6, "a less probable sibling comes first"
        siblings[parent] = log_p
    above = unpacked(tree.ancestors)
    assert all(p < 0 or above[i - 1, p] for i, p in enumerate(tree.parent.tolist())), "depth-first"
