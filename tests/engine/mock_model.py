"""A target whose next token is a function of the context, behind the verifier door, with the door's rules checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.engine.cost import CostModel, Costs
from retrieve_spec.engine.drafters import DrafterLease
from retrieve_spec.engine.engine import Engine
from retrieve_spec.engine.sequence import Limits, Sequence
from retrieve_spec.sampling.acceptance import GreedySampler, Sampler
from retrieve_spec.sampling.text import Stopper
from retrieve_spec.verify.verifier import Mode, VerifierInputs, VerifierOutput


class MockVerifier:
    """Computes logits row by row from the context each row stands for; `cache` is the list of committed tokens."""

    def __init__(self, logits_of: Callable[[list[int]], Any], mode: Mode = "tree") -> None:
        self.logits_of, self.mode, self.reason = logits_of, mode, ""
        self.pass_kind, self.pass_reason = "model's own", ""
        self.whole_prompts = mode == "plain"
        self.cache: list[int] = []
        self.passes: list[int] = []
        self._pending: tuple[list[int], Any] | None = None

    def start(self, inputs: VerifierInputs) -> None:
        self.cache = inputs.input_ids[0, : inputs.past_length].tolist()

    def forward(self, root_ids: Any, tree: Any = None, *, keep: int = 1, want_hidden: Any = None) -> VerifierOutput:
        assert self._pending is None, "forward before commit"
        self.passes.append(0 if tree is None else len(tree))
        roots = [int(token) for token in root_ids]
        contexts = [self.cache + roots[: len(roots) - i] for i in reversed(range(keep))]
        base = self.cache + roots
        for i in range(0 if tree is None else len(tree)):
            assert self.mode != "plain"
            path, at = [], i
            while at >= 0:
                path.append(int(tree.token_ids[at]))
                at = int(tree.parent[at])
            contexts.append(base + path[::-1])
        if tree is not None and self.mode == "chain":
            assert tree.is_chain
        self._pending = (roots, tree)
        rows = torch.stack([torch.as_tensor(self.logits_of(context), dtype=torch.float32) for context in contexts])
        hidden = torch.arange(len(contexts), dtype=torch.float32)[:, None] if want_hidden is not None else None
        return VerifierOutput(rows, hidden)

    def commit(self, path: Any) -> None:
        assert self._pending is not None, "commit before forward"
        roots, tree = self._pending
        self._pending = None
        self.cache += roots + [int(tree.token_ids[node]) for node in path]

    def finish(self) -> Any:
        return self.cache


def counting(vocab: int = 50) -> Callable[[list[int]], Any]:
    """The next token is the last one plus one, modulo the vocabulary."""

    def logits_of(context: list[int]) -> Any:
        row = np.zeros(vocab, np.float32)
        row[(context[-1] + 1) % vocab] = 3.0
        row[(context[-1] + 2) % vocab] = 1.0
        return row

    return logits_of


def sequence(
    verifier: MockVerifier,
    drafter: Any,
    prompt: list[int],
    *,
    max_length: int = 30,
    criteria: Any = (),
    sampler: Sampler | None = None,
    on_pass: Callable[[VerifiedPass], None] | None = None,
    **limits: Any,
) -> Sequence:
    """A sequence over a mock."""
    stopper = Stopper(criteria)
    stopper.max_length = max_length
    return Sequence(
        VerifierInputs(torch.tensor([prompt]), max_length=max_length),
        verifier,
        DrafterLease(lambda: drafter or "drafting is off", np.array(prompt, np.int32), None, on_pass),
        sampler or GreedySampler(),
        stopper,
        Limits(**{"nodes": 8, "max_depth": 100, "max_length": max_length} | limits),
    )


def passes(made: Sequence, cost: CostModel | None = None) -> Iterator[list[int]]:
    """What every pass of a sequence makes visible."""
    for _, visible in Engine(Costs(cost)).run([made]):
        if visible is not None:
            yield visible.tolist()
    if made.error is not None:
        raise made.error
