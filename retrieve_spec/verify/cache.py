"""Caches: how far a draft can be rolled back in one, and layers that are cropped as they do it themselves."""

from __future__ import annotations

import copy
from typing import Any

from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from retrieve_spec.verify.verifier import Mode

GROW_BY_ROWS: tuple[type, ...] = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers whose rows are all they hold …"""
HOLD_NOTHING: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
"""… of blocks that keep no tokens (since transformers 5.23) …"""
HOLD_STATE: tuple[type, ...] = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""… and with a recurrent state beside their rows, or without any."""
TAKE_TREES = GROW_BY_ROWS + HOLD_NOTHING


def decoder_cache(cache: Any) -> Any:
    """The part of a cache that grows with the text: of an encoder–decoder's, what its decoder attends to itself."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def crop(cache: Any, tokens: int) -> None:
    """Drop the last `-tokens` rows of keys and values in every layer; recurrent state is not this module's business."""
    for layer in cache.layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.crop(tokens)
        elif isinstance(layer, DynamicLayer):  # keys and values beside a recurrent state
            DynamicLayer.crop(layer, tokens)


def record_past(cache: Any) -> None:
    """Let sliding windows keep the rows that leave them until the next crop."""
    for layer in cache.layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def trim(cache: Any) -> None:
    """Let layers that record their past forget what no later token can see."""
    for layer in cache.layers:
        if getattr(layer, "record_past", False) and not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.crop(0)


def recording(cache: Any) -> list[bool]:
    """Which layers record their past, to be restored with `set_recording`."""
    return [bool(getattr(layer, "record_past", False)) for layer in cache.layers]


def set_recording(cache: Any, flags: list[bool]) -> None:
    """Put the layers' recording back to what `recording` saw; layers made since then do not record."""
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "record_past", None) is not None and not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.record_past = flags[i] if i < len(flags) else False


def same_rows(cache: DynamicCache) -> DynamicCache:
    """A cache of the same tensors; one grows without the other."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def apart(cache: Any) -> Any:
    """A copy of a cache that goes on without it; rows are shared, as both put new ones into tensors of their own."""
    if isinstance(cache, EncoderDecoderCache):
        twin = copy.copy(cache)
        twin.self_attention_cache = apart(cache.self_attention_cache)
        twin.is_updated = dict(cache.is_updated)
        return twin
    if type(cache) is DynamicCache and all(type(layer) in GROW_BY_ROWS for layer in cache.layers):
        return same_rows(cache)
    return copy.deepcopy(cache)


def cache_mode(cache: Any) -> tuple[Mode, str]:
    """Best mode a cache allows, and why it is not "tree"."""
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
    """Tokens that a cache holds; 0 for one of recurrent states alone, which does not say."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return 0
