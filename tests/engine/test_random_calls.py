"""Random arguments, random drafts: `generate` of an accelerated model gives what it gives without drafts."""

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_drafter import ScriptedDrafter
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import DistributionError

VOCAB = 199
TOKEN = st.integers(0, VOCAB - 1)
TOKENS = st.lists(TOKEN, min_size=1, max_size=20)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "min_new_tokens": st.sampled_from([3, 8]),
    "eos_token_id": TOKENS,
    "repetition_penalty": st.sampled_from([0.8, 1.3, 5.0]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_repetition_penalty": st.sampled_from([0.7, 1.3]),
    "encoder_no_repeat_ngram_size": st.integers(1, 2),
    "bad_words_ids": st.lists(st.lists(TOKEN, min_size=1, max_size=2), min_size=1, max_size=3),
    "forced_eos_token_id": st.integers(0, 99),  # which is an error where it is suppressed
    "suppress_tokens": st.lists(st.integers(100, VOCAB - 1), min_size=1, max_size=20),
    "begin_suppress_tokens": TOKENS,
    "sequence_bias": st.dictionaries(st.tuples(TOKEN, TOKEN), st.sampled_from([-5.0, 5.0]), min_size=1, max_size=9),
    "renormalize_logits": st.just(True),
}
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.3, 0.7, 1.8]),
    "top_k": st.sampled_from([0, 1, 3, 500]),
    "top_p": st.sampled_from([0.3, 0.9]),
    "min_p": st.sampled_from([0.02, 0.2]),
    "typical_p": st.just(0.8),
    "epsilon_cutoff": st.just(0.003),
}


class RandomDrafter(ScriptedDrafter):
    """Trees of any shape: right paths, right ones cut short, nonsense, siblings of the right token, deep chains."""

    def __init__(self, answer: list[int], seed: int, top_k: int) -> None:
        super().__init__(answer, top_k=top_k)
        self._random = random.Random(seed)

    def propose(self, budget: Budget) -> DraftTree:
        draw, paths = self._random, []
        for _ in range(draw.choice([0, 1, 2, 5, 9])):
            depth = min(draw.choice([1, 2, 3, 6, 30]), budget.max_depth)
            keep = draw.choice([0, depth, draw.randint(0, depth)])
            path = self.answer[len(self.text) : len(self.text) + keep]
            paths.append(path + [draw.randrange(VOCAB) for _ in range(depth - len(path))])
        draw.shuffle(paths)
        tree = DraftTree.from_paths([path for path in paths if path])
        return tree.first(budget.max_nodes)


class Stateful:
    """A processor whose rule depends on how often it was asked and on the last tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores + 1.5 * (torch.arange(scores.shape[1]) % (self.calls % 5 + 2) == 0)
        scores[:, input_ids[0, -2:]] -= 2.0
        return scores


def stop_after(calls: int) -> Any:
    left = [calls]

    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        left[0] -= 1
        return left[0] <= 0

    return criterion


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a call; `own` says which processors and criteria to make for it."""
    sampling = draw(st.booleans())
    names = list(SETTINGS) + (list(SAMPLING) if sampling else [])
    chosen = draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    arguments = {name: draw((SETTINGS | SAMPLING)[name]) for name in chosen}
    arguments |= {"do_sample": sampling, "max_new_tokens": draw(st.sampled_from([1, 2, 9, 40]))}
    if draw(st.booleans()):
        arguments |= {"return_dict_in_generate": True, "output_scores": draw(st.booleans()), "output_logits": True}
    return arguments


def run(model: Any, prompt: torch.Tensor, arguments: dict[str, Any], own: str, **more: Any) -> Any:
    cache = DynamicCache(config=model.config)
    if own == "processor":
        more["logits_processor"] = [Stateful()]
    elif own == "criterion":
        more["stopping_criteria"] = [stop_after(5)]
    output = model.generate(prompt, past_key_values=cache, **arguments, **more)
    return (output, cache) if isinstance(output, torch.Tensor) else (output.sequences, cache, output)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    arguments=calls(), own=st.sampled_from(["", "", "processor", "criterion"]), length=st.integers(1, 40),
    loop=st.booleans(), nodes=st.sampled_from([1, 5, 60]), chunk=st.sampled_from([0, 3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_call_says_what_it_says_without_drafts(
    tiny: Any, arguments: dict[str, Any], own: str, length: int, loop: bool, nodes: int, chunk: int, seed: int
) -> None:
    prompt = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
    prompt = prompt[:, torch.arange(length) % 5] if loop and length > 5 else prompt
    rs.restore(tiny)
    more: dict[str, Any] = {}
    if arguments["do_sample"]:
        rs.accelerate(tiny, draft="off", nodes=nodes)
        more = {"seed": seed}
    try:
        expected = run(tiny, prompt, arguments, own, **more)
    except DistributionError:  # rules that forbid every token
        rs.accelerate(tiny, nodes=nodes)
        with pytest.raises(DistributionError):
            run(tiny, prompt, arguments, own, **more)
        return
    answer = expected[0][0].tolist()
    drafter = RandomDrafter(answer, seed, top_k=seed % 3)
    rs.accelerate(tiny, drafter=drafter, nodes=nodes, prefill_chunk=chunk, prompt_logits=seed % 7)
    got = run(tiny, prompt, arguments, own, **more)
    assert tiny.speculation.last.mode == "tree"
    assert torch.equal(got[0], expected[0])
    assert got[1].get_seq_length() == expected[1].get_seq_length()
    if len(expected) == 3:
        for name in ("scores", "logits"):
            for a, b in zip(got[2].get(name, ()), expected[2].get(name, ()), strict=True):
                torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    longer = torch.cat([got[0], prompt[:, :1]], dim=1)
    ours = tiny.generate(longer, past_key_values=got[1], max_new_tokens=4, do_sample=False)
    rs.restore(tiny)
    assert torch.equal(ours, tiny.generate(longer, past_key_values=expected[1], max_new_tokens=4, do_sample=False))
