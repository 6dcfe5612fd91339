"""Sampler chains of requests, as what the decoder is asked for: greedy, or sampling with processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

DEFAULT_CHAIN = ("top_k", "top_p", "min_p", "temperature")
_LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "e": "penalties",
    "a": "adaptive_p",
}
"""llama.cpp's samplers by letter; those that are not served do nothing unless a field does, which is refused."""
_ALIASES = {"temp": "temperature", "nucleus": "top_p", "typical": "typ_p", "typical_p": "typ_p", "typ": "typ_p"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes
    ----------
    temperature, top_k, top_p, min_p
        The usual filters; ``temperature <= 0``, ``top_k == 1`` or ``top_p <= 0`` is greedy.
    chain
        Names of the filters in order; a filter that is not named does not act. Without ``"temperature"`` the text is
        drawn at temperature 1 from what the other filters leave.
    seed
        Noise is keyed by it, so that the same request gives the same text.
    grammar
        What the text must be (`retrieve_spec.server.grammar`); empty for any.
    begun
        What the text must begin with (`retrieve_spec.server.healing`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    chain: tuple[str, ...] = field(default=DEFAULT_CHAIN)
    seed: int = 0
    grammar: str = ""
    begun: str = ""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        only_best = self.top_k == 1 or ("top_p" in self.chain and self.top_p <= 0.0)
        return only_best or (self.temperature <= 0.0 and "infill" not in self.chain)

    def generate_kwargs(self, infill: Any = None, guides: Sequence[Any] = ()) -> dict[str, Any]:
        """Arguments of ``generate`` for this choice; ``infill`` makes that processor, ``guides`` come before it."""
        guides = list(guides)
        if self.greedy:
            return {"do_sample": False, **({"logits_processor": guides} if guides else {})}
        kwargs: dict[str, Any] = {
            "do_sample": True,
            "temperature": self.temperature if "temperature" in self.chain and self.temperature > 0 else 1.0,
            "top_k": self.top_k if "top_k" in self.chain and self.top_k > 0 else 0,
            "top_p": self.top_p if "top_p" in self.chain else 1.0,
            "min_p": self.min_p if "min_p" in self.chain and self.min_p > 0.0 else None,
        }
        if "infill" in self.chain and infill is not None:
            # The infill rule reads what top-k and top-p leave, and `generate` runs processors before its own filters.
            before = self.chain[: self.chain.index("infill")]
            guides.append(
                infill(
                    top_k=kwargs["top_k"] if "top_k" in before else 0,
                    top_p=kwargs["top_p"] if "top_p" in before else 1.0,
                )
            )
        return {**kwargs, "logits_processor": guides} if guides else kwargs


def sampler_chain(given: Sequence[str] | str) -> tuple[str, ...]:
    """A client's samplers by name, given as llama.cpp takes them: names, names between semicolons, or letters.

    Raises
    ------
    ValueError
        Some of them are none of llama.cpp's; says which.
    """
    known = _LETTERS.values()
    if isinstance(given, str):
        given = given.strip()
        named = ";" in given or _spelled(given) in known
        given = [name for name in given.split(";") if name.strip()] if named else list(given)
    chain = [_LETTERS.get(name) or _spelled(name) for name in given]
    unknown = [name for name, spelled in zip(given, chain, strict=True) if spelled not in known]
    if unknown:
        raise ValueError(f"no sampler is called {', '.join(repr(name[:40]) for name in unknown[:8])}")
    return tuple(chain)


def _spelled(name: str) -> str:
    """A sampler's name as this module spells it."""
    name = name.strip().replace("-", "_")
    return _ALIASES.get(name, name)


def infill_survivors(
    candidates: Sequence[tuple[int, float, str]], end_ids: frozenset[int], end_of_text: int
) -> list[int]:
    """Which candidates the infill rule keeps (llama.cpp's sampler of that name, pull requests 9896 and 9924).

    Parameters
    ----------
    candidates
        (token id, probability, text), most probable first.
    end_ids
        Tokens that end a completion.
    end_of_text
        The one kept when no text token is likely enough.
    """
    p_end = sum(p for i, p, _ in candidates if i in end_ids)
    p_text = sum(p for i, p, _ in candidates if i not in end_ids)
    if 3 * p_end * len(candidates) > p_text:
        return [i for i, _, _ in candidates if i in end_ids]
    mass = _merge_prefixes(candidates)
    kept = [(i, p) for i, p in mass if i in end_ids or p >= 0.2]
    if all(i in end_ids for i, _ in kept):
        return [end_of_text]
    total = sum(p for _, p in kept)
    floor = 1.0 / (sum(i not in end_ids for i, _ in kept) + 1)
    return [i for i, p in kept if i in end_ids or p / total >= floor]


def _merge_prefixes(candidates: Sequence[tuple[int, float, str]]) -> list[tuple[int, float]]:
    """Give the mass of a token to a likelier one when one's text begins the other's."""
    p = [candidate[1] for candidate in candidates]
    alive = [True] * len(candidates)
    for i, (_, _, short) in enumerate(candidates):
        for j, (_, _, long) in enumerate(candidates):
            if not alive[i]:
                break
            if i == j or not alive[j] or not short or not long.startswith(short):
                continue
            to, gone = (j, i) if p[j] > p[i] else (i, j)
            p[to] += p[gone]
            p[gone], alive[gone] = 0.0, False
    return [(c[0], p[k]) for k, c in enumerate(candidates) if alive[k]]


def make_infill_processor(codec: Any, end_ids: frozenset[int], end_of_text: int) -> Any:
    """A factory of ``LogitsProcessor`` objects that apply the infill rule to each row on its own.

    The rule is a pure function of one step's logits, so drafting stays exact under it.
    """
    import torch
    from transformers import LogitsProcessor

    @lru_cache(maxsize=100_000)
    def piece(token_id: int) -> str:
        return str(codec.pieces([token_id])[0])

    class InfillLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
        """Keeps what the infill rule keeps; other logits become -inf."""

        def __init__(self, top_k: int, top_p: float) -> None:
            self.top_k, self.top_p = top_k or 40, top_p

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            top, ids = scores.float().topk(min(self.top_k, scores.shape[-1]), dim=-1)  # (rows, k)
            p = top.softmax(-1)
            before = p.cumsum(-1) - p
            p = torch.where(before < self.top_p, p, 0.0)
            p = p / p.sum(-1, keepdim=True)
            out = torch.full_like(scores, -torch.inf)
            for row, (row_ids, row_p) in enumerate(zip(ids.tolist(), p.tolist(), strict=True)):
                candidates = [(i, q, piece(i)) for i, q in zip(row_ids, row_p, strict=True) if q > 0.0]
                kept = infill_survivors(candidates, end_ids, end_of_text)
                if kept == [end_of_text] and scores[row, end_of_text] == -torch.inf:
                    kept = [candidates[0][0]]  # the text may not end: what was begun is still to be said
                out[row, kept] = scores[row, kept] if kept != [end_of_text] else 0.0
            return out

    return InfillLogitsProcessor
