"""# scheduler-ignores-skip

## What it does
Reports a per-step `scheduler.step()` beside `scaler.step`, with no regard to skipped steps; also
one that is given a count of epochs or steps, and beside `loss_scaler(loss, optimizer)` of a
wrapper that holds the scaler, as timm's is.
Silent for schedules per epoch, for those of another optimizer or that are given a metric, under a
condition on the scale or behind a check that the gradients' norm is finite, and for what is called
a schedule of something else than the learning rate.

## Why is this bad
A skipped step changes no parameter, but the schedule moves on. From 65536 down to a scale that
fits, the first steps of a run are often skipped, which is where warm-up is. If the very first
step is skipped, torch warns "Detected call of `lr_scheduler.step()` before `optimizer.step()`"
(unfused optimizers).

## Example
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()

## Use instead
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()

## Fix safety
Unsafe: `--unsafe-fixes` writes the condition above where `scaler.step`, `update()` and
`scheduler.step()` stand one after the other in one block; a scheduler before `update()` moves
behind it, and where the step is in a branch, a flag tells the scheduler behind it. Each
`get_scale()` is a host sync, which is its price (AMP301 does not report these two). A scale that
has fallen to 0 falls no further, so a skip is not seen there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.branches import passed
from ampwise_lint.queries.edits import edit, is_of_each, is_simple, receiver
from ampwise_lint.queries.steps import steps_by_scaler
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source import library
from ampwise_lint.source.places import (
    alone,
    assignments,
    block_of,
    class_of,
    names,
    scope_of,
    with_comment,
    wrap,
)
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import SCALER
from ampwise_lint.values.abstract import Optimizer, Scheduler
from ampwise_lint.values.events import Condition, Managed, ScalerStep, SchedulerStep, Site, Update


@rule("AMP112", "scheduler-ignores-skip", "info", fix="unsafe", triggers=(SCALER,))
def check(code: Analysis) -> Iterator[Mistake]:
    for trace in code.traces:
        for event in trace.of(SchedulerStep):
            if event.has_metric or not isinstance(event.scheduler, Scheduler):
                continue
            if _asks(event) or _waits_for_finite_norm(event) or _waits_for_epoch(event):
                continue
            step = _step_beside(trace, event)
            if step is not None and not _is_set_by_nobody(event) and _is_of_learning_rate(event):
                site = _site(event, step)
                yield Mistake(
                    site.node,
                    site.module,
                    "the schedule moves on even when the scaler skipped the step: warm-up and "
                    "decay run ahead of the parameters; step it only if the scale did not fall "
                    "(before = scaler.get_scale(); ...; if scaler.get_scale() >= before)",
                    mend=partial(_edits, event, trace) if site.node is event.node else None,
                )


def _is_set_by_nobody(event: SchedulerStep) -> bool:
    """Whether it is an attribute that no file sets, in a class all whose bases are in sight."""
    module, name = event.module, receiver(event.node)
    class_ = class_of(module, event.node)
    if not isinstance(class_, ast.ClassDef) or not re.fullmatch(r"self\.\w+", name):
        return False
    homes = [module.imports.full(each).rpartition(".")[0] for each in class_.bases]
    if any(home and module.project.locate(module.path, home) is None for home in homes):
        return False
    return not module.project.sets(module, name.removeprefix("self."))


OTHER = re.compile(
    r"wd|weight_decay|moment|ema|beta|kl|temp|tau|noise|mask|prun|drop|sampl|teacher|curric|aug|loss|gamma"
    r"|spars|prof|margin",
    re.IGNORECASE,
)
"""What else is scheduled: of these nothing is known, and a skipped step may well count."""


def _is_of_learning_rate(event: SchedulerStep) -> bool:
    """Whether it schedules the learning rate, by its class or its name."""
    assert isinstance(event.scheduler, Scheduler)
    name = receiver(event.node).rpartition(".")[2]
    known = library.is_scheduler(event.scheduler.path)
    return known or "lr" in name or not OTHER.search(name)


def _step_beside(trace: Trace, event: SchedulerStep) -> ScalerStep | Managed | None:
    """A scaler's step that runs as often: in one loop, or in a function that makes one."""
    steps = (each for each in steps_by_scaler(trace) if not _is_of_another(event, each))
    return next((each for each in steps if _is_as_often(event, each)), None)


