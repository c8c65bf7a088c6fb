"""The data work queue of the bus in memory. `choose` is the twin of `bus/redis/lua/claim_shard.lua`, and pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.ports import WorkQueue
from diloco.pipeline.errors import BadMessage, UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard, ShardQueue
from diloco.pipeline.payload.codec import decode, encode
from diloco_studies.virtual.memory_calls import MemoryCalls
from diloco_studies.virtual.memory_store import EntryId, Hash, Stream

RELEASED = "released"
"""Holder of what was given back: no consumer's name, since those have a dot before the incarnation."""


def choose(
    held: Mapping[EntryId, tuple[str, int]],
    seen: Hash,
    consumer: str,
    known: Collection[EntryId],
    silent_ms: int,
    now_ms: int,
) -> EntryId | None:
    """The held entry to take: one that the consumer holds without knowing it, else the oldest whose holder is gone.

    Args:
        held: entry -> (consumer, when it was delivered to it, in ms).
        seen: `learner/incarnation` -> when it last reported, in ms.
        consumer: who claims.
        known: what the consumer knows it holds.
        silent_ms: a holder not heard from for this long is gone.
        now_ms: the server's time.
    """

    def gone(at: EntryId) -> bool:
        holder, delivered_ms = held[at]
        learner, _, incarnation = holder.rpartition(".")
        last = seen.get(f"{learner}/{incarnation}".encode() if learner else holder.encode(), b"")
        return holder == RELEASED or now_ms - (int(last) if last.isdigit() else delivered_ms) >= silent_ms

    mine = sorted(at for at, (holder, _) in held.items() if holder == consumer and at not in known)
    if mine:
        return mine[0]
    return min((at for at, (holder, _) in held.items() if holder != consumer and gone(at)), default=None)


class MemoryWorkQueue(MemoryCalls, WorkQueue):
    """Data shards."""

    def _queue(self) -> tuple[Stream, Hash, int]:
        epochs = schema.shard_count(self._bytes(self.keys.shard_epoch))
        return self._stream(self.keys.shards), self._hash(self.keys.shard_positions), epochs

    async def propose_data_order(self, order: DataOrder) -> DataOrder:
        return decode(DataOrder, await self._propose(self.keys.data_order, encode(order)))

    async def read_data_order(self) -> DataOrder | None:
        await self._turn()
        held = self._bytes(self.keys.data_order)
        return None if held is None else decode(DataOrder, held)

    def _put(self, epochs: int, shards: Iterable[tuple[Shard, int]]) -> None:
        self.store.need_room()
        stream = self.store.stream(self.keys.shards)
        stream.delivered = stream.delivered or (0, 0)
        for shard, position in shards:
            at = self._xadd(self.keys.shards, encode(shard))
            if position:
                self.store.hset(self.keys.shard_positions, {at: b"%d" % position})
        self._set(self.keys.shard_epoch, b"%d" % epochs)

    async def fill_shards(self, epoch: int, shards: Sequence[Shard], counted: int | None = None) -> bool:
        await self._turn()
        if self._queue()[2] != (epoch if counted is None else counted):
            return False
        self._put(epoch + 1, ((shard, 0) for shard in shards))
        return True

    async def count_epochs(self) -> int:
        await self._turn()
        return self._queue()[2]

    async def claim_shard(self, consumer: str, silent_s: float, known: Collection[str] = ()) -> ClaimedShard | None:
        known_ids = {schema.entry_id(at) for at in known}
        await self._turn()
        stream, positions, _ = self._queue()
        seen, now_ms = self._hash(self.keys.seen), self._unix_ms()
        if stream.delivered is None:
            return None
        taken = choose(stream.held, seen, consumer, known_ids, max(1, round(1000 * silent_s)), now_ms)
        found = stream.after(stream.delivered, 1) if taken is None else stream.after((taken[0], taken[1] - 1), 1)
        if not found:
            return None
        at, blob = found[0]
        stream.delivered = max(stream.delivered, schema.entry_id(at))
        stream.held[schema.entry_id(at)] = (consumer, now_ms)
        return schema.claimed_shard(at, blob, positions.get(at.encode()))

    def _holds(self, stream: Stream, consumer: str, entry_id: str) -> bool:
        return stream.held.get(schema.entry_id(entry_id), ("", 0))[0] == consumer

    async def save_position(self, consumer: str, entry_id: str, position: int) -> None:
        await self._turn()
        stream, positions, _ = self._queue()
        if not self._holds(stream, consumer, entry_id):
            return
        if position > schema.shard_count(positions.get(entry_id.encode())):
            self.store.hset(self.keys.shard_positions, {entry_id: b"%d" % position})

    async def finish_shard(self, consumer: str, entry_id: str) -> None:
        await self._turn()
        stream, positions, _ = self._queue()
        if self._holds(stream, consumer, entry_id):
            del stream.held[schema.entry_id(entry_id)]
            stream.delete(schema.entry_id(entry_id))
            positions.pop(entry_id.encode(), None)

    async def release_shards(self, consumer: str) -> None:
        await self._turn()
        held, now_ms = self._queue()[0].held, self._unix_ms()
        held |= {at: (RELEASED, now_ms) for at, (holder, _) in held.items() if holder == consumer}

    async def read_shards(self) -> ShardQueue:
        await self._turn()
        stream, positions, epochs = self._queue()
        if len(stream.ids) > schema.MAX_OPEN_SHARDS:
            raise BadMessage(f"{self.keys.shards} holds a queue of too many entries")
        if len(positions) > schema.MAX_OPEN_SHARDS:
            raise BadMessage(f"{self.keys.shard_positions} holds a hash of too many positions")
        return schema.shard_queue(epochs, stream.after((0, 0), len(stream.ids)), positions)

    async def restore_shards(self, queue: ShardQueue) -> None:
        await self._turn()
        stream, positions, epochs = self._queue()
        if stream.ids or positions or epochs:
            raise UsageError(f"run {self.keys.run!r} already has data shards: resume on an empty Redis or a new --run")
        self._put(queue.epochs, queue.open)

    async def delete_data(self) -> None:
        await self._turn()
        keys = self.keys
        for key in (keys.shards, keys.shard_positions, keys.shard_epoch, keys.data_order):
            self.store.delete(key)
