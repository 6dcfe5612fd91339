"""Log-probabilities of emitted tokens (`return_logprobs=True`) in outputs, also of what other decoders emitted."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.errors import ConfigError
from retrieve_spec.generation.request import setting
from retrieve_spec.sampling.logprobs import LogProbSampler

_KEPT = ("output_scores", "output_logits")


@dataclass
class DecoderOnlyOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `generate(…, return_dict_in_generate=True, return_logprobs=True)` returns.

    Attributes
    ----------
    logprobs
        (rows, new) float32, log-probability of every new token under the distribution it was chosen by: softmax of the
        scores behind all logits processors (temperature and truncation too, where tokens are sampled). 0 behind the
        end of a row; the end-of-text token itself has one.
    raw_logprobs
        (rows, new) float32, the same under softmax of the model's own logits.
    """

    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


@dataclass
class EncoderDecoderOutput(GenerateEncoderDecoderOutput):  # type: ignore[misc]
    """The same of an encoder–decoder; see `DecoderOnlyOutput`."""

    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


def noted(sequence: Sequence, first: int = 0, count: int | None = None) -> NDArray[np.float32] | None:
    """(2, n) float32 of a sequence's new tokens from `first` on, processed and raw; None where not asked for."""
    sampler = sequence.sampler
    return sampler.log_probs(first, count) if isinstance(sampler, LogProbSampler) else None


def by_row(sequences: Many[Sequence], device: torch.device) -> dict[str, torch.Tensor]:
    """Fields of the output of a call, (rows, new) float32 each; none where they were not asked for."""
    rows = [row for row in map(noted, sequences) if row is not None]
    if not rows:
        return {}
    whole = torch.zeros((2, len(rows), max(row.shape[1] for row in rows)))
    for i, row in enumerate(rows):
        whole[:, i, : row.shape[1]] = torch.from_numpy(row)
    return dict(zip(("logprobs", "raw_logprobs"), whole.to(device), strict=True))


def check_call(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse a call of `generate` whose output has no place for log-probabilities, or that searches beams.

    Raises
    ------
    ConfigError
        It returns a tensor, or decodes several beams.
    """
    if not setting(model, arguments, "return_dict_in_generate"):
        raise ConfigError(
            "return_dict_in_generate=True with return_logprobs=True",
            "an output of token ids alone",
            "Ask for the output as a whole: log-probabilities are its fields logprobs and raw_logprobs.",
        )
    check_decoder(model, arguments)


def check_decoder(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse a call whose tokens are chosen by more than their own distribution.

    Raises
    ------
    ConfigError
        It searches beams.
    """
    beams = setting(model, arguments, "num_beams") or 1
    if beams > 1:
        raise ConfigError("one beam with return_logprobs=True", f"num_beams={beams}", "Sample, or decode greedily.")


def of_original(model: Any, original: Any, arguments: dict[str, Any]) -> Any:
    """What the original `generate` says to a call, with log-probabilities from its scores and logits.

    Raises
    ------
    ConfigError
        It hands out no scores.
    """
    output = original(**arguments | dict.fromkeys(_KEPT, True) | {"return_dict_in_generate": True})
    scores, logits = getattr(output, "scores", None), getattr(output, "logits", None)
    if not scores or not logits or len(scores[0]) != len(output.sequences):
        raise ConfigError(
            "a decoder that returns scores with return_logprobs=True",
            type(output).__name__,
            f"Leave it out: {model.speculation.last.reason}.",
        )
    new = output.sequences[:, -len(scores) :]
    shown = _shown(model, arguments, new)
    fields = {
        name: torch.stack([_log_prob(step, new[:, i]) for i, step in enumerate(steps)], dim=1).where(shown, 0.0)
        for name, steps in (("logprobs", scores), ("raw_logprobs", logits))
    }
    kind = DecoderOnlyOutput if isinstance(output, GenerateDecoderOnlyOutput) else EncoderDecoderOutput
    asked = {name.removeprefix("output_"): bool(setting(model, arguments, name)) for name in _KEPT}
    kept = {name: value for name, value in output.items() if asked.get(name, True)}
    return kind(**kept, **fields)


def _log_prob(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(rows,) float32 log-probabilities of tokens (rows,) under softmax of (rows, vocab)."""
    scores = scores.float()
    chosen: torch.Tensor = scores.gather(1, tokens[:, None].to(scores.device))[:, 0]
    log_prob: torch.Tensor = chosen - torch.logsumexp(scores, dim=-1)
    return log_prob


def _shown(model: Any, arguments: dict[str, Any], new: torch.Tensor) -> torch.Tensor:
    """(rows, new) bool: tokens up to the first end-of-text token, or up to padding at the end of a row."""
    ends, pad = setting(model, arguments, "eos_token_id"), setting(model, arguments, "pad_token_id")
    stops = torch.as_tensor([] if ends is None else ends, device=new.device, dtype=new.dtype).reshape(-1)
    over = torch.isin(new, stops).long().cumsum(dim=1)
    before = (over - torch.isin(new, stops).long()) == 0
    if pad is None:
        return before
    padding = (new == pad).flip(1).long().cumprod(dim=1).flip(1).bool() & ~torch.isin(new, stops)
    shown: torch.Tensor = before & ~padding
    return shown
