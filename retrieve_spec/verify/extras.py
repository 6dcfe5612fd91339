"""Extras: what a call gives a model's forward besides ids, positions, mask and cache, as `generate` would hand it on.

Pictures, encoder states, token types and masks over pictures go along with the prompt. What becomes of them behind it
the model's own `_update_model_kwargs_for_generation` says; what has a place for every token is found by how it grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

CACHE_NAMES = ("cache_params", "past_key_values", "cache")
"""What models call their cache: `cache` from transformers 5.24 on, where their code is not older."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Arguments that say of every token what it is."""
SET_EACH_PASS = {
    "input_ids", "decoder_input_ids", "inputs_embeds", "position_ids", "decoder_position_ids", "logits_to_keep",
    "use_cache",
}  # fmt: skip
"""Arguments that a pass gets from elsewhere."""
OF_TEXT = frozenset({"attention_mask", "position_ids", "logits_to_keep", "use_cache"})
"""Arguments of a call with text alone, its ids and cache not among them."""


def says_nothing(value: Any) -> bool:
    """Whether an argument is not there, or is what texts without pictures are given: no parts at all."""
    return value is None or (isinstance(value, Mapping) and not value)


def kwargs_behind(model: Any, outputs: Any, kwargs: dict[str, Any], tokens: int = 1) -> dict[str, Any]:
    """What becomes of the arguments of a pass behind it, as `generate` does it, if so many tokens come next."""
    more = {} if tokens == 1 else {"num_new_tokens": tokens}  # some models' own do not know the name
    after: dict[str, Any] = model._update_model_kwargs_for_generation(
        outputs, kwargs, is_encoder_decoder=model.config.is_encoder_decoder, **more
    )
    return after


class Extras:
    """Extra arguments of one generation, in step with its text.

    Parameters
    ----------
    given
        The arguments.

    Attributes
    ----------
    by_rows
        Whether some of them have a place for every row of a pass, so that they are made anew for each.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.by_rows = False
        self._grown: dict[str, tuple[torch.Tensor, int, int]] = {}

    @property
    def kind(self) -> frozenset[str]:
        """Names of the arguments that say something about the prompt, and of what is in them where they have parts."""
        return frozenset(name for given in self.given.items() for name in telling(*given))

    def up_to(self, slots: int, length: int) -> dict[str, Any]:
        """The arguments of a pass that ends at `slots` of a prompt of `length` tokens."""
        if slots == length:
            return dict(self.given)
        return {name: value[..., :slots] if name in TOKEN_TYPES and isinstance(value, torch.Tensor) else value
                for name, value in self.given.items()}  # fmt: skip

    def went_on(self, model: Any, outputs: Any) -> None:
        """Let the model say what becomes of the arguments behind the prompt, which it has just read."""
        before = dict(self.given)
        after = kwargs_behind(model, outputs, {**before, "use_cache": True})
        caches = (*CACHE_NAMES, "use_cache")
        self.given = {name: value for name, value in after.items() if name not in caches or name in before}
        for name, value in self.given.items():
            axis = _grew_along(before.get(name), value)
            if axis is not None:
                self._grown[name] = (value, axis, value.shape[axis])

    def ahead(self, tokens: int) -> dict[str, Any]:
        """The arguments at a text of so many tokens behind the prompt, 1 or more."""
        given = dict(self.given)
        for name, (value, axis, length) in self._grown.items():
            if tokens > 1:
                last = value.narrow(axis, length - 1, 1)
                given[name] = torch.cat([value, last.repeat_interleave(tokens - 1, dim=axis)], dim=axis)
        return given

    def see_rows(self, one: dict[str, Any], two: dict[str, Any]) -> None:
        """Compare what the model makes of the arguments for a pass of one row and for one of two rows."""
        pairs = ((value, two.get(name)) for name, value in one.items() if name not in SET_EACH_PASS)
        shapes = ((a.shape, b.shape) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))
        self.by_rows = bool(self._grown) or any(a != b for a, b in shapes)


def telling(name: str, value: Any) -> Iterator[str]:
    """Names of an argument, or of parts of it, that are more than settings."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from telling(f"{name}.{key}", part)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield name


def _grew_along(before: Any, after: Any) -> int | None:
    """The axis along which a tensor has one place more."""
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.ndim == after.ndim):
        return None
    more = [axis for axis in range(before.ndim) if after.shape[axis] != before.shape[axis]]
    return more[0] if len(more) == 1 and after.shape[more[0]] == before.shape[more[0]] + 1 else None
