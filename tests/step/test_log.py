"""The log of a step: counts, and what the host learns of each step."""

from __future__ import annotations

import math

import pytest
import torch

from ampwise.errors import SkippedStepsError
from ampwise.policy import Policy
from ampwise.step.host import HostFlag
from ampwise.step.log import StepLog
from ampwise.telemetry.ring import Totals, write

CPU = torch.device("cpu")


def close(log: StepLog, *, skipped: bool, missed: tuple[str, ...] = ()) -> None:
    """A step over, and what is known of it taken in."""
    row = torch.tensor([math.nan, 4.0, 2.0 if skipped else 4.0, 1.0, float(skipped)])
    write(log.ring.row, row.unbind())
    log.learn(log.close(0.1, HostFlag(torch.tensor(float(skipped))), list(missed)))


def test_steps_count_skipped_or_not_and_what_is_counted_agrees():
    log = StepLog(CPU, 50)
    for skipped in (False, True, True, False, True):
        close(log, skipped=skipped)
    assert log.steps == 5
    assert log.complete_totals() == Totals(steps=5, skipped=3, growths=0, backoffs=3)
    assert (log.skips.known, log.skips.skipped, log.skips.in_a_row) == (5, 3, 1)
    assert [each.skipped for each in log.ring.history] == [False, True, True, False, True]


def test_buffers_that_were_missed_are_named_only_if_their_step_was_skipped(recwarn):
    log = StepLog(CPU, 50)
    close(log, skipped=False, missed=("norm.running_mean",))
    assert not recwarn
    with pytest.warns(UserWarning, match=r"buffers cache\.keys were written"):
        close(log, skipped=True, missed=("cache.keys",))


def test_the_limit_is_of_skips_in_a_row():
    log, policy = StepLog(CPU, 2), Policy.parse("fp16")
    for skipped in (True, False, True):
        close(log, skipped=skipped)
        log.enforce_limit(policy)
    close(log, skipped=True)
    with pytest.raises(SkippedStepsError, match="steps 3 to 4 were all skipped"):
        log.enforce_limit(policy)


def test_starting_from_somewhere_counts_on_and_knows_nothing_of_before(recwarn):
    log = StepLog(CPU, 3)
    log.close(0.1, HostFlag(torch.tensor(1.0)), ["lost"])
    log.start_from(Totals(steps=10, skipped=4, growths=1, backoffs=4), in_a_row=2, held=1)
    assert log.steps == log.skips.known == 10
    assert not log.ring.history
    assert log.skips.holds()
    assert not log.skips.holds()
    close(log, skipped=True)
    assert not recwarn
    assert log.complete_totals() == Totals(steps=11, skipped=5, growths=1, backoffs=5)
    with pytest.raises(SkippedStepsError):
        log.enforce_limit(Policy.parse("fp16"))
