"""What to do, in sentences, from what was measured; the first one is the decision."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampwise.bench.requirements import Thresholds
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.products import in_words
from ampwise_lint.base.words import counted, joined

_WORTH_A_SWITCH = 1.05
_WORTH_SAVING = 0.05
_WORTH_PADDING = 1.2
_TINY_STEP_MS = 3.0
_LOADER_SHARE = 0.2
_NAMED = 3
_ONLY_FOR_MEMORY = "worth it only if memory, not time, is what limits you."


def verdict(report: BenchReport, thresholds: Thresholds) -> list[str]:
    """The decision, what it buys and costs, and what to try next."""
    baseline, others = report.precisions[0], report.precisions[1:]
    if report.interrupted:
        return ["Interrupted: the figures cover what was measured until then."]
    if report.failed:
        return [f"Failed: {report.failed}.", "The figures cover what was measured until then."]
    diverged = [each for each in others if _diverged(each, baseline)]
    worse = [each for each in others if each not in diverged and _worse(each)]
    refused = diverged + worse
    measured = [each for each in others if each.speedup is not None and each not in refused]
    best = max(measured, key=lambda each: each.speedup.median if each.speedup else 0, default=None)
    if best is None or best.speedup is None:
        said = [f"Keep fp32: no other precision {_could(others, refused)}."]
    elif best.speedup.low >= _WORTH_A_SWITCH:
        said = [_switch(best, thresholds)]
    else:
        said = [_keep(best)]
    said += [
        f"Do not use {each.name}: its held-out loss ends at {each.loss_after}, fp32's at "
        f"{baseline.loss_after:.3f}."
        for each in diverged
    ]
    said += [f"Do not use {each.name}: it trains worse than fp32." for each in worse]
    said += _memory(baseline, measured, best)
    said += _slower(measured, best) + _bottleneck(report, baseline, best) + _next(report)
    if report.device.startswith("cuda"):
        said.append(
            "The baseline is IEEE float32: a loop with TF32 on, cuDNN's default for convolutions, "
            "gains less; compare with tf32."
        )
    return said + _accuracy(report)


def _could(others: Sequence[PrecisionResult], refused: Sequence[PrecisionResult]) -> str:
    """What no precision did."""
    if refused:
        return "trained as well here"
    emulated = any(each.emulated for each in others)
    return "runs here other than emulated" if emulated else "could be measured here"


def _next(report: BenchReport) -> list[str]:
    """What to try next: levers that were measured and helped."""
    if report.levers is None:
        return []
    said: list[str] = []
    for each in report.levers.results:
        alone = each.memory_reduction is None  # one product, a small part of the step
        enough = _WORTH_PADDING if alone else _WORTH_A_SWITCH
        if each.speedup is not None and each.speedup.low >= enough:
            said.append(f"Next: {each.name}, {each.speedup} as fast in {each.precision}.")
        elif (each.memory_reduction or 0) >= _WORTH_SAVING:
            said.append(f"Next: {each.name} saves {each.memory_reduction:.0%} of the peak memory.")
    refit = report.levers.refit
    if refit is not None and refit.samples_per_s_ratio is not None:
        ratio = refit.samples_per_s_ratio
        if ratio.low >= _WORTH_A_SWITCH:
            said.append(
                f"Next: with {refit.precision} a batch {refit.times}x as large fits into fp32's "
                f"memory and trains {ratio} as many {report.unit} a second."
            )
    return said


def _accuracy(report: BenchReport) -> list[str]:
    """What paired training said, in one sentence for each decision."""
    parity = report.parity
    if parity is None:
        return ["Accuracy was not compared (--seeds 0)."]
    if not parity.learning:
        return [f"Accuracy decides nothing: {parity.why_not}."]
    words = {
        "equivalent": f"as accurate as fp32 (within {parity.margin:g})",
        "different": "not as accurate as fp32",
        "undecided": "undecided in accuracy",
    }
    said: list[str] = []
    for decision, meaning in words.items():
        names = [name for name, each in parity.arms.items() if each.decision == decision]
        better = [each for each in names if decision == "different" and not parity.worse(each)]
        said += [f"{name} is more accurate than fp32 here." for name in better]
        names = [each for each in names if each not in better]
        if names:
            runs = f"{counted(parity.seeds, 'paired seed')} of {counted(parity.steps, 'step')}"
            said.append(f"{joined(names)}: {meaning}, by {runs}.")
    hidden = {name: parity.loss_says(name) for name in parity.arms}
    return said + [f"But {name}: {loss}." for name, loss in hidden.items() if loss]


def _diverged(precision: PrecisionResult, baseline: PrecisionResult) -> bool:
    """Whether the loss is NaN or inf where fp32's is not: its speed then buys nothing."""
    if precision.loss_after is None or baseline.loss_after is None:
        return False
    return math.isfinite(baseline.loss_after) and not math.isfinite(precision.loss_after)


