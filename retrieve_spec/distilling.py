"""Distilling: a model answers prompts and reads texts, and a store keeps what it says for later drafts.

The best source of drafts for a model is the model itself. Its answers become documents of the store. Its top tokens
after contexts of one to three tokens, averaged over everything it wrote and read, become a table
(`retrieve_spec.datastore.distilled`). Its hidden states, with the top tokens after them, become state rows
(`retrieve_spec.datastore.state_rows`).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.acceleration import accelerated
from retrieve_spec.datastore.build import add_documents, create_datastore
from retrieve_spec.datastore.change import check_folder, writer
from retrieve_spec.datastore.distilled import Distilled, add_distilled, distilled_of
from retrieve_spec.datastore.manifest import MANIFEST
from retrieve_spec.datastore.observations import Contexts, Observations, keys_of_tokens
from retrieve_spec.datastore.remote import folder_of
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.state_rows import FEWEST, FITTED_TO, StateCollector, StateRows
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import ConfigError, NothingToIndexError, StoreLockedError
from retrieve_spec.kernels.recycling import WAYS
from retrieve_spec.teachers import TOP, Answer, LocalModel, Question, Shown, Teacher

CONTEXTS = 1 << 20
"""The most contexts of a table, 80 bytes each."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Temperatures, in turn: greedy, as chats are sampled, and higher for other continuations."""
_ANSWER, _PIECE = 256, 512
"""Tokens of an answer, and tokens read at once."""
_FOLLOWED_UP = 4
"""One conversation in so many has a second turn: reading the first one again takes as long as writing it."""
_NOTHING = Observations(
    np.empty(0, np.int32), np.empty(0, np.int64), np.empty((0, TOP), np.int32), np.empty((0, TOP), np.float16)
)
"""Observations of no text."""
_AGAIN_S, _PATIENCE_S = 0.5, 3600.0
"""Seconds between attempts to write a store that another process is writing, and of all of them at the end."""
_ASKED_SHARE = 0.1
"""Share of the time in which it is asked what follows each token alone; a later run asks for the rest."""
SAVED_EVERY_S = 300.0
"""Seconds between saves, each of which takes a few."""
_Result = TypeVar("_Result")
FOLLOW_UPS = (
    "Say that in other words.", "Give an example.", "Make it shorter.", "Why?", "What should I read next?",
    "Summarise that in one sentence.", "Now write it as a list.", "Are you sure? Check each step.",
    "Translate your answer into German.", "List all names and numbers in it as JSON.",
)  # fmt: skip
_SHARES = {"write": 5, "facts": 2, "reckon": 2, "translate": 1, "code": 1, "play": 1}
"""How many times each general prompt may be asked, by kind."""


@dataclass(frozen=True, slots=True)
class DistilReport:
    """Result of distilling.

    Attributes
    ----------
    answers, tokens
        Number of answers, and of tokens that the model wrote and read.
    contexts
        Number of contexts in the table when it was last saved; 0 before.
    seconds
        Duration.
    tokens_per_pass
        Tokens written per pass.
    asked
        Number of tokens of the vocabulary for which it is known what the model says after each alone.
    """

    answers: int
    tokens: int
    contexts: int
    seconds: float
    tokens_per_pass: float
    asked: int = 0


def general_prompts(seed: int = 0) -> Iterator[str]:
    """Yield short prompts of many kinds in random order, each once, without end."""
    given = json.loads((Path(__file__).parent / "general_prompts.json").read_text(encoding="utf-8"))
    draw = random.Random(seed)
    asked = set[str]()
    while True:
        form = draw.choice(given["kinds"][draw.choices(list(_SHARES), list(_SHARES.values()))[0]])
        prompt = form.format(**{slot: draw.choice(words) for slot, words in given["words"].items()})
        if prompt not in asked:
            asked.add(prompt)
            yield prompt


