"""A first step that cannot hang the bench: tried in a child process that is killed when it is late.

Some kernels are hundreds of times slower in a low precision (a float16 convolution gradient on a
CPU took 166 s), and a running kernel cannot be interrupted from Python. So on a CPU each precision
makes its first step in a forked child, with a time limit of ten times what float32 took in such a
child. The child uses one thread: a forked process must not use its parent's thread pool.

Accelerators are not tried this way: a process that has started CUDA cannot fork, and no kernel
there is that slow.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampwise.bench.arm import Arm

HOPELESS = 10.0
"""Times float32's first step from which a precision is not waited for."""

_SHORT_S = 0.2
"""What nobody minds waiting for, and a step of milliseconds may take on a busy machine."""

_SET_UP_S = 20.0
"""Seconds that building the model may take on top: it is not what is judged."""

_POLL_S = 0.01


@dataclass(frozen=True)
class Trial:
    """How a first step went.

    Attributes
    ----------
    seconds
        What it took, or had taken when it was stopped.
    finished
        Whether it came to its end.
    error
        What it raised, in one line; empty if nothing.
    resident_bytes
        By how much the child's resident memory grew at its peak; None where Linux does not say.
    """

    seconds: float
    finished: bool
    error: str = ""
    resident_bytes: int | None = None

    def hopeless(self, reference: Trial) -> bool:
        """Whether it is not worth waiting for, beside float32's own trial."""
        return self.seconds > max(HOPELESS * reference.seconds, _SHORT_S)


def try_first_step(make: Callable[[], Arm], batch: Any, limit_s: float) -> Trial:
    """Build an arm and make its first step in a child, for at most `limit_s` seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _report(make, batch, writer)
    os.close(writer)
    with os.fdopen(reader) as said:
        if not _ended(child, limit_s + _SET_UP_S):
            return Trial(limit_s, finished=False)
        words = said.read().split(maxsplit=1)
    if words[:1] == ["ok"]:
        seconds, grown = words[1].split()
        return Trial(float(seconds), finished=True, resident_bytes=int(grown) or None)
    return Trial(0.0, finished=False, error=words[1] if len(words) > 1 else "the process died")


def reference_step(make: Callable[[], Arm], batch: Any) -> Trial:
    """Float32's own trial; one that fails is made again here, for the task's own traceback."""
    reference = try_first_step(make, batch, limit_s=600.0)
    if reference.error:
        make().run(batch)
    return reference


def limit_from(reference: Trial) -> float:
    """Seconds after which a precision is hopeless, from float32's own trial."""
    return 2 * max(HOPELESS * reference.seconds, _SHORT_S)


def slow(trial: Trial, reference: Trial) -> str:
    """What was seen of a step that is not worth waiting for."""
    took = f"{trial.seconds:.1f} s" if trial.finished else f"more than {trial.seconds:.1f} s"
    return f"its first step took {took}, fp32's {reference.seconds:.2f} s"


def _report(make: Callable[[], Arm], batch: Any, writer: int) -> None:
    """In the child: make the step, say how it went, and leave without the parent's clean-up."""
    try:
        torch.set_num_threads(1)
        before = _resident("VmRSS")
        arm = make()
        start = time.perf_counter()
        arm.run(batch)
        took = time.perf_counter() - start
        message = f"ok {took} {_resident('VmHWM') - before}"
    except BaseException as error:  # noqa: BLE001 - it is reported to the parent, whatever it is
        message = f"error {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    with contextlib.suppress(OSError):
        os.write(writer, message.encode())
    os._exit(0)


def _resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM); 0 where it is not known."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _ended(child: int, limit_s: float) -> bool:
    """Wait for the child; kill it when the time is up (or the user interrupts)."""
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            if os.waitpid(child, os.WNOHANG)[0]:
                return True
            time.sleep(_POLL_S)
    except BaseException:
        _kill(child)
        raise
    _kill(child)
    return False


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
