"""A model accelerated beside the same model left alone, and random calls of both that must say the same."""

import collections
import copy
import functools
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import retrieve_spec as rs

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "conformance")]
from families import FAMILIES, VOCAB, build  # noqa: E402
from interrupting import CtrlCAt  # noqa: E402

TIE = 2e-3
"""Difference of two logits, as a share of their spread, that float32 may decide either way."""
OWN_STATE = ("mamba", "mamba2", "recurrent_gemma")
"""Families that keep their state in another cache, or in their modules: a cache handed in says nothing."""
BY_NAME = {family.name: family for family in FAMILIES}
CALLS: collections.Counter[str] = collections.Counter()
"""How often what was done, over all worlds."""


class Bomb:
    """Raises when it is asked for the n-th time: a logits processor …"""

    def __init__(self, calls: int, kind: type[BaseException]) -> None:
        self.left, self.kind = calls, kind

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.kind
        return scores


class StopBomb(Bomb):
    """… and a stopping criterion that never stops."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        super().__call__(input_ids, scores)
        return False


class Nudge:
    """A logits processor with a rule of its own: tokens of the last three places, and every so many-th, lose."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores - 1.0 * (torch.arange(scores.shape[1]) % (self.calls % 4 + 2) == 0)
        return scores.scatter_add(1, input_ids[:, -3:], torch.full(input_ids[:, -3:].shape, -2.0, dtype=scores.dtype))


@functools.cache
def _original(name: str) -> Any:
    return build(BY_NAME[name], BY_NAME[name].attention[0])


