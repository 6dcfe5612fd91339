"""Collects, from every verified pass, what the target would have gone on with had it chosen another likely token.

A verified tree holds the target's own next tokens at every node, also beside the path that was taken: following them
costs no pass. A likely token that no node carries still is a beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.kernels.treemask import find_child

_RATIO = 0.1
"""Least probability of a branch's first token, as a share of the likeliest token's."""
_KEPT = 8


@dataclass(frozen=True, slots=True)
class Branch:
    """A completion that leaves the one that was given.

    Attributes
    ----------
    at
        How many tokens of the given completion come first.
    token_ids
        The tokens that follow; all but the first are the target's own choices.
    likelihood
        Probability of the first as a share of the likeliest token's there.
    """

    at: int
    token_ids: tuple[int, ...]
    likelihood: float


class BranchCollector:
    """Called with each verified pass of a generation, in order.

    Parameters
    ----------
    follow
        The target's next token is the likeliest one (greedy decoding), so that branches can be followed in the tree;
        otherwise only their first tokens are taken.
    """

    def __init__(self, *, follow: bool) -> None:
        self._follow = follow
        self._emitted = 0
        self._found: list[Branch] = []

    def __call__(self, verified: VerifiedPass) -> None:
        """Look beside the path of one pass."""
        if verified.top_ids is not None and verified.top_logits is not None:
            nodes = [-1, *verified.path.tolist()]
            for depth, (node, taken) in enumerate(zip(nodes, verified.emitted.tolist(), strict=False)):
                ids, logits = verified.top_ids[node + 1].tolist(), verified.top_logits[node + 1].tolist()
                for token_id, logit in zip(ids, logits, strict=True):
                    share = exp(min(0.0, logit - logits[0]))
                    if token_id != taken and share >= _RATIO:
                        branch = (token_id, *self._beyond(verified, node, token_id))
                        self._found.append(Branch(self._emitted + depth, branch, share))
        self._emitted += len(verified.emitted)

    def _beyond(self, verified: VerifiedPass, node: int, token_id: int) -> list[int]:
        """What the target says after a token that was not taken, as far as the tree goes."""
        out: list[int] = []
        tree, top = verified.tree, verified.top_ids
        assert top is not None
        while self._follow and (node := find_child(tree.parent, tree.token_ids, node, token_id)) >= 0:
            token_id = int(top[node + 1, 0])
            out.append(token_id)
        return out

    def likeliest(self) -> list[Branch]:
        """The branches found, the likeliest first; among equals the one that is further along."""
        return sorted(self._found, key=lambda branch: (-branch.likelihood, -len(branch.token_ids), branch.at))[:_KEPT]
