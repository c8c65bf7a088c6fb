"""Shards of the run's work queue, as all ranks of a learner read them: rank 0 claims them, and tells which is next.

All ranks read the same shards in the same order, and each takes its own indices of each batch (`batches`). A step is
one of all ranks, so what rank 0 has trained all have: it alone acknowledges. What it reads again, where none could be
claimed in time, it tells too.
"""

import queue
import time
from collections.abc import Callable

import structlog

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard
from diloco.pipeline.payload import codec
from diloco.workers.batches import Turns
from diloco.workers.ranks.wires import Wires

LOOK_S = 0.2
PATIENCE_S = 60.0
"""For rank 0 to draw as far as another rank has; then it is said."""
GIVES_UP_S = 600.0
"""The same in training; then it is an error. Below torch's own time for gloo, half an hour, and long enough for what
rank 0 does alone between two batches, such as an evaluation."""
Asked = tuple[int, int | None, int, int]
"""Length, seed, batch size and batches in a step, as a rank says them."""


class ShardsTold:
    """One rank's side. Rank 0 tells in its exchange thread, all hear in theirs; the training thread reads."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.heard: queue.SimpleQueue[tuple[Asked, str, int, bytes]] = queue.SimpleQueue()
        """What rank 0 was asked for; then of a shard: entry id ("": it is read again), position, and itself."""
        wires.handle(shard=self._hear)

    def tell(self, asked: Asked, claimed: ClaimedShard | None, shard: Shard) -> None:
        """Rank 0's: it has taken up this one. claimed: None: it is read again."""
        entry, position = ("", 0) if claimed is None else (claimed.entry_id, claimed.position)
        for rank in range(1, self._wires.ranks):
            self._wires.tell(rank, "shard", list(asked), entry, position, codec.encode(shard))

    async def _hear(self, _: int, asked: list[int], entry: str, position: int, encoded: bytes) -> None:
        length, seed, size, accumulate = asked
        self.heard.put(((length, seed, size, accumulate), entry, position, encoded))


def asked_for(order: DataOrder, batch_size: int, accumulate: int) -> Asked:
    """As it is told."""
    return order.length, order.seed, batch_size, accumulate


class Telling:
    """Rank 0's shards, in turn."""

    def __init__(self, shards: Turns, first: ClaimedShard, tell: Callable[[ClaimedShard | None, Shard], None]) -> None:
        """shards: after the first one. tell: the other ranks."""
        self._shards, self._tell = shards, tell
        tell(first, first.shard)

    def after(self, claimed: ClaimedShard | None, wait_s: float = 0.0) -> tuple[ClaimedShard | None, Shard]:
        """As `ShardsInTurn`."""
        found = self._shards.after(claimed, wait_s)
        self._tell(*found)
        return found


class Hearing:
    """Another rank's, in rank 0's order."""

    def __init__(self, told: ShardsTold, asked: Asked, check: Callable[[], object]) -> None:
        """asked: of this rank. check: raises if the learner is not in its run."""
        self._told, self._asked, self._check = told, asked, check

    def first(self, check: Callable[[], object]) -> ClaimedShard:
        """The one to begin with; as `after`. check: may raise too, as where this process is to end before it trains."""
        claimed, _ = self._next(check, None)  # rank 0 may itself wait, for the run's first one
        assert claimed is not None  # noqa: S101  # there is nothing yet to be read again
        return claimed

    def after(self, claimed: ClaimedShard | None, wait_s: float = 0.0) -> tuple[ClaimedShard | None, Shard]:
        """As `ShardsInTurn`; waits until rank 0 has taken it up.

        Raises:
            UsageError: rank 0 reads something else, or nothing in `GIVES_UP_S`.
            DilocoError: the learner has ended.
        """
        return self._next(self._check, GIVES_UP_S)

    def _next(self, check: Callable[[], object], within_s: float | None) -> tuple[ClaimedShard | None, Shard]:
        began, said = time.monotonic(), False
        while True:
            try:
                asked, entry, position, encoded = self._told.heard.get(timeout=LOOK_S)
                break
            except queue.Empty:
                check()
            waited_s = time.monotonic() - began
            how = "all ranks must draw alike: give their loaders the same num_workers and prefetch_factor"
            if within_s is not None and waited_s > within_s:
                raise UsageError(f"batches(): rank 0 has not drawn as many as this rank in {within_s:g} s; {how}")
            if not said and waited_s > PATIENCE_S:
                said = True
                structlog.get_logger().warning("batches_awaited", detail=f"rank 0 has not drawn as many yet; {how}")
        if asked != self._asked:
            raise UsageError(f"batches(): this rank says {_shown(self._asked)}, rank 0 {_shown(asked)}: say the same")
        shard = codec.decode(Shard, encoded)
        return (ClaimedShard(entry_id=entry, shard=shard, position=position) if entry else None), shard


def _shown(asked: Asked) -> str:
    return "length={}, seed={}, batch_size={}, accumulate={}".format(*asked)
