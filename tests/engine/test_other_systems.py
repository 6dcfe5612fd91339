"""Systems without what only Linux has: /proc, affinity, advice on memory and files."""

import subprocess
import sys
from pathlib import Path


def test_a_model_is_accelerated_with_a_store_where_linux_is_hidden(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("without_linux.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
