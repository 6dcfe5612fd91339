"""Agents as they are installed from their registries end a task of two tool calls; `make test-agents` installs them."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from templates import FAMILIES, called

from retrieve_spec.config import ServeConfig
from retrieve_spec.reference_model import load_model
from retrieve_spec.server.guard import TooLong
from retrieve_spec.server.run import assemble

FOLDER = Path(os.environ.get("RETRIEVE_SPEC_AGENTS", "/nowhere")).absolute()
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="RETRIEVE_SPEC_AGENTS names no folder with agents in it")

ASK = "Run the command twice, then say that you are done."
COMMANDS = {"exec_command": "cmd", "bash": "command", "run_shell_command": "command", "Bash": "command"}
"""Of the agents' tools that run a command, what its text is called."""
EDIT = "done.txt\n```\nAll done.\n```\n"


def says(prompt, family):
    """Two calls of the agent's shell, each after the result of the one before; then, or without tools, the end."""
    thought = "I must look.</think>\n" if family == "qwen3.5" else ""
    name = next((name for name in COMMANDS if f'"name": "{name}"' in prompt), None)
    step = next((number for number in (1, 2) if f"RAN-{number}-OF-2" not in prompt), 3)
    if name is None or step == 3:
        return thought + (EDIT if "done.txt" in prompt else "All done.")
    command = f"echo RAN-$(({step}+0))-OF-2"
    given = {COMMANDS[name]: command, "description": "Run it."}
    return thought + called(family, name, given)


def codex(url, home, short):
    settings = home / ".codex" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(
        'model = "tiny"\nmodel_provider = "local"\napproval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        + ("[features]\nmulti_agent = false\ngoals = false\n" if short else "")
    )
    return ["codex", "exec", "--skip-git-repo-check", ASK], {"CODEX_HOME": str(settings.parent)}


def opencode(url, home, short):
    options = {"baseURL": f"{url}/v1", "apiKey": "k"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"tiny": {"name": "tiny"}}}
    settings = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled", "permission": "allow"}
    (home / "work" / "opencode.json").write_text(json.dumps(settings))
    return ["opencode", "run", "-m", "local/tiny", ASK], {}


def qwen(url, home, short):
    told = {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "tiny"}
    if short:
        settings, rules = home / ".qwen" / "settings.json", home / "rules.md"
        settings.parent.mkdir()
        settings.write_text(json.dumps({"tools": {"core": list(COMMANDS), "exclude": ["agent", "skill"]}}))
        rules.write_text("You are a coding agent.")
        told["QWEN_SYSTEM_MD"] = str(rules)
    return ["qwen", "--auth-type", "openai", "--yolo", "-p", ASK], told


def aider(url, home, short):
    quiet = ["--no-show-model-warnings", "--no-analytics", "--no-check-update", "--no-gitignore", "--no-git"]
    told = {"OPENAI_API_KEY": "k", "OPENAI_API_BASE": f"{url}/v1"}
    return ["aider", "--model", "openai/tiny", "--yes-always", *quiet, "--message", f"{ASK} Write done.txt."], told


def claude(url, home, short):
    told = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "k", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return ["claude", "-p", ASK, "--allowedTools", "Bash", "--model", "tiny"], told


def continue_cli(url, home, short):
    model = {"name": "tiny", "model": "tiny", "provider": "openai", "apiBase": f"{url}/v1"}
    told = {"name": "local", "version": "0.0.1", "schema": "v1", "models": [{**model, "capabilities": ["tool_use"]}]}
    (settings := home / "config.yaml").write_text(json.dumps(told))
    return ["cn", "-p", ASK, "--config", str(settings), "--auto"], {"CONTINUE_CLI_ENABLE_TELEMETRY": "0"}


def copilot(url, home, short):
    told = {"COPILOT_PROVIDER_TYPE": "openai", "COPILOT_PROVIDER_BASE_URL": f"{url}/v1", "COPILOT_OFFLINE": "true"}
    return ["copilot", "-p", ASK, "--allow-all-tools", "--model", "tiny"], told


AGENTS = pytest.mark.parametrize("agent", [codex, opencode, qwen, aider])
LONG = pytest.mark.parametrize("agent", [codex, opencode, qwen, aider, claude, continue_cli, copilot])
"""Also those whose first request is too long for a small model."""


@pytest.fixture
def run(tmp_path):
    """`run(agent, server)`: what an agent prints, at home in a folder of its own, with short instructions if wanted."""

    def start(agent, server, short=False):
        (tmp_path / "work").mkdir()
        (command, *arguments), own = agent(server.url, tmp_path, short)
        found = [folder for folder in (FOLDER / "node_modules" / ".bin", FOLDER / "bin") if (folder / command).exists()]
        if not found:
            pytest.skip(f"{command} is not installed in {FOLDER}")
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TERM": "dumb", **own}
        return subprocess.run(
            [str(found[0] / command), *arguments], cwd=tmp_path / "work", env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip

    return start


def refused(server):
    """Requests that were not answered with 200."""
    counted = server.client.get("/metrics").text.splitlines()
    return [line for line in counted if line.startswith("retrieve_spec_requests_total") and 'status="200"' not in line]


@LONG
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "qwen3.5", "llama3", "mistral", "gemma"])
def test_a_task_of_two_calls_ends(served, templated, run, tmp_path, agent, family):
    templated.chat_template = FAMILIES[family]
    server = served(partial(says, family=family), 20, n_ctx=1 << 16)
    done = run(agent, server)
    assert done.returncode == 0, done.stdout + done.stderr
    if agent is aider:
        assert (tmp_path / "work" / "done.txt").read_text() == "All done.\n"
    else:
        assert "All done." in done.stdout
        assert any("RAN-2-OF-2" in server.service.codec.decode(prompt) for prompt in server.backend.prompts)
    assert server.backend.prompts and not refused(server)


@AGENTS
def test_a_small_model_is_asked_in_vain_but_answers(live, run, agent, smollm2):
    """It cannot do the task, and repeats itself until the deadline; all that its positions hold is a 200."""
    model, tokenizer = load_model(smollm2, dtype="float32", device="cpu")
    service = assemble(model, tokenizer, "tiny", ServeConfig(deadline_s=20))
    server = live(service.backend, tokenizer, service=service)
    with mock.patch.object(TooLong, "__init__", autospec=True, side_effect=TooLong.__init__) as too_long:
        run(agent, server, short=True)
    assert 'status="200"' in server.client.get("/metrics").text
    assert sum(float(line.split()[-1]) for line in refused(server)) == too_long.call_count
