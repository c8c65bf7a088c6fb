"""Passes the shards of the run's work queue to all ranks of a learner: rank 0 claims them and tells the others.

All ranks read the same shards in the same order, and each takes its own indices of each batch (`batches`). A step is a
step of all ranks, so what rank 0 has trained on, all have: only rank 0 acknowledges shards. When it could not claim a
shard in time and reads an earlier one again, it tells the others that too.
"""

import queue
import time
from collections.abc import Callable

import structlog

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard
from diloco.pipeline.payload import codec
from diloco.workers.batches import NextShard
from diloco.workers.ranks.transport import Transport

LOOK_S = 0.2
# Seconds that a rank waits for rank 0 to draw as many shards before it logs a warning.
PATIENCE_S = 60.0
# Seconds of the same wait in training after which it is an error. This is below torch's own timeout for gloo, half an
# hour, and long enough for what only rank 0 does between two batches, such as an evaluation.
GIVES_UP_S = 600.0
# Length, seed, batch size, and batches per step, as a rank's loop passed them.
LoaderArguments = tuple[int, int | None, int, int]


class ShardBroadcast:
    """One rank's side. Rank 0's exchange thread sends, every other one's receives; the training thread reads."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.received: queue.SimpleQueue[tuple[LoaderArguments, str, int, bytes]] = queue.SimpleQueue()
        """Each shard as rank 0 sent it: what its loop asked for, entry id ("" if it is read again), position, and
        bytes."""
        transport.handle(shard=self._receive)

    def notify(self, asked: LoaderArguments, claimed: ClaimedShard | None, shard: Shard) -> None:
        """Tell all other ranks that rank 0 reads this shard next. Only at rank 0. claimed: None if it is read again."""
        entry, position = ("", 0) if claimed is None else (claimed.entry_id, claimed.position)
        for rank in range(1, self._transport.ranks):
            self._transport.notify(rank, "shard", list(asked), entry, position, codec.encode(shard))

    async def _receive(self, _: int, asked: list[int], entry: str, position: int, encoded: bytes) -> None:
        length, seed, size, accumulate = asked
        self.received.put(((length, seed, size, accumulate), entry, position, encoded))


def loader_arguments(order: DataOrder, batch_size: int, accumulate: int) -> LoaderArguments:
    """Return what this rank's loop asks for, in the form in which it is sent."""
    return order.length, order.seed, batch_size, accumulate


def leading(after: NextShard, first: ClaimedShard, notify: Callable[[ClaimedShard | None, Shard], None]) -> NextShard:
    """Return `after` as rank 0 calls it: it tells the other ranks of each shard, and of the first one at once."""
    notify(first, first.shard)

    def next_shard(claimed: ClaimedShard | None, wait_s: float) -> tuple[ClaimedShard | None, Shard]:
        found = after(claimed, wait_s)
        notify(*found)
        return found

    return next_shard


class FollowingShards:
    """Another rank's shards in rank 0's order."""

    def __init__(self, broadcast: ShardBroadcast, asked: LoaderArguments, check: Callable[[], object]) -> None:
        """asked: by this rank's loop; rank 0's must be the same. check: raises if the learner is not in its run."""
        self._broadcast, self._asked, self._check = broadcast, asked, check

    def first(self, check: Callable[[], object]) -> ClaimedShard:
        """Return the first shard; waits like `after`, without a time limit. check: called meanwhile; may raise to give
        up."""
        claimed, _ = self._next(check, None)  # no limit: rank 0 may be waiting for the run's first shard
        assert claimed is not None  # noqa: S101  # there is nothing yet to read again
        return claimed

    def after(self, claimed: ClaimedShard | None, wait_s: float = 0.0) -> tuple[ClaimedShard | None, Shard]:
        """Wait until rank 0 has taken up the next shard, and return it; a `batches.NextShard`.

        Raises:
            UsageError: rank 0's loop asks for something else, or draws nothing for `GIVES_UP_S`.
            DilocoError: the learner has ended.
        """
        return self._next(self._check, GIVES_UP_S)

    def _next(self, check: Callable[[], object], within_s: float | None) -> tuple[ClaimedShard | None, Shard]:
        began, warned = time.monotonic(), False
        while True:
            try:
                asked, entry, position, encoded = self._broadcast.received.get(timeout=LOOK_S)
                break
            except queue.Empty:
                check()
            waited_s = time.monotonic() - began
            how = (
                "all ranks must draw the same number of batches: give their loaders the same num_workers and "
                "prefetch_factor"
            )
            if within_s is not None and waited_s > within_s:
                raise UsageError(f"batches(): rank 0 did not draw as many as this rank within {within_s:g} s; {how}")
            if not warned and waited_s > PATIENCE_S:
                warned = True
                structlog.get_logger().warning("batches_awaited", detail=f"rank 0 has not drawn as many yet; {how}")
        if asked != self._asked:
            raise UsageError(
                f"batches(): this rank uses {_shown(self._asked)}, but rank 0 uses {_shown(asked)}: pass "
                "the same arguments"
            )
        shard = codec.decode(Shard, encoded)
        return (ClaimedShard(entry_id=entry, shard=shard, position=position) if entry else None), shard


def _shown(asked: LoaderArguments) -> str:
    return "length={}, seed={}, batch_size={}, accumulate={}".format(*asked)
