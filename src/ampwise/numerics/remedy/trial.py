"""A patched source tried: ``python -m ampwise.numerics.remedy.trial FOLDER NAME``.

Without a name, each one that standard input asks for is tried in a fork of that process
(`fresh.serve`).

In a fresh process the task is loaded with the patched file in place of the one on disk, put back to
where it was before the failing step, and asked:

1. Is that step finite now, and close to its float64 reference, as far as a fix of a replay has to
   be (`fix.complaint`)? Where the step has no finite reference, because it fails in float64, too,
   that of the patched source counts.
2. Does training go on: the step itself and the next ones, with finite losses and parameters, and
   skipped only as long as a loss scale settles?
3. Is anything left wrong that its gradients do not show: a loss, or a line that still overflows?
4. Does it still make a step in plain float32, where the source on disk does (`plain`)?

What its gradients keep on the next steps, as the source on disk would make them in float64, is
measured between the two (`ahead`).

Where it is the update of the step that failed, that is held against float64 between the two. Where
it is what the updates of all steps add up to, these are made again from the gradients of the source
on disk (`followed`).
Without a patch, `NAME` ``control``, the same step must fail: else the trial says nothing. `NAME`
``cost-3`` measures what ``patch-3`` costs (`patch_cost`).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampwise.bench.arm import Arm
from ampwise.errors import kind_and_words
from ampwise.lines import is_users
from ampwise.numerics.observe.reference import Reference, reference
from ampwise.numerics.observe.trace import watch
from ampwise.numerics.remedy import ahead, fix, handover, plain
from ampwise.numerics.remedy.candidate import AS_IT_IS
from ampwise.numerics.remedy.fresh import serve
from ampwise.numerics.remedy.headroom import near_the_end
from ampwise.numerics.remedy.overlay import Overlay
from ampwise.numerics.remedy.patch_cost import cost_beside_original
from ampwise.numerics.remedy.verify import (
    CONTROL,
    COST,
    MOST_STEPS,
    NEXT_STEPS,
    PATCH,
    Outcome,
    read_texts,
)
from ampwise.numerics.updates.followed import follow
from ampwise.numerics.updates.of_task import Trained
from ampwise.numerics.updates.update import LEAST_ALIKE, alike
from ampwise.policy import Policy
from ampwise.step.recorder import Stash, finite
from ampwise.step.replay import Replay
from ampwise.tasks import Task, load_task

_LEAST_DB, _ENOUGH_DB = 20.0, 60.0
"""SQNR that the updates of a patched source have to keep, and above which they are exact."""
_SETTLING = 32
"""Steps that may be skipped until a loss scale has settled."""


def main(folder: Path, name: str) -> None:
    """Try one source; write the outcome beside it."""

    def tell(outcome: Outcome) -> None:
        # Words for inf, as `document.read` takes them.
        next_db = [each if math.isfinite(each) else str(each) for each in outcome.next_db]
        (folder / f"{name}.json").write_text(json.dumps(asdict(outcome) | {"next_db": next_db}))

    try:
        tried(folder, name, tell)
    except Exception as error:  # noqa: BLE001 - whatever the patched source does is an outcome
        what = f"raises {kind_and_words(error)}"
        tell(Outcome(f"no outcome: the task {what}" if name == CONTROL else what))


def tried(folder: Path, name: str, tell: Callable[[Outcome], object]) -> None:
    """Tell the outcome of a source, see this module's docstring."""
    overlay, before = None, set(sys.modules)
    if name != CONTROL:
        overlay = Overlay(read_texts(folder, name.replace(COST, PATCH)))
    content = handover.load(folder / "step.pt")
    task = load_task(content["spec"], content["settings"])
    measures = _of_updates if content["updates"] else _outcome
    if overlay is not None and (left := overlay.not_loaded):
        tell(Outcome(f"the task does not import {left[0].name} by itself"))
        return
    if overlay is not None and name.startswith(COST):
        tell(Outcome("", cost=cost_beside_original(task, overlay, content, before)))
        return
    if overlay is not None:
        outcome = measures(folder, task, content)
        if outcome.verified:
            outcome = replace(outcome, complaint=plain.broken(folder, task, content))
        tell(outcome)
        return
    if content["updates"]:
        tell(_of_updates(folder, task, content))
    else:
        arm, stash = handover.restored(task, content)
        tell(_mended(arm, stash, content)[0])
        if not content["after"]:
            ahead.write(folder, task, content)
    plain.note(folder, task, content)


def _outcome(folder: Path, task: Task, content: Mapping[str, Any]) -> Outcome:
    """What becomes of the step, and of the next ones."""
    arm, stash = handover.restored(task, content)
    outcome, scale = _mended(arm, stash, content)
    if outcome.complaint:
        return outcome
    outcome = replace(outcome, next_db=list(ahead.kept(folder, arm, scale, content["weak"])))
    arm, stash = handover.restored(task, content)
    windows = ahead.windows(task, arm, stash, content)
    failing = [each.batch for each in stash.micro_batches]
    outcome = outcome.followed_by(*_trained(arm, chain([failing], windows)))
    if not content["at"]:
        return outcome
    step = Replay(arm.step)
    last = step.rehearsal(arm.iteration.again, failing)
    return replace(outcome, near=near_the_end(step, last, content["at"]))


