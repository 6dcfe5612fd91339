"""Command `retrieve-spec chat`: a conversation with a chat model in the terminal, or with lines of a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from retrieve_spec.cli_common import LOADING, MODEL_NAMES, compiling_shown, counted
from retrieve_spec.cli_generate import SYSTEM, config_of, encode, generation_options, load, messages_of, request_of
from retrieve_spec.errors import PromptError, RetrieveSpecError, in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELP = """\
/load FILE  put the text of a file in front of your next message
/save FILE  write the conversation to a file
/clear      forget the conversation
/help       show this list
Ctrl-C ends an answer, Ctrl-D the conversation. A line that begins with a space is no command."""


class Conversation:
    """A conversation with a model; of each turn the model reads only what is new.

    Parameters
    ----------
    model, tokenizer
        An accelerated model with a chat template.
    options
        Options of `generation_options`, and `system`.

    Attributes
    ----------
    messages
        The conversation, in the form of chat templates.
    loaded
        Text of a loaded file, before the next question.
    figures
        Figures of the last answer, in a line.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self.clear()

    def clear(self) -> None:
        """Forget the conversation."""
        self.messages = messages_of("", self._options["system"])[:-1]
        self.loaded = self.figures = ""
        self._read: list[int] = []
        self._cache: Any = None

    def ask(self, text: str) -> Generator[str, None, None]:
        """Ask a question; yields pieces of the answer, and those that were taken become part of the conversation.

        Raises
        ------
        PromptError
            The conversation is too long for the model; the question is not added to it.
        """
        from retrieve_spec.generation.streams import generate_stream
        from retrieve_spec.model_layers import max_positions

        question = {"role": "user", "content": self.loaded + text}
        self.loaded = ""
        request = request_of(self._model, self._tokenizer, [*self.messages, question], self._options)
        ids = request["input_ids"][0].tolist()
        most = max_positions(self._model)
        if most and len(ids) >= most:
            raise PromptError(f"a conversation of fewer than {most} tokens", f"{len(ids)}", "/clear forgets it.")
        self._begin_with(ids)
        seed, began, first, pieces = self._options["seed"], time.perf_counter(), 0.0, []
        inputs = {name: request.pop(name) for name in ("input_ids", "attention_mask")}
        with generate_stream(self._model, inputs, past_key_values=self._cache, seed=seed, **request) as stream:
            try:
                for piece in stream:
                    if len(piece.token_ids) and not first:  # not a piece of a long prompt
                        first = time.perf_counter() - began
                    self._read += piece.token_ids.tolist()
                    pieces.append(piece.text)
                    yield piece.text
            finally:
                seconds, report = time.perf_counter() - began, stream.report
                if report is not None and first:
                    self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
                    self.figures = (
                        f"{counted(report.new_tokens, 'token')}, {report.new_tokens / seconds:.0f} tokens/s, "
                        f"{report.tokens_per_pass:.2f} tokens per pass, the first after {first:.2f} s"
                    )

    def _begin_with(self, ids: list[int]) -> None:
        """Keep the cached prefix of a prompt; a cache that cannot be cut is dropped."""
        from transformers.cache_utils import DynamicLayer

        from retrieve_spec.verify.interface import new_cache

        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._read, ids[:-1], strict=False)))
        surplus = 0 if self._cache is None else self._cache.get_seq_length() - known
        if surplus > 0 and all(type(layer) is DynamicLayer for layer in self._cache.layers):
            self._cache.crop(-surplus)  # windowed and recurrent layers forget what a cut would need
        elif surplus > 0 or self._cache is None:
            self._cache = new_cache(self._model)
        self._read = ids

    def command(self, line: str) -> str:
        """Run a command that begins with a slash; return its message."""
        word, _, rest = line.partition(" ")
        place = Path(rest.strip()).expanduser()
        if word == "/help":
            return HELP
        if word == "/clear":
            self.clear()
            return "The conversation is forgotten."
        if word == "/load" and rest.strip():
            text = read_text(place)
            self.loaded += text + "\n\n"
            return f"{counted(len(text), 'character')} of {place} stand in front of your next message."
        if word == "/save" and rest.strip():
            said = "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)
            place.write_text(said + "\n", encoding="utf-8")
            return f"The conversation is in {place}."
        raise PromptError("a command", repr(word), f"These are there:\n{HELP}")


