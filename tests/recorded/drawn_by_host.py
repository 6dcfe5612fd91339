"""What the Triton kernels that choose tokens compute, by the host's sampler and by a sort: slow, obvious twins."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import torch

from retrieve_spec.kernels import sampling


def draw_row(values: Any, rules: Any) -> int:
    """The token of one row; -1 where it is no distribution."""
    if not np.isfinite(values.max()):
        return -1
    ids, scores = np.empty(len(values), np.int32), np.empty(len(values), np.float64)
    least = math.exp(rules["log_min_p"])
    count = sampling.truncate_row(values, rules["temperature"], rules["top_k"], rules["top_p"], least, ids, scores)
    noisy = [
        score - math.log(-math.log(sampling.uniform(rules["key"], token)))
        for token, score in zip(ids[:count].tolist(), scores[:count].tolist(), strict=True)
    ]
    return int(ids[int(np.argmax(noisy))])


@torch.library.custom_op("pretended::draw", mutates_args=())
def draw_rows(scores: torch.Tensor, described: torch.Tensor) -> torch.Tensor:
    """(rows,) int64, by the bits of (rows, 5) rules."""
    fields = [("key", np.uint64), ("temperature", float), ("top_k", np.int64), ("top_p", float), ("log_min_p", float)]
    rules = described.numpy().view(fields)[:, 0]
    rows = zip(scores.float().numpy(), rules, strict=True)
    return torch.tensor([draw_row(values, own) for values, own in rows], dtype=torch.long)


def triton_sampling_twin() -> ModuleType:
    """What `retrieve_spec.kernels.triton_sampling` computes, on any device."""
    module: Any = ModuleType("retrieve_spec.kernels.triton_sampling")

    def sample_rows(scores: torch.Tensor, rules: Any) -> torch.Tensor:
        assert scores.stride(1) == 1
        described = torch.from_numpy(rules.view(np.int64).reshape(len(rules), -1)).to(scores.device, non_blocking=True)
        return torch.ops.pretended.draw(scores, described)

    module.sample_rows = sample_rows
    return module


@torch.library.custom_op("pretended::pack_largest", mutates_args=())
def pack_rows(logits: torch.Tensor, k: int, chosen: torch.Tensor | None) -> torch.Tensor:
    """(rows, 2 + 2 · k) int32; NaN is not looked at."""
    values, ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    last = ids[:, :1] if chosen is None else chosen[:, None]
    return torch.cat([ids[:, :1], ids[:, :k], values[:, :k].view(torch.int32), last], -1).int()


def triton_topk_twin() -> ModuleType:
    """What `retrieve_spec.kernels.triton_topk` computes, on any device."""
    module: Any = ModuleType("retrieve_spec.kernels.triton_topk")

    def pack_largest(logits: torch.Tensor, k: int, chosen: torch.Tensor | None) -> torch.Tensor:
        assert logits.stride(1) == 1
        return torch.ops.pretended.pack_largest(logits, k, chosen)

    module.pack_largest = pack_largest
    return module
