"""Cluster runner: runs the ranks of a build's stages in processes of this machine, on Ray, or as tasks on Slurm.

The stages are those of any build (`retrieve_spec.datastore.stages`), so what comes out does not depend on who ran them.
All machines see the store's folder under one path, or what they read and write travels through an `Exchange`. What a
rank has done is read off that, never off the engine's own marks: an engine that ends without an error has not finished
for that.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from retrieve_spec._version import __version__
from retrieve_spec.datastore.exchange import Exchange, look, run_travelling
from retrieve_spec.datastore.files import replace_file
from retrieve_spec.datastore.manifest import WORK
from retrieve_spec.datastore.pool import ALONE, Pool, Runner, error_of
from retrieve_spec.datastore.stages import Done, Stages, run_rank
from retrieve_spec.datastore.work import LOGS, WorkFolder
from retrieve_spec.datastore.worker import answer_of
from retrieve_spec.errors import BuildError

_POLL_SECONDS = 1.0
_BYTES_PER_TOKEN, _BYTES = 25, 1 << 30
"""Memory that a task asks for: so much per token of a segment, and for the interpreter."""
_RETRIES = 3
_ROOM_SECONDS = 60.0
"""How long a node with room for a task is waited for: some clusters start nodes when they are asked for."""
_HOURS = "24:00:00"
_NAMED = 8


def cluster_runner(where: str, exchange: Exchange | None = None) -> AbstractContextManager[Runner]:
    """What runs the ranks of stages on a cluster, inside of a `with`.

    Parameters
    ----------
    where
        ``local[:WORKERS]``, ``ray[:ADDRESS]`` or ``slurm:PARTITION``.
    exchange
        What files travel through, None where all machines see the folder.

    Raises
    ------
    BuildError
        When it is none of these, or the engine is not installed.
    """
    kind, _, rest = where.partition(":")
    wrong = kind not in ("local", "ray", "slurm") or (kind == "slurm" and not rest)
    if wrong or (kind == "local" and rest and not (rest.isdigit() and int(rest) > 0)):
        raise BuildError(
            "a cluster as local:WORKERS, ray[:ADDRESS] or slurm:PARTITION",
            repr(where),
            "Write it in one of these forms.",
        )
    if kind == "local":
        workers = int(rest or os.cpu_count() or 1)
        return Pool(workers, exchange, always=workers > 1)
    try:
        import_module("ray" if kind == "ray" else "datatrove")
    except ImportError as error:
        remedy = "Run: pip install ray" if kind == "ray" else "Run: pip install 'retrieve-spec[cluster]'"
        raise BuildError(f"to build with --cluster {where}", f"{error.name} is not installed", remedy) from error
    if kind == "slurm" and shutil.which("sbatch") is None:
        raise BuildError(
            f"to build with --cluster {where}", "there is no sbatch here", "Run this where jobs of Slurm are sent from."
        )

    def run(stages: Stages, stage: str, ranks: Sequence[int], size: int, tell: Callable[[Done], object]) -> None:
        _Stage(kind, rest, stages, stage, tell, exchange).run(ranks)

    return nullcontext(run)


@dataclass(frozen=True, slots=True)
class Task:
    """A stage's ranks as a step of a pipeline of datatrove: task i runs rank ``ranks[i]``.

    `python` and `version` are those of the process that plans: others might write other bytes. Where `url` is not "",
    files travel through the `Exchange` of that address, and `needs` is what that asks for.
    """

    store: str
    stage: str
    ranks: tuple[int, ...]
    python: str
    version: str
    url: str = ""
    needs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Run one rank; its error is written down for whoever waits, and raised."""
        number = self.ranks[rank]
        os.environ.update(ALONE)  # this process has one core; libraries that look are loaded from here on
        answer = answer_of(lambda: self._done(number))
        if (error := error_of(answer)) is not None:
            content = json.dumps(answer).encode()
            if self.url:
                Exchange(self.url).tell_error(self.stage, number, content)
            else:
                replace_file(_error_file(WorkFolder(Path(self.store)), self.stage, number), content)
            raise RuntimeError(f"stage {self.stage!r} of rank {number}: {error}")  # typed errors may not travel
        return iter(())

    def _done(self, rank: int) -> Done:
        here = (_python(), __version__)
        if here != (self.python, self.version):
            expected = f"Python {self.python} and retrieve-spec {self.version} on every machine"
            got = f"Python {here[0]} and retrieve-spec {here[1]} on {platform.node()}"
            raise BuildError(expected, got, "Install the same everywhere.")
        if self.url:
            return run_travelling(self.url, self.stage, rank, self.needs)
        return run_rank(Stages(WorkFolder(Path(self.store))), self.stage, rank)


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _error_file(work: WorkFolder, stage: str, rank: int) -> Path:
    return work.path / f"error-{stage}-{rank:06d}.json"


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of a build, on one engine."""

    kind: str
    rest: str
    stages: Stages
    stage: str
    tell: Callable[[Done], object]
    exchange: Exchange | None

    def run(self, ranks: Sequence[int]) -> None:
        """Run the ranks that are not done yet.

        Raises
        ------
        RetrieveSpecError
            When some were not done: what one of them raised, else an error that names them.
        """
        waiting = set(ranks)
        look(self.stages, self.stage, waiting, self.tell, self.exchange)
        if not waiting:
            return
        ranks = sorted(waiting)
        work, exchange = self.stages.work, self.exchange
        task = Task(os.fspath(work.store.resolve()), self.stage, tuple(ranks), _python(), __version__)
        logs = os.fspath(work.path / LOGS)
        if exchange is not None:
            exchange.forget_errors(self.stage, ranks)
            task = replace(task, store="", url=exchange.url, needs=exchange.needs(self.stages, self.stage, ranks))
            logs = f"{exchange.url}/{WORK}/{LOGS}"
        for rank in ranks:
            _error_file(work, self.stage, rank).unlink(missing_ok=True)
        folder = f"{logs}/{self.stage}-{secrets.token_hex(4)}"
        memory = _BYTES + _BYTES_PER_TOKEN * self.stages.config.segment_tokens
        failure = self._followed(_engine(self.kind, self.rest, task, folder, memory), waiting)
        if waiting:
            error = self._missing(sorted(waiting), failure, logs)
            raise error from (None if error is failure else failure)
        if exchange is None:
            shutil.rmtree(folder, ignore_errors=True)

    def _followed(self, engine: Any, waiting: set[int]) -> BaseException | None:
        """Let an engine run, telling of every rank once it is done; what it raised, None for nothing."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                engine.run()
            except BaseException as error:  # which ranks it was is read off what they wrote
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            look(self.stages, self.stage, waiting, self.tell, self.exchange)
        look(self.stages, self.stage, waiting, self.tell, self.exchange)
        return raised[0] if raised else None

    def _missing(self, missing: Sequence[int], failure: BaseException | None, logs: str) -> BaseException:
        """Error about ranks that were not done: the first one that says why, else the one that names them."""
        for rank in missing:
            told = error_of(self._told(rank))
            if told is not None:
                place = self.stages.work.store if self.exchange is None else self.exchange.url
                told.add_note(f"in stage {self.stage!r}, rank {rank} of {place}")
                return told
        if isinstance(failure, BuildError):
            return failure
        named = ", ".join(map(str, missing[:_NAMED])) + (", …" if len(missing) > _NAMED else "")
        why = f" ({type(failure).__name__}: {failure})" if failure is not None else ""
        return BuildError(
            f"to finish stage {self.stage!r}",
            f"nothing came from rank {named}{why}",
            f"Logs are in {logs}. Continue with --resume: only what is missing is done.",
        )

    def _told(self, rank: int) -> dict[str, Any]:
        """What a rank wrote down of its error."""
        path = _error_file(self.stages.work, self.stage, rank)
        if self.exchange is not None:
            content = self.exchange.error(self.stage, rank)
        else:
            content = path.read_bytes() if path.exists() else None
        found: dict[str, Any] = json.loads(content) if content else {}
        return found


