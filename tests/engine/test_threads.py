"""Intra-op threads of passes: only the pass sees another number, and what the user sets counts."""

import threading

import numpy as np
import pytest
import torch

from retrieve_spec.engine.budget import PassThreads

pytestmark = pytest.mark.threads


class Machine:
    """Times of passes by number of threads; `busy` cores are taken by other programs."""

    def __init__(self, cores: int, seed: int = 0, waiting: float = 4.0) -> None:
        self.cores, self.busy, self.random = cores, 0, np.random.default_rng(seed)
        self.waiting = waiting

    def seconds(self, threads: int, width: int) -> float:
        alone = 1.0 + 0.02 * width
        time = alone * (0.3 + 0.7 / threads)
        if threads > self.cores - self.busy:
            time *= self.waiting  # every region waits for a taken core
        return time * float(np.exp(0.1 * self.random.normal()))


def run(machine: Machine, threads: PassThreads, passes: int) -> list[int]:
    """Numbers of threads used; the expected time follows what passes took, as a cost model does."""
    used, level = [], 1.0
    for _ in range(passes):
        width = int(machine.random.integers(0, 64))
        seconds, comparing = machine.seconds(threads.next, width), threads.comparing
        used.append(threads.next)
        threads.observe(seconds, level * (1.0 + 0.02 * width))
        if not comparing:
            level *= (seconds / (level * (1.0 + 0.02 * width))) ** 0.3
    return used


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_gets_busy_and_idle_again_is_followed(seed):
    machine, threads = Machine(2, seed), PassThreads(2)
    run(machine, threads, 600)
    machine.busy = 1
    assert run(machine, threads, 60)[-1] == 1  # noticed within passes, not at the next comparison
    machine.busy = 0
    run(machine, threads, 1200)
    assert threads.chosen == 2


def test_only_the_pass_and_only_its_thread_see_another_number():
    threads = PassThreads.of_torch()
    if threads is None:
        pytest.skip("torch does not compute with libgomp here")
    before = torch.get_num_threads()
    threads.most = before
    threads.chosen = before + 3
    seen = []
    with threads.used():
        assert torch.get_num_threads() == before + 3
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [before]
    assert torch.get_num_threads() == before
    with threads.used(spare=1):
        assert torch.get_num_threads() == before + 2
    with pytest.raises(KeyboardInterrupt), threads.used():
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before


def test_a_setting_that_the_user_changes_counts():
    calls = []
    threads = PassThreads(torch.get_num_threads() + 1, calls.append, torch.get_num_threads)
    threads.chosen = 1
    with threads.used():
        pass
    assert (threads.most, threads.chosen, calls) == (torch.get_num_threads(), torch.get_num_threads(), [])
