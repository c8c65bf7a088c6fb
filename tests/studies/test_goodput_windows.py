"""The syncer's decisions over learners' time lines: the production code, driven in virtual time."""

import numpy as np
import pytest

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.syncer.window import Collecting
from diloco.workers.rounds import Base, OpenWindow, Rounds
from diloco_studies.goodput.constants import DAY_S, Constants
from diloco_studies.goodput.fleet import simulate
from diloco_studies.goodput.job import Stops, Timeline
from diloco_studies.goodput.link import Link, link_of
from diloco_studies.goodput.parties import StepClock, bare
from diloco_studies.goodput.windows import Follower, Learner


def line(*stops, until=DAY_S):
    return Timeline(Stops(np.array([a for a, _ in stops]), np.array([b for _, b in stops])), until)


def rng():
    return np.random.default_rng(0)


def spec(quorum=1, interval=24, fragments=24, gamma=0.8):
    return bare(
        SyncSpec,
        fragments=fragments,
        sync_interval=interval,
        quorum=quorum,
        overlap_steps=2,
        grace_gamma=gamma,
        first_interval=0,
        doubling=1,
    )


def followed(learners, constants=None, until=DAY_S, waits=False, **sync):
    constants = constants or Constants(step_time=1, grace_gamma=sync.get("gamma", 0.8))
    follower = Follower(constants, learners, spec(**sync), rng(), waits=waits)
    follower.run(until)
    return follower


# --- step boundaries -----------------------------------------------------------------------------------------


def test_steps_stand_still_while_a_learner_is_paused():
    """A step that was under way goes on after the pause."""
    clock = StepClock(line((10.5, 20.0)), 2.0, 0.0, rng())
    assert [clock.step_at(t) for t in (0, 1.9, 2, 10, 15, 21.4, 21.5)] == [0, 0, 1, 5, 5, 5, 6]
    assert [clock.wall_s(k) for k in (1, 5, 6, 7)] == [2, 10, 21.5, 23.5]
    assert [clock.silent_s(t) for t in (10, 15, 20)] == [0, 4.5, 0]


def test_boundaries_and_step_counts_agree():
    """With pauses, waiting and random step lengths: after boundary k there are k steps."""
    clock = StepClock(line((10, 20), (25, 25.5), (40, 90)), 0.7, 0.3, rng())
    clock.waited_s = 3.3
    for k in range(1, 60):
        assert clock.step_at(clock.wall_s(k)) == k
        assert clock.step_at(clock.wall_s(k) - 1e-3) <= k


# --- decoupled learners --------------------------------------------------------------------------------------


def test_learners_in_step_are_all_in_every_merge():
    """No failures: everybody in, nothing stale, and of a round trip of 2.5 steps in a stretched interval of 30 two
    are overwritten: those before the one in which a learner adopts."""
    learners = [Learner(line(), 1.0) for _ in range(4)]
    tally = followed(learners, until=DAY_S / 4).tally
    summary = tally.summary(24)
    assert tally.merges > 700
    assert summary["mean_participants"] == 4
    assert summary["mean_staleness"] == 0
    assert summary["overwritten"] == pytest.approx(2 / 30, rel=0.05)
    assert summary["outer_steps_per_hour"] == pytest.approx(24 * 3600 / 30, rel=0.05)


def test_a_paused_learner_is_not_waited_for():
    """One of four stands still for hours: the others merge on, three at a time, at the same rate."""
    learners = [Learner(line(), 1.0) for _ in range(3)]
    learners.append(Learner(line((900, DAY_S)), 1.0))
    summary = followed(learners, until=DAY_S / 4).tally.summary(24)
    assert 3 < summary["mean_participants"] < 3.2
    assert summary["longest_gap_s"] < 40


def test_a_quorum_that_is_not_there_is_waited_for():
    """K = 4 of 4: merges stand still while one learner does; the others train on and have more overwritten."""
    learners = [Learner(line(), 1.0) for _ in range(3)] + [Learner(line((3600, 7200)), 1.0)]
    tally = followed(learners, quorum=4, until=DAY_S / 8).tally
    summary = tally.summary(24)
    assert summary["mean_participants"] == 4
    assert summary["longest_gap_s"] > 3600


def test_a_learner_that_was_late_is_merged_one_version_later():
    """The window waits for the first one's upload of 3 s: the other is stale by one, and joins the next window."""
    learners = [Learner(line(), 1.0), Learner(line(), 1.6)]
    constants = Constants(step_time=1, grace_gamma=0.0, link=1.6e10)
    summary = followed(learners, constants, until=20_000.0, gamma=0.0).tally.summary(24)
    assert 0.2 < summary["mean_staleness"] < 0.6
    assert summary["mean_participants"] > 1.3


# --- waiting learners ----------------------------------------------------------------------------------------


def test_learners_of_synchronous_diloco_wait_for_the_slowest():
    """Nothing is overwritten; the fast ones wait 20 of every 120 s, and everybody for the transfer."""
    learners = [Learner(line(), 1.0), Learner(line(), 1.2)]
    constants = Constants(step_time=1, link=1e15, merge_rate=1e15, latency=0.0)
    follower = followed(learners, constants, waits=True, quorum=2, interval=100, fragments=1)
    fast, slow = (waited for _, waited in follower.waits())
    assert fast == pytest.approx(DAY_S / 6, rel=0.02)
    assert slow < DAY_S / 100
    assert follower.tally.summary(1)["overwritten"] == 0
    assert follower.tally.summary(1)["mean_participants"] == 2


