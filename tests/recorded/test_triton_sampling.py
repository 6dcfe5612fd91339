"""The Triton kernels that draw tokens, run by Triton's interpreter on the CPU, against the host's sampler."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import COMPILER, Interpret, compiled_by

pytest.importorskip("triton")

SETTING = """
import itertools, math
import numpy as np, torch
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels import sampling, triton_sampling
from retrieve_spec.sampling.acceptance import RandomSampler, Warpers
from retrieve_spec.sampling.samplers import DeviceSampler, draw
from retrieve_spec.sampling.acceptance import read_logits
from retrieve_spec.sampling.acceptance import RowText

TEXT = RowText(torch.tensor([[1, 2, 3]]))

def drawn(scores, rules, seed=0):
    # what the device and the host draw, row i by rules[i]
    hosts = [RandomSampler(own, seed, row) for row, own in enumerate(rules)]
    got = draw(scores, np.concatenate([DeviceSampler(host).rules(TEXT, DraftTree()) for host in hosts])).tolist()
    logits = read_logits(scores, 1)
    return got, [host.choose(logits, row, TEXT) for row, host in enumerate(hosts)]

def check(scores, rules, seed=0):
    # how many rows the device left to the host; the others are the host's
    got, expected = drawn(scores, rules, seed)
    wrong = [(row, *pair) for row, pair in enumerate(zip(got, expected)) if pair[0] not in (-1, pair[1])]
    assert not wrong, (wrong, [rules[row] for row, *_ in wrong])
    return got.count(-1)
"""

AGREE = """
rng = np.random.default_rng(0)
pick = lambda *given: given[rng.integers(len(given))]
undecided = rows = 0
for case in range(24):
    vocab, count = pick(3, 64, 300, 1023, 1024, 1025, 3000), int(rng.integers(1, 6))
    scores = torch.from_numpy(rng.standard_normal((count, vocab)).astype(np.float32)) * pick(0.5, 3.0, 8.0)
    scores = scores.to(pick(torch.float32, torch.bfloat16, torch.float16))
    if pick(True, False):  # rows of a wider buffer, as those of a vocabulary that is padded
        scores = torch.cat([scores, torch.full_like(scores[:, :5], 99.0)], 1)[:, :vocab]
    truncates = pick(True, False, True)
    rules = [
        Warpers(pick(0.1, 0.7, 1.0, 1.9), pick(0, 1, 3, 50, 5000), pick(1.0, 0.95, 0.5, 0.0), pick(0.0, 0.02, 0.3))
        if truncates else Warpers(pick(0.1, 0.7, 1.0, 1.9, 30.0))
        for _ in range(count)
    ]
    if not any(own.truncates for own in rules) or all(own.truncates for own in rules):
        undecided, rows = undecided + check(scores, rules, seed=case), rows + count
    else:
        check(scores, rules, seed=case)  # right, if not all on the device
print("undecided", undecided, "of", rows)
assert undecided <= 1
"""

EXTREME = """
rng = np.random.default_rng(1)
EVERY = [Warpers(), Warpers(0.6, top_k=7), Warpers(top_p=0.9), Warpers(2.0, min_p=0.1), Warpers(0.9, 50, 0.8, 0.05)]
V = 2500
base = torch.from_numpy(rng.standard_normal(V).astype(np.float32) * 4)
masked = torch.full((V,), -torch.inf)
masked[[5, 1023, 1024, 2499]] = torch.tensor([1.0, 1.5, 1.5, 0.5])
lone = torch.full((V,), -torch.inf)
lone[2048] = -3.0
ahead = base.clone()
ahead[77] = 300.0
tied = base.round()  # many at every level
zeros = torch.zeros(V)
zeros[::2] = -0.0
zeros[-3:] = 1.0
for name, row in {
    "masked": masked, "lone": lone, "ahead": ahead, "tied": tied, "zeros": zeros, "flat": torch.full((V,), -7.5),
    "great": base * 1e6, "tiny": base * 1e-30, "low": base - 1e4,
}.items():
    undecided = [check(row[None], [own], seed=3) for own in EVERY]
    flat = name in ("flat", "zeros", "tiny")  # more tokens tie than are looked at
    assert undecided[0] == 0 and (flat or sum(undecided) == 0), (name, undecided)
    assert name != "tied" or not check(row.expand(3, V), [Warpers(top_k=3)] * 3)
