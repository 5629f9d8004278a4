"""`ampwise run`: all that is observed, put together, and the report of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ampwise.observe.autocast import Autocasts
from ampwise.observe.backward import Backwards
from ampwise.observe.census import Census
from ampwise.observe.checkpoints import Checkpoints
from ampwise.observe.clipping import Clipping
from ampwise.observe.faults import Faults
from ampwise.observe.listener import Listener
from ampwise.observe.loaders import Loaders
from ampwise.observe.misuse import Misuse
from ampwise.observe.modules import Modules
from ampwise.observe.optimizers import Optimizers
from ampwise.observe.patches import Patches
from ampwise.observe.precision import Dtypes, precision_of
from ampwise.observe.race import Racing
from ampwise.observe.records import Records
from ampwise.observe.result import NotObserved, Overhead, Raced, RunReport
from ampwise.observe.scalers import Scalers
from ampwise.observe.schedules import Schedules
from ampwise.observe.script import Ending, Stopped, Target, run
from ampwise.observe.session import Session
from ampwise.observe.steps import Step
from ampwise.observe.trainers import Trainers
from ampwise.policy import Policy
from ampwise.telemetry.environment import environment
from ampwise.telemetry.names import Metric

OnFault = Literal["diagnose", "stop", "off"]


@dataclass(frozen=True)
class RunConfig:
    """What is asked for.

    Attributes
    ----------
    steps
        After how many the script is stopped; None to let it end, or its race.
    race
        Precisions that take turns with the script's own.
    keep_checkpoints
        Whether checkpoints are written while it races.
    ranks
        How many processes train together.
    """

    target: Target
    steps: int | None = None
    on_fault: OnFault = "diagnose"
    race: Sequence[Policy] = ()
    keep_checkpoints: bool = False
    ranks: int = 1
    debug: bool = False


class Observation:
    """A script under observation.

    Parameters
    ----------
    sink
        Gets each step's number and metrics.
    """

    def __init__(
        self, config: RunConfig, sink: Callable[[int, Mapping[str, Metric]], None]
    ) -> None:
        self.config = config
        self.session = session = Session(debug=config.debug)
        self.autocasts = Autocasts(session)
        self.scalers = Scalers(session)
        self.schedules = Schedules(session)
        self.optimizers = Optimizers(session, self.scalers)
        self.loaders = Loaders(session)
        self.modules = Modules(session)
        self.trainers = Trainers(session)
        self.records = Records(session, self.scalers, self.schedules, sink)
        self.census = Census(session, self.modules)
        self.dtypes = Dtypes()
        self.misuse = Misuse(session, self.scalers)
        self.faults = Faults(
            session, self.autocasts, config.target.name, stop=config.on_fault == "stop"
        )
        self._things = (
            self.autocasts, self.scalers, self.schedules, self.optimizers, self.loaders,
            self.modules, self.trainers, Backwards(session, self.scalers),
            Clipping(session, self.scalers), self.faults,
        )  # fmt: skip
        self._patches = Patches()
        for each in (self.records, self.dtypes, self.census, self.misuse):
            session.listen(each)
        if config.on_fault != "off":
            session.listen(self.faults)
        self.checkpoints = Checkpoints(session)
        self.race = self._raced() if config.race else None
        session.listen(_Stop(config.steps))

    def run(self, on_terminate: Callable[[Ending], object]) -> Ending:
        """Run the script; it is observed until its end, whatever that is.

        Parameters
        ----------
        on_terminate
            Called when SIGTERM is about to end the process.
        """

        def terminated() -> None:
            self.finish()
            on_terminate(Ending(143, "terminated"))

        self.begin()
        try:
            return run(
                self.config.target, terminated, self.session.whole, all_frames=self.config.debug
            )
        finally:
            self.finish()

    def begin(self) -> None:
        """Put in place all that listens; `finish` takes it out."""
        for each in self._things:
            with self._patches.attempt(each.what):
                each.install(self._patches)

    def finish(self) -> None:
        """Observe no longer; all that is known is read."""
        self.census.end()
        self.faults.finish()
        if self.race is not None:
            self.race.leave()
        self.session.end_step()
        self.session.active = False
        self._patches.undo()
        self.records.finish()
        self.modules.let_go()

    def _raced(self) -> Racing:
        if not self.config.keep_checkpoints:
            self._things = (*self._things, self.checkpoints)
        config = self.config
        race = Racing(
            config.race, self.session, self.autocasts, self.modules,
            ranks=config.ranks, until_decided=config.steps is None,
        )  # fmt: skip
        self.session.listen(race)
        return race

    def _race_of(self, ending: Ending) -> dict[str, Raced]:
        if self.race is None:
            return {}
        scaled = self.records.scale is not None
        return self.race.results(ending, scaled=scaled, withheld=self.checkpoints.withheld)

    def report(self, ending: Ending) -> RunReport:
        """What was seen."""
        records = self.records
        losses, skips = records.losses, records.skips()
        precision = precision_of(
            self.autocasts, self.scalers, self.census, self.dtypes, self.trainers.line
        )
        return RunReport(
            script=self.config.target.name,
            exit_code=ending.exit_code,
            ending=ending.words,
            steps=records.steps,
            micro_batches_per_step=records.micro_batches,
            optimizers=list(self.optimizers.names.values()),
            precision=precision,
            loss_scale=records.scale,
            skips=skips,
            faults=self.faults.diagnoses,
            findings=self.misuse.findings(precision, records.scale, skips),
            waited_for_data=records.waited_s if self.loaders.used else None,
            race=self._race_of(ending),
            not_observed=self._not_observed(),
            overhead=self._overhead(),
            step_ms=records.step_ms,
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            ranks=self.config.ranks,
            environment=environment(records.device) if records.steps else {},
        )

    def _overhead(self) -> Overhead:
        spent_ms, step_ms = self.records.spent_ms, self.records.step_ms
        share = spent_ms / step_ms if spent_ms is not None and step_ms else None
        return Overhead(self.session.spent_s, spent_ms, share)

    def _not_observed(self) -> list[NotObserved]:
        missing = [*self._patches.missing, *self.session.failed, *self.faults.not_observed()]
        if self.records.steps and not self.census.made:
            missing.append(NotObserved("dtypes of matrix products", self.census.why_not))
        return missing


class _Stop(Listener):
    """Ends the script after so many steps."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps

    def step_ends(self, step: Step) -> None:
        """Raise in the script."""
        if self._steps is not None and step.number >= self._steps:
            raise Stopped
