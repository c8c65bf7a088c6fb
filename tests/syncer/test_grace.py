"""The grace window's length, as a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.syncer.grace import Ema, GraceEstimator

times = st.floats(0, 1e4)


def estimator(quorum: float, sync: float) -> GraceEstimator:
    known = GraceEstimator()
    known.observe_quorum(quorum)
    known.observe_sync(sync)
    return known


@pytest.mark.parametrize(
    ("quorum", "sync", "step_times", "tau", "gamma", "latency", "expected"),
    [
        (0.1, 0.2, [1.0], 1, 0.5, 0.0, 0.35),  # gamma * (tau * step - quorum - sync)
        (0.1, 0.2, [1.0, 2.0, 0.5], 1, 0.5, 0.0, 0.85),  # of the slowest
        (0.0, 0.0, [1.0], 5, 0.9, 0.1, 1.1),  # capped at one step and the latency
        (2.0, 1.0, [1.0], 2, 0.9, 0.1, 0.0),  # no slack: never negative
        (0.1, 0.1, [1.0], 0, 0.9, 0.1, 0.0),  # no overlap: no grace
        (0.1, 0.2, [0.0, 1.0], 1, 0.5, 0.0, 0.35),  # 0.0 is not known yet
        (0.0, 0.0, [1.0], 2, 0.0, 0.1, 0.0),  # gamma 0: grace is off
    ],
)
def test_grace_is_a_share_of_the_slack_within_its_cap(quorum, sync, step_times, tau, gamma, latency, expected):
    """The paper's formula of the adaptive grace window, by hand."""
    assert estimator(quorum, sync).grace_s(step_times, tau, gamma, latency) == pytest.approx(expected)


def test_no_grace_before_the_first_estimates():
    """None says that nothing is known yet; it is not zero."""
    fresh = GraceEstimator()
    assert fresh.grace_s([1.0], 2, 0.9, 0.1) is None
    fresh.observe_quorum(0.1)
    assert fresh.grace_s([1.0], 2, 0.9, 0.1) is None
    fresh.observe_sync(0.1)
    assert fresh.grace_s([1.0], 2, 0.9, 0.1) is not None
    assert fresh.grace_s([0.0, 0.0], 2, 0.9, 0.1) is None
    assert fresh.grace_s([], 2, 0.9, 0.1) is None


@given(times, times, st.lists(st.floats(0, 1e3), max_size=8), st.integers(0, 50), st.floats(0, 0.99), st.floats(0, 10))
def test_grace_is_never_negative_and_never_beyond_its_cap(quorum, sync, step_times, tau, gamma, latency):
    """Whatever was observed, the wait is bounded by one step of the slowest and the control latency."""
    grace = estimator(quorum, sync).grace_s(step_times, tau, gamma, latency)
    if grace is not None:
        assert 0 <= grace <= max(step_times) + latency


def test_estimates_are_smoothed():
    """One slow sync moves the estimate by its share only, and the first observation sets it."""
    average = Ema(decay=0.75)
    average.observe(4.0)
    assert average.value == 4.0
    average.observe(8.0)
    assert average.value == 5.0