wrong = itertools.cycle(itertools.product((math.nan, math.inf), (0, 1024, V - 1)))  # the host says what is wrong
for own in EVERY + EVERY:
    row = torch.stack([base, base, base])
    value, at = next(wrong)
    row[1, at] = value
    keys = np.concatenate([DeviceSampler(RandomSampler(own, 5)).rules(TEXT, DraftTree())] * 3)
    assert [token >= 0 for token in draw(row, keys).tolist()] == [True, False, True]
nothing = torch.full((1, V), -torch.inf)
for own in EVERY:
    assert draw(nothing, DeviceSampler(RandomSampler(own, 5)).rules(TEXT, DraftTree())).tolist() == [-1]
small = torch.tensor([[0.5, -torch.inf, 1.0]]).expand(12, 3)
for own in EVERY:
    assert check(small, [own] * 12) == 0
print("extreme")
"""

DISTRIBUTION = """
import triton, triton.language as tl

@triton.jit
def bits_of(key, out):
    i = tl.arange(0, 512)
    tl.store(out + i, triton_sampling._noise(tl.load(key), i * 700).to(tl.int64))

for key in (0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0):
    out = torch.empty(512, dtype=torch.long)
    bits_of[(1,)](torch.from_numpy(np.array([key], np.uint64).view(np.int64)), out)
    assert out.tolist() == [int(sampling.noise_bits(np.uint64(key), i * 700)) for i in range(512)]

logits = torch.tensor([2.0, 1.5, 1.5, 0.0, -1.0, 0.7, -3.0, 1.9])
for own, left, draws in ((Warpers(0.8), 8, 80), (Warpers(1.3, 3, min_p=0.1), 4, 40), (Warpers(top_p=0.8), 4, 40)):
    rules = np.concatenate([DeviceSampler(RandomSampler(own, 9)).rules(TEXT, DraftTree())] * draws)
    rules["key"] = [sampling.noise_key(9, 0, position) for position in range(draws)]
    tokens = draw(logits.expand(draws, 8), rules).numpy()
    tokens = tokens[tokens >= 0]
    assert len(tokens) >= draws - 2
    order = np.argsort(-logits.numpy(), kind="stable")
    p = np.exp(logits.double().numpy() / own.temperature)
    p[order[left:]] = 0.0
    counts = np.bincount(tokens, minlength=8)
    assert (counts[p == 0.0] == 0).all(), (own, counts)
    expected = len(tokens) * p[p > 0] / p.sum()
    statistic = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    assert statistic < {8: 24.3, 4: 16.3}[left], (own, statistic, counts)  # 99.9 % quantiles
print("distributed")
"""


SCRIPTS = {"undecided": AGREE, "extreme": EXTREME, "distributed": DISTRIBUTION}


@pytest.mark.parametrize("said", ["undecided", "extreme", pytest.param("distributed", marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_host(interpret: Interpret, said: str) -> None:
    assert interpret(SETTING + SCRIPTS[said]).startswith(said)


COMPILED = """
from retrieve_spec.kernels import triton_sampling as kernels

TYPES = dict.fromkeys(("rules", "ids_out", "given_ids", "drawn"), "*i64") | {"values_out": "*fp32", "masses": "*fp64"}

for architecture, dtype in ((80, "fp32"), (90, "bf16")):
    types = TYPES | {"scores": "*" + dtype, "given": "*" + dtype}
    block = {"BLOCK": kernels._BLOCK}
    ptx = compiled(kernels._contenders, types, block | {"SLOTS": kernels._SLOTS}, architecture, 4)
    assert "fma.rn.f64" not in ptx, "logarithms in float64, which many GPUs are slow at, are for few tokens"
    assert "div.rn.f32" in ptx, "logits are divided by the temperature as on the host"
    assert "div.rn.f32" in compiled(kernels._masses, types, block, architecture, 4)
    for count, masses, warps in ((512, False, 2), (128, False, 1), (2048, True, 8)):
        constants = {"COUNT": count, "BLOCKS": 256 if masses else 0, "WHOLE": count == 512}
        assert "div.rn.f32" in compiled(kernels._draw, types, constants, architecture, warps)
print("compiled")
"""


def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    """By Triton's compiler and assembler, which need no GPU."""
    assert compiled_by(COMPILER + COMPILED, tmp_path) == "compiled"
