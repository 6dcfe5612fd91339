"""Models of random weights that are made to give recorded answers: what their passes cost is real, the text is given.

A model does all the work of a real pass, then the recorded token is made the most probable one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.quantized import WeightOnlyConfig, pack_model
from retrieve_spec.reference_model import QUANTISED
from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs, VerifierOutput

RECORDED_LOGIT = 1e4
Clock = Callable[[], float]
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512),
    "0.1b": (768, 2048, 12, 12, 4, 32_000),
    "0.4b": (1024, 2816, 24, 16, 4, 32_000),
    "1b": (2048, 8192, 16, 32, 8, 128_256),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
}
"""Llamas: hidden and intermediate size, layers, heads, heads of keys and values, vocabulary."""
_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {  # three layers of gated delta nets to one of gated attention, as in Qwen3.5-0.8B
        "model_type": "qwen3_5_text", "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {  # Mamba-2 and feed-forward layers in turn, attention in place of two, as in Nemotron-H
        "model_type": "nemotron_h", "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4,
        "layers_block_type": [_KINDS[each] for each in "M-M-M*-M-M-M*-M-M-"], "head_dim": 64, "mamba_num_heads": 24,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    },
    "mamba2": {  # the layers of mamba2-130m
        "model_type": "mamba2", "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128,
        "n_groups": 1, "tie_word_embeddings": True,
    },
    "granite4": {  # Mamba-2 with a shared feed-forward part, attention in place of one in ten: granite-4.0-h-350m
        "model_type": "granitemoehybrid", "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 4,
        "layer_types": ["full_attention" if layer == 7 else "linear_attention" for layer in range(10)],
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 2048, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes of 100 to 130 million parameters, with layers like released models'."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded answer, cut to the length that is measured."""

    task: str
    prompt: torch.Tensor  # (1, n)
    trace: torch.Tensor  # (n + new,) prompt and answer

    @property
    def new(self) -> int:
        """Tokens of the answer."""
        return len(self.trace) - self.prompt.shape[1]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that an answer took, in all and until the prompt was read; whether the text was the recorded one."""

    seconds: float
    first: float
    same: bool
    report: GenerationReport | None = None  # of this library


class TraceDriven:
    """A verifier whose target says the recorded text, after all its work is done.

    `read_at` is the clock's time when the prompt had been read; with `chains` no trees are verified.
    """

    def __init__(
        self, inner: Verifier, trace: torch.Tensor, clock: Clock = time.perf_counter, chains: bool = False
    ) -> None:
        self._inner, self._trace, self._past = inner, trace, 0
        self._clock, self._chains, self.read_at = clock, chains, 0.0

    @property
    def mode(self) -> Mode:
        """What drafts may be."""
        return "chain" if self._chains and self._inner.mode == "tree" else self._inner.mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, inputs: VerifierInputs) -> None:
        """Begin at the prompt."""
        self._past, self._prompt, self.read_at = 0, inputs.input_ids.shape[1], 0.0
        self._inner.start(inputs)

    def forward(self, root_ids: Any, tree: Any = None, *, keep: int = 1, want_hidden: Any = None) -> VerifierOutput:
        """Run the pass, then make the recorded token of every row's position the most probable one."""
        out = self._inner.forward(root_ids, tree, keep=keep, want_hidden=want_hidden)
        self._roots = len(root_ids)
        last = self._past + self._roots
        after = np.arange(last - keep + 1, last + 1)
        if tree is not None and len(tree):
            after = np.concatenate([after, last + tree.depth])
        at = torch.from_numpy(after).clamp(max=len(self._trace) - 1).to(out.logits.device, non_blocking=True)
        with torch.inference_mode():
            return VerifierOutput(out.logits.scatter(1, self._trace[at][:, None], RECORDED_LOGIT), out.hidden, out.ran)

    def commit(self, path: Any) -> None:
        """Go on after the accepted nodes."""
        self._past += self._roots + len(path)
        self._inner.commit(path)
        if not self.read_at and self._past >= self._prompt:
            self.read_at = self._clock()


def by_transformers(model: Any, answer: Answer, clock: Clock, **extra: Any) -> Timing:
    """Let transformers' own `generate` give an answer."""
    calls: list[float] = []

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not calls:  # a clock that waits for a device is asked once
            calls.append(clock())
        at = min(ids.shape[1], len(answer.trace) - 1)
        return scores.index_fill(1, answer.trace[at : at + 1], RECORDED_LOGIT)

    began = clock()
    out = type(model).generate(
        model, answer.prompt, max_new_tokens=answer.new, do_sample=False, logits_processor=[process], **extra
    )
    return Timing(clock() - began, calls[0] - began, torch.equal(out[0], answer.trace))


def by_us(
    model: Any, answer: Answer, clock: Clock, make: Callable[[], Any], draft: str, chains: bool = False
) -> Timing:
    """Let the accelerated model give an answer."""
    model.speculation.forget()
    driven: list[TraceDriven] = []

    def drive() -> TraceDriven:
        driven.append(TraceDriven(make(), answer.trace, clock, chains))
        return driven[-1]

    model.speculation._make_verifier = drive
    began = clock()
    out = model.generate(answer.prompt, max_new_tokens=answer.new, do_sample=False, draft=draft)
    seconds, same = clock() - began, torch.equal(out[0], answer.trace)
    return Timing(seconds, driven[-1].read_at - began, same, model.speculation.last)


def build(size: str, context: int, device: str = "cpu", weights: str = "float32") -> Any:
    """A model of a size or shape, made on the device in one format, with room for `context` tokens and an answer."""
    if size in HYBRIDS:
        shape: dict[str, Any] = {"hidden_size": 768, "vocab_size": 32_000, **HYBRIDS[size]}
        shape |= {} if size == "mamba2" else {"max_position_embeddings": context + 2048}
    else:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        shape = {"model_type": "llama", **dict(zip((*sizes, "vocab_size"), SHAPES[size], strict=True))}
        shape |= {"max_position_embeddings": context + 2048}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with torch.device(device):
        dtype = torch.bfloat16 if weights in QUANTISED else getattr(torch, weights)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if weights in QUANTISED:
        pack_model(model, WeightOnlyConfig(**QUANTISED[weights]))
    model.generation_config.pad_token_id = 0
    return model
