"""Drafters over one session memory, and whatever moves its arrays while they draft, as a program of its own.

    python hammered_session.py SEED STEPS THREADS STORE

Run it with `MALLOC_PERTURB_` set: memory that was freed reads as garbage, and what is drafted from it is no token that
was ever written. With the compiler off, arrays are read through `ctypes` instead.
"""

import sys
import threading
from typing import Any

import numpy as np

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.sources.session import SessionMemory

TOKENS = 900
"""Token ids below this are written."""


class Request:
    """A drafter that drafts what follows a text which repeats itself and others."""

    def __init__(self, drafter: Any, rng: np.random.Generator) -> None:
        self.drafter, self.rng = drafter, rng
        self.open = False

    def step(self) -> None:
        """Begin, or take one pass, of a request."""
        if not self.open:
            self.text = np.concatenate([phrase(self.rng) for _ in range(12)])
            self.at = int(self.rng.integers(1, 20))
            self.drafter.start(self.text[: self.at])
            self.open = True
            return
        tree = self.drafter.propose(Budget(24, 12))
        tree.validate()
        written = (tree.token_ids >= 0) & (tree.token_ids < TOKENS)
        assert written.all(), f"drafted {tree.token_ids[~written]}, which nobody ever wrote"
        emitted = self.text[self.at : self.at + int(self.rng.integers(1, 9))]
        top = self.rng.integers(0, TOKENS, (len(tree) + 1, max(self.drafter.top_k, 1))).astype(np.int32)
        logits = -np.sort(-self.rng.normal(size=top.shape).astype(np.float32))
        self.drafter.observe(VerifiedPass(tree, np.empty(0, np.int32), emitted, top, logits))
        self.at += len(emitted)
        if self.at >= len(self.text) and self.rng.random() < 0.5:
            self.end()

    def end(self) -> None:
        """Finish the request, which is remembered."""
        if self.open:
            self.drafter.finish()
            self.open = False


def phrase(rng: np.random.Generator) -> np.ndarray:
    """Tokens that were written before, or new ones."""
    old = np.random.default_rng(int(rng.integers(0, 20)))
    made = old if rng.random() < 0.7 else rng
    return made.integers(0, TOKENS, int(made.integers(5, 40))).astype(np.int32)


def drafters(session: SessionMemory, store: Datastore) -> list[Any]:
    """Drafters of one session: the mixture, and the published methods that remember texts."""
    configs = [SpeculationConfig(draft=name) for name in ("suffix", "hierarchy")]
    presets = [build_drafter(config, datastores=[store], session=session) for config in configs]
    return [MixtureDrafter(session=session), MixtureDrafter(session=session, datastores=[store]), *presets]


def hammer(seed: int, steps: int, session: SessionMemory, store: Datastore) -> None:
    """Requests of several drafters in turns, ended in any order, while texts come in from elsewhere."""
    rng = np.random.default_rng(seed)
    requests = [Request(drafter, rng) for drafter in drafters(session, store)]
    for _ in range(steps):
        requests[int(rng.integers(0, len(requests)))].step()
        chance = rng.random()
        if chance < 0.03:
            session.remember(np.concatenate([phrase(rng) for _ in range(int(rng.integers(1, 40)))]))
        elif chance < 0.04:
            session.read(phrase(rng))
        elif chance < 0.06:
            requests[int(rng.integers(0, len(requests)))].end()
        elif chance < 0.07:
            requests[0] = Request(MixtureDrafter(session=session, datastores=[store]), rng)  # the old one is dropped
    for request in requests:
        request.end()


def main(seed: int, steps: int, threads: int, store: str) -> None:
    """Hammer one session from so many threads."""
    opened = open_datastore(store)
    session = SessionMemory(6000)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            hammer(seed + number, steps, session, opened)
        except BaseException as error:
            failed.append(error)
            raise

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        sys.exit(1)
    assert len(session) <= 6000
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
