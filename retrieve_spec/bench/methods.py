"""Benchmark methods: a name as `--methods` takes it, and one timed generation with it.

`plain`
    transformers' own `generate`, untouched.
`prompt-lookup` or `prompt-lookup:K`
    transformers' own prompt lookup with K (10) candidate tokens.
`off`, `auto`, any preset, and each with `:N`
    this library's loop; N fixes the nodes per pass. `ours/prompt-lookup` is the preset of that name.
`auto~SOURCE`
    `auto` without a source (`~` can be repeated, `:N` comes last).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import retrieve_spec as rs
from retrieve_spec.bench.ablation import FreshDrafter
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.presets import PRESETS
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.errors import ConfigError, nearest

PLAIN, PROMPT_LOOKUP, OFF = "plain", "prompt-lookup", "off"
OURS, WITHOUT = "ours/", "~"
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Method:
    """One way to generate.

    Attributes
    ----------
    name
        As the user wrote it.
    kind
        `"plain"`, `"prompt-lookup"`, or the `draft` of ours.
    nodes
        After the colon: nodes per pass or candidate tokens; None leaves the default.
    ours
        Whether this library's loop decodes.
    without
        Sources that `auto` does without.
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
        What was generated, an end token included.
    seconds, first_token_s
        Wall time of the call, prompt included, and until the first token was handed out.
    passes
        Forward passes of the model, the prompt's included.
    report
        What this library says of its own generation; None for transformers' methods.
    """

    token_ids: list[int]
    seconds: float
    first_token_s: float
    passes: int
    report: GenerationReport | None = None


def parse_method(name: str) -> Method:
    """Read a method's name.

    Raises
    ------
    ConfigError
        There is no such method, the part after the colon is no number, or the method takes none.
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


class FirstToken:
    """A streamer that notes when the first token came."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        """The first call brings the prompt, the second the first token."""
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Do nothing."""


class Bench:
    """One model, ready to generate with any of several methods; each of ours keeps a state of its own.

    Parameters
    ----------
    model, tokenizer
        As `from_pretrained` gave them.
    methods
        What will be asked for.
    datastores
        Open datastores for ours.
    session
        Whether ours remember earlier generations.
    seed
        For torch before every generation.
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
                nodes: Any = "auto" if method.nodes is None else method.nodes
                config = SpeculationConfig(draft=method.kind, nodes=nodes, session=session)
                drafter = None
                if method.kind != OFF:
                    drafter = self._drafters[method.name] = FreshDrafter(config, datastores, method.without, tokenizer)
                rs.accelerate(model, tokenizer, datastores=datastores, drafter=drafter, config=config)
                self._states[method.name] = model.speculation

    def forget(self, method: Method) -> None:
        """Put a method back to the state it began in; only measured costs stay."""
        if method.name in self._drafters:
            self._drafters[method.name].renew()

    def cost_curve(self, method: Method, context: int = 512, most: int = 128) -> list[float]:
        """Seconds per pass over 0, 1, … nodes, as this method's state measured them; empty if it did not."""
        if not method.ours or not (cost := self._states[method.name].cost).measured:
            return []
        return [float(x) for x in cost.seconds(context, most)]

    def generate(self, method: Method, input_ids: Any, *, max_new_tokens: int, prediction: Any = None) -> Generation:
        """Generate from (1, L) token ids and time it."""
        import torch

        torch.manual_seed(self.seed)
        streamer = FirstToken()
        arguments = {**self.options, "input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        arguments |= {"max_new_tokens": max_new_tokens, "streamer": streamer}
        if method.ours:
            return self._ours(method, arguments, streamer, prediction)
        if method.kind == PROMPT_LOOKUP:  # transformers', here
            arguments["prompt_lookup_num_tokens"] = method.nodes or PROMPT_LOOKUP_TOKENS
        return self._theirs(method, arguments, streamer)

    def _ours(self, method: Method, arguments: dict[str, Any], streamer: FirstToken, prediction: Any) -> Generation:
        self.model.speculation = state = self._states[method.name]
        start = _now()
        output = self.model.generate(**arguments, prediction=prediction)
        seconds = _now() - start
        ids = output[0, arguments["input_ids"].shape[1] :].tolist()
        return Generation(ids, seconds, streamer.at - start, state.last.passes, state.last)

    def _theirs(self, method: Method, arguments: dict[str, Any], streamer: FirstToken) -> Generation:
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        hook = self.model.register_forward_pre_hook(count)
        try:
            start = _now()
            output = type(self.model).generate(self.model, **arguments)
            seconds = _now() - start
        finally:
            hook.remove()
        ids = output[0, arguments["input_ids"].shape[1] :].tolist()
        return Generation(ids, seconds, streamer.at - start, passes)


def _now() -> float:
    """Wall time with the device's queue empty."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