def _of_updates(folder: Path, task: Task, content: Mapping[str, Any]) -> Outcome:
    """What becomes of the updates of all steps, held against float64; and of the next ones.

    A patched source is given the gradients that the one on disk had, and held against what float64
    makes of them by that one: by itself it might be exact, and mean another update.
    """
    steps: int = content["updates"]
    policy, settings = Policy.parse(content["policy"]), handover.run_settings(content)
    trained, file = Trained(task, policy, settings, steps), folder / "updates.pt"
    if not file.exists():
        run = follow(trained, steps, also=content["narrow"])
        ideal = {each.name: each.ideal for each in run.changes}
        torch.save({"gradients": run.gradients, "ideal": ideal, "began": run.began}, file)
        kept = run.kept_db()
    else:
        wanted: dict[str, Any] = torch.load(file, weights_only=True)
        given, ideal, began = wanted["gradients"], wanted["ideal"], wanted["began"]
        run = follow(trained, steps, given=given, also=ideal, began=began)
        kept = min(run.kept_db(), run.kept_of_db(ideal))
    kept = min(kept, _ENOUGH_DB)
    what = f"its updates keep {kept:.0f} dB of what float64 makes of the same gradients"
    wrong = what if run.wrong() or kept < _LEAST_DB else ""
    outcome = Outcome(wrong, sqnr_db=kept, updates=steps)
    if wrong:
        return outcome
    windows = iter(lambda: [next(run.batches) for _ in range(settings.accumulate)], None)
    return outcome.followed_by(*_trained(run.arm, windows))


def _mended(arm: Arm, stash: Stash, content: Mapping[str, Any]) -> tuple[Outcome, float]:
    """The failing step, or its update, and the loss scale that it came to."""
    outcome, scale = _judged(arm, stash, content)
    if content["after"] and not outcome.complaint:
        outcome = _updated(arm, stash, content["after"])
    return outcome, scale


def _judged(arm: Arm, stash: Stash, content: Mapping[str, Any]) -> tuple[Outcome, float]:
    """The failing step, held against its reference."""
    step = Replay(arm.step)
    own = not content["wanted"]["finite"]
    wanted = reference(step, stash) if own else handover.reference(content)
    judged = fix.judged(step, stash, AS_IT_IS, wanted, weak=content["weak"])
    outcome = Outcome(judged.complaint, sqnr_db=judged.sqnr_db, weakest=judged.weakest)
    if judged.complaint:
        return outcome, judged.scale
    left = _left(step, replace(stash, scale=torch.full_like(stash.scale, judged.scale)), wanted)
    return replace(outcome, own_reference=own, left=left), judged.scale


def _left(step: Replay, stash: Stash, wanted: Reference) -> str:
    """What is wrong in a step whose gradients are right: a loss, or a line that overflows."""
    trace = watch(step, stash)
    if wanted.finite and (loss := fix.wrong_loss(trace.replayed, wanted)):
        return loss
    for each in trace.roots.values():
        narrow = any(made.dtype == torch.float16 for made in each.outputs)
        forward = each.place.phase == "forward"  # derivatives of a norm at 0 are masked inside
        if forward and narrow and each.has_finite_inputs and is_users(each.place.file):
            return f"{each.name} on line {each.place.line} overflows, where nothing reads it"
    return ""


def _updated(arm: Arm, stash: Stash, wanted: Mapping[str, Tensor]) -> Outcome:
    """The update of the step, held against what float64 makes of the parameters."""
    named = Replay(arm.step).named_tensors()
    before = {name: named[name].detach().double().clone() for name in wanted}
    for each in stash.micro_batches:
        arm.iteration(arm.step, each.batch)
    bad = [name for name in wanted if not finite(named[name])]
    if bad:
        return Outcome(f"{bad[0]} is still not finite after the update", of_update=True)
    cosine = alike([named[n].detach().double() - before[n] for n in wanted],
                   [wanted[n] - before[n] for n in wanted])  # fmt: skip
    wrong = f"its update is off (cosine {cosine:.2f})" if cosine < LEAST_ALIKE else ""
    return Outcome(wrong, of_update=True)


def _trained(arm: Arm, windows: Iterable[list[Any]]) -> tuple[int, str, int]:
    """How many steps were made after the failing one, and what was wrong with the next.

    And how many were skipped behind one that was made: those before it settle the loss scale.
    """
    made, skipped, between, began = 0, 0, 0, time.process_time()
    for window in windows:
        for batch in window:
            loss = arm.iteration(arm.step, batch)
            if not finite(loss):
                return max(0, made - 1), "its loss is not finite", between
        if arm.step.history[-1].skipped:
            skipped += 1
            between += made > 0
            if skipped > _SETTLING:
                return max(0, made - 1), "its gradients are not finite", between
            continue
        made += 1
        late = time.process_time() - began > ahead.LIMIT_S
        if made > MOST_STEPS or (made > NEXT_STEPS and late):
            break
    bad = [n for n, p in arm.model.named_parameters() if not finite(p)]
    return made - 1, f"{bad[0]} is not finite then" if bad else "", between


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), sys.argv[2])
    else:
        serve(Path(sys.argv[1]), sys.stdin, main)