def prompts(lengths: list[int], seed: int, loop: bool) -> dict[str, torch.Tensor]:
    """Rows of random tokens, or of few that repeat, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        text = torch.randint(3, VOCAB, (length,), generator=generator)
        ids[row, longest - length :] = text[torch.arange(length) % 4] if loop else text
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


class World:
    """One model twice: `plain` is left alone, `model` is accelerated; what is done to one is done to the other.

    Parameters
    ----------
    family
        Name of the family.
    options
        Of `accelerate`.
    """

    def __init__(self, family: str, options: dict[str, Any]) -> None:
        self.takes_a_cache = family not in OWN_STATE
        self.plain = copy.deepcopy(_original(family))
        self.model = rs.accelerate(copy.deepcopy(_original(family)), **options)
        self.streams: list[tuple[Any, list[int], list[int], str]] = []
        self.exact = True  # whether numbers are such that texts must be the same
        self.adapters: list[str] = []

    # -- what is asked for ---------------------------------------------------------------------------------------

    def generate(self, inputs: dict[str, Any], own: str = "", cache: bool = False, **options: Any) -> None:
        """One call, compared with plain `generate`, or where it samples with a call that does not draft."""
        rows = len(inputs["input_ids"]) * options.get("num_return_sequences", 1)
        CALLS[f"generate{', sampled' * bool(options.get('do_sample'))}, {rows} row{'s' * (rows > 1)}"] += 1
        sampled = bool(options.get("do_sample"))
        reference = {name: value for name, value in options.items() if name not in ("draft", "nodes", "seed")}
        cache &= self.takes_a_cache
        caches = [self._cache() if cache else None for _ in range(2)]
        if sampled:
            expected = self._ask(self.model, inputs, own, caches[0], **{**options, "draft": "off"})
        else:
            expected = self._ask(self.plain, inputs, own, caches[0], **reference)
        got = self._ask(self.model, inputs, own, caches[1], **options)
        self._compare(got, expected, own, sampled)
        if cache and self.exact and torch.equal(got, expected):
            ours, theirs = caches[1].get_seq_length(), caches[0].get_seq_length()
            assert ours == theirs, f"the cache holds {ours} rows, plain generate leaves {theirs}"
            self._continue(caches[1], expected[0].tolist(), caches[0])

    def together(self, first: dict[str, Any], second: dict[str, Any], length: int) -> None:
        """Two threads that generate at once."""
        CALLS["generate, two threads"] += 2
        expected = [self._ask(self.plain, inputs, "", None, max_new_tokens=length) for inputs in (first, second)]
        ask = functools.partial(self._ask, self.model, own="", cache=None, max_new_tokens=length)
        with ThreadPoolExecutor(2) as threads:
            for ours, theirs in zip(threads.map(ask, (first, second)), expected, strict=True):
                self._compare(ours, theirs, "", sampled=False)

    def open_stream(self, inputs: dict[str, Any], length: int, seed: int | None) -> None:
        options: dict[str, Any] = {"max_new_tokens": length, "do_sample": seed is not None}
        if seed is None:
            expected = self._ask(self.plain, inputs, "", None, **options)
            how = "greedy"
        else:
            options["seed"] = seed
            expected = self._ask(self.model, inputs, "", None, **options, draft="off")
            how = "sampled"
        prompt = inputs["input_ids"]
        stream = rs.generate_stream(self.model, prompt, **options)
        self.streams.append((stream, expected[0].tolist(), prompt[0].tolist(), how))
        CALLS["streams opened"] += 1

    def step_stream(self, number: int) -> None:
        stream, expected, seen, how = self.streams[number]
        CALLS["stream steps"] += 1
        piece = next(stream, None)
        if piece is None:
            self.streams.pop(number)
            self._compare(torch.tensor([seen]), torch.tensor([expected]), "", how == "sampled")
            return
        seen += piece.token_ids.tolist()
        end = min(len(seen), len(expected))
        if seen[:end] != expected[:end]:
            self._compare(torch.tensor([seen]), torch.tensor([expected[: len(seen)]]), "", how == "sampled")
            self.streams.pop(number)[0].close()  # a tie: what follows is another text

    def close_stream(self, number: int) -> None:
        CALLS["streams closed"] += 1
        self.streams.pop(number)[0].close()

    def abandon_stream(self, number: int) -> None:
        CALLS["streams abandoned"] += 1
        del self.streams[number]
        gc.collect()

    def fail(self, inputs: dict[str, Any], calls: int, where: str, kind: type[BaseException], length: int) -> None:
        """An exception from a processor or criterion comes through; the cache is that of the text so far."""
        CALLS[f"{kind.__name__} from a {where}"] += 1
        cache = self._cache()
        options: dict[str, Any] = {"max_new_tokens": length}
        if where == "processor":
            options["logits_processor"] = [Bomb(calls, kind)]
        else:
            options["stopping_criteria"] = [StopBomb(calls, kind)]
        expected = self._ask(self.plain, inputs, "", None, max_new_tokens=length)
        try:
            got = self._ask(self.model, inputs, "", cache, **options)
        except kind:
            self._continue(cache, expected[0].tolist())
        else:
            self._compare(got, expected, "", sampled=False)

    def interrupt(self, inputs: dict[str, Any], lines: int, length: int) -> None:
        """Ctrl-C at a line of the library; streams that are open go on."""
        CALLS[f"Ctrl-C between two lines, {len(self.streams)} streams open"] += 1
        trap = CtrlCAt(lines)
        cache = self._cache() if len(inputs["input_ids"]) == 1 else None
        expected = self._ask(self.plain, inputs, "", None, max_new_tokens=length)
        try:
            with trap:
                got = self._ask(self.model, inputs, "", cache, max_new_tokens=length)
        except KeyboardInterrupt:
            CALLS["Ctrl-C that came"] += 1
            try:
                if cache is not None:
                    self._continue(cache, expected[0].tolist())
                again = self._ask(self.model, inputs, "", None, max_new_tokens=length)
                self._compare(again, expected, "", sampled=False)
            except Exception as error:
                error.add_note(f"after Ctrl-C at {trap.where}")
                raise
        else:
            self._compare(got, expected, "", sampled=False)

    # -- what is done to the model -------------------------------------------------------------------------------

    def close_all(self) -> None:
        while self.streams:
            self.close_stream(0)

    def edit(self, which: int, row: int, way: str, factor: float) -> None:
        """Change a row of a weight in place."""
        CALLS[f"weights edited by {way}"] += 1
        self.close_all()
        for model in (self.plain, self.model):
            parameters = [p for p in model.parameters() if p.ndim == 2]
            weight = parameters[which % len(parameters)]
            row %= len(weight)
            if way == "no_grad":
                with torch.no_grad():
                    weight[row] *= factor
            elif way == "data":
                weight.data[row] *= factor
            else:
                weight.data = weight.data.clone()
                weight.data[row] *= factor
        if way == "data":
            self.model.speculation.invalidate()

    def cast(self, dtype: torch.dtype) -> None:
        CALLS[f"to({str(dtype).removeprefix('torch.')})"] += 1
        self.close_all()
        self.plain.to(dtype)
        try:
            self.plain(torch.tensor([[1, 2]]))
        except RuntimeError:  # some operations know no float64
            dtype = torch.float32
            self.plain.to(dtype)
        self.model.to(dtype)
        self.exact = dtype in (torch.float32, torch.float64)

    def adapt(self, how: str, number: int) -> None:
        """Add, switch, disable, enable or delete LoRA adapters with random weights."""
        from peft import LoraConfig

        self.close_all()
        name = f"adapter{number}"
        if how == "add":
            how = "set" if name in self.adapters else how
        elif not self.adapters:
            return
        name = name if how == "add" or name in self.adapters else self.adapters[number % len(self.adapters)]
        config = LoraConfig(r=2, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
        if how == "add" and not self._takes(config, name):
            return
        CALLS[f"adapters: {how}"] += 1
        for model in (self.plain, self.model):
            torch.manual_seed(number)
            if how == "add":
                model.add_adapter(config, name)
                model.eval()
            elif how == "set":
                model.set_adapter(name)
            elif how == "disable":
                model.disable_adapters()
            elif how == "enable":
                model.enable_adapters()
            elif how == "delete":
                model.delete_adapter(name)
        if how == "add":
            self.adapters.append(name)
        elif how == "delete":
            self.adapters.remove(name)

    def _takes(self, config: Any, name: str) -> bool:
        """Whether peft can wrap the model and run it then; where it cannot, it leaves a model half wrapped."""
        trial = copy.deepcopy(self.plain)
        try:
            trial.add_adapter(config, name)
            trial.eval()(torch.tensor([[1, 2]]))
        except (ValueError, AttributeError, RuntimeError):
            return False
        return True

    def attention(self, kind: str) -> None:
        CALLS["set_attn_implementation"] += 1
        self.close_all()
        for model in (self.plain, self.model):
            model.set_attn_implementation(kind)

    def accelerate_again(self, options: dict[str, Any]) -> None:
        CALLS["accelerate again"] += 1
        self.close_all()
        rs.accelerate(rs.restore(self.model), **options)

    # -- comparing -----------------------------------------------------------------------------------------------

    def _ask(self, model: Any, inputs: dict[str, Any], own: str, cache: Any, **options: Any) -> torch.Tensor:
        if own == "nudge":
            options["logits_processor"] = [Nudge()]
        elif own == "stop":
            options["stopping_criteria"] = [_stop_at_multiples]
        options.setdefault("do_sample", False)
        out: torch.Tensor = model.generate(**inputs, past_key_values=cache, **options)
        return out

    def _cache(self) -> Any:
        if not self.takes_a_cache:
            return None
        return DynamicCache(config=self.plain.config.get_text_config(decoder=True))

    def _compare(self, got: torch.Tensor, expected: torch.Tensor, own: str, sampled: bool) -> None:
        if torch.equal(got, expected) or not self.exact:
            return
        if not sampled and not own and self._is_tie(got, expected):
            CALLS["ties"] += 1
            return
        last = self.model.speculation.last
        raise AssertionError(f"got {got.tolist()}, expected {expected.tolist()} ({last.mode}: {last.reason})")

    def _is_tie(self, got: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether every row's first difference is between two tokens of nearly the same logit."""
        for ours, theirs in zip(got.tolist(), expected.tolist(), strict=True):
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if at is None:
                if len(ours) != len(theirs) and len(got) == 1:
                    return False
                continue
            text = torch.tensor([theirs[:at]])
            mask = (text != 0).long().cummax(1).values  # prompts have no zeros but their padding
            with torch.no_grad():
                logits = self.plain(input_ids=text, attention_mask=mask, use_cache=False).logits[0, -1].double()
            if abs(float(logits[ours[at]] - logits[theirs[at]])) > TIE * float(logits.std()):
                return False
        return True

    def _continue(self, cache: Any, text: list[int], plain_cache: Any = None) -> None:
        """What a cache holds must be the beginning of a text: plain `generate` goes on from it as without it."""
        if cache is None:
            return
        rows = int(cache.get_seq_length())
        assert rows <= len(text), f"{rows} rows in the cache of a text of {len(text)} tokens"
        if not rows or not self.exact:
            return
        ids = torch.tensor([[*text, 5][: rows + 1]])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
        expected = self.plain.generate(ids, past_key_values=plain_cache, **options)
        got = self.plain.generate(ids, past_key_values=cache, **options)
        if not torch.equal(got, expected) and not self._is_tie(got, expected):
            raise AssertionError(f"{rows} rows of a cache go on as {got[0, rows:]}, without it {expected[0, rows:]}")


def _stop_at_multiples(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return input_ids[:, -1] % 17 == 0
