"""Two processes that hold one model draft alike, and end alike, whatever their clocks and generators say."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from batch_rows import small_model
from processes import running

RANK = Path(__file__).with_name("tensor_parallel_rank.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank got."""
    folder = tmp_path_factory.mktemp("ranks")
    small_model("llama", bos_token_id=None).save_pretrained(folder / "model")
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with contextlib.ExitStack() as both:
        ranks = [
            both.enter_context(
                running(
                    [sys.executable, str(RANK), str(folder)],
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            _, printed = rank.communicate()
            assert rank.returncode == 0, printed[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"),
]


def test_ranks_say_what_the_model_says(said: list[dict[str, Any]]) -> None:
    for rank in said:
        assert rank["greedy"] == [rank["plain"]] * 2
        assert rank["streamed"] == rank["plain"][0][36:56]
        assert rank["mode"] == "tree"
        assert rank["fewer passes"]
        assert rank["after"] == rank["plain"]


@pytest.mark.parametrize("what", ["plain", "sampled", "stopped", "batch"])
def test_ranks_agree(said: list[dict[str, Any]], what: str) -> None:
    assert said[0][what] == said[1][what]


def test_an_exception_of_the_first_rank_reaches_the_others(said: list[dict[str, Any]]) -> None:
    assert [rank["error"] for rank in said] == ["OSError", "RankError"]
