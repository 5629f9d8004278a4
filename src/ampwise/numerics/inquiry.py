"""A step that is inquired into: replays under watch, and what a diagnosis shows of them."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.numerics.explain.cause import Explanation, in_float64
from ampwise.numerics.observe.bits import all_bits, extreme_of
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import ShadowRun
from ampwise.numerics.observe.trace import Trace, watch
from ampwise.numerics.observe.values import at, broken, exponents, loss_of, origin_of, passed
from ampwise.numerics.progress import Progress, Silent
from ampwise.numerics.result import Diagnosis, Finding, OpError, Origin, Passed
from ampwise.places import Phase
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise.telemetry.environment import environment
from ampwise_lint.base.words import power

_WORST = 10
_MODULES = 48
_POISONED = 6


@dataclass(frozen=True)
class Inquiry:
    """Whose step it is, and who wants to know."""

    step: Replayable
    task: str
    progress: Progress = field(default_factory=Silent)

    def opened(self, stash: Stash, losses: Sequence[Tensor]) -> Diagnosis:
        """A diagnosis of a window that nobody has looked at yet."""
        return Diagnosis(
            status="clean",
            task=self.task,
            precision=self.step.policy.text,
            device=str(self.step.device),
            step=stash.step,
            loss=loss_of(list(losses)),
            loss_scale=float(stash.scale) if self.step.scales_loss else None,
            environment=environment(self.step.device),
        )

    def watched(
        self, stash: Stash, *, backward: bool = True
    ) -> tuple[Trace, dict[str, dict[str, float]]]:
        """`watch`, and the exponents of what modules return."""
        with self._outputs() as histograms:
            trace = watch(self.step, stash, backward=backward)
        return trace, histograms

    def explained(self, found: Diagnosis, root: Root, why: Explanation, stash: Stash) -> None:
        """A fault, its cause, and the evidence."""
        found.status, found.phase = "fault", phase_of(root)
        found.origin = origin_by(root, why)
        found.cause, found.explanation = why.cause, why.words
        self.evidence(found, root, stash)

    def evidence(self, found: Diagnosis, root: Root, stash: Stash) -> None:
        """Which part broke, what it was before, and under which loss scale that was measured."""
        found.extent, found.history = broken(root, stash), passed(root.history)
        ideal = in_float64(root) if root.func is not None else None
        if ideal is not None and not all_bits(ideal):
            place = root.place
            found.history.append(
                Passed(root.name, place.module, place.file, place.line, place.phase, "float64",
                       extreme_of(ideal))
            )  # fmt: skip
        if root.place.phase == "backward" and self.step.scales_loss:
            found.measured_scale = float(stash.scale)
            found.explanation += f" Measured under a loss scale of {power(float(stash.scale))}."

    @contextmanager
    def _outputs(self) -> Generator[dict[str, dict[str, float]]]:
        """Exponents of what each module returns, the first time in the context."""
        found: dict[str, dict[str, float]] = {}
        names = {id(m): n for model in self.step.models for n, m in model.named_modules() if n}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            name = names.get(id(module))
            if name is None or name in found or len(found) >= _MODULES:
                return
            if isinstance(output, Tensor) and output.is_floating_point():
                with _disable_current_modes():
                    found[name] = exponents(output)

        handle = nn.modules.module.register_module_forward_hook(note)
        try:
            yield found
        finally:
            handle.remove()


def phase_of(root: Root) -> Phase | Literal["data"]:
    """Where a fault began, among the parts of a step."""
    return "data" if root.func is None and root.name == "batch" else root.place.phase


def origin_by(root: Root, why: Explanation) -> Origin:
    """Where it began: the root, or what made its argument."""
    maker = why.made_by or root
    if isinstance(maker, Root):
        return replace(origin_of(maker), inside=why.inside)
    return at(maker.place, maker.name, maker.dtype)


def poisoned(names: Collection[str]) -> list[Finding]:
    """What is said of buffers that forward left without finite values."""
    if not names:
        return []
    named = ", ".join(islice(names, _POISONED))
    return [
        Finding(
            "BAD_BUFFER",
            f"Forward leaves inf or NaN in {named}. A loop that only skips the optimizer step "
            "keeps them, and evaluation breaks; ampwise.TrainStep puts the buffers back.",
        )
    ]


def worst(run: ShadowRun) -> list[OpError]:
    """Operations by their own error, the worst first; each place once."""
    found: list[OpError] = []
    seen: set[tuple[str, str, int]] = set()
    for each in sorted(run.errors, key=lambda error: error.local_db):
        key = (each.name, each.place.module, each.place.line)
        if key in seen or each.local_db == float("inf"):
            continue
        seen.add(key)
        found.append(
            OpError(each.name, each.place.module, each.place.file, each.place.line,
                    each.place.phase, each.dtype, each.local_db, each.propagated_db,
                    each.bias)
        )  # fmt: skip
        if len(found) == _WORST:
            break
    return found
