"""Every shard of an epoch is read to its end: exactly once without faults, at least once with them. Virtual time.

The production exchange and order of blocks, on the memory bus.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.pipeline.messages.shards import Shard
from diloco.pipeline.payload.codec import encode
from diloco.workers.times import TIMES
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec, until_joined

DATA = (64, 8)
"""Blocks in an epoch, blocks in a shard."""


def learner_of(world: VirtualRun, number: int, step_s: float = 0.1) -> VirtualLearner:
    return VirtualLearner(f"l{number}", world, step_s, f"{number:016x}", data=DATA)


async def unread(world: VirtualRun) -> tuple[int, list[tuple[int, int]]]:
    """Epochs queued, and the blocks that are still to be read of them."""
    queue = await world.bus.read_shards()
    return queue.epochs, [(s.epoch, at) for s, read in queue.open for at in range(s.start + read, s.stop)]


def times_read(epochs: int, *parts: list[tuple[int, int]]) -> Counter[int]:
    """How many blocks of the first epochs were read how often, all parts together."""
    counts = Counter(block for part in parts for block in part)
    return Counter(counts[epoch, at] for epoch in range(epochs) for at in range(DATA[0]))


async def until_epoch(world: VirtualRun, epoch: int) -> None:
    """Until nothing is left of this epoch and all before."""
    async with asyncio.timeout(300):
        while True:
            queued, rest = await unread(world)
            if queued > epoch and not any(e <= epoch for e, _ in rest):
                return
            await asyncio.sleep(0.05)


@in_virtual_time
async def test_without_faults_every_block_is_read_exactly_once() -> None:
    """Learners of different speed; one leaves in the middle of a shard, one joins, all leave at the end."""
    world = VirtualRun(sync_spec(tokens=6000))
    world.start_syncer()
    learners = [learner_of(world, i, 0.1 + 0.07 * i).start() for i in range(3)]
    await asyncio.sleep(5.03)
    assert learners[0].exchange.shared.shard_position is not None, "in the middle of a shard"
    learners[0].stop = True
    await asyncio.sleep(1.0)
    late = learner_of(world, 3, 0.05).start()
    await world.finish(*learners, late)
    assert all(learner.left for learner in (*learners, late))
    epochs, rest = await unread(world)
    assert epochs >= 5
    reads = [learner.read for learner in (*learners, late)]
    assert times_read(epochs, rest, *reads) == {1: epochs * DATA[0]}, "each was read, or is still to be"
    assert sum(map(len, reads)) + len(rest) == epochs * DATA[0], "and there are no others"


@in_virtual_time
async def test_entries_that_are_no_shards_hold_up_nobody() -> None:
    """Whoever draws one takes it off and goes on, and says so once."""
    world = VirtualRun(sync_spec(tokens=3000))
    world.start_syncer()
    learners = [learner_of(world, i).start() for i in range(2)]
    await asyncio.sleep(1.0)
    queue = world.store.stream(world.bus.keys.shards)
    with capture_logs() as logs:
        for i in range(20):
            queue.append((queue.last[0] + 1, 0), encode(Shard(epoch=0, index=0, start=90, stop=98)) if i % 2 else b"x")
        await world.finish(*learners)
    told = [line for line in logs if line["event"] == "shard_refused" and line["log_level"] == "warning"]
    assert len(told) == 2, "one a learner"
    epochs, rest = await unread(world)
    assert epochs >= 2
    assert times_read(epochs, rest, *(learner.read for learner in learners)) == {1: epochs * DATA[0]}


@in_virtual_time
async def test_what_a_learner_leaves_unread_others_read_at_once() -> None:
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    first = learner_of(world, 0).start()
    other = learner_of(world, 1).start()
    await asyncio.sleep(2.0)
    assert first.task is not None
    first.stop = True
    await first.task
    held = world.store.stream(world.bus.keys.shards).held
    assert not any(holder.startswith("l0.") for holder, _ in held.values())
    await until_epoch(world, 0)
    assert times_read(1, first.read, other.read) == {1: DATA[0]}
    await other.kill()


@in_virtual_time
async def test_a_learner_that_leaves_right_behind_a_shards_last_block_has_read_it_to_its_end() -> None:
    """Nobody gets it again."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    first = learner_of(world, 0).start()
    while len(first.read) < DATA[1]:
        await asyncio.sleep(0.01)
    first.stop = True
    assert first.task is not None
    await first.task
    assert len(first.read) == DATA[1]
    _, rest = await unread(world)
    assert (await world.bus.read_shards()).open[0][0].index == 1
    assert times_read(1, first.read, rest) == {1: DATA[0]}


