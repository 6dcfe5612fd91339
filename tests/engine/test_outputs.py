"""What batches hand back, as plain `generate` does: scores and logits; what a streamer hears; any padding."""

from typing import Any

import pytest
import torch
from batch_rows import KINDS, left_padded, script, small_model
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs

LENGTHS = (5, 17, 11)


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
@pytest.mark.parametrize(("model_type", "extra"), KINDS)
def test_greedy_batches(
    model_type: str, extra: dict[str, Any], recorded_pass: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts; rows that end at different times, and are padded on the left, on the right, on both sides, inside.

    These are odd prompts, but plain `generate` has an answer to them.
    """
    model, inputs = small_model(model_type, **extra), left_padded((17, 17, 12, 17, 9))
    mask = inputs["attention_mask"]
    mask[0, 12:], mask[2, -2:], mask[3, 4:7] = 0, 0, 0
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True, "repetition_penalty": 1.1}
    free = model.generate(**inputs, **options).sequences
    options["eos_token_id"] = end = int(free[0, 17 + 6])
    plain = model.generate(**inputs, **options)
    script(model, monkeypatch, free, "branchy", recorded_pass=recorded_pass)
    ours = model.generate(**inputs, **options)
    report = model.speculation.last
    assert (report.mode, report.rows) == ("tree", 5) and report.tokens_per_pass > 2
    assert torch.equal(ours.sequences, plain.sequences)
    ended = (plain.sequences[:, 17:] == end).long()
    shown = (ended.cumsum(1) - ended == 0).T  # (steps, rows)
    assert not shown[-1].all() and shown[-1].any()
    for got, wanted in ((ours.scores, plain.scores), (ours.logits, plain.logits)):
        expected = torch.stack(wanted).where(shown[..., None], 0.0)
        torch.testing.assert_close(torch.stack(got), expected, atol=1e-4, rtol=1e-4)
    assert ours.past_key_values is None


class Steps:
    """A streamer of any number of rows."""

    def __init__(self, fail_at: int = -1) -> None:
        self.heard: list[Any] = []
        self._fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.heard) == self._fail_at:
            raise RuntimeError("the reader went away")
        self.heard.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.heard.append("end")


def test_streamers_hear_what_plain_decoding_tells_them(tiny: Any) -> None:
    inputs = left_padded(LENGTHS)
    row = {name: given[1:2] for name, given in inputs.items()}
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    plain, ours, failing, several, again = Steps(), Steps(), Steps(fail_at=3), Steps(), Steps()
    wanted = tiny.generate(**row, **options, streamer=plain)
    tiny.generate(**inputs, **options, streamer=several)
    rs.accelerate(tiny, drafter=ScriptedDrafter(wanted[0], "half"), nodes=12, recorded_pass="off")
    assert torch.equal(tiny.generate(**row, **options, streamer=ours), wanted)
    assert tiny.speculation.last.tokens_per_pass > 2
    assert ours.heard == plain.heard
    with pytest.raises(RuntimeError, match="went away"):
        tiny.generate(**row, **options, streamer=failing)
    assert failing.heard == [*plain.heard[:3], "end"]
    tiny.generate(**inputs, **options, streamer=again)
    assert again.heard == several.heard and tiny.speculation.last.mode == "delegated"
