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
import torch
from numpy.typing import NDArray

from retrieve_spec.acceleration import accelerated
from retrieve_spec.datastore.build import add_documents, create_datastore
from retrieve_spec.datastore.change import check_folder, writer
from retrieve_spec.datastore.dense import model_fingerprint
from retrieve_spec.datastore.distilled import Distilled, add_distilled, distilled_of
from retrieve_spec.datastore.manifest import MANIFEST
from retrieve_spec.datastore.observations import Contexts, Observations, keys_of_tokens
from retrieve_spec.datastore.remote import folder_of
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.state_rows import FEWEST, FITTED_TO, StateCollector, StateRows
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.engine.first_passes import learn_bigrams
from retrieve_spec.errors import ConfigError, NothingToIndexError, StoreLockedError
from retrieve_spec.generation.streams import Finished, generate_many
from retrieve_spec.kernels.recycling import WAYS
from retrieve_spec.sources.recycling import shares_of_top
from retrieve_spec.verify.interface import catch_hidden, input_device

CONTEXTS = 1 << 20
"""The most contexts of a table, 80 bytes each."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Temperatures, in turn: greedy, as chats are sampled, and higher for other continuations."""
_ANSWER, _PIECE, _TOP = 256, 512, 8
"""Tokens of an answer, tokens read at once, next tokens kept per context."""
_FOLLOWED_UP = 4
"""One conversation in so many has a second turn: reading the first one again takes as long as writing it."""
_NOTHING = Observations(
    np.empty(0, np.int32), np.empty(0, np.int64), np.empty((0, _TOP), np.int32), np.empty((0, _TOP), np.float16)
)
"""Observations of no text."""
_AGAIN_S, _PATIENCE_S = 0.5, 3600.0
"""Seconds between attempts to write a store that another process is writing, and of all of them at the end."""
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
        The model as `from_pretrained` returned it; prompts use the tokenizer's chat template if it has one.
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
    store, fingerprint = folder_of(store, "distil"), model_fingerprint(model)
    earlier = _earlier(store, tokenizer, fingerprint)
    add = partial(add_distilled, capacity=contexts, store=store, model=fingerprint, title=_title(model))
    with accelerated(model, tokenizer):
        states = StateCollector(None if earlier.states is None else earlier.states.transform)
        end = perf_counter() + 60.0 * minutes
        work = _Work(model, tokenizer, store, add, states, max_tokens, end, on_progress)
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
    """A prompt, the answers so far, and a follow-up question.

    Attributes
    ----------
    shown
        Top token ids, their logits and hidden states of the model at each place of the answer that it is writing.
    """

    def __init__(self, number: int, prompt: str) -> None:
        self.number = number
        self.shown: list[tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]] = []
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

    def see(self, verified: VerifiedPass) -> None:
        """Note what the model showed at the places of the tokens that a pass emitted, if it showed all of it."""
        top_ids, top_logits, hidden = verified.top_ids, verified.top_logits, verified.hidden
        if top_ids is None or top_logits is None or hidden is None:
            return
        places = np.concatenate([[0], verified.path + 1])[: len(verified.emitted)]
        self.shown.append((top_ids[places], top_logits[places], hidden[places]))


