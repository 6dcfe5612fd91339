"""Draft model for llama-cpp-python: proposes the next tokens of a text, by its ids so far.

Give one to a `Llama`::

    llm = Llama("model.gguf", logits_all=True, draft_model=DraftModel(datastores=["stores/code"]))

llama-cpp-python samples from the model at every drafted position and keeps tokens as long as they are the drafted ones,
so texts are those without drafts. Three of its ways would break that, or fail: they are seen and go without drafts, or
are named in an error.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence as Many
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import AUTO, MAX_NODES, SpeculationConfig
from retrieve_spec.datastore.store import Datastore
from retrieve_spec.errors import ConfigError, TokenizerMismatchError, require
from retrieve_spec.integrations.hosted import Hosted, Options, call_if_alive

logger = logging.getLogger(__name__)
_SAMPLE, _LEAST_ALIKE = 1024, 0.98
"""Number of a store's tokens that are compared with the model's, and the share that must have the same text."""
_LONGEST_PIECE = 32
"""Bytes that llama-cpp-python reserves for a token's text."""
_NO_DRAFT = np.empty(0, np.intc)


@dataclass(slots=True)
class _Text:
    """A text: its request, tokens and whether it is sampled; size and time of the last draft."""

    name: str
    ids: NDArray[np.int32]
    sampled: bool
    drafted: int = 0
    answered: float = 0.0


class DraftModel:
    """Drafts for texts of llama-cpp-python's `Llama`; any thread may call it.

    A text is known by what it says: ids that go on from the last ones, by no more than a draft and one token, are the
    same text's; any others (another prompt, one that was edited, a next turn of a chat) end it and begin a new one.
    Several `Llama` objects of one model can share a draft model, and each has one text at a time.

    Parameters
    ----------
    datastores
        Open stores, or folders or addresses of them, built with the model's tokenizer.
    num_pred_tokens
        Tokens drafted at most; fewer where that is faster, by the measured time of past steps.
    session, session_tokens
        Draft from earlier texts' answers, whoever asked, and how many tokens of them are remembered.
    phrases
        ``"auto"`` drafts what follows one or two tokens in the answers of several texts; ``"off"`` does not.
    state
        Folder in which what was learned is kept between runs; None keeps it in memory. One for each model.
    min_path_probability
        A token whose path is less probable is not drafted.

    Raises
    ------
    ConfigError
        An option has no such value, or the state folder cannot be made.
    StoreError
        A store cannot be opened.
    """

    def __init__(
        self,
        datastores: Many[Datastore | str | os.PathLike[str]] | str | os.PathLike[str] = (),
        *,
        num_pred_tokens: int = 16,
        session: bool = False,
        session_tokens: int = SpeculationConfig().session_tokens,
        phrases: str = AUTO,
        state: str | os.PathLike[str] | None = None,
        min_path_probability: float = 0.05,
    ) -> None:
        right = 1 <= num_pred_tokens <= MAX_NODES
        require(right, f"num_pred_tokens from 1 to {MAX_NODES}", num_pred_tokens, "16 is the default.")
        options = Options(datastores, session, session_tokens, phrases, state, min_path_probability)
        self._hosted = Hosted(options, "chain")
        self.drafter = self._hosted.drafter
        self._most = num_pred_tokens
        self._texts: weakref.WeakKeyDictionary[Any, _Text] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._begun = 0
        self._expected: NDArray[Any] | Many[int] | None = None
        self._last: _Text | None = None
        self._lock = threading.RLock()
        atexit.register(call_if_alive, weakref.WeakMethod(self.close))

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """Draft the continuation of a text.

        Parameters
        ----------
        input_ids
            (L,) token ids of the text so far.
        kwargs
            Not looked at.

        Returns
        -------
        numpy.ndarray
            (n,) intc token ids, possibly none.

        Raises
        ------
        ConfigError
            The `Llama` that asks keeps too few logits to verify drafts.
        TokenizerMismatchError
            A store was built with another tokenizer than that of the `Llama` that asks.
        """
        came = perf_counter()
        with self._lock:
            llama, call = _who_generates()
            most, longest = self._meet(llama)
            if not most or call.get("logits_processor") is not None or self._hosted.is_off:
                return _NO_DRAFT  # processors would see drafted tokens as text
            try:
                ids, sampled = np.array(input_ids, np.int32), bool(call.get("temp", 0.0))
                room = min(self._most, most, longest - len(ids))
                return self._draft(self if llama is None else llama, ids, sampled, max(room, 0), came)
            except Exception:  # continue without drafts
                self._hosted.failed()
                self._texts.clear()
                return _NO_DRAFT

    def expect(self, token_ids: NDArray[Any] | Many[int] | None) -> None:
        """Set the expected answer to the next prompt, such as an edited file.

        Parameters
        ----------
        token_ids
            (P,) token ids, as ``llm.tokenize(text, add_bos=False)`` gives them; None for nothing.
        """
        with self._lock:
            self._expected = token_ids

    def statistics(self) -> dict[str, float]:
        """See `Hosted.statistics`."""
        with self._lock:
            return self._hosted.statistics()

    def close(self) -> None:
        """End all texts, so that session and phrases learn from their answers, and write what was learned.

        That is done at exit, too; a closed draft model can go on drafting.
        """
        with self._lock:
            self._texts.clear()
            self._end_others()
            self.drafter.save()

    def _draft(self, owner: Any, ids: NDArray[np.int32], sampled: bool, room: int, came: float) -> NDArray[np.intc]:
        text = self._texts.get(owner)
        if (
            text is not None
            and text.sampled == sampled
            and 0 <= len(ids) - len(text.ids) <= text.drafted + 1
            and (ids[: len(text.ids)] == text.ids).all()
        ):
            if self._last is text and len(ids) > len(text.ids):
                self.drafter.measured(max(came - text.answered, 1e-9))
            self.drafter.feed(text.name, ids[len(text.ids) :])
            text.ids = ids
        else:
            text = self._texts[owner] = self._begin(owner, ids, sampled)
        [tree] = self.drafter.draft([text.name], room)
        self._last, text.drafted = text, len(tree)
        text.answered = came if len(tree) else perf_counter()  # the time of drafting is part of a step with drafts
        return tree.token_ids.astype(np.intc)

    def _begin(self, owner: Any, ids: NDArray[np.int32], sampled: bool) -> _Text:
        self._texts.pop(owner, None)
        self._end_others()
        self._begun += 1
        name = f"text {self._begun}"
        expected, self._expected = self._expected, None
        read = max(len(ids) - 1, 1)  # the last token was generated
        self.drafter.start(name, ids[:read], prediction_ids=expected, sampled=sampled)
        self.drafter.feed(name, ids[read:])
        return _Text(name, ids, sampled)

    def _end_others(self) -> None:
        """End requests whose text is over, and those of a deleted `Llama`."""
        kept = {text.name for text in self._texts.values()}
        for name in self.drafter:
            if name not in kept:
                self.drafter.finish(name)

    def _meet(self, llama: Any) -> tuple[int, int]:
        """Return the most drafted tokens that the caller can verify (0: none), and the longest text."""
        if llama is None:
            return MAX_NODES, sys.maxsize
        known = self._known.get(llama)
        if known is None:
            _check_logits(llama)
            vocabulary = int(llama.n_vocab())
            for store in self.drafter.datastores:
                store.check_ids(vocabulary)
                _check_tokenizer(store, llama)
            without = bool(getattr(llama, "_is_recurrent", True) or getattr(llama, "_is_hybrid", True))
            if without:
                logger.warning(
                    "no drafts for %s: llama-cpp-python cannot take tokens back from recurrent state", llama.model_path
                )
            # Keep fewer ids than llama.cpp has room for, since it rounds up.
            longest = min(int(llama.n_ctx()), len(llama.input_ids))
            known = self._known[llama] = 0 if without else int(llama.n_batch) - 1, longest
        return known


