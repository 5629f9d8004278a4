"""STAGNATION: updates that move nothing, of 16-bit weights."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Cause, Fault
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
    name = next(iter(stagnant.share))
    place = Place("forward", name.rpartition(".")[0], 0, "", 0)
    return text, at(place, "optimizer.step", stagnant.dtype)


def _remedies(_: Fault) -> list[Candidate]:
    """An update has to be made for it, not a replay: `remedy.master_weights`."""
    return []


CAUSE = Cause("STAGNATION", _remedies)
