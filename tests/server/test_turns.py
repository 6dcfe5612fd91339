"""Turns: who has just pressed a key comes first, as many together as pays; chats make room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from retrieve_spec.config import MAX_NODES
from retrieve_spec.server.jobs import Job, Task
from retrieve_spec.server.stopping import StopRules
from retrieve_spec.server.turns import Paces, Turns


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def job(clock, *, unread=0, typing=True, ago=0.0):
    made = Job(Task((1, 2, 3), StopRules(), typing=typing), b"", print, clock.now - ago)
    text = SimpleNamespace(unread=unread, piece=0, nodes=MAX_NODES)
    made.begun = SimpleNamespace(text=text, is_reading=unread > 16)
    return made


def paces(**seconds):
    """What passes over one, two, three texts take, each of which brings a token to each."""
    known = Paces()
    for number, taken in enumerate(seconds.values(), 1):
        for _ in range(5):
            known.note(number, taken, number)
    return known


def test_as_many_go_together_as_are_done_sooner_than_one_behind_the_other():
    assert Paces().together() == 1, "one alone is measured first"
    assert paces(one=1.0).together() == 3, "what is not known is tried"
    assert paces(one=1.0, two=1.8, three=1.9).together() == 4
    assert paces(one=1.0, two=1.4, three=2.1).together() == 2
    assert paces(one=1.0, two=1.4, three=1.9, four=2.6).together() == 3
    assert paces(**dict.fromkeys("abcd", 1.0)).together() == 5


def test_what_was_long_ago_is_measured_again():
    known = paces(one=1.0, two=1.4, three=2.1)
    for _ in range(60):
        known.note(1, 1.0, 1)
    assert known.together() == 3


def test_who_just_pressed_a_key_comes_first_unless_somebody_pauses(clock):
    turns = Turns(256, clock)
    first, second, third = (job(clock, ago=ago) for ago in (1.45, 1.35, 0.1))
    chat, ahead = job(clock, typing=False, ago=9.0), job(clock, typing=False)
    waiting = [chat, first, second, third, ahead]
    assert sorted(waiting, key=turns.order) == [third, second, first, chat, ahead]
    clock.now += 0.1
    assert sorted(waiting, key=turns.order) == [first, third, second, chat, ahead], "one has paused"
    clock.now += 0.1
    assert sorted(waiting, key=turns.order) == [first, second, third, chat, ahead]


def test_as_many_begin_as_go_together(clock):
    turns = Turns(256, clock)
    turns._paces = paces(one=1.0, two=1.8, three=9.0)
    one, two = job(clock), job(clock)
    assert turns.has_room([])
    assert turns.has_room([one])
    assert not turns.has_room([one, two])
    assert turns.has_room([one, job(clock, typing=False)]), "chats stand aside"
    assert turns.has_room([one, job(clock, unread=4000)]), "its prompt is read first"
    assert not turns.has_room([job(clock, unread=4000) for _ in range(16)])


def test_who_has_begun_goes_on_and_long_prompts_take_half_of_the_time(clock):
    turns = Turns(256, clock)
    one, two, long = job(clock), job(clock), job(clock, unread=4000)
    assert turns.next([one, two, long]) == [one, two, long]
    assert long.begun.text.piece == 256
    turns.note([one, two, long], 4000, 2, 1.0)
    assert turns.next([one, two, long]) == [one, two]
    turns.note([one, two], 0, 2, 1.0)
    assert turns.next([one, two, long]) == [one, two, long]


def test_chats_draft_little_while_somebody_types(clock):
    turns = Turns(256, clock)
    chats = [job(clock, typing=False), job(clock, typing=False)]
    assert turns.next(chats) == chats
    assert [chat.begun.text.nodes for chat in chats] == [MAX_NODES] * 2
    turns.typed()
    turns.next(chats)
    assert all(0 < chat.begun.text.nodes < 32 for chat in chats)
    clock.now += 10.0
    turns.next(chats)
    assert [chat.begun.text.nodes for chat in chats] == [MAX_NODES] * 2


def test_passes_that_read_nothing_are_measured(clock):
    turns = Turns(256, clock)
    one = job(clock)
    for _ in range(5):
        turns.note([one], 0, 10, 0.5)
    assert turns._paces.of(1) == pytest.approx(0.05)
    turns.note([one, job(clock, unread=300)], 300, 1, 9.0)
    assert turns._paces.of(1) == pytest.approx(0.05)
    assert turns._paces.of(2) is None
