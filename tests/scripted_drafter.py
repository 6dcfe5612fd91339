"""A drafter that knows the answer and is wrong on request, so that acceptance is exact."""

from typing import Any

import numpy as np

from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sources import SOURCE_NAMES

SCRIPT = SOURCE_NAMES.index("script")
SCRIPTS = ("right", "wrong", "half", "branchy")


class ScriptedDrafter:
    """Proposes what `answer` (prompt and output) says next, in the manner of `script`.

    right: the next tokens. wrong: one wrong token after the other. half: the right tokens up to a changing depth, then
    wrong ones. branchy: a tree whose right path is never the first branch and ends at a changing depth. wide: every
    token behind every right one.
    """

    def __init__(
        self, answer: Any, script: str = "right", *, length: int = 6, vocab: int = 199, top_k: int = 4
    ) -> None:
        self.length, self.vocab = length, vocab
        self.top_k, self.wants_hidden = top_k, None
        self.turn_to(answer, script)

    def turn_to(self, answer: Any, script: str) -> None:
        """Begin anew with another answer and another manner."""
        self.answer, self.script = [int(token) for token in answer], script
        self.text: list[int] = []
        self.seen: list[VerifiedPass] = []
        self.budgets: list[Budget] = []
        self.prompt_rows: Any = None
        self.started = self.finished = 0

    def start(self, prompt_ids: Any, prediction_ids: Any = None) -> None:
        self.text = prompt_ids.tolist()
        self.prediction_ids = prediction_ids
        self.started += 1

    def observe_prompt(self, token_ids: Any, top_ids: Any, top_logits: Any) -> None:
        self.prompt_rows = (token_ids, top_ids, top_logits)

    def propose(self, budget: Budget) -> DraftTree:
        self.budgets.append(budget)
        at = len(self.text)
        right = self.answer[at : at + min(self.length, budget.max_depth)]
        right += [0] * (min(self.length, budget.max_depth) - len(right))
        turn = len(self.seen) % 3
        wrong = [(token + 1 + turn) % self.vocab for token in right]
        if self.script == "right":
            paths = [right]
        elif self.script == "wrong":
            paths = [wrong]
        elif self.script == "half":
            paths = [right[: 1 + turn] + wrong[1 + turn :]]
        elif self.script == "wide":
            paths = [right, *([*right[:depth], token] for depth in range(len(right)) for token in range(self.vocab))]
        else:
            keep = 1 + turn
            other = [(token + 5) % self.vocab for token in right]
            paths = [wrong[:2], right[:1] + wrong[1:3], right[:keep] + other[keep:], other[:2]]
        tree = DraftTree.from_paths([path for path in paths if path])
        kept = min(len(tree), budget.max_nodes)
        left = tree.first(kept)
        left.source = np.full(kept, SCRIPT, np.uint8)
        return left

    def observe(self, verified: VerifiedPass) -> None:
        self.text.extend(verified.emitted.tolist())
        self.seen.append(verified)

    def finish(self) -> None:
        self.finished += 1
