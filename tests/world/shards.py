"""Whether data is read: what leaves the work queue was read to its end, and all else of the epochs queued is there."""

from collections.abc import Callable
from typing import Any

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.messages.shards import ClaimedShard, Shard
from diloco.pipeline.payload.codec import decode
from diloco_studies.virtual.memory_store import Stream
from tests.world.link import Link
from tests.world.plan import BLOCKS, SHARD_BLOCKS
from tests.world.record import Seen


class Shards:
    """Those of one run."""

    def __init__(self, store: Seen, keys: RunKeys, broken: Callable[[str, str], None]) -> None:
        self._store, self._keys, self._broken = store, keys, broken
        self._read: set[tuple[int, int]] = set()
        """(epoch, block) that a learner has read."""
        self._claimed: dict[str, Shard] = {}
        self._epochs_lost = 0
        """Epochs before this one went with the queue."""

    def read(self, epoch: int, block: int) -> None:
        """A learner trained on it."""
        self._read.add((epoch, block))

    def filled(self, link: Link, outcome: Any, epoch: int, shards: Any, counted: int | None = None) -> None:
        """Where the bus lost its queue, the epoch under way is put back, and no earlier one.

        Learners that hold shards of those read them to the end. Of what dead ones held, nobody alive knows.
        """
        if outcome is True and counted is not None and counted < epoch:
            self._epochs_lost = max(self._epochs_lost, epoch)

    def claimed(self, link: Link, outcome: Any, *args: Any) -> None:
        """A learner holds one."""
        if isinstance(outcome, ClaimedShard):
            self._claimed[outcome.entry_id] = outcome.shard

    def finished(self, link: Link, outcome: Any, consumer: str, entry_id: str) -> None:
        """One leaves the queue."""
        queue = self._queue()
        if isinstance(outcome, Exception) or queue is None:
            return
        if schema.entry_id(entry_id) not in queue.ids:
            self._check_read(self._claimed[entry_id])

    def check(self) -> None:
        """What left the queue was read; all else of the epochs queued so far is still there."""
        queue, epochs = self._queue(), self._store.values.get(self._keys.shard_epoch)
        waiting = [decode(Shard, data) for data in queue.data] if queue else []
        there = {(shard.epoch, shard.index) for shard in waiting}
        for epoch in range(self._epochs_lost, int(epochs) if isinstance(epochs, bytes) else 0):
            for index, start in enumerate(range(0, BLOCKS, SHARD_BLOCKS)):
                if (epoch, index) not in there:
                    stop = min(start + SHARD_BLOCKS, BLOCKS)
                    self._check_read(Shard(epoch=epoch, index=index, start=start, stop=stop))

    def _queue(self) -> Stream | None:
        found = self._store.values.get(self._keys.shards)
        return found if isinstance(found, Stream) else None

    def _check_read(self, shard: Shard) -> None:
        missed = [at for at in range(shard.start, shard.stop) if (shard.epoch, at) not in self._read]
        if missed:
            self._broken("every shard is read to its end", f"epoch {shard.epoch} shard {shard.index}: not {missed}")
