"""First passes: what a model is asked for when it is accelerated, namely what passes cost, and its bigrams."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import PASS, cache_dir
from retrieve_spec.datastore.dense import model_fingerprint
from retrieve_spec.drafting.calibration import put_array
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.kernels.recycling import MOST
from retrieve_spec.sources.recycling import Bigrams
from retrieve_spec.verify.interface import input_device
from retrieve_spec.verify.steps import sample_tokens, vocabulary

_CONTEXT = 128
_WIDTHS = (0, 15, 63, 3)
_REPEATS = 3
_SECONDS = 0.6
_ROOT, _NOTHING = np.array([1], np.int32), np.empty(0, np.int32)


@torch.no_grad()
def measure_passes(speculation: Speculation) -> None:
    """Set the first costs of passes: those of an earlier process on this CPU, or of a few trials."""
    if speculation.mode in ("plain", "delegated"):
        return
    limits = (speculation.interface.max_positions, speculation.interface.max_slots)
    positions = min((limit for limit in limits if limit), default=_CONTEXT + max(_WIDTHS) + 1)
    context = max(min(_CONTEXT, positions - max(_WIDTHS) - 1), 1)
    kept, device = speculation.kept, input_device(speculation.model)
    found = kept.seconds if device.type == "cpu" else {}  # a GPU's first passes compile and capture
    if not found:
        found = _time_passes(speculation, context, positions)
        kept.keep_seconds(found)
    costs = speculation.engine.costs.of(1)
    costs.begin(context, found)
    costs.seconds(context, 0)  # learns them now, so that no call waits for that kernel


def _time_passes(speculation: Speculation, context: int, positions: int) -> dict[int, float]:
    """Return seconds of passes over chains of a few widths: the first two, and others until time runs out."""
    seconds = _SECONDS if speculation.ranks is None else math.inf  # ranks must run the same passes
    ids, known = sample_tokens(speculation.model, context), vocabulary(speculation.model)
    verifier = speculation.verifiers()[0]
    speculation.read(verifier, ids)
    verifier.forward(_ROOT)  # the first pass of a kind includes set-up
    verifier.commit(_NOTHING)
    began, found = perf_counter(), dict[int, float]()
    for width in _WIDTHS:
        if width > positions - context - 8 or (len(found) > 1 and perf_counter() - began > seconds):
            continue
        tree = DraftTree.from_paths([[(i * 17 + 3) % known for i in range(width)]])
        times: list[float] = []
        is_ready = ids.device.type != "cuda"  # the first pass of a width may compile kernels and capture a graph
        while len(times) < _REPEATS and (not times or perf_counter() - began <= seconds):
            started = perf_counter()
            float(verifier.forward(_ROOT, tree).logits[0, 0])  # waits for the device
            took = perf_counter() - started
            verifier.commit(_NOTHING)
            if is_ready:
                times.append(took)
            else:
                began, is_ready = began + took, True
        found[width] = min(times)
    verifier.finish()
    return found


ASKED_SECONDS, ASKED_AGAIN_SECONDS = 1.0, 0.2
"""How long a model is asked when it is accelerated first, and each time after, until all its tokens are known."""
_FIRST_NODES, _MOST_NODES = 8, PASS.tree_rows - 1
"""Tokens in the first pass on a CPU, four times as many in the next while passes are short, and most tokens."""
_LONGEST, _LONGEST_IDLE = 0.5, 0.125
"""Approximate limit of such a pass in seconds: while a model is accelerated, and while a request may come."""
_NEVER_KEPT = 0.1
"""Seconds of asking that are not worth a file."""


def read_bigrams(speculation: Speculation) -> Bigrams:
    """Read the most probable tokens after each token of an accelerated model, as far as they are known.

    The model is asked for tokens in the order of their ids, which is that of their frequency in vocabularies of merges,
    for `ASKED_SECONDS`, and in later processes for `ASKED_AGAIN_SECONDS`. It is not asked again where a pass takes
    longer than that.

    Returns
    -------
    Bigrams
        With those that were kept before.
    """
    path, began = _path(speculation), perf_counter()
    bigrams = Bigrams(_kept(path, speculation.interface.vocabulary))
    end = began + (ASKED_AGAIN_SECONDS if len(bigrams.known) else ASKED_SECONDS)
    if max(speculation.kept.seconds.values(), default=0.0) < end - began:
        _ask(bigrams, speculation, lambda: perf_counter() < end, _LONGEST)
    if perf_counter() - began > _NEVER_KEPT:
        _keep(bigrams, path)
    return bigrams


def learn_bigrams(speculation: Speculation, goes_on: Callable[[], bool], longest: float = _LONGEST_IDLE) -> None:
    """Ask an accelerated model for the bigrams of all unknown tokens while it is idle, and keep them.

    Running texts draft from them at once. They are kept like those of `read_bigrams`.

    Parameters
    ----------
    goes_on
        Called before every pass; learning stops when it returns false.
    longest
        Approximate limit of a pass in seconds.
    """
    bigrams = speculation.drafters.bigrams
    if bigrams is not None and len(bigrams.missing) and goes_on():
        try:
            _ask(bigrams, speculation, goes_on, longest)
        finally:  # after Ctrl-C, too
            _keep(bigrams, _path(speculation))


def _path(speculation: Speculation) -> Path:
    """Return the file of a model's bigrams."""
    return cache_dir() / "bigrams" / f"{model_fingerprint(speculation.model).partition(':')[2]}.npy"


