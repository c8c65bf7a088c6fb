"""`diloco demo`: a run in which one learner is killed and started again, with the step rates of the others."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from diloco.launcher import run
from diloco.launcher.option_checks import check_demo
from diloco.launcher.report import Kill, Origin, Outcome
from diloco.options import CHOSEN_BY_LAUNCHER, OF_ONE_LEARNER, DemoProcess, takes
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.status import LearnerStatus, Status, present


@dataclass(frozen=True, slots=True)
class Sample:
    """One report of a learner."""

    at_s: float
    """Time at which the report was made, on the launcher's monotonic clock."""
    incarnation: str
    step: int
    wall_s: float
    """The learner's own time since its first step."""


@dataclass(slots=True)
class StepLog:
    """Reports of all learners in the order in which they arrived."""

    by_learner: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, learners: Sequence[LearnerStatus], now_s: float) -> None:
        """Add the reports in a status (`pipeline.view.status`) that was read at `now_s`."""
        for learner in learners:
            if not learner["live"] or learner["step"] == 0:
                continue
            sample = Sample(now_s - learner["age_s"], learner["incarnation"], learner["step"], learner["wall_s"])
            samples = self.by_learner.setdefault(learner["id"], [])
            if not samples or (samples[-1].incarnation, samples[-1].step) != (sample.incarnation, sample.step):
                samples.append(sample)

    def all_under_way_s(self) -> float:
        """Return the time by which every learner had reported a step."""
        return max((samples[0].at_s for samples in self.by_learner.values()), default=0.0)

    def rate(self, learner: str, start_s: float, end_s: float) -> float | None:
        """Return a learner's inner steps per second between two moments, by its own clock.

        Only its last incarnation in between counts. The rate is None if that has fewer than two reports.
        """
        inside = [s for s in self.by_learner.get(learner, []) if start_s <= s.at_s <= end_s]
        inside = [s for s in inside if s.incarnation == inside[-1].incarnation]
        if len(inside) < 2 or inside[-1].wall_s <= inside[0].wall_s:
            return None
        return (inside[-1].step - inside[0].step) / (inside[-1].wall_s - inside[0].wall_s)


def measure(log: StepLog, killed: str, killed_s: float, restarted_s: float | None, end_s: float) -> dict[str, Any]:
    """Compute the step rates of the other learners before the kill, until the restart, and after it.

    Rates are in inner steps per second. `ratio_while` and `ratio_after` are the sums over learners, divided by the sums
    of the same learners before the kill.
    """
    spans = {"before": (log.all_under_way_s(), killed_s), "while": (killed_s, restarted_s or end_s)}
    if restarted_s is not None:
        spans["after"] = (restarted_s, end_s)
    others = {
        learner: {name: log.rate(learner, *span) for name, span in spans.items()}
        for learner in sorted(log.by_learner)
        if learner != killed
    }

    def ratio(name: str) -> float | None:
        pairs = [(rates.get(name), rates["before"]) for rates in others.values()]
        both = [(now, before) for now, before in pairs if now is not None and before is not None]
        return sum(now for now, _ in both) / total if (total := sum(before for _, before in both)) else None

    return {
        "steps_per_s_of_others": others,
        "ratio_while": ratio("while"),
        "ratio_after": ratio("after"),
        "away_s": None if restarted_s is None else restarted_s - killed_s,
    }


# --- the run ---------------------------------------------------------------------------------------------


class Demonstration(run.Launcher):
    """A run whose learner `kill_learner` is killed with SIGKILL, and started again later."""

    _settings: DemoProcess

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._steps = StepLog()
        self._kill: Kill | None = None
        self._killed_s = 0.0
        self._restarted_s: float | None = None

    def _note(self, status: Status) -> None:
        super()._note(status)
        if status["phase"] == Phase.RUNNING:
            self._steps.add(status["learners"], self._clock.now())

    def _has_learner(self, status: Status) -> bool:
        """Also count the killed learner, which will be started again."""
        return (self._kill is not None and self._restarted_s is None) or super()._has_learner(status)

    async def _check(self, status: Status) -> None:
        """Check the run; then kill the learner, or start it again, when it is time."""
        await super()._check(status)
        if status["phase"] != Phase.RUNNING:
            return
        settings, progress = self._settings, status["progress"]
        child = self._children[f"learner-{settings.kill_learner}"]
        if self._kill is None and progress >= settings.kill_at and child.under_way and child.alive:
            incarnation = next(one["incarnation"] for one in present(status["learners"]) if one["id"] == child.name)
            child.expected_end = True
            child.send(signal.SIGKILL)
            self._kill, self._killed_s = Kill(child.name, incarnation, progress, self._clock.unix()), self._clock.now()
            self._screen.note(f"{child.name} killed with SIGKILL at {progress:.0%}")
            await self._event("learner_killed", child.name, f"SIGKILL to pid {child.pid}")
        elif self._kill and self._restarted_s is None and not child.alive:
            if progress < settings.restart_at and super()._has_learner(status):
                return
            child.restart()  # also at once if no other learner is left, since then there is no progress to wait for
            self._kill.restarted_at, self._kill.restarted_unix_s = progress, self._clock.unix()
            self._restarted_s = self._clock.now()
            self._note_place()
            self._screen.note(f"{child.name} started again at {progress:.0%}")
            await self._event("learner_started", child.name, f"pid {child.pid}")

    async def gather(self, wall_s: float, origin: Origin | None) -> Outcome | None:
        """Gather the outcome of the run, and what the kill did."""
        outcome = await super().gather(wall_s, origin)
        if outcome is not None and (kill := self._kill) is not None:
            end_s = self._drained_from_s or self._clock.now()
            kill.rates = measure(self._steps, kill.learner, self._killed_s, self._restarted_s, end_s)
            outcome.kill = kill
        return outcome


@takes(DemoProcess, omit=CHOSEN_BY_LAUNCHER, moved=OF_ONE_LEARNER)
def command(settings: DemoProcess) -> None:
    """Train like `diloco run`, kill a learner with SIGKILL on the way and start it again: the others never wait.

    The report says how fast the others trained before the kill, meanwhile and afterwards.
    """
    check_demo(settings)
    raise typer.Exit(run.main(settings, Demonstration))
