"""Command `retrieve-spec editor`: a look at the server, an editor's settings, and a first completion."""

from __future__ import annotations

from pathlib import Path

import click

from retrieve_spec.cli_serve import need_extra
from retrieve_spec.config import EDITORS, ServeConfig

_DEFAULTS = ServeConfig()


@click.command(short_help="Print or write an editor's settings, and try the server.")
@click.argument("name", type=click.Choice(EDITORS), metavar="|".join(EDITORS))
@click.option("--url", default=f"http://{_DEFAULTS.host}:{_DEFAULTS.port}", show_default=True, help="The server.")
@click.option("--api-key-file", "key_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="F",
              help="Key for trying the server, on its first line.")  # fmt: skip
@click.option("--write", is_flag=True, help="Write the settings where the editor looks for them, after asking.")
@click.option("--yes", is_flag=True, help="Write without asking.")
def editor(name: str, url: str, key_file: Path | None, write: bool, yes: bool) -> None:
    """Print the settings with which an editor asks a server, or write them; then show a first completion.

    Settings go to standard output, everything else to standard error. What stood in a file that is written stays in it
    where that can be, and is kept beside it.
    """
    need_extra()
    from retrieve_spec.errors import ServeError
    from retrieve_spec.server import editors
    from retrieve_spec.server.guard import client_key

    def say(text: str) -> None:
        click.echo(text, err=True)

    remote = editors.Remote(url, client_key(key_file))
    status, found = remote.ask("GET", "/health")
    health = found if status == 200 and isinstance(found, dict) else None
    text = editors.EDITORS[name].text(remote, health)
    path = editors.settings_file(name)
    say(f"For {name}: {editors.EDITORS[name].needs}.")
    if write:
        content = editors.merged(name, text, path)
        say(text)
        if yes or click.confirm(f"Write this into {path}?", err=True):
            kept = editors.write(path, content)
            say(f"Written to {path}." + (f" What stood there before the first time is in {kept}." if kept else ""))
    else:
        click.echo(text, nl=not text.endswith("\n"))
        say(f"The editor looks for this in {path} (--write puts it there).")
    if health is None:
        what = "is loading its model" if status == 503 else f"answers {status}" if status else "does not answer"
        say(f"{remote.url} {what}. Start one:  retrieve-spec serve --model Qwen/Qwen2.5-Coder-1.5B --workspace DIR")
        return
    say(f"\n{remote.url} serves {health.get('model')}; fill-in-the-middle: {health.get('fim') or 'no'}.")
    if not health.get("fim"):
        raise ServeError(
            "to fill in the middle", str(health.get("fim_missing", "the model cannot")), "Serve another model."
        )
    completion, model_ms = editors.first_completion(remote)
    above, line, below = editors.PROBE
    say(f"A first completion ({model_ms:.0f} ms):\n")
    say(above + line + click.style(completion, fg="green", bold=True) + below)
    if health.get("model") == editors.display_name("reference"):
        say("That is the bundled model, for trying things out. To write code, serve one trained on fill-in-the-middle.")
