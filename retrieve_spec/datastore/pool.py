"""Workers: runs the ranks of a stage in this process, or in processes of their own.

A worker is a fresh interpreter (never a fork: threads and their locks stay where they are) that gets ranks on its
standard input and answers on its standard output. It ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from retrieve_spec import errors
from retrieve_spec.datastore.exchange import Exchange, look, needs_of, run_travelling
from retrieve_spec.datastore.stages import Done, Stages, run_rank
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError, RetrieveSpecError

SPAWN_WORK = 1 << 24
"""Bytes to read, or four times the tokens to sort, from which the start of other processes is worth its second."""
ALONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
"""Environment of a process that computes on one core."""
_MODULE = "retrieve_spec.datastore.worker"


Runner = Callable[[Stages, str, Sequence[int], int, Callable[[Done], object]], None]
"""Runs ranks of a stage, somewhere, and tells of each that is done, as `Pool.run` says."""


class Pool:
    """Runs ranks in up to so many processes of this machine, which stay for the next stage; a context manager.

    Entering it gives `run`. Small work is done in the calling process, as long as no other was started.

    Parameters
    ----------
    workers
        Processes at most.
    exchange
        What files travel through; None where they lie in the work folder.
    always
        Whether small work is done in other processes as well.
    """

    def __init__(self, workers: int, exchange: Exchange | None = None, *, always: bool = False) -> None:
        self._workers, self._exchange, self._always = workers, exchange, always
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Runner:
        return self.run

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, stages: Stages, stage: str, ranks: Sequence[int], size: int, tell: Callable[[Done], object]) -> None:
        """Run a stage for some ranks.

        Parameters
        ----------
        stages, stage
            The stages of the change, and `"tokens"` or `"segment"`.
        ranks
            Which of its ranks; large ones are best first.
        size
            How much work it is: bytes to read, or four times the tokens to sort.
        tell
            Told of each finished rank.

        Raises
        ------
        BuildError
            When a worker died, as from a lack of memory.
        RetrieveSpecError, OSError
            As the stage.
        """
        waiting = set(ranks)
        needs: dict[str, Any] = {}
        if self._exchange is not None:
            look(stages, stage, waiting, tell, self._exchange)  # an interrupted change may have left some
            needs = self._exchange.needs(stages, stage, waiting)
        self._run(stages, stage, [rank for rank in ranks if rank in waiting], size, tell, needs)
        if self._exchange is not None:
            self._exchange.collect(stages.work, stage, waiting)

    def _run(
        self,
        stages: Stages,
        stage: str,
        ranks: Sequence[int],
        size: int,
        tell: Callable[[Done], object],
        needs: dict[str, Any],
    ) -> None:
        url = self._exchange.url if self._exchange is not None else ""
        count = min(self._workers, len(ranks))
        small = not self._always and (count < 2 or size < SPAWN_WORK)
        if not self._processes and (small or not sys.executable):
            for rank in ranks:
                tell(run_one(stages, stage, rank, url, needs))
            return
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for rank in ranks:
            waiting.put(rank)
        answers: queue.SimpleQueue[Done | BaseException] = queue.SimpleQueue()
        threads: list[threading.Thread] = []
        try:
            self._processes += [_start(stages.work) for _ in range(len(self._processes), count)]
            for process in self._processes[:count]:
                told = (process, stage, url, needs, waiting, answers)
                feeding = threading.Thread(target=_feed, args=told, daemon=True)
                feeding.start()
                threads.append(feeding)
            for _ in ranks:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                tell(answer)
        except BaseException:
            self._end(threads)
            raise
        for feeding in threads:
            feeding.join()

    def _end(self, threads: Sequence[threading.Thread] = ()) -> None:
        """End all processes, then those that feed them."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for feeding in threads:
            feeding.join()
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def run_one(stages: Stages, stage: str, rank: int, url: str, needs: dict[str, Any]) -> Done:
    """Run one rank in this process, over the work folder or, with an address, through what travels there."""
    if not url:
        return run_rank(stages, stage, rank)
    return run_travelling(url, stage, rank, needs, stages.work.path)


def _start(work: WorkFolder) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, os.fspath(work.store.absolute())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | ALONE | {"PYTHONPATH": paths},
    )


def _feed(
    process: subprocess.Popen[bytes],
    stage: str,
    url: str,
    needs: dict[str, Any],
    waiting: queue.SimpleQueue[int],
    answers: queue.SimpleQueue[Done | BaseException],
) -> None:
    """Hand ranks to one worker until none is left or it fails."""
    assert process.stdin is not None and process.stdout is not None
    while True:
        try:
            rank = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            process.stdin.write(json.dumps([stage, rank, url, needs_of(needs, rank)]).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # it is gone, or its pipes were closed
            line = b""
        answer = _read(line)
        if answer is None:  # it ended, or it is no worker
            process.kill()
            answers.put(_died(process.wait(), stage, rank))
            return
        answers.put(answer)


def _read(line: bytes) -> Done | BaseException | None:
    """What a worker answered; None for what no worker says, of which somebody would wait for an answer for ever."""
    try:
        answer = json.loads(line)
        if (error := error_of(answer)) is not None:
            return error
        size, documents, tokens = map(int, answer["done"])
        return size, documents, tokens
    except Exception:  # whatever JSON may hold in place of an answer
        return None


def _died(code: int, stage: str, rank: int) -> BuildError:
    return BuildError(
        f"to finish stage {stage!r} of rank {rank}",
        f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}",
        "Often memory ran out: continue with --resume and fewer processes.",
    )


def error_of(answer: dict[str, Any]) -> BaseException | None:
    """Error that a worker told of (`retrieve_spec.datastore.worker.answer_of`), None where all went well."""
    if "error" not in answer:
        return None
    if "errno" in answer:
        return OSError(answer["errno"], answer["got"], answer["error"] or None)
    known = getattr(errors, answer["error"], None)
    if isinstance(known, type) and issubclass(known, RetrieveSpecError):
        return known(answer["expected"], answer["got"], answer["remedy"])
    return RuntimeError(f"{answer['error']} in a worker: {answer['got']}")
