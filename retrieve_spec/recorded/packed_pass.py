"""Packed pass: the trees of several rows of text in one recorded pass, every row over its own KV buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.recorded.cuda.packed_graphs import GraphedTexts, PackedPass, packs, shares
from retrieve_spec.recorded.pass_buffer import LaidOut
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier, run_rows
from retrieve_spec.verify.verifier import VerifierOutput


def forward_together(
    verifiers: Sequence[RecordedVerifier],
    roots: Sequence[NDArray[np.int32]],
    trees: Sequence[DraftTree],
    want_hidden: Layer | None,
    graphs: GraphedTexts | None = None,
) -> list[VerifierOutput]:
    """Verify the trees of several texts in one pass; each text keeps its cache, and commits for itself.

    The recorded operations do not look beyond a row of the pass, so the texts stand one behind the other without
    padding between them; only the attention takes them apart.

    Parameters
    ----------
    verifiers
        By text; they share a recording, and have read their prompts.
    roots, trees
        By text: the last token, (1,), and the draft below it.
    want_hidden
        Return the hidden states of this layer too.
    graphs
        Captured passes.

    Returns
    -------
    list
        By text, what its own `forward` would have returned.
    """
    laid = [v.begin(root, tree) for v, root, tree in zip(verifiers, roots, trees, strict=True)]
    spans = _spans(laid)
    with verifiers[0].recorded.on_device():
        logits, hidden = _run(verifiers, laid, spans, graphs)
    return [VerifierOutput(logits[span], None if want_hidden is None else hidden[span]) for span in spans]


def _run(
    verifiers: Sequence[RecordedVerifier], laid: Sequence[LaidOut], spans: list[slice], graphs: GraphedTexts | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden states of all texts, one behind the other."""
    recorded = verifiers[0].recorded
    if packs(recorded, laid):
        if graphs is not None and (out := graphs.run(laid)) is not None:
            return out
        rows, texts = spans[-1].stop, len(laid)
        return PackedPass(recorded, laid, rows, texts, shares(recorded, laid, rows, texts))(laid)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        parts = [
            verifier.attend(query[:, :, span], keys[:, :, span], values[:, :, span], layer)
            for verifier, span in zip(verifiers, spans, strict=True)
        ]
        return torch.cat(parts, dim=1)

    ids = np.concatenate([text.ids for text in laid])
    positions = np.concatenate([text.depths + text.position for text in laid])
    return run_rows(recorded, ids, positions, attend)


def _spans(laid: Sequence[LaidOut]) -> list[slice]:
    """By text, its rows of the pass."""
    ends = np.cumsum([len(text.ids) for text in laid]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
