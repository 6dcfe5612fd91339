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
from retrieve_spec.recorded.row_attention import RowAttention
from retrieve_spec.verify.verifier import VerifierOutput


def forward_together(
    verifiers: Sequence[RecordedVerifier],
    roots: Sequence[NDArray[np.int32]],
    trees: Sequence[DraftTree],
    want_hidden: Layer | None,
    graphs: GraphedTexts | None = None,
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
    graphs
        Captured passes, which do not serve prompts.
    keeps
        By text, how many of its last root tokens to return logits and states for; None for all.

    Returns
    -------
    list
        By text, what its own `forward` would have returned.
    """
    laid = [v.begin(root, tree) for v, root, tree in zip(verifiers, roots, trees, strict=True)]
    spans = _spans([len(text.ids) for text in laid])
    recorded = verifiers[0].recorded
    if keeps is None:
        with recorded.on_device():
            logits, hidden = _run(verifiers, laid, spans, graphs)
        return [VerifierOutput(logits[span], None if want_hidden is None else hidden[span]) for span in spans]
    counts = [min(keep, len(root)) + len(tree) for keep, root, tree in zip(keeps, roots, trees, strict=True)]
    lasts = [np.arange(span.stop - count, span.stop) for span, count in zip(spans, counts, strict=True)]
    wanted = torch.from_numpy(np.concatenate(lasts)).to(recorded.device, non_blocking=True)
    with recorded.on_device():
        logits, hidden = _run(verifiers, laid, spans, None, wanted)
    if want_hidden is not None:
        hidden = hidden.index_select(0, wanted)
    return [VerifierOutput(logits[at], None if want_hidden is None else hidden[at]) for at in _spans(counts)]


def _run(
    verifiers: Sequence[RecordedVerifier],
    laid: Sequence[LaidOut],
    spans: list[slice],
    graphs: GraphedTexts | None,
    wanted: int | torch.Tensor = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the `wanted` rows (`RecordedPass.run`) and hidden states of all texts, one behind the other."""
    recorded = verifiers[0].recorded
    if packs(recorded, laid):
        if graphs is not None and (out := graphs.run(laid)) is not None:
            return out
        rows, texts = spans[-1].stop, len(laid)
        packed = PackedPass(recorded, laid, rows, texts, shares(recorded, laid, rows, texts))
        return packed(laid, wanted=wanted)

    attend = RowAttention(recorded, laid, spans, [verifier.attend for verifier in verifiers])
    ids = np.concatenate([text.ids for text in laid])
    positions = np.concatenate([text.depths + text.position for text in laid])
    return run_rows(recorded, ids, positions, attend, wanted)


def _spans(counts: Sequence[int]) -> list[slice]:
    """By text, its rows, of which there are so many."""
    ends = np.cumsum(counts).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
