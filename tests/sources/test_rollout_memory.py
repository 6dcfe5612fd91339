"""A rollout memory: bounds, isolation, files that are whole or refused, processes that share one."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.errors import ConfigError, PromptError, StoreCorruptError, StoreVersionError
from retrieve_spec.sources import answers as answer_file
from retrieve_spec.sources.answers import RolloutMemory, packed


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def contents(memory: RolloutMemory, *prompts: np.ndarray) -> list[list[list[int]]]:
    return [[answer.tolist() for answer in memory.answers_to(prompt)] for prompt in prompts]


def test_the_oldest_gives_way_and_equal_answers_are_one() -> None:
    memory = RolloutMemory(answers=3)
    for last in (1, 2, 3, 2, 4):
        memory.remember(ids(9), ids(8, last))
    assert contents(memory, ids(9)) == [[[8, 3], [8, 2], [8, 4]]]
    memory.remember(ids(9), ids(*[7, 8] * 40))
    assert contents(memory, ids(9))[0][-1] == [7, 8, 7, 8]  # the loop once more than it is needed to be seen
    memory.remember(ids(9), ids())
    assert len(contents(memory, ids(9))[0]) == 3


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60)), max_size=60), st.integers(1, 900))
def test_bytes_are_bounded(answers: list[tuple[int, int]], most: int) -> None:
    """By the naive rule: the prompt that was answered longest ago goes first, then old answers of the last one."""
    memory = RolloutMemory(answers=4, max_bytes=most)
    naive: dict[int, list[list[int]]] = {}
    for number, (prompt, length) in enumerate(answers):
        text = [1000 + number * 100 + i for i in range(length)]
        memory.remember(ids(prompt), ids(*text))
        naive[prompt] = [*naive.pop(prompt, []), text][-4:]
        while sum(64 + sum(16 + 4 * len(a) for a in of) for of in naive.values()) > most:
            first = next(iter(naive))
            if len(naive) > 1 or len(naive[first]) == 1:
                del naive[first]
            else:
                naive[first].pop(0)
        assert memory.num_bytes <= most
        assert len(memory) == len(naive)
    assert contents(memory, *map(ids, range(7))) == [naive.get(prompt, []) for prompt in range(7)]


def test_tokens_of_another_vocabulary_are_left_out() -> None:
    memory = RolloutMemory()
    memory.remember(ids(1), ids(500))
    assert memory.automata(ids(1), 500) == []
    assert len(memory.automata(ids(1), 501)) == 1
    memory.remember(ids(1), ids(3, 4))
    assert len(memory.automata(ids(1), 500)) == 1
    assert len(memory.automata(ids(1), 501)) == 2


def test_beginnings_are_found_behind_the_prompt() -> None:
    memory = RolloutMemory()
    prompt = ids(*range(10, 40))
    memory.remember(prompt, ids(50, 51))
    (automaton,) = memory.automata(prompt, 100)
    state, matched = automaton.follow(prompt[-8:])
    assert matched == 8
    assert automaton.successors(state)[0].tolist() == [50]


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rollouts.bin"
    with RolloutMemory(path) as memory:
        for prompt in range(5):
            for answer in range(3):
                memory.remember(ids(prompt), ids(prompt, answer, 7))
    again = RolloutMemory(path)
    assert contents(again, *map(ids, range(6))) == contents(memory, *map(ids, range(6)))
    assert again.num_bytes == memory.num_bytes
    smaller = RolloutMemory(path, answers=1)
    assert contents(smaller, ids(4)) == [[[4, 2, 7]]]
    again.forget()
    assert len(RolloutMemory(path)) == len(again) == 0


def test_what_others_saved_is_taken_in(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.bin"
    one, other = RolloutMemory(path), RolloutMemory(path)
    one.remember(ids(1), ids(5))
    one.save()
    other.remember(ids(1), ids(6))
    other.remember(ids(2), ids(7))
    other.save()
    one.save()
    assert contents(one, ids(1), ids(2)) == contents(other, ids(1), ids(2)) == [[[5], [6]], [[7]]]
    path.unlink()
    one.save()
    assert contents(RolloutMemory(path), ids(1), ids(2)) == [[[5], [6]], [[7]]]


def test_what_one_process_forgets_no_other_brings_back(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.bin"
    one = RolloutMemory(path)
    one.remember(ids(1), ids(5))
    one.save()
    other = RolloutMemory(path)
    one.forget()
    other.remember(ids(2), ids(6))
    other.save()
    assert contents(RolloutMemory(path), ids(1), ids(2)) == [[], [[6]]]


@pytest.mark.parametrize("answer", [[5, -100], [2**32 + 7], [0.5], [[1, 2]]])
def test_what_is_no_token_is_refused(answer: list[int], tmp_path: Path) -> None:
    memory = RolloutMemory(tmp_path / "rollouts.bin")
    with pytest.raises(PromptError, match="token ids from 0"):
        memory.remember(ids(1), np.array(answer))
    memory.remember(ids(1), np.array([], np.int64))
    assert len(memory) == 0


def test_saves_when_it_is_due(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.bin"
    memory = RolloutMemory(path, save_every=3)
    for number in range(3):
        assert not path.exists()
        memory.remember(ids(1), ids(number))
        memory.keep()
    assert len(RolloutMemory(path).answers_to(ids(1))) == 3


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Every altered byte, whatever is missing or too much, and lengths that do not add up behind a right checksum."""
    path = tmp_path / "rollouts.bin"
    with RolloutMemory(path) as memory:
        memory.remember(ids(1, 2), ids(3, 4))
        memory.remember(ids(5), ids(6))
    whole, head = path.read_bytes(), answer_file._HEAD

    def signed(body: bytes, prompts: int = 2, answers: int = 2) -> bytes:
        return head.pack(b"rs-answers\n\n", 1, zlib.crc32(body), prompts, answers) + body

    body = whole[head.size :]
    assert signed(body) == whole
    others = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    others += [whole[:at] for at in range(len(whole))]
    others += [whole + b"\0", packed({bytes(32): {b"": None}})]  # an answer without tokens
    others += [signed(other) for other in (body + b"\0\0\0\0", body[:-4], body[:-4] + b"\xff" * 4)]
    for content in [*others, signed(body, 2**63, 2**63)]:
        path.write_bytes(content)
        with pytest.raises((StoreCorruptError, StoreVersionError)):
            RolloutMemory(path)
    path.write_bytes(whole)
    assert contents(RolloutMemory(path), ids(5)) == [[[6]]]


@pytest.mark.parametrize(
    "options", [{"answers": 0}, {"max_bytes": 0}, {"save_every": -1}, {"answers": "3"}, {"max_bytes": 2.5}]
)
def test_bounds_are_checked(options: dict[str, Any]) -> None:
    (value,) = options.values()
    with pytest.raises(ConfigError, match=f"got {value!r}\\. "):
        RolloutMemory(**options)
    with pytest.raises(ConfigError, match="with a path"):
        RolloutMemory().save()


def test_what_waits_for_a_save_is_bounded(tmp_path: Path) -> None:
    memory = RolloutMemory(tmp_path / "rollouts.bin", answers=2, save_every=0)
    for number in range(5000):
        memory.remember(ids(number % 3), ids(number, 1))
    assert len(memory._new) <= 1100
    memory.save()
    assert contents(RolloutMemory(memory.path), ids(0)) == contents(memory, ids(0)) == [[[4995, 1], [4998, 1]]]
