"""Batches: which sequences share a pass, packed where the model is recorded, padded, or one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import PASS
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.sequence import NO_DRAFT, Sequence
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier, forward_together
from retrieve_spec.sampling.acceptance import Warpers
from retrieve_spec.sampling.device_acceptance import DeviceSampler, read_sampled
from retrieve_spec.sampling.pass_logits import PassLogits, read_side_by_side
from retrieve_spec.verify.padded_batch import PaddedRow
from retrieve_spec.verify.verifier import Ran, VerifierOutput

logger = logging.getLogger(__name__)


def passes_over(sequences: Many[Sequence]) -> Iterator[list[Sequence]]:
    """Divide sequences into those that one pass serves, `config.PASS.batch_rows` at most."""
    shared: dict[object, list[Sequence]] = {}
    for sequence in sequences:
        passes = _shared_passes(sequence)
        if passes is None:
            yield [sequence]
        else:
            shared.setdefault((id(passes), sequence.wants_hidden), []).append(sequence)
    for together in shared.values():
        for first in range(0, len(together), PASS.batch_rows):
            yield together[first : first + PASS.batch_rows]


def _shared_passes(sequence: Sequence) -> object:
    """The recorded pass, or the padded batch, that a sequence can share with others, or None."""
    verifier = sequence.verifier
    if not isinstance(verifier, (PaddedRow, RecordedVerifier)) or (sequence.is_reading and not verifier.packs_prompts):
        return None
    if isinstance(verifier, PaddedRow):
        return None if verifier.alone else verifier.batch
    if verifier.not_recorded:
        return None
    return verifier.recorded if sequence.wants_hidden in (None, verifier.recorded.layer) else None


def pads(batch: Many[Sequence]) -> bool:
    """Whether a pass over a batch takes as many rows for each sequence as for the one that needs most."""
    return len(batch) > 1 and isinstance(batch[0].verifier, PaddedRow)


def verify_all(batch: list[Sequence]) -> tuple[list[Sequence], bool]:
    """Verify the trees of a batch in one pass.

    Returns
    -------
    verified
        The sequences that have been; the others have failed.
    usual
        Whether it took as long as such passes do: one whose graph was captured takes longer.
    """
    if len(batch) == 1:
        batch = each(batch, Sequence.verify)
        return batch, not any(sequence.seen.output.ran is Ran.CAPTURED for sequence in batch if sequence.seen.output)
    roots = [sequence.root_ids for sequence in batch]
    keeps = [1] * len(batch) if any(len(ids) > 1 for ids in roots) else None
    outputs = _together(batch, roots, [sequence.tree for sequence in batch], keeps)
    if outputs is None:
        return each(batch, Sequence.verify), False
    return each(batch, Sequence.saw, outputs), outputs[0].ran is not Ran.CAPTURED


def read_logits_all(batch: list[Sequence]) -> list[Sequence]:
    """Let sequences read the logits of their pass: once for all that look for the same."""
    alike: dict[Warpers | None, list[Sequence]] = {}
    for sequence in batch:
        sampler = sequence.sampler
        if sampler.reads_plainly:
            alike.setdefault(None, []).append(sequence)
        elif isinstance(sampler, DeviceSampler) and (rules := sampler.alike(sequence.text)) is not None:
            alike.setdefault(rules, []).append(sequence)
    read: dict[int, PassLogits] = {}
    for rules, together in alike.items():
        if len(together) == 1:
            continue  # it reads alone
        try:
            found = _read(together, rules)
        except Exception:
            logger.debug("logits of %d sequences could not be read at once", len(together), exc_info=True)
            continue
        read.update(zip(map(id, together), found, strict=True))
    return each(batch, Sequence.read_logits, [read.get(id(sequence)) for sequence in batch])


def _read(batch: list[Sequence], rules: Warpers | None) -> list[PassLogits]:
    """What sequences look for in the logits of their pass, chosen by the same `rules`, or plainly."""
    parts, top_k = [sequence.seen.every_logit for sequence in batch], max(sequence.top_k for sequence in batch)
    if rules is None:
        found = read_side_by_side(parts, top_k)
    else:
        noises = [noise for sequence in batch if (noise := sequence.sampler.noise_at(sequence.text)) is not None]
        firsts, trees = zip(*((sequence.seen.first_row, sequence.seen.tree) for sequence in batch), strict=True)
        found = read_sampled(parts, firsts, trees, noises, rules, top_k)
    for sequence, read in zip(batch, found, strict=True):
        if sequence.top_k < top_k:  # a drafter learns from as many as it asks for, whatever others do
            read.top_ids = np.ascontiguousarray(read.top_ids[:, : sequence.top_k])
            read.top_logits = np.ascontiguousarray(read.top_logits[:, : sequence.top_k])
    return found


def read_together(batch: list[Sequence], pieces: Many[NDArray[np.int32]]) -> None:
    """Read pieces of prompts in one pass."""
    keeps = [sequence.keeps(piece) for sequence, piece in zip(batch, pieces, strict=True)]
    outputs = _together(batch, pieces, [NO_DRAFT] * len(batch), keeps)
    if outputs is None:
        each(batch, Sequence.read, pieces)
    else:
        each(batch, Sequence.has_read, pieces, outputs)


def _together(
    batch: list[Sequence], roots: Many[NDArray[np.int32]], trees: Many[DraftTree], keeps: Many[int] | None = None
) -> list[VerifierOutput] | None:
    """What one pass computes for each of a batch, None where each is to be tried alone."""
    if len(batch) < 2:
        return None
    try:
        if pads(batch):
            rows = [sequence.verifier for sequence in batch if isinstance(sequence.verifier, PaddedRow)]
            return rows[0].batch.forward(rows, roots, trees, batch[0].wants_hidden, keeps)
        verifiers = [sequence.verifier for sequence in batch if isinstance(sequence.verifier, RecordedVerifier)]
        return forward_together(verifiers, roots, trees, batch[0].wants_hidden, keeps)
    except Exception:
        logger.debug("a pass over %d sequences failed; each is tried alone", len(batch), exc_info=True)
    return None


def each(sequences: Many[Sequence], act: Callable[..., object], *given: Many[Any]) -> list[Sequence]:
    """Let every sequence act, each on what it is given; those that could. One that fails fails alone."""
    going = []
    for sequence, *own in zip(sequences, *given, strict=True):
        try:
            act(sequence, *own)
            going.append(sequence)
        except BaseException as error:
            sequence.fail(error)
    return going


def kept_bytes(sequences: Many[Sequence]) -> int:
    """Memory that keys and values of sequences may take, for what they have said and may say at once.

    Those that share passes of the model's own forward take as much as the longest of them each.
    """
    each_of = [sequence.limits.bytes_per_token * (sequence.text.length + PASS.cache_block) for sequence in sequences]
    padded = [size for size, sequence in zip(each_of, sequences, strict=True) if _is_padded(sequence)]
    return sum(each_of) - sum(padded) + len(padded) * max(padded, default=0)


def _is_padded(sequence: Sequence) -> bool:
    return isinstance(sequence.verifier, PaddedRow)
