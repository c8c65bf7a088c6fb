"""The merged share: what it counts, and what it is measured from."""

import pytest

from diloco.pipeline.view.merged_share import (
    MAX_SAMPLES,
    MIN_S,
    RECENT_S,
    SAMPLE_S,
    recent_share,
    sample_due,
    shares,
    with_sample,
)


def noted(points):
    """Samples as the lead notes them at these (Unix time, settled, merged), one every quarter of a second at most."""
    samples = ()
    for at in points:
        if sample_due(samples, at[0]):
            samples = with_sample(samples, at)
    return samples


def steadily(until_s):
    """A run that merges half of what it trains, 100 tokens a second."""
    return [(at / 4, 25 * at, 25 * at // 2) for at in range(until_s * 4)]


def test_the_recent_share_is_of_the_last_five_minutes_only():
    """A run that merged nothing for an hour and all since is seen to be well now; its whole stays what it is."""
    points = [(float(s), 100 * s, 0) for s in range(3600)]
    points += [(3600.0 + s, 360_000 + 100 * s, 100 * s) for s in range(601)]
    found = shares(noted(points), *points[-1])
    assert found["recent"] == 1.0
    assert found["since_start"] == pytest.approx(1 / 7)
    assert RECENT_S <= found["recent_s"] < RECENT_S + SAMPLE_S


def test_a_share_that_is_of_all_of_the_run_is_known_to_say_nothing_new():
    """In a run's first five minutes; a resumed one has more behind it, and an older one too."""
    points = steadily(600)
    young = shares(noted(points[: 4 * 200]), *points[4 * 200])
    assert young["recent"] is not None
    assert young["recent_is_all"]
    assert not shares(noted(points), *points[-1])["recent_is_all"]
    resumed = [(at, trained + 50_000, merged + 20_000) for at, trained, merged in points]
    assert not shares(noted(resumed[: 4 * 200]), *resumed[4 * 200])["recent_is_all"]


def test_nothing_is_said_of_a_run_that_has_just_begun():
    """Merges come in lumps: the first seconds tell nothing, and no tokens are no share."""
    nothing = {"since_start": None, "pending": None, "recent": None, "recent_s": 0.0, "recent_is_all": True}
    assert shares((), 1000.0, 0, 0) == nothing
    samples = noted([(1000.0, 0, 0)])
    assert recent_share(samples, (1000.0 + MIN_S - 1, 500, 100))[0] is None
    assert recent_share(samples, (1000.0 + MIN_S, 500, 100)) == (0.2, MIN_S)


def test_merges_of_what_was_trained_before_are_no_more_than_all():
    """A drain merges what was pending while little is trained."""
    assert recent_share(((0.0, 1000, 100),), (60.0, 1100, 1000))[0] == 1.0


def test_merges_of_a_backlog_hide_no_loss():
    """After an outage: 1,000 tokens were trained in the last minutes, and 1,500 settled, of which 900 are merged."""
    found = shares(((0.0, 1000, 800),), 300.0, trained=3000, merged=1700, pending=500)
    assert found["recent"] == pytest.approx(900 / 1500)
    assert found["since_start"] == pytest.approx(1700 / 3000)
    during = shares(((0.0, 90, 90),), 300.0, trained=1100, merged=95, pending=900)
    assert during["recent"] == pytest.approx(5 / 110)
    assert not during["recent_is_all"], "it is shown"


def test_samples_of_a_history_that_the_bus_lost_do_not_count():
    """After a rewind totals are lower than some samples; a clock that was ahead leaves samples of the future."""
    samples = ((100.0, 1000, 500), (115.0, 2000, 1500), (900.0, 2000, 600))
    assert recent_share(samples, (200.0, 2000, 1000)) == (0.5, 100.0)
    assert with_sample(samples, (200.0, 2000, 1000)) == ((100.0, 1000, 500), (200.0, 2000, 1000))
    assert sample_due(samples, 200.0)


def test_samples_are_few_however_long_a_run_is():
    """They are in the run's state, which every learner reads."""
    assert len(noted(steadily(7200))) <= RECENT_S / SAMPLE_S + 2 <= MAX_SAMPLES
