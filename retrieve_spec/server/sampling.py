"""Sampling of a request: filters, penalties, grammars, begun words, log-probabilities."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import RepetitionPenaltyLogitsProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from retrieve_spec.errors import ConfigError
from retrieve_spec.generation.delegation import SETTINGS
from retrieve_spec.sampling.acceptance import PassLogits, RowText, Sampler
from retrieve_spec.sampling.guides import (
    EXTRA,
    GrammarProcessor,
    check_grammar,
    json_grammar,
    read_vocabulary,
    regex_grammar,
)
from retrieve_spec.sampling.samplers import LogProbSampler
from retrieve_spec.server.call_formats import ToolFormat
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.reading import Thinking, after_thoughts
from retrieve_spec.server.text import TextCodec, any_of
from retrieve_spec.server.tools import LENIENT, calls_grammar

if TYPE_CHECKING:
    from retrieve_spec.server.schemas import Common

log = logging.getLogger("retrieve_spec.server")

DEFAULT_CHAIN = ("top_k", "top_p", "min_p", "temperature")
SamplerName = Literal[
    "dry", "top_k", "typ_p", "top_p", "top_n_sigma", "min_p", "temperature", "xtc", "infill", "penalties", "adaptive_p"
]
"""llama.cpp's samplers; unsupported ones have no effect unless their own field is set, which is refused."""
SAMPLER_LETTERS: dict[str, SamplerName] = {
    "d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p", "t": "temperature",
    "x": "xtc", "i": "infill", "e": "penalties", "a": "adaptive_p",
}  # fmt: skip
"""llama.cpp's letters for them."""

_COLDEST = 1e-30
"""Divided by less, logits in float32 become infinite."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes
    ----------
    temperature, top_k, top_p, min_p
        The usual filters; a ``temperature`` of 0 or hardly more, and an active ``top_k`` of 1 or ``top_p`` of 0, is
        greedy.
    chain
        Names of the active filters in order. Without ``"temperature"`` tokens are sampled at temperature 1 from what
        the other filters leave.
    seed
        Key of the noise: equal requests with equal seeds give equal text.
    grammar
        Grammar of the text (`Grammars`); empty for any text.
    begun
        Word with which the text must begin (`Beginnings`).
    presence, frequency
        OpenAI's penalties: subtracted from the score of each token in the answer, once, and per occurrence.
    repetition
        Penalty for tokens of prompt and answer; 1 is none.
    recent
        Number of latest tokens that it counts; None: all, as in `generate`.
    bias
        Added to the score, by token.
    logprobs
        Number of the most probable tokens to note with each token; None: nothing is noted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    chain: tuple[str, ...] = field(default=DEFAULT_CHAIN)
    seed: int = 0
    grammar: str = ""
    begun: str = ""
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    recent: int | None = None
    bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        only_best = ("top_k" in self.chain and self.top_k == 1) or ("top_p" in self.chain and self.top_p <= 0.0)
        return only_best or (self.temperature <= _COLDEST and "infill" not in self.chain)

    def generate_kwargs(self, infill: Any = None, guides: Sequence[Any] = ()) -> dict[str, Any]:
        """Return arguments of ``generate``; ``infill`` makes its processor, ``guides`` come before it."""
        guides = list(guides)
        # 1, too: else `generate` takes the model's own
        edits: dict[str, Any] = {"repetition_penalty": self.repetition if self.recent is None else 1.0}
        if self.bias:
            edits["sequence_bias"] = [[[token], value] for token, value in self.bias]
        if self.greedy:
            return {"do_sample": False, **edits, **({"logits_processor": guides} if guides else {})}
        kwargs: dict[str, Any] = {
            "do_sample": True,
            **edits,
            "temperature": self.temperature if "temperature" in self.chain and self.temperature > 0 else 1.0,
            "top_k": self.top_k if "top_k" in self.chain and self.top_k > 0 else 0,
            "top_p": self.top_p if "top_p" in self.chain else 1.0,
            "min_p": self.min_p if "min_p" in self.chain and self.min_p > 0.0 else None,
        }
        if "infill" in self.chain and infill is not None:
            # The infill rule needs what top-k and top-p leave, but `generate` runs processors before its own filters.
            before = self.chain[: self.chain.index("infill")]
            guides.append(
                infill(
                    top_k=kwargs["top_k"] if "top_k" in before else 0,
                    top_p=kwargs["top_p"] if "top_p" in before else 1.0,
                )
            )
        return {**kwargs, "logits_processor": guides} if guides else kwargs


GREEDY = Sampling()
_TOP_K = 50
"""`generate`'s, for a model that samples and does not set it."""