def _worse(precision: PrecisionResult) -> bool:
    requirement = precision.requirements.get("accuracy_difference")
    return requirement is not None and requirement.status == "fail"


def _switch(best: PrecisionResult, thresholds: Thresholds) -> str:
    assert best.speedup is not None
    saved = best.memory_reduction
    memory = "" if saved is None else f", with {_memory_words(saved)}"
    enough = "" if best.speedup.low >= thresholds.speedup else (
        f" (below the asked {thresholds.speedup:g}x)"
    )  # fmt: skip
    return f"Use {best.name}: {best.speedup} of fp32's speed{enough}{memory}."


def _keep(best: PrecisionResult) -> str:
    assert best.speedup is not None
    because = f": {best.note}" if best.note else ""
    if best.speedup.low <= 1 <= best.speedup.high:
        return (
            f"Keep fp32: {best.name}, {best.speedup} of its speed, is not for sure faster "
            f"here{because}."
        )
    if best.speedup.low > 1:
        return (
            f"Keep fp32: {best.name} gains too little here, {best.speedup} of its speed{because}."
        )
    return f"Keep fp32: {best.name} runs at {best.speedup} of its speed here{because}."


def _memory(
    baseline: PrecisionResult, measured: list[PrecisionResult], best: PrecisionResult | None
) -> list[str]:
    """Where the speed says no but memory is saved; and where the memory goes."""
    slower = [each for each in measured if each.speedup and each.speedup.high < 1]
    saving = [each for each in slower if (each.memory_reduction or 0) > 0.05]
    shares = [f"{each.name} saves {each.memory_reduction:.0%}" for each in saving]
    said = [f"{', '.join(shares)} of the peak memory: {_ONLY_FOR_MEMORY}"] if shares else []
    if baseline.peak_memory_bytes and baseline.memory:
        share = baseline.memory["activations"] / baseline.peak_memory_bytes
        if share < 0.8:
            picked = best is not None and best.name == "bf16-master"
            moves = "a larger batch" if picked else "a larger batch, or bf16-master,"
            said.append(
                f"Activations are {share:.0%} of fp32's peak, and autocast halves little else: "
                f"{moves} moves the rest."
            )
    return said


def _bottleneck(
    report: BenchReport, baseline: PrecisionResult, best: PrecisionResult | None
) -> list[str]:
    """What holds the speed back, where the figures tell."""
    if baseline.step_ms is None or best is None or best.speedup is None:
        return []
    said: list[str] = []
    step_ms, products = baseline.step_ms.median, best.matmul_speedup
    loading = report.loading_ms or 0.0
    if loading > _LOADER_SHARE * step_ms:
        said.append(
            f"A batch takes {loading:.1f} ms to load, {loading / step_ms:.0%} of fp32's step: "
            "without more loader processes no precision makes the run faster."
        )
    if step_ms < _TINY_STEP_MS and best.speedup.high < 1.2:
        took = f"A step takes only {step_ms:.1f} ms"
        said.append(f"{took}: overhead, not arithmetic, sets the pace; try a larger batch.")
    elif best.exceptions:
        said.append(_odd(best))
    elif products is not None and products >= 2 and best.speedup.high < 1 + 0.3 * (products - 1):
        said.append(
            f"Products alone are {products:.1f}x as fast in {best.name}, the step {best.speedup}: "
            "what is around them sets the pace; ampwise tune --objective speed tries what helps."
        )
    return said


def _odd(best: PrecisionResult) -> str:
    """Products that did not run in the precision, where the most are."""
    odd = in_words(best.exceptions)
    more = f", and on {counted(len(odd) - _NAMED, 'line')} more" if len(odd) > _NAMED else ""
    said = f"Not all products ran in {best.name}: {'; '.join(odd[:_NAMED])}{more}."
    return f"{said} Look there for a cast by hand, or autocast switched off."


def _slower(measured: list[PrecisionResult], best: PrecisionResult | None) -> list[str]:
    """Precisions that cost time, with the reason where the device gives one."""
    slower = [each for each in measured if each.speedup is not None and each.speedup.high < 1]
    return [
        f"{each.name} is slower than fp32, {each.speedup}{each.note and f': {each.note}'}."
        for each in slower
        if each is not best
    ]


def _memory_words(saved: float) -> str:
    return f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'} peak memory"
