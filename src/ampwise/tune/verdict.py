"""What to do, in sentences, from what a search for speed or memory found."""

from __future__ import annotations

from ampwise.stats import Interval
from ampwise.tasks.levers import times_in
from ampwise.tune.result import Measured, Settings, Tuned
from ampwise.tune.setting import PLAIN


def verdict(found: Tuned) -> list[str]:
    """What to do, in sentences."""
    settings = found.settings
    assert settings is not None
    chosen = settings.chosen
    if settings.refused is not None:
        return [f"Keep fp32: with {_with_figures(settings.refused, settings)}."]
    if chosen is None or chosen.setting == PLAIN.text:
        better = "faster" if found.objective == "speed" else "smaller and fast enough"
        return [f"Keep fp32 as it is: nothing that was tried is {better}."]
    said = [f"Use {_with_figures(chosen, settings)}."]
    said += [
        f"{each.pattern} stays in float32: by itself it is {each.alone} as fast there, the whole "
        f"step with it {each.together}."
        for each in settings.islands
        if each.pattern in settings.train["precision"]
    ]
    levers = settings.train.get("levers", "").split(",")
    if batch := next((each for each in levers if times_in(each) > 1), None):
        said.append(
            f"With {batch} an epoch has fewer, larger steps; its parity is with fp32 on the same "
            "batches, and the learning rate may want to be raised."
        )
    if settings.parity_reason:
        said.append(f"Parity was not measured: {settings.parity_reason}.")
    return said


def _with_figures(each: Measured, settings: Settings) -> str:
    figures = [
        _rate(each.speedup, settings.unit),
        _memory(each.memory_reduction),
        _equivalence(settings),
    ]
    return f"{each.setting}: {', '.join(figure for figure in figures if figure)}"


def _rate(ratio: Interval | None, unit: str) -> str:
    return "" if ratio is None else f"{ratio} as many {unit} a second as fp32"


def _memory(saved: float | None) -> str:
    if saved is None:
        return ""
    return f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'} peak memory"


def _equivalence(settings: Settings) -> str:
    parity = settings.parity
    if parity is None or not parity.arms:
        return ""
    ((name, found),) = parity.arms.items()
    if not parity.learning:
        return "parity not decided"
    words = {
        "equivalent": f"equivalent within {parity.margin:g}",
        "different": "but it does not train the same",
    }
    return f"{words.get(found.decision, 'parity not decided')} ({parity.said(name)})"