def _is_of_another(event: SchedulerStep, step: ScalerStep | Managed) -> bool:
    """Whether it schedules another optimizer than is stepped, which a search inside may have."""
    assert isinstance(event.scheduler, Scheduler)
    own, stepped = event.scheduler.optimizer, step.optimizer
    if not isinstance(own, Optimizer) or not isinstance(stepped, Optimizer):
        return False
    keys = [{each.key, *(e.key for e in each.others)} for each in (own, stepped)]
    return keys[0].isdisjoint(keys[1])


def _site(event: SchedulerStep, step: ScalerStep | Managed) -> Site:
    """Where a class in another file, which steps all its schedulers, is told to; else the step."""
    own = {id(each.node) for each in step.context.sites}
    apart = next((each for each in event.context.sites if id(each.node) not in own), None)
    if apart is not None and apart.module is not event.module:
        return apart
    return event.site


def _is_as_often(event: SchedulerStep, step: ScalerStep | Managed) -> bool:
    mine, around = event.context.loops, step.context.loops
    if is_of_each(step):
        around = around[:-1]
    same = [e.serial for e in mine[: len(around)]] == [e.serial for e in around]
    # Between them a loop over schedulers may stand, but none over batches.
    within = same and not any(each.over_data for each in mine[len(around) :])
    names = event.context.functions[:1]  # a function that makes one step, and what it calls
    return within and (bool(around) or (bool(names) and names == step.context.functions[:1]))


ASKED = re.compile("scale(?!r)|skip|overflow")
"""What a condition on the last step looks at; whether there is a scaler tells nothing of it."""


def _asks(event: SchedulerStep) -> bool:
    """Whether a condition in the loop of the steps looks at the scale, or counts steps."""
    held = event.context.loops[0].held if event.context.loops else 0
    return any(
        ASKED.search(each.key) or _counts_steps(event.module, each)
        for each in event.context.conditions[held:]
    )


OF_EPOCHS = re.compile(r"% [^()]*epoch|Eq '[^']*epoch[^']*'")
"""``step % steps_per_epoch == 0``, ``update == "on_epoch"``."""


def _waits_for_epoch(event: SchedulerStep) -> bool:
    """Whether it waits, in the loop of the steps, for the end of an epoch."""
    return any(each.taken and OF_EPOCHS.search(each.key) for each in event.context.branches)


def _waits_for_finite_norm(event: SchedulerStep) -> bool:
    """Whether it stands behind a check of the gradients' norm: what the scaler skips for, too."""
    loop = event.context.loops[0].node if event.context.loops else None
    inside = event.context.branches_in(event.context.loops[0]) if event.context.loops else []
    tests = [each.node.test for each in inside if isinstance(each.node, ast.If)]
    tests += [each.test for each in passed(event, loop)]
    return any(_is_of_norm(event.module, each) for each in tests if event.module.holds(each))


FINITE = re.compile(r"is_?(finite|nan|inf)")


def _is_of_norm(module: Module, test: ast.expr) -> bool:
    """``torch.isfinite(norm)``, also of a norm by another name and by a flag."""
    flags = [test, *_made_of(module, test)]
    texts = [ast.unparse(e) for each in flags for e in (each, *_made_of(module, each))]
    return any(map(FINITE.search, texts)) and any("norm" in each for each in texts)


def _made_of(module: Module, test: ast.expr) -> list[ast.expr]:
    """What the names in an expression were set to."""
    made = [e for name in names(test) for e in assignments(scope_of(module, test), name)]
    return [each.value for each in made if each.value is not None]


def _counts_steps(module: Module, condition: Condition) -> bool:
    """``before < optimizer._step_count``, or a flag made of it: PyTorch counts what was made."""
    test = getattr(condition.node, "test", None)
    asked = [] if test is None else [test]
    for each in asked[:]:
        if module.holds(each):
            flags = _made_of(module, each)
            asked += [*flags, *(e for flag in flags for e in _made_of(module, flag))]
    return any("_step_count" in ast.unparse(each) for each in asked)


