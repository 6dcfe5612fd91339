"""Turns a model's own forward into one flat list of tensor operations with the cache and the attention left open.

`torch.export` records what the model does to a handful of tokens; Python modules, hooks and masks are gone afterwards,
and no operation depends on how many tokens the cache holds. Recording runs on fake tensors, so a forward whose
operations depend on the data (expert routing by loops, rotary scaling by length) cannot be recorded by mistake: it
fails, and the caller uses the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from retrieve_spec.config import PASS
from retrieve_spec.decoding import graph_passes
from retrieve_spec.decoding.graph_passes import Layouts
from retrieve_spec.decoding.tree_attention import LayerRule, rule_from_call

RECORDER = "retrieve_spec_recorder"
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


class CaptureError(Exception):
    """A forward cannot be recorded; the message completes "the pass is not captured because …"."""


@torch.library.custom_op("retrieve_spec::attend", mutates_args=())
def _attend_op(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    raise NotImplementedError("a recorded pass names its attention when it is run")


@_attend_op.register_fake
def _attend_shape(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[3])


class _RecordedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that holds nothing: keys and values go straight to the attention."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.rule: LayerRule | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.shape = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@dataclass(slots=True)
class _Log:
    """What the attention function saw; an object of its own because export undoes changes to a module's containers."""

    rules: dict[int, LayerRule] = field(default_factory=dict)
    groups: int = 0


class _Recording(nn.Module):
    """The function that is recorded: token ids and positions in, logits and final hidden states out."""

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        super().__init__()
        self.model = model
        self.num_layers = num_layers
        self.log = _Log()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = Cache(layers=[_RecordedLayer() for _ in range(self.num_layers)])
        self.log.rules.clear()
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            recording=self.log,
        )
        return out.logits, out.hidden_states[-1]


def _record_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    recording: _Log | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    if recording is None:
        raise CaptureError("its layers do not hand keyword arguments on to their attention")
    layer = int(module.layer_idx)
    recording.rules[layer] = rule_from_call(module, scaling, query.shape[-1], arguments)
    recording.groups = query.shape[1] // key.shape[1]
    return torch.ops.retrieve_spec.attend(query, key, value, layer), None


AttentionInterface.register(RECORDER, _record_attention)
AttentionMaskInterface.register(RECORDER, lambda *args, **kwargs: None)


@contextlib.contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Let a model use a registered attention function for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class CapturedPass:
    """A model's forward as flat code: one version for a single row, one for any number of rows.

    Parameters
    ----------
    model
        A causal language model in evaluation mode.
    num_layers
        Its attention layers.

    Raises
    ------
    CaptureError
        When its forward cannot be recorded.
    """

    def __init__(self, model: Any, num_layers: int) -> None:
        self._recording = _Recording(model, num_layers)
        self._layouts = Layouts()
        with attention_implementation(model, RECORDER), torch.no_grad():
            self._single = self._record(model, 1)
            self._many = self._record(model, 4)
        self.rules = dict(self._recording.log.rules)
        self.groups = self._recording.log.groups
        if sorted(self.rules) != list(range(num_layers)):
            raise CaptureError(f"only layers {sorted(self.rules)} of {num_layers} use the attention interface")

    def _record(self, model: Any, rows: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
        device = model.device
        ids = torch.zeros((1, rows), dtype=torch.long, device=device)
        positions = torch.arange(rows, device=device)[None]
        shapes = None
        if rows > 1:
            many = torch.export.Dim("rows", min=2, max=PASS.max_rows)
            shapes = {"input_ids": {1: many}, "position_ids": {1: many}}
        try:
            program = torch.export.export(
                self._recording, (ids, positions), dynamic_shapes=shapes, strict=False
            )
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"torch.export refused it: {str(error).strip().splitlines()[0][:200]}") from error
        return graph_passes.compile_program(program, self._recording, self._layouts)

    def run(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward: (1, rows) ids and positions in, (1, rows, vocab) logits and (1, rows, d) states out."""
        code, weights = self._single if input_ids.shape[1] == 1 else self._many
        logits, hidden = code(*weights, input_ids, position_ids, attend)
        return logits, hidden
