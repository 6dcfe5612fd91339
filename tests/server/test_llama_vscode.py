"""llama.vscode's own completion code, unmodified, in Node with a stand-in for the `vscode` module."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGIN = Path(os.environ.get("RETRIEVE_SPEC_LLAMA_VSCODE", "/nowhere"))
DRIVER = Path(__file__).with_name("vscode_driver.cjs")
SETTINGS = Path(__file__).parents[2] / "retrieve_spec" / "server" / "editor_settings" / "llama-vscode.json"

pytestmark = [
    pytest.mark.skipif(
        not (PLUGIN / "src" / "completion.ts").is_file() or not (PLUGIN / "node_modules" / "esbuild").is_dir(),
        reason="RETRIEVE_SPEC_LLAMA_VSCODE names no checkout of llama.vscode (after `npm ci --ignore-scripts`)",
    ),
    pytest.mark.skipif(shutil.which("node") is None, reason="node is missing"),
]


def test_suggestions_prefetch_and_ring(live, say, codec):
    server = live(say("urn alpha + beta"))
    command = ["node", str(DRIVER), str(PLUGIN), str(SETTINGS), str(server.port)]  # the driver says what is typed
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["shown"] == ["urn alpha + beta"]
    assert seen["typed"] == ["rn alpha + beta"]
    assert seen["messages"] == []
    assert "c: " in seen["figures"]
    tasks = [task for task, _ in server.done]
    lines = [(task.document or "").rpartition("\n")[2] for task in tasks if not task.warm]
    # What was typed into the suggestion cost no request; what follows an accepted suggestion was asked for ahead.
    assert lines[:3] == ["    ret", "    return alpha + beta", "    x = compute_to"]
    assert any(task.warm for task in tasks)
    # The word at the cursor is continued with the text of the other file, which came with the ring.
    shown = [codec.decode(list(hints.context)) for hints in server.backend.hints]
    (context,) = (text for text in shown if text.endswith("    x = compute_to"))
    assert "def compute_total_" in context
