"""Draws a `TrainResult` on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ampwise.data.feed import SLOW_LOADER, slow_loader
from ampwise.training.config import TrainResult


def render(result: TrainResult, console: Console) -> None:
    """Print how a run ended, what ran, and where its files are."""
    console.print()
    console.print(Text(f"{result.task} in {result.precision}: {result.status}", style="bold"))
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(result):
        table.add_row(name, value)
    console.print(table)
    if result.data_wait_fraction >= SLOW_LOADER:
        console.print(Text(slow_loader(result.data_wait_fraction), style="yellow"))


def _rows(result: TrainResult) -> list[tuple[str, str]]:
    rows = [("steps", f"{result.steps}, {result.skipped_steps} of them skipped")]
    if result.loss is not None:
        rows.append(("training loss", f"{result.loss:.4f}"))
    rows += [(f"held-out {name}", f"{value:.4f}") for name, value in result.metrics.items()]
    if result.activity is not None:
        rows.append(("what ran", str(result.activity)))
        if result.activity.loss_scale_live:
            rows.append(("loss scale", f"{result.loss_scale:g}"))
    if result.samples_per_s:
        rows.append(("rate", f"{result.samples_per_s:,.0f} samples/s"))
    rows.append(("folder", str(result.folder)))
    return rows
