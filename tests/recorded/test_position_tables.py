"""Position tables: computed once for all texts, and again where what they are computed from has changed."""

import functools

import pytest
import torch

from retrieve_spec.recorded.position_tables import PositionTables


class Angles:
    """Tables of positions times frequencies."""

    def __init__(self) -> None:
        self.frequencies = torch.tensor([1.0, 0.5])
        self.times, self.fails = 0, False
        self.tables = PositionTables(functools.partial(self._compute, self.frequencies))

    def _compute(self, frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
        self.times += 1
        if self.fails:
            raise KeyboardInterrupt
        return (positions[:, None, :, None] * frequencies,)

    def of(self, *positions: int) -> torch.Tensor:
        numbers, table = self.tables.look_up(torch.tensor([positions]))
        return table[numbers[0]]


def test_passes_of_texts_far_apart_do_not_replace_each_others_tables() -> None:
    angles = Angles()
    for step in range(3):
        for first in (10, 7900):
            assert torch.equal(angles.of(first + step), torch.tensor([[1.0, 0.5]]) * (first + step))
    assert angles.times == 2


def test_after_an_interruption_angles_are_those_of_the_new_frequencies() -> None:
    angles = Angles()
    angles.of(4)
    angles.frequencies.mul_(2)
    angles.fails = True
    with pytest.raises(KeyboardInterrupt):
        angles.of(4)
    angles.fails = False
    assert angles.of(4).tolist() == [[8.0, 4.0]]
