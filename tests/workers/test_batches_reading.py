"""Learners that read one dataset in batches, drawn ahead: each index of an epoch is trained once. Virtual time.

The production exchange and sampler on the memory bus. With faults: once more, where a killed learner had trained an
index and not said so yet, and nowhere else.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.errors import BusUnavailable, SpecMismatch
from diloco.pipeline.messages.shards import DataOrder
from diloco.workers.batches import Batches
from diloco.workers.exchange.work_queue import ShardsInTurn
from diloco.workers.permutation import permuted
from diloco.workers.times import TIMES
from diloco_studies.virtual.virtual_time import in_virtual_time, run_virtual
from tests import slow_beyond
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec, until_joined
from tests.workers.test_reading import until_epoch

ORDER = DataOrder(length=301, seed=5)
PER_SHARD = 8
"""So the last one of an epoch is short."""
BATCH, AHEAD = 3, 4


class BatchLearner(VirtualLearner):
    """Trains a batch in each step, drawn so many ahead as DataLoader does."""

    def __init__(self, number: int, world: VirtualRun, step_s: float = 0.1) -> None:
        super().__init__(f"l{number}", world, step_s, f"{number:016x}", data=(ORDER.length, PER_SHARD))
        self.trained: list[int] = []

    async def blocks(self) -> Iterator[list[int]]:  # type: ignore[override]
        """The loop's batches."""
        shared, claims = self.exchange.shared, self.exchange.claims
        await claims.agree(ORDER)
        shared.shards_wanted = self.data
        claims.want()
        while shared.shards.qsize() < 4:
            await asyncio.sleep(0.01)
        self.sampler = Batches(
            ORDER,
            BATCH,
            1,
            shared.shards.get(),
            shared,
            drawn=claims.drawn,
            finished=claims.finish,
            next_shard=ShardsInTurn(shared, random.Random(0)).after,
            check=lambda: None,
            dry_s=0,
        )
        return self.loader()

    def loader(self) -> Iterator[list[int]]:
        while True:
            drawn = iter(self.sampler)
            ahead = deque(islice(drawn, AHEAD))
            for batch in drawn:
                ahead.append(batch)
                yield ahead.popleft()
            yield from ahead

    def train(self) -> None:
        super().train()
        self.trained += self.read[-1]  # type: ignore[arg-type]
        self.sampler.stepped()


def indices(epoch: int, positions: range) -> list[int]:
    return [permuted(at, ORDER.length, b"/%d/%d" % (ORDER.seed or 0, epoch)) for at in positions]


async def unread(world: VirtualRun) -> tuple[int, list[int]]:
    """Epochs queued, and the indices that are still to be trained of them."""
    queue = await world.bus.read_shards()
    return queue.epochs, [at for s, read in queue.open for at in indices(s.epoch, range(s.start + read, s.stop))]


def each(epochs: int) -> Counter[int]:
    return Counter(dict.fromkeys(range(ORDER.length), epochs))


@in_virtual_time
async def test_without_faults_every_index_is_trained_exactly_once() -> None:
    """Learners of different speed; one leaves in the middle of a shard, one joins, all leave at the end.

    What those that leave have drawn ahead goes to others.
    """
    world = VirtualRun(sync_spec(tokens=6000))
    world.start_syncer()
    learners = [BatchLearner(i, world, 0.1 + 0.07 * i).start() for i in range(3)]
    await asyncio.sleep(5.03)
    assert learners[0].exchange.shared.shard_position is not None, "in the middle of a shard"
    learners[0].stop = True
    await asyncio.sleep(1.0)
    late = BatchLearner(3, world, 0.05).start()
    await world.finish(*learners, late)
    assert all(learner.left for learner in (*learners, late))
    epochs, rest = await unread(world)
    assert epochs >= 5
    trained = Counter(rest)
    for learner in (*learners, late):
        assert isinstance(learner, BatchLearner)
        assert len(learner.sampler._prefetched._drawn) >= AHEAD - 1, "drawn and not trained"
        trained += Counter(learner.trained)
    assert trained == each(epochs)


