"""Hosted drafter: a serving drafter inside an engine that answers its requests whatever becomes of drafting."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from retrieve_spec.errors import ConfigError, PromptError, in_a_line
from retrieve_spec.integrations.options import prediction_of
from retrieve_spec.integrations.serving import ServingDrafter, Shape

logger = logging.getLogger(__name__)
_SAVE_EVERY = 30.0
"""Seconds between two times that what was learned is written, where requests have ended."""
_MOST_FAILURES = 3
_LONG = 4096
"""Tokens from which on a text is taken in while the engine goes on: a millisecond for every three thousand."""


class Hosted:
    """What engines that others wrote do around a drafter: count failures, begin and end requests, keep what it learned.

    Parameters
    ----------
    drafter
        What drafts.

    Attributes
    ----------
    failures
        Steps in which drafting failed, and was left out.
    """

    def __init__(self, drafter: ServingDrafter) -> None:
        self.drafter = drafter
        self.failures = 0
        self._saved = perf_counter()
        self._beside: ThreadPoolExecutor | None = None

    @property
    def is_off(self) -> bool:
        """Whether drafting failed too often to be asked for again."""
        return self.failures >= _MOST_FAILURES

    def failed(self) -> None:
        """Note the exception that is being handled, and end all requests: this step goes without drafts."""
        self.failures += 1
        logger.exception("drafting failed, %s", "and is off from now on" if self.is_off else "this step goes without")
        self.drafter.abandon()

    def ready(self, shape: Shape) -> None:
        """Compile the kernels that drafts of a shape need, and see to it that what was learned is written at exit."""
        self.drafter.prepare([shape])
        atexit.register(_save, weakref.ref(self.drafter))

    def begin(
        self,
        name: str,
        text: NDArray[Any],
        prompt: int,
        wishes: Mapping[str, Any],
        tokenizer: Callable[[], Any],
        sampled: bool,
    ) -> bool:
        """Begin a request; False, and a warning, where what it asks for cannot be: it then goes without drafts.

        Parameters
        ----------
        name
            What it is called.
        text
            (L,) token ids, prompt and answer so far.
        prompt
            How many of them are the prompt.
        wishes
            What the request says of drafting.
        tokenizer
            Makes the model's tokenizer; called where the expected text is to be encoded.
        sampled
            Whether its tokens are sampled.
        """
        try:
            prediction = prediction_of(wishes, tokenizer)
            self.drafter.start(name, text[:prompt], prediction_ids=prediction, sampled=sampled)
            self.drafter.feed(name, text[prompt:])
        except (ConfigError, PromptError) as error:
            logger.warning("a request goes without drafts: %s", in_a_line(error))
            self.end(name, keep=False)
            return False
        return True

    def begin_beside(self, name: str, text: NDArray[Any], *rest: Any) -> Future[bool]:
        """`begin`, on another thread where the text is long, so that no step of the engine waits for it."""
        if len(text) < _LONG:
            done: Future[bool] = Future()
            done.set_result(self.begin(name, text, *rest))
            return done
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, "retrieve-spec-begin")
        return self._beside.submit(self.begin, name, text.copy(), *rest)

    def end(self, name: str, keep: bool) -> None:
        """End a request, if it was begun; with `keep`, session and phrases learn its answer."""
        if name in self.drafter:
            self.drafter.finish(name, keep=keep)

    def save_now_and_then(self) -> None:
        """Write what was learned, if that was not done for a while; to be called when requests have ended."""
        if perf_counter() - self._saved > _SAVE_EVERY:
            self.drafter.save()
            self._saved = perf_counter()

    def statistics(self) -> dict[str, float]:
        """See `ServingDrafter.statistics`; `failures` are steps in which drafting failed, and was left out."""
        return {**self.drafter.statistics(), "failures": self.failures}


def _save(drafter: weakref.ref[ServingDrafter]) -> None:
    """Write at exit what was learned; engines that are killed have written it every half minute."""
    known = drafter()
    if known is not None:
        known.save()
