"""Clients of a server, and the settings that connect an editor's plug-in to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError

_FOLDER = Path(__file__).parent / "editor_settings"
_URL = f"http://{ServeConfig().host}:{ServeConfig().port}"
_KEPT = ".before-retrieve-spec"
_PLAIN_URL = re.compile(r"[\w.:/@%~+\[\]-]{1,500}")
_PLAIN_MODEL = re.compile(r"[\w.:/@+ -]{1,200}")
"""Characters that may stand between quotes in the settings language of every editor."""
PROBE = ("def fibonacci(n):\n", "    if n < 2:\n        ", "\n")
"""The first completion to request: text above the cursor, the cursor's line, text below."""


class Remote:
    """A server at an address.

    Parameters
    ----------
    url
        Its URL, such as ``http://127.0.0.1:8012``, with or without ``/v1``.
    key
        An API key, "" for none.

    Attributes
    ----------
    options
        Arguments for an `httpx` client; proxies of the environment are not used.

    Raises
    ------
    ServeError
        The URL is invalid.
    """

    def __init__(self, url: str, key: str = "") -> None:
        try:
            address = httpx.URL(url)
            known = address.scheme in ("http", "https") and address.host and not address.query
        except httpx.InvalidURL:
            known = False
        if not known:
            raise ServeError("the address of a server, as http://127.0.0.1:8012", repr(url), "Give one like it.")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {name: value.encode() for name, value in headers.items()},  # keys are not always Latin-1
            "trust_env": False,
        }

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float = 5.0) -> tuple[int, Any]:
        """Return status and JSON body of an answer: None for other bodies, status 0 without an answer."""
        try:
            with httpx.Client(**self.options, timeout=timeout) as client:
                answer = client.request(method, path, content=None if body is None else json.dumps(body))
        except httpx.HTTPError:
            return 0, None
        return answer.status_code, parsed(answer)


def parsed(answer: httpx.Response) -> Any:
    """Return the JSON of an answer, None if it is something else."""
    try:
        return answer.json()
    except ValueError:
        return None


def reason_of(body: Any) -> str:
    """Return the reason that a server gives for refusing a request, "" for none."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def display_name(model_name: str) -> str:
    """Return a model's name in answers: the last part of its path, by which some editors choose a prompt format."""
    return "retrieve-spec-qwen2.5-coder-reference" if model_name == "reference" else Path(model_name).name


@dataclass(frozen=True, slots=True)
class Editor:
    """One editor.

    Attributes
    ----------
    settings
        Name of its settings file.
    needs
        What to install, and what the user then sees.
    own
        Whether the settings have a file of their own; otherwise they are merged into a JSON file.
    """

    settings: str
    needs: str
    own: bool = True

    def text(self, remote: Remote, health: dict[str, Any] | None) -> str:
        """Return the settings for a server with this ``health`` (None if it does not answer).

        Raises
        ------
        ServeError
            The URL, or a model's name in the settings, has characters that could end a string. Some editors execute
            their settings, and a server must not be able to add code.
        """
        if not _PLAIN_URL.fullmatch(remote.url):
            raise ServeError("an address of letters, digits and . : / - only", repr(remote.url), "Check --url.")
        text = (_FOLDER / self.settings).read_text("utf-8").replace(_URL, remote.url)
        named = display_name("reference")
        if health is not None and named in text:
            model = health.get("model")
            if not isinstance(model, str) or not _PLAIN_MODEL.fullmatch(model):
                raise ServeError(
                    "a model's name of letters, digits, spaces and . : / @ + - from the server",
                    repr(model)[:200],
                    "Check that you trust the server at this address, or paste the settings and name the model there.",
                )
            text = text.replace(named, model)
            if health.get("fim") != "qwen":
                text = text.replace('"prompt_format": "qwen"', '"prompt_format": "infer"')
        return text


EDITORS = {
    "vscode": Editor(
        "llama-vscode.json",
        "the extension llama-vscode (ggml-org.llama-vscode); grey text at the cursor, Tab takes it",
        own=False,
    ),
    "vim": Editor("llama.vim", "the plug-in ggml-org/llama.vim; grey text after the cursor, Tab takes it"),
    "neovim": Editor("neovim.lua", "Neovim 0.12, no plug-in; Tab takes the completion"),
    "minuet": Editor("minuet.lua", "Neovim with the plug-in milanglacier/minuet-ai.nvim; Alt-A takes the completion"),
    "zed": Editor("zed.json", "Zed, nothing else; Tab takes the prediction", own=False),
    "continue": Editor("continue.yaml", "the extension Continue (VS Code, JetBrains)"),
}


def settings_file(name: str) -> Path:
    """Return the path where an editor reads its settings."""
    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    code = home / "Library" / "Application Support" if sys.platform == "darwin" else config
    return {
        "vscode": code / "Code" / "User" / "settings.json",
        "vim": home / ".vim" / "plugin" / "retrieve_spec.vim",
        "neovim": config / "nvim" / "plugin" / "retrieve_spec.lua",
        "minuet": config / "nvim" / "plugin" / "retrieve_spec_minuet.lua",
        "zed": config / "zed" / "settings.json",
        "continue": home / ".continue" / "config.yaml",
    }[name]


def merged(name: str, text: str, path: Path) -> str:
    """Return the new contents of a settings file, with its other settings kept.

    Raises
    ------
    ServeError
        The file's other contents cannot be kept: it is not plain JSON, or another kind of file.
    """
    try:
        old = path.read_text("utf-8")
    except FileNotFoundError:
        return text
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"to read {path}", str(error), "Paste the settings that are shown without --write.") from error
    if not EDITORS[name].own:
        try:
            held = json.loads(old or "{}")
        except ValueError:
            held = None
        if not isinstance(held, dict):
            raise ServeError(f"to add settings to {path}", "it has comments or is damaged", "Paste them into it.")
        return (
            json.dumps(_joined(held, json.loads(text)), indent=4 if name == "vscode" else 2, ensure_ascii=False) + "\n"
        )
    if name == "continue" and old != text:
        raise ServeError(f"to write {path}", "there are other settings in it", "Paste the models into it.")
    return text


def _joined(held: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    out = dict(held)
    for key, value in new.items():
        inner = out.get(key)
        out[key] = _joined(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return out


def write(path: Path, text: str) -> Path | None:
    """Write a settings file; return the path of the backup of its first contents, None if it is new."""
    target = path.resolve()  # keeps a link into a folder of dotfiles
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = target.with_name(target.name + _KEPT)
    if target.exists() and not kept.exists():  # a second run must not overwrite the user's original
        shutil.copy2(target, kept)
    with click.open_file(str(target), "w", encoding="utf-8", atomic=True) as file:
        file.write(text)
    return kept if kept.exists() else None


def first_completion(remote: Remote) -> tuple[str, float]:
    """Return the completion at the place of `PROBE`, and the model's milliseconds.

    Raises
    ------
    ServeError
        The server refuses.
    """
    above, line, below = PROBE
    body = {"input_prefix": above, "prompt": line, "input_suffix": below, "n_predict": 24}
    status, found = remote.ask("POST", "/infill", body, timeout=120.0)
    if status != 200 or not isinstance(found, dict) or "content" not in found:
        got = f"status {status} of {remote.url}: {reason_of(found)}"
        raise ServeError("a completion", got, "Is the model one that infills?")
    timings = found.get("timings", {})
    return str(found["content"]), float(timings.get("prompt_ms", 0.0)) + float(timings.get("predicted_ms", 0.0))
