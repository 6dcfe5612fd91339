"""Keys of segments: the model's hidden states over their text, reduced, in checkpoints that survive a kill.

The text is read in windows that overlap, so that every position has context; none crosses the border of a document. Of
a window only the positions that the one before did not have become keys, and never the last token of a document, which
nothing follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.config import DenseConfig
from retrieve_spec.datastore.dense import Transform, hidden_size_of
from retrieve_spec.datastore.files import replace_file
from retrieve_spec.datastore.segment import Segment, suffix_array
from retrieve_spec.errors import BuildError, ConfigError
from retrieve_spec.model_layers import decoder_blocks

SHARD = 1 << 14
"""Positions of one checkpoint."""
BATCH = {"cpu": 1 << 10, "cuda": 1 << 15}
"""Tokens of one forward pass, by type of device."""

Windows = NDArray[np.int64]
"""(w, 4): first token and end of what the model reads, first and end of the positions that become keys."""


class _Caught(Exception):
    """No error: ends a forward pass where the hidden state is known."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class HiddenStates:
    """Runs a model up to one layer.

    Parameters
    ----------
    model
        A causal language model.
    layer
        `"last"`: what its output embeddings read. N ≥ 1: what the N-th block hands on.
    prefix
        Token ids before every text, as the tokenizer puts them (a BOS token, or none).

    Raises
    ------
    ConfigError
        When the model has no such layer.
    """

    def __init__(self, model: Any, layer: int | str, prefix: Sequence[int] = ()) -> None:
        self.model, self.layer = model, layer
        self.prefix = np.array(prefix, np.int64)
        self.size = hidden_size_of(model)
        device = str(model.device.type)
        self.batch = BATCH.get(device, BATCH["cuda"])
        if layer != "last":
            check_layer(layer, len(decoder_blocks(model)))

    def window(self, wanted: int) -> int:
        """Tokens of a window: as wanted, or as many as the model has positions for."""
        limit = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or wanted)
        return max(2, min(wanted, limit) - len(self.prefix))

    def __call__(self, rows: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
        """Hidden states (n, hidden_size) of each row of n token ids.

        Raises
        ------
        BuildError
            When one is NaN or infinite.
        """
        longest, first = max(len(row) for row in rows), len(self.prefix)
        ids = np.zeros((len(rows), first + longest), np.int64)  # padded behind, where nothing looks back from
        ids[:, :first] = self.prefix
        for i, row in enumerate(rows):
            ids[i, first : first + len(row)] = row
        hidden = self._run(torch.from_numpy(ids).to(self.model.device)).float().cpu().numpy()
        found = [hidden[i, first : first + len(row)] for i, row in enumerate(rows)]
        if not all(np.isfinite(h).all() for h in found):
            raise BuildError(
                f"finite hidden states of layer {self.layer}",
                "NaN or infinity",
                "Load the model in bfloat16 or float32.",
            )
        return found

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        def stop_before(_module: Any, args: Any) -> None:
            raise _Caught(args[0])

        def stop_behind(_module: Any, _args: Any, out: Any) -> None:
            raise _Caught(out[0] if isinstance(out, tuple) else out)

        if self.layer == "last":
            hook = self.model.get_output_embeddings().register_forward_pre_hook(stop_before)
        else:
            hook = decoder_blocks(self.model)[int(self.layer) - 1].register_forward_hook(stop_behind)
        try:
            with torch.inference_mode():
                self.model(input_ids=ids, use_cache=False)
        except _Caught as caught:
            return caught.hidden
        finally:
            hook.remove()
        raise BuildError("a forward pass through the layer of the keys", "none", "Choose `--layer last`.")


def prefix_of(tokenizer: Tokenizer, model: Any) -> list[int]:
    """The BOS token, where the tokenizer puts it before every text."""
    ids = tokenizer.encode("").ids
    bos = getattr(model.config.get_text_config(), "bos_token_id", None)
    return ids[:1] if ids and ids[0] == bos else []


def windows_of(starts: NDArray[Any], removed: Sequence[int], size: int, overlap: int) -> Windows:
    """Cut the documents of a segment, removed ones left out, into windows of at most `size` tokens."""
    found = []
    gone = set(removed)
    for number, (start, end) in enumerate(
        zip(starts[:-1].tolist(), (starts[1:].astype(np.int64) - 1).tolist(), strict=True)
    ):
        at, first = start, start
        while number not in gone and first < end - 1:
            stop = min(at + size, end)
            found.append((at, stop, first, min(stop, end - 1)))
            first, at = stop, stop - overlap
    return np.array(found, np.int64).reshape(-1, 4)


def choose_windows(windows: Windows, keep: NDArray[np.bool_], most: int) -> tuple[Windows, NDArray[np.bool_]]:
    """Leave out windows without a position to keep, and random ones until at most `most` positions are left (0: all).

    Returns
    -------
    tuple
        The windows, in order, and (n,) bool, the positions that become keys.
    """
    before = np.concatenate([[0], np.cumsum(keep)])
    counts = before[windows[:, 3]] - before[windows[:, 2]]
    order = np.random.default_rng(0).permutation(len(windows)) if most else np.arange(len(windows))
    room = (most or int(counts.sum())) - (np.cumsum(counts[order]) - counts[order])
    taken = np.zeros(len(keep), np.bool_)
    chosen = order[(room > 0) & (counts[order] > 0)]
    for (_, _, first, end), left in zip(windows[chosen].tolist(), room[(room > 0) & (counts[order] > 0)], strict=True):
        at = first + np.flatnonzero(keep[first:end])[: int(left)]
        taken[at] = True
    return windows[np.sort(chosen)], taken


def run_windows(
    encoder: HiddenStates, segment: Segment, windows: Windows, taken: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Hidden states and positions of the positions taken, batch by batch; windows of like length run together."""
    order = np.argsort(windows[:, 0] - windows[:, 1], kind="stable")
    at = 0
    while at < len(order):
        longest = int(windows[order[at], 1] - windows[order[at], 0])
        batch = windows[order[at : at + max(1, encoder.batch // longest)]].tolist()
        at += len(batch)
        hidden = encoder([segment.to_global[segment.tokens[start:stop]] for start, stop, _, _ in batch])
        positions = [first + np.flatnonzero(taken[first:end]) for _, _, first, end in batch]
        rows = [h[p - start] for h, p, (start, *_) in zip(hidden, positions, batch, strict=True)]
        yield np.concatenate(rows), np.concatenate(positions)


def fit_transform(states: Iterator[NDArray[np.float32]], size: int, dims: int) -> tuple[Transform, float]:
    """Fit mean, scale and principal components to hidden states (DReSD: z-scores, then PCA of their covariance).

    Returns
    -------
    tuple
        The transform, and the share of the variance it keeps.
    """
    count, total, products = 0, np.zeros(size), np.zeros((size, size))
    shift = None
    for hidden in states:
        shift = hidden.mean(0) if shift is None else shift  # keeps the sums of products small
        moved = hidden - shift
        count += len(moved)
        total += moved.sum(0, dtype=np.float64)
        products += moved.T @ moved
    if shift is None or count < 2:
        raise BuildError("two hidden states or more to fit a PCA to", f"{count}", "Build from more text.")
    mean = total / count
    covariance = products / count - np.outer(mean, mean)
    scale = np.sqrt(np.maximum(np.diag(covariance), 0))
    scale[scale < 1e-6] = 1
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    components = vectors[:, ::-1][:, :dims]
    components *= np.sign(components[np.abs(components).argmax(0), np.arange(dims)])
    kept = float(values[::-1][:dims].sum() / values.sum())
    return Transform(*(np.ascontiguousarray(a, np.float32) for a in (mean + shift, scale, components))), kept


def shards_of(windows: Windows, taken: NDArray[np.bool_]) -> list[Windows]:
    """Windows of each checkpoint."""
    before = np.concatenate([[0], np.cumsum(taken)])
    done = np.cumsum(before[windows[:, 3]] - before[windows[:, 2]])
    return np.split(windows, np.flatnonzero(np.diff(done // SHARD)) + 1) if len(windows) else []


def is_written(path: Path, numbers: int) -> bool:
    """Whether a checkpoint holds as many float32 numbers as it should; one of another version may not."""
    return path.exists() and path.stat().st_size == 4 * numbers


def write_keys(
    folder: Path,
    name: str,
    encoder: HiddenStates,
    transform: Transform,
    segment: Segment,
    windows: Windows,
    taken: NDArray[np.bool_],
    tick: Callable[[int], object],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Compute the keys of a segment, from where the last checkpoint left off.

    Returns
    -------
    tuple
        Keys (n, dims) float32 and their positions (n,) int64.
    """
    keys, places = [], []
    dims = transform.components.shape[1]
    for number, part in enumerate(shards_of(windows, taken)):
        path = folder / f"keys-{name}-{number:06d}.bin"
        positions = np.concatenate([first + np.flatnonzero(taken[first:end]) for _, _, first, end in part.tolist()])
        if not is_written(path, len(positions) * dims):
            found = [(transform(h), p) for h, p in run_windows(encoder, segment, part, taken)]
            at = np.concatenate([p for _, p in found])
            content = np.concatenate([k for k, _ in found]).astype("<f4")[np.argsort(at)].tobytes()
            replace_file(path, content)
        keys.append(np.fromfile(path, "<f4").reshape(len(positions), dims))
        places.append(positions)
        tick(len(positions))
    if not keys:
        return np.empty((0, dims), np.float32), np.empty(0, np.int64)
    return np.concatenate(keys), np.concatenate(places)


def sample_states(
    encoder: HiddenStates,
    parts: list[tuple[Segment, Windows, NDArray[np.bool_]]],
    most: int,
    tick: Callable[[int], object],
) -> Iterator[NDArray[np.float32]]:
    """Hidden states of about `most` positions, in random windows of all segments."""
    which = [(i, w) for i, (_, windows, _) in enumerate(parts) for w in range(len(windows))]
    seen = 0
    for at in np.random.default_rng(1).permutation(len(which)):
        segment, windows, taken = parts[which[at][0]]
        for hidden, _ in run_windows(encoder, segment, windows[which[at][1]][None], taken):
            seen += len(hidden)
            tick(len(hidden))
            yield hidden
        if seen >= most:
            return


def check_layer(layer: int | str, count: int) -> None:
    """Compare the layer of the keys with the blocks that the model has.

    Raises
    ------
    ConfigError
        When it has no such layer.
    """
    if layer != "last" and not 1 <= int(layer) <= count:
        raise ConfigError(f"a layer from 1 to {count}, or 'last'", repr(layer), "Give one the model has.")


def check_dims(config: DenseConfig, size: int) -> None:
    """Compare the size of the keys with that of the hidden states they are made from.

    Raises
    ------
    ConfigError
        When keys would have more numbers than hidden states have.
    """
    if config.dims > size:
        raise ConfigError(f"dims of at most {size}, the model's hidden size", f"{config.dims}", "Give fewer.")


LONGEST = 16
"""Tokens of context that are compared; longer matches count as this long."""


def hard_positions(segment: Segment) -> NDArray[np.bool_]:
    """Positions whose longest match elsewhere in the segment is not followed by the same token.

    Sorting the text read backwards puts every position next to those that share its longest contexts, so the longest
    match elsewhere is that of one of the two neighbours; where both are as long, one that is right suffices.

    Returns
    -------
    numpy.ndarray
        (n,) bool over the segment's token array; True also where nothing matches.
    """
    tokens = np.asarray(segment.tokens)
    last = len(tokens) - 1
    order = last - suffix_array(tokens[::-1].copy()).astype(np.int64)  # by the text that ends there
    follow = np.append(tokens, np.zeros(1, tokens.dtype))[order + 1]
    shared = np.zeros(len(order) + 1, np.int64)  # with the entry before; none before the first and behind the last
    left, right = order[:-1], order[1:]
    alive = np.ones(len(left), np.bool_)
    for back in range(LONGEST):
        alive &= (left >= back) & (right >= back)
        a, b = tokens[np.maximum(left - back, 0)], tokens[np.maximum(right - back, 0)]
        alive &= (a == b) & (a != 0)
        shared[1:-1] += alive
    same = np.zeros(len(order) + 1, np.bool_)
    same[1:-1] = follow[:-1] == follow[1:]
    before, behind = shared[:-1], shared[1:]
    longest = np.maximum(before, behind)
    right_before, right_behind = same[:-1] & (before == longest), same[1:] & (behind == longest)
    predicted = (longest > 0) & (right_before | right_behind)
    hard = np.ones(len(tokens), np.bool_)
    hard[order[predicted]] = False
    return hard
