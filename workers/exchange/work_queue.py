"""A learner's side of the data work queue, for which training never waits. No torch.

The exchange thread claims a few shards ahead, saves positions, acknowledges shards, and gives them back on leaving
(`ShardClaims`). The training thread reads the claimed ones (`read_blocks`, or `workers/batches.py`). If the bus is
unavailable for longer than they last, training continues on shards that this learner has read before, until the queue
is back: repeated blocks cost a little, a stopped learner costs everything. The two threads meet in `Shared`.
"""

import asyncio
import queue
import random
from collections import deque
from collections.abc import Callable, Iterator

import structlog

from diloco.pipeline.bus.ports import WorkQueue
from diloco.pipeline.errors import SpecMismatch
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard
from diloco.workers.exchange.shared import Shared
from diloco.workers.times import TIMES

# Shards that a learner holds, including the one that it reads. Shards that were drawn whole and wait to be trained on
# are not counted.
PREFETCHED_SHARDS = 4
# Inner steps of data in a shard: enough to make claims rare for the bus, few enough to lose.
STEPS_PER_SHARD = 8
# Most shards of an epoch: one call queues them all, and one call reads them all for each checkpoint.
MAX_SHARDS = 16_384
# Shards that are remembered to be read again.
RECENT_SHARDS = 64


