"""The names that metrics have everywhere: in `steps.jsonl` and in every tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampwise.telemetry.ring import StepRecord

LOSS = "train/loss"
LR = "train/lr"
SAMPLES_PER_S = "train/samples_per_s"
STEP_S = "train/step_s"
WAITED_S = "train/data_wait_s"
MICRO_BATCHES = "train/micro_batches"
SAMPLES = "train/samples"
SCHEDULE_MOVED = "train/schedule_moved"
ENABLED = "amp/enabled"
PRECISION = "amp/precision"
LOSS_SCALE = "amp/loss_scale"
GRAD_NORM = "amp/grad_norm"
FOUND_INF = "amp/found_inf"
SKIPPED = "amp/skipped"
SKIPPED_TOTAL = "amp/skipped_total"
SCALE_GROWTHS = "amp/scale_growths"
SCALE_BACKOFFS = "amp/scale_backoffs"
PRODUCTS = "amp/products"
PEAK_BYTES = "memory/peak_bytes"

Metric = float | int | bool | str


def metrics_of(
    record: StepRecord,
    precision: str,
    *,
    enabled: bool,
    samples_per_s: float | None = None,
    peak_bytes: int | None = None,
) -> dict[str, Metric]:
    """A step's metrics by name; those that were not measured are left out."""
    metrics: dict[str, Metric] = {
        LOSS: record.loss,
        LR: record.lr,
        ENABLED: enabled,
        PRECISION: precision,
        LOSS_SCALE: record.loss_scale,
        GRAD_NORM: record.grad_norm,
        FOUND_INF: record.found_inf,
        SKIPPED_TOTAL: record.skipped_total,
        SCALE_GROWTHS: record.scale_growths,
        SCALE_BACKOFFS: record.scale_backoffs,
    }
    if samples_per_s is not None:
        metrics[SAMPLES_PER_S] = samples_per_s
    if peak_bytes is not None:
        metrics[PEAK_BYTES] = peak_bytes
    return metrics


def products_name(dtype: str) -> str:
    """``amp/products/<dtype>``: matrix products that ran in it, in the step that was looked at."""
    return f"{PRODUCTS}/{dtype}"


def eval_name(metric: str) -> str:
    """``eval/<metric>``."""
    return f"eval/{metric}"