def sampling_of(config: Any) -> Sampling:
    """Return the sampling of a model's `generation_config`; greedy if it does not sample."""
    repetition = float(config.repetition_penalty or 1.0)  # `generate` refuses whole numbers
    if not config.do_sample:
        return Sampling(repetition=repetition)
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    top_p = 1.0 if config.top_p is None else float(config.top_p)
    top_k = _TOP_K if config.top_k is None else config.top_k
    return Sampling(temperature, top_k, top_p, config.min_p or 0.0, repetition=repetition)


def of_one_text(config: Any) -> Any:
    """Return a model's `generation_config` for texts that a server decodes one by one, over its own caches.

    Beams, several texts, other caches and other ways of drafting are left out; the log names them.
    """
    own = copy.deepcopy(config)
    settings = {**SETTINGS, "num_return_sequences": ((1,), ""), "is_assistant": ((False,), "")}
    for name, (here, _) in settings.items():
        if getattr(own, name, None) not in (None, *here):
            log.warning("left out of the model's generation_config: %s", name)
        setattr(own, name, None)
    return own


def infill_survivors(
    candidates: Sequence[tuple[int, float, str]], end_ids: frozenset[int], end_of_text: int
) -> list[int]:
    """Return the candidates that the infill rule keeps (llama.cpp's sampler, pull requests 9896 and 9924).

    Parameters
    ----------
    candidates
        (token id, probability, text), most probable first.
    end_ids
        Tokens that end a completion.
    end_of_text
        The candidate that is kept if no text token is probable enough.
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
    """Add a token's probability to a more probable one if one's text begins with the other's."""
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


class InfillProcessor:
    """Sets logits that the infill rule drops to -inf, row by row; has the interface of a `LogitsProcessor`.

    The rule is a pure function of one step's logits, so drafts do not change the text.

    Parameters
    ----------
    codec, end_ids, end_of_text
        Text codec of the model, and parameters of `infill_survivors`.
    top_k, top_p
        Filters applied before the rule; a ``top_k`` of 0 is 40.
    """

    def __init__(
        self, codec: TextCodec, end_ids: frozenset[int], end_of_text: int, *, top_k: int, top_p: float
    ) -> None:
        self._codec, self._end_ids, self._end_of_text = codec, end_ids, end_of_text
        self.top_k, self.top_p = top_k or 40, top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process (rows, vocab) scores after texts (rows, n)."""
        top, ids = scores.float().topk(min(self.top_k, scores.shape[-1]), dim=-1)  # (rows, k)
        p = top.softmax(-1)
        before = p.cumsum(-1) - p
        p = torch.where(before < self.top_p, p, 0.0)
        p = p / p.sum(-1, keepdim=True)
        out, end = torch.full_like(scores, -torch.inf), self._end_of_text
        for row, (row_ids, row_p) in enumerate(zip(ids.tolist(), p.tolist(), strict=True)):
            rated = zip(row_ids, row_p, self._codec.pieces(row_ids), strict=True)
            candidates = [candidate for candidate in rated if candidate[1] > 0.0]
            kept = infill_survivors(candidates, self._end_ids, end)
            if kept == [end] and scores[row, end] == -torch.inf:
                kept = [candidates[0][0]]  # the text may not end before the begun text is complete
            out[row, kept] = scores[row, kept] if kept != [end] else 0.0
        return out


class RecentPenaltyProcessor:
    """Penalises repetition of the latest tokens; has the interface of a `LogitsProcessor`."""

    def __init__(self, penalty: float, recent: int) -> None:
        self._penalise, self._recent = RepetitionPenaltyLogitsProcessor(penalty), recent

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process (1, vocab) scores after a text (1, n)."""
        penalised: torch.Tensor = self._penalise(input_ids[:, -self._recent :], scores)
        return penalised


class PenaltyProcessor:
    """Applies OpenAI's penalties to tokens after a prompt; has the interface of a `LogitsProcessor`."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process (1, vocab) scores after a text (1, n)."""
        said = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[-1])[: scores.shape[-1]]
        return scores - self._frequency * said - self._presence * (said > 0)


_MOST = 64
"""The longest begun word, in characters."""


