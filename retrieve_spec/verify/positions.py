"""Derived positions: models that count positions themselves get those of a draft tree, module by module.

Such a model passes `past + 0 … n - 1` to a module that embeds positions, buckets of distances to one that embeds those,
`past` to one that counts from there, or a bias by key (ALiBi) to its layers. Some also make the mask of their layers
themselves and accept none for a tree. A pass over a chain shows which modules these are. In a pass over a tree their
inputs or outputs are replaced by those that a chain's token has at the position of each node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal

import torch
from torch import nn

from retrieve_spec.attention import row_depths, visible_rows
from retrieve_spec.drafting.tree import DraftTree

Kind = Literal["positions", "distances", "past", "bias", "mask"]


@dataclass(frozen=True, slots=True)
class Place:
    """An argument of a module's forward that holds positions or something computed from them.

    Attributes
    ----------
    module
        Whose forward.
    key
        Index of a positional argument, or name of a keyword argument.
    kind
        "positions": the argument holds one for each row. "distances": a (…, rows, keys) matrix of buckets.
        "past": the number in front of the first, and the output has a row (…, rows, d) for each.
        "bias": (…, 1, keys or more) numbers that rise or fall from key to key, those of the last key at the end.
        "mask": (…, rows, keys) what a row sees, one value where it sees nothing; biases may be in it.
    slots
        Keys that a longer bias is made for; 0 where it is made anew for every pass.
    """

    module: nn.Module
    key: int | str
    kind: Kind
    slots: int = 0


@contextmanager
def noting_places(model: nn.Module, past: int, rows: int) -> Iterator[list[Place]]:
    """Record where a pass over `rows` tokens after `past` others passes on positions that the model derived."""
    places: list[Place] = []
    noted: set[tuple[int, int | str]] = set()

    def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        for key, value in (*enumerate(args), *kwargs.items()):
            kind = _kind_of(value, past, rows, out)
            if kind is not None and (id(module), key) not in noted:
                noted.add((id(module), key))
                longer = kind == "bias" and value.shape[-1] > past + rows
                places.append(Place(module, key, kind, value.shape[-1] if longer else 0))

    with ExitStack() as hooks:
        for module in model.modules():
            if module is not model:
                hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        yield places


def outermost(places: list[Place]) -> tuple[Place, ...]:
    """Return the places whose modules are inside no other place's; one kind for each module."""
    told = {id(place.module) for place in places if place.kind != "past"}
    places = [place for place in places if place.kind != "past" or id(place.module) not in told]
    inside = {id(part) for place in places for part in place.module.modules() if part is not place.module}
    return tuple(place for place in places if id(place.module) not in inside)


def _kind_of(value: Any, past: int, rows: int, out: Any) -> Kind | None:
    """Return how an argument depends on positions; None if it does not."""
    if isinstance(value, int) and not isinstance(value, bool):
        by_rows = isinstance(out, torch.Tensor) and out.ndim >= 2 and out.shape[-2] == rows
        return "past" if value == past and by_rows else None
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bool or value.is_floating_point():
        if _is_mask(value, past, rows):
            return "mask"
        return "bias" if _is_bias(value, past + rows) else None
    if value.dtype not in (torch.long, torch.int32):
        return None
    if _are_distances(value, past, rows):
        return "distances"
    return "positions" if _are_positions(value, past, rows) else None


def _are_positions(value: torch.Tensor, past: int, rows: int) -> bool:
    """Whether a tensor counts from `past` or a little after it."""
    if value.numel() != rows:
        return False
    flat = value.reshape(-1).cpu()
    return bool((flat[1:] - flat[:-1] == 1).all()) and past <= int(flat[0]) <= past + 8


def _are_distances(value: torch.Tensor, past: int, rows: int) -> bool:
    """Whether a tensor's last two axes hold something that depends on the distance of a row from a key alone."""
    if value.ndim < 2 or value.shape[-2:] != (rows, past + rows):
        return False
    return bool((value[..., 1:, 1:] == value[..., :-1, :-1]).all()) and bool((value != value.flatten()[0]).any())


def _is_mask(value: torch.Tensor, past: int, rows: int) -> bool:
    """Whether a tensor is a causal mask: it hides the keys after each row, by one value per head."""
    if value.ndim < 2 or value.shape[-2:] != (rows, past + rows):
        return False
    among = value[..., past:]
    hidden = among[..., :1, -1:] == among
    ahead = torch.ones((rows, rows), dtype=torch.bool, device=value.device).triu(1)
    return bool(hidden[..., ahead].all()) and not bool(hidden.diagonal(dim1=-2, dim2=-1).any())


def _is_bias(value: torch.Tensor, keys: int) -> bool:
    """Whether a tensor has one row, the same for all, of numbers that rise or fall from key to key."""
    if value.dtype == torch.bool or value.ndim < 2 or value.shape[-2] != 1 or value.shape[-1] < keys:
        return False
    steps = value[..., -keys + 1 :] - value[..., -keys:-1]
    return bool((steps > 0).all()) or bool((steps < 0).all())


