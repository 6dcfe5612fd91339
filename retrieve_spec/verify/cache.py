"""Caches: how far a draft can be rolled back in one, and how its layers are cropped."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.verifier import Mode

GROW_BY_ROWS: tuple[type, ...] = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers whose rows are all they hold …"""
HOLD_NOTHING: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
"""… of blocks that keep no tokens (since transformers 5.23) …"""
HOLD_STATE: tuple[type, ...] = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""… and with a recurrent state beside their rows, or without any."""
TAKE_TREES = GROW_BY_ROWS + HOLD_NOTHING


def decoder_cache(cache: Any) -> Any:
    """The part of a cache that grows with the text: of an encoder–decoder's, the decoder's self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def crop(cache: Any, tokens: int) -> None:
    """Drop the last `-tokens` rows of keys and values in every layer; recurrent states stay."""
    for layer in cache.layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.crop(tokens)
        elif isinstance(layer, DynamicLayer):  # keys and values beside a recurrent state
            DynamicLayer.crop(layer, tokens)


def record_past(cache: Any) -> None:
    """Keep the rows that leave sliding windows until the next crop."""
    for layer in cache.layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def trim(cache: Any) -> None:
    """Drop, in layers that record their past, what no later token can see."""
    for layer in cache.layers:
        if getattr(layer, "record_past", False) and not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.crop(0)


def recording(cache: Any) -> list[bool]:
    """Return which layers record their past, for `set_recording`."""
    return [bool(getattr(layer, "record_past", False)) for layer in cache.layers]


def set_recording(cache: Any, flags: list[bool]) -> None:
    """Restore what `recording` returned; layers made since then do not record."""
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "record_past", None) is not None and not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.record_past = flags[i] if i < len(flags) else False


def same_rows(cache: DynamicCache) -> DynamicCache:
    """Return a cache of the same tensors that grows by itself."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def apart(cache: Any) -> Any:
    """Return a copy of a cache that continues by itself; rows are shared, as both write new ones to other tensors."""
    if isinstance(cache, EncoderDecoderCache):
        twin = copy.copy(cache)
        twin.self_attention_cache = apart(cache.self_attention_cache)
        twin.is_updated = dict(cache.is_updated)
        return twin
    if type(cache) is DynamicCache and all(type(layer) in GROW_BY_ROWS for layer in cache.layers):
        return same_rows(cache)
    return copy.deepcopy(cache)


def cache_mode(cache: Any) -> tuple[Mode, str]:
    """Return the best mode that a cache allows, and why it is not "tree"."""
    if cache is None:
        return "tree", ""
    if type(cache) is EncoderDecoderCache:
        return cache_mode(cache.self_attention_cache)
    if type(cache) is not DynamicCache:
        return "plain", f"a {type(cache).__name__} cannot be rolled back"
    if getattr(cache, "offloading", False):
        return "plain", "an offloaded cache cannot be rolled back"
    for layer in cache.layers:
        if type(layer) not in TAKE_TREES:
            if type(layer) in HOLD_STATE and not layer.record_past:
                continue
            if getattr(layer, "is_croppable", False):
                return "chain", f"a {type(layer).__name__} keeps tokens in one line"
            return "plain", f"a {type(layer).__name__} cannot be rolled back"
    return "tree", ""


def seq_length(cache: Any) -> int:
    """Return the number of tokens that a cache holds; 0 for one of recurrent states alone, which has no length."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return 0


class KeptRows:
    """Keeps the rows of accepted nodes in a cache whose layers all get rows from each pass.

    Recurrent states beside the rows stay, and layers that grow in another way are cropped by their own method.

    Parameters
    ----------
    cache
        The cache as it is before the first pass.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.begin()

    def begin(self) -> None:
        """Record how many rows each layer holds before a pass."""
        self._before = [_rows(layer) for layer in self._cache.layers]

    @property
    def grows_by_rows(self) -> bool:
        """Whether rows are all that every layer holds."""
        return self._has_only(TAKE_TREES)

    def _has_only(self, kinds: tuple[type, ...]) -> bool:
        return all(type(layer) in kinds for layer in self._cache.layers)

    def commit(self, path: NDArray[np.int32], nodes: int) -> None:
        """Keep the rows of the last pass; of its last `nodes` nodes only those on `path`, (a,) int32."""
        if not self._has_only(TAKE_TREES + HOLD_STATE):  # layers with a `crop` of their own
            if dropped := nodes - len(path):  # they verify chains, so kept rows come first
                crop(self._cache, -dropped)
            else:
                trim(self._cache)
            return
        stay = int((np.append(path, -1) != np.arange(len(path) + 1)).argmax())  # accepted rows in place
        for i, layer in enumerate(self._cache.layers):
            rows = _rows(layer)
            # A layer that the pass did not write to has keys and values of an image.
            unwritten = nodes > 0 and i < len(self._before) and rows == self._before[i]
            if rows and not unwritten:
                _keep(layer, rows - nodes, path, nodes, stay)


def finite_nodes(cache: Any, draft: DraftTree) -> NDArray[np.bool_]:
    """Return which nodes of the last pass, ancestors included, have finite keys and values in the first layer where
    some have not. Later layers may have taken infinities over from those nodes.
    """
    finite = np.ones(len(draft), np.bool_)
    for layer in cache.layers:
        if _rows(layer) and finite.all():
            for part in (layer.keys, layer.values):
                finite &= part[..., -len(draft) :, :].isfinite().all(-1).flatten(0, -2).all(0).cpu().numpy()
    for node, parent in enumerate(draft.parent.tolist()):
        finite[node] &= parent < 0 or finite[parent]
    return finite


def _rows(layer: Any) -> int:
    """Return the number of rows that a layer holds."""
    keys = getattr(layer, "keys", None)
    return int(keys.shape[-2]) if isinstance(keys, torch.Tensor) and keys.numel() else 0


def _keep(layer: Any, first: int, path: NDArray[np.int32], nodes: int, stay: int) -> None:
    """Keep the rows of a path in a layer whose nodes begin at row `first`; the first `stay` are in place already."""
    kept = []
    for part in (layer.keys, layer.values):
        if stay < len(path):
            index = torch.as_tensor(path[stay:].astype(np.int64) + first, device=part.device)
            part.narrow(-2, first + stay, len(path) - stay).copy_(part.index_select(-2, index))
        kept.append(part.narrow(-2, 0, first + len(path)) if len(path) < nodes else part)
    if isinstance(layer, DynamicSlidingWindowLayer):
        kept = [part[..., -layer.sliding_window + 1 :, :] for part in kept]
        layer.cumulative_length += len(path) - nodes
    layer.keys, layer.values = kept
