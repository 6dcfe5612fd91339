"""Random schedules: sequences join, are cancelled, fail, are interrupted and finish, and each says what it says alone.

`RETRIEVE_SPEC_SCHEDULES` (50) is how many there are of each kind of pass.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from interrupting import ctrl_c, python_handles_it

import retrieve_spec as rs
from retrieve_spec.engine import engine as batches
from retrieve_spec.engine.sequence import Sequence, Status

COUNT = int(os.environ.get("RETRIEVE_SPEC_SCHEDULES", "50"))
RULES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "seed": 3},
    {"do_sample": True, "top_k": 20, "temperature": 0.8, "seed": 4, "repetition_penalty": 1.2},
    {"do_sample": False, "draft": "off"},
]
REQUESTS: list[dict[str, Any]] = [
    {
        "inputs": [3 + (i * 37 + 11 * (row % 5) + 7) % 190 for i in range(1 + row % 5 * 9)],
        "max_new_tokens": 3 + row * 5 % 9,
    }
    | RULES[row % 4]
    for row in range(12)
]
"""Some have the same prompt."""


class Interruptions:
    """Interrupts passes, before the model runs or behind it, when told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.when = ""
        together = batches._together

        def passed(*given: Any, **named: Any) -> Any:
            when, self.when = self.when, ""
            if when == "before":
                ctrl_c()
            out = together(*given, **named)
            if when == "behind":
                ctrl_c()
            return out

        patch.setattr(batches, "_together", passed)


def failing(sequence: Sequence, tokens: int) -> None:
    """Let a sequence fail at one of its tokens, alone: nobody's Ctrl-C, but an exception that few expect."""
    stopper = sequence.stopper

    def stop(text: Any, token: int, scores: Any) -> bool:
        if len(text.new_ids) == tokens:
            raise KeyboardInterrupt
        return stopper(text, token, scores)

    sequence.stopper = stop  # type: ignore[assignment]


def schedule(model: Any, draw: np.random.Generator, interruptions: Interruptions) -> Iterator[tuple[int, Sequence]]:
    """Run one to its end: which request each sequence answered, and the sequence."""
    engine = model.speculation.engine
    requests = rs.generate_many(model, [])
    coming = draw.choice(len(REQUESTS), int(draw.integers(2, 6)), replace=False).tolist()
    live: list[tuple[int, Sequence]] = []
    while coming or live:
        if coming and (not live or draw.random() < 0.4):
            which = coming.pop()
            (sequence,) = requests._begin(which, REQUESTS[which])
            if draw.random() < 0.15:
                failing(sequence, int(draw.integers(1, 4)))
            engine.join(sequence)
            live.append((which, sequence))
        if draw.random() < 0.06:
            engine.leave(live[int(draw.integers(len(live)))][1])
        interruptions.when = str(draw.choice(["", "before", "behind"], p=[0.92, 0.04, 0.04]))
        asking = [s for _, s in live if draw.random() < 0.8] or [live[0][1]]
        try:
            with python_handles_it():
                engine.advance(asking)
        except KeyboardInterrupt:
            engine.leave(asking[0])
        for which, sequence in list(live):
            while sequence.reader.has_pieces:
                sequence.reader.take()
            if sequence.ended:
                live.remove((which, sequence))
                yield which, sequence
    assert engine._sequences == []


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
def test_random_schedules(tiny: Any, recorded_pass: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rs.accelerate(tiny, recorded_pass=recorded_pass, nodes=6)
    alone = [one.token_ids.tolist() for request in REQUESTS for one in rs.generate_many(tiny, [request])]
    interruptions = Interruptions(monkeypatch)
    ends = {"whole": 0, "cancelled": 0, "failed": 0}
    for seed in range(COUNT):
        for which, sequence in schedule(tiny, np.random.default_rng(seed), interruptions):
            said = sequence.text.new_ids.tolist()
            if sequence.status is Status.FINISHED:
                ends["whole"] += 1
                assert said == alone[which], (seed, which)
                continue
            ends["cancelled" if sequence.error is None else "failed"] += 1
            assert sequence.error is None or isinstance(sequence.error, KeyboardInterrupt), (seed, which)
            assert said == alone[which][: len(said)], (seed, which)
    assert ends["whole"] > 2 * COUNT
    assert min(ends["cancelled"], ends["failed"]) > COUNT // 5
