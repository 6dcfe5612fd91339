"""Limits of a sequence: how much one pass may draft, and what its cache takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Limits:
    """How much one pass of a sequence may draft, and what its cache takes.

    Attributes
    ----------
    nodes
        Draft nodes at most; None leaves it to the drafter and the measured cost.
    max_depth
        Longest drafted path.
    max_length
        Tokens the text may grow to.
    draft_end
        Length of the text that no drafted token may reach beyond (position limit, rotary switch); 0 for no limit.
    slot_end
        Tokens of the text and nodes of a draft together, at most; 0 for no limit.
    prefill_chunk
        Prompt tokens per pass at most; 0 feeds the prompt in one pass.
    prompt_logits
        Positions at the end of the prompt whose top tokens the drafter sees.
    provenance
        Note where accepted drafts came from.
    positions
        Positions that the model was made for; 0 where it does not say.
    padding
        Tokens in front of the text that take no positions.
    bytes_per_token
        Memory that keys and values of a token take.
    vocabulary
        Tokens that the model has: what is remembered of others, of before it lost them, is not drafted.
    """

    nodes: int | None
    max_depth: int
    max_length: int
    draft_end: int = 0
    slot_end: int = 0
    prefill_chunk: int = 0
    prompt_logits: int = 0
    provenance: bool = False
    positions: int = 0
    padding: int = 0
    bytes_per_token: int = 0
    vocabulary: int = 1 << 31
