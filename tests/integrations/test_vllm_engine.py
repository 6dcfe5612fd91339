"""The proposer inside vLLM itself, over the bundled model on a CPU; `make test-vllm` runs these where vLLM is."""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from recorded_texts import built_store, token_prompts
from vllm import LLM, SamplingParams
from vllm.v1.sample import rejection_sampler

import retrieve_spec

PACKAGE = Path(retrieve_spec.__file__).parent
SPEC = {
    "method": "custom_class",
    "model": "retrieve_spec.integrations.vllm.Proposer",
    "num_speculative_tokens": 8,
}
EXTENSION = "retrieve_spec.integrations.vllm.WorkerExtension"


def engine(options=None, **given):
    """An engine with pieces of prompts, shared prefixes and a cache that has room for few requests at a time."""
    if options is not None:
        given |= {
            "speculative_config": SPEC,
            "worker_extension_cls": EXTENSION,
            "additional_config": {"retrieve_spec": options},
        }
    return LLM(
        str(PACKAGE / "reference"),
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **{"kv_cache_memory_bytes": 7 << 20, **given},
    )


@pytest.fixture(scope="session", autouse=True)
def _findings_are_not_kept():
    """Nothing is probed here, and vLLM's CPU build starts no engine behind Numba, which the tests' own one loads."""


@pytest.fixture(scope="module")
def plain():
    return engine()


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def ours(plain, state, tmp_path_factory):
    store = built_store(tmp_path_factory.mktemp("store"))
    return engine({"datastores": [store], "session": True, "state": str(state)})


@pytest.fixture(scope="module")
def prompts(plain):
    return [{"prompt_token_ids": text} for text in token_prompts(plain.get_tokenizer().encode)]


def statistics(llm):
    return llm.collective_rpc("retrieve_spec_statistics")[0]


def metric(llm, name):
    return sum(one.value for one in llm.get_metrics() if one.name == name)


def answers(llm, prompts, parameters):
    return [[list(one.token_ids) for one in out.outputs] for out in llm.generate(prompts, parameters, use_tqdm=False)]


@pytest.mark.parametrize("at_once", [1, 4, 64])
def test_greedy_text_is_that_without_drafts(plain, ours, prompts, at_once):
    asked = prompts if at_once == 64 else prompts[:12]
    parameters = [
        SamplingParams(temperature=0, max_tokens=(1, 2, 30, 100)[i % 4], ignore_eos=i % 3 == 0)
        for i in range(len(asked))
    ]
    begun, accepted = statistics(ours)["requests"], metric(ours, "vllm:spec_decode_num_accepted_tokens")
    for first in range(0, len(asked), at_once):
        batch = slice(first, first + at_once)
        assert answers(ours, asked[batch], parameters[batch]) == answers(plain, asked[batch], parameters[batch])
    counts = statistics(ours)
    assert counts["failures"] == 0 and counts["requests"] >= begun + len(asked)
    assert metric(ours, "vllm:spec_decode_num_accepted_tokens") > accepted


def test_sampled_text_has_the_same_distribution(plain, ours, prompts, monkeypatch):
    """Two-sample chi-square of the second to fourth token, drafts being the same in every run."""

    from retrieve_spec.integrations.serving import ServingDrafter

    def expanded(values, ends, total, replace_from=0, replace_to=0):
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(values == replace_from, replace_to, values).repeat_interleave(counts)

    # The CPU build of 0.32 writes each draft's temperature into a copy that it drops, whoever drafts.
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expanded)
    monkeypatch.setattr(ServingDrafter, "measured", lambda self, seconds: None)
    parameters = SamplingParams(temperature=0.7, max_tokens=4, ignore_eos=True, n=4)
    asked = [prompts[3]] * 150
    drafted = statistics(ours)["drafted"]
    samples = []
    for llm in (plain, ours):
        torch.manual_seed(0)
        samples.append([tuple(one[1:]) for outs in answers(llm, asked, parameters) for one in outs])
    assert statistics(ours)["drafted"] > drafted + 300
    for length in (1, 2, 3):
        assert chi_square([[one[:length] for one in sample] for sample in samples]) < 4.0


def chi_square(samples):
    """Standard deviations that the statistic of two samples of one size lies above what is expected; rare values
    count as one."""
    one, other = ([sample.count(value) for value in sorted(set(samples[0] + samples[1]))] for sample in samples)
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a + b >= 10]
    rest = (len(samples[0]) - sum(a for a, _ in pairs), len(samples[1]) - sum(b for _, b in pairs))
    pairs += [rest] if sum(rest) else []
    freedom = max(len(pairs) - 1, 1)
    return (sum((a - b) ** 2 / (a + b) for a, b in pairs) - freedom) / (2 * freedom) ** 0.5


def test_what_was_learned_is_kept(ours, prompts, state):
    answers(ours, prompts[:6], SamplingParams(temperature=0, max_tokens=40))
    answers(ours, prompts[:1], SamplingParams(temperature=0, max_tokens=1))
    assert {"greedy.npy", "session.bin"} <= {path.name for path in state.iterdir()}
