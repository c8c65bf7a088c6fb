"""One process at a time has a learner's id, and what joining waits for is said. Memory bus, virtual time."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.pipeline.errors import IdTaken, LearnerReplaced
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.run import LearnerReport
from diloco.pipeline.view.ledger import accounts, problems
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.workers.times import TIMES
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, sync_spec, under_way

A, B, C = ("0" * 16, "b" * 16, "c" * 16)
"""Incarnations; A is that of the first learner under way."""


class Pausable(MemoryBus):
    """A process that can be stopped stops here."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def _turn(self) -> None:
        await self.goes_on.wait()
        await super()._turn()


class Pausing(VirtualLearner):
    """A learner that SIGSTOP and SIGCONT reach."""

    def connect(self) -> Pausable:
        self.bus = Pausable(RUN, self.world.clock, self.world.store)
        return self.bus

    async def step(self) -> None:
        await super().step()
        await self.bus.goes_on.wait()

    def report(self, left: bool) -> LearnerReport:
        return super().report(left).model_copy(update={"host": "the-host"})


async def failure(learner: VirtualLearner) -> BaseException:
    """What a learner ended by."""
    assert learner.task is not None
    with pytest.raises(BaseException) as ended:  # noqa: PT011  # the caller looks at it
        await learner.task
    error = ended.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def joins(world: VirtualRun, learner: VirtualLearner) -> "asyncio.Task[None]":
    """As `live`, until it has joined."""

    async def join() -> None:
        began = asyncio.create_task(learner.live())
        while not learner.joined:
            if began.done():
                began.result()
            await asyncio.sleep(0.01)
        learner.task = began

    return asyncio.create_task(join())


@in_virtual_time
async def test_a_second_process_under_the_id_of_a_live_learner_is_refused_and_the_first_trains_on() -> None:
    """It is told on which host the other one is and when it reported, and leaves no trace."""
    world, (first,) = await under_way(2, Pausing, learners=1, tokens=4_000)
    second = Pausing("l0", world, incarnation=B).start()
    error = await failure(second)
    assert isinstance(error, IdTaken)
    assert not isinstance(error, LearnerReplaced)
    assert str(error).startswith("another Learner in this process is already learner 'l0'"), "as in a notebook"
    assert "the-host, reported 0." in str(error)
    assert [seen.report.incarnation for seen in await world.bus.read_reports()] == [A]
    await world.finish(first)
    assert first.left


@pytest.mark.parametrize("syncer", [True, False])
@in_virtual_time
async def test_of_two_that_begin_at_once_under_one_id_one_is_refused(syncer: bool) -> None:
    """Also while both wait for a syncer to come."""
    world = VirtualRun(sync_spec(tokens=4_000))
    if syncer:
        world.start_syncer()
    both = [VirtualLearner("l0", world, incarnation=i).start() for i in (A, B)]
    done, going = await asyncio.wait([one.task for one in both if one.task], return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(going)) == (1, 1)
    assert asyncio.get_running_loop().time() < 3.0
    loser, winner = sorted(both, key=lambda one: one.task not in done)
    assert isinstance(await failure(loser), IdTaken)
    if not syncer:
        world.start_syncer()
    await world.finish(winner)
    assert winner.left


@in_virtual_time
async def test_a_killed_learner_is_back_at_once() -> None:
    """After a second of silence at most, long before it counts as gone."""
    world, (first,) = await under_way(2, learners=1)
    await first.kill()
    second, began = VirtualLearner("l0", world, incarnation=B), asyncio.get_running_loop().time()
    await joins(world, second)
    assert asyncio.get_running_loop().time() - began < TIMES.id_silent_s + 0.5
    await second.kill()
    await asyncio.sleep(6.0)
    third, began = VirtualLearner("l0", world, incarnation=C), asyncio.get_running_loop().time()
    await joins(world, third)
    assert asyncio.get_running_loop().time() - began < 0.5
    generations = {seen.report.incarnation: seen.report.generation for seen in await world.bus.read_reports()}
    assert generations == {A: 1, B: 2, C: 3}
    await third.kill()


