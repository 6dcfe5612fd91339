"""The model of a server as a teacher to distil from."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from retrieve_spec.engine.first_passes import line_end
from retrieve_spec.errors import ServeError
from retrieve_spec.server.editors import Remote, parsed, reason_of
from retrieve_spec.teachers import TOP, Answer, Question, Shown, Teacher

_AT_ONCE = 16
"""Prompts that are sent without waiting for answers; servers decide how many of them run at once."""
_ANSWER_S = 600.0
_NAMED = "token_id:"
"""What vLLM puts before a token id that stands in the place of a text."""
_Top = list[tuple[int, float]]
"""Token ids with log-probabilities."""


class ServedModel(Teacher):
    """The model of a server that speaks OpenAI's protocol: vLLM, SGLang, llama.cpp, `retrieve-spec serve`.

    Any of them answers; what the model shows comes only from those that name token ids, which SGLang does not. Hidden
    states are not shown.

    Parameters
    ----------
    remote
        The server.
    tokenizer
        The model's tokenizer.
    name
        Name of the model, if the server has several.

    Raises
    ------
    ServeError
        The server does not answer, refuses, or has several models and none of that name.
    """

    def __init__(self, remote: Remote, tokenizer: Any, name: str = "") -> None:
        self._client = httpx.Client(**remote.options, timeout=_ANSWER_S)
        self._url, self._asked, self._before = remote.url, 0, 2 * line_end(tokenizer)
        self.vocabulary = len(tokenizer) if self._before else 0
        listed = self._ask("GET", "/v1/models")["data"]
        names = [str(each["id"]) for each in listed if each["id"] == name or not each.get("parent")]
        if name not in names and len(names) != 1:
            raise ServeError(f"one of the models {', '.join(names)} at {self._url}", repr(name), "Give its name.")
        self._name = name if name in names else names[0]
        self.title = Path(self._name).name
        self.fingerprint = f"sha256:{hashlib.sha256(f'served {self._name}'.encode()).hexdigest()}"

    @property
    def asked(self) -> int:
        """Number of tokens after which the model was asked for the next one."""
        return self._asked

    def answers(self, questions: Iterable[Question]) -> Generator[tuple[int, Answer]]:
        """Send questions, `_AT_ONCE` at a time."""
        numbered = enumerate(questions)
        running: dict[Future[Answer], int] = {}
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            while True:
                for number, question in itertools.islice(numbered, _AT_ONCE - len(running)):
                    running[pool.submit(self._answer, question)] = number
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:  # what is still being written is not waited for: the rest is saved first
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, question: Question) -> Answer:
        drawn = {"seed": question.seed} if question.temperature else {}
        [choice], tokens = self._complete(
            question.prompt_ids, max_tokens=question.max_tokens, temperature=question.temperature, **drawn
        )
        written = _tops(choice.get("logprobs"))
        shown = None
        if written is not None:
            ids = np.array(question.prompt_ids + [chosen for chosen, _ in written], np.int32)
            shown = _shown(ids, len(question.prompt_ids) - 1, [top for _, top in written])
        return Answer(question, choice["text"], passes=tokens, tokens=tokens, shown=shown)

    def read(self, ids: NDArray[np.int32]) -> Shown:
        """Let the model read a text, by vLLM's `prompt_logprobs`."""
        [choice], _ = self._complete(ids.tolist(), max_tokens=1, prompt_logprobs=TOP)
        if not choice.get("prompt_logprobs"):
            raise ServeError("log-probabilities of a text", "none", "Leave texts out; they are read by vLLM.")
        after = choice["prompt_logprobs"][1:]
        return _shown(ids, 0, [[(int(token), each["logprob"]) for token, each in top.items()] for top in after])

    def after_each(
        self, tokens: NDArray[np.int32], goes_on: Callable[[], bool]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float16]]:
        """Ask for one token after two line ends and each of some tokens, `_AT_ONCE` in a request."""
        tops: list[_Top] = []
        while len(tops) < len(tokens) and goes_on():
            prompts = [[*self._before, token] for token in tokens[len(tops) : len(tops) + _AT_ONCE].tolist()]
            choices, _ = self._complete(prompts, max_tokens=1, temperature=0)
            written = [_tops(choice.get("logprobs")) for choice in choices]
            if None in written:
                break
            tops += [one[0][1] if one else [] for one in written if one is not None]  # some texts end at once
            self._asked = len(tops)
        shown = _shown(tokens[: len(tops)], 0, tops)
        return shown.ids, shown.top_ids, shown.probs

    def _complete(self, prompt: Sequence[Any], **options: Any) -> tuple[list[dict[str, Any]], int]:
        """Return the completion of a prompt, or of each of several, and the number of tokens written."""
        body = {"model": self._name, "prompt": prompt, "logprobs": TOP, "return_tokens_as_token_ids": True, **options}
        found = self._ask("POST", "/v1/completions", body)
        answers = found if isinstance(found, list) else [found]  # llama.cpp answers several prompts with a list
        choices = [choice for answer in answers for choice in answer["choices"]]
        tokens = sum(int(answer["usage"]["completion_tokens"]) for answer in answers)
        return sorted(choices, key=lambda choice: int(choice["index"])), tokens

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON body of an answer.

        Raises
        ------
        ServeError
            Nobody answers, or the server refuses.
        """
        try:
            answer = self._client.request(method, path, json=body)
            status, got = answer.status_code, f"it answered {answer.status_code}: {reason_of(parsed(answer))}"
        except httpx.HTTPError:
            status, got = 0, "nobody answers"
        if status != 200:
            raise ServeError(f"to reach {self._url}{path}", got, "Check the address and the key.")
        return answer.json()


def _tops(logprobs: Any) -> list[tuple[int, _Top]] | None:
    """Return each token of an answer with the most probable ones in its place; None if no token ids are named."""
    if not logprobs:
        return None
    if "content" in logprobs:  # llama.cpp
        every = [[one, *one["top_logprobs"]] for one in logprobs["content"]]
        if not all("id" in each for one in every for each in one):
            return None
        return [(one[0]["id"], [(each["id"], each["logprob"]) for each in one[1:]]) for one in every]
    if not all(token.startswith(_NAMED) for token in logprobs["tokens"]):
        return None
    written = map(_id, logprobs["tokens"])
    return [
        (token, [(_id(each), logprob) for each, logprob in top.items()])
        for token, top in zip(written, logprobs["top_logprobs"], strict=True)
    ]


def _id(token: str) -> int:
    return int(token.removeprefix(_NAMED))


def _shown(ids: NDArray[np.int32], first: int, tops: Sequence[_Top]) -> Shown:
    """Return the most probable tokens after those of a text from position `first` on."""
    top_ids, probs = np.full((len(tops), TOP), -1, np.int32), np.zeros((len(tops), TOP), np.float16)
    for row, top in enumerate(tops):
        best = sorted(top, key=lambda each: -each[1])[:TOP]
        top_ids[row, : len(best)] = [token for token, _ in best]
        probs[row, : len(best)] = np.exp([logprob for _, logprob in best])
    return Shown(ids, first, top_ids, probs)