def cut_epoch(epoch: int, blocks: int, per_shard: int) -> list[Shard]:
    """Return the shards of an epoch: `per_shard` blocks each, or more if there would be too many shards."""
    size = max(per_shard, -(-blocks // MAX_SHARDS))
    return [
        Shard(epoch=epoch, index=i, start=start, stop=min(start + size, blocks))
        for i, start in enumerate(range(0, blocks, size))
    ]


class ShardClaims:
    """The shards that one incarnation of a learner holds."""

    def __init__(self, bus: WorkQueue, consumer: str, shared: Shared) -> None:
        self._bus, self._consumer, self._shared = bus, consumer, shared
        self._log = structlog.get_logger().bind(consumer=consumer)
        self._wake = asyncio.Event()
        self._held: dict[str, Shard] = {}  # entry id -> shard that is claimed and not acknowledged
        self._drawn: set[str] = set()  # entry ids of held shards whose last block was drawn
        self._order: DataOrder | None = None  # as agreed with the run
        self._finished: list[str] = []  # entry ids of shards to acknowledge
        self._epochs = 0  # epochs queued so far, judging by the shards that were claimed
        self._leaving = False
        self._refused_one = False  # the warning about entries that are not shards was logged
        self.returned = asyncio.Event()  # set when the learner has left and holds nothing any more

    async def agree(self, order: DataOrder) -> None:
        """Settle which data the run's shards refer to, before any shard is wanted.

        Raises:
            SpecMismatch: the run's shards refer to other data; says to which.
            BusError: call it again.
        """
        held = await self._bus.propose_data_order(order)
        if held != order:
            raise SpecMismatch(
                f"this learner reads {_in_words(order)}, but its run reads {_in_words(held)}: give all learners the "
                "same data and seed, or start a run with a different name (not from this one's checkpoint, which "
                "keeps its data)"
            )
        self._order = order

    def want(self) -> None:
        """Note that `Shared.shards_wanted` was set, or that a shard was taken."""
        self._wake.set()

    def drawn(self, entry_id: str) -> None:
        """Note that a shard's last block was drawn; `finish` follows when it was trained on."""
        self._drawn.add(entry_id)
        self._wake.set()

    def finish(self, entry_id: str) -> None:
        """Note that a shard was read to its end and must be acknowledged."""
        self._finished.append(entry_id)
        self._wake.set()

    def leave(self) -> None:
        """Give back what is unread, now that the training side has stopped; `returned` is set afterwards."""
        self._leaving = True
        self._wake.set()

    async def keep_claimed(self) -> None:
        """Acknowledge what was read and keep a few claimed shards ready; when it leaves, give back the rest.

        Raises:
            SpecMismatch: the bus has lost the agreed order, and others have put another one there.
            BusError: call it again.
        """
        while True:
            self._wake.clear()
            await self._settle()
            wanted = self._shared.shards_wanted
            while not self._leaving and wanted and self._unread < PREFETCHED_SHARDS:
                claimed = await self._bus.claim_shard(self._consumer, TIMES.dead_s, tuple(self._held))
                if claimed is None:
                    await self._fill_epoch(*wanted)
                elif not self._is_there(claimed.shard, wanted[0]):
                    self._finished.append(claimed.entry_id)
                    await self._settle()
                # An entry that is held already was taken from us for a while, and is still being read: nothing to do.
                elif claimed.entry_id not in self._held:
                    shard = self._held[claimed.entry_id] = claimed.shard
                    self._epochs = max(self._epochs, shard.epoch + 1)
                    self._log.debug("shard_claimed", epoch=shard.epoch, shard=shard.index, position=claimed.position)
                    if claimed.position < shard.stop - shard.start:
                        self._shared.shards.put(claimed)
                    else:  # its previous reader died between the last block and the acknowledgement
                        self._finished.append(claimed.entry_id)
                        await self._settle()
            if self._leaving and not self._finished:
                await self._give_back()
            await self._wake.wait()

    async def save(self, position: tuple[str, int]) -> None:
        """Save a position: entry id, and number of the shard's blocks that were read.

        Raises:
            BusError: it may not have been saved.
        """
        await self._bus.save_position(self._consumer, *position)

    @property
    def _unread(self) -> int:
        """Number of held shards with blocks left to read."""
        return len(self._held.keys() - self._drawn - {*self._finished})

    def _is_there(self, shard: Shard, blocks: int) -> bool:
        """Return whether the shard's blocks exist in data of this many blocks."""
        there = 0 <= shard.start < shard.stop <= blocks
        if not there:
            say = self._log.debug if self._refused_one else self._log.warning  # anybody may put any number there
            detail = "an entry of the data queue is not a shard of this data; such entries are removed unread"
            say("shard_refused", start=shard.start, stop=shard.stop, blocks=blocks, detail=detail)
            self._refused_one = True
        return there

    async def _settle(self) -> None:
        while self._finished:
            await self._acknowledge(self._finished[0])
            entry_id = self._finished.pop(0)
            self._held.pop(entry_id, None)
            self._drawn.discard(entry_id)

    async def _acknowledge(self, entry_id: str) -> None:
        """Log that a shard was read, then take it off the queue.

        The order matters: whatever happens in between, every shard that left the queue is in the log.
        """
        if (shard := self._held.get(entry_id)) is not None:
            self._log.debug("shard_read", epoch=shard.epoch, shard=shard.index)
        await self._bus.finish_shard(self._consumer, entry_id)

    async def _give_back(self) -> None:
        """Release unread shards for others, with the position up to which the training side has read."""
        if self._held:
            if self._shared.shard_handed_out is not None:
                entry_id, read = self._shared.shard_handed_out
                shard = self._held.get(entry_id)
                # It was read to its end, which `read_blocks` notes only when the next block is asked for.
                if shard is not None and read == shard.stop - shard.start:
                    await self._acknowledge(entry_id)
                else:
                    await self.save((entry_id, read))
            await self._bus.release_shards(self._consumer)
        self.returned.set()

    async def _fill_epoch(self, blocks: int, per_shard: int) -> None:
        """Queue the next epoch. If the bus has lost its queue, queue the current epoch again: its rest was lost."""
        counted = await self._bus.count_epochs()
        lost = counted < self._epochs
        if lost and self._order is not None:
            await self.agree(self._order)
        epoch = self._epochs - 1 if lost else counted
        shards = cut_epoch(epoch, blocks, per_shard)
        if await self._bus.fill_shards(epoch, shards, counted):
            if lost:
                self._log.warning(
                    "shards_lost", epoch=epoch, detail="the bus lost the data queue; restarting the current epoch"
                )
            self._log.info("epoch_queued", epoch=epoch, shards=len(shards))


def _in_words(order: DataOrder) -> str:
    if order.seed is None:
        return f"{order.length} blocks in an order of its own (blocks({order.length}, ...))"
    return f"{order.length} indices with seed {order.seed} (batches({order.length}, ..., seed={order.seed}))"


class ShardsInTurn:
    """The sequence of shards that a learner reads: claimed ones, or an earlier one again if none is claimed."""

    def __init__(self, shared: Shared, chance: random.Random) -> None:
        """chance: chooses the shard to read again."""
        self._shared, self._chance = shared, chance
        self._recent: deque[Shard] = deque(maxlen=RECENT_SHARDS)

    def after(self, claimed: ClaimedShard | None, wait_s: float = 0.0) -> tuple[ClaimedShard | None, Shard]:
        """Return the next shard, with its claim or None if it is read again.

        Args:
            claimed: the claim of the shard just read; None: it was one that was read again.
            wait_s: how long to wait for the next claim after a claimed shard.
        """
        if claimed is not None:
            self._recent.append(claimed.shard)
        try:
            found = self._shared.shards.get(timeout=0 if claimed is None else wait_s)
        except queue.Empty:
            if claimed is not None:
                structlog.get_logger().warning("data_repeated", reason="no shard could be claimed in time")
            return None, self._chance.choice(self._recent)
        return found, found.shard


def read_blocks(
    shared: Shared, first: ClaimedShard, finished: Callable[[str], None], chance: random.Random
) -> Iterator[tuple[int, int]]:
    """Yield (epoch, index) of blocks, endlessly.

    Args:
        shared: holds the claimed shards, and takes the position in the shard being read.
        first: the shard to begin with.
        finished: called with the entry id of each shard that was read to its end.
        chance: chooses the shard to read again.
    """
    shards = ShardsInTurn(shared, chance)
    claimed: ClaimedShard | None = first
    shard = first.shard
    while True:
        if claimed is None:
            yield from ((shard.epoch, at) for at in range(shard.start, shard.stop))
        else:
            for at in range(shard.start + claimed.position, shard.stop):
                read = (claimed.entry_id, at + 1 - shard.start)
                shared.shard_handed_out = read
                yield shard.epoch, at
                shared.shard_position = read  # only now: a block counts as read when the next one is asked for
            shared.shard_position = shared.shard_handed_out = None
            finished(claimed.entry_id)
        claimed, shard = shards.after(claimed)
