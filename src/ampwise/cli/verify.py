"""``ampwise verify``: every requirement of mixed precision on a task, checked by running it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ampwise.cli.options import Common, Gate, check_seeds, device_of, positive
from ampwise.errors import EXIT_GATE, EXIT_INTERRUPTED, EXIT_OK
from ampwise_lint.base.output import say, tell
from ampwise_lint.base.results import check_target, write_json

if TYPE_CHECKING:
    from ampwise.telemetry.run import RunFolder
    from ampwise.verify.result import Verification


@dataclass
class Options(Common):
    """Check every requirement on a task: how, the evidence, a score; PASS, BLOCK or UNDECIDED.

    BLOCK: a critical requirement fails. UNDECIDED: none fails, but one could not be measured.
    Exit codes: 0 on PASS and UNDECIDED, if --gate holds; 1 on BLOCK, and where it does not.
    """

    precision: str | None = None
    """Precision to verify; default: the device's best, or bf16 where none gains."""

    track: str = "csv"
    """Comma-separated trackers whose logs are read back: csv, tensorboard, mlflow, wandb."""

    bench: bool = True
    """Leave out speed, memory and accuracy, which take minutes."""

    seeds: int = 12
    """Paired seeds for accuracy, at most."""

    parity_steps: int | None = None
    """Steps of each training run for accuracy; default: what five seeds have time for."""

    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the table as Markdown to this file, too."""

    gate: Gate = "off"
    """Exit with 1 on any failed requirement; "strict": also on one that is not measured, and so on
    UNDECIDED."""


def run(options: Options) -> int:
    """Check, print, write ``verify.json``; the exit code."""
    positive("parity-steps", options.parity_steps)
    check_seeds(options.seeds)
    check_target("markdown", options.markdown)

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ampwise.bench.arm import Settings
    from ampwise.bench.config import BenchConfig
    from ampwise.cli.progress import bench_progress
    from ampwise.policy import Policy
    from ampwise.report.verify import render, to_markdown
    from ampwise.tasks import load_task
    from ampwise.telemetry.run import RunFolder, plain
    from ampwise.trackers import check_names
    from ampwise.verify.run import VerifyConfig, verify
    from ampwise_lint.base.console import Console
    from ampwise_lint.base.files import atomic_write_text

    track = tuple(each for each in options.track.split(",") if each)
    check_names(track)
    policy = None if options.precision is None else Policy.parse(options.precision)
    settings = Settings(device_of(options.device), options.seed)
    bench = BenchConfig(
        settings.device,
        precisions=None if policy is None else [policy],
        seed=options.seed,
        max_rounds=60,
        budget_s=45.0,
        max_seeds=options.seeds,
        parity_steps=options.parity_steps,
        parity_budget_s=150.0,
    )
    task = load_task(options.task, options.settings())
    config = VerifyConfig(settings, policy, track, bench if options.bench else None)
    with RunFolder.create(options.out, f"verify-{task.name}", _ignore) as folder:
        folder.write({"command": "verify", "task": task.name, "status": "running"})
        with bench_progress(quiet=options.quiet) as progress:
            found = verify(task, config, progress)
        text = json.dumps(plain(found.to_json()), indent=2, allow_nan=False)
        try:
            _store(folder, found, text)
        finally:
            if options.json != "-":
                render(found, Console())
    if options.markdown is not None:
        atomic_write_text(options.markdown, to_markdown(found))
    if options.json != "-":
        tell("", f"report: {folder.path / 'verify.json'}, verify.md and report.html")
    write_json(text, options.json)
    if found.interrupted:
        return EXIT_INTERRUPTED
    return gate_exit_code(found, options.gate)


def _store(folder: RunFolder, found: Verification, text: str) -> None:
    """Write ``verify.json``, ``run.json``, ``verify.md`` and ``report.html``."""
    from ampwise.report.verify import to_html, to_markdown
    from ampwise_lint.base.files import atomic_write_text

    atomic_write_text(folder.path / "verify.json", text + "\n")
    status = "interrupted" if found.interrupted else "finished"
    record = {"task": found.task, "status": status, "decision": found.decision}
    folder.write({"command": "verify", **record})
    atomic_write_text(folder.path / "verify.md", to_markdown(found))
    atomic_write_text(folder.path / "report.html", to_html(found))


def gate_exit_code(found: Verification, gate: Gate) -> int:
    """1 on BLOCK, and on what ``--gate`` asks for; UNDECIDED fails a strict gate only."""
    bad = {"off": set[str](), "fail": {"fail"}, "strict": {"fail", "not measured"}}[gate]
    against = [
        f"{each.requirement}: {each.status}" for each in found.findings if each.status in bad
    ]
    if gate == "strict" and found.decision == "UNDECIDED":
        against.append("the decision: UNDECIDED")
    if against:
        say(f"gate: {'; '.join(against)}")
    return EXIT_GATE if found.decision == "BLOCK" or against else EXIT_OK


def _ignore(message: str) -> None:
    """No steps are written to a verification's folder."""
