"""Streams of one text as it is written, and of many requests as they end: callers of `Engine.run`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.engine.joining import CallOptions, SharedPrompts, sequences_of
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.sequence import Sequence, Status
from retrieve_spec.errors import ConfigError, require
from retrieve_spec.generation.calls import delegate, log_probs_of
from retrieve_spec.generation.delegation import setting
from retrieve_spec.generation.request import (
    as_inputs,
    pop_options,
    prediction_ids,
    prepare_call,
    row_predictions,
    speculation_of,
)
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


_T = TypeVar("_T")


class Answers(Iterator[_T]):
    """Iterates over the results of a generation; closing it, leaving its `with` block or dropping it ends the
    generation.

    Parameters
    ----------
    made
        Generates the results, and ends the generation when it is closed.
    """

    def __init__(self, made: Generator[_T, None, None]) -> None:
        self._made = made

    def __next__(self) -> _T:
        return next(self._made)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation, or all that are under way."""
        self._made.close()


class Stream(Answers[Piece]):
    """The pieces of one generation, as `generate_stream` hands them out.

    Parameters
    ----------
    pieces
        Makes them.
    report
        Returns what the generation did so far, None before its first piece.
    """

    def __init__(self, pieces: Generator[Piece, None, None], report: Callable[[], GenerationReport | None]) -> None:
        super().__init__(pieces)
        self._report = report

    @property
    def report(self) -> GenerationReport | None:
        """What this generation did so far, whatever else the model is doing; None before the first piece."""
        return self._report()


