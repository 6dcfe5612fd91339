"""Sequences in, the passes that serve them out: packed where the model is recorded, padded, or one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

from retrieve_spec.config import PASS
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.recorded.cuda.pass_pool import PassPool
from retrieve_spec.recorded.packed_pass import forward_together
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.verify.padded_batch import PaddedRow

logger = logging.getLogger(__name__)


def passes_over(sequences: Many[Sequence]) -> Iterator[list[Sequence]]:
    """Divide sequences into those that one pass serves, `config.PASS.batch_rows` at most."""
    shared: dict[object, list[Sequence]] = {}
    for sequence in sequences:
        company = _company(sequence)
        if company is None:
            yield [sequence]
        else:
            shared.setdefault((id(company), sequence.wants_hidden), []).append(sequence)
    for together in shared.values():
        for first in range(0, len(together), PASS.batch_rows):
            yield together[first : first + PASS.batch_rows]


def _company(sequence: Sequence) -> object:
    """The recorded pass, or the padded batch, that a sequence can share with others, or None."""
    verifier = sequence.verifier
    if isinstance(verifier, PaddedRow):
        return None if verifier.alone else verifier.batch
    if not isinstance(verifier, RecordedVerifier) or verifier.not_recorded:
        return None
    return verifier.recorded if sequence.wants_hidden in (None, verifier.recorded.layer) else None


def pads(batch: Many[Sequence]) -> bool:
    """Whether a pass over a batch takes as many rows for each sequence as for the one that needs most."""
    return len(batch) > 1 and isinstance(batch[0].verifier, PaddedRow)


def verify_all(batch: list[Sequence], trees: Many[DraftTree], pool: PassPool | None) -> tuple[list[Sequence], bool]:
    """Verify the trees of a batch in one pass.

    Returns
    -------
    verified
        The sequences that have been; the others have failed.
    usual
        Whether it took as long as such passes do: one whose graph was captured takes longer.
    """
    if len(batch) > 1:
        try:
            usual = _verify_padded(batch, trees) if pads(batch) else _verify_packed(batch, trees, pool)
        except Exception:
            logger.debug("a pass over %d sequences failed; each is tried alone", len(batch), exc_info=True)
        else:
            return batch, usual
    own = dict(zip(map(id, batch), trees, strict=True))
    return each(batch, lambda sequence: sequence.verify(own[id(sequence)])), len(batch) == 1


def _verify_packed(batch: list[Sequence], trees: Many[DraftTree], pool: PassPool | None) -> bool:
    """Verify trees in one recorded pass."""
    graphs = None if pool is None else pool.take_texts()
    captures = 0 if graphs is None else graphs.captures
    verifiers = [sequence.verifier for sequence in batch if isinstance(sequence.verifier, RecordedVerifier)]
    roots = [sequence.text.last_ids for sequence in batch]
    try:
        outputs = forward_together(verifiers, roots, trees, batch[0].wants_hidden, graphs)
    finally:
        if pool is not None and graphs is not None:
            pool.give_back_texts(graphs)
    for sequence, tree, output in zip(batch, trees, outputs, strict=True):
        sequence.saw(tree, output)
    return graphs is None or graphs.captures == captures


def _verify_padded(batch: list[Sequence], trees: Many[DraftTree]) -> bool:
    """Verify trees in one pass of the model's own forward over a padded batch."""
    rows = [sequence.verifier for sequence in batch if isinstance(sequence.verifier, PaddedRow)]
    roots = [sequence.text.last_ids for sequence in batch]
    outputs = rows[0].batch.forward(rows, roots, trees, batch[0].wants_hidden)
    for sequence, tree, output in zip(batch, trees, outputs, strict=True):
        sequence.saw(tree, output)
    return True


def each(sequences: Many[Sequence], act: Callable[[Sequence], object]) -> list[Sequence]:
    """Let every sequence act; those that could. One that fails fails alone."""
    going = []
    for sequence in sequences:
        try:
            act(sequence)
            going.append(sequence)
        except Exception as error:
            sequence.error = error
    return going


def kept_bytes(sequences: Many[Sequence]) -> int:
    """Memory that keys and values of sequences may take, for what they have said and may say at once.

    Those that share passes of the model's own forward take as much as the longest of them each.
    """
    each_of = [sequence.bytes_per_token * (sequence.text.length + PASS.cache_block) for sequence in sequences]
    padded = [size for size, sequence in zip(each_of, sequences, strict=True) if _is_padded(sequence)]
    return sum(each_of) - sum(padded) + len(padded) * max(padded, default=0)


def _is_padded(sequence: Sequence) -> bool:
    return isinstance(sequence.verifier, PaddedRow)
