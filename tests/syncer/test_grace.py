"""The grace window's length, as a table."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.ema import Ema
from diloco.syncer.grace import LATELY, SLOWEST_FACTOR, GraceEstimator, MergedTimes, grace_covers_step
from diloco.syncer.times import TIMES
from tests import samples

times = st.floats(0, 1e4)


def estimator(quorum: float, sync: float, slowest: float | None = 1.0, tau: int = 2) -> GraceEstimator:
    known = GraceEstimator()
    known.observe(quorum, sync, slowest, tau)
    return known


def merged(*said: tuple[float, float], version: int = 1) -> MergedTimes:
    """(step, pull) of learners that one merge had a delta of."""
    times = MergedTimes()
    times.merged(version, [samples.header(f"l{n}", step_s=step, pull_s=pull) for n, (step, pull) in enumerate(said)])
    return times


@pytest.mark.parametrize(
    ("quorum", "sync", "slowest", "pull", "tau", "gamma", "latency", "expected"),
    [
        (0.1, 0.2, 1.0, 0.0, 1, 0.5, 0.0, 0.35),  # gamma * (tau * step - quorum - sync)
        (0.0, 0.0, 1.0, 0.0, 5, 0.9, 0.1, 1.35),  # capped at one step, a quarter more, and the latency
        (2.0, 1.0, 1.0, 0.0, 2, 0.9, 0.1, 0.0),  # no slack: never negative
        (0.1, 0.1, 1.0, 0.0, 0, 0.9, 0.1, 0.0),  # no overlap: no grace
        (0.0, 0.0, 1.0, 0.0, 2, 0.0, 0.1, 0.0),  # gamma 0: grace is off
        (0.1, 0.2, 1.0, 0.3, 1, 0.5, 0.0, 0.2),  # the sync time includes the pulls
        (0.1, 0.2, 3.0, 1.87, 2, 0.9, 0.0, 0.9 * 3.83),  # 7B, P = 24: 9.3 Gbit at 5 Gbit/s
        (0.0, 0.2, 1.0, 1.9, 2, 0.9, 0.1, 0.0),  # a link so slow leaves no slack
        (0.0, 0.2, 1.0, math.inf, 2, 0.0, 0.1, 0.0),
        (0.0, 0.0, 1e9, 0.0, 2, 0.9, 0.1, TIMES.max_grace_s),  # 40 years are no grace
    ],
)
def test_grace_is_a_share_of_the_slack_within_its_cap(quorum, sync, slowest, pull, tau, gamma, latency, expected):
    """The paper's formula of the adaptive grace window, by hand."""
    grace = estimator(quorum, sync, slowest, tau).grace_s(slowest, pull, tau, gamma, latency)
    assert grace == pytest.approx(min(expected, 1.25 * slowest + latency))


def test_no_grace_before_the_first_estimates():
    """None says that nothing is known yet; it is not zero. Pulls need not be: the first merge comes before any."""
    fresh = GraceEstimator()
    assert fresh.grace_s(1.0, 0.1, 2, 0.9, 0.1) is None
    fresh.observe(0.1, 0.1, 1.0, 2)
    assert fresh.grace_s(1.0, 0.0, 2, 0.9, 0.1) is not None
    assert fresh.grace_s(None, 0.1, 2, 0.9, 0.1) is None
    assert MergedTimes().slowest_s([1.0]) is None
    assert merged((0.0, 0.0)).slowest_s([1.0]) is None


@given(
    times,
    times,
    st.floats(0, 1e9),
    st.floats(0, allow_nan=False),
    st.integers(0, 50),
    st.floats(0, 0.99),
    st.floats(0, 10),
)
def test_grace_is_never_negative_and_never_beyond_its_cap(quorum, sync, slowest, pull, tau, gamma, latency):
    """Whatever was observed or said, the wait is bounded by one step of the slowest, the latency, and absolutely."""
    known = estimator(quorum, sync, slowest, tau)
    grace = known.grace_s(slowest, pull, tau, gamma, latency)
    assert 0 <= grace <= min(1.25 * slowest + latency, TIMES.max_grace_s)
    without = known.grace_s(slowest, 0.0, tau, gamma, latency)
    assert grace <= without, "what is counted besides only takes from the slack"


