"""Build dense indexes for the segments of a change.

The model reads the text in overlapping windows within documents, so that every position has context. Only positions
that the previous window did not contain become keys, and never the last token of a document, which has no continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.config import DenseConfig
from retrieve_spec.datastore.change import Stopwatch, WorkFolder
from retrieve_spec.datastore.dense import (
    DENSE_FILES,
    Transform,
    build_index,
    check_model,
    hidden_size_of,
    index_content,
    model_fingerprint,
)
from retrieve_spec.datastore.files import write_files
from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.datastore.manifest import SEGMENTS, DenseRecord, Manifest, SegmentEntry
from retrieve_spec.datastore.segment import Segment, open_segment
from retrieve_spec.errors import BuildError, ConfigError, TokenizerMismatchError
from retrieve_spec.model_layers import decoder_blocks, max_positions
from retrieve_spec.reference_model import REFERENCE, load_config_and_tokenizer, load_model

Windows = NDArray[np.int64]
"""(w, 4): start and end of what the model reads, start and end of the positions that become keys."""
Part = tuple[Segment, Windows, NDArray[np.bool_]]
"""A segment, its windows, and (n,) bool: the positions that become keys."""


def checked_settings(config: DenseConfig, fingerprint: str) -> DenseConfig:
    """Check the settings, as far as possible without weights, and make the path of the model absolute.

    Called before any text is read.

    Parameters
    ----------
    config
        Settings as given.
    fingerprint
        Fingerprint of the store's tokenizer.

    Raises
    ------
    ModelNotFoundError
        There is no such model.
    TokenizerMismatchError
        The model has another tokenizer.
    ConfigError
        Keys would be longer than hidden states, or the model has no such layer.
    """
    description, tokenizer = load_config_and_tokenizer(config.model)
    if (found := tokenizer_fingerprint(tokenizer)) != fingerprint:
        raise TokenizerMismatchError(
            f"a model with the store's tokenizer ({fingerprint[7:19]})",
            f"{config.model} with tokenizer {found[7:19]}",
            "Build the store with the tokenizer of the model.",
        )
    text = description.get_text_config()
    size, layers = int(text.hidden_size), int(text.num_hidden_layers)
    if config.dims > size:
        raise ConfigError(f"dims of at most {size}, the model's hidden size", f"{config.dims}", "Give fewer.")
    if config.layer != "last" and not 1 <= int(config.layer) <= layers:
        raise ConfigError(f"a layer from 1 to {layers}, or 'last'", repr(config.layer), "Give one the model has.")
    folder = Path(config.model).expanduser()
    return replace(config, model=str(folder.resolve())) if config.model != REFERENCE and folder.is_dir() else config


def add_dense(
    work: WorkFolder,
    manifest: Manifest,
    entries: list[SegmentEntry],
    config: DenseConfig,
    watch: Stopwatch,
    *,
    fresh: bool,
) -> tuple[list[SegmentEntry], DenseRecord, dict[str, int]]:
    """Add dense indexes to the segments of a change.

    Parameters
    ----------
    work
        Folder of the change, with its finished segments.
    manifest
        The manifest that the change started from.
    entries
        The new segments.
    config
        Settings of the indexes.
    watch
        Times the stages and shows their progress.
    fresh
        Whether nothing of the old store remains: the transform is then fitted again, and another model is allowed.

    Returns
    -------
    tuple
        The segments with their dense files, the manifest's record, and numbers for the report.

    Raises
    ------
    ModelMismatchError
        The model is not the one that the store's indexes were built with.
    BuildError
        Hidden states are not finite, or there is nothing to index.
    """
    model, tokenizer = load_model(config.model)
    record = None if fresh else manifest.dense
    if record is not None:  # keys of two models are not comparable
        check_model(record, model, config.model)
    else:
        fingerprint, size = model_fingerprint(model), hidden_size_of(model)
        record = DenseRecord(config.model, fingerprint, config.layer, config.dims, size)
    encoder = HiddenStates(model, record.layer, prefix_of(load_tokenizer(tokenizer), model))
    with watch.stage("choosing", None, "tok"):
        tokens = sum(entry.tokens for entry in entries)
        parts = [_part(work, manifest, entry, config, encoder, tokens) for entry in entries]
    possible = sum(int(taken.sum()) for _, _, taken in parts)
    if not possible and (fresh or manifest.dense is None):
        raise BuildError("positions to index", "none", "Build from more text.")
    transform = None if fresh else _own_transform(work.store, manifest)
    if transform is None:
        with watch.stage("fitting", min(config.sample, possible), "pos") as advance:
            transform = fit_transform(
                sample_states(encoder, parts, config.sample, advance), record.hidden_size, record.dims
            )
    extended, vectors = [], 0
    for entry, part in zip(entries, parts, strict=True):
        with watch.stage("embedding", int(part[2].sum()), "pos") as advance:
            keys, positions = keys_of(encoder, transform, *part, advance)
        if not len(keys):
            extended.append(entry)
            continue
        with watch.stage("dense index", None, "key"):
            folder, components = work.path / f"segment-{entry.name}", transform.components.reshape(-1)
            places, index = positions.astype(np.uint32), index_content(build_index(keys))
            arrays = (index, places, transform.mean, transform.scale, components)
            files = write_files(folder, dict(zip(DENSE_FILES, arrays, strict=True)))
        extended.append(replace(entry, files=entry.files | files))
        vectors += len(keys)
    followed = sum(entry.tokens - entry.documents for entry in entries)
    return extended, record, {"vectors": vectors, "positions": followed}


def _part(
    work: WorkFolder, manifest: Manifest, entry: SegmentEntry, config: DenseConfig, encoder: HiddenStates, tokens: int
) -> Part:
    """Open a new segment, and choose its windows and the positions that become keys.

    `tokens` is the number of tokens of all new segments.
    """
    segment = open_segment(work.path / f"segment-{entry.name}", entry, manifest.vocabulary)
    size = encoder.window(config.window)
    windows = windows_of(segment.document_starts, segment.removed, size, min(config.overlap, size // 2))
    share = -(-config.max_vectors * entry.tokens // tokens) if config.max_vectors else 0
    return segment, *choose_windows(windows, len(segment.tokens), share)


def _own_transform(store: Path, manifest: Manifest) -> Transform | None:
    """Return the transform of a store, with which similarities stay comparable; None if it has none yet."""
    for entry in manifest.segments if manifest.dense is not None else ():
        segment = open_segment(store / SEGMENTS / entry.name, entry, manifest.vocabulary, manifest.dense)
        if segment.dense is not None:
            return segment.dense.transform
    return None


BATCH = {"cpu": 1 << 10, "cuda": 1 << 15}
"""Tokens per forward pass by device type."""


class _Caught(Exception):
    """Raised to end a forward pass as soon as the hidden state is known; not an error."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class HiddenStates:
    """Runs a model up to one layer.

    Parameters
    ----------
    model
        A causal language model.
    layer
        `"last"`: the input of the output embeddings. N ≥ 1: the output of the N-th block.
    prefix
        Token ids that the tokenizer puts before every text (a BOS token, or none).
    """

    def __init__(self, model: Any, layer: int | str, prefix: Sequence[int] = ()) -> None:
        self.model, self.layer = model, layer
        self.prefix = np.array(prefix, np.int64)
        self.batch = BATCH.get(model.device.type, BATCH["cuda"])

    def window(self, wanted: int) -> int:
        """Return the window's size in tokens, limited by the model's positions."""
        limit = max_positions(self.model) or wanted
        return max(2, min(wanted, limit) - len(self.prefix))

    def __call__(self, rows: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
        """Return hidden states (n, hidden_size) for each row of n token ids.

        Raises
        ------
        BuildError
            A hidden state is NaN or infinite.
        """
        longest, first = max(len(row) for row in rows), len(self.prefix)
        ids = np.zeros((len(rows), first + longest), np.int64)  # padded at the end, where no real token attends
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

        def stop_after(_module: Any, _args: Any, out: Any) -> None:
            raise _Caught(out[0] if isinstance(out, tuple) else out)

        if self.layer == "last":
            hook = self.model.get_output_embeddings().register_forward_pre_hook(stop_before)
        else:
            hook = decoder_blocks(self.model)[int(self.layer) - 1].register_forward_hook(stop_after)
        try:
            with torch.inference_mode():
                self.model(input_ids=ids, use_cache=False)
        except _Caught as caught:
            return caught.hidden
        finally:
            hook.remove()
        raise BuildError("a forward pass through the layer of the keys", "none", "Choose `--layer last`.")


def prefix_of(tokenizer: Tokenizer, model: Any) -> list[int]:
    """Return the BOS token if the tokenizer puts it before every text, else nothing."""
    ids = tokenizer.encode("").ids
    bos = getattr(model.config.get_text_config(), "bos_token_id", None)
    return ids[:1] if ids and ids[0] == bos else []


def windows_of(starts: NDArray[Any], removed: Sequence[int], size: int, overlap: int) -> Windows:
    """Cut the documents of a segment, except for removed ones, into windows of at most `size` tokens."""
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


def choose_windows(windows: Windows, tokens: int, most: int) -> tuple[Windows, NDArray[np.bool_]]:
    """Choose random windows with at most `most` positions together, of a text of `tokens` tokens (0: all windows).

    Returns
    -------
    tuple
        The chosen windows, in order, and (tokens,) bool: the positions that become keys.
    """
    counts = windows[:, 3] - windows[:, 2]
    order = np.random.default_rng(0).permutation(len(windows)) if most else np.arange(len(windows))
    room = (most or tokens) - (np.cumsum(counts[order]) - counts[order])
    taken = np.zeros(tokens, np.bool_)
    for (_, _, first, end), left in zip(windows[order[room > 0]].tolist(), room[room > 0].tolist(), strict=True):
        taken[first : min(end, first + left)] = True
    return windows[np.sort(order[room > 0])], taken


def run_windows(
    encoder: HiddenStates, segment: Segment, windows: Windows, taken: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Yield hidden states and positions of the chosen positions; windows of similar length share a batch."""
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


def fit_transform(states: Iterator[NDArray[np.float32]], size: int, dims: int) -> Transform:
    """Fit mean, scale and principal components to hidden states (DReSD: z-scores, then PCA of the covariance)."""
    count, total, products = 0, np.zeros(size), np.zeros((size, size))
    shift = None
    for hidden in states:
        shift = hidden.mean(0) if shift is None else shift  # keeps sums of products small
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
    _, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    components = vectors[:, ::-1][:, :dims]
    components *= np.sign(components[np.abs(components).argmax(0), np.arange(dims)])
    return Transform(*(np.ascontiguousarray(a, np.float32) for a in (mean + shift, scale, components)))


def keys_of(
    encoder: HiddenStates,
    transform: Transform,
    segment: Segment,
    windows: Windows,
    taken: NDArray[np.bool_],
    tick: Callable[[int], object],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Compute the keys of a segment.

    Returns
    -------
    tuple
        Keys (n, dims) float32, and their positions (n,) int64 in ascending order.
    """
    keys, places = [np.empty((0, transform.components.shape[1]), np.float32)], [np.empty(0, np.int64)]
    for hidden, positions in run_windows(encoder, segment, windows, taken):
        keys.append(transform(hidden))
        places.append(positions)
        tick(len(positions))
    at = np.concatenate(places)
    order = np.argsort(at)
    return np.concatenate(keys)[order], at[order]


def sample_states(
    encoder: HiddenStates,
    parts: list[tuple[Segment, Windows, NDArray[np.bool_]]],
    most: int,
    tick: Callable[[int], object],
) -> Iterator[NDArray[np.float32]]:
    """Yield the hidden states of about `most` positions, from random windows of all segments."""
    possible = sum(int(taken.sum()) for _, _, taken in parts)
    for segment, windows, taken in parts:
        share = -(-most * int(taken.sum()) // possible)
        chosen, sampled = choose_windows(windows, len(taken), share)
        for hidden, _ in run_windows(encoder, segment, chosen, sampled & taken):
            tick(len(hidden))
            yield hidden