def distil(
    model: Any,
    tokenizer: Any,
    store: str | Path,
    *,
    prompts: Iterable[str] | None = None,
    texts: Iterable[str] = (),
    max_tokens: float = math.inf,
    minutes: float = 60.0,
    contexts: int = CONTEXTS,
    on_progress: Callable[[DistilReport], None] | None = None,
) -> DistilReport:
    """Let a model answer prompts and read texts, and keep what it says in a store.

    A later run with the same model adds to what is there. What was done is saved every `SAVED_EVERY_S` seconds and at
    the end, also when Ctrl-C ends it. At the end it waits while another process is writing the store.

    Parameters
    ----------
    model, tokenizer
        The model as `from_pretrained` returned it, or a `retrieve_spec.server.served_model.ServedModel`. Prompts use
        the tokenizer's chat template if it has one.
    store
        Folder of a datastore, which is created if needed.
    prompts
        Prompts to answer; None: `general_prompts`. Some conversations have a second turn.
    texts
        Texts to read before any prompt is answered.
    max_tokens, minutes
        Limits.
    contexts
        The most contexts of the table, a power of two.
    on_progress
        Called after each answer and each text, and while the model is asked what it says after each token.

    Raises
    ------
    ConfigError
        There are no prompts and no texts, or `contexts` is no power of two.
    TokenizerMismatchError
        The store has another tokenizer.
    BuildError, StoreError
        The store cannot be written, or the folder has other contents; raised before the work begins if possible.
    """
    if contexts & (contexts - 1) or contexts < WAYS:
        remedy = f"Take {1 << max(contexts, WAYS).bit_length()}."
        raise ConfigError(f"contexts as a power of two, at least {WAYS}", str(contexts), remedy)
    store = folder_of(store, "distil")
    limits = max_tokens, 60.0 * minutes
    if isinstance(model, Teacher):
        return _distil(model, tokenizer, store, prompts, texts, limits, contexts, on_progress)
    with accelerated(model, tokenizer):
        return _distil(LocalModel(model, tokenizer), tokenizer, store, prompts, texts, limits, contexts, on_progress)


def _distil(
    teacher: Teacher,
    tokenizer: Any,
    store: Path,
    prompts: Iterable[str] | None,
    texts: Iterable[str],
    limits: tuple[float, float],
    contexts: int,
    on_progress: Callable[[DistilReport], None] | None,
) -> DistilReport:
    """`distil` from a model that is ready; `limits` are the tokens and seconds."""
    earlier = _earlier(store, tokenizer, teacher.fingerprint)
    add = partial(add_distilled, capacity=contexts, store=store, model=teacher.fingerprint, title=teacher.title)
    states = StateCollector(None if earlier.states is None else earlier.states.transform)
    work = _Work(teacher, tokenizer, store, add, states, *limits, on_progress)
    try:
        work.ask_each_token(earlier.contexts)
        for text in texts:
            work.read(text)
        work.ask(general_prompts(random.getrandbits(64)) if prompts is None else prompts)
    except _Done:
        pass
    except KeyboardInterrupt:
        if not work.tokens:
            raise
    except Exception:  # for example a prompt that is too long; keep what came before
        if work.tokens:
            work.save()
        raise
    if not work.tokens:
        raise ConfigError("prompts to ask or texts to read", "none", "Leave prompts out to ask general ones.")
    work.save()
    return work.report()


def _earlier(store: Path, tokenizer: Any, model: str) -> Distilled:
    """Return what a store has of a model, after checking that the store can be written."""
    found = Distilled()
    if (store / MANIFEST).exists():
        found = distilled_of(store, open_datastore(store, tokenizer=tokenizer).manifest, model)
    else:
        check_folder(store)
    with writer(store):
        pass
    return found


class _Done(Exception):
    """The time is over."""


