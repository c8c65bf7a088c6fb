"""The order in which a learner reads data blocks: the run's work queue, and never waiting for it. Pure of torch.

The exchange keeps a few claimed shards ready. Should the bus be away for longer than they last, training goes
on with shards that this learner has read before, and takes up the queue again when it is back: repeated blocks
cost a little, a stopped learner costs everything.
"""

import queue
import random
from collections import deque
from collections.abc import Callable, Iterator

import structlog

from pipeline.shard_messages import ClaimedShard, Shard

from .shared import Shared

RECENT_SHARDS = 64
"""Shards remembered for reading again."""


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
    recent: deque[Shard] = deque(maxlen=RECENT_SHARDS)
    claimed: ClaimedShard | None = first
    repeating = False
    while True:
        if claimed is None:
            if not repeating:
                structlog.get_logger().warning("data_repeated", reason="no shard could be claimed in time")
            repeating, again = True, chance.choice(recent)
            yield from ((again.epoch, at) for at in range(again.start, again.stop))
        else:
            repeating = False
            for at in range(claimed.shard.start + claimed.position, claimed.shard.stop):
                read = (claimed.entry_id, at + 1 - claimed.shard.start)
                shared.shard_handed_out = read
                yield claimed.shard.epoch, at
                shared.shard_position = read
            shared.shard_position = shared.shard_handed_out = None
            finished(claimed.entry_id)
            recent.append(claimed.shard)
        try:
            claimed = shared.shards.get_nowait()
        except queue.Empty:
            claimed = None
