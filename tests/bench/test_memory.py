"""Peaks of memory whose true value follows from the sizes of a few blocks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampwise.bench.memory import peak_on_cpu

MB = 2**20


def block(mb: int) -> Tensor:
    return torch.empty(mb * MB, dtype=torch.uint8)


def made_outside(kept: list[Tensor]) -> None:
    kept.append(block(30))


def made_in_an_earlier_record(kept: list[Tensor]) -> None:
    peak_on_cpu(lambda: kept.append(block(30)))


@pytest.mark.parametrize("make", [made_outside, made_in_an_earlier_record])
@pytest.mark.parametrize("then", [20, 40])
def test_a_block_from_before_counts_neither_alive_nor_freed(
    make: Callable[[list[Tensor]], None], then: int
) -> None:
    kept: list[Tensor] = []
    make(kept)

    def free_30_then_allocate() -> Tensor:
        kept.clear()
        return block(then)

    assert peak_on_cpu(free_30_then_allocate) == then * MB


def test_a_peak_is_of_what_lives_at_one_time() -> None:
    def run() -> None:
        first = block(5)
        second = block(10)  # 15
        del first
        third = block(8)  # 18
        del second, third
        block(12)

    assert peak_on_cpu(run) == 18 * MB


def test_the_same_run_again_has_the_same_peak() -> None:
    """Its gradient of 1 MB replaces that of the run before, as in a loop."""
    weight = torch.zeros(MB // 4, requires_grad=True)  # 1 MB

    def run() -> None:
        weight.grad = None
        (weight * 2).sum().backward()

    assert peak_on_cpu(run) == peak_on_cpu(run) >= MB


def test_an_address_used_again_after_a_free_that_nobody_saw() -> None:
    """A block of an earlier record, freed outside of any, leaves its size behind in the profiler."""
    kept: list[Tensor] = []
    made_in_an_earlier_record(kept)
    kept.clear()
    again = [block(30)]  # as a rule at the same address

    def run() -> Tensor:
        again.clear()
        return block(7)

    assert peak_on_cpu(run) == 7 * MB
