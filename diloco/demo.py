"""The demonstration: kill one learner, start it again, and measure whether the others noticed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.status import LearnerStatus


@dataclass(frozen=True, slots=True)
class Sample:
    """What one learner had reported at one moment."""

    at_s: float
    """Launcher's monotonic time of the report itself."""
    incarnation: str
    step: int
    wall_s: float
    """The learner's own time since its first step."""


@dataclass(slots=True)
class StepLog:
    """Reports of all learners as they came by."""

    by_learner: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, learners: Sequence[LearnerStatus], now_s: float) -> None:
        """Take the learners of a status (`pipeline.status`) read at `now_s`."""
        for learner in learners:
            if not learner["live"] or learner["step"] == 0:
                continue
            sample = Sample(now_s - learner["age_s"], learner["incarnation"], learner["step"], learner["wall_s"])
            samples = self.by_learner.setdefault(learner["id"], [])
            if not samples or (samples[-1].incarnation, samples[-1].step) != (sample.incarnation, sample.step):
                samples.append(sample)

    def all_under_way_s(self) -> float:
        """When the last learner's first report of a step came."""
        return max((samples[0].at_s for samples in self.by_learner.values()), default=0.0)

    def rate(self, learner: str, start_s: float, end_s: float) -> float | None:
        """Inner steps per second of a learner between two moments, by its own clock.

        None with fewer than two reports of one incarnation in between.
        """
        inside = [s for s in self.by_learner.get(learner, []) if start_s <= s.at_s <= end_s]
        inside = [s for s in inside if s.incarnation == inside[-1].incarnation]
        if len(inside) < 2 or inside[-1].wall_s <= inside[0].wall_s:
            return None
        return (inside[-1].step - inside[0].step) / (inside[-1].wall_s - inside[0].wall_s)


def measure(log: StepLog, killed: str, killed_s: float, restarted_s: float | None, end_s: float) -> dict[str, Any]:
    """Step rates of the other learners before the kill, while the learner was away, and after its restart.

    Rates in inner steps per second; `ratio_while` and `ratio_after` compare the sums over learners with before.
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
