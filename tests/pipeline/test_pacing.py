"""Whether merges keep up with the learners."""

import pytest

from diloco.pipeline.needs import INTERVALS
from diloco.pipeline.outer_cost import Speed
from diloco.pipeline.pacing import Pace, long_rounds, merge_share, min_step_s, outer_budget, slow_merges
from diloco.syncer.grace import LastMerges
from tests import samples


def said(*merge_s, step_s=(0.1,), syncers=1, version=9, allowed=1.0, outer_s=0.0, **sync):
    paces = [Pace(p, version, s, outer_s) for p, s in enumerate(merge_s)]
    found = slow_merges(samples.sync_spec(fragments=len(paces), **sync), paces, step_s, syncers, allowed)
    return None if found is None else str(found)


def test_it_is_said_when_a_merge_takes_longer_than_a_third_of_a_round():
    """A round of 4 steps of 0.1 s; the slowest fragment is named, and what it costs."""
    assert said(0.12, 0.13) is None
    text = said(0.1, 1.2, 0.9)
    assert "2 of 3 fragments" in text
    assert "fragment 1 takes 1.2 s; it has 0.1 s of a 0.4 s round of 4 steps" in text
    assert "learners now train longer between syncs" in text


def test_the_share_of_the_worst_merge_is_above_1_as_soon_as_it_is_said():
    """What Prometheus goes by; it is not known before a step time is."""
    sync = samples.sync_spec(fragments=2)
    for merge_s, expected in ((0.1, 0.75), (0.2, 1.5)):
        paces = [Pace(0, 9, 0.01), Pace(1, 9, merge_s)]
        assert merge_share(sync, paces, [0.1]) == pytest.approx(expected)
        assert (slow_merges(sync, paces, [0.1], 1) is not None) == (expected > 1)
    assert merge_share(sync, paces, [0.0]) is None


def test_a_merge_may_take_the_steps_that_it_may_hide_behind():
    """However short a round is: tau = 2 of 4 steps are more than a third of them."""
    assert said(0.19, overlap_steps=2) is None
    assert said(0.21, overlap_steps=2)
    assert said(0.11, version=0, first_interval=1, overlap_steps=2), "no more than the round in force"


def test_what_the_outer_step_should_take_is_said_before_the_first_merge():
    """Reckoned for each fragment; and for all of them, where they are more than a round's cores can make."""

    def reckoned(*outer_s, together_s=0.0):
        paces = [Pace(p, 9, 0.0, s) for p, s in enumerate(outer_s)]
        sync = samples.sync_spec(fragments=len(paces), outer="halley")
        found = slow_merges(sync, paces, [0.1], 1, 1.0, together_s)
        return found and found.found

    assert reckoned(0.1, 0.13) is None
    assert "fragment 1 takes 0.2 s, 0.2 s of it the outer step" in reckoned(0.1, 0.2)
    assert reckoned(0.1, 0.1, 0.1, 0.1, 0.1, together_s=0.5) is None
    assert "5 of 5 fragments; fragment 4 takes 0.2 s" in reckoned(0.1, 0.1, 0.1, 0.1, 0.1, together_s=0.6)


def test_what_steps_took_counts_as_soon_as_two_are_made():
    """What only averaged tells nothing of a step."""
    last = LastMerges(expected_outer_s=3.0)
    found = []
    for outer_s in (None, 5.0, None, 4.0, 6.0):
        last.observe(9.0, outer_s)
        found.append((last.outer_s, last.measured))
    assert found == [(3.0, False)] * 3 + [(4.0, True)] * 2


def test_the_room_of_an_outer_step_is_that_of_the_full_interval():
    """A third of 4 steps of 0.1 s, and the fragment that is worst off."""
    budget = outer_budget(samples.sync_spec(first_interval=1), [Pace(0, 0, 0.0, 0.1), Pace(1, 0, 9.0, 0.2)], [0.1])
    assert budget == {"outer_s": 0.2, "room_s": pytest.approx(0.4 / 3), "share": pytest.approx(1.5)}
    assert outer_budget(samples.sync_spec(), [Pace(0, 0, 9.0)], [0.1]) is None
    assert outer_budget(samples.sync_spec(), [Pace(0, 0, 0.0, 0.1)], [0.0]) is None


def test_rounds_are_long_from_half_as_much_again() -> None:
    assert long_rounds(24, []) is None
    assert long_rounds(24, [24, 36]) is None
    assert "rounds take 37 inner steps instead of 24" in long_rounds(24, [24, 37])


