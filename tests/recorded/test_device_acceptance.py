"""What is chosen on the device is what the host chooses, row for row and token for token."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_cuda import PretendCuda
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

import retrieve_spec.kernels
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sampling import acceptance, samplers
from retrieve_spec.sampling.acceptance import (
    GreedySampler,
    ProcessorSampler,
    RandomSampler,
    RowText,
    Warpers,
    read_logits,
    walk,
)
from retrieve_spec.sampling.samplers import DeviceSampler, make_sampler

pytestmark = pytest.mark.usefixtures("drawn_by_host")

RULES = st.builds(
    Warpers,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
    min_length=st.sampled_from([0, 10, 11, 40]),
    end_ids=st.sampled_from([(), (0, 3), (2, 4, 100_000), (0, 1, 2, 3)]),
)


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> DraftTree:
    paths = [rng.integers(0, vocab, rng.integers(1, 7)).tolist() for _ in range(nodes // 4)]
    paths += [path[:2] + rng.integers(0, vocab, 2).tolist() for path in paths]
    return DraftTree.from_paths(paths)


def text_of(ids: list[int]) -> RowText:
    return RowText(torch.tensor([ids]))


@settings(max_examples=150, deadline=None)
@given(
    rules=RULES, seed=st.integers(0, 2**62), vocab=st.sampled_from([5, 300, 3000]), half=st.booleans(),
    spread=st.sampled_from([0.5, 3.0, 8.0]), first_row=st.integers(0, 2), greedy=st.booleans(),
)  # fmt: skip
def test_a_walk_goes_where_the_hosts_goes(
    rules: Warpers, seed: int, vocab: int, half: bool, spread: float, first_row: int, greedy: bool
) -> None:
    """Random trees whose tokens often are what is chosen, float32 and bfloat16 (many equal logits), all rules."""
    rng = np.random.default_rng(seed)
    host: Any = GreedySampler(rules) if greedy else RandomSampler(rules, seed)
    tree = random_tree(rng, int(rng.integers(0, 24)), vocab)
    prompt = rng.integers(0, vocab + 1, 9).tolist()  # an id without a logit, too
    rows = first_row + 1 + len(tree)
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32) * spread)
    logits = logits.to(torch.bfloat16) if half else logits
    for i in range(len(tree)):  # make the drafted tokens likely
        logits[first_row + 1 + tree.parent[i], tree.token_ids[i]] += 2 * spread
    device = DeviceSampler(host)
    for _ in range(2):  # the second time the text goes on, so that marks are kept up
        texts = text_of(prompt), text_of(prompt)
        expected = walk(tree, read_logits(logits, 4), first_row, host, texts[0], lambda *_: False)
        read = device.read(logits, first_row, tree, texts[1], 4)
        got = walk(tree, read, first_row, device, texts[1], lambda *_: False)
        assert got.emitted.tolist() == expected.emitted.tolist()
        assert got.path.tolist() == expected.path.tolist()
        assert read.top_ids[:, 0].tolist() == read_logits(logits, 4).top_ids[:, 0].tolist()
        prompt = texts[0].ids.tolist()


def test_unsure_rows_are_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "draw", lambda scores, rules: torch.full((len(scores),), -1))
    logits = torch.randn(1, 300)
    device = DeviceSampler(host := RandomSampler(Warpers(), 5))
    text = text_of([1, 2, 3])
    read = device.read(logits, 0, DraftTree(), text, 1)
    assert read.chosen is not None and read.chosen.tolist() == [-1]
    assert device.choose(read, 0, text) == host.choose(read, 0, text)


@pytest.mark.parametrize("wrong", [lambda scores, rules: torch.full((len(scores),), 7), lambda scores, rules: 1 / 0])
def test_a_device_that_draws_otherwise_is_not_asked(
    gpu: PretendCuda, wrong: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = partial(make_sampler, [TEMPERATURE], 1, device=torch.device("cuda"))
    assert type(sampler()) is DeviceSampler
    samplers.draws_alike.cache_clear()
    monkeypatch.setattr(samplers, "draw", wrong)
    assert type(sampler()) is RandomSampler
    assert "drawn on the host" in caplog.text


def test_most_probable_tokens_are_torchs_where_a_kernel_finds_others(
    gpu: PretendCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logits = torch.randn(3, 50).to("cuda")
    expected = read_logits(logits, 4).top_ids
    assert not caplog.text and gpu.ran["pretended.pack_largest.default"] == 2, "a trial, and the kernel"
    acceptance.packing.cache_clear()
    zeros = torch.zeros((2, 18), dtype=torch.int32, device="cuda")
    monkeypatch.setattr(retrieve_spec.kernels.triton_topk, "pack_largest", lambda *_: zeros)
    assert read_logits(logits, 4).top_ids.tolist() == expected.tolist()
    assert "found by torch" in caplog.text


def penalty_behind(padding: int) -> Any:
    penalty = hf.RepetitionPenaltyLogitsProcessor(1.2)
    penalty.prompt_ignore_length = torch.tensor([padding])  # which older releases of transformers refuse as an argument
    return penalty


PENALTY, TEMPERATURE = hf.RepetitionPenaltyLogitsProcessor(1.2), hf.TemperatureLogitsWarper(0.7)
LEAST = hf.MinLengthLogitsProcessor(5, 1)


@pytest.mark.parametrize(
    ("processors", "seed", "device", "kind"),
    [
        ([], None, "cuda", GreedySampler),  # the argmax of every row comes over anyway
        ([PENALTY], None, "cuda", DeviceSampler),
        ([PENALTY], None, "cpu", GreedySampler),
        ([PENALTY, TEMPERATURE], 1, "cuda", DeviceSampler),
        ([PENALTY, TEMPERATURE], 1, "cpu", RandomSampler),
        ([PENALTY, TEMPERATURE], 1, "mps", RandomSampler),  # which has no float64
        ([TEMPERATURE, PENALTY], 1, "cuda", ProcessorSampler),  # not the usual order
        ([TEMPERATURE], None, "cuda", ProcessorSampler),
        ([PENALTY, LEAST, TEMPERATURE], 1, "cuda", DeviceSampler),
        ([PENALTY, LEAST, TEMPERATURE], 1, "cpu", RandomSampler),
        ([LEAST, hf.MinNewTokensLengthLogitsProcessor(4, 3, 1)], None, "cpu", GreedySampler),
        ([LEAST, hf.MinNewTokensLengthLogitsProcessor(4, 3, 2)], None, "cpu", ProcessorSampler),  # of another token
        ([hf.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)], None, "cuda", ProcessorSampler),
        ([penalty_behind(0)], None, "cpu", GreedySampler),  # as `generate` makes it for a prompt without padding
        ([penalty_behind(3)], None, "cpu", ProcessorSampler),
    ],
)
def test_who_chooses(gpu: PretendCuda, processors: list[Any], seed: int | None, device: str, kind: type) -> None:
    sampler = make_sampler(LogitsProcessorList(processors), seed, device=torch.device(device))
    assert type(sampler) is kind
    assert type(make_sampler(processors, seed, device=torch.device(device), keep_raw=True)) is ProcessorSampler


@settings(max_examples=60, deadline=None)
@given(
    min_length=st.integers(0, 14), min_new_tokens=st.integers(0, 6),
    ends=st.sampled_from([[0], [0, 7, 3], [2, 99], [-1], [-100, 5]]),
    penalty=st.booleans(), top_k=st.booleans(), seed=st.none() | st.integers(0, 2**62),
)  # fmt: skip
def test_texts_end_no_earlier_than_by_the_processors(
    min_length: int, min_new_tokens: int, ends: list[int], penalty: bool, top_k: bool, seed: int | None
) -> None:
    """Logits under which texts would end at once; choices, and their log-probabilities, are those of the processors."""
    processors = LogitsProcessorList([PENALTY] if penalty else [])
    processors.append(hf.MinLengthLogitsProcessor(min_length, ends))
    processors.append(hf.MinNewTokensLengthLogitsProcessor(4, min_new_tokens, ends))
    if seed is not None:
        processors.append(TEMPERATURE)
        processors.extend([hf.TopKLogitsWarper(5)] if top_k else [])
    quick, plain = make_sampler(processors, seed), ProcessorSampler(processors, seed)
    assert not isinstance(quick, ProcessorSampler)
    texts = text_of([5, 6, 7, 8]), text_of([5, 6, 7, 8])
    rng = np.random.default_rng(seed)
    for _ in range(12):
        row = torch.from_numpy(rng.standard_normal((1, 40)).astype(np.float32))
        row[0, [token % 40 for token in ends if token < 40]] += 4
        logits = read_logits(row, 2)
        chosen, expected = quick.choose(logits, 0, texts[0]), plain.choose(logits, 0, texts[1])
        assert chosen == expected
        sure = quick.log_prob(logits, 0, texts[0], chosen)
        torch.testing.assert_close(sure, plain.log_prob(logits, 0, texts[1], chosen), rtol=1e-5, atol=1e-5)
        for text in texts:
            text.append(chosen)
