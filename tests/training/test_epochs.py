"""Where a run is in its data: stopped anywhere, it goes on with the batches that were to come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ampwise import Task
from ampwise.distributed.launch import Launch
from ampwise.tasks.seeding import seed_all
from ampwise.training.epochs import Epochs, Position
from ampwise.training.random_state import random_state, seeded_state, set_random_state

from .small import task as small_task


def shuffled() -> Iterator[list[int]]:
    """Another order in each epoch."""
    yield from torch.randperm(7).reshape(7, 1).tolist()


def task() -> Task:
    return replace(small_task(), batches=shuffled)


def epochs(said: list[str] | None = None) -> Epochs:
    return Epochs(task(), Launch(), whole=False, say=[].append if said is None else said.append)


def pass_by(run: Epochs, count: int) -> list[int]:
    """Train on so many batches, an epoch after the other; forward draws random numbers, too."""
    seen: list[int] = []
    while len(seen) < count:
        for turn in run.rest():
            seen += turn.batch
            torch.rand(3)
            run.used(2)
            run.passed()
            if len(seen) == count:
                break
        else:
            run.end()
    return seen


@pytest.mark.parametrize("stop", [1, 6, 7, 9, 13, 14])
def test_a_stop_changes_nothing_about_what_comes(stop):
    seed_all(1)
    whole, after = pass_by(epochs(), 21), torch.rand(4)
    seed_all(1)
    first = epochs()
    seen = pass_by(first, stop)
    position, rng = Position(**vars(first.position)), random_state()
    seed_all(2)  # another process
    again = epochs()
    set_random_state(rng)
    again.resume(position, rng)
    assert seen + pass_by(again, 21 - stop) == whole
    assert torch.equal(torch.rand(4), after)


def test_samples_belong_to_the_epoch():
    seed_all(1)
    run = epochs()
    pass_by(run, 3)
    assert (run.position.epoch, run.position.batch, run.position.samples) == (0, 3, 0)
    run.count_samples()
    run.count_samples()  # counted once
    assert run.position.samples == 6
    pass_by(run, 6)  # four that are left, and two of the next
    run.count_samples()
    assert (run.position.epoch, run.position.batch, run.position.samples) == (1, 2, 4)


def test_a_seeded_state_is_its_words_and_draws_nothing():
    before = torch.get_rng_state()
    states = [seeded_state(*words)["torch"] for words in ((1, 2), (1, 2), (1, 3))]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