class Beginnings:
    """Finds the tokens that agree with a begun word; for vocabularies of bytes.

    Attributes
    ----------
    possible
        Whether the vocabulary has bytes, so that tokens can write every text.
    spelled
        Bytes of each token; empty for vocabularies without bytes.
    """

    def __init__(self, codec: TextCodec) -> None:
        self.spelled = spelled = _spelled_bytes(codec)
        self.possible = bool(spelled) and len({spelling for spelling in spelled.values() if len(spelling) == 1}) == 256
        self._ids = sorted(spelled, key=lambda token_id: spelled[token_id])
        self._spellings = [spelled[token_id] for token_id in self._ids]
        self._split = codec.split
        self.agreeing = lru_cache(maxsize=4096)(self._agreeing)

    def of(self, line: str) -> str:
        """Return the end of a line that may be the beginning of a token; "" if there is none, or it is too long.

        Tokenizers cut a text into words, and each word into tokens; it is the last word.
        """
        words = self._split(line[-2 * _MOST :]) if self.possible else []
        return words[-1] if words and len(words[-1]) <= _MOST else ""

    def _agreeing(self, rest: bytes) -> tuple[int, ...]:
        """Return the tokens whose bytes are a prefix of a text, or begin with it."""
        found: list[int] = []
        for length in range(1, len(rest) + 1):
            at = bisect_left(self._spellings, rest[:length])
            while at < len(self._ids) and self._spellings[at] == rest[:length]:
                found.append(self._ids[at])
                at += 1
        while at < len(self._ids) and self._spellings[at].startswith(rest):
            found.append(self._ids[at])
            at += 1
        return tuple(found)

    def forget(self) -> None:
        """Drop what is remembered of begun words."""
        self.agreeing.cache_clear()