def _ids_among(args: Any, kwargs: Any, rows: int) -> torch.Tensor | None:
    """Return the token ids of a pass among a module's arguments, positional or by name."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return next((value for value in tensors if value.dtype == torch.long and value.shape[-1:] == (rows,)), None)


class DerivedPositions:
    """The positions of a draft tree for a model that derives positions, for one verifier.

    Parameters
    ----------
    places
        Where the model hands positions on.
    """

    def __init__(self, places: tuple[Place, ...]) -> None:
        self._places = places
        self._thread = 0
        self._masks = any(place.kind == "mask" for place in places)
        self._seen: torch.Tensor | None = None  # (rows, rows) bool mask of the pass
        self._placed: dict[tuple[int, Kind], tuple[torch.Tensor, torch.Tensor]] = {}  # shared by all layers

    @contextmanager
    def verifying(self, past: int, roots: int, tree: DraftTree, device: torch.device) -> Iterator[None]:
        """Let the pass inside give a tree's nodes their positions, after `past` cached tokens and `roots` others."""
        self._past, self._thread = past, get_ident()
        self._depths = torch.from_numpy(row_depths(roots, tree)).to(device)
        if self._masks:
            self._seen = torch.from_numpy(visible_rows(roots, tree)).to(device)
        self._ahead = self._depths - torch.arange(len(self._depths), device=device)
        with ExitStack() as hooks:
            hooks.callback(self._placed.clear)
            for place in self._places:
                module, before = place.module, self._before(place)
                hooks.enter_context(
                    module.register_forward_hook(self._after, with_kwargs=True)
                    if place.kind == "past"
                    else module.register_forward_pre_hook(before, with_kwargs=True)
                )
            yield

    def _after(self, module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor | None:
        if self._thread != get_ident():
            return None
        depths, padding = self._depths.to(out.device), getattr(module, "padding_idx", None)
        ids = _ids_among(args, kwargs, out.shape[-2])
        if padding is None or ids is None or not bool((ids == padding).any()):
            return out.index_select(-2, depths)
        # Positions skip padding tokens, unlike in single steps, so replace these tokens.
        ordinary = torch.full_like(ids, padding + 1)
        args = tuple(ordinary if value is ids else value for value in args)
        every = module.forward(*args, **{name: ordinary if value is ids else value for name, value in kwargs.items()})
        return torch.where((ids == padding)[..., None], out, every.index_select(-2, depths))

    def _before(self, place: Place) -> Any:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._thread != get_ident():
                return None
            given = args[place.key] if isinstance(place.key, int) else kwargs[place.key]
            placed = self._in_place_of(given, place.kind)
            if isinstance(place.key, int):
                return (*args[: place.key], placed, *args[place.key + 1 :]), kwargs
            return args, {**kwargs, place.key: placed}

        return before

    def _in_place_of(self, given: torch.Tensor, kind: Kind) -> torch.Tensor:
        """Return the replacement of a tensor, the same for all modules that are given it in a pass."""
        known = self._placed.get((id(given), kind))
        if known is not None and known[0] is given:
            return known[1]
        ways = {"distances": self._distances, "bias": self._bias, "mask": self._mask}
        placed = ways.get(kind, self._positions)(given)
        self._placed[id(given), kind] = given, placed
        return placed

    def _bias(self, given: torch.Tensor) -> torch.Tensor:
        """Return a bias by key for the nodes' positions in place of their slots."""
        depths = self._depths.to(given.device)
        past = given.shape[-1] - len(depths)
        return torch.cat([given[..., :past], given[..., past:].index_select(-1, depths)], dim=-1)

    def _mask(self, given: torch.Tensor) -> torch.Tensor:
        """Return the mask of a tree, given that of a chain: rows and keys by their positions, other branches hidden."""
        assert self._seen is not None
        by_row = given.index_select(-2, self._depths.to(given.device))
        nodes = self._bias(by_row)[..., -len(self._depths) :]
        seen = torch.where(self._seen.to(given.device), nodes, given[..., :1, -1:])
        return torch.cat([by_row[..., : -len(self._depths)], seen], dim=-1)

    def _positions(self, given: torch.Tensor) -> torch.Tensor:
        """Return the positions of the rows in place of their slots."""
        return given + self._ahead.to(given).view(given.shape)

    def _distances(self, given: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the distances of nodes, not of slots; the last row has it for each distance."""
        keys = torch.arange(given.shape[-1], device=given.device)
        depths = self._depths.to(given.device)
        keys[self._past :] = self._past + depths
        last = given.shape[-1] - 1
        apart = last - (self._past + depths[:, None] - keys[None, :])
        apart = apart.clamp(0, last)  # keys after the row are masked
        return given[..., -1, :][..., apart]