class TextDecoder:
    """Decodes a growing list of token ids piece by piece; joined, the pieces are the text of all tokens.

    Parameters
    ----------
    decode
        Returns the text of token ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
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
        """Return the text that was not returned yet; none while it ends inside a character, unless `final`."""
        before = self._decode(self._ids[self._begin : self._shown])
        whole = self._decode(self._ids[self._begin :])
        if not final and whole.endswith("\ufffd"):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return whole[len(before) :]


_Run = tuple[NDArray[np.int32], NDArray[np.float32] | None]
"""Visible tokens (t,) of one pass, and their log-probabilities (2, t) where they are asked for."""


def generate_stream(
    model: Any,
    inputs: torch.Tensor | str | Any,
    *,
    tokenizer: Any = None,
    past_key_values: Any = None,
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
    skip_special_tokens
        Leave special tokens out of the text.
    **kwargs
        Arguments of `model.generate`, with those that `accelerate` adds to it: `max_new_tokens`, `seed`, `prediction` …
        With `return_logprobs` each piece has the log-probabilities of its tokens.

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
    if samples > 1:  # a piece would not tell whose tokens it has
        raise ConfigError(
            "one sample to stream",
            f"num_return_sequences={samples}",
            "Open a stream for each, with a seed of its own: they share passes; or call generate for all at once.",
        )
    options = pop_options(arguments, model)
    expected = prediction_ids(options.prediction, tokenizer, model)
    under_way: list[GenerationReport] = []
    how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    decoder = None if tokenizer is None else TextDecoder(partial(tokenizer.decode, **how))
    pieces = _pieces(_runs(model, arguments, expected, options, under_way), decoder)
    return Stream(pieces, lambda: under_way[0] if under_way else None)


def _runs(
    model: Any,
    arguments: dict[str, Any],
    prediction: NDArray[np.int32] | None,
    options: CallOptions,
    under_way: list[GenerationReport],
) -> Generator[_Run, None, None]:
    """Yield what each pass of one row makes visible; the call is prepared when the first is requested."""
    speculation, prepared = speculation_of(model), prepare_call(model, arguments)
    if isinstance(prepared, str):
        report, rows, both = delegate(model, arguments, prepared, options)
        under_way.append(report)
        yield rows[0].cpu().numpy().astype(np.int32), None if both is None else both[0].cpu().numpy()
        return
    (sequence,) = sequences_of(speculation, prepared, [prediction], options)
    under_way.append(sequence.report)
    try:
        with contextlib.closing(speculation.engine.run([sequence])) as passes:
            shown = 0
            for _, visible in passes:
                if visible is not None:
                    yield visible, log_probs_of(sequence, shown, len(visible))
                    shown += len(visible)
    finally:
        speculation.ended(sequence)
    if sequence.error is not None:
        raise sequence.error


def _pieces(runs: Generator[_Run, None, None], decoder: TextDecoder | None) -> Generator[Piece, None, None]:
    """Yield runs of tokens with their text."""
    both = None
    with contextlib.closing(runs):
        for visible, both in runs:
            yield Piece(visible, decoder.push(visible) if decoder else "", *(() if both is None else both))
        if rest := decoder.flush() if decoder else "":
            yield Piece(np.empty(0, np.int32), rest, *(() if both is None else both[:, :0]))


@dataclass(frozen=True, slots=True)
class Completion:
    """One text that the model wrote.

    Attributes
    ----------
    token_ids
        (n,) int32, after the prompt.
    text
        The same as text; empty without a tokenizer.
    report
        How it was decoded.
    logprobs, raw_logprobs
        (n,) float32 with `return_logprobs=True`, as in the output of `generate`; else None.
    """

    token_ids: NDArray[np.int32]
    text: str
    report: GenerationReport
    logprobs: NDArray[np.float32] | None = None
    raw_logprobs: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is over.

    Attributes
    ----------
    index
        Its place among the requests.
    request
        What was given.
    outputs
        One for each of `num_return_sequences`; as far as they got where it failed or was cancelled.
    error
        What it failed with, else None.
    cancelled
        Whether `Requests.cancel` ended it.
    """

    index: int
    request: Any
    outputs: tuple[Completion, ...] = ()
    error: Exception | None = None
    cancelled: bool = False

    @property
    def text(self) -> str:
        """Text of the first output; empty where there is none."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """(n,) int32 tokens of the first output."""
        return self.outputs[0].token_ids if self.outputs else np.empty(0, np.int32)


Order = Literal["given", "completed"]


@dataclass(slots=True)
class _UnderWay:
    """A request whose sequences have been made."""

    index: int
    request: Any
    sequences: list[Sequence]
    tokenizer: Any


class Requests(Answers[Finished]):
    """The requests of one `generate_many`, each as it is over."""

    def __init__(
        self,
        model: Any,
        requests: Iterable[Any],
        common: dict[str, Any],
        *,
        order: Order,
        rows: int,
    ) -> None:
        self._model, self._common, self._kept_order = model, common, order == "given"
        self._speculation = speculation_of(model)
        self._rows = 1 if self._speculation.batching_blocker() else rows  # rows would only wait for each other
        self._prompts = SharedPrompts(self._speculation.interface.cache_name)
        self._given = enumerate(requests)
        self._under_way: dict[int, _UnderWay] = {}
        self._over: deque[Finished] = deque()
        self._cancelled: set[int] = set()
        self._exhausted = False
        super().__init__(self._in_order(self._as_completed()))

    def cancel(self, index: int) -> None:
        """End one request, whether it has begun or not; the others go on. Safe from any thread."""
        self._cancelled.add(index)
        for job in list(self._under_way.values()):
            if job.index == index:
                self._speculation.engine.leave(*job.sequences)

    def _in_order(self, finished: Generator[Finished, None, None]) -> Generator[Finished, None, None]:
        """Requests as they are handed out."""
        early: dict[int, Finished] = {}
        turn = 0
        with contextlib.closing(finished):
            for one in finished:
                if not self._kept_order:
                    yield one
                    continue
                early[one.index] = one
                while turn in early:
                    yield early.pop(turn)
                    turn += 1

    def _as_completed(self) -> Generator[Finished, None, None]:
        """Requests as they end; one that the original `generate` answers is answered between two passes of others."""
        while not self._exhausted:
            with contextlib.closing(self._speculation.engine.run(self._sequences(), self._rows)) as running:
                for sequence, visible in running:
                    if visible is None:
                        self._ended(sequence)
                    while self._over:
                        yield self._over.popleft()
            while self._over:
                yield self._over.popleft()

    def _sequences(self) -> Iterator[Sequence]:
        """The sequences of request after request, until one is over while no others are under way."""
        for index, request in self._given:
            try:
                made = self._begin(index, request)
            except Exception as error:  # fails this request only
                self._over.append(Finished(index, request, error=error))
                made = []
            yield from made
            if self._over and not self._under_way:
                return
        self._exhausted = True

    def _begin(self, index: int, request: Any) -> list[Sequence]:
        """The sequences of a request; none where it is over, or left to the original `generate`."""
        if index in self._cancelled:
            self._over.append(Finished(index, request, cancelled=True))
            return []
        model, speculation = self._model, self._speculation
        arguments = self._arguments(request)
        tokenizer = arguments["tokenizer"]
        options = pop_options(arguments, model)
        prepared = prepare_call(model, arguments, speculation.batching_blocker())
        if isinstance(prepared, str):
            self._over.append(self._delegated(index, request, arguments, options, prepared))
            return []
        predictions = row_predictions(options.prediction, tokenizer, len(prepared.inputs.input_ids), model)
        sequences = sequences_of(speculation, prepared, predictions, options, self._prompts)
        job = _UnderWay(index, request, sequences, tokenizer)
        self._under_way.update({id(sequence): job for sequence in sequences})
        return sequences

    def _arguments(self, request: Any) -> dict[str, Any]:
        """A request as arguments of `generate` and of this library."""
        own: dict[str, Any] = dict(request) if isinstance(request, Mapping) else {"inputs": request}
        arguments = self._common | own
        tokenizer = arguments["tokenizer"] = arguments.get("tokenizer") or self._speculation.tokenizer
        if (inputs := arguments.pop("inputs", None)) is not None:
            arguments |= as_inputs(inputs, tokenizer, self._model)
        arguments = as_inputs(arguments, tokenizer, self._model)
        ids = arguments.get("input_ids")
        if ids is None or len(ids) != 1:
            got = "none" if ids is None else f"{len(ids)} rows"
            raise ConfigError("one prompt per request", got, "Give each prompt as a request of its own.")
        if arguments.get("streamer") is not None:
            raise ConfigError("requests without a streamer", "one", "Call generate_stream for text as it is written.")
        return arguments | {"return_dict_in_generate": False, "output_scores": False, "output_logits": False}

    def _ended(self, sequence: Sequence) -> None:
        """Note that a sequence has ended; the first of a request that fails ends the request."""
        job = self._under_way.pop(id(sequence))
        if sequence.error is not None:
            self._speculation.engine.leave(*job.sequences)
            if not isinstance(sequence.error, Exception):  # such as KeyboardInterrupt in a processor
                raise sequence.error
        if any(id(other) in self._under_way for other in job.sequences):
            return
        self._speculation.ended(*job.sequences)
        outputs = tuple(_completion(s.text.new_ids, job.tokenizer, s.report, log_probs_of(s)) for s in job.sequences)
        error = next((s.error for s in job.sequences if isinstance(s.error, Exception)), None)
        cancelled = job.index in self._cancelled and any(s.status is Status.CANCELLED for s in job.sequences)
        self._over.append(Finished(job.index, job.request, outputs, error, cancelled))

    def _delegated(
        self, index: int, request: Any, arguments: dict[str, Any], options: CallOptions, reason: str
    ) -> Finished:
        """Let the original `generate` answer a request, for a reason."""
        report, rows, both = delegate(self._model, arguments, reason, options)
        ends, tokenizer = setting(self._model, arguments, "eos_token_id"), arguments["tokenizer"]
        log_probs = [None] * len(rows) if both is None else both.cpu().numpy()
        outputs = tuple(
            _completion(_until(row, ends), tokenizer, report, own) for row, own in zip(rows, log_probs, strict=True)
        )
        return Finished(index, request, outputs)


def _completion(
    ids: NDArray[np.int64], tokenizer: Any, report: GenerationReport, both: NDArray[np.float32] | None
) -> Completion:
    """What was written, (n,), with its text and log-probabilities (2, n)."""
    new_ids, text = ids.astype(np.int32), ""
    if tokenizer is not None:
        text = tokenizer.decode(new_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Completion(new_ids, text, report, *(() if both is None else both[:, : len(new_ids)]))


def _until(row: torch.Tensor, ends: Any) -> NDArray[np.int64]:
    """A row (n,) up to its first end-of-text token, without the padding after it."""
    ids: NDArray[np.int64] = row.cpu().numpy()
    found = np.flatnonzero(np.isin(ids, [] if ends is None else np.atleast_1d(np.asarray(ends))))
    return ids[: found[0] + 1] if len(found) else ids


def generate_many(
    model: Any,
    requests: Iterable[Any],
    *,
    order: Order = "given",
    rows: int = 0,
    **common: Any,
) -> Requests:
    """Answer any number of requests, as many at a time as there is room for, and yield each when it is over.

    Requests are taken from the iterable when there is room for them, so that it may be endless, and share passes of
    the model. Each says what it says alone. One that fails, or is cancelled, is handed out as such and ends nothing
    else.

    Parameters
    ----------
    model
        An accelerated model.
    requests
        Each is a text, token ids, or a mapping with `inputs` (either) or what a tokenizer returns (`input_ids`,
        `attention_mask`), and whatever `generate` takes for this request alone: `max_new_tokens`, `temperature`,
        `num_return_sequences`, `stop_strings` …, `prediction`, `draft`, `nodes`, `seed`, `scope`, `store`,
        `context_ids`, `tokenizer`.
    order
        `"given"` keeps the order of the requests (what is over early waits), `"completed"` does not.
    rows
        Texts under way at a time at most; 0 for `config.PASS.batch_rows`. Their keys and values take
        `config.PASS.batch_bytes` at most, but one text is always under way.
    **common
        The same for every request that does not say otherwise.

    Returns
    -------
    Requests
        An iterator of `Finished`; `cancel(index)` ends one request, `close()` all.

    Raises
    ------
    ConfigError
        The model is not accelerated, or `order` or `rows` is something else.

    Examples
    --------
    >>> for done in rs.generate_many(model, ["def add(", {"inputs": "class A", "seed": 1}], max_new_tokens=8):
    ...     print(done.index, done.text)
    """
    require(order in ("given", "completed"), "order to be 'given' or 'completed'", order, "Leave it at 'given'.")
    if isinstance(requests, str | Mapping) or not hasattr(requests, "__iter__"):
        raise ConfigError("many requests", type(requests).__name__, "Give a list of them, as [request].")
    right = isinstance(rows, int) and rows >= 0
    require(right, "rows of at least 0", rows, "Leave it at 0 for as many as there is room for.")
    return Requests(base_model(model), requests, common, order=order, rows=rows)
