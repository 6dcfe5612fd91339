"""Recorded pass: a model's own forward as one flat list of tensor operations, with cache and attention left open.

A trace (`tracing.py`) shows what the model does to some tokens; Python modules, hooks and masks are gone afterwards,
and no operation depends on how many tokens the cache holds. Tracing runs on fake tensors, so a forward whose
operations depend on the data (expert routing by loops, rotary scaling by length) cannot be recorded by mistake: it
fails, and the caller uses the model itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_wide
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from retrieve_spec.attention import rule_from_call
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.errors import in_a_line
from retrieve_spec.kernels.attention_inputs import LayerRule
from retrieve_spec.kernels.cpu import RowTexts
from retrieve_spec.model_layers import decoder_blocks
from retrieve_spec.recorded import graph_passes
from retrieve_spec.recorded.layer_copies import append_copies, catch_layers, only_first
from retrieve_spec.recorded.tracing import Trace, trace
from retrieve_spec.verify.interface import attention_implementation, cache_name_of, catch_hidden, input_device
from retrieve_spec.verify.trials import VerificationError


class RecordingError(VerificationError):
    """A forward cannot be recorded; the message completes "the pass is not recorded because …"."""


def _hooks(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules with forward hooks, and where the functions of these come from."""
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            yield module, getattr(getattr(hook, "func", hook), "__module__", "")


def check_recordable(model: Any) -> None:
    """Look for what a recording would not follow.

    Raises
    ------
    RecordingError
        When a recording would not stand for the model's forward.
    """
    if model.training:
        raise RecordingError("the model is in training mode")
    if not model._supports_attention_backend:
        raise RecordingError("its layers do not use transformers' attention interface")
    if torch_wide._global_forward_hooks or torch_wide._global_forward_pre_hooks:
        raise RecordingError("torch has forward hooks for all modules")
    for module, origin in _hooks(model):
        # transformers' hooks remain after output_hidden_states=True, but do nothing unless it is requested
        if not origin.startswith("transformers."):
            raise RecordingError(f"{type(module).__name__} has forward hooks")


def has_adapters_of_a_call(model: nn.Module) -> bool:
    """Whether `peft` has hooked a model for one call; such hooks count rows, and take one for each text."""
    return any(origin.startswith("peft.") for _, origin in _hooks(model))


NOISY = logging.getLogger("torch._subclasses.fake_tensor")
RECORDER = "retrieve_spec_recorder"
_MOSTLY = 0.8
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@torch.library.custom_op("retrieve_spec::attend", mutates_args=())
def _attend_op(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    raise NotImplementedError("a recorded pass names its attention when it is run")


@_attend_op.register_fake
def _attend_shape(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[3])


@dataclass(slots=True)
class _Log:
    """What the attention function saw; by layer."""

    rules: dict[int, LayerRule] = field(default_factory=dict)
    sinks: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)
    cached: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    groups: int = 0

    def clear(self) -> None:
        """Forget an earlier trace of the same forward."""
        self.rules.clear()
        self.sinks.clear()
        self.cached.clear()
        self.states.clear()

    def repeat(self, at: int, layer: int, blocks: nn.ModuleList) -> None:
        """Note of a layer what was seen of another one."""
        self.rules[layer], self.states[layer] = self.rules[at], self.states[at]
        if at in self.sinks:
            module, name = self.sinks[at]
            inside = next(path for path, part in blocks[at].named_modules() if part is module)
            self.sinks[layer] = (blocks[layer].get_submodule(inside), name)

    def live_rules(self) -> list[LayerRule]:
        """The rules by layer, with the modules' own tensors where the trace saw stand-ins."""
        for layer, (module, name) in self.sinks.items():
            self.rules[layer] = replace(self.rules[layer], sinks=getattr(module, name))
        return [self.rules[layer] for layer in sorted(self.rules)]


_log: ContextVar[_Log] = ContextVar("_log")
"""The log of the recording under way; a context variable, as not every model hands keyword arguments to its layers."""


