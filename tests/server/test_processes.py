"""Server processes as users start them, on the bundled model."""

import signal

import pytest

pytestmark = pytest.mark.slow

BODY = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    return helper_na", "n_predict": 16}


def test_one_server_answers_while_another_of_the_same_workspace_is_killed(processes, tmp_path):
    workspace = tmp_path / "w"
    workspace.mkdir()
    for i in range(40):
        (workspace / f"m{i}.py").write_text(f"def helper_name_{i}(x):\n    return helper_name_{i - 1}(x)\n" * 30)
    first, second = processes("--workspace", workspace), processes("--workspace", workspace)
    first.ready()
    first.stop(signal.SIGKILL)  # most likely while its store is being built
    second.ready(indexed=True)
    before = second.client.post("/infill", json=BODY)
    assert before.status_code == 200
    third = processes("--workspace", workspace)
    third.ready(indexed=True)
    assert third.client.post("/infill", json=BODY).json()["content"] == before.json()["content"]
    second.stop()
    assert second.child.returncode in (0, -signal.SIGTERM, 143)
