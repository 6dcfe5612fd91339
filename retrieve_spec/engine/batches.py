"""Sequences in, the passes that serve them out: several in one where the model is recorded, else one after another."""

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

logger = logging.getLogger(__name__)


def passes_over(sequences: Many[Sequence]) -> Iterator[list[Sequence]]:
    """Divide sequences into those that one pass serves, `config.PASS.batch_rows` at most."""
    shared: dict[object, list[Sequence]] = {}
    for sequence in sequences:
        recording = _recording(sequence)
        if recording is None:
            yield [sequence]
        else:
            shared.setdefault((id(recording), sequence.wants_hidden), []).append(sequence)
    for together in shared.values():
        for first in range(0, len(together), PASS.batch_rows):
            yield together[first : first + PASS.batch_rows]


def _recording(sequence: Sequence) -> object:
    """The recorded pass that a sequence can share with others, or None."""
    verifier = sequence.verifier
    if not isinstance(verifier, RecordedVerifier) or verifier.not_recorded:
        return None
    return verifier.recorded if sequence.wants_hidden in (None, verifier.recorded.layer) else None


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
        graphs = None if pool is None else pool.take_texts()
        captures = 0 if graphs is None else graphs.captures
        verifiers = [sequence.verifier for sequence in batch if isinstance(sequence.verifier, RecordedVerifier)]
        roots = [sequence.text.last_ids for sequence in batch]
        try:
            outputs = forward_together(verifiers, roots, trees, batch[0].wants_hidden, graphs)
        except Exception:
            logger.debug("a pass over %d sequences failed; each is tried alone", len(batch), exc_info=True)
        else:
            for sequence, tree, output in zip(batch, trees, outputs, strict=True):
                sequence.saw(tree, output)
            return batch, graphs is None or graphs.captures == captures
        finally:
            if pool is not None and graphs is not None:
                pool.give_back_texts(graphs)
    own = dict(zip(map(id, batch), trees, strict=True))
    return each(batch, lambda sequence: sequence.verify(own[id(sequence)])), len(batch) == 1


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


def kept_bytes(sequence: Sequence) -> int:
    """Memory that a sequence's keys and values may take, for what it has said and `config.PASS` lets it say at once."""
    return sequence.bytes_per_token * (sequence.text.length + PASS.cache_block)