@pytest.mark.parametrize("at_s", [1.6, 2.05, 2.4, 3.33])
@in_virtual_time
async def test_what_a_killed_learner_had_in_hand_is_trained_by_another(at_s: float) -> None:
    """Twice are those that it had trained and not said so, since its last saved position; all others once."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    killed, other = BatchLearner(0, world, 0.11).start(), BatchLearner(1, world, 0.08).start()
    await asyncio.sleep(at_s)
    await killed.kill()
    assert isinstance(killed, BatchLearner)
    assert isinstance(other, BatchLearner)
    held = world.store.stream(world.bus.keys.shards).held
    mine = {"{}-{}".format(*entry) for entry, (holder, _) in held.items() if holder.startswith("l0.")}
    positions = world.store.get(world.bus.keys.shard_positions, dict, 0)
    claims = killed.exchange.claims._held
    assert mine >= claims.keys()
    in_hand = Counter(
        at
        for entry, shard in claims.items()
        for at in indices(shard.epoch, range(shard.start + int(positions.get(entry.encode(), 0)), shard.stop))
    )
    epoch = (await world.bus.read_shards()).epochs
    first_epoch = min(shard.epoch for shard in claims.values())
    assert first_epoch == max(shard.epoch for shard in claims.values()), "the indices say which epoch"
    again = in_hand & Counter(killed.trained[-2 * PER_SHARD :])
    assert in_hand - again, "some were not trained yet"
    await until_epoch(world, epoch)
    await asyncio.sleep(TIMES.dead_s)
    other.stop = True
    assert other.task is not None
    await other.task
    epochs, rest = await unread(world)
    trained = Counter(killed.trained) + Counter(other.trained) + Counter(rest)
    assert trained == each(epochs) + again


async def chaos(seed: int, strikes: int, world: VirtualRun) -> tuple[list[BatchLearner], list[BatchLearner]]:
    """Kills, leaves, joins and lost answers in a random order; one learner lives at least.

    Returns: all that there were, and those that live.
    """
    chance = random.Random(seed)
    everybody = [BatchLearner(0, world, 0.07)]
    everybody[0].start()
    living = everybody.copy()
    for number in range(1, strikes + 1):
        await asyncio.sleep(chance.uniform(0.3, 6.0))
        one = chance.choice(living)
        match chance.choice(("kill", "leave", "join", "lose")):
            case "kill" if len(living) > 1:
                living.remove(one)
                await one.kill()
            case "leave" if len(living) > 1:
                living.remove(one)
                one.stop = True
            case "lose" if one.joined:
                lose_an_answer(one, chance.choice(("claim_shard", "finish_shard", "save_position")))
            case _:
                living.append(BatchLearner(number, world, chance.uniform(0.05, 0.3)))
                living[-1].start()
                everybody.append(living[-1])
    return everybody, living


def lose_an_answer(learner: VirtualLearner, name: str) -> None:
    """The next such call acts on the bus, and the learner never knows."""
    bus = learner.bus
    act, lost = getattr(bus, name), []

    async def once(*args: Any) -> Any:
        answer = await act(*args)
        if not lost:
            lost.append(True)
            raise BusUnavailable("the answer was lost")
        return answer

    setattr(bus, name, once)


@pytest.mark.parametrize("seed", slow_beyond(2, range(6)))
@in_virtual_time
async def test_whatever_happens_no_index_is_left_out(seed: int) -> None:
    """Kills, leaves, joins and lost answers in a random order; at the end one learner finishes the epochs."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    everybody, living = await chaos(seed, 9, world)
    epochs, _ = await unread(world)
    await until_epoch(world, epochs - 1)
    trained: Counter[int] = sum((Counter(learner.trained) for learner in everybody), Counter())
    assert min(trained[at] for at in range(ORDER.length)) >= epochs
    for learner in living:
        await learner.kill()


def test_a_resumed_run_goes_on_with_the_epoch_in_the_order_in_which_it_was_begun(tmp_path: Path) -> None:
    """Under another name: each index comes once in both parts together; another length or seed is refused."""

    async def first() -> list[int]:
        world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path)
        world.start_syncer()
        learner = BatchLearner(0, world).start()
        await asyncio.sleep(4.0)
        learner.stop = True
        await learner.task
        await world.stop_syncer()
        return learner.trained

    async def second() -> list[int]:
        world = VirtualRun(sync_spec(tokens=10**9))
        world.start_syncer(resume=tmp_path)
        learner = BatchLearner(1, world).start()
        await until_joined(learner)
        await asyncio.sleep(1.0)
        for other in (DataOrder(length=302, seed=5), DataOrder(length=301, seed=6), DataOrder(length=301, seed=None)):
            with pytest.raises(
                SpecMismatch, match=r"its run reads 301 indices with seed 5.* start a run with a different name"
            ):
                await learner.exchange.claims.agree(other)
        await asyncio.sleep(9.0)
        await learner.kill()
        return learner.trained

    before, after = run_virtual(first()), run_virtual(second())
    assert 90 < len(before) < 200
    rest = ORDER.length - len(before)
    assert Counter([*before, *after[:rest]]) == Counter(range(ORDER.length))
    assert after[rest : rest + 8] == indices(1, range(8)), "the next epoch's permutation comes then"


@in_virtual_time
async def test_a_bus_that_came_back_empty_gets_the_data_order_again() -> None:
    """With the queue of the epoch under way; who comes then with another length is refused as before."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    learner = BatchLearner(0, world).start()
    await asyncio.sleep(3.0)
    keys = world.bus.keys
    for key in (keys.data_order, keys.shards, keys.shard_positions, keys.shard_epoch):
        world.store.values.pop(key, None)
    await asyncio.sleep(5.0)
    with pytest.raises(SpecMismatch):
        await learner.exchange.claims.agree(DataOrder(length=7, seed=0))
    await learner.kill()
