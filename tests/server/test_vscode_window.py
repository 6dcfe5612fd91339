"""llama.vscode, as it is released, in a window of VS Code: what is shown while somebody types, and what Tab leaves."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from live import free_port
from processes import running

FOLDER = Path(os.environ.get("RETRIEVE_SPEC_VSCODE", "/nowhere"))
EDITOR = FOLDER / "node_modules" / ".bin" / "code-server"
DRIVER = Path(__file__).with_name("vscode_window.cjs")
SETTINGS = Path(__file__).parents[2] / "retrieve_spec" / "server" / "editor_settings" / "llama-vscode.json"
CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(
    not EDITOR.exists() or not (FOLDER / "llama-vscode.vsix").is_file() or CHROMIUM is None,
    reason="RETRIEVE_SPEC_VSCODE names no folder with code-server, playwright-core and llama-vscode.vsix, for Chromium",
)


@pytest.fixture
def editor(tmp_path):
    """Opens a folder in VS Code whose llama.vscode asks a server; returns where."""
    opened = contextlib.ExitStack()

    def open_folder(folder, server):
        data = tmp_path / "vscode"
        own = {"workbench.startupEditor": "none", "files.autoSave": "off", "llama-vscode.rag_enabled": False}
        (data / "User").mkdir(parents=True)
        settings = SETTINGS.read_text("utf-8").replace("8012", str(server.port))
        (data / "User" / "settings.json").write_text(json.dumps(json.loads(settings) | own))
        command = [str(EDITOR), "--user-data-dir", str(data), "--extensions-dir", str(data / "extensions")]
        subprocess.run(
            [*command, "--install-extension", str(FOLDER / "llama-vscode.vsix")], check=True, capture_output=True
        )
        port = free_port()
        quiet = ["--auth", "none", "--disable-telemetry", "--disable-update-check", "--disable-workspace-trust"]
        opened.enter_context(running([*command, *quiet, "--bind-addr", f"127.0.0.1:{port}"]))
        ask = httpx.Client(
            base_url=f"http://127.0.0.1:{port}/", trust_env=False, transport=httpx.HTTPTransport(retries=9)
        )
        ask.get("healthz")
        return f"{ask.base_url}?folder={folder}"

    with opened:
        yield open_folder


def test_ghost_text_is_taken_by_tab(live, say, editor, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "sums.py").write_text("def add(alpha, beta):\n    return alpha + beta\n\n\n")
    server = live(say("return alpha * beta"))
    command = ["node", str(DRIVER), str(FOLDER), editor(folder, server), "sums.py", "def multiply(alpha, beta):\n"]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CHROMIUM": str(CHROMIUM)})
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == "return alpha * beta"
    written = (folder / "sums.py").read_text()
    assert written.endswith("def multiply(alpha, beta):\n    return alpha * beta")