def _keep(bigrams: Bigrams, path: Path) -> None:
    with contextlib.suppress(OSError):  # logged by `put_array`
        path.parent.mkdir(parents=True, exist_ok=True)
    put_array(path, bigrams.entries, "bigrams")


def line_end(tokenizer: Any) -> list[int]:
    """Return the last token of a line's end; empty where the tokenizer has none."""
    try:
        return [int(token) for token in tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]]
    except Exception:  # some tokenizers fail on unknown text
        return []


def _kept(path: Path, vocabulary: int) -> NDArray[np.int32]:
    """(vocabulary, 2k) int32 entries of `Bigrams` from a file; all -1 where the file is missing or does not fit."""
    k, entries = min(MOST, vocabulary), np.empty((0, 0), np.int32)
    with contextlib.suppress(Exception), open(path, "rb") as file:  # a damaged header may raise anything
        entries = np.lib.format.read_array(file, allow_pickle=False)
    whole = entries.shape == (vocabulary, 2 * k) and entries.dtype == np.int32 and (entries[:, :k] < vocabulary).all()
    return entries if whole else np.full((vocabulary, 2 * k), -1, np.int32)


@torch.no_grad()
def _ask(bigrams: Bigrams, speculation: Speculation, goes_on: Callable[[], bool], longest: float) -> None:
    """Ask for unknown tokens, siblings after two line ends, in passes of approximately `longest` seconds at most."""
    end = line_end(speculation.tokenizer)
    device, missing, k = input_device(speculation.model), bigrams.missing, bigrams.entries.shape[1] // 2
    nodes, verifier = _MOST_NODES if device.type == "cuda" else _FIRST_NODES, speculation.verifiers()[0]
    while len(missing) and end and goes_on():
        tokens, began = missing[:nodes], perf_counter()
        speculation.read(verifier, torch.tensor([end], device=device))
        if verifier.mode != "tree":  # a prompt can change the mode
            break
        siblings = DraftTree.from_paths([[token] for token in tokens.tolist()])
        best = verifier.forward(np.array(end, np.int32), siblings).logits[1:].float().topk(k)
        bigrams.learn(tokens, best.indices.cpu().numpy().astype(np.int32), best.values.cpu().numpy())
        verifier.finish()
        missing = missing[nodes:]
        if perf_counter() - began < longest / 4:
            nodes = min(4 * nodes, _MOST_NODES)
