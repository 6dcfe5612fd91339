"""Intra-op threads of passes, on machines whose times are made up."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import retrieve_spec as rs
from retrieve_spec.engine.threads import PassThreads

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


@pytest.mark.parametrize("seed", range(8))
def test_an_idle_machine_uses_what_the_user_set(seed):
    threads = PassThreads(2)
    used = run(Machine(2, seed), threads, 2000)
    assert threads.chosen == 2
    assert used.count(1) <= 0.015 * len(used)


@pytest.mark.parametrize("seed", range(8))
def test_a_taken_core_is_not_waited_for(seed):
    machine, threads = Machine(2, seed), PassThreads(2)
    machine.busy = 1
    used = run(machine, threads, 400)
    assert threads.chosen == 1
    assert used[20:].count(2) <= 0.03 * len(used)


@pytest.mark.parametrize("seed", range(8))
def test_a_machine_that_gets_busy_and_idle_again_is_followed(seed):
    machine, threads = Machine(2, seed), PassThreads(2)
    run(machine, threads, 600)
    machine.busy = 1
    assert run(machine, threads, 60)[-1] == 1  # noticed within passes, not at the next comparison
    machine.busy = 0
    run(machine, threads, 1200)
    assert threads.chosen == 2


@pytest.mark.parametrize(("cores", "busy", "chosen"), [(2, 0, 2), (2, 1, 1), (16, 0, 16), (16, 9, 4), (1, 0, 1)])
def test_threads_are_chosen_before_the_first_pass_by_work_done_for_it(cores, busy, chosen, monkeypatch):
    machine, time, work = Machine(cores, waiting=20.0), [0.0], []
    machine.busy = busy
    setting = [cores]
    monkeypatch.setattr("torch.get_num_threads", lambda: setting[0])
    monkeypatch.setattr("retrieve_spec.engine.threads.perf_counter", lambda: time[0])

    def multiply() -> None:
        time[0] += machine.seconds(setting[0], 8)
        work.append(setting[0])

    threads = PassThreads(cores, lambda number: setting.__setitem__(0, number))
    threads.settle(multiply)
    assert (threads.chosen, threads.comparing, setting) == (chosen, False, [cores])
    assert len(work) <= 24


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
    with pytest.raises(KeyboardInterrupt), threads.used():
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before


def test_a_setting_that_the_user_changes_counts():
    calls = []
    threads = PassThreads(torch.get_num_threads() + 1, calls.append)
    threads.chosen = 1
    with threads.used():
        pass
    assert (threads.most, threads.chosen, calls) == (torch.get_num_threads(), torch.get_num_threads(), [])


def test_a_report_says_how_many_threads_passes_used(tiny, prompt):
    rs.accelerate(tiny, draft="off")
    tiny.generate(prompt, max_new_tokens=8, do_sample=False)
    chosen = tiny.speculation.engine.threads
    assert tiny.speculation.last.threads == (0 if chosen is None else chosen.chosen)
