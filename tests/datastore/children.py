"""Processes that tests start, limit and kill.

They are forked by a server of their own, which has imported and warmed up what builds need: a start takes milliseconds
and inherits nothing of the process that tests run in, whose threads a child would not have.
"""

import functools
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from waiting import HANG_S

WARM = "warm_builds"


@functools.cache
def _server() -> Any:
    """The server, started with the paths of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WARM])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def _act(action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    assert WARM in sys.modules, "the server did not warm up"
    action(*arguments)


def start(action: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Begin a function of a module, with arguments that can be pickled, in a process of its own."""
    child: BaseProcess = _server().Process(target=_act, args=(action, arguments), daemon=True)
    child.start()
    return child


def exit_code(child: BaseProcess) -> int:
    """Exit code of a child, once it has ended; minus the signal's number where one ended it."""
    try:
        child.join(HANG_S)
        assert child.exitcode is not None, "a child did not end"
        return child.exitcode
    finally:
        child.kill()


def run(action: Callable[..., Any], *arguments: Any, kill_after: float | None = None) -> bool:
    """Run a function in a process of its own, killed after some seconds; whether that was before its end."""
    child = start(action, *arguments)
    if kill_after is not None:
        time.sleep(kill_after)
        child.kill()
    code = exit_code(child)
    assert code <= 0, "a child ended with an exception"
    return code < 0


def limit_files(limit: int) -> None:
    """Let no file of this process grow further, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