def test_a_window_waits_by_the_slowest_that_it_waits_for():
    """Mixed hardware has its grace, also of a learner that has just joined; who says nothing counts for nothing."""
    times = merged((1.0, 0.1), (2.0, 0.1))
    assert times.slowest_s([1.0, 2.0, 3.0]) == 3.0
    assert times.slowest_s([0.0, 1.0]) == 1.0
    assert times.slowest_s([]) == times.slowest_s([0.0]) == 2.0


@given(st.lists(st.floats(0, 1e9), max_size=20), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_no_report_stretches_a_window_beyond_what_merged_learners_say(reports, steps):
    """However many there are, and under whatever names."""
    usual = sorted(steps)[(len(steps) - 1) // 2]
    assert merged(*((step, 0.0) for step in steps)).slowest_s(reports) <= SLOWEST_FACTOR * usual


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0, 1e9))
def test_one_word_on_pulls_counts_no_further_than_the_others_words_do(honest, lie):
    """Whatever one of three or more says: what counts is between the fastest and the slowest pull of the rest."""
    assert min(honest) <= merged(*((1.0, pull) for pull in [*honest, lie])).pull_s <= max(honest)


@pytest.mark.parametrize(
    ("grace_s", "slowest_s", "waited"),
    [
        (1.0, 1.0, True),
        (0.9, 1.0, False),
        (1000.3 + TIMES.max_grace_s - 1000.3, 100.0, True),
        (TIMES.max_grace_s - 1, 100.0, False),
        (9.0, None, False),
    ],
)
def test_a_window_has_waited_after_a_step_or_for_as_long_as_it_may(grace_s, slowest_s, waited):
    """Also where a step takes longer than any grace: else whoever sends nothing would be waited for in each window."""
    assert grace_covers_step(grace_s, slowest_s) is waited


def test_who_was_not_merged_for_long_is_forgotten():
    """Each learner has one voice, its last one, for some merges: K = 1 takes one at a time."""
    times = merged((5.0, 0.0), version=1)
    for version in range(2, LATELY + 1):
        times.merged(version, [samples.header("l1", step_s=1.0)])
        assert sorted(times.steps) == [1.0, 5.0]
    times.merged(LATELY + 1, [samples.header("l1", step_s=2.0)])
    assert times.steps == [2.0]


HOURS = 5 * 3600.0


@pytest.mark.parametrize(("quorum", "sync"), [(HOURS, 0.3), (0.2, HOURS)], ids=["no quorum", "suspended"])
def test_one_window_that_took_hours_leaves_the_next_ones_their_grace(quorum, sync):
    """It counts as one that left no slack, however long it was: also a run's first one, while learners are started."""
    known, new = estimator(0.2, 0.3), estimator(quorum, sync)
    given = 1.0, 0.1, 2, 0.8, 0.01
    usual = known.grace_s(*given)
    known.observe(quorum, sync, 1.0, 2)
    assert known.grace_s(*given) >= 0.7 * usual
    for _ in range(4):
        new.observe(0.2, 0.3, 1.0, 2)
    assert new.grace_s(*given) >= 0.4 * usual


def test_a_window_in_which_no_step_time_was_known_counts_as_those_before():
    """Reports come a bit later than merges of short steps: there is an estimate all the same, and none of hours."""
    known, new, given = estimator(0.2, 0.3), GraceEstimator(), (1.0, 0.1, 2, 0.8, 0.01)
    usual = known.grace_s(*given)
    known.observe(HOURS, HOURS, None, 2)
    assert 0.3 * usual <= known.grace_s(*given) < usual
    new.observe(HOURS, HOURS, None, 2)
    assert new.grace_s(*given) >= usual, "it counts for nothing"


def test_estimates_are_smoothed():
    """One slow sync moves the estimate by its share only, and the first observation sets it."""
    average = Ema(decay=0.75)
    average.observe(4.0)
    assert average.value == 4.0
    average.observe(8.0)
    assert average.value == 5.0
