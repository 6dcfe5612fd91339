"""Streams: what becomes visible with every pass of a call of `generate_stream`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import Drafter, VerifiedPass
from retrieve_spec.engine.joining import sequences_of
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.rows import DelegatedCall, Prepared
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.errors import ConfigError
from retrieve_spec.generation.calls import delegate, prepare_call, speculation_of
from retrieve_spec.generation.outputs import check_decoder, noted
from retrieve_spec.generation.request import as_inputs, known_ids, prediction_ids, setting
from retrieve_spec.model_layers import base_model


@dataclass(frozen=True, slots=True)
class Piece:
    """What became visible with one pass.

    Attributes
    ----------
    token_ids
        (t,) int32, the accepted tokens and the bonus token.
    text
        Their text; a character whose bytes are spread over tokens appears with the last of them. Empty without a
        tokenizer.
    logprobs, raw_logprobs
        (t,) float32 with `return_logprobs=True`: log-probabilities of the tokens under the distribution they were
        chosen by, and under that of the model's own logits; else None.
    """

    token_ids: NDArray[np.int32]
    text: str = ""
    logprobs: NDArray[np.float32] | None = None
    raw_logprobs: NDArray[np.float32] | None = None


class Stream(Iterator[Piece]):
    """The pieces of one generation, as `generate_stream` hands them out.

    Closing it, leaving it in a `with` statement, or losing it ends the generation.

    Parameters
    ----------
    pieces
        Makes them; ends its generation when it is closed.
    report
        Tells what the generation did so far, None before its first piece.
    """

    def __init__(self, pieces: Generator[Piece, None, None], report: Callable[[], GenerationReport | None]) -> None:
        self._pieces, self._report = pieces, report

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation."""
        self._pieces.close()

    @property
    def report(self) -> GenerationReport | None:
        """What this generation did so far, whatever else the model is doing; None before the first piece."""
        return self._report()


