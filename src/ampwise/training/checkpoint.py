"""Checkpoints: whole or not there, and enough to go on bit for bit.

One process writes one file, ``step-00000010.pt``. Several ranks write one folder together, each its
part (`sharded`). Either can be read by one process or several, under DDP or FSDP2: what is saved is
the model itself under its own names, and whoever loads takes its part of each tensor. So a run goes
on with more ranks or fewer, spread another way. With as many ranks as before that is bit for bit;
with another number random states cannot fit, and each rank draws anew (`load`).

Both forms are written aside, synced and renamed, so that a kill or a full disk leaves the earlier
ones. They hold tensors and plain values only and are loaded with ``weights_only=True``. The last
`KEEP` stay; the oldest are removed only after a new one is finished.

With ``wait=False`` a save returns when the state is copied to host memory; a thread writes it,
publishes it and removes the oldest, while training goes on.

The model's state is float32 also under ``bf16-master``, so a run can be resumed in any precision.
Under ``bf16-pure`` it is bfloat16, and its ``config`` says so; a resume in another precision raises
it to float32, with what Kahan rounding kept beside it, and one from float32 rounds it.
"""

from __future__ import annotations

import re
import reprlib
import shutil
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ampwise.distributed.host_group import HostGroup, RankError, beside
from ampwise.distributed.layout import is_sharded, on_host, spread_as, unwrapped, whole
from ampwise.errors import AmpwiseError, CheckpointError, UsageError, kind_and_words
from ampwise.step import TrainStep
from ampwise.step.precision import settle
from ampwise.step.warn import warn_user
from ampwise.training.content import (
    SPREAD,
    DamageError,
    Like,
    check_alike,
    checked,
    load_file,
    mapped,
)
from ampwise.training.epochs import Position
from ampwise.training.random_state import random_state, seeded_state, set_random_state
from ampwise_lint.base.files import atomic_write
from ampwise_lint.base.words import counted

VERSION = 1
KEEP = 3
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?(\.pt)?")


@dataclass(frozen=True)
class Trained:
    """The things whose state a checkpoint holds.

    Attributes
    ----------
    model, optimizer
        Several as one; the model as it is, in DDP or sharded.
    """

    model: nn.Module
    optimizer: Optimizer
    step: TrainStep
    scheduler: LRScheduler | None = None


# -- saving ----------------------------------------------------------------------------------------


class Saving:
    """A checkpoint on its way to the disk.

    Attributes
    ----------
    path
        Where it will be.
    """

    def __init__(self, path: Path, write: Callable[[], None], *, wait: bool) -> None:
        self.path = path
        self._outcome: Future[None] = Future()
        if wait:
            self._run(write)
            self.wait()
        else:
            # The interpreter waits for it at exit, so that it is finished after a failure, too.
            threading.Thread(target=self._run, args=(write,), name=f"save {path.name}").start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)

    @property
    def done(self) -> bool:
        """Whether it is over, well or not; never waits."""
        return self._outcome.done()

    @property
    def failed(self) -> bool:
        """Whether it is known by now that it failed; never waits.

        With several ranks it is known on one a little before the others: have all of them stop at
        the same step (`TrainStep.ask_to_stop`), and then `wait`.
        """
        return self.done and self._outcome.exception() is not None

    def wait(self) -> Path:
        """Where it is, when it is finished.

        Raises
        ------
        CheckpointError
            On all ranks, when any of them could not write its part.
        """
        self._outcome.result()
        return self.path

    def over(self) -> None:
        """Wait until it is over, well or not."""
        self._outcome.exception()


_last: dict[HostGroup, Saving] = {}
"""The last saving of each group of ranks: one is written at a time, in the same order on all."""


def save(
    folder: Path,
    trained: Trained,
    position: Position,
    config: Mapping[str, Any],
    *,
    wait: bool = True,
) -> Saving:
    """Write a checkpoint of this moment, and remove the oldest; all ranks together.

    Waits for the one before, if that is still being written.

    Parameters
    ----------
    folder
        Where checkpoints are; the same on all ranks.
    trained, position, config
        What is saved, between two steps.
    wait
        Until it is finished. If not, its errors wait in what is returned.

    Raises
    ------
    CheckpointError
        When it cannot be written, on all ranks alike; earlier ones are untouched.
    UsageError
        When several ranks are in the middle of an accumulation window.
    """
    host = beside(trained.step.group)
    if host.size > 1 and trained.step.position:
        raise UsageError(
            "checkpoint in the middle of an accumulation window: with several ranks each has "
            "gradients of its own; save where step.boundary is true"
        )
    if host in _last:
        _last[host].over()
    steps = trained.step.steps
    try:
        path = host.first(lambda: _path_for(folder, steps, "" if host.size > 1 else ".pt"))
        write = host.agree(lambda: _prepared(path, trained, position, config, host, wait=wait))
    except RankError as failure:
        at = folder / f"step-{steps:08d}"
        raise _unwritable(at, failure) from None
    _last[host] = Saving(path, lambda: _finish(path, write, host), wait=wait)
    return _last[host]