@in_virtual_time
async def test_a_shard_with_nothing_left_is_acknowledged_and_not_read_again() -> None:
    """Its reader died right behind its last block. The next claim takes a while, and there is nothing else to read."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    size = DATA[1]
    shards = [Shard(epoch=0, index=i, start=i * size, stop=(i + 1) * size) for i in range(DATA[0] // size)]
    await world.bus.fill_shards(0, shards)
    lost = await world.bus.claim_shard("dead.00", TIMES.dead_s)
    assert lost is not None
    await world.bus.save_position("dead.00", lost.entry_id, size)
    await world.bus.release_shards("dead.00")
    learner = learner_of(world, 0)
    claim = MemoryBus.claim_shard
    with pytest.MonkeyPatch.context() as patch:

        async def slow(self: Any, *args: Any) -> Any:
            await asyncio.sleep(0.5)
            return await claim(self, *args)

        patch.setattr(MemoryBus, "claim_shard", slow)
        learner.start()
        await asyncio.sleep(5)
    assert learner.read[0] == (0, size), "the first block of the next shard"
    assert all(at >= size for _, at in learner.read)
    assert lost.entry_id not in world.store.stream(world.bus.keys.shards).held
    await learner.kill()


@in_virtual_time
async def test_a_shard_of_blocks_that_the_data_does_not_have_is_acknowledged_unread() -> None:
    """Whoever can write to the queue must not end all learners with it, nor keep them busy for ever."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    wrong = [(0, DATA[0] + 1), (5, 5), (9, 3), (2**40, 2**61)]
    shards = [Shard(epoch=0, index=i, start=start, stop=stop) for i, (start, stop) in enumerate([*wrong, (8, 16)])]
    await world.bus.fill_shards(0, shards)
    learner = learner_of(world, 0).start()
    await asyncio.sleep(10)
    assert learner.read[:8] == [(0, at) for at in range(8, 16)]
    assert all(at < DATA[0] for _, at in learner.read)
    assert len(learner.read) > 50, "it went on with the next epoch"
    await learner.kill()


@in_virtual_time
async def test_the_shard_of_a_killed_learner_is_finished_by_another_from_its_saved_position() -> None:
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    killed = learner_of(world, 0).start()
    other = learner_of(world, 1).start()
    await until_joined(killed, other)
    await asyncio.sleep(2.05)
    position = killed.exchange.shared.shard_position
    assert position is not None
    assert 0 < position[1] < DATA[1]
    await killed.kill()
    at = asyncio.get_running_loop().time()
    stream = world.store.stream(world.bus.keys.shards)
    held = [entry for entry, (holder, _) in stream.held.items() if holder.startswith("l0.")]
    assert len(held) == 4, "one in hand and three ahead"
    saved = int(world.store.get(world.bus.keys.shard_positions, dict, 0)[position[0].encode()])
    assert 0 < saved <= position[1]
    await until_epoch(world, 0)
    took = asyncio.get_running_loop().time() - at
    assert TIMES.dead_s - 1 < took < TIMES.dead_s + 15
    counts = times_read(1, killed.read, other.read)
    assert counts.keys() == {1, 2}, "at least once"
    assert 0 < counts[2] <= DATA[1] - saved, "no more than what followed the saved position"
    await other.kill()


@in_virtual_time
async def test_a_learner_taken_for_dead_reads_on_and_acknowledges_nothing() -> None:
    """It was paused for longer than the silence that is waited for: both read its shard, the taker acknowledges it."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    paused = learner_of(world, 0, 0.3).start()
    other = learner_of(world, 1, 0.3).start()
    await until_joined(paused, other)
    await asyncio.sleep(3.0)
    position = paused.exchange.shared.shard_position
    assert position is not None
    bus, again = paused.bus, asyncio.Event()
    write, finish = bus.write_report, bus.finish_shard
    held = world.store.stream(world.bus.keys.shards).held
    finished: list[str] = []

    async def silent(*args: Any) -> Any:
        await again.wait()
        return await write(*args)

    async def tell(consumer: str, entry_id: str) -> None:
        kept = {at: holder for at, (holder, _) in held.items() if not holder.startswith("l0.")}
        await finish(consumer, entry_id)
        finished.append(entry_id)
        assert kept.items() <= {at: holder for at, (holder, _) in held.items()}.items()

    bus.write_report, bus.finish_shard = silent, tell  # type: ignore[method-assign]
    paused.step_s = TIMES.dead_s + 10
    async with asyncio.timeout(100):
        while any(holder.startswith("l0.") for holder, _ in held.values()):
            await asyncio.sleep(0.1)
    paused.step_s = 0.3
    again.set()
    async with asyncio.timeout(100):
        while position[0] not in finished:
            await asyncio.sleep(0.1)
    await until_epoch(world, 2)
    counts = times_read(3, paused.read, other.read)
    assert counts.keys() == {1, 2}
    for learner in (paused, other):
        await learner.kill()
