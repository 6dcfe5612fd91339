"""Report of a generation: what it did, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.store import SourcedRun
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sampling.acceptance import Walk
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.verify.verifier import PassKind


@dataclass(slots=True)
class GenerationReport:
    """Facts about one generation, as found in `model.speculation.last`.

    Attributes
    ----------
    mode
        `"tree"`, `"chain"` or `"plain"` (decoded here), or `"delegated"` (the original `generate` ran).
    reason
        Why the mode is not `"tree"`; empty when it is.
    pass_kind
        What ran the model: its `"recorded"` pass, the `"model's own"` forward over drafts, or its forward token by
        token (`"plain"`).
    pass_reason
        Why nothing faster did; empty for the recorded pass.
    new_tokens
        Tokens emitted.
    passes
        Forward passes of the target, the prompt's not counted among them beyond the first.
    ran
        How many passes, the prompt's among them, were replayed as CUDA graphs (`"replayed"`), captured as such
        (`"captured"`) or run operation by operation (`"eager"`, as all are on a CPU).
    eager_reason
        Why the last pass on a GPU that was not replayed was not.
    threads
        Threads that the last passes used on a CPU, chosen by their times (the user's setting or fewer); 0 elsewhere.
    rows
        Rows of text decoded together; all other figures count the tokens and passes of all rows together, `per_pass`
        lists one row's passes after the other's, and `origins` and `provenance` stay empty when there are several.
    nodes
        Draft nodes verified, over all passes.
    accepted_by_source
        Accepted draft tokens by name of the source credited with them.
    prefill_ms, draft_ms, verify_ms, commit_ms, learn_ms
        Where the time went, summed over the generation, in milliseconds.
    began, seconds
        When it started, by `time.perf_counter`, and its wall time.
    per_pass
        (nodes, accepted, expected to be accepted, verify ms) of every pass after the prompt's, in order.
    origins
        With `provenance=True`: (index of the first token among the new ones, number of tokens, origin of the first) of
        every accepted drafted run that a source read in one piece.
    provenance
        The same runs with the documents they stand in.
    """

    mode: Literal["tree", "chain", "plain", "delegated"] = "plain"
    reason: str = ""
    pass_kind: PassKind = "plain"
    pass_reason: str = ""
    ran: dict[str, int] = field(default_factory=dict)
    eager_reason: str = ""
    threads: int = 0
    new_tokens: int = 0
    passes: int = 0
    rows: int = 1
    nodes: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    learn_ms: float = 0.0
    began: float = 0.0
    seconds: float = 0.0
    per_pass: list[tuple[int, int, float, float]] = field(default_factory=list)
    origins: list[tuple[int, int, int]] = field(default_factory=list)
    provenance: list[SourcedRun] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens emitted per forward pass, the bonus token included."""
        return self.new_tokens / self.passes if self.passes else 0.0

    def note(self, tree: DraftTree, walked: Walk, seconds: Many[float], provenance: bool = False) -> None:
        """Enter a pass after the prompt's, and what it took to draft, verify, commit and learn.

        With `provenance`, note where accepted drafts came from.
        """
        self.passes += 1
        self.per_pass.append((len(tree), len(walked.path), tree.expected_accepted, seconds[1] * 1e3))
        self.nodes += len(tree)
        for name, took in zip(("draft_ms", "verify_ms", "commit_ms", "learn_ms"), seconds, strict=True):
            setattr(self, name, getattr(self, name) + took * 1e3)
        for number in tree.source[walked.path].tolist():
            name = SOURCE_NAMES[number] if number < len(SOURCE_NAMES) else f"source {number}"
            self.accepted_by_source[name] = self.accepted_by_source.get(name, 0) + 1
        if provenance:
            self.origins += origin_runs(tree.origin[walked.path], self.new_tokens)
        self.new_tokens += len(walked.emitted)


def together(parts: Many[GenerationReport], passes: int) -> GenerationReport:
    """Reports of sequences that shared `passes` passes as one."""
    first = parts[0]
    whole = GenerationReport(first.mode, first.reason, first.pass_kind, first.pass_reason)
    whole.rows, whole.passes, whole.threads = len(parts), passes, parts[-1].threads
    longest = max(parts, key=lambda part: sum(part.ran.values()))  # the others shared its passes
    whole.ran, whole.eager_reason = longest.ran, longest.eager_reason
    whole.began = min(part.began for part in parts)
    whole.seconds = max(part.began + part.seconds for part in parts) - whole.began
    for part in parts:
        for name in ("new_tokens", "nodes", "prefill_ms", "draft_ms", "verify_ms", "commit_ms", "learn_ms"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.per_pass += part.per_pass
        for source, count in part.accepted_by_source.items():
            whole.accepted_by_source[source] = whole.accepted_by_source.get(source, 0) + count
    return whole


def origin_runs(origins: NDArray[np.int64], first: int) -> list[tuple[int, int, int]]:
    """Cut accepted tokens (a,) with known origin into (index, length, origin) runs that a source read in one piece.

    `first` is the index of the first of them among the new tokens.
    """
    runs: list[tuple[int, int, int]] = []
    for i, origin in enumerate(origins.tolist()):
        if origin < 0:
            continue
        if runs:
            index, length, begin = runs[-1]
            if index + length == first + i and begin + length == origin:
                runs[-1] = (index, length + 1, begin)
                continue
        runs.append((first + i, 1, origin))
    return runs
