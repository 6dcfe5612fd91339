"""Stock Vim with an unmodified llama.vim, driven through a pseudo-terminal."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest
from waiting import HANG_S, wait_for

PLUGIN = os.environ.get("RETRIEVE_SPEC_LLAMA_VIM", "")
pexpect = pytest.importorskip("pexpect", reason="pexpect drives vim")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(PLUGIN) / "autoload" / "llama.vim").is_file() if PLUGIN else True,
        reason="RETRIEVE_SPEC_LLAMA_VIM does not name a checkout of llama.vim",
    ),
    pytest.mark.skipif(shutil.which("vim") is None or shutil.which("curl") is None, reason="vim or curl is missing"),
]


class Vim:
    def __init__(self, folder, port, *files):
        self.out = folder / "out.txt"
        rc = folder / "vimrc"
        rc.write_text(
            "set nocompatible noswapfile nobackup\n"
            f"set rtp^={PLUGIN}\n"
            f"let g:llama_config={{'endpoint_fim': 'http://127.0.0.1:{port}/infill', 'show_info': 0}}\n"
            "runtime! plugin/*.vim\n"
        )
        environment = {**os.environ, "TERM": "xterm", "HOME": str(folder), "no_proxy": "*"}
        command = ["-u", str(rc), "-i", "NONE", *map(str, files)]
        self.child = pexpect.spawn("vim", command, dimensions=(40, 120), env=environment, timeout=HANG_S)
        time.sleep(1.0)

    def keys(self, text, gap=0.05):
        for key in text:
            self.child.send(key)
            time.sleep(gap)
            self.drain()

    def drain(self):
        """Read what is on the screen, else Vim waits."""
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            while True:
                self.child.read_nonblocking(65536, timeout=0.01)

    def wait(self, condition):
        wait_for(lambda: self.drain() or condition())

    def buffer(self):
        """End insert mode and read the buffer."""
        self.out.unlink(missing_ok=True)
        self.keys("\x1b", 0.3)
        self.child.send(f":call writefile(getline(1,'$'), '{self.out}')\r")
        self.wait(self.out.exists)
        time.sleep(0.1)
        return self.out.read_text()

    def quit(self):
        self.child.send("\x1b:qa!\r")
        self.drain()
        self.child.close(force=True)


@pytest.fixture
def vim(tmp_path):
    opened = []

    def start(server, *files):
        opened.append(Vim(tmp_path, server.port, *files))
        return opened[-1]

    yield start
    for editor in opened:
        editor.quit()


def infills(server):
    return [task for task, _ in server.done]


def test_a_suggestion_is_shown_and_accepted(live, say, vim, tmp_path):
    server = live(say("urn alpha + beta"))
    file = tmp_path / "a.py"
    file.write_text("def add(alpha, beta):\n    \n")
    editor = vim(server, file)
    editor.keys("jA")
    editor.keys("ret")
    editor.wait(lambda: any(task.document and task.document.endswith("ret") for task in infills(server)))
    time.sleep(0.6)
    editor.keys("\t", 0.3)
    assert "    return alpha + beta" in editor.buffer()
    # After a hint was shown, the plug-in asks for what would follow it; and its ring warms up with no text to predict.
    assert any("return alpha + beta" in (task.document or "") for task in infills(server))
    assert all(done.outcome in ("done", "superseded") for _, done in server.done)


def test_a_file_opened_before_is_drafted_from(live, say, vim, tmp_path):
    server = live(say("x"))
    helper, other = tmp_path / "helper.py", tmp_path / "other.py"
    helper.write_text("".join(f"def compute_total_{i}(items):\n    return sum(items) * {i}\n\n" for i in range(40)))
    other.write_text("\n")
    editor = vim(server, helper)
    editor.keys("GA# edited\x1b")
    editor.keys(":w\r")
    editor.keys(f":e {other}\r", 0.02)
    editor.wait(lambda: server.service.kept("")["session_tokens"] > 100)


def test_while_the_server_is_slow_only_the_newest_line_is_answered(live, say, vim, tmp_path):
    server = live(say(" slow answer", run=1, pass_s=0.25))
    file = tmp_path / "a.py"
    file.write_text("\n")
    editor = vim(server, file)
    editor.keys("ivalue = 1")
    editor.wait(lambda: any((task.document or "").endswith("value = 1") for task in infills(server)))
    prompts = [task.prompt_ids for task, done in server.done if done.outcome == "done" and not task.warm]
    assert len(prompts) == len(set(prompts))
    assert len(prompts) < len("value = 1")
