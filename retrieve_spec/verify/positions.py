"""Derived positions: models that count positions themselves are told those of a draft tree, module by module.

Such a model hands `past + 0 … n - 1` to a module that embeds positions, or buckets of distances to one that embeds
those, or `past` to one that counts on from there. A pass over a chain shows which modules these are; in a pass over a
tree they get, or give, what belongs to the positions of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from retrieve_spec.drafting.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Place:
    """An argument of a module's forward that holds positions, or what a forward makes of them.

    Attributes
    ----------
    module
        Whose forward.
    key
        Index of a positional argument, or name of a keyword argument.
    kind
        "positions": the argument holds one for each row. "distances": a (…, rows, keys) matrix of buckets.
        "past": the number in front of the first, and the output has a row (…, rows, d) for each.
    """

    module: nn.Module
    key: int | str
    kind: Literal["positions", "distances", "past"]


@contextmanager
def noting_places(model: nn.Module, past: int, rows: int) -> Iterator[list[Place]]:
    """Note where a pass over `rows` tokens behind `past` others hands on positions that were derived from these."""
    places: list[Place] = []
    noted: set[tuple[int, int | str]] = set()

    def look(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        for key, value in (*enumerate(args), *kwargs.items()):
            kind = _kind_of(value, past, rows, out)
            if kind is not None and (id(module), key) not in noted:
                noted.add((id(module), key))
                places.append(Place(module, key, kind))

    handles = [
        module.register_forward_hook(look, with_kwargs=True) for module in model.modules() if module is not model
    ]
    try:
        yield places
    finally:
        for handle in handles:
            handle.remove()


def outermost(places: list[Place]) -> tuple[Place, ...]:
    """Those whose modules are in no other's, as what is inside is handed on; one kind for each module."""
    told = {id(place.module) for place in places if place.kind != "past"}
    places = [place for place in places if place.kind != "past" or id(place.module) not in told]
    inside = {id(part) for place in places for part in place.module.modules() if part is not place.module}
    return tuple(place for place in places if id(place.module) not in inside)


def _kind_of(value: Any, past: int, rows: int, out: Any) -> Literal["positions", "distances", "past"] | None:
    """What an argument says of positions; None for nothing."""
    if isinstance(value, int) and not isinstance(value, bool):
        by_rows = isinstance(out, torch.Tensor) and out.ndim >= 2 and out.shape[-2] == rows
        return "past" if value == past and by_rows else None
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.long, torch.int32):
        return None
    if _are_distances(value, past, rows):
        return "distances"
    return "positions" if _are_positions(value, past, rows) else None


def _are_positions(value: torch.Tensor, past: int, rows: int) -> bool:
    """Whether a tensor counts from `past` or a little behind it."""
    if value.numel() != rows or rows < 2:
        return False
    flat = value.reshape(-1).cpu()
    return bool((flat[1:] - flat[:-1] == 1).all()) and past <= int(flat[0]) <= past + 8


def _are_distances(value: torch.Tensor, past: int, rows: int) -> bool:
    """Whether a tensor's last two axes hold something that depends on the distance of a row from a key alone."""
    if value.ndim < 2 or value.shape[-2:] != (rows, past + rows) or rows < 2:
        return False
    return bool((value[..., 1:, 1:] == value[..., :-1, :-1]).all()) and bool((value != value.flatten()[0]).any())


class DerivedPositions:
    """The positions of a draft tree for a model that derives positions, for one verifier.

    Parameters
    ----------
    places
        Where the model hands positions on.
    """

    def __init__(self, places: tuple[Place, ...]) -> None:
        self._places = places
        self._handles: list[Any] = []
        self._thread = 0
        self._ahead: torch.Tensor | None = None

    def attach(self) -> None:
        """Put hooks on the modules; they do nothing but inside `verifying`."""
        self.detach()
        self._handles = [
            place.module.register_forward_hook(self._after)
            if place.kind == "past"
            else place.module.register_forward_pre_hook(self._before(place), with_kwargs=True)
            for place in self._places
        ]

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._ahead = [], None

    @contextmanager
    def verifying(self, past: int, roots: int, tree: DraftTree, device: torch.device) -> Iterator[None]:
        """Let the pass inside place the nodes of a tree behind `past` cached tokens and `roots` others."""
        slots: NDArray[np.int64] = np.arange(roots + len(tree))
        depths = slots.copy()
        depths[roots:] = tree.depth + roots - 1
        self._past = past
        self._depths = torch.from_numpy(depths).to(device)
        self._ahead = torch.from_numpy(depths - slots).to(device)
        self._thread = get_ident()
        try:
            yield
        finally:
            self._ahead = None

    def _after(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor | None:
        if self._ahead is None or self._thread != get_ident():
            return None
        return out.index_select(-2, self._depths.to(out.device))

    def _before(self, place: Place) -> Any:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._ahead is None or self._thread != get_ident():
                return None
            given = args[place.key] if isinstance(place.key, int) else kwargs[place.key]
            placed = self._distances(given) if place.kind == "distances" else self._positions(given)
            if isinstance(place.key, int):
                return (*args[: place.key], placed, *args[place.key + 1 :]), kwargs
            return args, {**kwargs, place.key: placed}

        return before

    def _positions(self, given: torch.Tensor) -> torch.Tensor:
        """Positions of the rows in place of their slots."""
        assert self._ahead is not None
        return given + self._ahead.to(given).view(given.shape)

    def _distances(self, given: torch.Tensor) -> torch.Tensor:
        """What belongs to distances of nodes in place of those of slots: the last row has it for every distance."""
        keys = torch.arange(given.shape[-1], device=given.device)
        depths = self._depths.to(given.device)
        keys[self._past :] = self._past + depths
        last = given.shape[-1] - 1
        apart = (last - (self._past + depths[:, None] - keys[None, :])).clamp(0, last)  # what lies ahead is masked
        return given[..., -1, :][..., apart]
