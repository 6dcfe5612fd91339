"""The comparison tool: adapters draft what the peers' rules say."""

from __future__ import annotations

import numpy as np
import peers

from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_transformers_lookup_takes_the_first_match_of_two_tokens():
    peer = peers.TransformersLookup()
    peer.start(ids(1, 2, 3, 4, 9, 1, 2, 7, 1))
    peer.observe(VerifiedPass(DraftTree(), ids(), ids(2)))
    assert peer.propose(Budget(60, 60)).token_ids.tolist()[:4] == [3, 4, 9, 1]
    assert len(peer.propose(Budget(2, 60))) == 2
    peer.feed(ids(77))
    assert len(peer.propose(Budget(60, 60))) == 0
