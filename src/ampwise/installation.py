"""How ampwise was installed, as far as its metadata tells, and what adds a package beside it.

A wheel or an index gives ``ampwise[extra]``; what is there already satisfies the rest of it. A
source tree that is installed in place stays in place. ``INSTALLER`` names the tool that wrote the
metadata; environments of pipx and of conda are mended by the pip that works in them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def extra_command(extra: str) -> str:
    """The command for a shell that installs an extra of ampwise into this Python."""
    tree = _tree_in_place()
    # The linter, which ampwise needs, is of the same tree.
    in_place = ["-e", f"{tree}/lint", "-e", f"{tree}[{extra}]"]
    words = in_place if tree is not None else [f"ampwise[{extra}]"]
    return shlex.join([*_installer(), *words])


def _tree_in_place() -> Path | None:
    """The source tree that ampwise runs from; None where it was copied into the environment."""
    found = _distribution()
    if found is None:  # neither installed nor in a wheel: on the path of imports
        return Path(__file__).parents[2]
    try:
        origin: Any = json.loads(found.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            return None
        return Path(url2pathname(urlsplit(origin["url"]).path))
    except (AttributeError, KeyError, TypeError, ValueError):  # metadata that nobody can read
        return None


def _installer() -> list[str]:
    """The words that install into this Python, up to what is installed."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        return ["pipx", "runpip", prefix.name, "install"]
    found = _distribution()
    by = (found.read_text("INSTALLER") or "").strip() if found is not None else ""
    has_pip = importlib.util.find_spec("pip") is not None
    if (by == "uv" or not has_pip) and shutil.which("uv"):
        return ["uv", "pip", "install", "--python", sys.executable]
    pip = shutil.which("pip")
    ours = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return ["pip", "install"] if ours else [sys.executable, "-m", "pip", "install"]


def _distribution() -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution("ampwise")
    except importlib.metadata.PackageNotFoundError:
        return None
