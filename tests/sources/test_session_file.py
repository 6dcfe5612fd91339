"""A session's file: what is kept of whom, what is refused, how it is bounded and forgotten."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from retrieve_spec.errors import StoreCorruptError, StoreError, TokenizerMismatchError
from retrieve_spec.sources.answers import AnswerMemory, RolloutMemory, answers_by_scope
from retrieve_spec.sources.session import SessionMemory

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
        assert file.path is not None
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
    damaged = StoreCorruptError
    others = (tmp_path / "rollouts.bin").read_bytes(), TokenizerMismatchError
    for content, error in ((whole[:-1], damaged), (whole[:-4] + b"\1\1\1\1", damaged), (b"", damaged), others):
        path.write_bytes(content)
        with pytest.raises(error):
            answers_by_scope(path, "one", 1000)
        assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match="could not read"):
        answers_by_scope(path, "one", 1000)


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


def test_a_save_is_due_when_it_is_worth_writing_everything(tmp_path: Path) -> None:
    """The first answer at once, later ones together: of n answers, all saves write a multiple of n."""
    file = answers_by_scope(tmp_path / "day.bin", "tokenizer", 100_000)
    session = opened(file, "")
    written = 0
    for number in range(400):
        session.remember(ids(*range(10 * number, 10 * number + 10)))
        if file._is_due():
            file.keep()
            written += file.num_bytes
    assert written < 40 * file.num_bytes
    assert len(opened(answers_by_scope(file.path, "tokenizer", 100_000), "").texts) > 300  # type: ignore[arg-type]
    file.keep(at_once=True)
    assert len(opened(answers_by_scope(file.path, "tokenizer", 100_000), "").texts) == 400  # type: ignore[arg-type]


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
