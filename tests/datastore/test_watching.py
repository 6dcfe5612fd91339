"""Folders that are followed where the system has no watches left."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_build import contents

pytest.importorskip("watchfiles")
LIMITS = {
    "max_inotify_watches": "fs.inotify.max_user_watches=1048576",
    "max_inotify_instances": "fs.inotify.max_user_instances=1024",
}


def namespace_with(limit):
    """Words before a command, for which a limit of the system is used up."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    words = ["unshare", "-Ur", "sh", "-c", f'echo 0 > /proc/sys/user/{limit} && exec "$@"', "sh"]
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    return words


@pytest.mark.parametrize("limit", LIMITS)
def test_folders_are_looked_through_and_the_limit_is_named(limit, texts, tmp_path):
    words = [*namespace_with(limit), sys.executable, "-m", "retrieve_spec.cli", "sync", str(tmp_path / "s"), str(texts)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (tmp_path / "said").open("w+b") as said:
        command = subprocess.Popen([*words, "--watch", "--tokenizer", "reference"], stderr=said, env=environment)
        try:
            wait_for(lambda: (tmp_path / "s" / "sync.json").exists())
            (texts / "new.txt").write_text("a new text")
            wait_for(lambda: contents(tmp_path / "s").get("new.txt") == "a new text")
        finally:
            command.send_signal(signal.SIGINT)
            command.wait(60)
        said.seek(0)
        assert re.search(rf"to raise the limits: sudo sysctl .*{LIMITS[limit]}".encode(), said.read())


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")
