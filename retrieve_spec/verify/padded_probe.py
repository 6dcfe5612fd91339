"""A model in, whether texts may share passes of its own forward out: shared passes are compared with lone ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import in_a_line
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, input_device, read_interface
from retrieve_spec.verify.padded_batch import PaddedBatch, PaddedRow, why_not_padded
from retrieve_spec.verify.shrink import lengths_of, shrunk
from retrieve_spec.verify.steps import prepare_call
from retrieve_spec.verify.verifier import VerifierInputs

logger = logging.getLogger(__name__)

_REACH = 48
"""Windows and chunks up to this length are gone beyond on the model itself, longer ones on a small copy."""
_DEVIATION = {torch.float64: 1e-6, torch.float32: 1e-3}
_DEVIATION_HALF = 0.1
"""Largest difference between a shared pass and a lone one, as a share of the logits' spread."""
_PATHS: tuple[list[list[int]], ...] = ([[5, 6, 7], [8, 9]], [], [[10], [11, 12]], [[13, 14]])
_ACCEPTED: tuple[list[int], ...] = ([3, 4], [], [], [0, 1])
"""Drafts, and the nodes of each that are accepted."""


def why_not_together(model: Any, interface: ModelInterface) -> str:
    """Say why texts of a model cannot share passes of its own forward; empty when they can."""
    if why := why_not_padded(interface):
        return why
    lengths = lengths_of(model.config)
    longest = max(lengths.values(), default=0)
    try:
        with _evaluating(model), torch.no_grad():
            if why := _problem(model, interface, longest + 3 if longest <= _REACH else 9):
                return why
        if longest <= _REACH:
            return ""
        small, why = shrunk(model)
        if small is None:
            return f"its windows cannot be tried out: {why}"
        copied = read_interface(small)
        if "" in interface.masks and "" not in copied.masks:
            copied = replace(copied, masks={"": next(iter(copied.masks.values()))})
        with torch.no_grad():
            why = _problem(small, copied, max(lengths_of(small.config).values()) + 3)
        return f"past its windows, {why}" if why else ""
    except Exception as error:  # whatever a model's own code raises
        logger.debug("a shared pass failed", exc_info=True)
        return f"a pass that texts share fails ({in_a_line(error)})"


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _problem(model: Any, interface: ModelInterface, length: int) -> str:
    """What is wrong with shared passes over texts of about `length` tokens that come and go."""
    lone = [_begun(model, interface, HFVerifier(model, interface), length, i) for i in range(3)]
    batch = PaddedBatch(model, interface)
    rows = [PaddedRow(HFVerifier(model, interface), batch) for _ in range(3)]
    shared = [_begun(model, interface, row, length, i) for i, row in enumerate(rows)]
    if why := next((row.alone for row in rows if row.alone), ""):
        return why
    worst = 0.0
    for turn, going in enumerate([(0, 1), (0, 1, 2), (2, 0), (0, 1, 2)]):
        which = [(turn + i) % len(_PATHS) for i in going]
        trees = [DraftTree.from_paths(_PATHS[n]) for n in which]
        roots = [np.array([20 + turn + i], np.int32) for i in going]
        got = batch.forward([rows[i] for i in going], roots, trees)
        for i, tree, root, output in zip(going, trees, roots, got, strict=True):
            wanted = lone[i].forward(root, tree if len(tree) else None).logits.float()
            deviation = float((output.logits.float() - wanted).abs().max() / wanted.std(dim=-1).mean())
            worst = deviation if not deviation <= worst else worst
        for i, n in zip(going, which, strict=True):
            path = np.array(_ACCEPTED[n], np.int32)
            lone[i].commit(path)
            shared[i].commit(path)
    for verifier in (*lone, *shared):
        verifier.finish()
    if worst <= _DEVIATION.get(model.dtype, _DEVIATION_HALF):
        return ""
    return f"a pass that texts share gives other logits than lone ones (off by {worst:.2g} of their spread)"


def _begun(model: Any, interface: ModelInterface, verifier: Any, length: int, row: int) -> Any:
    """A verifier that has read a text of its own."""
    count = max(length - 3 * row, 1)
    vocab = min(int(model.config.get_text_config(decoder=True).vocab_size), 30_000)
    numbers = 3 + (np.arange(count) * 7919 + 13 + row) % (vocab - 3)
    ids = torch.from_numpy(numbers)[None].to(input_device(model))
    call = prepare_call(model, ids, torch.ones_like(ids))
    verifier.start(VerifierInputs(ids, call.take(), max_length=count + 64))
    verifier.forward(numbers.astype(np.int32))
    verifier.commit(np.empty(0, np.int32))
    return verifier
