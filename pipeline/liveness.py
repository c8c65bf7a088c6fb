"""Which learners are live, by the age of their reports. Pure."""

from collections.abc import Sequence

from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.messages.run import RunState, SeenReport
from diloco.pipeline.units import counted


def is_live(seen: SeenReport, live_s: float) -> bool:
    """Return whether a learner has not left, and has reported within `live_s`."""
    return not seen.report.left and seen.age_s < live_s


def liveness_of(state: RunState | None, live_s: float | None = None) -> float:
    """Return the liveness time, s: the given one, otherwise the one in the run's state, else `live_s` of the bus."""
    said = None if state is None else state.liveness_s
    return live_s or said or BUS_TIMES.live_s


def quorum_missed(quorum: int, live: int) -> str:
    """Return a warning if fewer learners are live than a merge needs, otherwise ""."""
    if quorum <= live:
        return ""
    has = counted(live, "live learner")
    return f"nothing is merged: the quorum is {quorum}, and the run has {has}; start {quorum - live} more"


def live_learners(reports: Sequence[SeenReport], state: RunState | None) -> set[str]:
    """Return the live learners' ids, by the liveness time that the run's syncers use."""
    live_s = liveness_of(state)
    return {seen.report.learner for seen in reports if is_live(seen, live_s)}
