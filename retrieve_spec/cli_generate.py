"""Command `retrieve-spec generate`: one accelerated generation, and on request a plain one beside it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from retrieve_spec.cli_common import (
    COUNT,
    LOADING,
    MODEL,
    SEED,
    TEXT,
    FiniteRange,
    WholeRange,
    compiling_shown,
    loading_bars,
    with_options,
)
from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.errors import PromptError, in_a_line

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

    from retrieve_spec.datastore.store import Datastore
    from retrieve_spec.engine.report import GenerationReport

OFF = "off"
WARM_UP_TOKENS = 8


def parse_nodes(ctx: click.Context, param: click.Parameter, value: str) -> int | str:
    """Read `auto` or a whole number; the config checks its range."""
    if value == AUTO:
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither 'auto' nor a whole number.") from None


@dataclass(frozen=True, slots=True)
class Run:
    """A finished generation: new token ids and wall time, including the prompt."""

    token_ids: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


def generation_options(max_new_tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of commands that generate text: length, sampling, sources of drafts."""
    options = (
        click.option("--max-new-tokens", type=COUNT, default=max_new_tokens, show_default=True, metavar="N"),
        click.option(
            "--temperature",
            type=FiniteRange(min=0),
            default=0.0,
            show_default=True,
            metavar="T",
            help="0 always takes the most probable token.",
        ),
        click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True, metavar="P"),
        click.option(
            "--top-k", type=WholeRange(0, 1_000_000), default=0, show_default=True, metavar="K", help="0 for no limit."
        ),
        click.option("--seed", type=SEED, default=0, show_default=True, metavar="S", help="Same seed, same text."),
        click.option("--draft", default=AUTO, show_default=True, metavar="auto|off|PRESET", help="Sources of drafts."),
        click.option(
            "--nodes",
            callback=parse_nodes,
            default=AUTO,
            show_default=True,
            metavar="auto|N",
            help="Draft nodes per pass.",
        ),
        click.option(
            "--store", "stores", multiple=True, metavar="DIR", help="A datastore to draft from; can be repeated."
        ),
        click.option(
            "--session",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Keep the answers in this file, and draft from those in it.",
        ),
    )

    return with_options(*options)


SYSTEM = click.option(
    "--system", type=TEXT, metavar="TEXT", help="System message at the beginning of the conversation."
)


@click.command(short_help="Continue a prompt, drafting from text that can be looked up.")
@MODEL
@click.option("--prompt", type=TEXT, metavar="TEXT", help="The text to continue.")
@click.option(
    "--prompt-file",
    type=click.File("rb"),
    metavar="F",
    help="A UTF-8 file with the text to continue, '-' for standard input (the default without --prompt).",
)
@click.option("--chat", is_flag=True, help="Use the model's chat template; --system implies it.")
@SYSTEM
@generation_options(max_new_tokens=256)
@click.option("--provenance", is_flag=True, help="Report which documents of the datastores accepted drafts come from.")
@click.option("--compare", is_flag=True, help="Run plain generation too; report speed-up and identity.")
@LOADING
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else, on standard output.")
def generate(model: str, prompt: str | None, prompt_file: Any, as_json: bool, compare: bool, **options: Any) -> None:
    """Continue a prompt; the text streams to standard output, figures go to standard error."""
    text = read_prompt(prompt, prompt_file)
    config = config_of(options, provenance=options["provenance"])

    import retrieve_spec as rs

    with compiling_shown():
        lm, tokenizer, datastores = load(model, options)
        messages = messages_of(text, options["system"]) if options["chat"] or options["system"] else None
        request = request_of(lm, tokenizer, text if messages is None else messages, options)
        rs.accelerate(lm, tokenizer=tokenizer, datastores=datastores, config=config)
    if compare:
        generate_once(lm, tokenizer, request, options["seed"], max_new_tokens=WARM_UP_TOKENS)
    run = generate_once(lm, tokenizer, request, options["seed"], echo=not as_json)
    report = lm.speculation.last
    result = summary(run, report, tokenizer)
    if options["provenance"]:
        result["provenance"] = [
            {**asdict(found), "text": tokenizer.decode(run.token_ids[found.position : found.position + found.tokens])}
            for found in report.provenance
        ]
    if compare:
        result |= compared_with_plain(lm, tokenizer, request, options["seed"], run)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_figures(result)


def read_prompt(prompt: str | None, prompt_file: Any) -> str:
    """Return the prompt from the option, the file or standard input.

    Raises
    ------
    PromptError
        It is empty or not UTF-8.
    click.UsageError
        There are two prompts, or none.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("Use just one of --prompt and --prompt-file.")
    if prompt is None:
        if prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
            raise click.UsageError("Give --prompt TEXT or --prompt-file F, or pipe the prompt to standard input.")
        stream: BinaryIO = prompt_file or sys.stdin.buffer
        data = stream.read()
        try:
            prompt = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError("a prompt in UTF-8", f"other bytes at {error.start}", "Convert the file.") from error
    if not prompt:
        raise PromptError("a prompt of at least one character", "an empty one", "Give some text to continue.")
    return prompt


def summary(run: Run, report: GenerationReport, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the figures of a generation, with the keys of `--json`."""
    return {
        "text": tokenizer.decode(run.token_ids, skip_special_tokens=True),
        "token_ids": run.token_ids,
        "new_tokens": len(run.token_ids),
        "passes": report.passes,
        "tokens_per_pass": report.tokens_per_pass,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "accepted_by_source": report.accepted_by_source,
        "mode": report.mode,
        "reason": report.reason,
    }


