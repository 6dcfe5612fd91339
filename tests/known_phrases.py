"""What a phrase memory knows, read from its arrays."""

import numpy as np

from retrieve_spec.kernels.recycling import find, mix


def known(memory, context):
    """Continuations and their shares after exactly this context (oldest token first)."""
    h = np.uint64(0)
    for token in reversed(context):
        h = np.uint64(mix(h, token))
    e = find(memory.sets, h)
    kept = memory.tokens[e] >= 0 if e >= 0 else np.zeros(len(memory.tokens[0]), np.bool_)
    return dict(zip(memory.tokens[e][kept].tolist(), memory.probs[e][kept].tolist(), strict=True))
