"""The data work queue as `ports.Bus` promises it, on every adapter: who gets which shard, who may say what of it."""

import asyncio
import time

import pytest

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BadMessage, UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard, ShardQueue
from diloco.workers.exchange.work_queue import MAX_SHARDS, cut_epoch
from tests import samples
from tests.backdoor import Backdoor, RedisBackdoor

SHARDS = [Shard(epoch=0, index=i, start=i * 10, stop=i * 10 + 10) for i in range(3)]
L0, L1, L2 = "l0.00000000", "l1.00000000", "l.2.00000000"
"""Learners; an id may have a dot in it."""
SILENT_S = 60.0


async def claim(bus: Bus, consumer: str, *known: ClaimedShard) -> ClaimedShard:
    claimed = await bus.claim_shard(consumer, SILENT_S, [one.entry_id for one in known])
    assert claimed is not None
    return claimed


async def report(bus: Bus, *consumers: str) -> None:
    """They are heard from."""
    for consumer in consumers:
        await bus.write_report(samples.report(consumer.rpartition(".")[0]))


def silence(backdoor: Backdoor, bus: Bus, consumer: str) -> None:
    """Its last report was long ago."""
    backdoor.hset(bus.keys.seen, "/".join(consumer.rsplit(".", 1)), b"1")


async def test_an_epoch_is_queued_once_and_each_shard_is_claimed_once(bus: Bus) -> None:
    assert await bus.claim_shard(L0, SILENT_S) is None
    assert await bus.fill_shards(0, SHARDS)
    assert not await bus.fill_shards(0, SHARDS)
    assert not await bus.fill_shards(5, SHARDS)
    assert await bus.count_epochs() == 1
    first = await claim(bus, L0)
    second = await claim(bus, L1)
    third = await claim(bus, L0, first)
    assert [first.shard, second.shard, third.shard] == SHARDS
    assert await bus.claim_shard(L1, SILENT_S, [second.entry_id]) is None
    assert await bus.fill_shards(1, SHARDS)
    assert (await claim(bus, L1, second)).shard == SHARDS[0]


async def test_the_first_data_order_stands(bus: Bus, backdoor: Backdoor) -> None:
    """Also where memory is short: who comes later learns of it."""
    first, other = DataOrder(length=30, seed=None), DataOrder(length=30, seed=0)
    assert await bus.read_data_order() is None
    assert await bus.propose_data_order(first) == first
    backdoor.fill_memory()
    assert await bus.propose_data_order(other) == first
    assert await bus.read_data_order() == first
    backdoor.free_memory()
    assert await bus.propose_data_order(first) == first


async def test_an_epoch_that_the_bus_has_lost_is_queued_again_once(bus: Bus) -> None:
    """Whoever knows that three epochs were queued puts the third there again, where the bus counts none."""
    assert not await bus.fill_shards(2, SHARDS, 1)
    assert await bus.fill_shards(2, SHARDS, 0)
    assert not await bus.fill_shards(2, SHARDS, 0)
    assert await bus.count_epochs() == 3
    assert len((await bus.read_shards()).open) == len(SHARDS)


async def test_the_most_shards_that_an_epoch_can_have_are_queued_by_one_call(bus: Bus) -> None:
    assert await bus.fill_shards(0, cut_epoch(0, 16 * MAX_SHARDS, 8))
    assert len((await bus.read_shards()).open) == MAX_SHARDS
    assert (await claim(bus, L0)).shard.start == 0


async def test_a_shard_is_on_the_queue_with_its_position_until_it_is_read_to_its_end(bus: Bus) -> None:
    await bus.fill_shards(0, SHARDS)
    one, two = await claim(bus, L0), await claim(bus, L1)
    assert one.position == 0
    await bus.save_position(L0, one.entry_id, 4)
    await bus.finish_shard(L1, two.entry_id)
    await bus.save_position(L1, two.entry_id, 9)
    assert await bus.read_shards() == ShardQueue(epochs=1, open=((SHARDS[0], 4), (SHARDS[2], 0)))
    await bus.finish_shard(L0, one.entry_id)
    assert await bus.read_shards() == ShardQueue(epochs=1, open=((SHARDS[2], 0),))


async def test_a_restored_queue_goes_on_where_it_was_saved(bus: Bus) -> None:
    queue = ShardQueue(epochs=3, open=((SHARDS[1], 7), (SHARDS[2], 0)))
    await bus.restore_shards(queue)
    assert await bus.read_shards() == queue
    claimed = await claim(bus, L0)
    assert (claimed.shard, claimed.position) == (SHARDS[1], 7)
    assert await bus.fill_shards(3, SHARDS)
    with pytest.raises(UsageError, match="already has data shards"):
        await bus.restore_shards(queue)
    await bus.delete_data()
    await bus.restore_shards(queue)
    assert await bus.read_shards() == queue


