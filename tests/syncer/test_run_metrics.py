"""Figures of the whole run at `/metrics`: once, of the lead, from the page's reading, and of who is there."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.messages.fragment import Contribution, Rewound
from diloco.pipeline.messages.run import Evaluation, Phase
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.page.last_poll import MAX_LISTED, SHOWN_S, Reading
from diloco.pipeline.view.page.model import Poll
from diloco.pipeline.view.status import build_status
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.metrics import Metrics
from diloco.syncer.run_metrics import FIGURES, RunMetrics
from diloco.syncer.serving.checkpointing import Checkpoints
from diloco.syncer.times import TIMES
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests import samples
from tests.syncer.test_several_syncers import ENDLESS, LEASE_S, Syncer, ask_to_drain, learners_of
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, sync_spec

pytestmark = pytest.mark.usefixtures("no_log_lines")

NOW_S = 5000.0


class At:
    """A clock that is set."""

    def __init__(self, unix_s: float = NOW_S) -> None:
        self.unix_s = unix_s

    def now(self) -> float:
        return self.unix_s

    def unix(self) -> float:
        return self.unix_s


def poll(reports: list[Any], now_s: float = NOW_S, versions: tuple[int, int] = (3, 5), **given: Any) -> Poll:
    """Of a run of two fragments (3/4 and 1/4 of the model), an interval of 4 steps and a quorum of 2."""
    state = samples.run_state(**{"started_unix_s": NOW_S - 100, "budget_tokens": 10_000} | given)
    heads = [samples.head(p, version=versions[p], merged_tokens=800, rejected_tokens=80) for p in range(2)]
    evaluation = Evaluation(loss=2.25, tokens=900, versions=versions, unix_s=now_s, elapsed_s=90.0, final=False)
    status = build_status(
        "run", samples.spec(quorum=2), state, reports, heads, evaluation, [], now_s, 5.0, {"0": "a"}, ["0", "0"]
    )
    info = BusInfo("id", "7", 10_000, 2_500, received_bytes=700, sent_bytes=900)
    return Poll(now_s=now_s, status=status, info=info)


def shown(reading: Reading, clock: At | None = None, leads: bool = True) -> CollectorRegistry:
    metrics = Metrics("my-run")
    metrics.registry.register(
        RunMetrics(reading, clock or At(reading.poll.now_s if reading.poll else 0), lambda: leads)
    )
    return metrics.registry


def values(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """By the label besides the run; "" without one."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == name:
                labels = dict(sample.labels)
                assert labels.pop("run") == "my-run"
                found["".join(labels.values())] = sample.value
    return found


def test_every_figure_says_what_the_status_says() -> None:
    """Tokens by fate add up to the trained ones; a learner's staleness is that of its worst fragment."""
    reading = Reading()
    reports = [
        samples.seen("l0", 0.5, tokens=1000, step=40, overwritten=80_000, versions=(3, 5), step_s=0.1),
        samples.seen("l1", 1.5, tokens=600, step=24, versions=(3, 2), step_s=0.3),
        samples.seen("l2", 60.0, tokens=400, step=9, versions=(-1, -1), step_s=9.0, loss=None),
    ]
    reading.see(poll(reports))
    registry = shown(reading, At(NOW_S + 1))

    def of(name: str) -> dict[str, float]:
        return values(registry, f"diloco_{name}")

    fates = of("run_tokens")
    assert fates == {"merged": 800, "overwritten": 100, "rejected": 80, "died": 400, "pending": 620}
    assert sum(fates.values()) == of("run_trained_tokens")[""] == 2000
    assert of("run_phase") == {"running": 1, "draining": 0, "closing": 0, "finished": 0}
    assert (of("run_loss"), of("run_loss_tokens"), of("run_budget_tokens")) == ({"": 2.25}, {"": 900}, {"": 10_000})
    assert of("run_learners") == {"live": 2, "silent": 1, "left": 0}
    assert of("run_quorum") == {"": 2}
    assert of("run_merged_share") == {"": pytest.approx(0.4)}
    assert of("run_merged_share_recent") == {}, "not known yet, and no number that could be taken for one"
    assert of("learner_steps_total") == {"l0": 40, "l1": 24, "l2": 9}
    assert of("learner_tokens_total") == {"l0": 1000, "l1": 600, "l2": 400}
    assert of("learner_stale_versions") == {"l0": 0, "l1": 3, "l2": 0}
    assert of("learner_silent_seconds") == {"l0": 1.5, "l1": 2.5, "l2": 61.0}
    assert of("learner_loss") == {"l0": 2.5, "l1": 2.5}
    assert of("fragment_version") == {"0": 3, "1": 5}
    assert of("fragment_round_seconds") == {"0": pytest.approx(0.8), "1": pytest.approx(0.8)}, "the live ones' median"
    assert (of("redis_used_bytes"), of("redis_max_bytes")) == ({"": 2500}, {"": 10_000})
    assert (of("redis_received_bytes_total"), of("redis_sent_bytes_total")) == ({"": 700}, {"": 900})


