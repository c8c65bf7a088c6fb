"""Gaps between commits, step rates around outages and goodput, from times alone."""

import pytest

from diloco_studies.strikes.rates import (
    Gap,
    Struck,
    around,
    goodput,
    longest_by_kind,
    outages,
)
from diloco_studies.strikes.schedule import Manner, Party


def struck(manner: Manner, party: Party, began_s: float, ended_s: float) -> Struck:
    return Struck(manner, party, party, began_s, ended_s)


def test_a_gap_counts_for_the_kind_of_strike_that_began_in_it() -> None:
    strikes = [
        struck(Manner.KILL, Party.LEARNER, 10.5, 11.2),
        struck(Manner.KILL, Party.REDIS, 12.1, 13.0),
        struck(Manner.KILL, Party.LEARNER, 12.5, 13.5),
        struck(Manner.PAUSE, Party.SYNCER, 30.0, 33.0),
    ]
    found = [Gap(10, 11), Gap(11, 12), Gap(12, 16), Gap(16, 17)]
    assert longest_by_kind(found, strikes) == {
        "kill learner": {"longest_s": 4, "alone_s": 1},
        "kill redis": {"longest_s": 4, "alone_s": None},
        "pause syncer": {"longest_s": None, "alone_s": None},
    }


def test_step_rates_are_taken_between_ends_of_steps() -> None:
    """Two steps a second, none while it waits: it waited from 20 to 25."""
    steps = [at / 2 for at in range(20, 41)] + [25 + at / 2 for at in range(1, 30)]
    found = around(steps, 20.0, 25.0)
    assert found["before"].per_s == 2.0
    assert found["during"].per_s == pytest.approx(1 / 5.5)
    assert found["after"].per_s == 2.0


def test_an_incarnation_that_did_not_live_through_an_outage_says_nothing_about_it() -> None:
    assert around([1.0, 2.0, 3.0], 3.5, 4.0) == {}
    assert around([5.0, 6.0], 3.5, 5.0) == {}
    assert around([], 3.5, 5.0) == {}


def test_outages_that_overlap_are_one() -> None:
    strikes = [
        struck(Manner.KILL, Party.REDIS, 10, 12),
        struck(Manner.KILL, Party.SYNCER, 11, 15),
        struck(Manner.KILL, Party.LEARNER, 5, 6),
        struck(Manner.KILL, Party.REDIS, 20, 21),
    ]
    assert outages(strikes, [Party.REDIS, Party.SYNCER]) == [Gap(10, 15), Gap(20, 21)]


def test_goodput_is_the_share_of_time_that_went_into_merged_tokens() -> None:
    steps = {"a": [("1", [float(at) for at in range(50)])], "b": [("2", [float(at) for at in range(30)])]}
    found = goodput(steps, learners=2, wall_s=50, tokens=800, merged_tokens=600)
    assert found.trained == pytest.approx(0.8)
    assert found.share == pytest.approx(0.6)
    assert goodput({}, 2, 50, 0, 0).share == 0.0
