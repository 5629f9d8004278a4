"""Findings of unchanged files, kept between runs.

One small JSON file for each file checked, in the user's cache folder. What it holds is used only
if the linter, the file, and every file that was read to understand it are the same to the byte, and
the project asks for the same versions of torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ampwise_lint.findings import Edit, Finding
from ampwise_lint.source.requirements import Requirements
from ampwise_lint.source.text import UnreadableError, read_bytes


def folder() -> Path:
    """``$AMPWISE_CACHE``, else ``ampwise`` in the user's cache folder; ``lint`` in it."""
    own = os.environ.get("AMPWISE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return (Path(own) if own else Path(base) / "ampwise") / "lint"


@functools.cache
def version() -> str:
    """A digest of the linter's own code."""
    digest = hashlib.sha256()
    home = Path(__file__).parent
    for file in sorted(home.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _entry(path: Path) -> Path:
    name = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:24]
    return folder() / f"{name}.json"


def _finding(kept: dict[str, Any]) -> Finding:
    edits = tuple(Edit(**each) for each in kept.pop("edits"))
    return Finding(edits=edits, **kept)


class Cache:
    """What was found in files before, for one run over some files that may be read together."""

    def __init__(self, files: frozenset[Path], requirements: Requirements) -> None:
        names = "\n".join(map(str, sorted(files)))
        self._others = _short(names.encode(errors="replace"))
        self._requirements = requirements
        self._digests: dict[Path, str] = {}

    def load(self, path: Path) -> tuple[list[Finding], str] | None:
        """What was found in a file, and why it was skipped; None if that may have changed."""
        try:
            kept: Any = json.loads(_entry(path).read_text())
            if kept["version"] != version() or kept["others"] != self._others:
                return None
            if kept["torch"] != self._torch(path):
                return None
            if any(self._digest(Path(each)) != was for each, was in kept["files"].items()):
                return None
            return [_finding(each) for each in kept["findings"]], kept["skipped"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, path: Path, read: set[Path], findings: list[Finding], skipped: str) -> None:
        """Keep what was found, unless a file could not be read: why not is no matter of content.

        A folder that cannot be written costs only time, later.
        """
        digests = {str(each): self._digest(each) for each in {path, *read}}
        if not all(digests.values()):
            return
        kept = {
            "version": version(),
            "others": self._others,
            "torch": self._torch(path),
            "files": digests,
            "findings": [asdict(each) for each in findings],
            "skipped": skipped,
        }
        entry = _entry(path)
        aside = entry.with_name(f".{entry.name}.{os.getpid()}")
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(kept))
            aside.replace(entry)
        except OSError:
            aside.unlink(missing_ok=True)

    def _torch(self, path: Path) -> str:
        """The versions of torch that a file's project asks for."""
        return str(self._requirements.of(path))

    def _digest(self, path: Path) -> str:
        """A digest of a file's content; empty where it cannot be read."""
        if path not in self._digests:
            try:
                self._digests[path] = _short(read_bytes(path))
            except UnreadableError:
                self._digests[path] = ""
        return self._digests[path]


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
