"""How a command ends before its time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ampwise_lint.base.errors import EXIT_INTERRUPTED
from ampwise_lint.base.output import tell_text


@contextmanager
def on_sigterm(handler: Any) -> Generator[None]:
    """Context in which SIGTERM, which torchrun sends once one process has left, has this handler.

    Only the main thread can set one; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def fail(message: str, code: int) -> int:
    """Say why a command ends with this exit code, which is returned."""
    kind = "" if code == EXIT_INTERRUPTED else "error: "
    tell_text(f"ampwise: {kind}{message}", err=True)
    return code
