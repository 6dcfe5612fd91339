"""Passes, acceptance and batches on a pretended GPU: nothing is mixed, captures read nothing, a step waits once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from placed_models import Placed
from pretend_cuda import CudaError, PretendCuda
from small_decoders import build, ids

import retrieve_spec as rs
import retrieve_spec.kernels
from retrieve_spec.config import PassConfig
from retrieve_spec.recorded import kv_buffer, packed_pass, recorded_verifier
from retrieve_spec.recorded.packed_pass import CudaGraphCapture, DeviceFields, PassGraphs
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import read_interface

OPTIONS: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, "draft": "off"}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_steps_without_a_kernel_wait_once(gpu: PretendCuda, family: str) -> None:
    """Torch's attention: the tokens of plain `generate`; a step copies in without waiting and waits for the tokens."""
    check_steps(Placed(gpu, family), graphs=False)


@pytest.mark.parametrize(
    ("family", "graphs", "index"),
    [
        ("llama", True, 0),
        ("llama", False, 1),
        ("gemma3_text", True, 1),
        ("gemma3_text", False, 0),
        ("gpt_oss", False, 0),
    ],
)
def test_steps_wait_once_with_a_kernel(
    gpu: PretendCuda, with_triton: None, family: str, graphs: bool, index: int
) -> None:
    """The same with a stand-in for the Triton kernels; on the second GPU, too, while the first one is the current."""
    check_steps(Placed(gpu, family, index), graphs)


def check_steps(placed: Placed, graphs: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    expected = placed.host.generate(ids(30), **options)
    captured = placed.accelerate(expected[0], graphs=graphs)
    for _ in range(2):  # the second time everything is captured
        assert torch.equal(placed.generate(ids(30), **options), expected)
        assert placed.model.speculation.last.tokens_per_pass > 1.5
    steps = placed.steps()
    assert len(steps) > 8
    for waits, uploads, _ in steps:
        assert waits == {"copy to the host": 1}
        assert not uploads["blocking"]
        if graphs:  # the pass brings the rows that the last commit moves
            assert uploads["pinned"] == 1 and not uploads["pageable"]
    report = placed.model.speculation.last
    if graphs:
        assert captured.captures > 2 and not report.eager_reason and set(report.ran) <= {"captured", "replayed"}
        assert report.ran["replayed"] > 8
    else:
        assert set(report.ran) == {"eager"}


@pytest.mark.parametrize(
    "rules",
    [
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 0.9},
        {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2},
        {"do_sample": True, "min_p": 0.05},
    ],
)
def test_tokens_chosen_on_the_device_come_in_one_copy(
    gpu: PretendCuda, with_triton: None, rules: dict[str, Any]
) -> None:
    placed = Placed(gpu)
    options = {"max_new_tokens": 24, **rules, **({"seed": 3} if rules["do_sample"] else {})}
    if rules["do_sample"]:
        rs.accelerate(placed.host, draft="off", recorded_pass="off")
    expected = placed.host.generate(ids(30), **options)
    placed.accelerate(expected[0])
    for _ in range(2):
        assert torch.equal(placed.generate(ids(30), **options), expected)
    for waits, uploads, _ in placed.steps():
        assert waits == {"copy to the host": 1}
        assert not uploads["blocking"]


