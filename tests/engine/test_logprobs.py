"""Log-probabilities of emitted tokens are those of kept scores and of a forward, whatever was drafted, by any door."""

from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import left_padded, script

import retrieve_spec as rs

LENGTHS = (5, 17, 11)
DICT: dict[str, Any] = {"return_dict_in_generate": True, "return_logprobs": True}
KEPT = {"output_scores": True, "output_logits": True}
RULES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [0]},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 0, "temperature": 0.7},
    {"do_sample": True, "top_k": 20, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
]


def check(out: Any, kept: Any, ended: torch.Tensor) -> None:
    """Both kinds in an output are those of the scores and logits that another one kept; 0 where rows have ended."""
    new = out.sequences[:, -len(kept.scores) :]
    for got, steps in ((out.logprobs, kept.scores), (out.raw_logprobs, kept.logits)):
        wanted = torch.stack(steps, dim=1).log_softmax(-1).gather(2, new[..., None])[..., 0]
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted.masked_fill(ended, 0.0), atol=1e-5, rtol=0.0)


def behind_the_end(new: torch.Tensor, end: int) -> torch.Tensor:
    """(rows, new) bool: behind the first end-of-text token."""
    ends = (new == end).long()
    return ends.cumsum(1) - ends > 0


@pytest.mark.parametrize(
    ("rules", "recorded_pass"),
    [*((rules, "off") for rules in RULES), (RULES[0], "always"), (RULES[-1], "always")],
)
def test_kept_scores_say_the_same(
    tiny: Any, rules: dict[str, Any], recorded_pass: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows that end at different times, drafted in trees and not at all; `test_outputs` looks at the scores."""
    inputs = left_padded(LENGTHS)
    options = {**rules, "max_new_tokens": 12, "seed": 3, "pad_token_id": 0}
    rs.accelerate(tiny, recorded_pass="off", draft="off")
    free = tiny.generate(**inputs, **options, eos_token_id=None)
    options["eos_token_id"] = end = int(free[0, 17 + 5])
    kept = tiny.generate(**inputs, **options, **DICT, **KEPT)
    undrafted = tiny.generate(**inputs, **options, **DICT)
    script(tiny, monkeypatch, free, "branchy", recorded_pass=recorded_pass)
    drafted = tiny.generate(**inputs, **options, **DICT)
    assert tiny.speculation.last.mode == "tree" and tiny.speculation.last.tokens_per_pass > 1.5
    assert torch.equal(drafted.sequences, undrafted.sequences) and torch.equal(drafted.sequences, kept.sequences)
    ended = behind_the_end(drafted.sequences[:, 17:], end)
    assert ended.any()
    for out in (drafted, undrafted, kept):
        check(out, kept, ended)


def test_every_door_says_the_same(tiny: Any, prompt: torch.Tensor) -> None:
    """Samples, requests and streams say what a forward over the text says."""
    rs.accelerate(tiny, nodes=8, recorded_pass="off")
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5, "max_new_tokens": 10}
    samples = tiny.generate(prompt, **options, num_return_sequences=3, **DICT)
    with torch.no_grad():
        logits = tiny(samples.sequences).logits[:, 11:-1]
    for got, scores in ((samples.logprobs, logits / 0.8), (samples.raw_logprobs, logits)):
        wanted = scores.log_softmax(-1).gather(2, samples.sequences[:, 12:, None])[..., 0]
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
    inputs = left_padded(LENGTHS)
    rs.accelerate(tiny, recorded_pass="off")
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "pad_token_id": 0, "seed": 1}
    options["logits_processor"] = [lambda input_ids, scores: scores / 2]
    free = tiny.generate(**inputs, **options, eos_token_id=None)
    options |= DICT | {"eos_token_id": int(free[0, 17 + 2])}
    out = tiny.generate(**inputs, **options)
    assert tiny.speculation.last.mode == "delegated"
    assert out.scores is None and out.logits is None
    ended = behind_the_end(out.sequences[:, 17:], options["eos_token_id"])
    assert ended[0, 3:].all() and not ended[0, :3].any()
    check(out, tiny.generate(**inputs, **options, **KEPT), ended)
