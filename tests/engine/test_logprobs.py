"""Log-probabilities of emitted tokens are those of a separate forward, whatever was drafted and by any door."""

from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import left_padded, script
from transformers.generation import LogitsProcessor, LogitsProcessorList

import retrieve_spec as rs

LENGTHS = (5, 17, 11)
DICT: dict[str, Any] = {"return_dict_in_generate": True, "return_logprobs": True}
RULES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [0]},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 0, "temperature": 0.7},
    {"do_sample": True, "top_k": 20, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
]


def separate(model: Any, inputs: Any, sequences: Any, rules: dict[str, Any]) -> tuple[Any, Any]:
    """(rows, new) of both kinds by one forward per row over the finished text, and transformers' own processors."""
    length = inputs["input_ids"].shape[1]
    processed, raw = torch.zeros((2, len(sequences), sequences.shape[1] - length))
    given = {**rules, "max_new_tokens": 1}
    taken: list[Any] = []

    def take(_model: Any, ids: Any, logits_processor: Any, **_: Any) -> Any:
        taken.append(logits_processor)
        return ids

    rs.restore(model)
    for row, text in enumerate(sequences):
        padding = int((inputs["attention_mask"][row] == 0).sum())
        prompt = inputs["input_ids"][row : row + 1]
        model.generate(prompt, attention_mask=torch.ones_like(prompt), custom_generate=take, **given)
        with torch.no_grad():
            logits = model(text[None, padding:]).logits[0, length - padding - 1 : -1]
        for step, one in enumerate(logits):
            at = length + step
            scores = taken[-1](text[None, :at], one[None].clone())
            processed[row, step] = scores.log_softmax(-1)[0, text[at]]
            raw[row, step] = one.log_softmax(-1)[text[at]]
    return processed, raw


@pytest.mark.parametrize(
    ("rules", "recorded_pass"),
    [*((rules, "off") for rules in RULES), (RULES[0], "always"), (RULES[-1], "always")],
)
def test_a_separate_forward_says_the_same(
    tiny: Any, rules: dict[str, Any], recorded_pass: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows that end at different times, drafted in trees and not at all."""
    inputs = {name: rows.clone() for name, rows in left_padded(LENGTHS).items()}
    if "repetition_penalty" in rules:
        inputs = {name: rows[1:2] for name, rows in inputs.items()}  # penalties see padding: one row is without
    options = {**rules, "max_new_tokens": 12, "seed": 3, "pad_token_id": 0}
    rs.accelerate(tiny, recorded_pass="off", draft="off")
    free = tiny.generate(**inputs, **options, eos_token_id=None)
    end = int(free[0, 17 + 5])
    options["eos_token_id"] = end
    undrafted = tiny.generate(**inputs, **options, **DICT)
    script(tiny, monkeypatch, free, "branchy", recorded_pass=recorded_pass)
    drafted = tiny.generate(**inputs, **options, **DICT)
    assert tiny.speculation.last.mode == "tree"
    assert tiny.speculation.last.tokens_per_pass > 1.5
    assert torch.equal(drafted.sequences, undrafted.sequences)
    wanted = separate(tiny, inputs, drafted.sequences, rules)
    new = drafted.sequences[:, 17:]
    ended = (new == end).long().cumsum(1) - (new == end).long() > 0
    assert ended.any() or len(new) == 1
    for out in (drafted, undrafted):
        for got, expected in zip((out.logprobs, out.raw_logprobs), wanted, strict=True):
            assert got.dtype == torch.float32
            assert got.shape == new.shape
            torch.testing.assert_close(got, expected.masked_fill(ended, 0.0), atol=1e-5, rtol=0.0)


def test_every_door_says_the_same(tiny: Any, prompt: torch.Tensor) -> None:
    """Samples, requests, streams, kept scores, and the original `generate`'s own scores."""
    rs.accelerate(tiny, nodes=8, recorded_pass="off")
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 5, "max_new_tokens": 10}
    samples = tiny.generate(prompt, **options, num_return_sequences=3, **DICT, output_scores=True, output_logits=True)
    for kept, got in ((samples.scores, samples.logprobs), (samples.logits, samples.raw_logprobs)):
        steps = torch.stack(kept, dim=1).log_softmax(-1)
        wanted = steps.gather(2, samples.sequences[:, 12:, None])[..., 0]
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0.0)
    (done,) = rs.generate_many(tiny, [prompt[0]], **options, num_return_sequences=3, return_logprobs=True)
    for row, output in enumerate(done.outputs):
        assert output.token_ids.tolist() == samples.sequences[row, 12:].tolist()
        np.testing.assert_allclose(output.logprobs, samples.logprobs[row], atol=1e-5)
        np.testing.assert_allclose(output.raw_logprobs, samples.raw_logprobs[row], atol=1e-5)
    pieces = list(rs.generate_stream(tiny, prompt, **options, return_logprobs=True))
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    np.testing.assert_allclose(np.concatenate([p.logprobs for p in pieces]), samples.logprobs[0], atol=1e-5)
    np.testing.assert_allclose(np.concatenate([p.raw_logprobs for p in pieces]), samples.raw_logprobs[0], atol=1e-5)
    assert next(rs.generate_stream(tiny, prompt, **options)).logprobs is None
    assert "logprobs" not in tiny.generate(prompt, **options, return_dict_in_generate=True)


def test_where_the_original_decodes(tiny: Any) -> None:
    """A custom processor of a batch, which only the original may call: its scores and logits are read."""

    class Halve(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores / 2

    inputs = left_padded(LENGTHS)
    rs.accelerate(tiny, recorded_pass="off")
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "pad_token_id": 0, "seed": 1}
    options["logits_processor"] = LogitsProcessorList([Halve()])
    free = tiny.generate(**inputs, **options, eos_token_id=None)
    options |= DICT | {"eos_token_id": int(free[0, 17 + 2])}
    out = tiny.generate(**inputs, **options)
    assert tiny.speculation.last.mode == "delegated"
    assert out.scores is None and out.logits is None
    kept = tiny.generate(**inputs, **options, output_scores=True, output_logits=True)
    new = out.sequences[:, 17:]
    ended = torch.isin(new, options["eos_token_id"]).cumsum(1) - torch.isin(new, options["eos_token_id"]).long() > 0
    assert ended[0, 3:].all() and not ended[0, :3].any()
    for got, steps in ((out.logprobs, kept.scores), (out.raw_logprobs, kept.logits)):
        wanted = torch.stack(steps, dim=1).log_softmax(-1).gather(2, new[..., None])[..., 0]
        torch.testing.assert_close(got, wanted.masked_fill(ended, 0.0), atol=1e-5, rtol=0.0)
