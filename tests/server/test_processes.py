"""A server process as users start it, on the bundled model, beside others of its workspace."""

import signal

import pytest
from live import Live
from waiting import wait_for

from retrieve_spec.config import DraftSources, ServeConfig
from retrieve_spec.server.run import assemble

pytestmark = pytest.mark.slow

BODY = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    return helper_na", "n_predict": 16}


def test_one_server_answers_while_another_of_the_same_workspace_is_killed(
    processes, server_cache, reference_model, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(server_cache))
    workspace = tmp_path / "w"
    workspace.mkdir()
    for i in range(40):
        (workspace / f"m{i}.py").write_text(f"def helper_name_{i}(x):\n    return helper_name_{i - 1}(x)\n" * 30)

    def service(*workspaces):
        sources = DraftSources(workspaces=workspaces)
        return assemble(reference_model, tokenizer, "reference", ServeConfig(infill_deadline_s=1e6), sources=sources)

    def says(server):
        wait_for(lambda: server.client.get("/health").json()["workspace"]["indexed"])
        answer = server.post("/infill", BODY)
        server.stop()
        assert answer.status_code == 200
        return answer.json()["content"]

    service().close()  # so that the next one begins with its workspace at once
    killed = processes("--workspace", workspace)
    killed.ready()
    beside = service(workspace)
    killed.stop(signal.SIGKILL)  # most likely while its store is being built
    said = says(Live(beside.backend, tokenizer, service=beside))
    later = service(workspace)
    assert says(Live(later.backend, tokenizer, service=later)) == said
