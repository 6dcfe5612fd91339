"""Trees as the paths of their nodes."""


def paths_of(tree):
    """Token path of every node."""
    paths = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parent.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def leaf_paths(tree):
    """Paths from the root to every leaf, in the order of the tree."""
    tree.validate()
    inner = set(tree.parent.tolist())
    return [path for i, path in enumerate(paths_of(tree)) if i not in inner]