def test_a_round_is_the_interval_in_force_of_the_median_learner():
    """While the interval grows a round is shorter, and so it is the first interval that can be made longer."""
    ramp = {"first_interval": 1, "doubling": 2}
    assert "first_interval" in said(0.12, version=0, **ramp)
    assert "first_interval" not in said(0.15, version=0, **ramp), "at the full interval it does not fit either"
    assert said(0.12, version=2, **ramp) is None
    assert "--sync-interval" in said(0.5, version=9, **ramp)
    assert said(0.25, step_s=(0.1, 0.2, 5.0)) is None
    assert said(0.5, step_s=()) is said(0.5, step_s=(0.0,)) is said(0.5, step_s=(1e-318,)) is None


def test_only_what_helps_is_advised():
    """More syncers than fragments merge nothing more, and only an orthogonalised step multiplies matrices."""
    alone, shared = said(20.0, 20.0, syncers=1), said(20.0, 20.0, syncers=2)
    assert "another syncer" in alone
    assert "another syncer" not in shared
    assert "OPENBLAS_NUM_THREADS" not in alone
    assert "nesterov" not in alone
    assert "OPENBLAS_NUM_THREADS=7" in said(1.0, 1.0, outer="halley", outer_s=0.9)


def helps(outer_s, *, at_once=8, threads=1, together_s=0.0, fragments=4, **sync):
    """For a round of 24 steps of 0.1 s, which has room for 0.8 s."""
    paces = [Pace(p, 9, 0.0, outer_s) for p in range(fragments)]
    spec = samples.sync_spec(fragments=fragments, sync_interval=24, **{"outer": "halley", **sync})
    found = slow_merges(spec, paces, [0.1], 1, 1.0, together_s, Speed(1e9, at_once, threads))
    return found.helps.split("; or ")


def test_two_things_are_advised_at_most_and_the_cheapest_first():
    """Threads cost no quality. Nesterov's step costs less than a round of twice the length."""
    found = helps(1.5)
    assert len(found) == 2
    assert "on 2 of its otherwise idle cores" in found[0]
    assert "--outer nesterov" in found[1]
    slower = helps(1.5, at_once=1)
    assert "--outer nesterov" in slower[0]
    assert "--sync-interval 48;" in slower[1]
    for outer_s in (0.9, 3.0, 30.0, 1e5):
        assert 1 <= len(helps(outer_s)) <= 2


def test_no_more_threads_are_advised_than_the_machine_has_cores():
    """Nor any for what all fragments together take, which more threads of each do not make shorter."""
    assert "OPENBLAS_NUM_THREADS=2)" in helps(1.5, at_once=2)[0]
    assert "OPENBLAS_NUM_THREADS=4)" in helps(1.5, at_once=2, threads=2)[0]
    for found in (helps(1.5, at_once=1), helps(3.0, at_once=2), helps(1.5, together_s=9.0)):
        assert "OPENBLAS_NUM_THREADS" not in " ".join(found)
    assert "another syncer" in helps(0.1, together_s=6.0)[0]
    assert "another syncer" not in " ".join(helps(0.1, together_s=60.0))


def test_no_interval_is_advised_that_no_plan_has_or_that_does_not_do():
    """The one that is advised leaves room; the longest of a plan is the last."""
    for outer_s in (1.7, 5.0, 17.0, 1e5):
        (said,) = [one for one in helps(outer_s, at_once=1) if "--sync-interval" in one] or [""]
        interval = int(said.partition("--sync-interval ")[2].partition(";")[0] or 0)
        assert (interval in INTERVALS and interval / 3 * 0.1 >= outer_s) if interval else outer_s > 512 / 3 * 0.1


def test_one_hold_up_is_no_slow_merge():
    """Two in a row are."""
    last = LastMerges()
    found = []
    for took in (9.0, 0.1, 9.0, 8.0, 7.0, 0.1):
        last.observe(took)
        found.append(last.merge_s)
    assert found == [0.0, 0.1, 0.1, 8.0, 7.0, 0.1]


@pytest.mark.parametrize(("outer_s", "together_s"), [(1.0, 1.0), (0.1, 4.0)])
def test_from_which_step_time_on_an_outer_step_fits(outer_s, together_s):
    """A little less, and it is warned of; whether one fragment's step is too long or all together."""
    sync = samples.sync_spec(fragments=1)
    step_s = min_step_s(sync, outer_s, together_s)
    pace = [Pace(0, 9, 0.0, outer_s)]
    assert slow_merges(sync, pace, [1.01 * step_s], 1, 1.0, together_s) is None
    assert slow_merges(sync, pace, [0.99 * step_s], 1, 1.0, together_s)


def test_there_is_advice_however_long_a_merge_takes():
    """Nothing in it is beyond what can be set: threads that BLAS has, and an interval that a plan has."""
    for outer_s in (0.0, 1e5):
        text = str(slow_merges(samples.sync_spec(fragments=1, outer="halley"), [Pace(0, 9, 1e5, outer_s)], [1e-3], 1))
        assert "OPENBLAS_NUM_THREADS" not in text
        assert "longer rounds" not in text
        assert "nesterov" in text if outer_s else "more cores" in text
