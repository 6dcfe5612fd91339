"""Pass log: what the report says of the passes of one generation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.sampling.acceptance import Walk
from retrieve_spec.sources import SOURCE_NAMES

Seconds = tuple[float, ...]
"""What a pass took: drafting, forward, commit, learning."""


class PassLog:
    """The passes of one sequence behind its prompt's, entered in its report when that is asked for.

    Parameters
    ----------
    report
        Where figures go, modified in place.
    prompt_length
        Tokens of the text that were not generated.
    provenance
        Note where accepted drafts came from.

    Attributes
    ----------
    drafted
        Whether the last pass was one over a draft.
    """

    def __init__(self, report: GenerationReport, prompt_length: int, provenance: bool) -> None:
        self._report, self._prompt_length, self._provenance = report, prompt_length, provenance
        self._accepted = np.zeros(256, np.int64)  # by source
        self._passes: list[tuple[DraftTree, Walk, Seconds, int]] = []
        self.drafted = False

    def note(self, tree: DraftTree, walked: Walk, seconds: Seconds, length: int) -> None:
        """Remember a pass, after which the text has `length` tokens."""
        self.drafted = len(tree) > 0
        self._passes.append((tree, walked, seconds, length))

    def summary(self) -> GenerationReport:
        """Report of the passes so far."""
        report = self._report
        report.passes += len(self._passes)
        for tree, walked, (drafted, forward, committed, learned), length in self._passes:
            accepted, emitted = len(walked.path), len(walked.emitted)
            report.per_pass.append((len(tree), accepted, tree.expected_accepted, forward * 1e3))
            report.nodes += len(tree)
            report.new_tokens += emitted
            report.draft_ms += drafted * 1e3
            report.verify_ms += forward * 1e3
            report.commit_ms += committed * 1e3
            report.learn_ms += learned * 1e3
            if accepted:
                np.add.at(self._accepted, tree.source[walked.path], 1)
                if self._provenance:
                    first = length - self._prompt_length - emitted
                    report.origins += origin_runs(tree.origin[walked.path], first)
        self._passes.clear()
        report.accepted_by_source = {
            SOURCE_NAMES[i] if i < len(SOURCE_NAMES) else f"source {i}": int(self._accepted[i])
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
