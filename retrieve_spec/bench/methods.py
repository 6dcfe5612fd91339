"""Benchmark methods: parse the names that `--methods` takes, time one generation, and leave out sources.

`plain`
    transformers' own `generate`.
`prompt-lookup` or `prompt-lookup:K`
    transformers' own prompt lookup with K (10) candidate tokens.
`off`, `auto`, any preset, and each with `:N`
    this library's loop; N fixes the nodes per pass. `ours/prompt-lookup` is the preset of that name.
`auto~SOURCE`
    `auto` without a source (`~` can be repeated; `:N` comes last).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import retrieve_spec as rs
from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.presets import PRESETS, build_drafter
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.errors import ConfigError, nearest
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.recycling import Bigrams
from retrieve_spec.sources.unigrams import token_classes

PLAIN, PROMPT_LOOKUP, OFF = "plain", "prompt-lookup", "off"
OURS, WITHOUT = "ours/", "~"
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Method:
    """A way to generate.

    Attributes
    ----------
    name
        Name as the user wrote it.
    kind
        `"plain"`, `"prompt-lookup"`, or the `draft` of ours.
    nodes
        Number after the colon: nodes per pass or candidate tokens; None: the default.
    ours
        Whether this library decodes.
    without
        Sources that `auto` leaves out.
    """

    name: str
    kind: str
    nodes: int | None
    ours: bool
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One timed generation of one turn.

    Attributes
    ----------
    token_ids
        Generated tokens, including an end token.
    seconds, first_token_s
        Wall time of the call, including the prompt, and until the first token was returned.
    passes
        Forward passes of the model, including the prompt's.
    report
        This library's report of the generation; None for transformers' methods.
    """

    token_ids: list[int]
    seconds: float
    first_token_s: float
    passes: int
    report: GenerationReport | None = None


def parse_method(name: str) -> Method:
    """Parse a method's name.

    Raises
    ------
    ConfigError
        There is no such method, the part after the colon is not a number, or the method takes none.
    """
    kind, colon, number = name.removeprefix(OURS).partition(":")
    kind, *without = kind.split(WITHOUT)
    ours = name.startswith(OURS) or kind not in (PLAIN, PROMPT_LOOKUP)
    known = list(dict.fromkeys((PLAIN, PROMPT_LOOKUP, OFF, *PRESETS)))
    if kind not in known:
        hint = nearest(kind, known) or "Use one of these names."
        raise ConfigError(f"a method among {', '.join(known)}", repr(kind), hint)
    if colon and (kind in (PLAIN, OFF) or not number.isdigit()):
        raise ConfigError("a method such as auto, auto:16 or prompt-lookup:10", repr(name), "See `bench run --help`.")
    return Method(name, kind, int(number) if colon else None, ours, tuple(without))


def sampling(temperature: float, top_p: float) -> dict[str, Any]:
    """Return sampling arguments of `generate`; temperature 0 is greedy."""
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class FirstToken:
    """Streamer that records the time of the first token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @property
    def at(self) -> float:
        """Time of the first token: the first call brings the prompt, the second the first token."""
        return self.times[1]

    def put(self, value: Any) -> None:
        """Record the time of a call."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


class EmptyContext(SuffixAutomaton):
    """Context source that stays empty: it has no room for kernels, and `extend` adds none."""

    def __init__(self) -> None:
        super().__init__()
        self.states = self.states[:1].copy()  # the root alone

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Do nothing."""


SOURCES: dict[str, dict[str, Any]] = {
    "context": {"context": EmptyContext},
    "session": {},
    "prediction": {},
    "recycling": {"recycling": None},
    "ngram": {"ngram": list},
    "exact": {"exact": list},
    "dense": {"dense": None},
    "phrases": {"phrases": None},
    "alignment": {"alignments": None},
    "bigrams": {"bigrams": None},
    "distilled": {"distilled": list},
    "states": {"states": None},
}
"""By source: the field of the mixture's `TextSources`, and its value without the source (types are called)."""


