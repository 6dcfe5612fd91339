"""Running a pass: as a captured graph, in one launch per layer for all texts, or each text's attention by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.kernels.single_rows import attend_single_rows
from retrieve_spec.recorded.packed_pass import LaidOut, PackedPass, packs, shape_of
from retrieve_spec.recorded.pass_graphs import PassGraphs
from retrieve_spec.recorded.recorded_pass import Attend, RecordedPass
from retrieve_spec.verify.verifier import Ran

_LONG = 1024
"""Rows held from which several threads attend faster than one kernel does."""


class RowAttention:
    """The attention of one pass over several texts.

    Parameters
    ----------
    recorded
        The recorded pass.
    laid
        By text, its part of the pass.
    parts
        By text, its own attention in a layer (`RecordedVerifier.attend`).
    """

    def __init__(self, recorded: RecordedPass, laid: Sequence[LaidOut], parts: Sequence[Attend]) -> None:
        ends = np.cumsum([len(text.ids) for text in laid]).tolist()
        self._spans = spans = [slice(end - len(text.ids), end) for text, end in zip(laid, ends, strict=True)]
        self._recorded, self._parts = recorded, parts
        single = [i for i, text in enumerate(laid) if _is_served(text)]
        single.sort(key=lambda i: laid[i].cache.prefixes[:, 0].tobytes())  # those with one prompt side by side
        self._others = sorted(set(range(len(laid))) - set(single))
        self._rows = np.array([spans[i].start for i in single], np.int64)
        self._laid = [laid[i] for i in single]
        self._prefixes = [
            np.array(by_text) for by_text in zip(*(text.cache.prefixes for text in self._laid), strict=True)
        ]
        self._places = self._by_slab() if single else np.empty((0, 0, 4), np.int64)

    def _by_slab(self) -> NDArray[np.int64]:
        """(slabs, texts, 4): where the keys and values of a slab's first layer lie, its capacity, and rows held."""
        addresses = np.array([text.cache.addresses for text in self._laid])
        held = np.array([[text.held - slab.offset for slab in text.cache.slabs] for text in self._laid])
        return np.concatenate([addresses, held[:, :, None]], axis=2).swapaxes(0, 1)

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        """Write a layer's keys and values and attend: (1, heads, rows, d) in, (1, rows, heads, dv) out."""
        rule = self._recorded.rules[layer]
        whole = range(len(self._spans)) if rule.sinks is not None or not len(self._rows) else self._others
        parts = {}
        for i in whole:
            own_query, own_keys, own_values = (x[:, :, self._spans[i]] for x in (query, keys, values))
            parts[i] = self._parts[i](own_query, own_keys, own_values, layer)
        if len(parts) == len(self._spans):
            return torch.cat([parts[i] for i in range(len(parts))], dim=1)
        out = query.new_empty((1, query.shape[2], query.shape[1], values.shape[3]))
        cache = self._laid[0].cache
        places = self._places[cache.slab_of[layer]].copy()
        sizes = [x.shape[1] * x.shape[3] * x.element_size() for x in (keys, values)]
        places[:, :2] += cache.layer_in_slab[layer] * places[:, 2:3] * np.array(sizes)
        asked, new_keys, new_values = (x[0].contiguous().numpy() for x in (query, keys, values))
        attend_single_rows(
            asked,
            new_keys,
            new_values,
            self._rows,
            places,
            self._prefixes[layer],
            rule.scale,
            rule.softcap,
            rule.window,
            out[0].numpy(),
        )
        for i, part in parts.items():
            out[:, self._spans[i]] = part
        return out


def _is_served(text: LaidOut) -> bool:
    """Whether a text attends with others: it has one row, and keys and values that the kernel reads."""
    several = text.held > _LONG and torch.get_num_threads() > 1
    return len(text.ids) == 1 and text.cache.is_host_float32 and not several


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
