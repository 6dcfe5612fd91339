"""Random requests in, every drafted tree out; as a program it prints them, so that two interpreters can compare."""

import json
import sys
from typing import Any

import numpy as np

from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget, NoiseKey, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.sources.session import SessionMemory

COST = (1.0 + 0.02 * np.arange(25)).astype(np.float32)


def drafted(seed: int, store: str | None) -> list[dict[str, Any]]:
    """Trees of four requests over a small alphabet, with a session, expected texts, top tokens, costs and noise."""
    rng = np.random.default_rng(seed)
    drafter = MixtureDrafter(session=SessionMemory(400), datastores=[open_datastore(store)] if store else [])
    trees = []
    for request in range(4):
        alphabet = int(rng.integers(2, 9))
        text = rng.integers(0, alphabet, 120).astype(np.int32)
        text[60:90] = text[10:40]
        at = int(rng.integers(1, 30))
        drafter.start(text[:at], text[20:70] if request % 2 else None)
        while at < len(text):
            noise = NoiseKey(seed, 0, at) if request >= 2 else None
            tree = drafter.propose(Budget(24, 12, COST if request == 3 else None, noise))
            tree.validate()
            trees.append({name: getattr(tree, name).tolist() for name in ("token_ids", "parent", "log_p", "source")})
            emitted = text[at : at + int(rng.integers(1, 5))]
            top = rng.integers(0, alphabet, (len(tree) + 1, drafter.top_k)).astype(np.int32)
            logits = -np.sort(-rng.normal(size=top.shape).astype(np.float32))
            drafter.observe(VerifiedPass(tree, np.empty(0, np.int32), emitted, top, logits))
            at += len(emitted)
        drafter.finish()
    return trees


if __name__ == "__main__":
    print(json.dumps(drafted(int(sys.argv[1]), sys.argv[2] or None)))
