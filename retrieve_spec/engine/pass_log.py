"""Passes as they happen in, what the report says of them and what the cost model learns from them out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.cost import CostModel
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.sampling.acceptance import Walk
from retrieve_spec.sources import SOURCE_NAMES

Seconds = tuple[float, float, float, float]
"""What a pass took: drafting, forward, commit, learning."""


class PassLog:
    """The passes of one row, taken down one pass late: while a device works on the next one.

    Parameters
    ----------
    report
        Where figures go, modified in place.
    cost
        Learns what passes take; None where a pass is not over this row alone.
    prompt_length
        Tokens of the row that were not generated.
    provenance
        Note where accepted drafts came from.
    """

    def __init__(self, report: GenerationReport, cost: CostModel | None, prompt_length: int, provenance: bool) -> None:
        self._report, self._cost, self._prompt_length, self._provenance = report, cost, prompt_length, provenance
        self._accepted = np.zeros(256, np.int64)  # by source
        self._passes: list[tuple[DraftTree, int, NDArray[np.uint8] | None, Seconds]] = []
        self._noted: tuple[DraftTree, Walk, Seconds, int] | None = None

    def note(self, tree: DraftTree, verified: Walk, seconds: Seconds, length: int) -> None:
        """Remember a pass, after which the row has `length` tokens, until there is time to take it down."""
        self._noted = (tree, verified, seconds, length)

    def take_down(self) -> None:
        """Enter the pass that was noted, and its time into the cost model."""
        if self._noted is None:
            return
        (tree, verified, seconds, length), self._noted = self._noted, None
        sources = tree.source[verified.path] if len(verified.path) else None
        if self._provenance and len(verified.path):
            first = length - self._prompt_length - len(verified.emitted)
            self._report.origins += origin_runs(tree.origin[verified.path], first)
        self._passes.append((tree, len(verified.emitted), sources, seconds))
        if self._cost is not None:
            drafted, forward, committed, learned = seconds
            self._cost.observe(len(tree), length, forward, drafted + committed + learned)

    def summary(self) -> GenerationReport:
        """Report of the passes so far."""
        self.take_down()
        report = self._report
        report.passes += len(self._passes)
        for tree, emitted, sources, (drafted, forward, committed, learned) in self._passes:
            accepted = 0 if sources is None else len(sources)
            report.per_pass.append((len(tree), accepted, tree.expected_accepted, forward * 1e3))
            report.nodes += len(tree)
            report.new_tokens += emitted
            report.draft_ms += drafted * 1e3
            report.verify_ms += forward * 1e3
            report.commit_ms += committed * 1e3
            report.learn_ms += learned * 1e3
            if sources is not None:
                np.add.at(self._accepted, sources, 1)
        self._passes.clear()
        names = SOURCE_NAMES
        report.accepted_by_source = {
            names[i] if i < len(names) else f"source {i}": int(self._accepted[i])
            for i in np.flatnonzero(self._accepted).tolist()
        }
        return report


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