class FreshDrafter:
    """A drafter that `renew` resets; everything else is delegated to the drafter.

    What it learns is kept in memory only: a calibration file beside a store would affect the next measurement.

    Parameters
    ----------
    config, datastores
        Arguments of `build_drafter`.
    without
        Names of sources that `auto` leaves out.
    tokenizer
        The model's tokenizer, if known.

    Raises
    ------
    ConfigError
        There is no such source, or the preset is not `auto`.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        datastores: Sequence[Any] = (),
        without: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        self._config, self._datastores, self._without = config, datastores, without
        self._classes = token_classes(tokenizer)
        self._bigrams: Bigrams | None = None
        self.renew()

    def use_bigrams(self, bigrams: Bigrams) -> None:
        """Draft from bigrams of the model, after a reset."""
        self._bigrams = bigrams
        self.renew()

    def renew(self) -> None:
        """Forget everything learned."""
        calibration = Calibration(classes=self._classes)
        self.drafter: Any = build_drafter(
            self._config, datastores=self._datastores, calibration=calibration, bigrams=self._bigrams
        )
        for name in self._without:
            self._remove(name)

    def prepare(self) -> None:
        """Prepare the drafter; defined here because protocols check classes (Python 3.12 and newer)."""
        self.drafter.prepare()

    def __getattr__(self, name: str) -> Any:
        if name == "drafter":  # not made yet
            raise AttributeError(name)
        return getattr(self.drafter, name)

    def _remove(self, source: str) -> None:
        if source not in SOURCES:
            remedy = nearest(source, SOURCES) or "Name one of these."
            raise ConfigError(f"a source among {', '.join(SOURCES)}", repr(source), remedy)
        if self._config.draft != AUTO:
            raise ConfigError("the preset auto", "another preset", "Only `auto` can do without a source.")
        drafter = self.drafter
        for name, value in SOURCES[source].items():
            setattr(drafter.sources, name, value() if isinstance(value, type) else value)
        if source == "context":
            drafter.sources.unigrams = drafter.calibration.unigrams(mute=True)
        elif source == "session":
            drafter.session = None
        elif source == "recycling":
            drafter.top_k = 0
        elif source == "dense":
            drafter.wants_hidden = None
        elif source == "prediction":
            start = drafter.start
            drafter.start = lambda prompt_ids, prediction_ids=None: start(prompt_ids)


class Bench:
    """A model that generates with any of several methods; each of this library's methods has its own state.

    Parameters
    ----------
    model, tokenizer
        The model and its tokenizer, as loaded by `from_pretrained`.
    methods
        Methods that will be used.
    datastores
        Open datastores for this library's methods.
    session
        Whether this library's methods remember earlier generations.
    seed
        Seed for torch before every generation.
    options
        Further arguments of `generate`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        methods: Sequence[Method],
        *,
        datastores: Sequence[Any] = (),
        session: bool = False,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.seed, self.options = model, tokenizer, seed, dict(options or {})
        self._states: dict[str, Any] = {}
        self._drafters: dict[str, FreshDrafter] = {}
        for method in methods:
            if method.ours:
                nodes = AUTO if method.nodes is None else method.nodes
                config = SpeculationConfig(draft=method.kind, nodes=nodes, session=session)
                drafter = None
                if method.kind != OFF:
                    drafter = self._drafters[method.name] = FreshDrafter(config, datastores, method.without, tokenizer)
                rs.accelerate(model, tokenizer, datastores=datastores, drafter=drafter, config=config)
                self._states[method.name] = model.speculation

    def forget(self, method: Method) -> None:
        """Reset a method, except for measured costs."""
        if method.name in self._drafters:
            self._drafters[method.name].renew()

    def generate(self, method: Method, input_ids: Any, *, max_new_tokens: int, prediction: Any = None) -> Generation:
        """Generate from (1, L) token ids and time it."""
        torch.manual_seed(self.seed)
        streamer = FirstToken()
        arguments = {**self.options, "input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        arguments |= {"max_new_tokens": max_new_tokens, "streamer": streamer}
        calls: list[None] = []
        if method.ours:
            self.model.speculation = self._states[method.name]
            call, arguments = self.model.generate, arguments | {"prediction": prediction}
        else:
            call = type(self.model).generate.__get__(self.model)  # whatever the instance carries
            if method.kind == PROMPT_LOOKUP:
                arguments["prompt_lookup_num_tokens"] = method.nodes or PROMPT_LOOKUP_TOKENS
        hook = None if method.ours else self.model.register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            start = _now()
            output = call(**arguments)
            seconds = _now() - start
        finally:
            if hook is not None:
                hook.remove()
        report = self.model.speculation.last if method.ours else None
        ids = output[0, input_ids.shape[1] :].tolist()
        return Generation(ids, seconds, streamer.at - start, report.passes if report else len(calls), report)


def _now() -> float:
    """Return the wall time after waiting for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
