"""Log-probabilities of tokens: noted as tokens are chosen, and written as both OpenAI dialects have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from retrieve_spec.sampling.acceptance import Sampler
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.samplers import LogProbSampler
from retrieve_spec.sampling.text import RowText
from retrieve_spec.server.text import TextCodec

_LEAST = -9999.0
"""What stands for the logarithm of 0, which JSON has no number for, in OpenAI's answers."""


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """A token, its log-probability under softmax of the model's own logits, and the most probable ones with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TopLogProbSampler(LogProbSampler):
    """Chooses what another sampler chooses, and notes it with so many of the most probable tokens.

    Attributes
    ----------
    noted
        By new token.
    """

    def __init__(self, chooser: Sampler, count: int) -> None:
        super().__init__(chooser)
        self._count = count
        self.noted: list[TokenLogProb] = []

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the other sampler's choice."""
        token = self.chooser.choose(logits, row, text)
        scores = torch.log_softmax(logits.logits[row].detach().float(), dim=-1)
        best = scores.topk(min(self._count, len(scores)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        self.noted.append(TokenLogProb(token, float(scores[token]), top))
        return token


class LogProbWriter:
    """Writes what was noted of tokens.

    Parameters
    ----------
    codec
        Text codec of the model.
    spelled
        By token, its bytes, where the vocabulary spells bytes; of others those of their text are told.
    """

    def __init__(self, codec: TextCodec, spelled: Mapping[int, bytes]) -> None:
        self._codec, self._spelled = codec, spelled
        self._lead = codec.encode_prompt("a", add_special_tokens=False)  # else some leave out a token's first blank
        self._text = lru_cache(maxsize=1 << 16)(self._decoded)

    def of_chat(self, noted: Sequence[TokenLogProb]) -> dict[str, Any]:
        """As chat completions have it."""
        content = []
        for one in noted:
            told = self._told([(one.token_id, one.logprob), *one.top])
            content.append({**told[0], "top_logprobs": told[1:]})
        return {"content": content, "refusal": None}

    def of_text(self, noted: Sequence[TokenLogProb], offset: int) -> dict[str, Any]:
        """As text completions have it; ``offset``: characters of the answer in front of these tokens."""
        told = [self._told([(one.token_id, one.logprob), *one.top]) for one in noted]
        lengths = [len(first["token"]) for first, *_ in told]
        return {
            "tokens": [first["token"] for first, *_ in told],
            "token_logprobs": [first["logprob"] for first, *_ in told],
            "top_logprobs": [{one["token"]: one["logprob"] for one in reversed(every)} for every in told],
            "text_offset": [offset + sum(lengths[:number]) for number in range(len(told))],
        }

    def _told(self, tokens: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Tokens with their texts, as they are behind other text, and bytes."""
        return [
            {
                "token": self._text(token_id),
                "logprob": max(logprob, _LEAST),
                "bytes": list(self._spelled.get(token_id, self._text(token_id).encode())),
            }
            for token_id, logprob in tokens
        ]

    def _decoded(self, token_id: int) -> str:
        return self._codec.decode([*self._lead, token_id])[len(self._codec.decode(self._lead)) :]