def config_of(options: dict[str, Any], **changes: Any) -> SpeculationConfig:
    """Return the config; wrong options and stores raise errors here, before a model loads."""
    from retrieve_spec.datastore.store import open_datastore
    from retrieve_spec.drafting.presets import build_drafter

    given = {"draft": options["draft"], "nodes": options["nodes"], "session": options["session"] or False}
    config = SpeculationConfig().with_options(**{**given, **changes})
    datastores = [open_datastore(path) for path in options["stores"]]
    if config.draft != OFF:
        build_drafter(config.with_options(session=False), datastores=datastores)
    return config


def load(name: str, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Datastore]]:
    """Load the model, its tokenizer, and the datastores."""
    from retrieve_spec.datastore.store import open_datastore
    from retrieve_spec.reference_model import load_model

    with loading_bars():
        model, tokenizer = load_model(name, **asdict(options["loading"]))
    return model, tokenizer, [open_datastore(path, tokenizer=tokenizer) for path in options["stores"]]


def messages_of(text: str, system: str | None = None) -> list[dict[str, str]]:
    """Return the messages that begin a conversation: the system message, if any, and the question."""
    told = [{"role": "system", "content": system}] if system else []
    return [*told, {"role": "user", "content": text}]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> BatchEncoding:
    """Return (1, L) token ids of a text, or of a conversation up to the next answer.

    Raises
    ------
    PromptError
        There is no chat template, or it rejects the conversation.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not tokenizer.chat_template:
        raise PromptError("a model with a chat template", "none", "Take one that follows instructions: --model smollm2")
    try:
        return tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            tokenizer_kwargs={"return_token_type_ids": False},
        )
    except Exception as error:  # templates may raise anything
        raise PromptError(
            "to fill in the chat template", in_a_line(error), "Without --system it may take it."
        ) from error


def request_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, str]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `generate` for a text, or for a conversation."""
    encoded = encode(tokenizer, prompt)
    if encoded["input_ids"].shape[1] == 0:
        raise PromptError("a prompt of at least one token", "none", "Give some text to continue.")
    sampled = options["temperature"] > 0
    # With greedy decoding, a checkpoint's sampling defaults would only cause warnings.
    choice = {name: options[name] if sampled else None for name in ("temperature", "top_p", "top_k")}
    inputs = {name: tensor.to(model.device) for name, tensor in encoded.items()}
    return {**inputs, "max_new_tokens": options["max_new_tokens"], "do_sample": sampled, **choice}


def generate_once(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    request: dict[str, Any],
    seed: int,
    *,
    echo: bool = False,
    **changes: Any,
) -> Run:
    """Generate once; every run streams through the same decoder, so that times are comparable."""
    import torch
    from transformers import TextStreamer

    class Printer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if echo:
                click.echo(text, nl=stream_end)

    torch.manual_seed(seed)
    streamer = Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = time.perf_counter()
    output = model.generate(**{**request, "streamer": streamer, **changes})
    return Run(output[0, request["input_ids"].shape[1] :].tolist(), time.perf_counter() - start)


def compared_with_plain(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: dict[str, Any], seed: int, run: Run
) -> dict[str, Any]:
    """Run transformers' own `generate`; a sampled text is compared with our loop without drafts.

    Our sampling noise is keyed by position, that of transformers is drawn in sequence, so the two texts agree in
    distribution only; drafts must not change our own.
    """
    import retrieve_spec as rs

    same_as = generate_once(model, tokenizer, request, seed, draft="off") if request["do_sample"] else None
    rs.restore(model)
    generate_once(model, tokenizer, request, seed, max_new_tokens=WARM_UP_TOKENS)
    plain = generate_once(model, tokenizer, request, seed)
    return {
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": run.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0,
        "identical": run.token_ids == (same_as or plain).token_ids,
    }


def _print_figures(result: dict[str, Any]) -> None:
    by_source = ", ".join(f"{name} {count}" for name, count in result["accepted_by_source"].items() if count)
    lines = [
        f"{result['new_tokens']} tokens in {result['seconds']:.2f} s, {result['tokens_per_second']:.0f} tokens/s; "
        f"{result['passes']} passes, {result['tokens_per_pass']:.2f} tokens per pass; accepted: {by_source or 'none'}"
    ]
    if result["reason"]:
        lines.append(f"mode {result['mode']}: {result['reason']}")
    if "speedup" in result:
        lines.append(
            f"plain {result['plain_tokens_per_second']:.0f} tokens/s, speed-up {result['speedup']:.2f}, "
            f"identical: {'yes' if result['identical'] else 'NO'}"
        )
    for item in result.get("provenance", []):
        where = f"{item['path']} ({item['licence'] or 'no licence stated'}) in {item['store']}"
        lines.append(f"tokens {item['position']}-{item['position'] + item['tokens'] - 1}: {where}")
    click.echo("\n".join(lines), err=True)
