"""Command line: the table of commands, and the one place where errors become messages.

Nothing heavy is imported before a command runs, so that `--help` and shell completion answer at once.
Exit codes: 0 done, 1 an error the message explains, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from retrieve_spec._version import __version__
from retrieve_spec.errors import RetrieveSpecError
from retrieve_spec.processors import limit_threads

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
INTERRUPTED = 130

COMMANDS = {
    "generate": (
        "retrieve_spec.cli_generate",
        "Continue a prompt, drafting from text that can be looked up.",
        'generate --model smollm2 --chat --prompt "What is a suffix array?" --session answers.bin',
    ),
    "chat": (
        "retrieve_spec.cli_chat",
        "Talk with a chat model in the terminal.",
        "chat --model smollm2 --system 'Answer in one sentence.'",
    ),
    "models": (
        "retrieve_spec.cli_machine",
        "List the models that have names, and install them.",
        "models install smollm2",
    ),
    "build": (
        "retrieve_spec.cli_store",
        "Build a datastore from files, folders or a recipe.",
        "build mystore src docs/*.md --tokenizer smollm2 --licence MIT,Apache-2.0",
    ),
    "distil": (
        "retrieve_spec.cli_distil",
        "Keep what a model itself would say in a datastore.",
        "distil mystore --model smollm2 --minutes 30",
    ),
    "add": (
        "retrieve_spec.cli_store",
        "Add documents to a datastore.",
        "add mystore answers.jsonl --field output",
    ),
    "remove": (
        "retrieve_spec.cli_store",
        "Remove documents from a datastore.",
        "remove mystore src/old '**/*.log'",
    ),
    "merge": (
        "retrieve_spec.cli_store",
        "Merge several datastores into a new one.",
        "merge everything mystore s3://bucket/theirs",
    ),
    "compact": (
        "retrieve_spec.cli_store",
        "Rewrite a datastore without removed documents.",
        "compact mystore --workers 4",
    ),
    "info": (
        "retrieve_spec.cli_store",
        "Describe a datastore.",
        "info mystore",
    ),
    "verify": (
        "retrieve_spec.cli_store",
        "Check a datastore.",
        "verify mystore",
    ),
    "search": (
        "retrieve_spec.cli_store",
        "Search a datastore for a text.",
        "search mystore 'for i in range('",
    ),
    "push": (
        "retrieve_spec.cli_store",
        "Push a datastore to a remote.",
        "push mystore s3://bucket/mystore",
    ),
    "pull": (
        "retrieve_spec.cli_store",
        "Pull a datastore from a remote.",
        "pull s3://bucket/mystore mystore",
    ),
    "sync": (
        "retrieve_spec.cli_store",
        "Bring a datastore up to date with folders.",
        "sync mystore src docs --tokenizer smollm2 --watch",
    ),
    "catalog": (
        "retrieve_spec.cli_store",
        "Write a database of a datastore's documents.",
        "catalog mystore",
    ),
    "retokenize": (
        "retrieve_spec.cli_store",
        "Rewrite a datastore for another tokenizer.",
        "retokenize mystore --tokenizer reference",
    ),
    "serve": (
        "retrieve_spec.cli_serve",
        "Serve completions to editors over HTTP.",
        "serve --model smollm2 --workspace ~/src",
    ),
    "lsp": (
        "retrieve_spec.cli_serve",
        "Serve inline completions as a language server.",
        "lsp --connect http://127.0.0.1:8012",
    ),
    "editor": (
        "retrieve_spec.cli_serve",
        "Print or write an editor's settings, and try the server.",
        "editor vscode --write",
    ),
    "doctor": (
        "retrieve_spec.cli_machine",
        "Report what this machine and a model allow, and what would be faster.",
        "doctor --model smollm2",
    ),
    "forget": (
        "retrieve_spec.cli_serve",
        "Delete what is kept of workspaces.",
        "forget ~/src",
    ),
}
BENCH_COMMANDS = {
    "run": (
        "retrieve_spec.bench.cli",
        "Compare methods on prompts, interleaved, and write a report.",
        "bench run --model smollm2 --prompts everyday --out results",
    ),
    "report": (
        "retrieve_spec.bench.cli",
        "Write the report of a results folder anew.",
        "bench report results",
    ),
    "replay": (
        "retrieve_spec.bench.cli",
        "Replay recorded answers and count tokens per pass.",
        "bench replay answers.jsonl --tokenizer smollm2",
    ),
}


class LazyGroup(click.Group):
    """A group that imports the module of a sub-command when the sub-command is used.

    Parameters
    ----------
    table
        Module, one-line help and an example by command name; the module has a click command under that name.
    """

    def __init__(self, *args: Any, table: dict[str, tuple[str, str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table, then those registered directly."""
        return [*self.table, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in self.table:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(self.table[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command), f"{module.__name__}.{cmd_name} is not a command"
        for one in (command, *getattr(command, "commands", {}).values()):
            one.epilog = f"\b\nExample:\n  retrieve-spec {self.table[cmd_name][2]}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown one, suggest a similar name."""
        close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
        if close and args[0] != close[0] and args[0] not in self.list_commands(ctx):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands of the table without importing them."""
        rows = [(name, text) for name, (_, text, _) in self.table.items()]
        rows += [(name, command.get_short_help_str(80)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup, table=COMMANDS, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, "-V", "--version", prog_name="retrieve-spec")
def cli() -> None:
    """Lossless, model-free speculative decoding for Hugging Face language models.

    Drafts come from text that can be looked up (the prompt, earlier output, datastores); the model checks them many
    tokens at a time. Greedy text has the tokens of plain generate in float32. Sampled text is, for a seed, that of the
    same loop without drafts, and has plain generate's distribution.
    """


@cli.group(cls=LazyGroup, table=BENCH_COMMANDS)
def bench() -> None:
    """Measure speed and acceptance."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code instead of ending the process.

    Parameters
    ----------
    arguments
        The words after the program's name; None takes them from the process.
    """
    try:
        code = cli.main(arguments, prog_name="retrieve-spec", standalone_mode=False)
    except RetrieveSpecError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader is gone, so print nothing at exit
        return 1
    except OSError as error:  # the system's errors; the library's are caught above
        what = f"could not use {error.filename}: " if error.filename else ""
        remedy = "Check the path, who may read and write there, and the free space."
        click.echo(f"Error: {what}{error.strerror or error}. {remedy}", err=True)
        return 1
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Entry point of the `retrieve-spec` program."""
    limit_threads()
    sys.exit(run())


if __name__ == "__main__":
    main()
