"""The scheduler: who begins, who shares a pass, and how much of it others take while somebody types."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.engine.joining import CallOptions
from retrieve_spec.engine.scheduler import AHEAD, ORDINARY, TYPING, Scheduler, Turn
from retrieve_spec.engine.sequence import Sequence, Status
from retrieve_spec.generation.templates import Templates


def opened(model: Any, prompt: torch.Tensor, turn: Turn) -> Sequence:
    cache = DynamicCache(config=model.config)
    options = {"past_key_values": cache, "max_new_tokens": 12, "do_sample": False}
    sequence = Templates(model).open(prompt, CallOptions(), **options)
    assert sequence is not None
    sequence.turn = turn
    model.speculation.engine.join(sequence)
    return sequence


def taken(sequence: Sequence) -> list[int]:
    return [token for _ in iter(lambda: sequence.reader.has_pieces, False) for token in sequence.reader.take().tolist()]


def test_a_text_of_higher_rank_has_the_passes_to_itself_and_both_say_what_they_say_alone(
    tiny: Any, prompt: torch.Tensor
) -> None:
    prompts = prompt, prompt.flip(1)
    expected = [tiny.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist() for ids in prompts]
    engine = rs.accelerate(tiny).speculation.engine
    chat, typed = opened(tiny, prompts[0], Turn(ORDINARY)), opened(tiny, prompts[1], Turn(TYPING))
    said: dict[Sequence, list[int]] = {chat: [], typed: []}
    while not chat.ended:
        engine.advance([sequence for sequence in said if not sequence.ended])
        assert typed.ended or not chat.has_news
        for sequence, tokens in said.items():
            tokens += taken(sequence)
    assert list(said.values()) == expected


def test_a_cancelled_turn_ends_its_sequence_and_no_other(tiny: Any, prompt: torch.Tensor) -> None:
    engine = rs.accelerate(tiny).speculation.engine
    gone, stays = opened(tiny, prompt, Turn()), opened(tiny, prompt, Turn())
    engine.advance([gone, stays])
    steps = len(gone.steps)
    gone.turn.cancelled = True
    while not stays.ended:
        taken(stays)
        engine.advance([stays])
    assert gone.status is Status.CANCELLED and len(gone.steps) == steps
    assert stays.status is Status.FINISHED


def test_a_text_waits_for_room_and_for_those_before_it() -> None:
    scheduler = Scheduler(max_running=2, cache_bytes=100)
    chat = Turn(ORDINARY, cache_bytes=60)
    assert scheduler.may_begin(Turn(ORDINARY, cache_bytes=1000), []), "the first always can"
    assert scheduler.may_begin(Turn(ORDINARY, cache_bytes=40), [chat])
    assert not scheduler.may_begin(Turn(ORDINARY, cache_bytes=41), [chat])
    assert not scheduler.may_begin(Turn(ORDINARY), [chat, chat])
    assert scheduler.may_begin(Turn(TYPING, cache_bytes=1000), [chat, chat])
    assert not scheduler.may_begin(Turn(AHEAD), [chat])


def test_while_somebody_types_others_take_little_of_each_pass() -> None:
    now = [0.0]
    scheduler = Scheduler(prefill_chunk=512, clock=lambda: now[0])
    chat = SimpleNamespace(turn=Turn())
    scheduler.next_pass([chat])
    usual = chat.turn.most_piece, chat.turn.most_nodes
    scheduler.submit(Turn(TYPING))
    scheduler.next_pass([chat])
    assert chat.turn.most_piece < usual[0] and chat.turn.most_nodes < usual[1]
    now[0] += 60.0
    scheduler.next_pass([chat])
    assert (chat.turn.most_piece, chat.turn.most_nodes) == usual
