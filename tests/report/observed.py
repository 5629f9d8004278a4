"""A report of ``ampwise run`` with something in every field."""

from __future__ import annotations

from typing import Any

from ampwise.observe.result import (
    Asked,
    Finding,
    NotObserved,
    Overhead,
    Precision,
    Raced,
    Ran,
    Region,
    RunReport,
    ScaleSeen,
    Skip,
)
from ampwise.products import OddProduct
from ampwise.stats import Interval


def precision(**changes: Any) -> Precision:
    """Attention ran in float32, all else in bfloat16."""
    odd = ("blocks.0", "model.py", 41)
    values: dict[str, Any] = {
        "asked": [Asked("bfloat16", "train.py", 12)],
        "ran": Ran({"bfloat16": 10, "float32": 4}, {"bfloat16": 20, "float32": 8}),
        "exceptions": [
            OddProduct(*odd, "_scaled_dot_product_flash", "float32", "forward", 4),
            OddProduct(*odd, "bmm", "float32", "backward", 8),
        ],
        "parameters": {"float32": 6},
        "gradients": {"float32": 6},
        "optimizer_state": {"float32": 12},
        "regions": [Region("cpu", "bfloat16", True, "train.py", 12, 40)],
    }
    return Precision(**values | changes)


def observed(**changes: Any) -> RunReport:
    """A run in which all there is was seen."""
    values: dict[str, Any] = {
        "script": "train.py",
        "steps": 40,
        "micro_batches_per_step": 4.0,
        "optimizers": ["AdamW", "AdamW", "SGD"],
        "precision": precision(),
        "loss_scale": ScaleSeen(65536.0, 1024.0, 512.0, 3, 9),
        "skips": [Skip(3, noticed_by_schedule=False), Skip(5, noticed_by_schedule=None)],
        "waited_for_data": 1.5,
        "race": {
            "bf16": Raced(Interval(1.46, 1.41, 1.59), 22),
            "fp16": Raced(Interval(0.24, 0.22, 0.25), 5, "cut short"),
            "tf32": Raced(None, 0, "no hardware for it"),
        },
        "findings": [Finding("AMP101", "error", "train.py", 28, "clipped", "scale 65536", 40)],
        "not_observed": [NotObserved("loaders", "AttributeError: gone")],
        "overhead": Overhead(0.1, 0.12, 0.004),
        "step_ms": 31.25,
        "loss_first": 10.9,
        "loss_last": 3.21,
        "ending": "finished",
        "ranks": 2,
        "environment": {"device_name": "a", "threads": 1},
    }
    return RunReport(**values | changes)