async def test_the_shard_of_a_silent_learner_goes_on_at_its_last_position_before_any_new_one(
    bus: Bus, backdoor: Backdoor
) -> None:
    await bus.fill_shards(0, SHARDS)
    await report(bus, L0, L1, L2)
    lost = await claim(bus, L2)
    await bus.save_position(L2, lost.entry_id, 6)
    assert (await claim(bus, L0)).shard == SHARDS[1], "it was heard from a moment ago"
    silence(backdoor, bus, L2)
    taken = await claim(bus, L1)
    assert taken == lost.model_copy(update={"position": 6})
    assert (await claim(bus, L1, taken)).shard == SHARDS[2], "taken once"


async def test_the_oldest_shard_of_all_the_silent_comes_first(bus: Bus, backdoor: Backdoor) -> None:
    await bus.fill_shards(0, SHARDS)
    for learner in (L1, L2):  # not in the order of their names
        await report(bus, learner)
        await claim(bus, learner)
    for learner in (L1, L2):
        silence(backdoor, bus, learner)
    first = await claim(bus, L0)
    assert [first.shard, (await claim(bus, L0, first)).shard] == SHARDS[:2]


async def test_a_holder_that_never_reported_is_gone_after_having_it_for_that_long(bus: Bus, backdoor: Backdoor) -> None:
    await bus.fill_shards(0, SHARDS[:1])
    lost = await claim(bus, L0)
    began_s = time.monotonic()
    assert await bus.claim_shard(L1, SILENT_S) is None
    backdoor.hset(bus.keys.seen, "l0/00000000", b"yesterday")  # as good as no report
    assert await bus.claim_shard(L1, SILENT_S) is None
    await asyncio.sleep(0.5)
    assert await bus.claim_shard(L1, 0.4) == lost
    held_s = time.monotonic() - began_s - 0.01
    assert await bus.claim_shard(L0, held_s) is None, "its time begins when it takes the shard"


async def test_a_learner_back_from_a_long_silence_does_not_take_its_own_shard_twice(
    bus: Bus, backdoor: Backdoor
) -> None:
    await bus.fill_shards(0, SHARDS[:2])
    await report(bus, L0)
    mine = await claim(bus, L0)
    silence(backdoor, bus, L0)
    assert (await claim(bus, L0, mine)).shard == SHARDS[1]


async def test_a_claim_whose_answer_was_lost_is_answered_by_the_next_one(bus: Bus) -> None:
    """The learner lives, so nobody else would ever take that shard."""
    await bus.fill_shards(0, SHARDS)
    known, lost = await claim(bus, L0), await bus.claim_shard(L0, SILENT_S, ["1-1"])
    assert lost == known, "this one was not known either"
    second = await claim(bus, L0, known)
    assert await claim(bus, L0, known) == second
    assert (await claim(bus, L0, known, second)).shard == SHARDS[2]


async def test_only_the_present_holder_moves_a_position_or_acknowledges(bus: Bus, backdoor: Backdoor) -> None:
    await bus.fill_shards(0, SHARDS[:1])
    await report(bus, L0)
    lost = await claim(bus, L0)
    await bus.save_position(L0, lost.entry_id, 3)
    silence(backdoor, bus, L0)
    await claim(bus, L1)
    before = await bus.read_shards()
    await bus.save_position(L0, lost.entry_id, 9)
    await bus.finish_shard(L0, lost.entry_id)
    await bus.finish_shard(L2, lost.entry_id)
    assert await bus.read_shards() == before == ShardQueue(epochs=1, open=((SHARDS[0], 3),))
    await bus.save_position(L1, lost.entry_id, 5)
    await bus.save_position(L1, lost.entry_id, 4)
    assert (await bus.read_shards()).open == ((SHARDS[0], 5),), "it never goes back"
    await bus.finish_shard(L1, lost.entry_id)
    await bus.finish_shard(L1, lost.entry_id)
    assert (await bus.read_shards()).open == ()


