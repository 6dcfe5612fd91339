"""Batches on a pretended GPU: the tokens of plain `generate`, one launch for all rows, graphs that serve any slabs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from placed_models import Placed
from pretend_cuda import PretendCuda
from small_decoders import ids

from retrieve_spec.config import PassConfig
from retrieve_spec.recorded import kv_buffer, packed_pass, recorded_verifier
from retrieve_spec.recorded.kv_buffer import Slab
from retrieve_spec.recorded.packed_pass import PassGraphs
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import read_interface


class Together:
    """Left-padded rows of a model on the pretended GPU, and what plain `generate` says to them."""

    def __init__(self, gpu: PretendCuda, family: str = "llama", index: int = 0, new_tokens: int = 24) -> None:
        self.placed = Placed(gpu, family, index)
        longest = ids(30)[0]
        rows = [longest, longest.flip(0)[:23], longest[3:10]]
        prompt = torch.stack([torch.cat([torch.zeros(30 - len(row), dtype=torch.long), row]) for row in rows])
        mask = (prompt != 0).long()
        self.options = {"max_new_tokens": new_tokens, "do_sample": False}
        free = self.placed.host.generate(prompt, attention_mask=mask, **self.options)
        ends = {int(free[0, 30 + 17]), int(free[2, 30 + 10])}
        self.options["eos_token_id"] = sorted(ends)  # rows end at different times
        self.expected = self.placed.host.generate(prompt, attention_mask=mask, **self.options)
        wrong = torch.arange(new_tokens) % 5 == 4
        self.answers = [torch.where(wrong, 7, row[30:]).tolist() for row in free]
        self.prompt, self.mask = prompt, mask.to(self.placed.device)
        self.graphs = PassGraphs(self.placed.recorded)

    def accelerate(self, graphs: bool, nodes: int = 12) -> None:
        model, recorded, captured = self.placed.model, self.placed.recorded, self.graphs if graphs else None
        self.placed.prepare(nodes=nodes)
        interface = read_interface(model)
        model.speculation._make_verifier = lambda: RecordedVerifier(
            model, HFVerifier(model, interface), recorded, captured
        )

    def generate(self) -> torch.Tensor:
        return self.placed.generate(self.prompt, attention_mask=self.mask, prediction=self.answers, **self.options)


@pytest.mark.parametrize(("family", "index"), [("llama", 1), ("gemma3_text", 0), ("gpt_oss", 0)])
def test_rows_of_a_batch_attend_in_one_launch(
    gpu: PretendCuda, with_triton: None, family: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch per layer serves all rows, whose slabs move as they grow, under captured passes, too."""
    monkeypatch.setattr(recorded_verifier, "PASS", PassConfig(cache_block=1, tree_rows=12))
    monkeypatch.setattr(kv_buffer, "PASS", PassConfig(cache_block=1))
    grown: list[bool] = []
    make_room = Slab.make_room
    monkeypatch.setattr(Slab, "make_room", lambda *given: grown.append(not Slab.fits(*given)) or make_room(*given))
    rows = Together(gpu, family, index)
    assert not packed_pass.why_not_triton("cuda")
    captures = []
    for graphs in (False, True, True):
        rows.accelerate(graphs)
        gpu.launches.clear()
        grown.clear()
        assert torch.equal(rows.generate(), rows.expected)
        report = rows.placed.model.speculation.last
        assert report.rows == 3 and report.tokens_per_pass > 3 and report.passes > 2
        assert any(grown)
        if not graphs:
            assert gpu.launches["attention"] == 2 * report.passes, "the prompts' included"
            continue
        assert not report.eager_reason and set(report.ran) <= {"captured", "replayed"}, "prompts and tails included"
        captures.append(rows.graphs.captures)
    assert 0 < captures[0] <= 12, "few graphs serve texts that end at different times"
    assert captures[1] == captures[0], "a second batch, whose slabs are elsewhere, replays"


def test_exact_passes_have_one_shape(gpu: PretendCuda, with_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and shares of a context do not follow a pass's rows, of which there are 64 at most but for prompts."""
    rows = Together(gpu)
    monkeypatch.setattr(rows.placed.recorded, "exact", 1)
    rows.accelerate(graphs=True, nodes=40)
    assert torch.equal(rows.generate(), rows.expected)
    shapes = list(rows.graphs._made)
    assert len({(shape.block, shape.splits) for shape in shapes if shape.exact}) == 1
    assert all(shape.exact == (shape.rows <= packed_pass.EXACT_ROWS) for shape in shapes)
    assert sum(shape.exact for shape in shapes) > 2 and max(shape.rows for shape in shapes) == 64


def test_batches_go_on_where_kernels_or_captures_fail(
    gpu: PretendCuda, with_triton: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Together(gpu)
    tried: list[int] = []

    def refused(run: Callable[[], None]) -> Callable[[], None]:
        tried.append(1)
        run()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    rows.graphs = PassGraphs(rows.placed.recorded, refused)
    rows.accelerate(graphs=True)
    for _ in range(2):
        assert torch.equal(rows.generate(), rows.expected)
    assert len(tried) == 1 and "not permitted" in caplog.text
    module = sys.modules["retrieve_spec.kernels.triton_tree_attention"]
    monkeypatch.setattr(module, "packed_tree_attention", refused)
    packed_pass.why_not_triton.cache_clear()
    gpu.launches.clear()
    assert torch.equal(rows.generate(), rows.expected)
    assert not gpu.launches["attention"]
    assert "passes attend without Triton's kernels" in caplog.text


def test_a_batch_copies_its_inputs_at_once(gpu: PretendCuda, with_triton: None) -> None:
    """However many rows there are, a pass is described in one copy that nobody waits for."""
    rows = Together(gpu)
    rows.accelerate(graphs=True)
    rows.generate()
    filled: list[Counter[str]] = []
    run = PassGraphs.run

    def counted(self: Any, laid: Any, wanted: Any) -> Any:
        began, waited, captures = Counter(gpu.uploads), Counter(gpu.waits), self.captures
        out = run(self, laid, wanted)
        if captures == self.captures:
            filled.append(gpu.uploads - began)
            assert gpu.waits == waited
        return out

    with mock.patch.object(PassGraphs, "run", counted):
        assert torch.equal(rows.generate(), rows.expected)
    assert len(filled) > 2
    assert all(uploads == {"pinned": 1} for uploads in filled)
