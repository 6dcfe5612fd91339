"""Our own OpenAPI description, held against the server by schemathesis."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from scripted import ScriptedBackend

from retrieve_spec.server import app, completions, ollama, translations


def test_every_route_is_described(live, say):
    described = live(say("")).client.get("/openapi.json").json()
    aliases = {"/completions", "/chat/completions", "/models", "/v1/health", "/openapi.json"}
    routes = [route for module in (app, completions, ollama, translations) for route in module.router.routes]
    assert {route.path_format for route in routes} - aliases == set(described["paths"])
    infill = described["paths"]["/infill"]["post"]
    assert "text/event-stream" in infill["responses"]["200"]["content"]
    assert {"400", "401", "403", "413", "501", "503"} <= set(infill["responses"])
    assert {"input_prefix", "samplers", "speculative"} <= set(
        described["components"]["schemas"]["InfillRequest"]["properties"]
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="pip install schemathesis")
def test_server_keeps_to_its_description(live):
    server = live(ScriptedBackend(lambda prompt: [100, 200, 300, 0]))
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json", "--max-examples", "10"]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    done = subprocess.run(
        [*command, "--checks", checks, "--seed", "1", "--generation-deterministic", "--phases", "fuzzing"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
