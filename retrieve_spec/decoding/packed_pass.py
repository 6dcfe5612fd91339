"""Turns the trees of several rows of text into one recorded pass without padding, every row over its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.decoding.fast_verifier import StaticVerifier, run_rows
from retrieve_spec.decoding.verifier import VerifierOutput
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree


def forward_together(
    verifiers: Sequence[StaticVerifier],
    roots: Sequence[NDArray[np.int32]],
    trees: Sequence[DraftTree],
    want_hidden: Layer | None,
) -> list[VerifierOutput]:
    """Verify the trees of several texts in one pass; each text keeps its cache, and commits for itself.

    The recorded operations do not look beyond a row of the pass, so the texts stand one behind the other without
    padding; only the attention takes them apart.

    Parameters
    ----------
    verifiers
        By text; they share a recording, and have read their prompts.
    roots, trees
        By text: the last token, (1,), and the draft below it.
    want_hidden
        Return the hidden states of this layer too.

    Returns
    -------
    list
        By text, what its own `forward` would have returned.
    """
    laid = [v.lay_out(root, tree) for v, root, tree in zip(verifiers, roots, trees, strict=True)]
    ends = np.cumsum([len(ids) for ids, _ in laid]).tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        parts = [
            verifier.attend(query[:, :, span], keys[:, :, span], values[:, :, span], layer)
            for verifier, span in zip(verifiers, spans, strict=True)
        ]
        return torch.cat(parts, dim=1)

    ids = np.concatenate([ids for ids, _ in laid])
    positions = np.concatenate([depths + v.position for v, (_, depths) in zip(verifiers, laid, strict=True)])
    with verifiers[0].captured.on_device():
        logits, hidden = run_rows(verifiers[0].captured, ids, positions, attend)
    return [VerifierOutput(logits[span], None if want_hidden is None else hidden[span]) for span in spans]
