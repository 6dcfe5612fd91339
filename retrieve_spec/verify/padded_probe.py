"""Probe of padded batches: whether texts may share passes of a model's own forward, compared with lone ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import in_a_line
from retrieve_spec.model_layers import evaluating
from retrieve_spec.verify.candidates import start
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, read_interface
from retrieve_spec.verify.padded_batch import PaddedBatch, PaddedRow, why_not_padded
from retrieve_spec.verify.shrink import lengths_of, shrunk
from retrieve_spec.verify.steps import SingleSteps, prepare_call, sample_tokens, vocabulary
from retrieve_spec.verify.verifier import Verifier

logger = logging.getLogger(__name__)

_REACH = 48
"""Windows and chunks up to this length are gone beyond on the model itself, longer ones on a small copy."""
_DEVIATION = {torch.float64: 1e-6, torch.float32: 1e-3}
_DEVIATION_HALF = 0.1
"""Largest difference between a shared pass and a lone one, as a share of the logits' spread."""
_PATHS: tuple[list[list[int]], ...] = ([[5, 6, 7], [6, 9]], [], [[10], [11, 12]], [[13, 14]])
_ACCEPTED: tuple[list[int], ...] = ([3, 4], [], [], [0, 1])
"""Drafts, and the nodes of each that are accepted; their tokens are counted around where a model has fewer."""


def why_not_together(model: Any, interface: ModelInterface) -> str:
    """Say why texts of a model cannot share passes of its own forward; empty when they can."""
    if why := why_not_padded(interface):
        return why
    lengths = lengths_of(model.config)
    longest = max(lengths.values(), default=0)
    try:
        with evaluating(model), torch.no_grad():
            if why := _problem(model, interface, longest + 3 if longest <= _REACH else 9):
                return why
            if not interface.has_encoder and _reads_padding(model):
                what = "its recurrent state" if interface.recurrent else "what its tokens see"
                return f"what stands in front of a row as padding changes {what}"
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


def _reads_padding(model: Any) -> bool:
    """Whether padding in front of a text changes its logits, as where layers add a bias behind the mask.

    Tokens behind the prompt are looked at, too: GIT lets them see padding that the prompt does not.
    """
    ids = sample_tokens(model, 11)
    shown = (torch.arange(9, device=ids.device) >= 4).long()[None]
    padded = SingleSteps.of(model, prepare_call(model, ids[:, :9], shown))
    alone = SingleSteps.of(model, prepare_call(model, ids[:, 4:9], torch.ones_like(ids[:, 4:9])))
    most = _DEVIATION.get(model.dtype, _DEVIATION_HALF)
    for token in (None, *ids[0, 9:].tolist()):
        logits, wanted = padded.feed(token), alone.feed(token)
        if not float((logits - wanted).abs().max() / wanted.std()) <= most:
            return True
    return False


def _problem(model: Any, interface: ModelInterface, length: int) -> str:
    """What is wrong with shared passes over texts of about `length` tokens that come and go."""
    lone = [HFVerifier(model, interface) for _ in range(3)]
    batch = PaddedBatch(model, interface)
    rows = [PaddedRow(HFVerifier(model, interface), batch) for _ in range(3)]
    texts = [sample_tokens(model, max(length - 3 * i, 1), i) for i in range(3)]
    prompts = [start(model, verifier, ids) for verifier, ids in zip(lone, texts, strict=True)]
    for row, ids in zip(rows, texts, strict=True):
        start(model, row, ids)
    if why := next((row.alone for row in rows if row.alone), ""):
        return why
    passes = _Passes(lone, rows)
    half = (len(prompts[0]) + 1) // 2
    if interface.recurrent:  # each reads its prompt alone
        for prompt, one, row in zip(prompts, lone, rows, strict=True):
            both: tuple[Verifier, ...] = (one, row)
            for verifier in both:
                verifier.forward(prompt)
                verifier.commit(np.empty(0, np.int32))
    else:
        passes.take((0, 1), [prompts[0][:half], prompts[1]])
        passes.take((2, 0), [prompts[2], prompts[0][half:]] if half < len(prompts[0]) else [prompts[2]])
    for turn, going in enumerate([(0, 1), (0, 1, 2), (2, 0), (0, 1, 2)]):
        which = [(turn + i) % len(_PATHS) for i in going]
        passes.take(going, [np.array([(20 + turn + i) % passes.known], np.int32) for i in going], which)
    for one, row in zip(lone, rows, strict=True):
        one.finish(), row.finish()
    if passes.worst <= _DEVIATION.get(model.dtype, _DEVIATION_HALF):
        return ""
    return f"a pass that texts share gives other logits than lone ones (off by {passes.worst:.2g} of their spread)"


class _Passes:
    """Passes that rows share, each beside lone ones over the same tokens.

    Attributes
    ----------
    worst
        Largest difference of their logits so far, as a share of these logits' spread.
    """

    def __init__(self, lone: list[HFVerifier], rows: list[PaddedRow]) -> None:
        self._lone, self._rows = lone, rows
        self.known = vocabulary(rows[0].own.model)
        self.worst = 0.0

    def take(self, going: Sequence[int], roots: list[NDArray[np.int32]], which: Sequence[int] = ()) -> None:
        """One pass over root tokens of the rows that are `going`, as far as given, with the drafts `which`."""
        going, which = going[: len(roots)], which or [1] * len(roots)
        trees = [DraftTree.from_paths([[token % self.known for token in path] for path in _PATHS[n]]) for n in which]
        got = self._rows[0].batch.forward([self._rows[i] for i in going], roots, trees)
        for i, tree, root, output in zip(going, trees, roots, got, strict=True):
            wanted = self._lone[i].forward(root, tree if len(tree) else None).logits.float()
            deviation = float((output.logits.float() - wanted).abs().max() / wanted.std(dim=-1).mean())
            self.worst = deviation if not deviation <= self.worst else self.worst
        for i, n in zip(going, which, strict=True):
            path = np.array(_ACCEPTED[n], np.int32)
            self._lone[i].commit(path)
            self._rows[i].commit(path)
