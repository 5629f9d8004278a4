"""Being one of several processes that torchrun started: who this is, and joining the others.

torchrun says in the environment which process this is. Processes meet through its store; the group
is gloo on CPUs and NCCL on CUDA, with gloo beside it for what concerns the hosts.

torchrun's agent keeps that store when it starts processes anew, and with it all keys of those that
died: whoever looks up a peer's address finds a dead one's. So each start has a part of the store to
itself, under a name that its first process draws (`_name_of_start`).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ampwise.errors import LostRankError, UsageError
from ampwise_lint.base.words import counted

_ALIKE_S = 5.0
"""How long a process that failed waits for the first one to fail in the same way."""

_COLLECTIVE = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting", re.IGNORECASE
)

_LOOK_S = 1.0
"""Longest pause between two looks at the store; it answers all ranks in turn."""

LIMIT_S = 600.0
"""Seconds after which ranks that wait for another one give up, unless told otherwise."""


@dataclass(frozen=True)
class Launch:
    """A process among those that were started together.

    Attributes
    ----------
    rank, size
        Its number among all processes, and how many there are.
    local_rank, local_size
        The same on its machine.
    may_restart
        Whether torchrun starts them anew after one dies. How often it has, each machine's agent
        counts for itself, so nothing may go by it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    may_restart: bool = False

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all: writes the run's files, logs and prints."""
        return self.rank == 0


def launch() -> Launch:
    """What torchrun said about this process; one process of one where nobody did."""
    found = os.environ
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return Launch()
    return Launch(
        rank=int(found["RANK"]),
        size=int(found["WORLD_SIZE"]),
        local_rank=int(found.get("LOCAL_RANK", "0")),
        local_size=int(found.get("LOCAL_WORLD_SIZE", "1")),
        may_restart=int(found.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0,
    )


def device_of(me: Launch, device: str) -> str:
    """The device of this process: each on a machine has its own GPU.

    Raises
    ------
    UsageError
        When a machine has fewer GPUs than processes, or all are told to use the same one.
    """
    if me.size == 1 or device.partition(":")[0] != "cuda":
        return device
    import torch

    if ":" in device:
        raise UsageError(
            f"device {device}: each of {me.local_size} processes needs a GPU of its own; say "
            "--device cuda, or set CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if count < me.local_size:
        raise UsageError(
            f"{me.local_size} processes on a machine with {counted(count, 'GPU')}: expected one "
            f"GPU each; start torchrun with --nproc-per-node {count}"
        )
    return f"cuda:{me.local_rank}"


def is_lost(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one has left a collective."""
    if isinstance(error, LostRankError):
        return True
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):  # without loading torch
        return True
    return isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None


@contextmanager
def joined(me: Launch, device: str, limit_s: float = LIMIT_S) -> Generator[Any]:
    """Context: this process belongs to the group; a store of theirs alone, None if it is alone.

    Errors that the first process has, too, are said by that one (`__ampwise_said__`).

    Raises
    ------
    UsageError
        When the others do not come.
    """
    if me.size == 1:
        yield None
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=limit_s)
    try:
        kept, rank, size = next(iter(rendezvous("env://", timeout=limit)))
        kept.set_timeout(limit)
        name = _name_of_start(dist.PrefixStore("ampwise/start", kept), me, limit_s)
        store = dist.PrefixStore(name, kept)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=2 * limit,  # the watchdog knows more than a collective that gave up
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"rank {me.rank}: the {me.size} processes did not meet "
            f"({' '.join(str(error).split())[:160]}); start all of them with torchrun, with the "
            "same --nnodes, --nproc-per-node and rendezvous endpoint"
        ) from None
    # After an error the group stays: to take it down waits for the others, who may be gone.
    try:
        yield store
    except Exception as error:
        if _first_has(store, me, f"{type(error).__name__}: {error}"):
            error.__ampwise_said__ = True  # pyright: ignore[reportAttributeAccessIssue]
        raise
    # torchrun ends the others as soon as one leaves with an exit code of its own.
    dist.barrier()
    dist.destroy_process_group()


def _name_of_start(store: Any, me: Launch, limit_s: float) -> str:
    """A name for this start of the processes, the same on all, that no earlier start had.

    Nothing in the environment has it: each agent counts restarts for itself. The first process
    draws it, and tells it only to those who name themselves to it; they take it only from one who
    calls them by name. What the dead have left in the store does neither.

    Raises
    ------
    RuntimeError
        When the others do not come.
    """
    mine = secrets.token_hex(8)
    if me.leads:
        others = [f"{mine}/{rank}" for rank in range(1, me.size)]
        store.set("first", mine)
        _until(lambda: store.check(others), limit_s)
        for other in store.multi_get(others):
            store.set(f"{other.decode()}/start", mine)
        return mine

    def told() -> bool:
        # The first process that the store names may be dead; its successor is asked next time.
        store.set(f"{store.get('first').decode()}/{me.rank}", mine)
        return store.check([f"{mine}/start"])

    _until(told, limit_s)
    return store.get(f"{mine}/start").decode()


def _until(reached: Callable[[], bool], limit_s: float) -> None:
    """Ask again and again until something is reached."""
    pause_s, end = 0.01, time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > end:
            raise RuntimeError(f"not all came within {limit_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)


def _first_has(store: Any, me: Launch, words: str) -> bool:
    """Whether the first process, which is another one, has failed with the same words."""
    from ampwise.distributed.roll import prefixed

    errors = prefixed(store, "ampwise/error")
    try:
        if me.leads:
            errors.set("first", words)
            return False
        errors.wait(["first"], timedelta(seconds=_ALIKE_S))
        return errors.get("first") == words.encode()
    except RuntimeError:  # it has not, or the store is gone
        return False
