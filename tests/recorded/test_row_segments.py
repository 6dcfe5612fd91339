"""Row segments: what of a recorded pass programs take up, and what they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_decoders import VOCAB, build, ids

from retrieve_spec.kernels.cpu import layer_rows
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN, RowTexts
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.recorded_pass import RecordedPass

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="nothing is compiled")
EVERY = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def recorded(dtype: torch.dtype, **extra: Any) -> tuple[Any, RecordedPass]:
    model = build("llama", dtype, **{"hidden_size": 64, "intermediate_size": 96} | extra)
    return model, RecordedPass(model, 2, "last", layer_rows)


def logits_of(run: RecordedPass, tokens: torch.Tensor) -> torch.Tensor:
    buffer, rows = KVBuffer([0, 0], 64), tokens.shape[1]
    buffer.restart(run.no_states())
    places = np.column_stack([buffer.addresses, np.zeros(2, np.int64)])
    texts = RowTexts([rows], [np.tri(rows, dtype=np.bool_)], [np.arange(rows)], [places])
    return run.run(tokens, torch.arange(rows)[None], texts)[0][0]


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
