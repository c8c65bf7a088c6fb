"""A learner's side of the data work queue: the order in which it reads blocks, and it never waits for it. No torch.

The exchange thread claims a few shards ahead, saves positions, acknowledges, gives back on leaving (`ShardClaims`).
The training thread reads what is claimed (`read_blocks`, or `workers/batches.py`). Should the bus be away for longer
than that lasts, training goes on with shards that this learner has read before, and takes up the queue again when it is
back: repeated blocks cost a little, a stopped learner costs everything. The two meet in `Shared`.
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

PREFETCHED_SHARDS = 4
"""Shards held by a learner, the one it reads included; not those that are drawn whole and wait to be trained on."""
STEPS_PER_SHARD = 8
"""Inner steps of data a learner claims at a time: rare enough for the bus, little enough to lose."""
MAX_SHARDS = 16_384
"""Shards of an epoch: they are queued in one call, and read in one for each checkpoint."""
SILENT_S = 10.0
"""A learner that has not reported for this long is taken for dead: others read its shards on."""
RECENT_SHARDS = 64
"""Shards remembered for reading again."""


def cut_epoch(epoch: int, blocks: int, per_shard: int) -> list[Shard]:
    """The shards of an epoch, each of `per_shard` blocks, or of more where there would be too many shards."""
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
        self._held: dict[str, Shard] = {}
        """Entry id -> shard, of those that this learner has claimed and not acknowledged."""
        self._drawn: set[str] = set()
        """Entry ids of those that nothing is left to draw from."""
        self._order: DataOrder | None = None
        """As agreed with the run."""
        self._finished: list[str] = []
        self._epochs = 0
        """Those queued so far, as far as known by what was claimed."""
        self._leaving = False
        self._refused_one = False
        """It was said that there are entries that are no shards."""
        self.returned = asyncio.Event()
        """On leaving: nothing is held any more."""

    async def agree(self, order: DataOrder) -> None:
        """Settle what the run's shards are of, before any is wanted.

        Raises:
            SpecMismatch: the run's are of something else; says of what.
            BusError: call it again.
        """
        held = await self._bus.propose_data_order(order)
        if held != order:
            raise SpecMismatch(
                f"this learner reads {_in_words(order)}, and its run {_in_words(held)}: give all learners the same "
                f"data and seed, or begin a run of another name (not from this one's checkpoint, which keeps its data)"
            )
        self._order = order

    def want(self) -> None:
        """`Shared.shards_wanted` was set, or a shard was taken."""
        self._wake.set()

    def drawn(self, entry_id: str) -> None:
        """Nothing is left to draw from a shard; it is `finish`ed once it is trained on."""
        self._drawn.add(entry_id)
        self._wake.set()

    def finish(self, entry_id: str) -> None:
        """A shard was read to its end."""
        self._finished.append(entry_id)
        self._wake.set()

    def leave(self) -> None:
        """The training side has stopped: give back what is unread; then `returned` is set."""
        self._leaving = True
        self._wake.set()

    async def keep_claimed(self) -> None:
        """Acknowledge what was read, keep a few claimed shards ready; on leaving, give back the rest.

        Raises:
            SpecMismatch: the bus has lost what was agreed on, and others have put another order there.
            BusError: call it again.
        """
        while True:
            self._wake.clear()
            await self._settle()
            wanted = self._shared.shards_wanted
            while not self._leaving and wanted and self._unread < PREFETCHED_SHARDS:
                claimed = await self._bus.claim_shard(self._consumer, SILENT_S, tuple(self._held))
                if claimed is None:
                    await self._fill_epoch(*wanted)
                elif not self._is_there(claimed.shard, wanted[0]):
                    self._finished.append(claimed.entry_id)
                    await self._settle()
                elif claimed.entry_id not in self._held:  # else: taken from us for a while, and still in hand
                    shard = self._held[claimed.entry_id] = claimed.shard
                    self._epochs = max(self._epochs, shard.epoch + 1)
                    self._log.debug("shard_claimed", epoch=shard.epoch, shard=shard.index, position=claimed.position)
                    if claimed.position < shard.stop - shard.start:
                        self._shared.shards.put(claimed)
                    else:  # its reader died between its last block and its acknowledgement
                        self._finished.append(claimed.entry_id)
                        await self._settle()
            if self._leaving and not self._finished:
                await self._give_back()
            await self._wake.wait()

    async def save(self, position: tuple[str, int]) -> None:
        """Save a position: entry id, and blocks of the shard already read.

        Raises:
            BusError: it may not be saved.
        """
        await self._bus.save_position(self._consumer, *position)

    @property
    def _unread(self) -> int:
        """Shards with something left to read."""
        return len(self._held.keys() - self._drawn - {*self._finished})

    def _is_there(self, shard: Shard, blocks: int) -> bool:
        """Whether this run's data, of so many blocks, has the shard's."""
        there = 0 <= shard.start < shard.stop <= blocks
        if not there:
            say = self._log.debug if self._refused_one else self._log.warning  # anybody may put any number there
            detail = "an entry of the data queue is no shard of this data: such ones are taken off it unread"
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
        """Said in the log before it is done: what left the queue was read, whatever happens in between."""
        if (shard := self._held.get(entry_id)) is not None:
            self._log.debug("shard_read", epoch=shard.epoch, shard=shard.index)
        await self._bus.finish_shard(self._consumer, entry_id)

    async def _give_back(self) -> None:
        """What the training side has not read is for others, from where it stopped."""
        if self._held:
            if self._shared.shard_handed_out is not None:
                entry_id, read = self._shared.shard_handed_out
                shard = self._held.get(entry_id)
                # To its end, which shows only when the next block is asked for.
                if shard is not None and read == shard.stop - shard.start:
                    await self._acknowledge(entry_id)
                else:
                    await self.save((entry_id, read))
            await self._bus.release_shards(self._consumer)
        self.returned.set()

    async def _fill_epoch(self, blocks: int, per_shard: int) -> None:
        """Queue the next epoch; where the bus has lost its queue, the one under way once more: its rest is lost."""
        counted = await self._bus.count_epochs()
        lost = counted < self._epochs
        if lost and self._order is not None:
            await self.agree(self._order)
        epoch = self._epochs - 1 if lost else counted
        shards = cut_epoch(epoch, blocks, per_shard)
        if await self._bus.fill_shards(epoch, shards, counted):
            if lost:
                self._log.warning("shards_lost", epoch=epoch, detail="the bus lost the data queue: read from its start")
            self._log.info("epoch_queued", epoch=epoch, shards=len(shards))


def _in_words(order: DataOrder) -> str:
    if order.seed is None:
        return f"{order.length} blocks in an order of its own (blocks({order.length}, ...))"
    return f"{order.length} indices by seed {order.seed} (batches({order.length}, ..., seed={order.seed}))"


class ShardsInTurn:
    """The shards that a learner reads one after the other: claimed ones, and where there is none, one again."""

    def __init__(self, shared: Shared, chance: random.Random) -> None:
        """chance: chooses what is read again."""
        self._shared, self._chance = shared, chance
        self._recent: deque[Shard] = deque(maxlen=RECENT_SHARDS)

    def after(self, claimed: ClaimedShard | None, wait_s: float = 0.0) -> tuple[ClaimedShard | None, Shard]:
        """What comes after one that was claimed, or, None, one that was read again; what is claimed of it, and it.

        wait_s: how long to wait after a claimed one for the next.
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
    """Endless (epoch, index) of blocks.

    Args:
        shared: where the exchange puts claimed shards, and reads the position in the shard in hand.
        first: the shard to begin with.
        finished: told the entry id of each shard that was read to its end.
        chance: chooses what is read again.
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
                shared.shard_position = read
            shared.shard_position = shared.shard_handed_out = None
            finished(claimed.entry_id)
        claimed, shard = shards.after(claimed)
