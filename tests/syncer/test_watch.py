"""The syncer's view of the run: the drain's deadline and who is live, as readings come and stop coming. Pure."""

from collections.abc import Sequence

import pytest

from diloco.pipeline.messages.fragment import RefusalReason
from diloco.pipeline.messages.run import Phase, SeenReport
from diloco.syncer.admission import DeltaFormat, Offer
from diloco.syncer.membership import RunWatch
from diloco.syncer.window import Conditions, State, Window
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


def test_a_learner_that_is_silent_while_others_report_is_gone() -> None:
    """After the liveness time, on which nothing but an outage has a bearing."""
    watch = watch_of()
    for now in range(20):
        live = live_after(watch, float(now), samples.seen("l0"), samples.seen("l1", age_s=0.5 + now))
        assert live == (["l0", "l1"] if now <= LIVENESS_S else ["l0"])


def test_nobody_is_gone_at_once_after_an_outage() -> None:
    """Those who were live before it have the liveness time to report again; who was gone before stays so."""
    watch = watch_of()
    for now in range(20):
        live_after(watch, float(now), samples.seen("l0"), samples.seen("gone", age_s=10.0 + now))
    for now in range(50, 65):  # the last reading before was at 19
        live = live_after(
            watch, float(now), samples.seen("l0", age_s=now - 19 + 0.5), samples.seen("gone", age_s=10.0 + now)
        )
        assert live == (["l0"] if now <= 50 + LIVENESS_S else [])


def test_an_outage_that_comes_back_counts_from_the_first_one() -> None:
    """What the learner could not do in the first, it can do after the second."""
    watch = watch_of()
    for now in range(20):
        live_after(watch, float(now), samples.seen("l0"))
    for now in (40, 41, 60, 61):
        assert live_after(watch, float(now), samples.seen("l0", age_s=now - 19 + 0.5)) == ["l0"]
    for now in range(62, 70):
        live = live_after(watch, float(now), samples.seen("l0", age_s=now - 19 + 0.5))
        assert live == (["l0"] if now <= 60 + LIVENESS_S else [])


def test_who_comes_anew_takes_nobody_for_gone_at_once() -> None:
    """A syncer that is started after an outage has not seen how long it was."""
    watch = watch_of()
    for now in range(10):
        live = live_after(watch, 100.0 + now, samples.seen("l0", age_s=60.0 + now), samples.seen("l1", left=True))
        assert live == (["l0"] if now <= LIVENESS_S else [])


def test_who_still_joins_when_the_run_ends_is_no_part_of_the_quorum() -> None:
    """It has nothing to give: the last deltas of the others are merged without it."""
    watch = RunWatch(samples.sync_spec(quorum=2), LIVENESS_S, DRAIN_S)
    trains, joins = samples.seen("l0"), samples.seen("l1", versions=(-1, -1), tokens=0)
    for state, quorum in ((RUNNING, 2), (DRAINING, 1)):
        live_after(watch, 1.0, trains, joins, state=state)
        assert watch.conditions(0, 0, None, 1.0).quorum == quorum


@pytest.mark.parametrize("left", [[], [samples.seen("l1", left=True)]])
def test_an_upload_that_has_stopped_is_given_up_once_a_merge_needs_it_and_its_learner_is_gone(
    left: list[SeenReport],
) -> None:
    """Not before it was quiet for the liveness time; a learner that is here is waited for; a suspected one is not.

    One that has left is gone too: all of its upload was on the bus, and a failover may have lost the end of it.
    """
    watch = watch_of()
    live_after(watch, 0.0, samples.seen("l0"), *left)
    window = Window(samples.head(), DeltaFormat(bytes(16), "fp32", 3), 0.0)
    here, gone = (Offer(f"1-0@{name}", samples.header(name)) for name in ("l0", "l1"))
    for offer in (here, gone):
        window.offer(offer, 0.0)
    heard = {here: 1.0, gone: 2.0}
    nobody, quiet = frozenset[str](), 2.0 + LIVENESS_S
    assert watch.given_up(window, heard.__getitem__, quiet, nobody, nobody) == ([], None), "a grace needs no upload"
    window.decide(0.0, Conditions(2, frozenset({"l0", "l1"}), 2, 0.0, 30.0))
    assert window.state is State.UPLOADING
    assert watch.given_up(window, heard.__getitem__, quiet - 0.1, nobody, nobody) == ([], quiet)
    ((offer, refused),), again = watch.given_up(window, heard.__getitem__, quiet, nobody, nobody)
    assert (offer, refused.reason, again) == (gone, RefusalReason.UPLOAD_TIMEOUT, None)
    assert refused.lost_tokens == gone.header.tokens
    suspected = frozenset({"l0"})
    stopped, _ = watch.given_up(window, heard.__getitem__, quiet, suspected, nobody)
    assert [offer for offer, _ in stopped] == [here, gone]
    stopped, _ = watch.given_up(window, heard.__getitem__, quiet, suspected, frozenset({here.entry_id, gone.entry_id}))
    assert [offer for offer, _ in stopped] == [gone], "what still comes of a suspected one stays"
    assert window.member_offers() == (here, gone), "it decides, and changes nothing"
