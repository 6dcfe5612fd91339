"""Shared pass: the trees, or prompts, of several texts in one recorded pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.recorded.run_pass import run_pass
from retrieve_spec.verify.verifier import VerifierOutput


def forward_together(
    verifiers: Sequence[RecordedVerifier],
    roots: Sequence[NDArray[np.int32]],
    trees: Sequence[DraftTree],
    want_hidden: Layer | None,
    keeps: Sequence[int] | None = None,
) -> list[VerifierOutput]:
    """Verify the trees of several texts in one pass, or read their prompts; each keeps its cache, commits for itself.

    The recorded operations do not look beyond a row of the pass, so the texts stand one behind the other without
    padding between them; only the attention takes them apart.

    Parameters
    ----------
    verifiers
        By text; they share a recording.
    roots, trees
        By text: the last token, (1,), or a part of the prompt, (m,), and the draft below it.
    want_hidden
        Return the hidden states of this layer too.
    keeps
        By text, how many of its last root tokens to return logits and states for; None for all.

    Returns
    -------
    list
        By text, what its own `forward` would have returned.
    """
    laid = [v.begin(root, tree) for v, root, tree in zip(verifiers, roots, trees, strict=True)]
    ends = np.cumsum([len(text.ids) for text in laid]).tolist()
    counts = [len(text.ids) for text in laid]
    wanted = None
    if keeps is not None:
        counts = [min(keep, len(root)) + len(tree) for keep, root, tree in zip(keeps, roots, trees, strict=True)]
        wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    parts = [verifier.attend for verifier in verifiers]
    recorded = verifiers[0].recorded
    with recorded.on_device():
        logits, hidden, ran = run_pass(recorded, laid, parts, wanted, verifiers[0].graphs)
    outputs, begin = [], 0
    for end, count in zip(ends, counts, strict=True):
        states = None if want_hidden is None else hidden[end - count : end]
        outputs.append(VerifierOutput(logits[begin : begin + count], states, ran))
        begin += count
    return outputs
