"""A session, in memory and in its file: what is kept of whom, what is refused, how it is bounded and forgotten."""

import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.errors import StoreCorruptError, StoreError, TokenizerMismatchError
from retrieve_spec.sources.answers import AnswerMemory, RolloutMemory, answers_by_scope
from retrieve_spec.sources.session import LONGEST_LOOP, SessionMemory, loop_start

MANY = 1 << 20


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def opened(file: AnswerMemory, scope: str, vocabulary: int = MANY) -> SessionMemory:
    session = SessionMemory(1 << 20)
    session.keep_in(file, file.key(scope), vocabulary)
    return session


def texts(session: SessionMemory) -> list[list[int]]:
    return [text.tolist() for text in session.texts]


def test_a_later_process_begins_with_what_was_said_to_its_scope(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "day.bin"
    file = answers_by_scope(path, "tokenizer", 1000)
    alice, nobody = opened(file, "alice"), opened(file, "")
    alice.remember(ids(1, 2))
    nobody.remember(ids(3, 4))
    alice.read(ids(5, 6))
    assert texts(alice) == [[1, 2], [5, 6]]
    file.keep()
    again = answers_by_scope(path, "tokenizer", 1000)
    assert texts(opened(again, "alice")) == [[1, 2]], "what is only read is not kept"
    assert texts(opened(again, "")) == [[3, 4]]
    assert texts(opened(again, "bob")) == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"alice" not in path.read_bytes()


def test_who_may_read_the_file_is_up_to_its_owner(tmp_path: Path) -> None:
    file = answers_by_scope(tmp_path / "day.bin", "tokenizer", 1000)
    session = opened(file, "")
    for token in (1, 2):
        session.remember(ids(token))
        file.keep()
        assert stat.S_IMODE(file.path.stat().st_mode) == (0o600 if token == 1 else 0o640)
        file.path.chmod(0o640)


def test_tokens_that_the_model_does_not_embed_are_left_out(tmp_path: Path) -> None:
    file = answers_by_scope(tmp_path / "day.bin", "tokenizer", 1000)
    session = opened(file, "")
    session.remember(ids(1, 500))
    session.remember(ids(1, 499))
    assert texts(opened(file, "", 500)) == [[1, 499]]


def test_what_is_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "day.bin"
    file = answers_by_scope(path, "one", 1000)
    opened(file, "").remember(ids(1, 2))
    file.save()
    names = [answers_by_scope(tmp_path / name, name, 1)._owner.hex()[:12] for name in ("one", "other")]
    with pytest.raises(TokenizerMismatchError, match=f"{names[1]}.*{names[0]}"):
        answers_by_scope(path, "other", 1000)
    whole = path.read_bytes()
    with RolloutMemory(tmp_path / "rollouts.bin") as rollouts:
        rollouts.remember(ids(1), ids(2))
    rollouts_file = (tmp_path / "rollouts.bin").read_bytes()
    for content, error in ((whole[:-1], StoreCorruptError), (rollouts_file, TokenizerMismatchError)):
        path.write_bytes(content)
        with pytest.raises(error):
            answers_by_scope(path, "one", 1000)
        assert path.read_bytes() == content


def test_the_oldest_answers_of_a_scope_give_way(tmp_path: Path) -> None:
    file = answers_by_scope(tmp_path / "day.bin", "tokenizer", 100)
    busy, quiet = opened(file, "busy"), opened(file, "quiet")
    quiet.remember(ids(1, 2))
    for number in range(20):
        busy.remember(ids(*range(10 * number, 10 * number + 10)))
    kept = texts(opened(file, "busy"))
    assert kept[-1] == list(range(190, 200))
    assert 50 <= sum(map(len, kept)) <= 100
    assert texts(opened(file, "quiet")) == [[1, 2]], "one scope pushes out nothing of another"


def test_a_scope_is_forgotten_alone(tmp_path: Path) -> None:
    path = tmp_path / "day.bin"
    file, other = answers_by_scope(path, "tokenizer", 1000), answers_by_scope(path, "tokenizer", 1000)
    alice = opened(file, "alice")
    alice.remember(ids(1, 2))
    opened(file, "bob").remember(ids(3, 4))
    opened(other, "bob").remember(ids(5, 6))
    for one in (file, other):
        one.save()
    alice.keep_nowhere()
    file.forget(file.key("alice"))
    alice.remember(ids(7, 8))
    file.keep(at_once=True)
    again = answers_by_scope(path, "tokenizer", 1000)
    assert texts(opened(again, "alice")) == []
    assert texts(opened(again, "bob")) == [[3, 4], [5, 6]], "what another process saved meanwhile is kept"


@pytest.mark.parametrize("scope", ["alice", None])
def test_what_cannot_be_forgotten_in_the_file_is_forgotten_with_the_next_save(
    tmp_path: Path, scope: str | None
) -> None:
    path = tmp_path / "day.bin"
    file = answers_by_scope(path, "tokenizer", 1000)
    opened(file, "alice").remember(ids(1, 2))
    file.save()
    in_the_way = path.with_name(path.name + ".tmp")
    in_the_way.mkdir()
    with pytest.raises(StoreError, match="could not write answers"):
        file.forget(b"" if scope is None else file.key(scope))
    assert texts(opened(file, "alice")) == []
    opened(file, "bob").remember(ids(3, 4))
    file.keep(at_once=True)
    assert texts(opened(answers_by_scope(path, "tokenizer", 1000), "alice")) == [[1, 2]], "still in the way"
    in_the_way.rmdir()
    file.keep(at_once=True)
    again = answers_by_scope(path, "tokenizer", 1000)
    assert texts(opened(again, "alice")) == []
    assert texts(opened(again, "bob")) == [[3, 4]]


def known(session, text):
    """Tokens at the end of a text that the session knows."""
    return max(automaton.follow(np.array(text, np.int32))[1] for automaton in session.automata)


@given(st.integers(1, 60), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), max_size=20), st.data())
def test_of_the_newest_texts_every_part_is_known(bound, said, data):
    """None runs into another one, the oldest go first, and of a text that is too long the end is kept."""
    session = SessionMemory(bound)
    for number, text in enumerate(said):
        own = [4 * number + token for token in text]
        session.remember(ids(*own))
        assert len(session) == sum(map(len, session.texts)) <= bound
        kept = own[: loop_start(ids(*own))][-max(bound // 2, 1) :]
        assert bound < 2 or known(session, own[: loop_start(ids(*own))]) == len(kept)
    written = texts(session)
    asked = data.draw(st.lists(st.sampled_from([token for text in written for token in text] or [0]), max_size=8))
    ends = [asked[i:] for i in range(len(asked) + 1)]
    found = (end for end in ends if any(end == text[i : i + len(end)] for text in written for i in range(len(text))))
    assert known(session, asked) == len(next(found, []))


@given(
    st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 30)
)
def test_where_a_loop_begins(before, period, length):
    text = before + [period[i % len(period)] for i in range(length)]
    n = len(text)
    expected = n
    for p in range(1, n // 3 + 1):
        begins = [b for b in range(n - 3 * p + 1) if all(text[i] == text[i + p] for i in range(b, n - p))]
        if begins:
            expected = begins[0] + 2 * p
            break
    assert loop_start(np.array(text, np.int32)) == expected


def test_a_loop_is_remembered_once():
    beginning, loop = np.arange(100, 120, dtype=np.int32), np.arange(5, dtype=np.int32)
    session = SessionMemory(1000)
    session.remember(np.concatenate([beginning, np.tile(loop, 40), loop[:3]]))
    assert len(session) == 20 + 2 * 5
    session.remember(np.concatenate([beginning, np.tile(loop, 2)]))
    assert len(session) == 60, "twice is no loop"
    assert loop_start(np.arange(LONGEST_LOOP * 3 + 3, dtype=np.int32) % (LONGEST_LOOP + 1)) == LONGEST_LOOP * 3 + 3
