"""The lab's speeds and failures are functions of the seed; data-parallel pays for both as it does in the world."""

import math
from itertools import islice, pairwise

import pytest

from diloco_studies.quality.schedule import Schedule
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.synchronous import step_times


def test_mixed_hardware_is_slower_by_what_was_asked():
    """Every second learner by 18 %, and each step by up to 10 %."""
    schedule = Schedule(LabRun(slowdown=0.18, jitter=0.1))
    quick, slow = ([schedule.step_s(m, step) for step in range(500)] for m in (0, 1))
    assert 1.0 <= min(quick) < max(quick) < 1.1
    assert 1.18 <= min(slow) < max(slow) < 1.18 * 1.1
    assert sum(quick) / 500 == pytest.approx(1.05, abs=0.01)
    assert len(set(quick)) == 500


def test_failures_are_poisson_and_the_same_for_every_method():
    """Mean time between them as asked; another method of the same seed meets the same ones."""
    run = LabRun(fail_every_s=100.0, fail_down_s=30.0)
    outages = list(islice(Schedule(run).outages(1), 400))
    there = [after[0] - before[1] for before, after in pairwise(outages)]
    assert sum(there) / len(there) == pytest.approx(100, rel=0.15)
    assert all(end - begin == pytest.approx(30) for begin, end in outages)
    other = Schedule(run.model_copy(update={"method": "data-parallel"}))
    assert list(islice(other.outages(1), 400)) == outages
    assert list(islice(Schedule(run.model_copy(update={"seed": 1})).outages(1), 5)) != outages[:5]


def test_only_the_last_learner_joins_late():
    """The others are there from the start."""
    run = LabRun(learners=3, late_join_s=50.0)
    assert [list(Schedule(run).outages(m)) for m in range(3)] == [[], [], [(0.0, 50.0)]]


def test_data_parallel_waits_for_its_slowest_at_every_step():
    """A step takes as long as the slowest learner's; the rest of the others' time is lost."""
    steps = list(islice(step_times(LabRun(method="data-parallel", learners=2, slowdown=0.25)), 4))
    assert steps == [(1.25 * n, 2.25, 2) for n in (1, 2, 3, 4)]


def test_an_elastic_job_pauses_at_each_change_and_goes_on_with_fewer(monkeypatch):
    """Two pauses of 2 s for a learner away from 3.5 to 7.2; steps under way are lost, one learner trains meanwhile."""
    monkeypatch.setattr(Schedule, "outages", lambda self, m: iter([(3.5, 7.2)] if m == 0 else []))
    run = LabRun(method="data-parallel", learners=2, fail_every_s=1.0, resize_s=2.0)
    assert list(islice(step_times(run), 6)) == [
        (1.0, 2.0, 2),
        (2.0, 2.0, 2),
        (3.0, 2.0, 2),
        (6.5, 1.0, 1),
        (10.2, 2.0, 2),
        (11.2, 2.0, 2),
    ]


@pytest.mark.parametrize("method", ["data-parallel", "decoupled"])
def test_scavengers_are_there_for_a_part_of_the_run(method):
    """Two besides the two, from 5 s for 10 s; the others are there throughout."""
    run = LabRun(method=method, learners=2, scavengers=2, scavenge_from_s=5.0, scavenge_s=10.0)
    assert [list(Schedule(run).outages(m)) for m in range(run.members)] == [
        *([], []),
        *([(0.0, 5.0), (15.0, math.inf)],) * 2,
    ]
    assert list(Schedule(run.model_copy(update={"scavenge_s": None})).outages(2)) == [(0.0, 5.0), (math.inf, math.inf)]


def test_scavengers_cost_data_parallel_a_pause_when_they_come_and_when_they_go():
    """None at the start, where nobody runs yet; half a second for both, and the step under way is lost both times."""
    told = {"scavengers": 2, "scavenge_from_s": 5.5, "scavenge_s": 9.7, "resize_s": 0.5}
    steps = list(islice(step_times(LabRun(method="data-parallel", learners=2, **told)), 15))
    assert [members for _, _, members in steps] == [2] * 5 + [4] * 9 + [2]
    assert [round(at, 6) for at, _, _ in steps] == [1, 2, 3, 4, 5, *(6.0 + n for n in range(1, 10)), 16.7]


def test_what_happens_in_a_pause_is_dealt_with_by_it(monkeypatch):
    """One learner goes at 3.5 and is back at 4.5, another goes at 4 and is back at 9: two pauses of 2 s, not four."""
    outages = {0: [(3.5, 4.5)], 1: [(4.0, 9.0)]}
    monkeypatch.setattr(Schedule, "outages", lambda self, m: iter(outages.get(m, [])))
    run = LabRun(method="data-parallel", learners=3, fail_every_s=1.0, resize_s=2.0)
    assert [(round(at, 6), n) for at, _, n in islice(step_times(run), 8)] == [
        *((1.0, 3), (2.0, 3), (3.0, 3)),
        *((6.5, 2), (7.5, 2), (8.5, 2)),
        *((12.0, 3), (13.0, 3)),
    ]
