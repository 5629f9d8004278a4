"""Where a thread stands, in the user's own words: file, line, and whether it waits for others."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from ampwise.lines import is_users

_TORCH = str(Path(torch.__file__).parent)
_AMPWISE = str(Path(__file__).parents[1])
_COLLECTIVES = (
    str(Path(_TORCH, "distributed")),
    str(Path(_TORCH, "nn", "parallel", "distributed.py")),
    # Backward sums gradients over ranks from C++, where there are no frames to see.
    str(Path(_TORCH, "autograd", "graph.py")),
    # Collectives of accelerators are queued; the host waits where it waits for the device.
    str(Path(_TORCH, "cuda")),
    str(Path(_AMPWISE, "step", "host.py")),
)
_DEVICE_READ = re.compile(r"\.(item|cpu|tolist|synchronize|wait)\(")
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")
_SOURCE_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread stands.

    Attributes
    ----------
    text
        ``loader.py:33 `time.sleep(60)```: the innermost line that is the user's.
    waits
        Whether it stands in a collective, in backward, or waits for the device.
    debugged
        Whether a debugger has stopped it there.
    """

    text: str
    waits: bool
    debugged: bool


def place_of(innermost: FrameType) -> Place:
    """Where the thread with this innermost frame stands."""
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    own = next((i for i, each in enumerate(frames) if is_users(_file(each))), -1)
    called = [_file(each) for each in (frames[:own] if own >= 0 else frames)]
    return Place(
        _text(frames[own] if own >= 0 else innermost),
        any(each.startswith(_COLLECTIVES) for each in called)
        or (own == 0 and bool(_DEVICE_READ.search(_source(innermost)))),
        any(Path(each).name in _DEBUGGERS for each in called),
    )


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _source(frame: FrameType) -> str:
    return linecache.getline(_file(frame), frame.f_lineno).strip()


def _text(frame: FrameType) -> str:
    what = _source(frame)[:_SOURCE_CHARACTERS] or f"{frame.f_code.co_name}()"
    return f"{Path(_file(frame)).name}:{frame.f_lineno} `{what}`"