def test_time_by_activity_is_counted_and_never_falls() -> None:
    """A report that arrives later than the one before moves the end of an absence, which must not look like a restart
    of the counter. Goodput and badput add up to 1."""
    reading = Reading()
    there = samples.seen("l0", 0.0, wall_s=90.0, joining_s=6.0, blocked_s=9.0)
    dead = samples.seen("l1", 60.0, wall_s=30.0)
    for late_s in (0.0, 1.0):
        back = samples.seen("l1", late_s, incarnation="1" * 8, wall_s=20.0)
        reading.see(poll([there, dead, back]))
    registry = shown(reading)
    assert values(registry, "diloco_learner_seconds_total") == {
        **{"l0training": 81, "l0blocked": 9, "l0joining": 6, "l0rejoining": 0, "l0away": 0},
        **{"l1training": 50, "l1blocked": 0, "l1joining": 0, "l1rejoining": 0, "l1away": 40},
    }
    time = values(registry, "diloco_run_learner_seconds_total")
    assert time == {"training": 131, "blocked": 9, "joining": 6, "rejoining": 0, "away": 40}
    badput = values(registry, "diloco_run_badput")
    assert badput["blocked"] == pytest.approx(9 / 185)
    assert badput.keys() >= {"away", "joining", "overwritten", "rejected", "died"}
    assert values(registry, "diloco_run_goodput")[""] + sum(badput.values()) == pytest.approx(1)


def test_only_the_lead_tells_of_the_run_and_only_what_it_read_lately() -> None:
    """A sum over syncers counts it once; where Redis is away there are no figures rather than old ones."""
    reading = Reading()
    assert "diloco_run" not in generate_latest(shown(reading)).decode()
    reading.see(poll([samples.seen()]))
    assert "diloco_run_trained" in generate_latest(shown(reading)).decode()
    for clock, leads in ((At(NOW_S), False), (At(NOW_S + TIMES.reading_s + 1), True)):
        text = generate_latest(shown(reading, clock, leads)).decode()
        assert "diloco_run" not in text
        assert "diloco_learner_" not in text
        assert 'diloco_bus_errors_total{run="my-run"} 0.0' in text


@in_virtual_time
async def test_a_sum_over_syncers_is_the_runs_also_when_the_lead_changes() -> None:
    """Two syncers serve; the lead dies, and the other one tells what it told."""

    async def told(lead: Syncer, other: Syncer) -> float:
        return sum(
            one.service.metrics.registry.get_sample_value("diloco_run_trained_tokens") or 0 for one in (lead, other)
        )

    world = VirtualRun(sync_spec(fragments=4, tokens=ENDLESS), lease_s=LEASE_S)
    syncers = [Syncer(world, name) for name in "ab"]
    looking = []
    for one in syncers:
        collector = Collector(MemoryBus(RUN, world.clock, world.store), VirtualClock())
        one.service.metrics.registry.register(RunMetrics(collector.reading, collector._clock, one.service.leads))
        looking.append(asyncio.create_task(collector.run()))
    learners = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await asyncio.sleep(60)
    gauges = [one.service.metrics.leads.collect()[0].samples[0].value for one in syncers]
    assert sorted(gauges) == [0, 1]
    lead, other = syncers if gauges[0] else syncers[::-1]
    now = (await read_status(world.bus, world.clock))["tokens"]
    assert await told(lead, other) == pytest.approx(now, rel=0.1)
    await lead.kill()
    looking[syncers.index(lead)].cancel()
    for owner in lead.service.owners:
        owner.lease.clear()  # its process is gone
    await asyncio.sleep(3 * LEASE_S)
    now = (await read_status(world.bus, world.clock))["tokens"]
    assert await told(lead, other) == pytest.approx(now, rel=0.1)
    served = [one.service.metrics.served_fragments.collect()[0].samples[0].value for one in (lead, other)]
    assert served == [0, 4]
    await other.end()
    for task in (*looking, *(learner.task for learner in learners if learner.task)):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stopped", [False, True], ids=["its run is finished", "it is told to stop"])