class _RecordedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that holds nothing: keys and values go straight to the attention."""

    is_sliding = False

    def __init__(self, index: int, log: _Log) -> None:
        super().__init__()
        self._index, self._log = index, log

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._log.cached[self._index] = key_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Recording(nn.Module):
    """The function that is recorded: token ids and positions in, logits and one layer's hidden states out.

    After these comes what is caught of the blocks that are `shown`.
    """

    def __init__(self, model: Any, num_layers: int, layer: Layer) -> None:
        super().__init__()
        self.model = model
        self.num_layers = num_layers
        self.layer: Layer = layer
        self.log = _Log()
        self.shown: list[nn.Module] = []

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = Cache(layers=[_RecordedLayer(i, self.log) for i in range(self.num_layers)])
        self.log.clear()
        with catch_hidden(self.model, self.layer) as hidden, catch_layers(self.shown) as caught:
            out = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=True,
                **{cache_name_of(self.model): cache},
            )
        return out.logits, hidden[-1], *caught


def _record_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    log = _log.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if log.cached.get(layer) is not key:
        raise RecordingError("its attention reads other keys than it caches")
    log.rules[layer] = rule_from_call(scaling, query.shape[-1], arguments)
    log.groups = query.shape[1] // key.shape[1]
    log.states[layer] = tuple((int(part.shape[1]), int(part.shape[3]), part.dtype) for part in (key, value))
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is arguments.get("s_aux"):
            log.sinks[layer] = (module, name)
    if (arguments.get("s_aux") is not None) != (layer in log.sinks):
        raise RecordingError("its attention sinks are computed")
    return torch.ops.retrieve_spec.attend(query, key, value, layer), None


AttentionInterface.register(RECORDER, _record_attention)
AttentionMaskInterface.register(RECORDER, lambda *args, **kwargs: None)


ALL = slice(None)
"""All rows of a pass."""


class RecordedPass:
    """A model's forward as flat code for any number of rows, reading the model's own weights.

    Parameters
    ----------
    model
        A causal language model in evaluation mode.
    num_layers
        Its attention layers.
    layer
        The layer whose hidden states are handed out.
    row_kernels
        Module of the kernels that stand for what a model does to rows (`retrieve_spec.kernels.triton_rows`,
        `layer_rows`).
    exact
        Give a row the same logits bit for bit whatever stands beside it: attend row by row, and fill passes up to so
        many rows (`retrieve_spec.verify.comparison.rows_for_one_order`; 1 on a GPU, whose kernels do both). 0: not so.
    like
        By layer, which of the first layers shows what it does (`copied_layers`): only these are traced. Empty: every
        layer is.

    Attributes
    ----------
    rules
        What every layer's attention does.
    groups
        Query heads per key head.
    device, dtype
        The model's.
    attends_rows
        Whether it attends by itself, over the texts that it is given, if their keys and values are of `row_dtype`.
    by_kernels, by_copies
        Whether kernels stand for what the model does to rows, and some of its layers for others.
    traced
        Hash of what was traced, before layers were repeated and kernels put in.
    reads_prompts
        Whether many rows go through it faster than through the model, because programs multiply by most of its weights.

    Raises
    ------
    RecordingError
        When its forward cannot be recorded.
    """

    def __init__(
        self,
        model: Any,
        num_layers: int,
        layer: Layer = "last",
        row_kernels: Any = None,
        exact: int = 0,
        like: Sequence[int] = (),
    ) -> None:
        check_recordable(model)
        recording = _Recording(model, num_layers, layer)
        self.layer, self.exact = layer, exact
        self.by_kernels, self.by_copies = row_kernels is not None, bool(like)
        self.device, self.dtype = input_device(model), model.dtype
        with (
            attention_implementation(model, RECORDER), torch.inference_mode(False), torch.no_grad(), _quiet(),
        ):  # fmt: skip
            traced = self._trace_kinds(recording, like) if like else self._trace(recording)
        self.rules = recording.log.live_rules()
        self._compiled = compiled = graph_passes.compile_trace(traced, row_kernels, self.rules, exact > 0)
        self.reads_prompts = compiled.program_share > _MOSTLY
        self.attends_rows = compiled.run_rows is not None
        self._states = [kinds for _, kinds in sorted(recording.log.states.items())]
        self.row_dtype: Any = self._states[0][0][2] if self._states else None
        recording.log.clear()
        self.groups = recording.log.groups
        if len(self.rules) != num_layers:
            raise RecordingError(f"{len(self.rules)} of {num_layers} layers use the attention interface")

    def _trace_kinds(self, recording: _Recording, like: Sequence[int]) -> Trace:
        """Trace the first layers, and repeat them for the others."""
        blocks = decoder_blocks(recording.model)
        with only_first(blocks, max(like) + 1):
            recording.shown = list(blocks)
            traced = self._trace(recording)
        try:
            append_copies(traced, recording, blocks, like)
            for layer, at in enumerate(like):
                recording.log.repeat(at, layer, blocks)
        except Exception as error:  # layers share modules, or have no attention: trace all of them
            raise RecordingError(f"its layers cannot be repeated ({in_a_line(error)})") from error
        return traced

    def _trace(self, recording: _Recording) -> Trace:
        token = _log.set(recording.log)
        try:
            traced = trace(recording, 2, self.device)
            self.traced = hashlib.sha256(str(traced.graph).encode()).hexdigest()
            graph_passes.check_repeatable(traced.graph)
            return traced
        except (RecordingError, NotImplementedError) as error:
            raise RecordingError(str(error)) from error
        except Exception as error:  # a model's own code may raise anything
            raise RecordingError(f"it cannot be traced ({in_a_line(error)})") from error
        finally:
            _log.reset(token)

    def no_states(self) -> list[tuple[torch.Tensor, ...]]:
        """By layer, keys and values of no token: (1, kv_heads, 0, d) each."""
        with torch.inference_mode(False):
            return [
                tuple(torch.empty((1, heads, 0, width), dtype=kind, device=self.device) for heads, width, kind in kinds)
                for kinds in self._states
            ]

    def continues(self, cache: Any) -> bool:
        """Whether what a cache holds is in the formats of the keys and values of this pass."""
        layers = [(layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]
        return all(
            state.dtype == kind for states, kinds in zip(layers, self._states, strict=False)
            for state, (_, _, kind) in zip(states, kinds, strict=True)
        )  # fmt: skip

    def freeze(self) -> None:
        """Assume that the weights stay where they are, so that their addresses are collected once."""
        for program in self._compiled.programs:
            program.is_frozen = True

    def run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend | RowTexts,
        wanted: slice | torch.Tensor = ALL,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward: (1, rows) ids and positions in, (1, rows, vocab) logits and (1, rows, d) states out.

        A `RowTexts` stands for the attention where `attends_rows`.

        Logits are computed for the `wanted` rows, a slice of them or those whose numbers it holds.

        The results are inference tensors: copy them before changing them in place.
        """
        with torch.inference_mode():
            if self.exact > 1 and not isinstance(attend, RowTexts):
                return self._run_exactly(input_ids, position_ids, attend, wanted)
            run = self._compiled.run
            if isinstance(attend, RowTexts) and self._compiled.run_rows is not None:
                run = self._compiled.run_rows
                wanted = torch.arange(input_ids.shape[1])[wanted] if isinstance(wanted, slice) else wanted
            logits, hidden = run(input_ids, position_ids, attend, wanted)
        return logits, hidden

    def _run_exactly(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attend: Attend, wanted: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run with as many rows as products of one order need, the last one of them too."""
        rows = input_ids.shape[1]
        more = max(self.exact - rows, 0)

        def attend_own(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
            own = attend(query[:, :, :rows], keys[:, :, :rows], values[:, :, :rows], layer)
            return functional.pad(own, (0, 0, 0, 0, 0, more))

        ids, positions = functional.pad(input_ids, (0, more)), functional.pad(position_ids, (0, more))
        logits, hidden = self._compiled.run(ids, positions, attend_own, ALL)
        return logits[:, :rows][:, wanted], hidden[:, :rows]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging refusals that are reported as a reason, and transformers from advice on every forward."""
    verbosity, disabled = transformers.logging.get_verbosity(), NOISY.disabled
    transformers.logging.set_verbosity_error()
    NOISY.disabled = True
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        NOISY.disabled = disabled