class _Conversation:
    """A prompt, the answers so far, and a follow-up question."""

    def __init__(self, number: int, prompt: str) -> None:
        self.number = number
        self.messages = [{"role": "user", "content": prompt}]
        turn, rest = divmod(number, _FOLLOWED_UP)
        self._follow_up = None if rest else FOLLOW_UPS[turn % len(FOLLOW_UPS)]

    def goes_on(self, answer: str) -> bool:
        """Add an answer and the next question; return whether there is one."""
        self.messages.append({"role": "assistant", "content": answer})
        if self._follow_up is None:
            return False
        self.messages.append({"role": "user", "content": self._follow_up})
        self._follow_up = None
        return True


class _Work:
    """What was done so far, and where it is saved.

    Parameters
    ----------
    add
        Adds observations and states to the model's table in the store.
    states
        Collects states for the next save.
    max_tokens, seconds
        When to stop.

    Attributes
    ----------
    tokens
        Number of tokens that the model wrote and read.
    """

    def __init__(
        self,
        teacher: Teacher,
        tokenizer: Any,
        store: Path,
        add: Callable[..., tuple[int, StateRows | None]],
        states: StateCollector,
        max_tokens: float,
        seconds: float,
        on_progress: Callable[[DistilReport], None] | None,
    ) -> None:
        self._teacher, self._tokenizer, self._store, self._add = teacher, tokenizer, store, add
        self._max_tokens, self._began, self._on_progress = max_tokens, perf_counter(), on_progress
        self._saved_at, self._end = self._began, self._began + seconds
        self._passes = self._generated = self._planned = self._answered = self._contexts = self.tokens = 0
        self._answers: list[str] = []  # these, observations and states are not saved yet
        self._observed = [_NOTHING]
        self._states = states

    def report(self) -> DistilReport:
        """Return the report."""
        seconds, pace = perf_counter() - self._began, self._generated / max(self._passes, 1)
        return DistilReport(self._answered, self.tokens, self._contexts, seconds, pace, self._teacher.asked)

    def ask_each_token(self, earlier: Contexts | None) -> None:
        """Learn what the model says after each token alone, its bigrams, but for those among earlier contexts.

        Engines that cannot be asked for logits have them from the store.
        """
        keys = keys_of_tokens(self._teacher.vocabulary)
        new = np.flatnonzero(~np.isin(keys, [] if earlier is None else earlier.keys)).astype(np.int32)
        if len(new):
            end = self._began + _ASKED_SHARE * (self._end - self._began)
            tokens, top_ids, probs = self._teacher.after_each(new, lambda: self._has_time() and perf_counter() < end)
            self._observed.append(Observations(tokens, np.ones(len(tokens), np.int64), top_ids, probs))

    def read(self, text: str) -> None:
        """Let the model read a text in pieces, and learn its top tokens after each token."""
        ids: NDArray[np.int32] = np.array(self._tokenizer(text)["input_ids"], np.int32)
        for first in range(0, len(ids), _PIECE):
            piece = ids[first : first + int(min(_PIECE, self._max_tokens - self.tokens))]
            self._keep(self._teacher.read(piece))
            self._planned += len(piece)
            self._count(len(piece))

    def ask(self, prompts: Iterable[str]) -> None:
        """Let the model answer prompts, many at a time, and ask follow-up questions."""
        conversations = (_Conversation(number, prompt) for number, prompt in enumerate(prompts))
        waiting = deque[_Conversation]()
        while self._planned < self._max_tokens:
            waiting = waiting or deque(itertools.islice(conversations, 1))
            if not waiting:
                return
            asked: list[_Conversation] = []
            with closing(self._teacher.answers(self._questions(waiting, conversations, asked))) as answers:
                for number, answer in answers:
                    self._take(answer)
                    if asked[number].goes_on(answer.text):
                        waiting.append(asked[number])

    def _questions(
        self, waiting: deque[_Conversation], others: Iterator[_Conversation], asked: list[_Conversation]
    ) -> Iterator[Question]:
        """Yield the next turns of conversations, waiting ones first, and note the conversation of each."""
        while self._planned < self._max_tokens:
            conversation = waiting.popleft() if waiting else next(others, None)
            if conversation is None:
                return
            asked.append(conversation)
            most = int(min(_ANSWER, self._max_tokens - self._planned))
            self._planned += most
            temperature = TEMPERATURES[conversation.number % len(TEMPERATURES)]
            yield Question(self._prompt_ids(conversation.messages), most, temperature, conversation.number)

    def _prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        text = messages[-1]["content"]
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not text.startswith("<"))["input_ids"]
        return ids

    def _take(self, answer: Answer) -> None:
        """Keep an answer, and what the model showed while it wrote."""
        if answer.shown is not None:
            self._keep(answer.shown)
        self._answers.append(answer.text)
        self._answered += 1
        self._passes += answer.passes
        self._generated += answer.tokens
        self._planned -= answer.question.max_tokens - answer.tokens
        self._count(answer.tokens)

    def _keep(self, shown: Shown) -> None:
        """Keep the top tokens, their probabilities and the hidden states, if any, that were shown of a text."""
        ids, (rows, width) = shown.ids, shown.top_ids.shape
        top_ids, probs = np.full((len(ids), TOP), -1, np.int32), np.zeros((len(ids), TOP), np.float16)
        places = slice(shown.first, shown.first + rows)
        top_ids[places, :width], probs[places, :width] = shown.top_ids, shown.probs
        self._observed.append(Observations(ids, np.array([len(ids)]), top_ids, probs))
        if shown.hidden is not None:
            self._states.add(ids[places], shown.hidden, top_ids[places], probs[places])

    def _has_time(self) -> bool:
        """Show the progress; return whether there is time for more."""
        if self._on_progress is not None:
            self._on_progress(self.report())
        return perf_counter() < self._end

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        if perf_counter() - self._saved_at >= SAVED_EVERY_S:
            with suppress(StoreLockedError):  # the next save includes it
                self.save(patience=0.0, fewest_states=FITTED_TO)
            self._saved_at = perf_counter()
        if not self._has_time() or self.tokens >= self._max_tokens:
            raise _Done

    def save(self, patience: float = _PATIENCE_S, fewest_states: int = FEWEST) -> None:
        """Add what is new to the store, which is created if needed.

        Parameters
        ----------
        patience
            Seconds to wait at most while another process is writing the store.
        fewest_states
            If there are fewer states and none before, they are left for the next save.
        """
        if not (self._store / MANIFEST).exists():
            _when_free(partial(create_datastore, self._store, self._tokenizer), patience)
        observations, new = Observations.joined(self._observed), self._states.rows(fewest_states)
        if len(observations.token_ids) or new is not None:  # a server may tell no more than answers
            self._contexts, states = _when_free(partial(self._add, observations, states=new), patience)
            self._observed = [_NOTHING]
            if new is not None and states is not None:
                self._states = StateCollector(states.transform)
        if any(self._answers):
            _when_free(partial(_add_answers, self._store, self._answers), patience)
        self._answers = []


def _add_answers(store: Path, answers: list[str]) -> None:
    """Add answers as documents of a store."""
    with tempfile.TemporaryDirectory() as folder, suppress(NothingToIndexError):  # all texts are in the store already
        path = Path(folder) / "answers.jsonl"
        path.write_text("".join(json.dumps({"text": answer}) + "\n" for answer in answers if answer), encoding="utf-8")
        add_documents(store, [Source(str(path))])


def _when_free(change: Callable[[], _Result], patience: float) -> _Result:
    """Change a store as soon as no other process is writing it, for which it waits `patience` seconds at most."""
    end = perf_counter() + patience
    while True:
        try:
            return change()
        except StoreLockedError:
            if perf_counter() > end:
                raise
        sleep(_AGAIN_S)
