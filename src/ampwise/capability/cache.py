"""Measurements kept between processes: small JSON files, one per machine, torch and device.

A race of precisions on a step is kept in the same way, one file per step (`recall`, `keep`).

A missing, damaged, foreign or unwritable file only means measuring again; it is never an error.
Verdicts are not stored: they are derived anew, so a better rule needs no new measurement.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ampwise.capability.hardware import PROBED, Hardware
from ampwise.capability.matmul import Measurement


def folder() -> Path:
    """``$AMPWISE_CACHE``, else ``ampwise`` in the user's cache folder."""
    if explicit := os.environ.get("AMPWISE_CACHE"):
        return Path(explicit)
    # expanduser leaves "~" as it is where there is no home: then writing fails, and that is fine.
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base) / "ampwise"


def key(hardware: Hardware) -> dict[str, str | int]:
    """Everything that a measurement depends on and that can change under the cache's feet."""
    return {
        "device": hardware.device,
        "name": hardware.name,
        "architecture": hardware.architecture,
        "units": json.dumps(dict(hardware.units), sort_keys=True),
        "torch": str(torch.__version__),
        "runtime": str(torch.version.hip or torch.version.cuda or ""),
        "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "threads": torch.get_num_threads(),
    }


def load(hardware: Hardware) -> dict[str, Measurement] | None:
    """The stored measurements of a device, or None when there are none that can be trusted."""
    try:
        stored = recall("capability", hardware, key(hardware))["measurements"]
        return {fmt: _measurement(**stored[fmt]) for fmt in PROBED}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def store(hardware: Hardware, measurements: Mapping[str, Measurement]) -> None:
    """Keep measurements, atomically; silently not where the folder cannot be written."""
    content = {fmt: asdict(measured) for fmt, measured in measurements.items()}
    keep("capability", hardware, key(hardware), {"measurements": content})


def recall(what: str, hardware: Hardware, of: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept under a key; empty where there is nothing of that very key."""
    try:
        stored = json.loads(_path(what, hardware, of).read_text())
        known = stored["schema"] == _schema(what) and stored["key"] == of
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return stored if known else {}


def keep(what: str, hardware: Hardware, of: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Keep something under a key, atomically; silently not where the folder cannot be written."""
    path = _path(what, hardware, of)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"schema": _schema(what), "key": of, **content}, file, indent=1)
            Path(aside).replace(path)
        except OSError:
            Path(aside).unlink()


def forget(what: str) -> None:
    """Remove all that was kept of a kind."""
    with contextlib.suppress(OSError):
        for path in folder().glob(f"{what}-*.json"):
            path.unlink(missing_ok=True)


def _schema(what: str) -> str:
    return f"ampwise.{what}/1"


def _path(what: str, hardware: Hardware, of: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    return folder() / f"{what}-{hardware.kind}-{digest[:16]}.json"


def _measurement(
    size: int, speedup: float | None, low: float | None, high: float | None, error: str
) -> Measurement:
    """A stored measurement, its values checked: a file can be edited or half right."""
    if not isinstance(size, int) or not isinstance(error, str):
        raise TypeError("size and error of a stored measurement")
    figures = [None if value is None else float(value) for value in (speedup, low, high)]
    if any(value is not None and not 0 < value < float("inf") for value in figures):
        raise ValueError("a stored ratio that is no ratio")
    return Measurement(size, *figures, error=error)
