"""A short part of the hammer, the same sequences every time: `make hammer` goes on with others."""

from collections.abc import Iterator

import pytest
from hypothesis.stateful import run_state_machine_as_test
from machine import machine, sequences

FAMILIES = ["llama", "qwen2-sliding", "gemma3_text", "mixtral", "gpt2", "bloom", "olmo2", "phi3-longrope"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recorded", ["always", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls_say_what_plain_generate_says(family: str, recorded: str) -> None:
    run_state_machine_as_test(machine(family, recorded_pass=recorded), settings=sequences(2, 12, random=False))