def test_waiting_learners_offer_again_what_an_outage_has_cost(tmp_path):
    """The upload overruns its deadline, the window opens again, and everybody goes on after the outage."""
    path = tmp_path / "trace.txt"
    path.write_text("0 1e10 0.05\n1530 0 0.05\n2000 1e10 0.05\n90000 1e10 0.05\n")
    constants = Constants(step_time=1, link_trace=path, params=9e9)
    learners = [Learner(line(), 1.0) for _ in range(3)]
    follower = followed(learners, constants, waits=True, quorum=3, interval=100, fragments=1)
    assert follower.tally.reopened >= 1
    assert follower.tally.merges > 500
    assert 400 < follower.tally.longest_gap_s < 800
    assert follower.tally.last_s > DAY_S - 300


def test_waiting_costs_goodput_and_uptime():
    """Decoupled learners have both; synchronous ones lose to each other's pauses and to transfers."""
    constants = Constants()
    decoupled, waiting = (simulate(constants, method, 600_000, 4, 4, 0) for method in ("decoupled", "diloco"))
    assert waiting.goodput < decoupled.goodput - 0.01
    assert waiting.lost["waiting for merges"] > 0
    assert waiting.uptime < decoupled.uptime
    assert waiting.goodput + sum(waiting.lost.values()) == pytest.approx(1)


# --- against the production learner ----------------------------------------------------------------------------


def test_the_simulated_learner_publishes_when_the_production_one_would():
    """Over all states of a learner: due, following, a member already, reopened."""
    sync = bare(
        SyncSpec, fragments=1, sync_interval=5, quorum=1, overlap_steps=1, grace_gamma=0.5, first_interval=0, doubling=1
    )
    tensor = TensorSpec(name="w", shape=(4,), dtype="float32", rule="mean", fragment=0)
    for steps_before in range(1, 8):
        for opened_at in (None, 1, 3, 5):
            for attempt in (0, 1):
                rounds = Rounds(layout_of((tensor,)), sync)
                for version in (0, 1):
                    rounds.adopt(Base(0, version, b"d" * 16, np.zeros(4, np.float32)))
                published = []
                for step in range(1, steps_before + 1):
                    rounds.trained(1)
                    window = {}
                    if opened_at is not None and step >= opened_at:
                        member = bool(published) and attempt == 0
                        window = {0: OpenWindow(1, attempt if published else 0, member)}
                    published += [(step, p.attempt, p.due) for p in rounds.publications(window)]
                assert published == _ours(steps_before, opened_at, attempt)


def _ours(steps_before, opened_at, attempt):
    """The same states, put to the simulated learner."""
    clock = StepClock(line(), 1.0, 0.0, rng())
    follower = Follower(
        Constants(step_time=1), [Learner(line(), 1.0)], spec(interval=5, fragments=1), rng(), waits=False
    )
    party = follower._parties[0]
    party.clock, party.version, follower._version, follower._intervals[1] = clock, 1, 1, 5
    published = []
    for step in range(1, steps_before + 1):
        follower._window = follower._new_window(0.0)
        if opened_at is not None and step >= opened_at:
            follower._window.phase = Collecting(0.0)
            follower._window.attempt = attempt if published else 0
            if published and attempt == 0:
                follower._window._members[party.name] = None
        before = party.serial
        follower._on_boundary(float(step), _boundary(party))
        if party.serial > before:
            steps = party.published_step - party.adopted_step
            published.append((step, party.published_attempt, steps >= 5))
    return published


def _boundary(party):
    from diloco_studies.goodput.windows import _Event

    return _Event(0.0, True, 0, "boundary", party, party.version)


# --- links ---------------------------------------------------------------------------------------------------


def test_a_transfer_takes_what_the_trace_gives(tmp_path):
    """10 bit/s for 5 s, an outage of 5 s, and again from the start."""
    path = tmp_path / "trace.txt"
    path.write_text("0 10 0.5\n5 0 0.5\n10 10 0.5\n")
    link = link_of(Constants(link_trace=path))
    assert link.ends_s(0, 20) == 2
    assert link.ends_s(0, 60) == pytest.approx(11)
    assert link.ends_s(6, 50) == pytest.approx(15)
    assert link.arrives_s(1) == 1.5
    assert link.arrives_s(7) == pytest.approx(10.5)
    assert link.ends_s(7, 0) == 7


def test_a_trace_that_cannot_be_is_refused(tmp_path):
    """Out of order, without any bandwidth, or with too few columns: with the file's name."""
    for text in ("0 1 1\n", "0 1\n1 1\n", "1 1 1\n2 1 1\n", "0 0 1\n1 0 1\n", "0 1 1\n0 1 1\n", "0 -1 1\n1 1 1\n"):
        path = tmp_path / f"bad{abs(hash(text))}.txt"
        path.write_text(text)
        with pytest.raises(UsageError, match="bad"):
            link_of(Constants(link_trace=path))
    assert isinstance(link_of(Constants()), Link)
