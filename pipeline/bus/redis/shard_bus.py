"""The data work queue on Redis."""

from collections.abc import Collection, Iterable, Sequence

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.ports import WorkQueue
from diloco.pipeline.bus.redis.calls import pairs, to_ms
from diloco.pipeline.bus.redis.connection import RedisConnection
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard, ShardQueue
from diloco.pipeline.payload.codec import decode, encode


class RedisWorkQueue(RedisConnection, WorkQueue):
    """The work queue as a stream with a consumer group, a hash of positions, and a count of epochs."""

    @property
    def _queue(self) -> list[str]:
        return [self.keys.shards, self.keys.shard_positions, self.keys.shard_epoch]

    async def propose_data_order(self, order: DataOrder) -> DataOrder:
        return decode(DataOrder, await self._propose(self.keys.data_order, encode(order)))

    async def read_data_order(self) -> DataOrder | None:
        held = await self._redis.command("GET", self.keys.data_order)
        return None if held is None else decode(DataOrder, held)

    async def _put_shards(self, before: int, after: int, empty: bool, shards: Iterable[tuple[Shard, int]]) -> bool:
        pairs = (part for shard, position in shards for part in (encode(shard), position))
        return await self._redis.script("put_shards", self._queue, before, after, int(empty), *pairs) == [1]

    async def fill_shards(self, epoch: int, shards: Sequence[Shard], counted: int | None = None) -> bool:
        before = epoch if counted is None else counted
        return await self._put_shards(before, epoch + 1, False, ((shard, 0) for shard in shards))

    async def count_epochs(self) -> int:
        return schema.shard_count(await self._redis.command("GET", self.keys.shard_epoch))

    async def claim_shard(self, consumer: str, silent_s: float, known: Collection[str] = ()) -> ClaimedShard | None:
        for entry_id in known:
            schema.entry_id(entry_id)
        keys = [*self._queue[:2], self.keys.seen]
        found = await self._redis.script("claim_shard", keys, consumer, to_ms(silent_s), *known)
        if not found:
            return None
        at, blob, position = found
        return schema.claimed_shard(at.decode(), blob, position)

    async def save_position(self, consumer: str, entry_id: str, position: int) -> None:
        schema.entry_id(entry_id)
        await self._redis.script("save_position", self._queue[:2], consumer, entry_id, position)

    async def finish_shard(self, consumer: str, entry_id: str) -> None:
        schema.entry_id(entry_id)
        await self._redis.script("finish_shard", self._queue[:2], consumer, entry_id)

    async def release_shards(self, consumer: str) -> None:
        await self._redis.script("release_shards", self._queue[:1], consumer)

    async def read_shards(self) -> ShardQueue:
        most = schema.MAX_OPEN_SHARDS
        epochs, entries, positions = await self._redis.script("read_shards", self._queue, most)
        found = ((at.decode(), fields[1]) for at, fields in entries)
        return schema.shard_queue(schema.shard_count(epochs), found, pairs(positions))

    async def restore_shards(self, queue: ShardQueue) -> None:
        if not await self._put_shards(0, queue.epochs, True, queue.open):
            raise UsageError(
                f"run {self.keys.run!r} already has data shards: resume on an empty Redis or under a new --run name"
            )

    async def delete_data(self) -> None:
        await self._redis.command("UNLINK", *self._queue, self.keys.data_order)
