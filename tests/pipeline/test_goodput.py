"""How learners' time divides, and what it costs: exact sums from reports alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.messages.run import Phase, SeenReport
from diloco.pipeline.view.goodput import (
    ACTIVITIES,
    FAILURES,
    JOINING_S,
    cost,
    divide,
    goodput,
    summed,
    time_of_learners,
)
from diloco.pipeline.view.status import Goodput, build_status
from tests import samples

NOW_S, STARTED_S, LIVE_S = 2000.0, 1000.0, 5.0


def life(learner: str, began_s: float, heard_s: float, number: int = 0, **more: Any) -> SeenReport:
    """Return the last report of an incarnation, by the Unix times at which it began to train and was heard last."""
    fields = {"wall_s": heard_s - began_s, "incarnation": f"{number:08x}", "part_unix_s": None} | more
    return samples.seen(learner, NOW_S - heard_s, **fields)


def time_of(*reports: SeenReport, recent: bool = False, end_s: float = NOW_S) -> dict[str, dict[str, float]]:
    found = time_of_learners(reports, STARTED_S, end_s, NOW_S, LIVE_S, recent)
    return {name: {activity: s for activity, s in one.items() if s} for name, one in found.items()}


def test_a_killed_learner_is_away_until_it_begins_to_join_again() -> None:
    """Its joining after the death is another activity than the first one."""
    first = life("a", 1010, 1500, joining_s=10.0, blocked_s=49.0)
    assert time_of(first) == {"a": {"joining": 10, "training": 441, "blocked": 49, "away": 500}}
    back = life("a", 1600, NOW_S, 1, joining_s=30.0, blocked_s=0.0)
    assert time_of(back, first) == {
        "a": {"joining": 10, "training": 441 + 400, "blocked": 49, "away": 70, "rejoining": 30}
    }


def test_nobody_pays_for_the_time_after_a_learner_left_in_order() -> None:
    left = life("a", 1000, 1500, left=True)
    assert time_of(left) == {"a": {"training": 500}}
    assert time_of(left, life("a", 1700, NOW_S, 1, joining_s=20.0)) == {"a": {"training": 800, "joining": 20}}


def test_nobody_is_away_while_a_finished_run_waits_to_be_extended() -> None:
    """All had left; a learner that died before is missing again once training goes on. If all died, the run is down."""
    dead, last, again = life("a", 1000, 1100), life("c", 1000, 1200, left=True), life("c", 1900, NOW_S, 1)
    assert time_of(dead, last, again) == {"a": {"training": 100, "away": 200}, "c": {"training": 300}}
    assert time_of(dead, life("c", 1000, 1200), again)["a"] == {"training": 100, "away": 900}


def test_a_learner_may_claim_a_day_of_joining_at_most() -> None:
    assert time_of(life("a", 1000, NOW_S, joining_s=1e11)) == {"a": {"joining": JOINING_S, "training": 1000}}


def test_a_learner_that_was_heard_lately_is_not_away() -> None:
    assert time_of(life("a", 1000, NOW_S - LIVE_S + 1)) == {"a": {"training": 996}}
    assert time_of(life("a", 1000, NOW_S - LIVE_S - 1)) == {"a": {"training": 994, "away": 6}}


def test_a_learner_with_a_new_name_takes_the_place_of_a_dead_one() -> None:
    """As a pod does. It takes one place, the one that is empty longest, and only if the death was before it."""
    dead = [life("a", 1000, 1400), life("b", 1000, 1300)]
    new = life("c", 1550, NOW_S, joining_s=50.0)
    assert time_of(*dead, new) == {
        "a": {"training": 400, "away": 600},
        "b": {"training": 300, "away": 200},
        "c": {"training": 450, "rejoining": 50},
    }
    early = life("c", 1250, NOW_S, joining_s=50.0)
    assert time_of(*dead, early)["c"] == {"training": 750, "joining": 50}


def test_the_last_minutes_are_of_the_same_time() -> None:
    """Of the blocked time, the reports say how much of it was in the last minutes."""
    there = life("a", 1000, NOW_S, blocked_s=400.0, earlier=(700.0, 250.0))
    dead = life("b", 1000, 1750, joining_s=5.0)
    back = life("b", 1900, NOW_S, 1, joining_s=40.0)
    assert time_of(there, dead, back, recent=True) == {
        "a": {"training": 150, "blocked": 150},
        "b": {"training": 50 + 100, "away": 110, "rejoining": 40},
    }


def test_time_ends_with_the_run_and_training_begins_with_it() -> None:
    """A learner that was killed before the end is away until then, however late somebody looks."""
    reports = [life("a", 500, 1800, left=True), life("b", 1000, 1700)]
    assert time_of(*reports, end_s=1800.0) == {"a": {"training": 800}, "b": {"training": 700, "away": 100}}


NUMBERS = st.floats(0, 1e11)
REPORTS = st.lists(
    st.builds(
        lambda name, age_s, wall_s, blocked_s, joining_s, earlier, left: samples.seen(
            name, age_s, wall_s=wall_s, blocked_s=blocked_s, joining_s=joining_s, earlier=earlier, left=left
        ),
        st.sampled_from("abc"),
        st.one_of(st.floats(0, 1000), NUMBERS),
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.tuples(NUMBERS, NUMBERS),
        st.booleans(),
    ),
    max_size=6,
)


@given(REPORTS, st.booleans(), st.lists(st.integers(0, 10**12), min_size=4, max_size=4))
def test_goodput_and_badput_add_up_to_the_whole_whatever_reports_claim(
    reports: list[SeenReport], recent: bool, tokens: list[int]
) -> None:
    time = time_of_learners(reports, STARTED_S, NOW_S, NOW_S, LIVE_S, recent)
    assert all(s >= 0 for one in time.values() for s in one.values())
    found = divide(summed(time), tokens[0], dict(zip(("overwritten", "rejected", "died"), tokens[1:], strict=True)))
    if found["goodput"] is None:
        assert not sum(found["seconds"].values())
    else:
        assert found["goodput"] + sum(found["badput"].values()) == pytest.approx(1)
        assert all(0 <= one <= 1 + 1e-9 for one in (found["goodput"], *found["badput"].values()))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 60), st.floats(0, 50)), min_size=1, max_size=6))
def test_every_second_from_the_first_joining_to_now_has_one_activity(lives: list[tuple[float, float, float]]) -> None:
    """Of a learner that dies and comes back, each time."""
    at_s, reports = STARTED_S, []
    for number, (joining_s, wall_s, away_s) in enumerate(lives):
        began_s = at_s + joining_s
        at_s = began_s + wall_s
        reports.append(life("a", began_s, at_s, number, joining_s=joining_s, blocked_s=wall_s / 3))
        at_s += away_s
    silent_s = NOW_S - (at_s - away_s)
    found = time_of_learners(reports, STARTED_S, NOW_S, NOW_S, LIVE_S)["a"]
    assert sum(found.values()) == pytest.approx(NOW_S - STARTED_S - (0 if silent_s > LIVE_S else silent_s))
    assert found["blocked"] == pytest.approx(sum(wall_s for _, wall_s, _ in lives) / 3)


def test_training_divides_by_the_fate_of_its_tokens() -> None:
    seconds = dict(zip(ACTIVITIES, (80.0, 4.0, 6.0, 0.0, 10.0), strict=True))
    found = divide(seconds, 300, {"overwritten": 60, "died": 40})
    assert found["goodput"] == pytest.approx(0.6)
    assert found["badput"] == pytest.approx(
        {"blocked": 0.04, "joining": 0.06, "rejoining": 0, "away": 0.1, "overwritten": 0.12, "died": 0.08}
    )
    assert divide(seconds, 0, {"died": 0})["goodput"] == pytest.approx(0.8), "no token yet, and none lost"
    assert divide(seconds, None, {})["goodput"] is None
    assert divide(dict.fromkeys(ACTIVITIES, 0.0), 0, {})["goodput"] is None


def test_a_price_makes_the_same_shares_money() -> None:
    seconds = dict(zip(ACTIVITIES, (1.6 * 3600, 0.1 * 3600, 0.1 * 3600, 0.0, 0.2 * 3600), strict=True))
    division = divide(seconds, 600, {"overwritten": 100, "died": 100})
    found = cost({"since_start": division, "merged_tokens": 500_000}, 3.0)
    assert found is not None
    assert found["total"] == pytest.approx(6.0)
    assert found["per_million_merged_tokens"] == pytest.approx(12.0)
    assert found["badput"] == pytest.approx(
        {"blocked": 0.3, "joining": 0.3, "rejoining": 0, "away": 0.6, "overwritten": 0.6, "died": 0.6}
    )
    assert found["failures"] == pytest.approx(1.2) == sum(found["badput"][cause] for cause in FAILURES)
    unmerged = cost({"since_start": division, "merged_tokens": 0}, 3.0)
    assert unmerged is not None
    assert unmerged["per_million_merged_tokens"] is None
    unknown = divide(seconds, None, {})
    assert cost(None, 3.0) is cost({"since_start": unknown, "merged_tokens": 0}, 3.0) is None


def of_status(**state: Any) -> Goodput:
    """Return the goodput of a status: one learner trains, another one was killed; 1000 + 400 tokens."""
    reports = [
        samples.seen("a", 1.0, tokens=1000, wall_s=899.0, overwritten=80_000, earlier=(600.0, 0.0)),
        samples.seen("b", 600.0, tokens=400, wall_s=300.0, published=320_000, overwritten=0),
    ]
    heads = [samples.head(p, merged_tokens=800, rejected_tokens=80) for p in range(2)]
    given = samples.spec(), samples.run_state(**state), reports, heads, None, [], NOW_S, LIVE_S
    return build_status("run", *given)["goodput"]


def test_the_status_has_it() -> None:
    """Tokens that may still be merged are no badput; those of another part of the run do not count."""
    found = of_status()
    time_s = 899 + 300 + 600
    assert {name: s for name, s in found["since_start"]["seconds"].items() if s} == {"training": 1199, "away": 600}
    assert found["since_start"]["badput"]["away"] == pytest.approx(600 / time_s)
    assert found["since_start"]["badput"]["overwritten"] == pytest.approx(1199 / time_s * 100 / 1400)
    assert found["since_start"]["badput"]["rejected"] == pytest.approx(1199 / time_s * 80 / 1400)
    assert found["merged_tokens"] == 800
    assert found["recent"]["seconds"]["away"] == 300
    assert found["recent"]["goodput"] is None, "how much was merged lately is not known yet"
    assert found["learners"]["b"]["away"] == 600
    resumed = of_status(base_tokens=600, base_merged=300, base_overwritten=80_000, base_rejected=40_000)
    assert resumed["merged_tokens"] == 500
    lost = {"overwritten": 100, "rejected": 80, "died": 0}
    assert resumed["since_start"]["badput"] == pytest.approx(
        divide(resumed["since_start"]["seconds"], 1400 - 180, lost)["badput"]
    )


def test_the_last_minutes_are_told_from_what_the_lead_has_noted() -> None:
    """Of their lost tokens only the sum is known. 980 of the 1400 trained tokens are merged or lost by now."""
    samples_ = ((NOW_S - 300, 580, 500),)
    recent = of_status(samples=samples_)["recent"]
    merged = (800 - 500) / (980 - 580)
    training = 299 / (299 + 300)
    assert recent["goodput"] == pytest.approx(training * merged)
    assert recent["badput"] == pytest.approx(
        {"blocked": 0, "joining": 0, "rejoining": 0, "away": 300 / 599, "not_merged": training * (1 - merged)}
    )


def test_a_finished_run_that_lost_nothing_and_nobody_has_no_badput() -> None:
    reports = [samples.seen("a", 50.0, tokens=1000, wall_s=950.0, left=True)]
    heads = [samples.head(p, merged_tokens=1000) for p in range(2)]
    given = samples.spec(), samples.run_state(phase=Phase.FINISHED), reports, heads, None, [], NOW_S, LIVE_S
    found = build_status("run", *given)["goodput"]
    assert found["since_start"]["goodput"] == pytest.approx(1)
    assert set(found["since_start"]["badput"].values()) == {0.0}


def test_reports_of_an_earlier_part_of_the_run_do_not_count() -> None:
    reports = [samples.seen("a", 900.0, part_unix_s=500.0, wall_s=100.0), samples.seen("b", 0.0, wall_s=100.0)]
    found = goodput(reports, samples.run_state(), (0, 0, {}), None, (NOW_S, NOW_S, LIVE_S))
    assert found["learners"].keys() == {"b"}
