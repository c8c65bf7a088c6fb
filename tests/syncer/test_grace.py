"""The grace window's length, as a table."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.ema import Ema
from diloco.syncer.grace import GraceEstimator

times = st.floats(0, 1e4)


def estimator(quorum: float, sync: float, step_times: Sequence[float] = (1.0,), tau: int = 2) -> GraceEstimator:
    known = GraceEstimator()
    known.observe(quorum, sync, step_times, tau)
    return known


@pytest.mark.parametrize(
    ("quorum", "sync", "step_times", "pull_times", "tau", "gamma", "latency", "expected"),
    [
        (0.1, 0.2, [1.0], [], 1, 0.5, 0.0, 0.35),  # gamma * (tau * step - quorum - sync)
        (0.1, 0.2, [1.0, 2.0, 0.5], [], 1, 0.5, 0.0, 0.85),  # of the slowest
        (0.0, 0.0, [1.0], [], 5, 0.9, 0.1, 1.35),  # capped at one step, a quarter more, and the latency
        (2.0, 1.0, [1.0], [], 2, 0.9, 0.1, 0.0),  # no slack: never negative
        (0.1, 0.1, [1.0], [], 0, 0.9, 0.1, 0.0),  # no overlap: no grace
        (0.1, 0.2, [0.0, 1.0], [], 1, 0.5, 0.0, 0.35),  # 0.0 is not known yet
        (0.0, 0.0, [1.0], [], 2, 0.0, 0.1, 0.0),  # gamma 0: grace is off
        (0.1, 0.2, [1.0], [0.3], 1, 0.5, 0.0, 0.2),  # the sync time includes the pulls
        (0.1, 0.2, [1.0] * 3, [0.1, 0.3, 9.0], 1, 0.5, 0.0, 0.2),  # of which their median counts
        (0.1, 0.2, [1.0] * 2, [0.3, 9.0], 1, 0.5, 0.0, 0.2),  # of two the lower one
        (0.1, 0.2, [1.0] * 3, [0.0, 0.3, 0.3], 1, 0.5, 0.0, 0.2),  # also of one that has just joined
        (0.1, 0.2, [3.0], [1.87], 2, 0.9, 0.0, 0.9 * 3.83),  # 7B, P = 24: 9.3 Gbit at 5 Gbit/s
        (0.0, 0.2, [1.0], [1.9], 2, 0.9, 0.1, 0.0),  # a link so slow leaves no slack
        (0.0, 0.2, [1.0], [math.inf], 2, 0.0, 0.1, 0.0),
    ],
)
def test_grace_is_a_share_of_the_slack_within_its_cap(
    quorum, sync, step_times, pull_times, tau, gamma, latency, expected
):
    """The paper's formula of the adaptive grace window, by hand."""
    grace = estimator(quorum, sync, step_times, tau).grace_s(step_times, pull_times, tau, gamma, latency)
    assert grace == pytest.approx(min(expected, 1.25 * max(step_times) + latency))


def test_no_grace_before_the_first_estimates():
    """None says that nothing is known yet; it is not zero. Pulls need not be: the first merge comes before any."""
    fresh = GraceEstimator()
    assert fresh.grace_s([1.0], [0.1], 2, 0.9, 0.1) is None
    fresh.observe(0.1, 0.1, [1.0], 2)
    assert fresh.grace_s([1.0], [], 2, 0.9, 0.1) is not None
    assert fresh.grace_s([0.0, 0.0], [0.1], 2, 0.9, 0.1) is None
    assert fresh.grace_s([], [], 2, 0.9, 0.1) is None


@given(
    times,
    times,
    st.lists(st.floats(0, 1e3), max_size=8),
    st.lists(st.floats(0, allow_nan=False), max_size=8),
    st.integers(0, 50),
    st.floats(0, 0.99),
    st.floats(0, 10),
)
def test_grace_is_never_negative_and_never_beyond_its_cap(quorum, sync, step_times, pull_times, tau, gamma, latency):
    """Whatever was observed or said, the wait is bounded by one step of the slowest and the control latency."""
    grace = estimator(quorum, sync, step_times, tau).grace_s(step_times, pull_times, tau, gamma, latency)
    if grace is not None:
        assert 0 <= grace <= 1.25 * max(step_times) + latency
        without = estimator(quorum, sync, step_times, tau).grace_s(step_times, [], tau, gamma, latency)
        assert grace <= without, "what is counted besides only takes from the slack"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0, allow_nan=False))
def test_one_word_on_pulls_moves_the_grace_no_further_than_the_others_words_do(honest, lie):
    """Whatever one of three or more says: the grace is one that the fastest or the slowest pull of the rest gives."""

    def grace_of(pulls):
        return estimator(0.1, 0.2).grace_s([1.0] * 9, pulls, 2, 0.9, 0.1)

    assert grace_of([max(honest)]) <= grace_of([*honest, lie]) <= grace_of([min(honest)])


HOURS = 5 * 3600.0


@pytest.mark.parametrize(("quorum", "sync"), [(HOURS, 0.3), (0.2, HOURS)], ids=["no quorum", "suspended"])
def test_one_window_that_took_hours_leaves_the_next_ones_their_grace(quorum, sync):
    """It counts as one that left no slack, however long it was: also a run's first one, while learners are started."""
    steps, known, new = [1.0] * 4, estimator(0.2, 0.3), estimator(quorum, sync)
    given = steps, [0.1] * 4, 2, 0.8, 0.01
    usual = known.grace_s(*given)
    known.observe(quorum, sync, steps, 2)
    assert known.grace_s(*given) >= 0.7 * usual
    for _ in range(4):
        new.observe(0.2, 0.3, steps, 2)
    assert new.grace_s(*given) >= 0.4 * usual


def test_a_window_in_which_no_step_time_was_known_counts_as_those_before():
    """Reports come a bit later than merges of short steps: there is an estimate all the same, and none of hours."""
    known, new, given = estimator(0.2, 0.3), GraceEstimator(), ([1.0], [0.1], 2, 0.8, 0.01)
    usual = known.grace_s(*given)
    known.observe(HOURS, HOURS, [], 2)
    assert 0.3 * usual <= known.grace_s(*given) < usual
    new.observe(HOURS, HOURS, [0.0], 2)
    assert new.grace_s(*given) >= usual, "it counts for nothing"


def test_estimates_are_smoothed():
    """One slow sync moves the estimate by its share only, and the first observation sets it."""
    average = Ema(decay=0.75)
    average.observe(4.0)
    assert average.value == 4.0
    average.observe(8.0)
    assert average.value == 5.0
