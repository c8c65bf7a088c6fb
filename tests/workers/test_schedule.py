"""Promises about the inner learning rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.workers.trainer.schedule import FRESH_MOMENTS_STEPS, learning_rate


def rate(progress: float, own_steps: int = 1000, warmup: float = 0.1) -> float:
    return learning_rate(progress, own_steps, peak=2.0, min_ratio=0.1, warmup=warmup)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(0.05, 1.0), (0.1, 2.0), (0.55, 1.1), (1.0, 0.2), (1.3, 0.2)],
    ids=["half warm", "peak", "half way down", "end", "past the budget"],
)
def test_the_curve(progress: float, expected: float) -> None:
    """Up in a straight line, down in a cosine, never below the floor."""
    assert rate(progress) == pytest.approx(expected)


def test_the_first_step_moves() -> None:
    """At progress 0 the rate is small, but not 0."""
    assert 0 < rate(0.0) < 0.1


def test_no_warm_up_begins_at_the_peak() -> None:
    assert rate(0.0, warmup=0.0) == pytest.approx(2.0)


def test_a_late_joiner_ramps_up_over_its_own_steps() -> None:
    """Fresh moments get a short extra ramp, after which it is on everybody's curve."""
    ramp = [rate(0.5, step) for step in range(FRESH_MOMENTS_STEPS + 1)]
    assert ramp[0] == pytest.approx(ramp[-1] / FRESH_MOMENTS_STEPS)
    assert ramp == sorted(ramp)
    assert ramp[-1] == ramp[-2] == rate(0.5)


def test_recovered_moments_need_no_ramp() -> None:
    assert learning_rate(0.5, 0, peak=2.0, min_ratio=0.1, warmup=0.1, ramp_steps=0) == rate(0.5)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.9))
def test_it_falls_after_warm_up_and_stays_in_bounds(a: float, b: float, warmup: float) -> None:
    early, late = sorted((a, b))
    assert 0 < rate(early, warmup=warmup) <= 2.0
    if early >= warmup:
        assert rate(late, warmup=warmup) <= rate(early, warmup=warmup) + 1e-12
