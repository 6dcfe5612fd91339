"""Report of a generation: what it did, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.store import OriginRun, SourcedRun
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sampling.acceptance import Walk
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.verify.verifier import PassKind


class PassSeconds(NamedTuple):
    """Where the time of a pass went; of a shared pass, what one of its sequences took."""

    draft: float
    verify: float
    commit: float
    learn: float


class PassFigures(NamedTuple):
    """One pass in a report: nodes verified, how many were accepted and were expected to be, time of verifying."""

    nodes: int
    accepted: int
    expected: float
    verify_ms: float


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
        Figures of every pass after the prompt's, in order.
    origins
        With `provenance=True`: every accepted drafted run that a source read in one piece.
    provenance
        The same runs with the documents that contain them.
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
    per_pass: list[PassFigures] = field(default_factory=list)
    origins: list[OriginRun] = field(default_factory=list)
    provenance: list[SourcedRun] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens emitted per forward pass, the bonus token included."""
        return self.new_tokens / self.passes if self.passes else 0.0

    def add_pass(self, tree: DraftTree, walked: Walk, seconds: PassSeconds, provenance: bool = False) -> None:
        """Add a pass after the prompt's; with `provenance`, also where its accepted drafts came from."""
        self.passes += 1
        self.per_pass.append(
            PassFigures(len(tree), len(walked.path), tree.expected_accepted, verify_ms=seconds.verify * 1e3)
        )
        self.nodes += len(tree)
        self.draft_ms += seconds.draft * 1e3
        self.verify_ms += seconds.verify * 1e3
        self.commit_ms += seconds.commit * 1e3
        self.learn_ms += seconds.learn * 1e3
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


def origin_runs(origins: NDArray[np.int64], first: int) -> list[OriginRun]:
    """Cut accepted tokens (a,) with known origin into runs that a source read in one piece.

    `first` is the index of the first of them among the new tokens.
    """
    runs: list[OriginRun] = []
    for position, origin in enumerate(origins.tolist(), first):
        if origin < 0:
            continue
        if runs and runs[-1].is_continued_by(position, origin):
            runs[-1] = runs[-1]._replace(tokens=runs[-1].tokens + 1)
        else:
            runs.append(OriginRun(position, 1, origin))
    return runs