def _prepared(
    path: Path,
    trained: Trained,
    position: Position,
    config: Mapping[str, Any],
    host: HostGroup,
    *,
    wait: bool,
) -> Callable[[], None]:
    """What writes this moment, now or later."""
    common: dict[str, Any] = {
        "ampwise_checkpoint": VERSION,
        "step": trained.step.state_dict(),
        "model": unwrapped(trained.model).state_dict(),
        "optimizer": trained.optimizer.state_dict(),
        "scheduler": trained.scheduler.state_dict() if trained.scheduler else None,
        "config": dict(config),
    }
    own: dict[str, Any] = {"rng": random_state(), "position": vars(position)}
    if host.size == 1:
        keep = whole if wait else lambda tensor: on_host(whole(tensor))
        content = mapped({**common, **own}, lambda _, tensor: keep(tensor), "")
        return lambda: atomic_write(path, lambda file: torch.save(content, file))
    from ampwise.training import sharded  # DCP takes a second to import

    buffers = unwrapped(trained.model).named_buffers(remove_duplicate=False)
    plain = [n for n, each in buffers if n in common["model"] and not is_sharded(each)]
    own["buffers"] = {name: common["model"].pop(name) for name in plain}
    moment = sharded.snapshot({**common, "world_size": host.size}, own)
    return lambda: sharded.write(path, moment, host)


def _finish(path: Path, write: Callable[[], None], host: HostGroup) -> None:
    """Write a checkpoint, and remove the oldest."""
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
        raise _unwritable(path, error) from None
    if host.rank == 0:
        for old in finished(path.parent)[:-KEEP]:
            _remove(old)


def _unwritable(path: Path, error: Exception) -> CheckpointError:
    kept = newest(path.parent)
    return CheckpointError(
        f"cannot write checkpoint {path}: {' '.join(str(error).split())[:300]}; "
        f"{f'the last finished one is {kept}' if kept else 'there is no earlier one'}; free "
        "disk space, then --resume"
    )


def _remove(path: Path) -> None:
    """Remove a checkpoint, which a kill in between does not leave looking whole."""
    if path.is_dir():
        path = path.rename(path.with_name(f".{path.name}.removed"))
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- which there are -------------------------------------------------------------------------------


def finished(folder: Path) -> list[Path]:
    """Checkpoints in a folder, the oldest first; what was written aside is not one."""
    return [path for *_, path in _found(folder)]


def newest(folder: Path) -> Path | None:
    """The last finished checkpoint."""
    return next(reversed(finished(folder)), None)


def _found(folder: Path) -> list[tuple[int, int, Path]]:
    """Step, writing and path of each."""
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted((int(name[1]), int(name[2] or 0), path) for name, path in names if name)


def _path_for(folder: Path, steps: int, suffix: str) -> Path:
    """Where a checkpoint goes: a folder cannot take the place of another, nor a file a folder's.

    A step that is saved again (after resuming from an earlier one) is then numbered.
    """
    writing = 0
    for step, number, path in _found(folder):
        if step == steps:
            replaceable = suffix == ".pt" and path.suffix == ".pt"
            writing = number if replaceable else number + 1
    number = f".{writing}" if writing else ""
    return folder / f"step-{steps:08d}{number}{suffix}"


# -- loading ---------------------------------------------------------------------------------------


def load(
    path: Path, trained: Trained | None = None, say: Callable[[str], object] = warn_user
) -> dict[str, Any]:
    """What a checkpoint holds; all ranks that train together call this together.

    Parameters
    ----------
    path
        A file or a folder; the first rank's is read by all.
    trained
        What it will be put into: tensors come spread as its own are. Without it they come whole,
        to this process alone, and random state and position are the first rank's.
    say
        Is told when the number of ranks is another. Then every rank's position is the first
        rank's, in batches of as many ranks as ``content["world_size"]``, and its random state is
        seeded by NumPy's ``SeedSequence((seed, step, rank))``.

    Raises
    ------
    CheckpointError
        When it is missing, damaged, not a checkpoint, or of another version, on any rank.
    """
    host = beside(None if trained is None else trained.step.group)
    path = host.first(lambda: path)
    content = host.agree(lambda: _content(path, trained, host))
    before = content["world_size"]
    if trained is not None and before != host.size:
        seed, step = content["config"].get("seed") or 0, content["step"]["steps"]
        content["rng"] = seeded_state(seed, step, host.rank)
        say(
            f"{path} is from {counted(before, 'rank')}, now {counted(host.size, 'rank')}: random "
            f"numbers are drawn anew, from seed {seed}, step {step} and rank; "
            "the run goes on, but not bit for bit"
        )
    return content


