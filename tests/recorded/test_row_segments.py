"""Row segments: what of a recorded pass programs take up, and what they leave alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from small_decoders import VOCAB, build, ids

from retrieve_spec.kernels.cpu import layer_rows, row_programs
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN, RowTexts
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.recorded_pass import ALL, RecordedPass

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="nothing is compiled")
EVERY = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def recorded(dtype: torch.dtype, **extra: Any) -> tuple[Any, RecordedPass]:
    model = build("llama", dtype, **{"hidden_size": 64, "intermediate_size": 96} | extra)
    return model, RecordedPass(model, 2, "last", layer_rows)


def logits_of(run: RecordedPass, tokens: torch.Tensor, first: int = 0, wanted: Any = ALL) -> torch.Tensor:
    buffer, rows = KVBuffer([0, 0], 64), tokens.shape[1]
    buffer.restart(run.no_states())
    places = np.column_stack([buffer.addresses, np.zeros(2, np.int64)])
    texts = RowTexts([rows], [np.tri(rows, dtype=np.bool_)], [np.arange(rows)], [places])
    return run.run(tokens, first + torch.arange(rows)[None], texts, wanted)[0][0]


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        *((torch.float32, head_dim) for head_dim in (8, 16, 80)),
        *((torch.bfloat16, head_dim) for head_dim in (16, 32, 48, 64)),
        *((torch.float16, head_dim) for head_dim in (48, 64)),
    ],
)
def test_heads_of_other_widths_than_vectors_have_are_left_alone(dtype: torch.dtype, head_dim: int) -> None:
    model, run = recorded(dtype, head_dim=head_dim)
    assert run.attends_rows == (head_dim * dtype.itemsize % 64 == 0)
    if run.attends_rows:
        wanted, got = model(ids(20)).logits[0].float(), logits_of(run, ids(20)).float()
        assert (
            got.shape == (20, VOCAB)
            and (got - wanted).norm() < (1e-5 if dtype == torch.float32 else 0.03) * wanted.norm()
        )


@EVERY
def test_exact_passes_are_programs_where_all_products_are(dtype: torch.dtype) -> None:
    for vocab in (VOCAB, 208):
        model = build("llama", dtype, hidden_size=64, intermediate_size=96, head_dim=32, vocab_size=vocab)
        assert RecordedPass(model, 2, "last", layer_rows, exact=8).attends_rows
    model = build("llama", dtype, hidden_size=64, intermediate_size=104, head_dim=32)
    assert RecordedPass(model, 2, "last", layer_rows).attends_rows
    assert not RecordedPass(model, 2, "last", layer_rows, exact=8).attends_rows


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_all_attention_but_that_with_sinks_is_part_of_programs(family: str) -> None:
    model = build(family, hidden_size=64, intermediate_size=96, head_dim=32)
    assert RecordedPass(model, 2, "last", layer_rows).attends_rows == (family != "gpt_oss")


@EVERY
def test_a_pass_from_token_ids_to_logits_is_one_program(dtype: torch.dtype) -> None:
    _, run = recorded(dtype, head_dim=32, vocab_size=208)
    with mock.patch.object(row_programs, "run_in_threads", wraps=row_programs.run_in_threads) as runs:
        every = logits_of(run, ids(20))
    assert runs.call_count == 1
    assert torch.equal(logits_of(run, ids(20), wanted=torch.tensor([19, 4])), every[[19, 4]])
    assert torch.equal(logits_of(run, ids(20), wanted=slice(18, None)), every[18:])


def test_rotary_angles_are_those_of_any_positions_and_of_the_frequencies_as_they_are() -> None:
    model, run = recorded(torch.float32, head_dim=32)
    for first in (0, 4000, 3, 1500, -7):
        wanted = model(ids(20), position_ids=first + torch.arange(20)[None]).logits[0]
        torch.testing.assert_close(logits_of(run, ids(20), first), wanted, rtol=1e-4, atol=1e-5)
        model.model.rotary_emb.inv_freq.data.mul_(0.9)


def test_angles_that_depend_on_the_highest_position_of_a_pass_are_computed_in_it(monkeypatch: Any) -> None:
    """As where a model takes other frequencies for long texts."""
    model = build("llama", hidden_size=64, intermediate_size=96, head_dim=32)
    own = model.model.rotary_emb.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factor = 1 + (position_ids.max() > 60).to(x.dtype)
        return tuple(part * factor for part in own(x, position_ids))

    monkeypatch.setattr(model.model.rotary_emb, "forward", forward)
    run = RecordedPass(model, 2, "last", layer_rows)
    for first in (0, 50):
        wanted = model(ids(20), position_ids=first + torch.arange(20)[None]).logits[0]
        torch.testing.assert_close(logits_of(run, ids(20), first), wanted, rtol=1e-4, atol=1e-5)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    _, run = recorded(torch.float32, head_dim=32)
    for token in (-1, VOCAB):
        with pytest.raises(IndexError, match=f"from 0 to {VOCAB - 1}, got {token}"):
            logits_of(run, torch.tensor([[5, token, 7]]))
