"""Bigrams of a model: learned from the model when it is accelerated, as far as there is time, and kept in the cache."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import PASS, cache_dir
from retrieve_spec.datastore.dense import model_fingerprint
from retrieve_spec.drafting.calibration import put_array
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.errors import ConfigError
from retrieve_spec.kernels.recycling import MOST
from retrieve_spec.model_layers import embedded_tokens
from retrieve_spec.sources.bigrams import Bigrams
from retrieve_spec.verify.interface import input_device
from retrieve_spec.verify.probe import start
from retrieve_spec.verify.verifier import Verifier

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""How long a model is asked each time that it is accelerated, until all its tokens are known."""
_FIRST_NODES, _MOST_NODES, _SHORT = 8, PASS.tree_rows - 1, 0.125
"""Tokens that a CPU is asked for in the first pass; the next ones have four times as many while they take less than so
many seconds."""
_NEVER_KEPT = 0.2
"""Seconds of asking that are not worth a file."""


def bigrams_of(model: Any, verifier: Verifier, tokenizer: Any) -> Bigrams:
    """What a model says after each of its tokens, as far as it is known.

    Parameters
    ----------
    model
        A causal language model. It is asked for tokens in the order of their ids, which is that of their frequency in
        vocabularies of merges, for `SECONDS`.
    verifier
        Of the model, for trees.
    tokenizer
        The model's, which says what ends a line.

    Returns
    -------
    Bigrams
        With those that were kept before.
    """
    try:
        path = cache_dir() / "bigrams" / f"{model_fingerprint(model).partition(':')[2]}.npy"
    except ConfigError as error:
        logger.warning("bigrams are not kept: %s", error)
        path = None
    entries, began = _kept(path, embedded_tokens(model)), perf_counter()
    _ask(model, verifier, _line_end(tokenizer), entries)
    if path is not None and perf_counter() - began > _NEVER_KEPT:
        with contextlib.suppress(OSError):  # which is logged when the file cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
        put_array(path, entries, "bigrams")
    return Bigrams(entries)


def _line_end(tokenizer: Any) -> list[int]:
    """The token that ends a line; none of a vocabulary that has no such sign."""
    try:
        return [int(token) for token in tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]]
    except Exception:  # some tokenizers fail on what they do not know
        return []


def _kept(path: Path | None, vocabulary: int) -> NDArray[np.int32]:
    """(vocabulary, 2k) int32 entries of `Bigrams` that a file has; none are known where it is another or no file."""
    k, entries = min(MOST, vocabulary), np.empty((0, 0), np.int32)
    if path is not None:
        with contextlib.suppress(Exception), open(path, "rb") as file:  # a damaged head is read as Python, and so fails
            entries = np.lib.format.read_array(file, allow_pickle=False)
    whole = entries.shape == (vocabulary, 2 * k) and entries.dtype == np.int32 and (entries[:, :k] < vocabulary).all()
    return entries if whole else np.full((vocabulary, 2 * k), -1, np.int32)


@torch.no_grad()
def _ask(model: Any, verifier: Verifier, line_end: list[int], entries: NDArray[np.int32]) -> None:
    """Ask for tokens of which nothing is known, side by side behind two ends of a line, until time is up."""
    device, missing, k = input_device(model), np.flatnonzero(entries[:, 0] < 0), entries.shape[1] // 2
    nodes, end = _MOST_NODES if device.type == "cuda" else _FIRST_NODES, perf_counter() + SECONDS
    while len(missing) and line_end and perf_counter() < end:
        tokens, began = missing[:nodes].astype(np.int32), perf_counter()
        verifier.forward(start(model, verifier, torch.tensor([line_end], device=device)))
        verifier.commit(NO_DRAFT.parent)
        if verifier.mode != "tree":  # which a prompt can show
            break
        siblings = DraftTree.from_paths([[token] for token in tokens.tolist()])
        best = verifier.forward(np.array(line_end, np.int32), siblings).logits[1:].float().topk(k)
        entries[tokens, :k] = best.indices.cpu().numpy()
        entries[tokens, k:] = best.values.cpu().numpy().view(np.int32)
        verifier.finish()
        missing = missing[nodes:]
        if perf_counter() - began < _SHORT:
            nodes = min(4 * nodes, _MOST_NODES)