class _Ray:
    """Runs a task's ranks on Ray, each again where its node died.

    Ray's own tasks rather than datatrove's executor for it, which waits for ever for a rank whose node dies while the
    rank is being placed there.
    """

    def __init__(self, address: str, task: Task, memory: int) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(address=address or None, log_to_driver=False)
        self._task = task
        self._memory = memory

    def run(self) -> None:
        """Run all of them; the first error is raised when the others have ended."""
        import ray

        remote = ray.remote(_run_on_ray).options(
            num_cpus=1, memory=self._memory, max_retries=_RETRIES, scheduling_strategy="SPREAD"
        )
        waiting = [remote.remote(self._task, rank) for rank in range(len(self._task.ranks))]
        failures = []
        roomless = time.monotonic()
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=_POLL_SECONDS)
            if ended or self._has_room(ray.nodes()):
                roomless = time.monotonic()
            elif time.monotonic() - roomless > _ROOM_SECONDS:
                for one in waiting:
                    ray.cancel(one)
                raise self._no_room(ray.nodes())
            for one in ended:
                try:
                    ray.get(one)
                except Exception as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _has_room(self, nodes: Sequence[dict[str, Any]]) -> bool:
        """Whether a task would find room on one of some nodes if nothing else ran there."""
        found = (node["Resources"] for node in nodes if node["Alive"])
        return any(one.get("CPU", 0) >= 1 and one.get("memory", 0) >= self._memory for one in found)

    def _no_room(self, nodes: Sequence[dict[str, Any]]) -> BuildError:
        most = max((node["Resources"].get("memory", 0) for node in nodes if node["Alive"]), default=0)
        return BuildError(
            f"a node of Ray with a CPU and {self._memory / (1 << 30):.1f} GiB of memory",
            f"{most / (1 << 30):.1f} GiB on the largest one",
            "Start larger nodes (`ray start --memory BYTES`), or build with smaller `StoreConfig.segment_tokens`.",
        )


def _run_on_ray(task: Task, rank: int) -> None:
    task(None, rank, len(task.ranks))


def _engine(kind: str, rest: str, task: Task, logs: str, memory: int) -> Any:
    """What runs all ranks of a stage."""
    if kind == "ray":
        return _Ray(rest, task, memory)
    from datatrove.executor.slurm import SlurmPipelineExecutor

    return SlurmPipelineExecutor(
        pipeline=[task],
        tasks=len(task.ranks),
        logging_dir=logs,
        time=_HOURS,
        partition=rest,
        mem_per_cpu_gb=-(-memory // (1 << 30)),
        job_name="retrieve-spec",
        env_command=f'export PATH="{Path(sys.executable).parent}:$PATH"',
        sbatch_args={"wait": ""},  # the command returns when the job has ended, with its exit code
    )
