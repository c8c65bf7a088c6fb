"""Intervals follow the round trip: planned where it is short, longer where much would be overwritten."""

import asyncio
from random import Random

import pytest
from structlog.testing import capture_logs

from diloco.pipeline.ramps import LONGEST, interval_at, interval_in_force, overlap_in_force, stretched
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.grace import RoundTrips
from diloco_studies.virtual.virtual_time import in_virtual_time, run_virtual
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

USUAL = SyncSettings(tokens=1000).sync_spec()


def test_an_interval_is_stretched_by_the_round_trip_and_never_shrunk() -> None:
    """The first ones in proportion; H where tau steps do not hide it: then tau of H steps are overwritten at most."""
    assert (USUAL.sync_interval, USUAL.overlap_steps, USUAL.first_interval) == (24, 2, 2)
    versions = (0, 8, 16, 24, 32)
    assert [interval_at(USUAL, v) for v in versions] == [2, 4, 8, 16, 24]
    for short in (0.0, 1.0, 1.1):
        assert [stretched(USUAL, v, short) for v in versions] == [2, 4, 8, 16, 24]
    assert [stretched(USUAL, v, 2.0) for v in versions] == [4, 8, 16, 24, 24]
    assert [stretched(USUAL, v, 10.0) for v in versions] == [20, 40, 80, 96, 96]
    assert stretched(USUAL, 32, 1e9) == stretched(USUAL, 0, float("inf")) == LONGEST == 96, "what was measured"
    longer = USUAL.model_copy(update={"sync_interval": 500, "first_interval": 0})
    assert stretched(longer, 0, 10.0) == 500, "which was asked for"
    for off in ({"overlap_steps": 0}, {"stretch": False}):
        assert stretched(USUAL.model_copy(update=off), 32, 10.0) == 24


def test_tau_is_stretched_with_its_interval() -> None:
    """So that the grace has as large a part of a longer round trip; what a head does not say is as planned."""
    assert interval_in_force(USUAL, 8, 0) == 4
    assert interval_in_force(USUAL, 8, 9) == 9
    assert [overlap_in_force(USUAL, 32, told) for told in (0, 24, 25, 48, 240)] == [2, 2, 3, 4, 20]


def test_one_hold_up_stretches_nothing() -> None:
    """The shorter one of the last two counts; before there are two, or a step time is known, nothing does."""
    trips = RoundTrips()
    assert trips.steps([0.5], 0.0) == 0.0
    trips.observe(1.0)
    assert trips.steps([0.5], 0.0) == 0.0
    trips.observe(30.0)
    assert trips.steps([0.5, 0.0, 0.5], 0.0) == 3.0
    assert trips.steps([0.0, 1e-310], 0.0) == 0.0
    trips.observe(1.0)
    assert trips.steps([0.5, 0.5, 50.0], 0.25) == 3.5
    assert trips.steps([0.001, 0.5], 0.25) == 3.5
    trips.observe(5.0)
    trips.observe(5.0)
    assert trips.steps([0.5], 0.0) == 11.0


class SlowMerges(VirtualRun):
    """Its merges take so long."""

    merge_s = 0.0
    varies = 0.0
    """By up to such a share, either way."""
    random = Random(0)

    def start(self) -> None:
        """Its syncer."""

        async def offload(work, *args):
            takes_s = self.merge_s * self.random.uniform(1 - self.varies, 1 + self.varies)
            await asyncio.sleep(takes_s if getattr(work, "__name__", "") == "merge" else 0)
            return work(*args)

        self.start_syncer()._offload = offload


async def _shares(merge_s: float) -> tuple[list[int], float, list[int]]:
    """Intervals and the share merged with merges that take so long, and intervals once they take no time again."""
    world = SlowMerges(sync_spec(sync_interval=24, tokens=10**9))
    world.merge_s = merge_s
    world.start()
    party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(3, 600)  # the first one is stretched by what two merges took
    await asyncio.sleep(40 * merge_s)
    before = sum(learner.rounds.tokens for learner in party), sum(learner.rounds.overwritten for learner in party)
    await asyncio.sleep(200 * merge_s)
    after = sum(learner.rounds.tokens for learner in party), sum(learner.rounds.overwritten for learner in party)
    slow = [head.interval for head in await world.heads()]
    elements = sum(fragment.elements for fragment in party[0].exchange.member.layout.fragments)
    lost = (after[1] - before[1]) / (after[0] - before[0]) / elements
    world.merge_s = 0.0
    await asyncio.sleep(300 * merge_s)
    quick = [head.interval for head in await world.heads()]
    await end(*party)
    world.syncer.cancel()  # type: ignore[union-attr]
    return slow, 1 - lost, quick


@pytest.mark.parametrize("merge_s", [0.15, 0.6])
def test_slow_merges_make_longer_intervals_and_no_more_is_overwritten(merge_s: float) -> None:
    """Of merges that take 1.5 or 6 steps at most tau of H is lost, about; and with quick ones it is H again."""
    slow, merged, quick = run_virtual(_shares(merge_s))
    assert min(slow) >= 12 * (merge_s / 0.1)
    assert merged >= 0.92
    assert quick == [24, 24]


@in_virtual_time
async def test_rounds_that_are_much_longer_than_asked_for_are_said() -> None:
    """In the log, once; in the status and the metrics as long as it is so."""
    world = SlowMerges(sync_spec(sync_interval=24, tokens=10**9))
    world.merge_s = 2.0
    with capture_logs() as lines:
        world.start()
        party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
        await world.until_version(3, 600)
        await asyncio.sleep(80)
        for merge_s in (2.0, 0.0, 2.0):
            world.merge_s = merge_s
            await asyncio.sleep(300)
            status = await read_status(world.bus, world.clock)
            rounds = [(one["interval"], one["asked_interval"]) for one in status["fragments"]]
            said = [text for text in status["warnings"] if text.startswith("rounds take ")]
            longest = max(interval for interval, _ in rounds)
            shown = {s.labels["which"]: s.value for s in world.service.metrics.interval.collect()[0].samples}
            assert [asked for _, asked in rounds] == [24, 24]
            assert shown["asked"] == 24
            assert (longest == LONGEST) == bool(merge_s) == bool(said)
            assert not said or "inner steps instead of 24" in said[0]
            assert (shown["longest"] == LONGEST) == bool(merge_s)
    assert [line["event"] for line in lines].count("rounds_long") == 1
    await end(*party)
    world.syncer.cancel()  # type: ignore[union-attr]


async def _a_merge(varies: float) -> float:
    """Learners in a merge, of two whose steps take 0.1 and 0.11 s, where merges take 2 s on average."""
    world = SlowMerges(sync_spec(sync_interval=24, tokens=10**9))
    world.merge_s, world.varies = 2.0, varies
    world.start()
    party = [VirtualLearner(f"l{i}", world, step_s, f"{i:016x}").start() for i, step_s in enumerate((0.1, 0.11))]
    await world.until_version(3, 600)
    await asyncio.sleep(80)
    before = await world.heads()
    await asyncio.sleep(400)
    pairs = list(zip(before, await world.heads(), strict=True))
    await end(*party)
    world.syncer.cancel()  # type: ignore[union-attr]
    deltas = sum(after.merged_deltas - before.merged_deltas for before, after in pairs)
    return deltas / sum(after.version - before.version for before, after in pairs)


def test_round_trips_that_vary_leave_nobody_out() -> None:
    """What a merge takes more than another shortens no grace: a learner that is 10 % slower is in all the same."""
    assert run_virtual(_a_merge(0.5)) > 1.95