def _edits(event: SchedulerStep, trace: Trace) -> tuple[Edit, ...]:
    """Step the scheduler behind the update, if the scale did not fall in it."""
    module, node = event.module, event.node
    statement = alone(module, node)
    same = [each for each in trace.of(ScalerStep) if each.module is module]
    if statement is None or not same or not is_simple(trace):
        return ()
    block = block_of(module, module.statement_of(same[0].node))
    steps, updates = _among(block, trace, ScalerStep), _among(block, trace, Update)
    scalers = {receiver(each.value) for each in (*steps, *updates)}
    if not steps or not updates or len(scalers) != 1 or "" in scalers:
        return ()
    if any(alone(module, each.value) is None for each in (*steps, *updates)):
        return ()
    site = _Site(module, block, steps[0], updates[-1], scalers.pop(), statement)
    if block.index(site.step) > block.index(site.update):
        return ()
    if statement in block and block.index(statement) < block.index(site.update):
        return _moved(site) if block.index(statement) > block.index(site.step) else ()
    if (inside := _holder(module, statement, block)) is not None:
        behind = block.index(inside) > block.index(site.update)
        return (*_read(site), wrap(statement, statement, site.header)) if behind else ()
    return _flagged(site)


@dataclass(frozen=True, slots=True)
class _Site:
    """A step and its update in one block, and the scheduler's step."""

    module: Module
    block: list[ast.stmt]
    step: ast.Expr
    update: ast.Expr
    scaler: str
    scheduler: ast.Expr

    @property
    def before(self) -> str:
        """The name of the scale before the step."""
        known = _read_before(self.block, self.step, self.scaler)
        return known or self.new_name("scale_before")

    @property
    def header(self) -> str:
        """What the scheduler's step is put below."""
        return f"if {self.scaler}.get_scale() >= {self.before}:"

    def new_name(self, name: str) -> str:
        """A name that the function does not use."""
        is_taken = name in names(scope_of(self.module, self.step))
        return f"{name}_amp" if is_taken else name


def _read(site: _Site) -> tuple[Edit, ...]:
    """Note the scale before the step, unless that is done already."""
    if _read_before(site.block, site.step, site.scaler):
        return ()
    return (edit("before", site.step, f"{site.before} = {site.scaler}.get_scale()"),)


def _moved(site: _Site) -> tuple[Edit, ...]:
    """A scheduler between step and update, where a skip does not show yet, goes behind both."""
    line = with_comment(site.module, site.scheduler)
    text = f"{site.header}\n    {line}\n"
    moved = (edit("remove", site.scheduler), edit("after", site.update, text))
    return (*_read(site), *moved) if line else ()


def _flagged(site: _Site) -> tuple[Edit, ...]:
    """The step is in a branch, the scheduler behind it: a flag says whether there was a step."""
    around = site.module.parents.get(id(site.step))
    outer = around if isinstance(around, ast.If) else None
    while outer is not None and site.scheduler not in block_of(site.module, outer):
        further = site.module.parents.get(id(outer))
        outer = further if isinstance(further, ast.If) else None
    if outer is None or outer.lineno > site.scheduler.lineno or _is_elif(site.module, outer):
        return ()
    flag = site.new_name("stepped")
    compared = f"{flag} = {site.scaler}.get_scale() >= {site.before}"
    return (
        edit("before", outer, f"{flag} = True"),
        *_read(site),
        edit("after", site.update, compared),
        wrap(site.scheduler, site.scheduler, f"if {flag}:"),
    )


def _is_elif(module: Module, node: ast.If) -> bool:
    around = module.parents.get(id(node))
    return isinstance(around, ast.If) and around.orelse == [node]


def _holder(module: Module, statement: ast.stmt, block: list[ast.stmt]) -> ast.stmt | None:
    """The statement of a block that holds another one, below nothing but conditions."""
    found = statement
    while found not in block:
        around = module.parents.get(id(found))
        if not isinstance(around, ast.If):
            return None
        found = around
    return found


def _among(block: list[ast.stmt], trace: Trace, kind: type[ScalerStep | Update]) -> list[ast.Expr]:
    """The statements of a block that are such calls, in order."""
    calls = {id(each.node) for each in trace.of(kind)}
    return [each for each in block if isinstance(each, ast.Expr) and id(each.value) in calls]


def _read_before(block: list[ast.stmt], step: ast.stmt, scaler: str) -> str:
    """The name that holds the scale before the step already."""
    for each in block[: block.index(step)]:
        match each:
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Attribute(attr="get_scale"))):
                if receiver(each.value) == scaler:
                    return dotted(target)
            case _:
                pass
    return ""