class _Work:
    """What was done so far, and where it is saved.

    Parameters
    ----------
    add
        Adds observations and states to the model's table in the store.
    states
        Collects states for the next save.
    end
        When to stop, by `perf_counter`.

    Attributes
    ----------
    tokens
        Number of tokens that the model wrote and read.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        store: Path,
        add: Callable[..., tuple[int, StateRows | None]],
        states: StateCollector,
        max_tokens: float,
        end: float,
        on_progress: Callable[[DistilReport], None] | None,
    ) -> None:
        self._model, self._tokenizer, self._store, self._add = model, tokenizer, store, add
        self._max_tokens, self._end, self._began, self._on_progress = max_tokens, end, perf_counter(), on_progress
        self._saved_at = self._began
        self._passes = self._generated = self._planned = self._answered = self._contexts = self.tokens = 0
        self._answers: list[str] = []  # these, observations and states are not saved yet
        self._observed = [_NOTHING]
        self._states = states
        self._bigrams = model.speculation.drafters.bigrams

    def report(self) -> DistilReport:
        """Return the report."""
        seconds, pace = perf_counter() - self._began, self._generated / max(self._passes, 1)
        asked = 0 if self._bigrams is None else len(self._bigrams.known)
        return DistilReport(self._answered, self.tokens, self._contexts, seconds, pace, asked)

    def ask_each_token(self, earlier: Contexts | None) -> None:
        """Learn what the model says after each token alone, its bigrams, unless all are among earlier contexts.

        Engines that cannot be asked for logits have them from the store.
        """
        if self._bigrams is None:
            return
        is_new = ~np.isin(keys_of_tokens(len(self._bigrams.entries)), [] if earlier is None else earlier.keys)
        if is_new.any():
            learn_bigrams(self._model.speculation, self._has_time, math.inf)
            tokens = self._bigrams.known[is_new[self._bigrams.known]]
            top_ids, shares = self._bigrams.top(tokens)
            self._observed.append(Observations(tokens, np.ones(len(tokens), np.int64), top_ids, shares))

    def read(self, text: str) -> None:
        """Let the model read a text in pieces, and learn its top tokens after each token."""
        ids: NDArray[np.int32] = np.array(self._tokenizer(text)["input_ids"], np.int32)
        for first in range(0, len(ids), _PIECE):
            piece = ids[first : first + int(min(_PIECE, self._max_tokens - self.tokens))]
            self._observe(piece)
            self._planned += len(piece)
            self._count(len(piece))

    def ask(self, prompts: Iterable[str]) -> None:
        """Let the model answer prompts, many at a time, and ask follow-up questions."""
        conversations = (_Conversation(number, prompt) for number, prompt in enumerate(prompts))
        waiting = deque(itertools.islice(conversations, 1))
        while waiting and self._planned < self._max_tokens:
            asked: list[_Conversation] = []
            with closing(
                generate_many(self._model, self._requests(waiting, conversations, asked), order="completed")
            ) as answers:
                for done in answers:
                    if done.error is not None:
                        raise done.error
                    conversation = asked[done.index]
                    if conversation.goes_on(self._take(done, conversation)):
                        waiting.append(conversation)

    def _requests(
        self, waiting: deque[_Conversation], others: Iterator[_Conversation], asked: list[_Conversation]
    ) -> Iterator[dict[str, Any]]:
        """Yield the next turns of conversations, waiting ones first, and note the conversation of each."""
        while self._planned < self._max_tokens:
            conversation = waiting.popleft() if waiting else next(others, None)
            if conversation is None:
                return
            asked.append(conversation)
            temperature = TEMPERATURES[conversation.number % len(TEMPERATURES)]
            drawn = {"temperature": temperature, "seed": conversation.number} if temperature else {}
            most = int(min(_ANSWER, self._max_tokens - self._planned))
            self._planned += most
            yield {
                "inputs": self._prompt_ids(conversation.messages),
                "max_new_tokens": most,
                "do_sample": temperature > 0,
                "on_pass": conversation.see,
                **drawn,
            }

    def _prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        text = messages[-1]["content"]
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not text.startswith("<"))["input_ids"]
        return ids

    def _take(self, done: Finished, conversation: _Conversation) -> str:
        """Learn from the model's top tokens at each place of an answer, and return its text."""
        [output], prompt = done.outputs, np.array(done.request["inputs"], np.int32)
        answer: str = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        ids = np.concatenate([prompt, output.token_ids]).astype(np.int32)
        if conversation.shown:
            self._keep_shown(ids, len(prompt) - 1, conversation.shown)
            conversation.shown = []
        else:  # without a drafter passes are not observed, and some models show no hidden states
            self._observe(ids)
        self._answers.append(answer)
        self._answered += 1
        self._passes += output.report.passes
        self._generated += len(output.token_ids)
        self._planned -= done.request["max_new_tokens"] - len(output.token_ids)
        self._count(len(output.token_ids))
        return answer

    def _keep_shown(
        self,
        ids: NDArray[np.int32],
        first: int,
        shown: list[tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]],
    ) -> None:
        """Learn what passes showed of a text from position `first` on, but not after its last token."""
        said, logits, hidden = (np.concatenate(part)[: len(ids) - 1 - first] for part in zip(*shown, strict=True))
        self._keep(ids, first, said[:, :_TOP], shares_of_top(logits[:, :_TOP]).astype(np.float16), hidden)

    @torch.no_grad()
    def _observe(self, ids: NDArray[np.int32]) -> None:
        """Learn what the model shows after each of some tokens, read as one text."""
        given = torch.tensor(ids[None], dtype=torch.long, device=input_device(self._model))
        with catch_hidden(self._model, "last") as hidden:
            logits = self._model(input_ids=given, use_cache=False).logits[0].float()
        best = logits.topk(_TOP)
        probs = (best.values - logits.logsumexp(-1, keepdim=True)).exp().to(torch.float16).cpu().numpy()
        top_ids = best.indices.to(torch.int32).cpu().numpy()
        self._keep(ids, 0, top_ids, probs, hidden[-1][0].float().cpu().numpy() if hidden else None)

    def _keep(
        self,
        ids: NDArray[np.int32],
        first: int,
        top_ids: NDArray[np.int32],
        probs: NDArray[np.float16],
        hidden: NDArray[np.float32] | None,
    ) -> None:
        """Keep the top tokens, their probabilities and the hidden states, if any, of a text from `first` on."""
        places = slice(first, first + len(top_ids))
        all_ids, all_probs = np.full((len(ids), _TOP), -1, np.int32), np.zeros((len(ids), _TOP), np.float16)
        all_ids[places, : top_ids.shape[1]], all_probs[places, : top_ids.shape[1]] = top_ids, probs
        self._observed.append(Observations(ids, np.array([len(ids)]), all_ids, all_probs))
        if hidden is not None:
            self._states.add(ids[places], hidden, all_ids[places], all_probs[places])

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
        self._contexts, states = _when_free(partial(self._add, observations, states=new), patience)
        self._observed = [_NOTHING]
        if new is not None and states is not None:
            self._states = StateCollector(states.transform)
        if any(self._answers):
            _when_free(partial(_add_answers, self._store, self._answers), patience)
        self._answers = []


def _title(model: Any) -> str:
    """Return what people call a model: its name or folder, and how its weights are quantised."""
    quantised = getattr(model.config, "quantization_config", None)
    bits = getattr(quantised, "bits", None)
    return Path(model.name_or_path).name + (f" int{bits}" if bits else " quantised" if quantised else "")


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