@in_virtual_time
async def test_a_syncer_that_saves_at_its_end_does_not_say_that_nobody_leads(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leases are given back before the last checkpoint, which may take minutes: the gauge is NaN, never 0."""
    saving: list[float] = []
    world = VirtualRun(sync_spec(fragments=2, tokens=ENDLESS), lease_s=LEASE_S, checkpoint_dir=tmp_path)
    syncer = Syncer(world, "a")
    gauge = syncer.service.metrics.leads

    async def save(*_: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            saving.append(gauge.collect()[0].samples[0].value)

    monkeypatch.setattr(Checkpoints, "save_finished", save)
    monkeypatch.setattr(Checkpoints, "save_stopped", save)
    learners = learners_of(world)
    await asyncio.sleep(60)
    assert gauge.collect()[0].samples[0].value == 1
    if stopped:
        await syncer.end()
    else:
        await ask_to_drain(world)
        await syncer.task
    for task in (learner.task for learner in learners if learner.task):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(saving) == 3
    assert all(math.isnan(value) for value in saving)


def test_series_of_learners_that_are_gone_go_away() -> None:
    """One that left at once, one that died after a while; and there are never more than so many."""
    reading = Reading()
    reading.see(poll([samples.seen("here"), samples.seen("dead", SHOWN_S - 1), samples.seen("left", 1, left=True)]))
    assert set(values(shown(reading), "diloco_learner_steps_total")) == {"here", "dead"}
    reading.see(poll([samples.seen("here"), samples.seen("dead", SHOWN_S + 1)]))
    assert set(values(shown(reading), "diloco_learner_steps_total")) == {"here"}
    reading.see(poll([samples.seen(f"l{n}", n / 1000) for n in range(MAX_LISTED + 50)]))
    steps = values(shown(reading), "diloco_learner_steps_total")
    assert (len(steps), f"l{MAX_LISTED}" in steps) == (MAX_LISTED, False)
    assert values(shown(reading), "diloco_run_learners")["live"] == MAX_LISTED + 50


def part(learner: str, cosine: float | None) -> Contribution:
    """Of a merge on the tape."""
    counters = {"base_version": 0, "attempt": 0, "steps": 4, "tokens": 40}
    return Contribution(learner=learner, incarnation="0" * 16, weight=0.5, norm=1.0, cosine=cosine, **counters)


def test_a_learners_cosine_is_that_of_its_last_merge_by_the_tape_until_it_is_gone() -> None:
    reading, there = Reading(), [samples.seen("l0"), samples.seen("l1")]

    def told(reports: list[Any], **cosines: float | None) -> dict[str, float]:
        parts = tuple(part(name, cosine) for name, cosine in cosines.items())
        reading.see(replace(poll(reports), records=[samples.committed(contributions=parts)] if parts else []))
        return values(shown(reading), "diloco_learner_cosine")

    assert told(there) == {}
    assert told(there, l0=0.5, l1=-0.25, unheard=0.1) == {"l0": 0.5, "l1": -0.25}
    assert told(there, l0=0.75) == {"l0": 0.75, "l1": -0.25}
    assert told(there, l1=None) == {"l0": 0.75}, "alone in its window: nobody is there whom it could pull against"
    assert told(there, l1=-0.5) == {"l0": 0.75, "l1": -0.5}
    assert told(there[:1]) == {"l0": 0.75}
    assert reading.cosines == {"l0": 0.75}


def test_the_outer_steps_of_the_last_merges_are_shown_by_fragment() -> None:
    """A fragment keeps its last ones; version 0 is not a merge; what is not known is left out."""
    reading, of = Reading(), ("delta_norm", "step_norm", "outer_rate", "rho")

    def told(*records: Any) -> list[dict[str, float]]:
        reading.see(replace(poll([samples.seen()]), records=records))
        return [values(shown(reading), f"diloco_fragment_{name}") for name in of]

    def merge(fragment: int, **given: Any) -> Any:
        return samples.committed(fragment=fragment, version=1, contributions=(part("l0", None),), **given)

    assert told(samples.committed(fragment=0), samples.committed(fragment=1)) == [{}, {}, {}, {}]
    first = merge(0, norm=4.0, step_norm=3.0)
    assert told(first, merge(1)) == [{"0": 4, "1": 0}, {"0": 3}, {"0": 0.75}, {}]
    second = merge(1, norm=2.0, step_norm=5.0, rho=-0.5)
    assert told(second) == [{"0": 4, "1": 2}, {"0": 3, "1": 5}, {"0": 0.75, "1": 2.5}, {"1": -0.5}]


def test_a_fragment_is_unmerged_since_its_last_merge() -> None:
    """Not while nothing is trained yet or any more; a rewind is no merge, the merge after it is one."""
    reading = Reading()

    def unmerged(now_s: float, versions: tuple[int, int], phase: Phase = Phase.RUNNING) -> dict[str, float]:
        reading.see(poll([samples.seen()], now_s, versions, phase=phase))
        return values(shown(reading, At(now_s)), "diloco_fragment_unmerged_seconds")

    assert unmerged(NOW_S, (3, 5)) == {"0": 0, "1": 0}
    assert unmerged(NOW_S + 10, (3, 6)) == {"0": 10, "1": 0}
    assert unmerged(NOW_S + 20, (1, 6)) == {"0": 20, "1": 10}
    assert unmerged(NOW_S + 30, (2, 6)) == {"0": 0, "1": 20}
    assert unmerged(NOW_S + 40, (2, 6), Phase.DRAINING) == {"0": 0, "1": 0}


@pytest.mark.parametrize("left", [False, True], ids=["died", "left"])
def test_a_round_is_known_as_long_as_the_run_is_not_finished(left: bool) -> None:
    """Also when the last learner has gone long ago, and for a syncer that was started after that: else the alert that
    nothing is merged would end by itself."""
    for reading in (seen_before := Reading()), Reading():
        if reading is seen_before:
            reading.see(poll([samples.seen("l0", step_s=0.2)]))
        reading.see(poll([samples.seen("l0", SHOWN_S + 3600, step_s=0.2, left=left)], NOW_S + SHOWN_S + 3600))
        registry = shown(reading)
        assert values(registry, "diloco_learner_steps_total") == {}
        assert values(registry, "diloco_fragment_round_seconds") == {"0": pytest.approx(0.8), "1": pytest.approx(0.8)}
    unmerged = values(shown(seen_before), "diloco_fragment_unmerged_seconds")
    assert unmerged["0"] > 5 * 0.8


def test_a_rewind_is_known_whoever_found_it_and_before_anybody_looked() -> None:
    """By the tape: also of a syncer that found it at its start, before its metrics were first read, or that is gone."""

    def since(reading: Reading, now_s: float) -> float:
        return values(shown(reading, At(now_s)), "diloco_run_rewound_seconds")[""]

    record = Rewound(fragment=0, version=3, was_version=5, unix_s=NOW_S - 20)
    never, first = Reading(), Reading()
    never.see(poll([samples.seen()]))
    assert since(never, NOW_S) == math.inf
    first.see(replace(poll([samples.seen()]), records=[record, samples.committed(unix_s=NOW_S)]))
    assert since(first, NOW_S + 1) == 21
    first.see(poll([samples.seen()], NOW_S + 5))
    assert since(first, NOW_S + 6) == 26, "the tape says it once"


def test_what_a_peer_wrote_stays_within_its_label() -> None:
    """Should a name ever get past the wire's bounds: quotes, newlines and what looks like a sample."""
    reading, name = Reading(), 'x"} 1\ndiloco_run_loss{run="a\\'
    seen = poll([samples.seen("l0")])
    learner = seen.status["learners"][0] | {"id": name}
    reading.see(replace(seen, status=seen.status | {"learners": [learner]}))
    text = generate_latest(shown(reading)).decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert [one.labels for one in families["diloco_learner_steps"].samples] == [{"run": "my-run", "learner": name}]
    assert len(families["diloco_run_loss"].samples) == 1


def test_what_is_not_a_number_is_shown_as_such() -> None:
    """A diverged learner's loss is NaN, as Prometheus writes it."""
    reading = Reading()
    reading.see(poll([samples.seen("l0", loss=math.nan)]))
    assert math.isnan(values(shown(reading), "diloco_learner_loss")["l0"])


def test_no_name_stands_for_two_metrics() -> None:
    ours = {metric.name for metric in Metrics().registry.collect()}
    assert not ours & {one.name for one in FIGURES}
    assert len({one.name for one in FIGURES}) == len(FIGURES)