@pytest.mark.parametrize("bus", ["stays", "comes back as before the successor", "comes back empty"])
@in_virtual_time
async def test_a_paused_learner_that_wakes_finds_its_successor_and_ends(bus: str) -> None:
    """It says so; the books close on what both trained, and the successor is not disturbed."""
    world, (first,) = await under_way(3, Pausing, learners=1, tokens=6_000)
    first.bus.goes_on.clear()
    saved = world.store.snapshot()
    await asyncio.sleep(0.5)
    second = VirtualLearner("l0", world, incarnation=B)
    await joins(world, second)
    await asyncio.sleep(1.0)
    if bus != "stays":
        holders = {world.bus.keys.holder("l0"), world.bus.keys.learners, world.bus.keys.seen}
        for key in holders:
            world.store.delete(key)
            if bus == "comes back as before the successor":
                world.store.values[key] = saved[0][key]
    first.bus.goes_on.set()
    error = await failure(first)
    assert isinstance(error, LearnerReplaced)
    assert "has replaced learner 'l0'" in str(error)
    assert f"incarnation {B}" in str(error)
    await world.finish(second)
    assert second.left
    records, ledger_inputs = await world.tape(), await read_ledger_inputs(world.bus, 2, 5.0)
    books = accounts(records, ledger_inputs, layout_of(world.spec.tensors))
    assert problems(books) == []
    assert all(one.unaccounted == 0 for one in books)
    assert {one.incarnation for one in books} == {A, B}


@in_virtual_time
async def test_a_late_call_of_a_dead_learner_does_not_make_it_live() -> None:
    """The next one waits a little longer, and joins."""
    world, (first,) = await under_way(2, learners=1)
    await first.kill()
    (seen,) = await world.bus.read_reports()
    second = VirtualLearner("l0", world, incarnation=B)
    joining_ = joins(world, second)
    for number in (1, 2):
        await asyncio.sleep(0.3)
        await world.bus.write_report(seen.report.model_copy(update={"number": seen.report.number + number}))
    await joining_
    await second.kill()


@in_virtual_time
async def test_what_joining_waits_for_is_said_within_seconds() -> None:
    """No syncer; then a learner that claimed version 0 and died; then, of itself, the run begins."""
    world = VirtualRun(sync_spec(tokens=10**9))
    await world.bus.claim_initial(C, 2 * TIMES.initial_claim_ttl_s)
    learner = VirtualLearner("l0", world, incarnation=A).start()
    with capture_logs() as logs:
        await asyncio.sleep(TIMES.joining_told_s + 0.5)
        world.start_syncer()
        await asyncio.sleep(TIMES.joining_told_s + 0.5)
        said = [line for line in logs if line["event"] == "joining_delayed"]
    assert [line["log_level"] for line in said] == ["warning"] * 2
    assert "start `diloco syncer --run virtual`" in said[0]["detail"]
    assert "is uploading the initial parameters" in said[1]["detail"]
    assert "another learner starts within 10 s" in said[1]["detail"]
    await world.until_version(2)
    await learner.kill()


@in_virtual_time
async def test_a_learner_that_gives_up_joining_counts_as_gone_at_once() -> None:
    """It reported while it waited, as live; its last word is that it left, and the run's end waits for nobody."""
    world = VirtualRun(sync_spec(tokens=10**9))
    learner = VirtualLearner("l0", world, incarnation=A).start()
    await asyncio.sleep(2.0)
    (seen,) = await world.bus.read_reports()
    assert not seen.report.left
    assert seen.age_s < 0.5
    await learner.kill()
    await learner.joining.abandon()
    (seen,) = await world.bus.read_reports()
    assert seen.report.left