def _who_generates() -> tuple[Any, Any]:
    """Return the `Llama` whose `generate` has called, with that method's name and variables; None for other callers."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "generate" and hasattr(frame.f_locals.get("self"), "draft_model"):
            return frame.f_locals["self"], frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return None, {}


def _check_logits(llama: Any) -> None:
    """Refuse a `Llama` with room for the logits of one batch only.

    With a draft model it writes those of every position, and fails at the first one after its batch.
    """
    if len(llama.scores) < len(llama.input_ids):
        raise ConfigError(
            "Llama(…, logits_all=True), which keeps the logits of all positions",
            f"room for {len(llama.scores)} of {len(llama.input_ids)}",
            "Pass logits_all=True beside draft_model.",
        )


def _check_tokenizer(store: Datastore, llama: Any) -> None:
    """Compare the texts of some of a store's tokens with the model's."""
    ids = np.unique(np.concatenate([segment.to_global[1:] for segment in store.segments] or [np.empty(0, np.uint32)]))
    seen = alike = 0
    for token in ids[:: max(len(ids) // _SAMPLE, 1)].tolist():
        piece = store.tokenizer.decode([token], skip_special_tokens=False)
        if piece.strip() and "\ufffd" not in piece and len(piece.encode()) <= _LONGEST_PIECE:  # no partial character
            seen += 1
            alike += llama.detokenize([token], special=True).decode(errors="replace").strip() == piece.strip()
    if alike < _LEAST_ALIKE * seen:
        raise TokenizerMismatchError(
            f"a store of the tokenizer of {llama.model_path}",
            f"{store.path}, of whose tokens {1 - alike / seen:.0%} stand for another text",
            f"Build it again with the model's tokenizer, or convert it with `retrieve-spec retokenize {store.path}`.",
        )
