"""Ranks of a tensor-parallel model: processes that must run the same passes, so one of them decides for all.

Every rank computes its part of each layer and waits for the others' parts. If one of them drafts another width, or ends
a generation elsewhere, they wait for ever or read each other's numbers. So whatever depends on a clock, on chance or on
files is decided on the first rank and broadcast: drafts, seeds, and criteria that depend on more than the text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Budget, Drafter, VerifiedPass
from retrieve_spec.drafting.tree import FIELDS, DraftTree
from retrieve_spec.errors import RankError

_BY_TEXT = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
"""Criteria that end a text at the same token on every rank."""
_FAILED = -1
"""What the first rank sends in place of a decision that raised."""


class Ranks:
    """The processes that hold one model, and the first of them, which decides.

    Parameters
    ----------
    group
        Their process group.
    device
        Where its backend takes tensors from.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._first = dist.get_global_rank(group, 0)
        self.decides = dist.get_rank(group) == 0

    @staticmethod
    def of(model: Any) -> Ranks | None:
        """Return the ranks of a model whose weights are spread over processes; None for any other."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        for parameter in model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.size() > 1:
                return Ranks(_group_of(mesh), parameter.to_local().device)
        return None

    def broadcast(self, decide: Callable[[], NDArray[np.int64]], size: int) -> NDArray[np.int64]:
        """Return the (size,) decision of the first rank, whose first number is not negative; the others do not call
        `decide`.

        Raises
        ------
        RankError
            `decide` raised on the first rank, where its exception is raised as it is.
        """
        values = np.full(size, _FAILED)
        try:
            if self.decides:
                values = decide()
        finally:  # the others wait for it
            sent = torch.from_numpy(values).to(self._device)
            dist.broadcast(sent, self._first, group=self._group)
        values = sent.cpu().numpy()
        if values[0] == _FAILED:
            raise RankError(
                "to go on", "the first rank raised an exception", "Look at that rank's output, then start again."
            )
        return values

    def seed(self, seed: int | None) -> int | None:
        """Return the first rank's seed; None stays None, since greedy decoding has none on any rank."""
        return seed if seed is None else int(self.broadcast(lambda: np.array([0, seed]), 2)[1])

    def drafter(self, drafter: Drafter) -> Drafter:
        """Return a drafter whose trees are those of the first rank."""
        return _SharedDrafter(drafter, self)

    def criteria(self, criteria: Iterable[Any]) -> list[Any]:
        """Return stopping criteria that end a text where those of the first rank do."""
        return [c if type(c) in _BY_TEXT else _shared_criterion(c, self) for c in criteria]


def why_in_step(model: Any) -> str:
    """Why `generate` must keep processes with texts of their own in step; empty when it need not."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    from torch.distributed.fsdp import FSDPModule
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    managed = getattr(model, "_is_fsdp_managed_module", False) or isinstance(model, FSDPModule)
    sharded = managed or is_deepspeed_zero3_enabled()
    return "processes that share their weights (FSDP, ZeRO-3) generate in step" if sharded else ""


def _group_of(mesh: Any) -> Any:
    """The process group that a weight is spread over: that of tensor parallelism where the mesh has more axes."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if "tp" in (mesh.mesh_dim_names or ()):
        return mesh.get_group("tp")
    return dist.group.WORLD


def _shared_criterion(criterion: Any, ranks: Ranks) -> Callable[..., torch.Tensor]:
    """The answers of the first rank's criterion; it is called on every rank, as it may count its calls."""

    def ask(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        def decide() -> NDArray[np.int64]:
            return np.array([bool(torch.as_tensor(criterion(input_ids, scores, **kwargs)).all())], np.int64)

        if not ranks.decides:
            with contextlib.suppress(Exception):  # only the first rank's results and exceptions count
                decide()
        return torch.tensor(bool(ranks.broadcast(decide, 1)[0]))

    return ask


class _SharedDrafter:
    """The first rank's drafter on all ranks: it alone looks things up, learns and keeps.

    Its exceptions are raised where the others wait for it: at the next draft, or at the end.
    """

    def __init__(self, drafter: Drafter, ranks: Ranks) -> None:
        self.top_k, self.wants_hidden = drafter.top_k, drafter.wants_hidden
        self._ranks, self._drafter = ranks, drafter
        self._error: Exception | None = None

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        self._run_if_deciding(lambda: self._drafter.start(prompt_ids, prediction_ids))

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        self._run_if_deciding(lambda: self._drafter.observe_prompt(token_ids, top_ids, top_logits))

    def observe(self, verified: VerifiedPass) -> None:
        self._run_if_deciding(lambda: self._drafter.observe(verified))

    def propose(self, budget: Budget) -> DraftTree:
        def decide() -> NDArray[np.int64]:
            self._raise()
            return _packed(self._drafter.propose(budget))

        return _unpacked(self._ranks.broadcast(decide, 1 + len(FIELDS) * MAX_NODES))

    def finish(self) -> None:
        self._run_if_deciding(self._drafter.finish)
        self._raise()

    def _run_if_deciding(self, action: Callable[[], None]) -> None:
        if self._ranks.decides and self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _packed(tree: DraftTree) -> NDArray[np.int64]:
    """Return a tree as an array of fixed size: the number of nodes, then each of its arrays with room for the largest
    tree.
    """
    out = np.zeros(1 + len(FIELDS) * MAX_NODES, np.int64)
    out[0] = len(tree)
    for row, name in zip(out[1:].reshape(len(FIELDS), MAX_NODES), FIELDS, strict=True):
        array = getattr(tree, name)
        row[: len(tree)] = array.view(np.int32) if name == "log_p" else array
    return out


def _unpacked(numbers: NDArray[np.int64]) -> DraftTree:
    """Return the tree that was packed."""
    rows = dict(zip(FIELDS, numbers[1:].reshape(len(FIELDS), MAX_NODES)[:, : numbers[0]], strict=True))
    return DraftTree(
        rows["token_ids"].astype(np.int32),
        rows["parent"].astype(np.int32),
        rows["depth"].astype(np.int32),
        rows["log_p"].astype(np.int32).view(np.float32),
        rows["source"].astype(np.uint8),
        rows["origin"].copy(),
    )
