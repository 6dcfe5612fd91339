"""Files of answers that cannot be written: what is said, what stays in the file, and what a kill leaves."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import running

from retrieve_spec.errors import StoreError
from retrieve_spec.sources.answers import AnswerMemory, RolloutMemory, answers_by_scope

NOBODY = 65534


def rollouts(path: Path) -> AnswerMemory:
    return RolloutMemory(path, save_every=1)


def sessions(path: Path) -> AnswerMemory:
    return answers_by_scope(path, "tokenizer", 1 << 16)


Maker = Callable[[Path], AnswerMemory]
both = pytest.mark.parametrize("make", [rollouts, sessions])


def key(memory: AnswerMemory) -> bytes:
    return memory.key("")


def add(memory: AnswerMemory, *tokens: int) -> None:
    memory.add(key(memory), np.array(tokens, np.int32))


def known(memory: AnswerMemory) -> list[list[int]]:
    return [ids.tolist() for ids in memory.answers_of(key(memory))]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that anybody may get to."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        yield place
        place.chmod(0o755)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    folder.chmod(0o555)
    everything = os.geteuid() == 0  # who may write anywhere
    if everything:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if everything:
            os.seteuid(0)
        folder.chmod(0o755)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Let files fail in the middle, as they do on a full disk."""
    resource = pytest.importorskip("resource", reason="this system has no limit on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def in_the_way(path: Path) -> Iterator[None]:
    path.mkdir()
    try:
        yield
    finally:
        path.rmdir()


def refused(memory: AnswerMemory, save: Callable[[], None]) -> None:
    """What a save that cannot be done says."""
    with pytest.raises(StoreError) as raised:
        save()
    said = str(raised.value)
    assert said.startswith(f"could not write answers to {memory.path}: ")
    assert "free space" in said
    assert isinstance(raised.value.__cause__, OSError)


@both
@pytest.mark.parametrize("what", ["read-only", "full", "temporary", "lock"])
def test_a_save_that_cannot_be_done_says_so_and_loses_nothing(make: Maker, what: str, folder: Path) -> None:
    path = folder / "answers.bin"
    memory = make(path)
    add(memory, 1, 2)
    memory.save()
    if what == "lock":
        (folder / "answers.bin.lock").unlink()
    before = path.read_bytes(), sorted(os.listdir(folder))
    if os.geteuid() == 0:
        path.chmod(0o644)
    hindered = {
        "read-only": read_only(folder),
        "full": full(folder),
        "temporary": in_the_way(folder / "answers.bin.tmp"),
        "lock": in_the_way(folder / "answers.bin.lock"),
    }[what]
    add(memory, *range(5, 60))
    with hindered:
        refused(memory, memory.save)
        memory.keep(at_once=True)  # logs it: a training run goes on
    assert (path.read_bytes(), sorted(os.listdir(folder))) == before, "nothing is left that takes room"
    assert known(make(path)) == [[1, 2]]
    assert known(memory) == [[1, 2], list(range(5, 60))]
    memory.save()
    assert known(make(path)) == known(memory)


@both
def test_a_folder_in_the_files_place_is_named_and_stays(make: Maker, folder: Path) -> None:
    memory = make(folder / "answers.bin")
    add(memory, 1)
    with in_the_way(folder / "answers.bin"):
        with pytest.raises(StoreError, match=r"answers\.bin.*Give another path"):
            memory.save()
        refused(memory, memory.forget)
        with pytest.raises(StoreError, match=r"answers\.bin.*Give another path"):
            make(folder / "answers.bin")
    assert sorted(os.listdir(folder)) == ["answers.bin.lock"]


def test_what_ended_a_block_is_not_hidden_by_a_save_that_fails(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, lock = folder / "rollouts.bin", folder / "rollouts.bin.lock"
    memory = RolloutMemory(path)
    add(memory, 1, 2)
    with pytest.raises(KeyboardInterrupt), in_the_way(lock), memory:
        raise KeyboardInterrupt
    assert "answers are not saved: StoreError: could not write" in caplog.text
    with pytest.raises(StoreError), in_the_way(lock), memory:
        add(memory, 3)
    with pytest.raises(KeyboardInterrupt), memory:
        raise KeyboardInterrupt
    assert known(rollouts(path)) == [[1, 2], [3]]


_WRITER = """
import sys
import numpy as np
from retrieve_spec.sources.answers import RolloutMemory, answers_by_scope
kind, path, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
memory = RolloutMemory(path, answers=100_000) if kind == "rollouts" else answers_by_scope(path, "tokenizer", 1 << 20)
key = memory.key("")
memory.add(memory.key("large"), np.arange(200_000, dtype=np.int32))
for number in range(rounds):
    memory.add(key, np.array([name, number], np.int32))
    memory.save()
    print(number, flush=True)
"""


def _writer(
    make: Maker, path: Path, name: int, rounds: int
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _WRITER, make.__name__, str(path), str(name), str(rounds)]
    return running(command, stdout=subprocess.PIPE, text=True)


@both
def test_processes_that_are_killed_while_they_save_lose_nothing_that_was_saved(make: Maker, folder: Path) -> None:
    """Four share a file; three are killed at different instants of a save."""
    path = folder / "answers.bin"
    with contextlib.ExitStack() as all_of_them:
        writers = [
            all_of_them.enter_context(_writer(make, path, name, rounds))
            for name, rounds in enumerate((100_000, 100_000, 100_000, 25))
        ]
        said = [-1] * 4
        for name in range(3):  # each has saved before the first is killed
            out = writers[name].stdout
            for _ in range(3):
                said[name] = int(out.readline())
        for name in range(3):
            time.sleep(0.02 + 0.007 * name)
            writers[name].send_signal(signal.SIGKILL)
            writers[name].wait()
            assert known(make(path)), "it opens, whichever of its contents is there"
        for name, writer in enumerate(writers):
            lines = writer.stdout.read().split("\n")[:-1]
            said[name] = max([said[name], *map(int, lines)])
        assert writers[3].wait() == 0
    assert said[3] == 24
    memory = RolloutMemory(path, answers=100_000) if make is rollouts else answers_by_scope(path, "tokenizer", 1 << 20)
    kept = set(map(tuple, known(memory)))
    assert {(name, number) for name in range(4) for number in range(said[name] + 1)} <= kept
    memory.save()  # nothing holds the lock any more
