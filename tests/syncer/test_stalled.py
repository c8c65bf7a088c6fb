"""An honest learner that stands still for ten minutes and comes back: whole runs in virtual time."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from diloco.pipeline.messages.fragment import Committed, DeltaHeader
from diloco.pipeline.messages.run import LearnerReport
from diloco.workers.step_times import StepTimes
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, end, sync_spec

MINUTE_S = 60.0


class SleepingBus(MemoryBus):
    """Of a process that may stand still: until it wakes, its calls are neither made nor answered."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.awake, self.sleeps_at_a_header = asyncio.Event(), False
        self.awake.set()

    async def _turn(self) -> None:
        await self.awake.wait()
        await super()._turn()
        await self.awake.wait()

    async def offer(self, header: DeltaHeader, renews: str = "") -> str:
        entry = await super().offer(header, renews)
        if self.sleeps_at_a_header:
            self.awake.clear()
        return entry

    def wake(self) -> None:
        """Its connections are gone by then."""
        self.sleeps_at_a_header = False
        self.awake.set()
        self.disconnect()


class Stalling(VirtualLearner):
    """Its steps may stop. They are timed as in production: one of ten minutes is in the averages that it reports."""

    def connect(self) -> SleepingBus:
        self.times, self.data_comes = StepTimes(), asyncio.Event()
        self.data_comes.set()
        self.link = SleepingBus(RUN, self.world.clock, self.world.store)
        return self.link

    def report(self, left: bool) -> LearnerReport:
        measured = self.times.reported(self.world.clock.now(), left)
        return super().report(left).model_copy(update=measured)

    async def step(self) -> None:
        began = self.world.clock.now()
        await super().step()
        await self.data_comes.wait()
        await self.link.awake.wait()
        now = self.world.clock.now()
        self.times.training_begins(began)
        self.times.entered(now)
        self.times.returned(now, now, 10)


def hangs(learner: Stalling) -> None:
    learner.data_comes.clear()


def sleeps(learner: Stalling) -> None:
    learner.link.sleeps_at_a_header = True


async def merges(world: VirtualRun, minutes: int) -> list[Committed]:
    """Those of so many minutes from now on. A minute at a time: the tape is trimmed."""
    found = []
    for _ in range(minutes):
        cursors = await world.bus.tape_end()
        await asyncio.sleep(MINUTE_S)
        found += [entry.record for entry in await world.bus.read_tape(cursors, limit=100_000)]
    return [record for record in found if isinstance(record, Committed)]


def share(commits: list[Committed], learner: Stalling) -> float:
    """Of merges, those that it has a part in."""
    return sum(any(part.learner == learner.name for part in c.contributions) for c in commits) / len(commits)


@pytest.mark.parametrize("stops", [hangs, sleeps])
@in_virtual_time
async def test_a_learner_that_stands_still_slows_no_merge_and_takes_part_again(
    stops: Callable[[Stalling], None], no_log_lines: None
) -> None:
    """One of three, for ten minutes: it reports while its data loader hangs, and does not while its machine sleeps.

    In the first minute windows may wait for it. When it comes back, its averages have a step of ten minutes.
    """
    world = VirtualRun(sync_spec(tokens=10**12, sync_interval=8, overlap_steps=2, grace_gamma=0.9, quorum=2))
    world.start_syncer()
    party = [Stalling(f"l{i}", world, 1.0 + i / 50, f"{i:016x}", data=(96, 8)) for i in range(3)]
    for learner in party:
        learner.start()
    other, _, stalled = party  # the slowest, which windows wait for
    await world.until_version(2)
    usual = await merges(world, 2)
    assert share(usual, stalled) > 0.9

    stops(stalled)
    await merges(world, 1)
    steps, blocks = stalled.rounds.steps, len(other.read)
    beside = await merges(world, 9)
    assert stalled.rounds.steps == steps
    assert share(beside, stalled) == 0.0
    assert max(c.grace_s for c in beside) <= max(c.grace_s for c in usual), "no window waits for it"
    assert len(beside) / 9 > 0.9 * len(usual) / 2
    assert len(other.read) - blocks > 0.9 * (9 * MINUTE_S / other.step_s), "nor does anybody wait for its shards"

    stalled.data_comes.set()
    stalled.link.wake()
    back = await merges(world, 2)
    assert max(seen.report.step_s for seen in await world.bus.read_reports()) < 2.0
    assert len(back) > 0.9 * len(usual)
    assert share(back, stalled) > 0.9
    await end(*party)
    await world.kill_syncer()