async def test_what_nobody_holds_nobody_moves(bus: Bus) -> None:
    await bus.fill_shards(0, SHARDS[:1])
    first = await claim(bus, L0)
    await bus.fill_shards(1, SHARDS)
    before = await bus.read_shards()
    milliseconds, _, number = first.entry_id.partition("-")
    for entry_id in (f"{milliseconds}-{int(number) + 1}", "1-1"):
        await bus.save_position(L0, entry_id, 5)
        await bus.finish_shard(L0, entry_id)
    assert await bus.read_shards() == before


async def test_released_shards_are_taken_at_once_at_their_positions(bus: Bus) -> None:
    await bus.fill_shards(0, SHARDS)
    await report(bus, L0, L1)
    one = await claim(bus, L0)
    two = await claim(bus, L0, one)
    other = await claim(bus, L1)
    await bus.save_position(L0, one.entry_id, 8)
    await bus.release_shards(L0)
    await bus.save_position(L0, one.entry_id, 9)
    await bus.finish_shard(L0, two.entry_id)
    assert await claim(bus, L1, other) == one.model_copy(update={"position": 8})
    assert await claim(bus, L0) == two, "also by the one that gave it back"
    assert await bus.claim_shard(L2, SILENT_S) is None


async def test_a_position_is_saved_also_where_memory_is_short(bus: Bus, backdoor: Backdoor) -> None:
    await bus.fill_shards(0, SHARDS)
    await report(bus, L0)
    one = await claim(bus, L0)
    backdoor.fill_memory()
    await bus.save_position(L0, one.entry_id, 4)
    second = await claim(bus, L0, one)
    await bus.finish_shard(L0, second.entry_id)
    await bus.release_shards(L0)
    assert (await claim(bus, L1)).position == 4
    backdoor.free_memory()
    assert (await bus.read_shards()).open == ((SHARDS[0], 4), (SHARDS[2], 0))


async def test_what_cannot_be_read_is_claimed_as_no_shard_and_is_in_no_checkpoint(bus: Bus, backdoor: Backdoor) -> None:
    """Any learner may add an entry; who claims it takes it off, and claims the next."""
    await bus.fill_shards(0, SHARDS[:1])
    backdoor.append(bus.keys.shards, b"\x91" * 2000)
    await bus.fill_shards(1, SHARDS[1:])
    assert await bus.read_shards() == ShardQueue(epochs=2, open=tuple((shard, 0) for shard in SHARDS))
    first = await claim(bus, L0)
    bad = await claim(bus, L0, first)
    assert bad.shard.start == bad.shard.stop
    await bus.finish_shard(L0, bad.entry_id)
    assert [(await claim(bus, L0, first)).shard, (await claim(bus, L1)).shard] == SHARDS[1:]


async def test_a_queue_that_begins_with_a_group_of_another_name_is_filled_and_claimed(
    bus: Bus, backdoor: Backdoor
) -> None:
    if isinstance(backdoor, RedisBackdoor):
        backdoor.client.xgroup_create(bus.keys.shards, "other", "0", mkstream=True)
    await bus.fill_shards(0, SHARDS)
    assert (await claim(bus, L0)).shard == SHARDS[0]


@pytest.mark.parametrize("number", [b"far", b"9" * 20, b"9" * 19])
async def test_a_position_that_cannot_be_one_is_written_over(bus: Bus, backdoor: Backdoor, number: bytes) -> None:
    await bus.fill_shards(0, SHARDS[:1])
    one = await claim(bus, L0)
    backdoor.hset(bus.keys.shard_positions, one.entry_id, number)
    assert (await bus.read_shards()).open == ((SHARDS[0], 0),)
    await bus.save_position(L0, one.entry_id, 4)
    assert (await bus.read_shards()).open == ((SHARDS[0], 4),)


@pytest.mark.parametrize("number", [b"many", b"9" * 20, b"9" * 19])
async def test_epochs_that_cannot_be_counted_are_as_lost_ones(bus: Bus, backdoor: Backdoor, number: bytes) -> None:
    await bus.fill_shards(0, SHARDS[:1])
    backdoor.plant(bus.keys.shard_epoch, "string", number)
    assert await bus.count_epochs() == 0
    assert await bus.fill_shards(2, SHARDS, 0)
    assert await bus.count_epochs() == 3


async def test_a_queue_of_more_entries_than_ours_has_is_not_read(
    bus: Bus, backdoor: Backdoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint reads it, and merges wait for that."""
    monkeypatch.setattr(schema, "MAX_OPEN_SHARDS", 3)
    await bus.fill_shards(0, SHARDS)
    assert len((await bus.read_shards()).open) == 3
    backdoor.append(bus.keys.shards, b"x")
    with pytest.raises(BadMessage, match="too many"):
        await bus.read_shards()
