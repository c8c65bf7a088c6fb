"""The syncer's view of the run: the drain's deadline and who is live, as readings come and stop coming. Pure."""

from collections.abc import Sequence

from pipeline.messages import Phase, SeenReport
from syncer.watch import RunWatch
from tests import samples

LIVENESS_S, DRAIN_S = 5.0, 30.0
RUNNING, DRAINING = samples.run_state(), samples.run_state(phase=Phase.DRAINING)


def watch_of() -> RunWatch:
    return RunWatch(samples.sync_spec(), LIVENESS_S, DRAIN_S)


def live_after(watch: RunWatch, now: float, *seen: SeenReport, state: object = RUNNING) -> Sequence[str]:
    watch.refresh(seen, state, 0.0, now)  # type: ignore[arg-type]  # a RunState
    return [one.report.learner for one in watch.live()]


def test_a_drain_lasts_from_when_it_was_first_seen() -> None:
    """Later readings do not move its end; a drain that the bus has lost has none."""
    watch = watch_of()
    watch.refresh([], RUNNING, 0.0, 100.0)
    assert watch.drain_until is None
    for now in (101.0, 120.0):
        watch.refresh([], DRAINING, 0.0, now)
        assert watch.drain_until == 101.0 + DRAIN_S
    watch.refresh([], RUNNING, 0.0, 121.0)
    assert watch.drain_until is None
    watch.refresh([], DRAINING, 0.0, 122.0)
    assert watch.drain_until == 122.0 + DRAIN_S
