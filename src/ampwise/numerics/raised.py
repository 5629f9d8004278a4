"""A step that raised, and does not in float32: what was not finite before, or else the error."""

from __future__ import annotations

from dataclasses import replace

from ampwise.errors import kind_and_words
from ampwise.numerics.explain import dtype_error, mask_constant
from ampwise.numerics.explain.cause import Fault
from ampwise.numerics.explain.causes import explain, remedies
from ampwise.numerics.inquiry import Inquiry
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.trace import watch
from ampwise.numerics.observe.values import at, origin_of
from ampwise.numerics.remedy import fix
from ampwise.numerics.result import Diagnosis
from ampwise.places import NOWHERE, Phase, Place, is_internal
from ampwise.policy import PRESETS
from ampwise.step.recorder import Stash
from ampwise.step.replay import let_go


def diagnosed(inquiry: Inquiry, stash: Stash, error: Exception) -> Diagnosis | None:
    """A window that raised; None when it raises in float32 as well (a fault of the task)."""
    step = inquiry.step
    let_go(error)
    step.rewind_buffers()
    if step.replay(stash, policy=PRESETS["fp32"], scale=1.0).error is not None:
        return None
    trace = watch(step, stash)
    found = inquiry.opened(stash, trace.replayed.losses)
    message = kind_and_words(error).rstrip(".")  # our sentence goes on, or ends, after it
    if trace.before_error is None:
        place = _refused(inquiry, found, error, trace.failed, message)
    else:
        place = _noticed(inquiry, found, stash, trace.before_error, message)
    inquiry.progress.found(found)
    assert found.cause is not None
    assert found.origin is not None
    fault = Fault(step, stash, place, found.origin.dtype, found.origin.op)
    found.fixes = fix.tried(step, stash, remedies(found.cause, fault), reference(step, stash))
    return found


def _noticed(inquiry: Inquiry, found: Diagnosis, stash: Stash, root: Root, message: str) -> Place:
    """An error that says that something is not finite: what made it so."""
    why = explain(inquiry.step, stash, root)
    words = f"{why.words} The step then raises {message}."
    inquiry.explained(found, root, replace(why, words=words), stash)
    place = (why.made_by or root).place
    found.phase = place.phase
    return place


def _refused(
    inquiry: Inquiry, found: Diagnosis, error: Exception, root: Root | None, message: str
) -> Place:
    """An error in this precision that no bad value came before."""
    policy = inquiry.step.policy
    place = _place_of(error, "forward") if root is None else root.place
    found.status, found.phase = "fault", place.phase
    found.origin = at(place, type(error).__name__) if root is None else origin_of(root)
    why = None if root is None else mask_constant.refused(root, policy.compute_dtype, message)
    why = why or dtype_error.raised(policy.text, message)
    found.cause, found.explanation = why.cause, why.words
    return place


def _place_of(error: Exception, phase: Phase) -> Place:
    """The user's own innermost line of a traceback."""
    trace, found = error.__traceback__, NOWHERE
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_internal(code.co_filename):
            found = Place(phase, "", 0, code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found
