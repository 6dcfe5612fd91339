"""A model in, the strongest mode it can be verified in out: a two-branch tree is checked against separate passes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, cache_mode, input_device, weaker
from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs

logger = logging.getLogger(__name__)

_PROMPT = 12
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: how a model can be verified, why not better, and the interface that worked."""

    mode: Mode
    reason: str
    interface: ModelInterface


def probe(model: Any, interface: ModelInterface) -> Finding:
    """Try trees, then chains, on a few tokens; a mode counts when its logits are those of separate passes.

    A mode that raises or deviates is not used. The comparison covers the rollback too: after a pass whose second
    branch is accepted, the next token's logits must match as well.
    """
    mode, reason = weaker((interface.mode, interface.reason), _fresh_cache_mode(model))
    if mode == "tree":
        for candidate in _mask_variants(interface):
            problem = _try(model, candidate, "tree")
            if not problem:
                return Finding("tree", "", candidate)
        mode, reason = "chain", problem
    if mode == "chain":
        problem = _try(model, interface, "chain")
        if not problem:
            return Finding("chain", reason, interface)
        mode, reason = "plain", problem
    return Finding("plain", reason, interface)


def check_verifier(model: Any, interface: ModelInterface, verifier: Verifier) -> str:
    """Say what is wrong with a verifier's passes over trees, by the same comparison; empty when nothing is."""
    return _try(model, interface, "tree", verifier)


def _fresh_cache_mode(model: Any) -> tuple[Mode, str]:
    if not model._supports_default_dynamic_cache():
        return "plain", "the model keeps its own kind of cache"
    return cache_mode(_new_cache(model))


def _new_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _mask_variants(interface: ModelInterface) -> list[ModelInterface]:
    """The mask layouts to try: by layer type where the config names types, else one mask."""
    if "" not in interface.masks and len(interface.masks) == 1:
        return [interface, replace(interface, masks={"": next(iter(interface.masks.values()))})]
    return [interface]


def _try(model: Any, interface: ModelInterface, mode: Mode, verifier: Verifier | None = None) -> str:
    """What is wrong with a mode; empty when nothing is."""
    try:
        with torch.no_grad():
            deviation, scale = _deviation(model, interface, mode, verifier or HFVerifier(model, interface, mode))
    except Exception as error:  # whatever a model's own code raises: the mode is not usable, and plain decoding is
        logger.debug("probing %s failed", mode, exc_info=True)
        return f"a {mode} pass fails ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    allowed = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE) * scale
    if not deviation <= allowed:
        return f"a {mode} pass gives other logits than separate passes (off by {deviation:.2g})"
    return ""


def _deviation(model: Any, interface: ModelInterface, mode: Mode, verifier: Verifier) -> tuple[float, float]:
    """Largest difference to separate passes, and the spread of the logits to judge it by."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    tokens = (np.arange(_PROMPT + 8) * 7919 + 13) % min(vocab, 30_000)
    prompt, root, draft, after = tokens[:_PROMPT], tokens[_PROMPT], tokens[_PROMPT + 1 : -1], tokens[-1]
    a, b, c, d = (int(token) for token in draft[:4])
    tree = DraftTree.from_paths([[a, b], [c, d, a]] if mode == "tree" else [[c, d, a, b]])
    accepted = np.array([2, 3] if mode == "tree" else [0, 1], np.int32)
    positions = torch.arange(_PROMPT, device=input_device(model))[None]
    kwargs: dict[str, Any] = {interface.cache_name: _new_cache(model)}
    if interface.takes_position_ids:
        kwargs["position_ids"] = positions
    verifier.start(VerifierInputs(_ids(prompt, model), kwargs, max_length=_PROMPT + 16))
    if verifier.mode != mode:
        raise RuntimeError(verifier.reason)
    verifier.forward(prompt.astype(np.int32))
    verifier.commit(np.empty(0, np.int32))
    rows = verifier.forward(np.array([root], np.int32), tree).logits.clone()  # the next pass may write over them
    verifier.commit(accepted)
    last = verifier.forward(np.array([after], np.int32)).logits
    verifier.commit(np.empty(0, np.int32))
    verifier.finish()
    paths = [[a, b], [c, d, a]] if mode == "tree" else [[c, d, a, b]]
    wanted = [_separate(model, [*prompt, root, *path], len(path) + 1) for path in paths]
    expected = torch.cat([wanted[0], *[rest[1:] for rest in wanted[1:]]])
    final = _separate(model, [*prompt, root, c, d, after], 1)
    got = torch.cat([rows, last]).float()
    expected = torch.cat([expected, final]).float()
    return float((got - expected).abs().max()), float(expected.std(dim=-1).mean())


def _separate(model: Any, tokens: list[int], keep: int) -> torch.Tensor:
    """(keep, vocab) logits of one plain pass over all tokens."""
    logits: torch.Tensor = model(input_ids=_ids(np.array(tokens), model), use_cache=False).logits[0, -keep:]
    return logits


def _ids(tokens: NDArray[Any], model: Any) -> torch.Tensor:
    return torch.as_tensor(tokens.astype(np.int64), device=input_device(model))[None]
