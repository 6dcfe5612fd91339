"""Drafting: one draft tree out of the text so far and every open source; for any engine, without torch.

A `Drafter` is asked for a `DraftTree` within a `Budget` before every pass of the model, and told by a `VerifiedPass`
what the pass showed. `MixtureDrafter` drafts from all sources at once::

    drafter = MixtureDrafter()
    drafter.prepare()                             # once: kernels are compiled, or loaded from Numba's cache
    drafter.start(prompt_ids)                     # (L,) int32
    drafter.observe(VerifiedPass(DraftTree(), path=nothing, emitted=first_token))
    while generating:
        tree = drafter.propose(Budget(max_nodes=32, max_depth=16))
        ...                                       # one pass over the last token and all nodes: `tree.ancestors`
        drafter.observe(VerifiedPass(tree, tree.path_along(emitted), emitted, top_ids, top_logits))
    drafter.finish()
"""

from retrieve_spec.drafting.drafter import Budget, Drafter, NoiseKey, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree

__all__ = ["Budget", "DraftTree", "Drafter", "MixtureDrafter", "NoiseKey", "VerifiedPass"]
