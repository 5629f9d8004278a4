"""Every error ampwise raises on purpose, and the exit code each one means.

    AmpwiseError                      exit 2
    ├── UsageError                    exit 2   the request cannot be carried out as written
    │   ├── PolicyError                        unknown or impossible precision
    │   ├── TaskError                          TASK cannot be found, or does not keep its contract
    │   ├── LeverError                         a lever that does not fit the task
    │   ├── CheckpointError                    missing, damaged, or from something else
    │   └── MissingExtraError                  an optional dependency is not installed
    ├── GateError                     exit 1   a check that was asked for says no
    └── RunError                      exit 3   the run itself failed
        ├── SkippedStepsError                  too many skipped steps in a row
        ├── DivergedRanksError                 ranks no longer train the same model
        ├── LostRankError                      a rank is gone, failed, or hangs
        └── InactivePolicyError                the asked precision did not take part

The message of each is one line: what is wrong, where, what was expected, what to do. Where several
settings are wrong at once, each has a line of its own.
The trunk of the tree is the linter's, which does without the rest (`ampwise_lint.base.errors`).
This module imports next to nothing, so that ``--help`` never loads torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from ampwise_lint.base.errors import (
    EXIT_GATE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RUN,
    EXIT_USAGE,
    AmpwiseError,
    MissingExtraError,
    UsageError,
    explained,
    in_one_line,
    kind_and_words,
    nearest,
)

__all__ = [
    "EXIT_GATE",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_RUN",
    "EXIT_USAGE",
    "AmpwiseError",
    "CheckpointError",
    "DivergedRanksError",
    "GateError",
    "InactivePolicyError",
    "LeverError",
    "LostRankError",
    "MissingExtraError",
    "PolicyError",
    "RunError",
    "SkippedStepsError",
    "TaskError",
    "UsageError",
    "explained",
    "in_one_line",
    "is_out_of_memory",
    "kind_and_words",
    "nearest",
]


class PolicyError(UsageError, ValueError):
    """A precision that is unknown, or impossible on the device (under ``strict``)."""


class TaskError(UsageError):
    """A TASK that cannot be found or loaded, or that does not keep its contract."""


class LeverError(UsageError):
    """A lever that does not fit the task.

    Attributes
    ----------
    why
        What the task lacks.
    """

    def __init__(self, lever: str, why: str) -> None:
        super().__init__(f"lever {lever} does not fit: {why}; leave it out")
        self.why = why


class CheckpointError(UsageError):
    """A checkpoint that is missing, damaged, or belongs to something else."""


class GateError(AmpwiseError):
    """A gate that was asked for does not hold."""

    exit_code = EXIT_GATE


class RunError(AmpwiseError):
    """The run itself failed; what it had so far is kept."""

    exit_code = EXIT_RUN


class SkippedStepsError(RunError):
    """So many optimizer steps were skipped in a row that training cannot go on."""


class DivergedRanksError(RunError):
    """Ranks that should be the same are not; all of them raise it, with the same message.

    Attributes
    ----------
    ranks
        Those that differ from most others; all of them where there is no majority.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LostRankError(RunError):
    """A rank that the others need is gone, has failed, or hangs.

    Attributes
    ----------
    ranks
        Which.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class InactivePolicyError(RunError):
    """``strict``: the asked precision did not take part in the computation."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine ran out of memory; asked by name, without loading torch."""
    # torch.OutOfMemoryError comes from devices; the CPU's allocator raises a bare RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
