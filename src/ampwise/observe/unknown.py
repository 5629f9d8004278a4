"""What can be said of a bad step that cannot be run again: between which lines it broke."""

from __future__ import annotations

from dataclasses import dataclass

from ampwise.numerics.observe.values import at, loss_of
from ampwise.numerics.result import Diagnosis
from ampwise.observe.modules import name_of
from ampwise.observe.replay import Recorded, policy_of, scalar_of
from ampwise.places import Place
from ampwise.telemetry.environment import environment


@dataclass(frozen=True)
class Seen:
    """What is known of a bad step.

    Attributes
    ----------
    why
        Why it cannot be run again.
    reached
        Where it broke, if not in modules: ``loss`` or ``backward of the loss``.
    """

    why: str
    reached: str = ""


def unknown(recorded: Recorded, seen: Seen, script: str) -> Diagnosis:
    """A diagnosis that says what is known."""
    losses = [scalar_of(each.loss) for each in recorded.passes if each.loss is not None]
    found = Diagnosis(
        status="not_reproduced",
        task=script,
        precision=policy_of(recorded).text,
        device=str(recorded.device),
        step=recorded.step,
        loss=loss_of(losses),
        loss_scale=recorded.scale,
        environment=environment(recorded.device),
    )
    last = recorded.passes[-1] if recorded.passes else None
    if last is None or not last.backward:
        found.explanation = f"The step could not be run again: {seen.why}."
        return found
    line = last.backward[-1]
    place = Place("forward", "", 0, line.file, line.line)
    found.phase, found.origin = "forward", at(place, "backward")
    if not seen.reached:
        found.explanation = (
            f"Something in the step of the backward on line {line.line} is not finite, and it "
            f"could not be run again: {seen.why}."
        )
        return found
    after = name_of(last.calls[-1].module) if last.calls else "its modules"
    found.phase = "forward" if seen.reached == "loss" else "backward"
    found.explanation = (
        f"What {after} returns is finite: it breaks after it, in the {seen.reached}, before the "
        f"backward on line {line.line}. The loss could not be run again: {seen.why}."
    )
    return found