def test_texts_with_different_rules_are_drawn_at_once(gpu: PretendCuda, with_triton: None) -> None:
    """Those that truncate apart from those that do not, and those whose rules turn on their text each alone."""
    rules = [{"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0.9, "top_k": 9}, {"top_p": 0.8}]
    rules.append({"repetition_penalty": 1.2})
    placed = Placed(gpu)

    def told(model: Any) -> list[list[int]]:
        streams = [
            rs.generate_stream(model, ids(20 + i).to(model.device), seed=i, **{**OPTIONS, **own})
            for i, own in enumerate(rules)
        ]
        steps = zip(*streams, strict=True)
        return [[piece.token_ids.tolist() for piece in pieces] for pieces in steps]

    rs.accelerate(placed.host, recorded_pass="off")
    expected = told(placed.host)
    placed.accelerate(ids(30)[0])
    assert told(placed.model) == expected
    assert gpu.ran["pretended.draw.default"] <= 3 + 5 + 3 * 12, "the trial, texts that begin one by one, steps"


def test_a_short_prompt_with_positions_of_its_own(gpu: PretendCuda, with_triton: None) -> None:
    """The model begins it, with more tokens than those whose logits are wanted."""
    placed = Placed(gpu)
    positions, options = torch.tensor([[0, 1, 2, 5, 6, 7, 8]]), {"max_new_tokens": 12, "do_sample": False}
    expected = placed.host.generate(ids(7), position_ids=positions, **options)
    placed.accelerate(expected[0])
    assert torch.equal(placed.generate(ids(7), position_ids=positions.to(placed.device), **options), expected)
    assert placed.model.speculation.last.pass_kind == "recorded"


def test_slabs_grow_under_captured_passes(gpu: PretendCuda, with_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read where slabs stand: a text that outgrows its slabs captures nothing again."""
    monkeypatch.setattr(recorded_verifier, "PASS", PassConfig(cache_block=8, tree_rows=12))
    monkeypatch.setattr(kv_buffer, "PASS", PassConfig(cache_block=8))
    placed = Placed(gpu)
    options: dict[str, Any] = {"max_new_tokens": 200, "do_sample": False}
    expected = placed.host.generate(ids(30), **options)
    captured = placed.accelerate(expected[0], "half")
    for _ in range(2):
        assert torch.equal(placed.generate(ids(30), **options), expected)
    assert 0 < captured.captures <= 8


def test_graphs_whose_memory_is_spent_leave_passes_eager(
    gpu: PretendCuda, with_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = iter(range(0, 10**6, 400))
    monkeypatch.setattr(packed_pass, "_gpu_bytes", lambda _device: next(held))
    monkeypatch.setattr(packed_pass, "PASS", PassConfig(graph_bytes=300))
    placed = Placed(gpu)
    expected = placed.host.generate(ids(30), max_new_tokens=30, do_sample=False)
    captured = placed.accelerate(expected[0])
    assert torch.equal(placed.generate(ids(30), max_new_tokens=30, do_sample=False), expected)
    report = placed.model.speculation.last
    assert captured.captures == 1 and report.ran["eager"] > 2 and "MiB" in report.eager_reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_a_recording_stays_on_its_models_device(family: str, dtype: torch.dtype) -> None:
    """Constants and intermediate results are made where the model is; `meta` is a device like any other to export."""
    recorded = RecordedPass(build(family, dtype).to("meta"), 2)
    run: Any = recorded._compiled.run
    values = [node.meta.get("val") for node in run.func.__self__.graph.nodes]
    tensors = [value for value in (*values, *run.args) if isinstance(value, torch.Tensor)]
    assert len(tensors) > 20
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_failed_capture_leaves_no_stream_behind(gpu: PretendCuda) -> None:
    before, capture = torch.cuda.current_stream(), CudaGraphCapture()
    ones = torch.ones(3, device="cuda")
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        if len(calls) == 2:  # behind the trial
            ones.sum().item()

    with pytest.raises(CudaError, match="while a graph is captured"):
        capture(run)
    assert torch.cuda.current_stream() is before


def test_a_pass_buffer_waits_for_its_last_copy(gpu: PretendCuda) -> None:
    """Passes that nobody waits for follow each other; what one copies is not overwritten by the next."""
    with torch.cuda.device("cuda:1"):
        fields = DeviceFields({"ids": 4}, torch.device("cuda", 1))
        for token in (5, 6, 7):
            fields.writable()["ids"][:] = token
            fields.send()
            assert fields.device["ids"][0].host == token
        gpu.wait("test")
    assert gpu.uploads == {"pinned": 3}


def captured(run: Callable[[], None]) -> Callable[[], None]:
    return CudaGraphCapture()(run)


def overwrite() -> None:
    host = torch.zeros(3, pin_memory=True)
    torch.ones(3, device="cuda").copy_(host, non_blocking=True)
    host.add_(1)
    torch.cuda.synchronize()


WRONG: dict[str, Callable[[], Any]] = {
    "mixed": lambda: torch.ones(3, device="cuda") + torch.ones(3),
    "indexed from the host": lambda: torch.ones(3, device="cuda")[torch.tensor([1])],
    "two GPUs": lambda: torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1"),
    "read in a capture": lambda: captured(lambda: bool(torch.ones(3, device="cuda").any())),
    "sized in a capture": lambda: captured(lambda: torch.ones(3, device="cuda").nonzero()),
    "copied in a capture": lambda: captured(lambda: torch.tensor([1.0], device="cuda")),
    "computed on the host in a capture": lambda: captured(lambda: torch.zeros(3).add_(1)),
    "captured on another GPU": lambda: captured(lambda: torch.ones(3, device="cuda:1").add_(1)),
    "overwritten under a copy": overwrite,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_gpu_would_refuse_fails(gpu: PretendCuda, name: str) -> None:
    with pytest.raises(CudaError):
        WRONG[name]()


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9}, {"top_p": 0.9}])
def test_a_replayed_step_launches_nothing_but_its_choice(
    gpu: PretendCuda, with_triton: None, sampled: dict[str, float]
) -> None:
    placed = Placed(gpu)
    rules = {"do_sample": True, "seed": 3, **sampled} if sampled else {"do_sample": False}
    answer = placed.host.generate(ids(30), max_new_tokens=40, do_sample=False)
    placed.accelerate(answer[0])
    for _ in range(2):
        placed.generate(ids(30), max_new_tokens=40, **rules)
    replayed = [ran for *_, ran in placed.steps() if "aten.mm.default" not in ran]  # those of a capture run it
    choice = {"pretended.pack_largest.default": 1} | ({"pretended.draw.default": 1} if sampled else {})
    assert len(replayed) > 8 and all(ran == choice for ran in replayed)


def test_a_step_makes_and_copies_as_much_behind_any_context(gpu: PretendCuda, with_triton: None) -> None:
    placed, usual = Placed(gpu), []
    for length in (50, 1900):
        answer = placed.host.generate(ids(length), max_new_tokens=40, do_sample=False)
        placed.accelerate(answer[0])
        assert torch.equal(placed.generate(ids(length), max_new_tokens=40, do_sample=False), answer)
        usual.append(np.median(np.diff(placed.numbers)[-12:]))  # behind those that read the prompt and capture
    assert usual[0] == usual[1] < 1900


@pytest.mark.parametrize(
    ("texts", "sampled"),
    [(4, {}), (4, {"top_p": 0.9, "repetition_penalty": 1.1}), (1, {"temperature": 0.9})],
)
def test_so_does_a_step_of_several_texts_however_they_are_sampled(
    gpu: PretendCuda, with_triton: None, texts: int, sampled: dict[str, float]
) -> None:
    placed, usual = Placed(gpu), []
    graphs, numbers = PassGraphs(placed.recorded), list[int]()
    placed.prepare()
    interface = read_interface(placed.model)
    placed.model.speculation._make_verifier = lambda: RecordedVerifier(
        placed.model, HFVerifier(placed.model, interface), placed.recorded, graphs
    )
    run = PassGraphs.run

    def noted(*given: Any) -> Any:
        numbers.append(gpu.numbers)
        return run(*given)

    rules = {"do_sample": True, "seed": 3, **sampled} if sampled else {"do_sample": False}
    with mock.patch.object(PassGraphs, "run", noted):
        for length in (50, 1000):
            numbers.clear()
            prompts = torch.stack([ids(length)[0].roll(text) for text in range(texts)])
            placed.generate(prompts, max_new_tokens=20, draft="off", **rules)
            usual.append(np.median(np.diff(numbers)[-8:]))
    assert usual[0] == usual[1]
