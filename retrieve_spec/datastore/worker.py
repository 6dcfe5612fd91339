"""A worker process of a build: ranks of stages on standard input, what came of each on standard output."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.pool import run_one
from retrieve_spec.datastore.stages import Done, Stages
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import RetrieveSpecError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run ranks until standard input ends, which it does when the process that started this one does."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides what Ctrl-C means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    stages = Stages(WorkFolder(Path(sys.argv[1])))
    reader, writer = os.pipe()
    threading.Thread(target=_pass_on, args=(writer,), daemon=True).start()
    with os.fdopen(reader, encoding="utf-8") as requests:
        for line in requests:
            stage, rank, url, needs = json.loads(line)
            answers.write(json.dumps(answer_of(partial(run_one, stages, stage, rank, url, needs))) + "\n")
            answers.flush()


def _pass_on(writer: int) -> None:
    """Hand standard input on; end at once where it ends, also amid a rank."""
    while content := os.read(0, 4096):
        os.write(writer, content)
    os._exit(1)


def answer_of(run: Callable[[], Done]) -> dict[str, Any]:
    """What came of running one rank, as JSON: what it did, or its error."""
    try:
        return {"done": run()}
    except RetrieveSpecError as error:
        return {"error": type(error).__name__, "expected": error.expected, "got": error.got, "remedy": error.remedy}
    except OSError as error:
        return {"error": str(error.filename or ""), "errno": error.errno, "got": error.strerror or str(error)}
    except Exception as error:
        return {"error": type(error).__name__, "got": f"{error}\n{traceback.format_exc()}"}


if __name__ == "__main__":
    main()
