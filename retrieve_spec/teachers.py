"""Models that `retrieve_spec.distilling` asks: what is asked, what is answered, and a model in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.datastore.dense import model_fingerprint
from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.engine.first_passes import learn_bigrams
from retrieve_spec.generation.streams import Finished, generate_many
from retrieve_spec.sources.recycling import shares_of_top
from retrieve_spec.verify.interface import catch_hidden, input_device

_Rows = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]
TOP = 8
"""Next tokens kept of each distribution."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to answer: its token ids, the most tokens of the answer, and how it is sampled (0: greedy)."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """What a model showed of a text.

    Attributes
    ----------
    ids
        (length,) int32 token ids of the text.
    first
        Position of the first of n consecutive tokens after which it was shown.
    top_ids, probs
        (n, k) int32 the most probable next tokens, -1 after the last, and float16 their probabilities.
    hidden
        (n, hidden size) float32 hidden states, None if not shown.
    """

    ids: NDArray[np.int32]
    first: int
    top_ids: NDArray[np.int32]
    probs: NDArray[np.float16]
    hidden: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer.

    Attributes
    ----------
    question
        What was asked.
    text
        Text of the answer.
    passes, tokens
        Number of passes that it took, and of its tokens.
    shown
        What the model showed of prompt and answer; None if nothing.
    """

    question: Question
    text: str
    passes: int
    tokens: int
    shown: Shown | None


class Teacher(ABC):
    """A model to distil from.

    Attributes
    ----------
    title, fingerprint
        Name for people, and what tells it from other models.
    vocabulary
        Number of tokens that `after_each` can be asked about.
    """

    title: str
    fingerprint: str
    vocabulary: int

    @property
    @abstractmethod
    def asked(self) -> int:
        """Number of tokens for which it is known what the model says after each alone."""

    @abstractmethod
    def answers(self, questions: Iterable[Question]) -> Generator[tuple[int, Answer]]:
        """Yield the number of each question with its answer, many at a time, as they come."""

    @abstractmethod
    def read(self, ids: NDArray[np.int32]) -> Shown:
        """Let the model read a text."""

    @abstractmethod
    def after_each(
        self, tokens: NDArray[np.int32], goes_on: Callable[[], bool]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float16]]:
        """Ask what follows each of m tokens alone, while `goes_on()`; return those asked, and `top_ids` and `probs`."""


class LocalModel(Teacher):
    """An accelerated model in this process."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._bigrams = model.speculation.drafters.bigrams
        self.vocabulary = 0 if self._bigrams is None else len(self._bigrams.entries)
        self.title, self.fingerprint = _title(model), model_fingerprint(model)

    @property
    def asked(self) -> int:
        """Number of tokens whose bigrams are known."""
        return 0 if self._bigrams is None else len(self._bigrams.known)

    def answers(self, questions: Iterable[Question]) -> Generator[tuple[int, Answer]]:
        """Answer questions by `generate_many`."""
        asked: dict[int, tuple[Question, list[_Rows]]] = {}

        def requests() -> Iterator[dict[str, Any]]:
            for number, question in enumerate(questions):
                asked[number] = question, []
                yield _request(question, asked[number][1])

        with closing(generate_many(self._model, requests(), order="completed")) as finished:
            for done in finished:
                if done.error is not None:
                    raise done.error
                yield done.index, self._answer(done, *asked.pop(done.index))

    def _answer(self, done: Finished, question: Question, seen: list[_Rows]) -> Answer:
        [output] = done.outputs
        ids = np.concatenate([question.prompt_ids, output.token_ids]).astype(np.int32)
        # Without a drafter passes are not observed, and some models show no hidden states.
        shown = _joined(seen, ids, len(question.prompt_ids) - 1) if seen else self.read(ids)
        text: str = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return Answer(question, text, output.report.passes, len(output.token_ids), shown)

    @torch.no_grad()
    def read(self, ids: NDArray[np.int32]) -> Shown:
        """Read a text in one pass."""
        given = torch.tensor(ids[None], dtype=torch.long, device=input_device(self._model))
        with catch_hidden(self._model, "last") as hidden:
            logits = self._model(input_ids=given, use_cache=False).logits[0].float()
        best = logits.topk(TOP)
        probs = (best.values - logits.logsumexp(-1, keepdim=True)).exp().to(torch.float16).cpu().numpy()
        states = hidden[-1][0].float().cpu().numpy() if hidden else None
        return Shown(ids, 0, best.indices.to(torch.int32).cpu().numpy(), probs, states)

    def after_each(
        self, tokens: NDArray[np.int32], goes_on: Callable[[], bool]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float16]]:
        """Learn the model's bigrams."""
        learn_bigrams(self._model.speculation, goes_on, float("inf"))
        tokens = np.intersect1d(tokens, self._bigrams.known)
        return tokens, *self._bigrams.top(tokens)


def _request(question: Question, seen: list[_Rows]) -> dict[str, Any]:
    """Return a request of `generate_many` whose passes are noted."""
    drawn = {"temperature": question.temperature, "seed": question.seed} if question.temperature else {}
    return {
        "inputs": question.prompt_ids,
        "max_new_tokens": question.max_tokens,
        "do_sample": question.temperature > 0,
        "on_pass": partial(_see, seen),
        **drawn,
    }


def _see(seen: list[_Rows], verified: VerifiedPass) -> None:
    """Note what the model showed at the places of the tokens that a pass emitted, if it showed all of it."""
    top_ids, top_logits, hidden = verified.top_ids, verified.top_logits, verified.hidden
    if top_ids is None or top_logits is None or hidden is None:
        return
    places = np.concatenate([[0], verified.path + 1])[: len(verified.emitted)]
    seen.append((top_ids[places, :TOP], top_logits[places, :TOP], hidden[places]))


def _joined(seen: list[_Rows], ids: NDArray[np.int32], first: int) -> Shown:
    """Return what passes showed of a text from position `first` on, but not after its last token."""
    top_ids, logits, hidden = (np.concatenate(part)[: len(ids) - 1 - first] for part in zip(*seen, strict=True))
    return Shown(ids, first, top_ids, shares_of_top(logits).astype(np.float16), hidden)


def _title(model: Any) -> str:
    """Return what people call a model: its name or folder, and how its weights are quantised."""
    quantised = getattr(model.config, "quantization_config", None)
    bits = getattr(quantised, "bits", None)
    return Path(model.name_or_path).name + (f" int{bits}" if bits else " quantised" if quantised else "")
