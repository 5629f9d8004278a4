"""A training in this process under observation, for loops that somebody else's trainer runs.

What `ampwise run` sees of a script, without a script: `Watch` puts what listens into torch when
training begins, and takes it out when it ends. Observing changes nothing of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, Self

from ampwise.distributed.launch import launch
from ampwise.numerics.result import Diagnosis
from ampwise.observe.result import RunReport
from ampwise.observe.run import Observation, RunConfig
from ampwise.observe.script import Ending, Target
from ampwise.telemetry import names

_FINISHED = Ending(0, "finished")


class Watch:
    """Context in which training is observed; or `begin` and `end`, as a trainer's callbacks go.

    ::

        with Watch() as watch:
            trainer.fit(model)
        print(watch.report.precision.ran, watch.report.faults)

    Parameters
    ----------
    name
        What the training is called in reports.
    on_fault
        At the first step that is not finite: find out why, or go on.
    found
        Called with each diagnosis, when its step is over.

    Attributes
    ----------
    metrics
        Of the last step whose figures have arrived, by the names of `ampwise.telemetry.names`.
    report
        All that was seen, once it has ended; None before.
    """

    def __init__(
        self,
        name: str = "training",
        *,
        on_fault: Literal["diagnose", "off"] = "diagnose",
        found: Callable[[Diagnosis], object] | None = None,
    ) -> None:
        self.metrics: dict[str, names.Metric] = {}
        self.report: RunReport | None = None
        self._config = RunConfig(Target(name), on_fault=on_fault, ranks=launch().size)
        self._found = found or (lambda _: None)
        self._told = 0
        self._observation: Observation | None = None

    def begin(self) -> None:
        """Observe from now on; a watch that somebody forgot to end, as after an error, is ended."""
        while _running:
            _running[0].end()
        self.metrics, self.report, self._told = {}, None, 0
        self._observation = Observation(self._config, self._take)
        _running.append(self)
        self._observation.faults.spare_compiled()
        self._observation.begin()

    def end(self, ending: Ending = _FINISHED) -> None:
        """Observe no longer; nothing is left of it. A second time does nothing."""
        if self._observation is None:
            return
        observation, self._observation = self._observation, None
        _running.remove(self)
        observation.finish()
        self._tell(observation)
        self.report = observation.report(ending)

    def step_over(self) -> None:
        """An iteration is over, its schedule included: `metrics` are then of it.

        Never waits for a device: there, figures arrive some steps late. Loops that do not say this
        are understood all the same; their figures are one step late.
        """
        if self._observation is None:
            return
        self._observation.session.end_step()
        self._observation.records.read()
        self._tell(self._observation)

    @property
    def products(self) -> dict[str, int]:
        """Matrix products by the dtype they ran in, in the one step that was looked at.

        Empty until then: the second step is, where nothing is compiled.
        """
        if self.report is not None:
            ran = self.report.precision.ran
        elif self._observation is not None and not self._observation.census.looking:
            ran = self._observation.census.ran()
        else:
            return {}
        dtypes = sorted({*ran.forward, *ran.backward})
        return {each: ran.forward.get(each, 0) + ran.backward.get(each, 0) for each in dtypes}

    def _take(self, step: int, metrics: Mapping[str, names.Metric]) -> None:
        del step
        self.metrics = dict(metrics)

    def _tell(self, observation: Observation) -> None:
        """Pass on what was diagnosed since the last time."""
        diagnoses = [each.diagnosis for each in observation.faults.found]
        new, self._told = diagnoses[self._told :], len(diagnoses)
        for each in new:
            self._found(each)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(_FINISHED if kind is None else Ending(1, f"raised {kind.__name__}"))


_running: list[Watch] = []
"""The watch that is on; one at most."""
