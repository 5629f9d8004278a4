"""STAGNATION: updates that move nothing, of 16-bit weights."""

from __future__ import annotations

from dataclasses import replace

from ampwise.numerics.explain.cause import Cause, Fault
from ampwise.numerics.observe.narrow import in_words as of_line
from ampwise.numerics.observe.stagnation import Stagnant
from ampwise.numerics.observe.values import at
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.result import Origin, percent
from ampwise.places import Place
from ampwise.step.replayable import Replayable


def in_words(stagnant: Stagnant, step: Replayable) -> tuple[str, Origin]:
    """An explanation, and where it is."""
    named = ", ".join(
        f"{name} {percent(share)}" for name, share in list(stagnant.share.items())[:6]
    )
    rate = float(step.optimizers[0].param_groups[0]["lr"])
    text = (
        f"Updates are lost: of the weights that have a gradient, most did not move in this step "
        f"({named}). At a learning rate of {rate:g} the update is below half an ULP of a "
        f"{stagnant.dtype} weight and rounds to nothing."
    )
    name = next((each for each in stagnant.share if each in stagnant.made), None)
    name = name or next(iter(stagnant.share))
    module, made = name.rpartition(".")[0], stagnant.made.get(name)
    update = "" if stagnant.by is None else f"; the update is made on {of_line(stagnant.by)}"
    if made is None:
        place = Place("forward", module, 0, "", 0)
        return f"{text}{update}", at(place, "optimizer.step", stagnant.dtype)
    text += f" They are made in {made.dtype} on {of_line(made.place)}{update}."
    return text, at(replace(made.place, module=module), made.op, stagnant.dtype)


def _remedies(_: Fault) -> list[Candidate]:
    """An update has to be made for it, not a replay: `remedy.master_weights`."""
    return []


CAUSE = Cause("STAGNATION", _remedies)
