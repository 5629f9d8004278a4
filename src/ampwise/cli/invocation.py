"""How this process was started, spelled so that another command line can be started alike."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ampwise.distributed.launch import Launch


def again(me: Launch, arguments: Sequence[str]) -> str:
    """A line for a shell that starts ampwise as it was started, with other arguments.

    Several machines each have a line of their own, which nobody here knows: the line then says in
    words what stands before it.
    """
    if "RANK" not in os.environ:
        return shlex.join([*_started(), *arguments])
    module = ["-m", "ampwise", *arguments]
    if "TORCHELASTIC_RUN_ID" not in os.environ or me.size != me.local_size:
        return f"(on every machine, as before) ... {shlex.join(module)}"
    return shlex.join([*_torchrun(), f"--nproc-per-node={me.size}", *module])


def _started() -> list[str]:
    """The words that started ampwise, up to its own arguments."""
    words = sys.orig_argv
    if "-m" in words and words[words.index("-m") + 1 :][:1] == ["ampwise"]:
        return words[: words.index("-m") + 2]
    script = Path(sys.argv[0])
    if script.stem != "ampwise":  # called from Python
        return [sys.executable, "-m", "ampwise"]
    found = shutil.which("ampwise")
    on_path = found is not None and Path(found).absolute() == script.absolute()
    return ["ampwise"] if on_path else [str(script)]


def _torchrun() -> list[str]:
    return ["torchrun"] if shutil.which("torchrun") else [sys.executable, "-m", _RUN]


_RUN = "torch.distributed.run"
