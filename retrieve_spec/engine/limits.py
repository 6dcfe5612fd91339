"""Limits: how much one pass of a sequence may draft, and what its cache takes."""

from __future__ import annotations

from dataclasses import dataclass

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.engine.rows import Prepared
from retrieve_spec.sampling.stopping import Stopper
from retrieve_spec.verify.interface import ModelInterface


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
    most_nodes
        Draft nodes at most, however many `nodes` leaves to the drafter and the measured cost.
    positions
        Positions that the model was made for; 0 where it does not say.
    padding
        Tokens in front of the text that take no positions.
    bytes_per_token
        Memory that keys and values of a token take.
    """

    nodes: int | None
    max_depth: int
    max_length: int
    draft_end: int = 0
    slot_end: int = 0
    prefill_chunk: int = 0
    prompt_logits: int = 0
    provenance: bool = False
    most_nodes: int = MAX_NODES
    positions: int = 0
    padding: int = 0
    bytes_per_token: int = 0


def limits_of(
    prepared: Prepared,
    config: SpeculationConfig,
    interface: ModelInterface,
    stopper: Stopper,
    nodes: int | None,
    padding: int = 0,
    rows: int = 1,
    bytes_per_token: int = 0,
) -> Limits:
    """How much a pass of a row may draft, one of so many of a call; `padding` tokens in front take no positions."""
    inputs = prepared.inputs
    unseen = 0 if inputs.holds_past else inputs.past_length
    ends = [interface.max_positions] if interface.max_positions else []
    if interface.rope_switch and not interface.rope_rescans:
        ends.append(interface.rope_switch)
    return Limits(
        nodes=nodes,
        max_depth=config.max_depth,
        max_length=stopper.max_length if stopper.max_length is not None else prepared.config.max_length,
        draft_end=max(min(ends) - unseen, 1) + padding if ends else 0,
        slot_end=max(interface.max_slots - unseen, 1) if interface.max_slots else 0,
        prefill_chunk=config.prefill_chunk,
        prompt_logits=-(-config.prompt_logits // rows),  # as rows become many, what is learned there drafts less
        provenance=config.provenance,
        positions=interface.max_positions,
        padding=padding - unseen,
        bytes_per_token=bytes_per_token,
    )