class BeginningProcessor:
    """Allows only tokens that agree with the begun word; has the interface of a `LogitsProcessor`."""

    def __init__(self, beginnings: Beginnings, begun: str, prompt_length: int) -> None:
        self._beginnings, self._begun, self._prompt_length = beginnings, begun.encode(), prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Process (1, vocab) scores after a text (1, n)."""
        if not (rest := self._rest(input_ids[0])):
            return scores
        allowed = torch.tensor(self._beginnings.agreeing(rest), device=scores.device)
        out = torch.full_like(scores, -torch.inf)
        out[:, allowed] = scores[:, allowed]
        return out

    def acts_on(self, ids: Any) -> bool:
        """Whether the begun word is not complete after a text (n,)."""
        return bool(self._rest(ids))

    def _rest(self, ids: Any) -> bytes:
        """Return the rest of the begun word; every token has at least one byte."""
        rest, said = self._begun, ids[self._prompt_length :][: len(self._begun)].tolist()
        for token_id in said:
            rest = rest[len(self._beginnings.spelled.get(token_id, rest)) :]
        return rest


def _spelled_bytes(codec: TextCodec) -> dict[int, bytes]:
    """Return the bytes of every token that is no control token; empty for vocabularies without bytes."""
    described = json.loads(codec.plain_description)
    if (described.get("decoder") or {}).get("type") != "ByteLevel":
        return {}
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    spelled = {
        token_id: bytes(byte_of[letter] for letter in spelling)
        for spelling, token_id in described["model"]["vocab"].items()
        if spelling and all(letter in byte_of for letter in spelling)
    }
    added = codec.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    kept = {token["id"]: token["content"].encode() for token in described.get("added_tokens") or []}
    return {i: text for i, text in spelled.items() if i not in added} | kept


def _sayable(schema: Any, name: str, left_out: list[str]) -> Any:
    """Return a JSON schema without what llguidance refuses: patterns that look around or back, unknown dialects."""
    if isinstance(schema, list):
        return [_sayable(part, name, left_out) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = dict(schema)
    for keyword in ("pattern", "$schema"):
        given = kept.get(keyword)
        if isinstance(given, str) and check_grammar(json_grammar({keyword: given}), None)[0]:
            del kept[keyword]
            left_out.append(f"{name} ({keyword})")
    return {key: _sayable(value, name, left_out) for key, value in kept.items()}


class Grammars:
    """Grammars for the vocabulary of one model."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int]) -> None:
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        self._find_added = any_of(self._added)
        self._vocabulary = cache(partial(read_vocabulary, tokenizer, sorted(end_ids)))

    def of(self, request: Common, thinking: Thinking) -> str:
        """Return the grammar of a request's answer after its thoughts; empty for any text.

        Keywords of a schema that no grammar can express are ignored.

        Raises
        ------
        Refusal
            400: llguidance is not installed, or the schema is invalid.
        """
        (schema, name), pattern = request.wanted_json(), request.wanted_pattern()
        if schema is None and pattern is None:
            return ""
        name = name or "structured_outputs"
        vocabulary = self._read_vocabulary(name)
        if schema is not None:
            grammar = json_grammar(_sayable(schema, name, request.left_out), **LENIENT)
        else:
            grammar = regex_grammar(pattern or "")
        grammar = after_thoughts(grammar, thinking, self._mark, thinking.final)
        return self._valid(grammar, name, vocabulary, request.left_out)

    def of_calls(
        self,
        fmt: ToolFormat,
        schemas: Mapping[str, Any],
        thinking: Thinking,
        *,
        several: bool,
        left_out: list[str],
        otherwise: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the grammar of function calls after the thoughts, from the JSON schemas of the arguments.

        JSON under the schema ``otherwise`` is allowed instead, if given.

        Raises
        ------
        Refusal
            400: as above.
        """
        vocabulary = self._read_vocabulary("tool_choice")
        schemas = {name: _sayable(schema, "tools", left_out) for name, schema in schemas.items()}
        grammar = calls_grammar(fmt, schemas, self._mark, several=several)
        if otherwise is not None:
            otherwise = _sayable(otherwise, "response_format", left_out)
            (answer,) = json.loads(json_grammar(otherwise, **LENIENT))["grammars"]
            either = {"lark_grammar": f"%llguidance {{}}\nstart: @calls | {self._mark(thinking.final)} @json"}
            named = [{"name": "calls", "lark_grammar": grammar}, {**answer, "name": "json"}]
            grammar = json.dumps({"grammars": [either, *named]})
        return self._valid(after_thoughts(grammar, thinking, self._mark), "tools", vocabulary, left_out)

    def _mark(self, text: str) -> str:
        """Return a text in a grammar's notation, with control tokens as tokens."""
        parts = filter(None, self._find_added.split(text))
        return " ".join(f"<[{self._added[part]}]>" if part in self._added else json.dumps(part) for part in parts)

    def _valid(self, grammar: str, name: str, vocabulary: Any, left_out: list[str]) -> str:
        problem, unsaid = check_grammar(grammar, vocabulary)
        if problem:
            raise Refusal(400, f'"{name}": {problem}')
        left_out += [f"{name} ({one})" for one in unsaid]
        return grammar

    def _read_vocabulary(self, name: str) -> Any:
        """Return the tokenizer in llguidance's form, read once."""
        try:
            import llguidance.hf  # noqa: F401 - it may be there in part
        except ImportError:
            raise Refusal(400, f'"{name}" needs the package llguidance: {EXTRA}', "unsupported_field") from None
        try:
            return self._vocabulary()
        except ConfigError as error:
            raise Refusal(400, f'"{name}" cannot be served with this model: {error}') from error

    def processor(self, grammar: str) -> GrammarProcessor:
        """Return a ``LogitsProcessor`` for one text."""
        return GrammarProcessor(self._vocabulary(), grammar)


_LEAST = -9999.0
"""Stands for log 0 in OpenAI's answers, because JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """A token, its log-probability by the model's own logits, and the most probable tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TopLogProbSampler(LogProbSampler):
    """Chooses by another sampler, and notes each token with the most probable ones.

    Attributes
    ----------
    noted
        One entry per new token.
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
    """Formats log-probabilities for answers.

    Parameters
    ----------
    codec
        Text codec of the model.
    spelled
        Bytes of each token; for vocabularies without bytes, those of its text are reported.
    """

    def __init__(self, codec: TextCodec, spelled: Mapping[int, bytes]) -> None:
        self._codec, self._spelled = codec, spelled
        self._lead = codec.encode_prompt("a", add_special_tokens=False)  # else some drop leading spaces
        self._text = lru_cache(maxsize=1 << 16)(self._decoded)

    def of_chat(self, noted: Sequence[TokenLogProb], as_ids: bool = False) -> dict[str, Any]:
        """Return them in the form of chat completions; with ``as_ids`` tokens are called `token_id:1` instead."""
        content = []
        for one in noted:
            told = self._told(one, as_ids)
            content.append({**told[0], "top_logprobs": told[1:]})
        return {"content": content, "refusal": None}

    def of_text(self, noted: Sequence[TokenLogProb], offset: int, as_ids: bool = False) -> dict[str, Any]:
        """Return them in the form of text completions; ``offset`` counts the characters of the answer before them."""
        told = [self._told(one, as_ids) for one in noted]
        ends = itertools.accumulate((self.length([one]) for one in noted), initial=offset)
        return {
            "tokens": [first["token"] for first, *_ in told],
            "token_logprobs": [first["logprob"] for first, *_ in told],
            "top_logprobs": [{one["token"]: one["logprob"] for one in reversed(every)} for every in told],
            "text_offset": list(ends)[:-1],
        }

    def length(self, noted: Sequence[TokenLogProb]) -> int:
        """Return the number of characters of some tokens."""
        return sum(len(self._text(one.token_id)) for one in noted)

    def _told(self, noted: TokenLogProb, as_ids: bool) -> list[dict[str, Any]]:
        """Return a token and the most probable ones with their texts, as decoded after other text, and bytes."""
        return [
            {
                "token": f"token_id:{token_id}" if as_ids else self._text(token_id),
                "logprob": max(logprob, _LEAST),
                "bytes": list(self._spelled.get(token_id, self._text(token_id).encode())),
            }
            for token_id, logprob in [(noted.token_id, noted.logprob), *noted.top]
        ]

    def _decoded(self, token_id: int) -> str:
        return self._codec.decode([*self._lead, token_id])[len(self._codec.decode(self._lead)) :]
