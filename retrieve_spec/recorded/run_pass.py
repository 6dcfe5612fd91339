"""Running a pass: as a captured graph, in one launch per layer for all texts, or each text's attention by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.recorded.cuda.pass_graphs import PassGraphs
from retrieve_spec.recorded.packed_pass import PackedPass, packs, shape_of
from retrieve_spec.recorded.pass_buffer import LaidOut
from retrieve_spec.recorded.recorded_pass import Attend, RecordedPass
from retrieve_spec.recorded.row_attention import RowAttention
from retrieve_spec.verify.verifier import Ran


def run_pass(
    recorded: RecordedPass,
    laid: Sequence[LaidOut],
    attend: Sequence[Attend],
    wanted: NDArray[np.int64] | None,
    graphs: PassGraphs | None,
) -> tuple[torch.Tensor, torch.Tensor, Ran]:
    """Run a pass over the rows of some texts, one behind the other.

    Parameters
    ----------
    recorded
        The recorded pass.
    laid
        By text, its part of the pass.
    attend
        By text, its own attention in a layer.
    wanted
        Rows whose logits are wanted, ascending; None for all.
    graphs
        Captured passes.

    Returns
    -------
    logits
        (wanted, vocab), valid until the next pass.
    hidden
        (rows, d), of all rows.
    ran
        How it was run.
    """
    if graphs is not None and (replayed := graphs.run(laid, wanted)) is not None:
        return replayed
    rows = sum(len(text.ids) for text in laid)
    if len(laid) > 1 and packs(recorded, laid):
        for text in laid:
            text.cache.settle()
        shape = shape_of(recorded, laid, rows, len(laid), 0 if wanted is None else len(wanted))
        packed = PackedPass(recorded, laid[0].cache, shape)
        packed.fill(laid, wanted)
        packed.run()
        return (*packed.outputs, Ran.EAGER)
    ids = np.concatenate([text.ids for text in laid]).astype(np.int64)
    positions = np.concatenate([text.depths + text.position for text in laid])
    together = attend[0] if len(laid) == 1 else RowAttention(recorded, laid, attend)
    some: int | torch.Tensor = 0
    if wanted is not None:
        ends_it = len(wanted) == rows - wanted[0]
        some = int(wanted[0]) if ends_it else _to(recorded, wanted)
    logits, hidden = recorded.run(_to(recorded, ids)[None], _to(recorded, positions)[None], together, some)
    return logits[0], hidden[0], Ran.EAGER


def _to(recorded: RecordedPass, numbers: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(numbers).to(recorded.device, non_blocking=True)
