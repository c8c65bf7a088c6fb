"""Step times that one thread writes and another one reads."""

import pytest

from diloco.pipeline.view.merged_share import RECENT_S, SAMPLE_S
from diloco.workers.step_times import StepTimes


def test_a_report_that_was_begun_before_training_is_a_report():
    """Its thread has read the clock, and waits; training begins; then it goes on."""
    times = StepTimes()
    times.training_begins(10.0)
    assert times.reported(9.99, last=False)["wall_s"] == 0.0
    assert times.reported(12.5, last=False)["wall_s"] == 2.5


def test_joining_lasts_until_training_begins():
    """A report that is written meanwhile says how long it has lasted."""
    times = StepTimes()
    assert times.reported(5.0, last=False)["joining_s"] == 0.0
    times.joining_begins(10.0)
    assert times.reported(13.0, last=False)["joining_s"] == 3.0
    for began_s in (14.0, 19.0):  # the second time it has its first shard
        times.training_begins(began_s)
        assert times.reported(30.0, last=False)["joining_s"] == began_s - 10.0


def test_a_report_says_what_it_said_five_minutes_ago():
    """To within the time between two samples; in a younger learner, what it said when training began."""
    times, said = StepTimes(), {}
    times.training_begins(100.0)
    for now in range(100, 1000):
        times.returned(now, now + 0.25, 1)
        report = times.reported(now, last=False)
        said[report["wall_s"]] = report["blocked_s"]
        wall_s, blocked_s = report["earlier"]
        assert blocked_s == (said[wall_s] if wall_s else 0.0)
        assert wall_s == 0 if now < 400 else RECENT_S <= report["wall_s"] - wall_s < RECENT_S + SAMPLE_S


def rate_after(took_s: list[float]) -> float:
    """Tokens per second that are reported after steps of 100 tokens that took so long."""
    times, now = StepTimes(), 50.0
    times.training_begins(now)
    for one in took_s:
        now += one
        times.entered(now)
        times.returned(now, now, 100)
    return float(times.reported(now, last=False)["tokens_per_s"])


def test_the_rate_of_who_comes_back_is_right_from_its_second_step_on():
    """The first step warms caches and compiles: it is told while there is no other, and says nothing later."""
    assert rate_after([]) == 0.0
    assert rate_after([5.0]) == pytest.approx(20.0)
    assert rate_after([5.0, 0.1]) == pytest.approx(1000.0)
    assert rate_after([5.0, 0.2, 0.1, 0.1]) == pytest.approx(1000 * (0.5 * 0.81 + 0.9 + 1) / (0.81 + 0.9 + 1))


def test_a_pause_is_no_lasting_dip():
    """A process that was stopped for a while is at its speed again, but for the one step."""
    assert rate_after([0.1] * 30 + [20.0] + [0.1] * 5) > 900