def _content(path: Path, trained: Trained | None, host: HostGroup) -> dict[str, Any]:
    """What a checkpoint holds, for this rank."""
    if not path.exists():
        raise CheckpointError(f"no checkpoint {path}{_instead(path)}")
    like = _like(trained)
    try:
        if path.is_file():
            content = _checked(path, load_file(path))
            for part in SPREAD:
                content[part] = mapped(content[part], lambda n, t: spread_as(t, like(n)), part)
            return checked({"world_size": 1, **content})
        from ampwise.training import sharded

        common = _checked(path, load_file(path / sharded.COMMON))
        return checked(sharded.complete(path, common, host, like))
    except DamageError as error:
        raise _damaged(path, str(error)) from None
    except _MISSHAPEN as error:
        raise _damaged(path, kind_and_words(error)) from None


_MISSHAPEN = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What comes of values of other kinds than those that were written."""


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is damaged ({why}){_instead(path)}")


@contextmanager
def sound(path: Path) -> Generator[None]:
    """Context: what is made here of a checkpoint's content fails only where that is damaged.

    Raises
    ------
    CheckpointError
        Instead of what a value of a wrong kind raised; the task's own errors are left alone.
    """
    try:
        yield
    except DamageError as error:
        raise _damaged(path, str(error)) from None
    except _MISSHAPEN as error:
        raise unusable(path, error) or error from None


def unusable(path: Path, error: BaseException) -> CheckpointError | None:
    """What to raise for an error of working with a checkpoint; None where it is not to blame."""
    told = isinstance(error, AmpwiseError) or hasattr(error, "__ampwise_user__")
    blamed = isinstance(error, (RuntimeError, *_MISSHAPEN)) and not told
    return _damaged(path, kind_and_words(error)) if blamed else None


def _checked(path: Path, content: Any) -> dict[str, Any]:
    """The content of a checkpoint, if that is what it is."""
    if not isinstance(content, dict) or "ampwise_checkpoint" not in content:
        raise CheckpointError(f"{path} is no checkpoint of ampwise{_instead(path)}")
    if content["ampwise_checkpoint"] != VERSION:
        version = reprlib.repr(content["ampwise_checkpoint"])
        raise CheckpointError(
            f"checkpoint {path} has version {version}, this ampwise reads "
            f"version {VERSION}: use the ampwise that wrote it"
        )
    return content


def _instead(path: Path) -> str:
    """Which other checkpoint to try: the one before, if there is one."""
    others = finished(path.parent)
    if path in others:
        at = others.index(path)
        others = others[:at] or others[at + 1 :]
    return f"; try {others[-1]}" if others else ""


def _like(trained: Trained | None) -> Like:
    """Which tensor one of a checkpoint will be put into, by its name."""
    if trained is None:
        return lambda _: None
    model, optimizer = unwrapped(trained.model), trained.optimizer
    current = {f"model.{name}": value for name, value in model.state_dict().items()}
    packed = optimizer.state_dict()["param_groups"]
    held: dict[str, Tensor] = {}
    for group, numbers in zip(optimizer.param_groups, packed, strict=True):
        held.update(zip(map(str, numbers["params"]), group["params"], strict=True))

    def like(name: str) -> Tensor | None:
        if name.startswith("optimizer.state."):
            return held.get(name.split(".")[2])
        return current.get(name)

    return like


def restore(content: Mapping[str, Any], trained: Trained) -> Position:
    """Put everything back as it was; where the run was in its data.

    Raises
    ------
    CheckpointError
        When the states do not fit the task's model or optimizer.
    DamageError
        When a setting in them is of a wrong kind.
    """
    settings = [dict(group) for group in trained.optimizer.param_groups]
    try:
        unwrapped(trained.model).load_state_dict(content["model"])
        trained.optimizer.load_state_dict(content["optimizer"])
        trained.step.load_state_dict(content["step"])
        settle(trained.optimizer)
    except UsageError:
        raise
    except (RuntimeError, *_MISSHAPEN) as error:
        first = str(error).strip().splitlines()
        raise CheckpointError(
            f"the checkpoint does not fit this task's model and optimizer: {' '.join(first[:2])}"
        ) from None
    pairs = zip(trained.optimizer.param_groups, settings, strict=True)
    for number, (group, before) in enumerate(pairs):
        for name in before.keys() - {"params"}:
            check_alike(group.get(name), before[name], f"optimizer.param_groups.{number}.{name}")
    if trained.scheduler is not None and content["scheduler"] is not None:
        check_alike(content["scheduler"], trained.scheduler.state_dict(), "scheduler")
        trained.scheduler.load_state_dict(content["scheduler"])
    position = Position(**content["position"])
    for state in (position.epoch_rng, content["rng"]):  # the former only to see that it fits
        if state is not None:
            set_random_state(state)
    return position
