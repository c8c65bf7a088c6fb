"""How long pulls take, smoothed, for a fragment of mean size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.workers.pull_times import SMOOTHING, PullTimes

sizes = st.lists(st.integers(1, 10**9), min_size=1, max_size=30)


def after(mean: float, *pulls: tuple[int, float]) -> float:
    times = PullTimes(mean)
    for elements, seconds in pulls:
        times.took(elements, seconds)
    return times.pull_s


def test_nothing_is_known_before_the_first_pull():
    """0.0 says so, and the syncer leaves it out."""
    assert after(10.0) == 0.0


def test_pulls_are_smoothed():
    """The first one sets the estimate, and a slow one moves it by its share only."""
    assert after(10.0, (10, 2.0)) == pytest.approx(2.0)
    assert after(10.0, (10, 2.0), (10, 4.0)) == pytest.approx(SMOOTHING * 2.0 + (1 - SMOOTHING) * 4.0)


@given(sizes, st.floats(1e-9, 1e-3))
def test_unequal_fragments_on_a_steady_link_give_the_time_of_the_mean_one(elements, element_s):
    """Also where the embedding is many times as large as the rest: a fragment's own time follows by its size."""
    mean = sum(elements) / len(elements)
    assert after(mean, *((n, n * element_s) for n in elements)) == pytest.approx(mean * element_s)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 1e6)), min_size=1, max_size=30))
def test_the_estimate_lies_between_the_quickest_and_the_slowest_pull_for_their_size(pulls):
    """Whatever the order."""
    rates = [seconds / elements for elements, seconds in pulls]
    assert min(rates) * (1 - 1e-9) <= after(1.0, *pulls) <= max(rates) * (1 + 1e-9)
