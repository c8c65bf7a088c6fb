"""A learner's lane from one look to the next: what is a gap, and what is only late."""

import pytest

from diloco.pipeline.messages.run import SeenReport
from diloco.pipeline.view.page.lanes import LearnerBits, LearnerLife
from diloco.pipeline.view.page.timeline import Timeline
from diloco.pipeline.view.status import LearnerStatus, build_status
from tests import samples


def learner(seen: SeenReport) -> LearnerStatus:
    return build_status("run", None, None, [seen], [], None, [], 0.0, 5.0)["learners"][0]


def gone_s(times: Timeline) -> float:
    return sum(times.step_s for bits in times.lanes["L/l0"] if bits & LearnerBits.GONE)


@pytest.mark.parametrize(("made", "gap"), [(30, False), (1, True)], ids=["it went on", "it stood still"])
def test_a_gap_of_who_went_on_is_filled(made: int, gap: bool) -> None:
    """Reports that come late leave none: its steps show that it trained. A process that was stopped has one."""
    times, life = Timeline(1000.0, 0.5, sliding=True), LearnerLife()
    for now_s, age_s, step in ((1010.0, 0.0, 100), (1013.0, 3.0, 100), (1013.5, 0.0, 100 + made)):
        seen = samples.seen("l0", age_s=age_s, step=step, step_s=0.1, wall_s=5.0)
        does = life.draw([times], learner(seen), publishing=False, behind=0, now_s=now_s, over=False)
        assert bool(does & LearnerBits.GONE) is (age_s > 1)
    assert (gone_s(times) > 1) is gap


def test_who_reports_and_makes_no_step_waits() -> None:
    """Not while a step may take as long."""
    for step_s, does in ((0.1, LearnerBits.WAITING), (60.0, LearnerBits.TRAINING)):
        times, life = Timeline(1000.0, 0.5, sliding=True), LearnerLife()
        for now_s in (1010.0, 1011.0, 1030.0):
            seen = samples.seen("l0", age_s=0.0, step=100, step_s=step_s, wall_s=5.0)
            said = life.draw([times], learner(seen), publishing=False, behind=0, now_s=now_s, over=False)
        assert said == does


def test_who_left_in_order_is_no_gap() -> None:
    """Neither after it has left, nor until another life of it begins."""
    times, life = Timeline(1000.0, 0.5, sliding=True), LearnerLife()
    for now_s, age_s, incarnation, left in (
        (1010.0, 0.0, "a" * 8, False),
        (1020.0, 9.0, "a" * 8, True),
        (1040.0, 0.0, "b" * 8, False),
    ):
        seen = samples.seen("l0", age_s=age_s, step=100, incarnation=incarnation, left=left, wall_s=5.0)
        life.draw([times], learner(seen), publishing=False, behind=0, now_s=now_s, over=False)
    assert gone_s(times) == 0
    assert sum(bool(bits & LearnerBits.BEGAN) for bits in times.lanes["L/l0"]) == 2
