"""Whether merges keep up with the learners."""

from diloco.pipeline.pacing import LastMerges, Pace, slow_merges
from tests import samples


def said(*merge_s, step_s=(0.1,), syncers=1, version=9, allowed=1.0, **sync):
    paces = [Pace(p, version, s) for p, s in enumerate(merge_s)]
    return slow_merges(samples.sync_spec(fragments=len(paces), **sync), paces, step_s, syncers, allowed)


def test_it_is_said_when_a_merge_takes_longer_than_a_round():
    """A round of 4 steps of 0.1 s; the slowest fragment is named."""
    assert said(0.39, 0.4) is None
    text = said(0.2, 1.3, 0.9)
    assert "2 of 3 fragments" in text
    assert "fragment 1 1.3 s, its round of 4 steps 0.4 s" in text


def test_a_round_is_the_interval_in_force_of_the_median_learner():
    """While the interval grows a round is shorter, and so it is the first interval that can be made longer."""
    ramp = {"first_interval": 1, "doubling": 2}
    assert "first_interval" in said(0.15, version=0, **ramp)
    assert said(0.15, version=2, **ramp) is None
    assert "--sync-interval" in said(0.5, version=9, **ramp)
    assert said(0.5, step_s=(0.1, 0.2, 5.0)) is None
    assert said(0.5, step_s=()) is said(0.5, step_s=(0.0,)) is None


def test_only_what_helps_is_advised():
    """More syncers than fragments merge nothing more, and only an orthogonalised step multiplies matrices."""
    alone, shared = said(1.0, 1.0, syncers=1, outer="muon"), said(1.0, 1.0, syncers=2)
    assert "cores" in alone
    assert "another syncer" in alone
    assert "--outer nesterov" in alone
    assert "OPENBLAS_NUM_THREADS" in alone
    assert "another syncer" not in shared
    assert "nesterov" not in shared


def test_one_hold_up_is_no_slow_merge():
    """Two in a row are."""
    last = LastMerges()
    found = []
    for took in (9.0, 0.1, 9.0, 8.0, 7.0, 0.1):
        last.took(took)
        found.append(last.merge_s)
    assert found == [0.0, 0.1, 0.1, 8.0, 7.0, 0.1]