def read_text(place: Path) -> str:
    """Return the text of a file.

    Raises
    ------
    PromptError
        It is not in UTF-8.
    """
    try:
        return place.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError("a file in UTF-8", f"other bytes at {error.start}", "Convert the file.") from error


@click.command(short_help="Talk with a chat model in the terminal.")
@click.option("--model", default="smollm2", show_default=True, metavar=MODEL_NAMES, help="The model to talk with.")
@SYSTEM
@generation_options(max_new_tokens=1024)
@click.option("--stats", is_flag=True, help="Print a line of figures after each answer.")
@click.option(
    "--learn-idle",
    is_flag=True,
    help="While you type, ask the model what follows each token; drafts become better.",
)
@LOADING
def chat(model: str, stats: bool, learn_idle: bool, **options: Any) -> None:
    """Talk with a chat model; answers stream to standard output, everything else goes to standard error.

    Drafts come from the whole conversation and from earlier ones. When reading from a pipe, each line is a message.
    """
    if sys.stdin is None:
        raise PromptError("messages on standard input", "it is closed", "Type them in a terminal, or give a pipe.")
    config = config_of(options, session=options["session"] or True)

    import retrieve_spec as rs
    from retrieve_spec.engine.first_passes import learn_bigrams

    lm, tokenizer, datastores = load(model, options)
    encode(tokenizer, messages_of("?", options["system"]))  # raises now if the model has no chat template

    has_message = Event()

    def accelerate() -> None:
        with compiling_shown():
            rs.accelerate(lm, tokenizer=tokenizer, datastores=datastores, config=config)
        learn()

    def learn() -> None:
        nonlocal learn_idle
        if not learn_idle:
            return
        try:
            learn_bigrams(lm.speculation, lambda: not has_message.is_set())
        except Exception as error:  # which is no reason to end the conversation
            learn_idle = False
            click.echo(f"Learning between messages failed, and is off: {in_a_line(error)}", err=True)

    def learn_after(ready: Future[None]) -> None:
        ready.result()  # raises its error again
        learn()

    watched = sys.stdin.isatty() and sys.stdout.isatty()
    if watched:
        import readline  # noqa: F401  # enables line editing and history

        click.echo(f"{model}, {lm.num_parameters() / 1e6:,.0f} M parameters. /help lists commands.", err=True)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ending:
        ending.callback(has_message.set)  # ends learning
        ready = pool.submit(accelerate)  # while the first question is typed
        conversation = Conversation(lm, tokenizer, options)
        for line in _lines(watched):
            has_message.set()
            _turn(conversation, line, ready, stats, watched)
            has_message.clear()
            ready = pool.submit(learn_after, ready)


def _lines(watched: bool) -> Iterator[str]:
    """Yield the lines that the user types, without empty ones."""
    while True:
        try:
            line = input("\n> " if watched else "")
            line.encode()  # invalid bytes become lone surrogates in the C locale
        except UnicodeError as error:
            raise PromptError("messages in UTF-8", in_a_line(error), "Convert the text.") from error
        except EOFError:
            if watched:
                click.echo()
            return
        except KeyboardInterrupt:
            if not watched:
                raise
            click.echo("\nCtrl-D ends the conversation.", err=True)
            continue
        if line.strip():
            yield line


def _turn(conversation: Conversation, line: str, accelerated: Future[None], stats: bool, watched: bool) -> None:
    """Answer a line, once the model is ready.

    On a terminal, errors are shown and the conversation continues; a pipe ends with the error.
    """
    try:
        accelerated.result()
        if line.startswith("/"):
            click.echo(conversation.command(line), err=True)
            return
        with contextlib.closing(conversation.ask(line)) as pieces:
            for text in pieces:
                click.echo(text, nl=False)
        click.echo()
        if stats:
            click.echo(conversation.figures, err=True)
    except KeyboardInterrupt:
        if not watched:
            raise
        click.echo(" …")
    except (RetrieveSpecError, OSError) as error:
        if not watched:
            raise
        click.echo(f"Error: {error}", err=True)
