"""Logits of a pass: what the walk and the drafter need of them on the host."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.errors import in_a_line
from retrieve_spec.kernels.topk import BLOCK, row_topk

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PassLogits:
    """Logits of one pass, read to the host only as far as needed.

    Attributes
    ----------
    logits
        (rows, vocab), on the model's device, any float dtype.
    top_ids, top_logits
        (rows, k) int32 and float32, most probable first, k >= 1; column 0 is the argmax (the
        first NaN where there is one).
    chosen
        (rows,) int32 tokens that were chosen on the device, -1 where the host chooses; None when the host chooses all.
    """

    logits: torch.Tensor
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    _host: NDArray[np.float32] | None = None
    chosen: NDArray[np.int32] | None = None

    def row(self, i: int) -> NDArray[np.float32]:
        """(vocab,) float32 logits of one row on the host."""
        row: NDArray[np.float32]
        row = self._host[i] if self._host is not None else self.logits[i].float().cpu().numpy()
        return row


def read_logits(logits: torch.Tensor, top_k: int) -> PassLogits:
    """Find the `top_k` (at least 1) largest entries of every row, with one copy from the device."""
    if logits.device.type != "cpu":
        return read_packed(logits, top_k, None)
    k = min(max(top_k, 1), logits.shape[-1])
    rows = logits if logits.dtype == torch.float32 else logits.float()
    rows = rows if rows.is_contiguous() else rows.contiguous()
    host = rows.numpy()
    ids = np.empty((len(host), k), np.int32)
    values = np.empty((len(host), k), np.float32)
    full = host.shape[1] // BLOCK
    blocks = rows if full * BLOCK == host.shape[1] else rows[:, : full * BLOCK]
    maxima = blocks.view(len(host), full, BLOCK).amax(-1).numpy() if full else host[:, :0]
    if row_topk(host, maxima, ids, values):
        _put_nan_first(host, ids)
    return PassLogits(logits, ids, values, host)


def read_side_by_side(parts: Sequence[torch.Tensor], top_k: int) -> list[PassLogits]:
    """`read_logits` of the rows of several texts, at once for those that one pass left behind one another in memory."""
    found = []
    for run in _runs(parts):
        rows, vocabulary = sum(map(len, run)), run[0].shape[1]
        whole = run[0] if len(run) == 1 else run[0].as_strided((rows, vocabulary), (vocabulary, 1))
        read, first = read_logits(whole, top_k), 0
        for part in run:
            at = slice(first, first + len(part))
            host = None if read._host is None else read._host[at]
            found.append(PassLogits(part, read.top_ids[at], read.top_logits[at], host))
            first += len(part)
    return found


def _runs(parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The parts, those together that stand behind one another in memory."""
    runs: list[list[torch.Tensor]] = []
    for part in parts:
        if runs and _follows(part, runs[-1][-1]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _follows(part: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a part begins where the one before it ends."""
    alike = part.dtype == before.dtype and part.shape[1:] == before.shape[1:]
    beside = part.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    whole = part.is_contiguous() and before.is_contiguous()
    return alike and beside and whole and part.storage_offset() == before.storage_offset() + before.numel()


def _put_nan_first(host: NDArray[np.float32], ids: NDArray[np.int32]) -> None:
    """Let the first NaN of a row be its argmax, as in torch: a model that overflowed decodes as it does plainly."""
    for r in np.flatnonzero(np.isnan(host).any(axis=1)):
        nan = int(np.isnan(host[r]).argmax())
        ids[r] = np.concatenate([[nan], ids[r][ids[r] != nan]])[: ids.shape[1]]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one, to which kernels and graphs go; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


Pack = Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]
"""`kernels.triton_topk.pack_largest`, or what does the same."""


def read_packed(logits: torch.Tensor, top_k: int, chosen: torch.Tensor | None) -> PassLogits:
    """Copy the `top_k` largest entries of every row and the tokens `chosen` (rows,) on the device at once."""
    k = min(max(top_k, 1), logits.shape[-1])
    with on_device(logits.device):
        packed = packing(logits.device.type)(logits, k, chosen).cpu().numpy()  # the one wait for the device in a step
    ids = np.ascontiguousarray(packed[:, 1 : k + 1])
    for r in np.flatnonzero(ids[:, 0] != packed[:, 0]):
        ids[r] = np.concatenate([packed[r, :1], ids[r][ids[r] != packed[r, 0]]])[:k]
    values = np.ascontiguousarray(packed[:, k + 1 : 2 * k + 1]).view(np.float32)
    return PassLogits(logits, ids, values, chosen=None if chosen is None else packed[:, -1])


@functools.cache
def packing(device: str) -> Pack:
    """What packs the largest entries on a kind of device: on a GPU Triton's kernels, if they give what torch gives."""
    if device != "cuda":
        return _pack
    try:
        from retrieve_spec.kernels.triton_topk import pack_largest

        logits = torch.arange(5000.0, device=device).roll(700).view(2, 2500)
        if not torch.equal(pack_largest(logits, 8, logits[:, 0].long()), _pack(logits, 8, logits[:, 0].long())):
            raise ValueError("other tokens than by torch")
    except Exception as error:  # whatever the compiler raises: torch packs the same
        logger.warning("the most probable tokens are found by torch: %s", in_a_line(error))
        return _pack
    return pack_largest


def _pack(logits: torch.Tensor, k: int, chosen: torch.Tensor | None) -> torch.Tensor:
    """`pack_largest` by torch, but for the order of equal logits."""
    values, ids = torch.topk(logits, k, dim=-1)
    best = logits.argmax(dim=-1)  # ties go to the lowest id, which topk does not promise
    parts = [best.int()[:, None], ids.int(), values.float().view(torch.int32)]
    return torch.cat([*parts, (best if chosen is None else chosen).int()[:, None]], dim=-1)