class TextDecoder:
    """Decodes a growing list of token ids piece by piece; the pieces joined are the decoded whole.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    skip_special_tokens
        Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._begin = 0  # decoding starts here: far enough back for joining rules (leading spaces) to apply
        self._shown = 0  # tokens whose text has been shown

    def push(self, token_ids: Many[int] | NDArray[np.int32]) -> str:
        """Add tokens; return the text that is certain by now."""
        self._ids.extend(int(token) for token in token_ids)
        return self._take(final=False)

    def flush(self) -> str:
        """Return what is left, incomplete characters included."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        """Text not shown yet; nothing while it ends inside a character, unless that is final."""
        before = self._decode(self._ids[self._begin : self._shown])
        whole = self._decode(self._ids[self._begin :])
        if not final and whole.endswith("\ufffd"):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return whole[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text


_Run = tuple[NDArray[np.int32], NDArray[np.float32] | None]
"""Visible tokens (t,) of one pass, and their log-probabilities (2, t) where they are asked for."""


def generate_stream(
    model: Any,
    inputs: torch.Tensor | str | Any,
    *,
    tokenizer: Any = None,
    past_key_values: Any = None,
    prediction: str | Many[int] | NDArray[np.int32] | None = None,
    context_ids: Many[int] | NDArray[np.int32] | None = None,
    on_pass: Callable[[VerifiedPass], None] | None = None,
    draft: str | None = None,
    nodes: int | str | None = None,
    seed: int | None = None,
    scope: str | None = None,
    store: Any = None,
    return_logprobs: bool = False,
    skip_special_tokens: bool = True,
    **kwargs: Any,
) -> Stream:
    """Generate and yield what becomes visible with every pass.

    Closing the iterator, an exception or Ctrl-C between or inside passes ends the generation and leaves the model
    usable; `model.speculation.last` then reports what was done. A call that must be left to the original `generate`
    yields its whole output at once.

    Parameters
    ----------
    model
        An accelerated model.
    inputs
        (1, L) or (L,) token ids, a mapping from a tokenizer (`input_ids`, `attention_mask`), or text.
    tokenizer
        To encode text and to decode the output; by default the one given to `accelerate`.
    past_key_values
        A cache to continue from; it ends as plain `generate` would leave it.
    prediction, draft, nodes, seed, scope, store
        As for `model.generate`, see `accelerate`.
    context_ids
        (n,) what the drafter reads in place of the prompt: other texts, the most relevant last, and at the end what
        stands in front of the output. In fill-in-the-middle that is not the end of the prompt.
    on_pass
        Called with what each drafted-for pass showed, the prompt's first; the arrays are valid during the call.
    return_logprobs
        Let pieces carry the log-probabilities of their tokens.
    skip_special_tokens
        Leave special tokens out of the text.
    **kwargs
        Whatever `generate` takes.

    Yields
    ------
    Piece
        `token_ids` (t,) int32 and `text`. Both empty after a chunk of a long prompt has been read; a last piece may
        carry text without tokens (bytes that never became a character).

    Raises
    ------
    ConfigError
        The model is not accelerated, more than one row is given or asked for, or text without a tokenizer.
    PromptError
        The prompt is empty.
    """
    model = base_model(model)
    speculation = speculation_of(model)
    tokenizer = tokenizer if tokenizer is not None else speculation.tokenizer
    arguments = {**as_inputs(inputs, tokenizer, model), **kwargs, "tokenizer": tokenizer}
    if past_key_values is not None:
        arguments[speculation.interface.cache_name] = past_key_values
    ids = arguments["input_ids"]
    if ids.shape[0] != 1:
        raise ConfigError("one row to stream", f"{ids.shape[0]} rows", "Call generate for batches.")
    if arguments.get("streamer") is not None:
        raise ConfigError("a stream without a streamer", "one", "Read the pieces, or give it to generate.")
    samples = setting(model, arguments, "num_return_sequences") or 1
    if samples > 1:  # whose tokens a piece holds would not be known
        raise ConfigError(
            "one sample to stream",
            f"num_return_sequences={samples}",
            "Open a stream for each, with a seed of its own: they share passes; or call generate for all at once.",
        )
    options = {
        "draft": draft,
        "nodes": nodes,
        "seed": seed,
        "scope": scope,
        "store": store,
        "context_ids": None if context_ids is None else known_ids(context_ids, "context_ids", model),
        "on_pass": on_pass,
        "return_logprobs": return_logprobs,
    }
    expected = prediction_ids(prediction, tokenizer, model)
    under_way: list[GenerationReport] = []
    decoder = TextDecoder(tokenizer, skip_special_tokens) if tokenizer is not None else None
    pieces = _pieces(_runs(model, arguments, expected, options, under_way), decoder)
    return Stream(pieces, lambda: under_way[0] if under_way else None)


def open_sequence(
    model: Any,
    input_ids: torch.Tensor,
    *,
    tokenizer: Any = None,
    prediction: Many[int] | None = None,
    context_ids: Many[int] | None = None,
    on_pass: Callable[[VerifiedPass], None] | None = None,
    on_loan: Callable[[Drafter], None] | None = None,
    draft: str | None = None,
    seed: int | None = None,
    scope: str | None = None,
    store: Any = None,
    **kwargs: Any,
) -> Sequence | None:
    """The sequence of a row (1, L) for whoever takes it from pass to pass: `speculation.engine` joins and advances it.

    Arguments are those of `generate_stream`; `on_loan` is called with the drafter that the sequence is lent. None where
    the call is left to the original `generate`.
    """
    arguments = {**as_inputs(input_ids, tokenizer, model), **kwargs, "tokenizer": tokenizer}
    try:
        prepared = prepare_call(model, arguments)
    except DelegatedCall:
        return None
    read = None if context_ids is None else known_ids(context_ids, "context_ids", model)
    (sequence,) = sequences_of(
        speculation_of(model),
        prepared,
        [prediction_ids(prediction, tokenizer, model)],
        draft=draft,
        seed=seed,
        scope=scope,
        store=store,
        context_ids=read,
        on_pass=on_pass,
        on_loan=on_loan,
    )
    return sequence


def _runs(
    model: Any,
    arguments: dict[str, Any],
    prediction: NDArray[np.int32] | None,
    options: dict[str, Any],
    under_way: list[GenerationReport],
) -> Generator[_Run, None, None]:
    """What each pass of one row makes visible; the call is prepared when the first is asked for."""
    speculation = speculation_of(model)
    if options["return_logprobs"]:
        check_decoder(model, arguments)
    prepared: Prepared | None = None
    try:
        prepared = prepare_call(model, arguments)
    except DelegatedCall as why:
        under_way.append(speculation.delegated(str(why)))
    if prepared is None:
        rows, both = delegate(model, arguments, options["seed"], options["return_logprobs"])
        yield rows[0].cpu().numpy().astype(np.int32), None if both is None else both[0].cpu().numpy()
        return
    (sequence,) = sequences_of(speculation, prepared, [prediction], **options)
    under_way.append(sequence.report)
    try:
        with contextlib.closing(speculation.engine.run([sequence])) as passes:
            shown = 0
            for _, visible in passes:
                if visible is not None:
                    yield visible, noted(sequence, shown, len(visible))
                    shown += len(visible)
    finally:
        speculation.ended(sequence)
    if sequence.error is not None:
        raise sequence.error


def _pieces(runs: Generator[_Run, None, None], decoder: TextDecoder | None) -> Generator[Piece, None, None]:
    """Runs of tokens with their text."""
    both = None
    with contextlib.closing(runs):
        for visible, both in runs:
            yield Piece(visible, decoder.push(visible) if decoder else "", *(() if both is None else both))
        if rest := decoder.flush() if decoder else "":
            yield Piece(np.empty(0, np.int32), rest, *(() if both is None else both[:, :0]))
