"""Kept texts: what modules keep of the text that they read last, as plain attributes that hold a tensor or nothing.

Qwen-VL keeps how far its positions are behind its slots, RecurrentGemma its state.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.model_layers import evaluating
from retrieve_spec.verify.candidates import PROMPT, start
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface
from retrieve_spec.verify.plain import held_by
from retrieve_spec.verify.steps import sample_tokens

logger = logging.getLogger(__name__)


def reads_what_it_keeps(model: Any, interface: ModelInterface, names: frozenset[str]) -> bool:
    """Whether what a pass over a draft says turns on attributes `names`, which a model keeps of a text.

    The same pass runs with what the prompt left there, with other numbers and with nothing.
    """
    ids = sample_tokens(model, PROMPT + 2)
    root, node = (np.array([int(token)], np.int32) for token in ids[0, -2:])
    tree = DraftTree.from_paths([[int(node[0])]])
    said = []
    try:
        with evaluating(model), torch.no_grad():
            for changed in (lambda tensor: tensor, lambda tensor: tensor + 1, lambda tensor: None):
                verifier = HFVerifier(model, interface)
                verifier.forward(start(model, verifier, ids[:, :-2]))
                verifier.commit(np.empty(0, np.int32))
                with _changed(model, names, changed):
                    said.append(verifier.forward(root, tree).logits.clone())
                verifier.finish()
    except Exception:  # whatever a model's own code raises
        logger.debug("a pass without what is kept of a text fails", exc_info=True)
        return True
    return not all(torch.equal(logits, said[0]) for logits in said)


@contextlib.contextmanager
def _changed(model: nn.Module, names: frozenset[str], change: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Have other values in attributes that hold tensors, while the block lasts."""
    held = [(module, name, value) for module, name, value in held_by(model) if name in names]
    try:
        for module, name, value in held:
            setattr(module, name, change(value))
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)
