"""Answers of earlier calls and of siblings are drafted for samples of their own prompt; no text changes."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import left_padded

import retrieve_spec as rs

OPTIONS: dict[str, Any] = {"do_sample": True, "seed": 4, "max_new_tokens": 24}


def prompts() -> torch.Tensor:
    return torch.tensor([[3 + (i * 37 + 11 * row + 7) % 190 for i in range(8)] for row in range(2)])


def kept(memory: rs.RolloutMemory, prompt: torch.Tensor) -> list[list[int]]:
    return [answer.tolist() for answer in memory.answers_to(prompt.numpy().astype(np.int32))]


def test_the_same_again_takes_few_passes(tiny: Any) -> None:
    """What was answered once is drafted from the first token on, for single rows too, and for its own prompt alone."""
    rs.accelerate(tiny, recorded_pass="off", nodes=32, rollouts=rs.RolloutMemory())
    one, other = prompts()[:1], prompts()[1:]
    first = tiny.generate(one, **OPTIONS)
    passes = tiny.speculation.last.passes
    assert torch.equal(tiny.generate(one, **OPTIONS), first)
    assert tiny.speculation.last.passes <= 3 < passes
    assert tiny.speculation.last.accepted_by_source["session"] > 15
    rs.accelerate(tiny, recorded_pass="off", nodes=32, rollouts=rs.RolloutMemory())
    tiny.generate(other, **OPTIONS)
    assert torch.equal(tiny.generate(one, **OPTIONS), first)
    assert tiny.speculation.last.passes > 3  # calibration has learned from the other prompt
    assert "session" not in tiny.speculation.last.accepted_by_source
    (done,) = rs.generate_many(tiny, [one[0]], **OPTIONS)
    assert done.token_ids.tolist() == first[0, 8:].tolist()
    assert done.outputs[0].report.passes <= 3


def test_padding_is_no_part_of_a_prompt(tiny: Any) -> None:
    memory = rs.RolloutMemory()
    rs.accelerate(tiny, recorded_pass="off", nodes=8, rollouts=memory)
    batch = left_padded((5, 9))
    tiny.generate(**batch, **OPTIONS | {"pad_token_id": 0})
    short = batch["input_ids"][0, -5:]
    assert len(kept(memory, short)) == 1
    tiny.generate(batch["input_ids"][:1], attention_mask=batch["attention_mask"][:1], **OPTIONS | {"pad_token_id": 0})
    tiny.generate(short[None], **OPTIONS)
    assert len(memory) == 2


def test_weights_that_change(tiny: Any) -> None:
    """Answers of other weights stay, are drafted, and change no text."""
    model, memory = copy.deepcopy(tiny), rs.RolloutMemory()
    rs.accelerate(model, recorded_pass="always", nodes=16, rollouts=memory)
    old = model.generate(prompts(), **OPTIONS)
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    new = model.generate(prompts(), **OPTIONS)
    assert model.speculation.last.nodes > 0
    assert torch.equal(model.generate(prompts(), **OPTIONS, draft="off"), new)
    assert kept(memory, prompts()[0]) == [old[0, 8:].tolist(), new[0, 8:].tolist()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_rows_that_are_done_are_kept(tiny: Any, error: type[BaseException]) -> None:
    """One row ends at its end-of-text token; a processor's exception ends the other in the middle."""
    one, other = prompts()
    rs.accelerate(tiny, recorded_pass="off", nodes=8)
    free = tiny.generate(one[None], **OPTIONS)
    end = int(free[0, 8 + 3])
    memory = rs.RolloutMemory()
    rs.accelerate(tiny, recorded_pass="off", nodes=8, rollouts=memory)

    def fails(shown: Any) -> None:
        if len(kept(memory, one)):
            raise error("in the middle")

    requests = [{"inputs": one, "eos_token_id": end}, {"inputs": other, "on_pass": fails}]
    with contextlib.suppress(KeyboardInterrupt):
        done = list(rs.generate_many(tiny, requests, **OPTIONS))
        assert error is ValueError and isinstance(done[1].error, error)
    (answer,) = kept(memory, one)
    assert answer[-1] == end
    assert kept(memory, other) == []
    assert torch.equal(tiny.generate(one[None], **OPTIONS), free)


def test_answers_outlive_the_process_and_are_forgotten_on_demand(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.bin"
    with rs.RolloutMemory(path) as memory:
        rs.accelerate(tiny, recorded_pass="off", nodes=32, rollouts=memory)
        first = tiny.generate(prompts()[:1], **OPTIONS)
    rs.accelerate(tiny, recorded_pass="off", nodes=32, rollouts=rs.RolloutMemory(path))
    assert torch.equal(tiny.generate(prompts()[:1], **OPTIONS), first)
    assert tiny.speculation.last.passes <= 3
    tiny.speculation.forget()
    assert len(rs.RolloutMemory(path)) == 0
    assert torch.equal(tiny.generate(prompts()[:1], **OPTIONS), first)
    assert tiny.speculation.last.passes > 3


def test_what_one_wrote_the_next_drafts(tiny: Any) -> None:
    """Samples that say nearly the same, one after another."""
    rs.accelerate(tiny, recorded_pass="always", nodes=32)
    options = OPTIONS | {"temperature": 0.001, "num_return_sequences": 4, "max_new_tokens": 60}
    (shared,) = rs.generate_many(tiny, [prompts()[0]], rows=1, **options)
    (apart,) = rs.generate_many(tiny, [prompts()[0]], rows=1, **options, siblings="off")
    for ours, theirs in zip(shared.outputs, apart.outputs, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    later = [sum(output.report.passes for output in one.outputs[1:]) for one in (shared, apart)]
    assert later[0] == 3 * 3 < later[1], "60 tokens are the prompt's pass and two with 32 nodes"


def test_beside_a_session(tiny: Any) -> None:
    """The session is drafted from as well, and remembers every sample once, at its end."""
    rs.accelerate(tiny, recorded_pass="always", nodes=32, session=True)  # whatever passes cost
    session = tiny.speculation.drafter().session
    rows = tiny.generate(prompts()[:1], **OPTIONS, num_return_sequences=3)
    assert tiny.speculation.drafter().session is session
    assert sorted(text.tolist() for text in session.texts) == sorted(rows[:, 8:].tolist())
    again = tiny.generate(prompts()[:1], **OPTIONS, num_return_sequences=3)
    assert torch.equal(again, rows)
    assert tiny.speculation.last.accepted_by_source.get("session", 0) > 20
