"""Intra-op threads of passes: only the pass sees another number, and what the user sets counts."""

import threading

import pytest
import torch

from retrieve_spec.engine.threads import PassThreads

pytestmark = pytest.mark.threads


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
