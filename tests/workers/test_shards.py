"""The order of data blocks: every shard once from the queue, and no waiting when the queue is away."""

import itertools
import random

import pytest

from diloco.pipeline.messages.shards import ClaimedShard, Shard
from diloco.workers.exchange.shared import Shared
from diloco.workers.exchange.work_queue import MAX_SHARDS, cut_epoch, read_blocks


def claimed(index: int, position: int = 0) -> ClaimedShard:
    shard = Shard(epoch=0, index=index, start=4 * index, stop=4 * index + 4)
    return ClaimedShard(entry_id=f"{index + 1}-0", shard=shard, position=position)


def test_the_position_counts_what_was_read() -> None:
    shared = Shared()
    blocks = read_blocks(shared, claimed(0), lambda _: None, random.Random(0))
    next(blocks)
    next(blocks)
    assert shared.shard_position == ("1-0", 1)


def test_without_the_queue_training_goes_on_with_what_was_read_before() -> None:
    """No wait, no position saved, nothing acknowledged twice; the queue is taken up again when it is back."""
    shared, finished = Shared(), []
    blocks = read_blocks(shared, claimed(0), finished.append, random.Random(0))
    first = [at for _, at in itertools.islice(blocks, 4)]
    again = [at for _, at in itertools.islice(blocks, 7)]
    assert first == [0, 1, 2, 3]
    assert again == [0, 1, 2, 3, 0, 1, 2]
    assert shared.shard_position is None
    shared.shards.put(claimed(5))
    assert [at for _, at in itertools.islice(blocks, 3)] == [3, 20, 21]
    assert finished == ["1-0"]


@pytest.mark.parametrize(
    ("blocks", "size", "count"),
    [
        (1, 8, 1),
        (64, 8, 8),
        (65, 8, 9),
        (8 * MAX_SHARDS, 8, MAX_SHARDS),
        (8 * MAX_SHARDS + 1, 9, -(-(8 * MAX_SHARDS + 1) // 9)),
        (4_000_000, 245, 16_327),
    ],
)
def test_an_epoch_has_shards_of_the_asked_size_unless_they_would_be_too_many(
    blocks: int, size: int, count: int
) -> None:
    """A text of any length is queued in one call of bounded size; each block is in one shard."""
    shards = cut_epoch(3, blocks, 8)
    assert len(shards) == count <= MAX_SHARDS
    assert {shard.stop - shard.start for shard in shards[:-1]} <= {size}
    assert [shard.start for shard in shards] == [0, *(shard.stop for shard in shards[:-1])]
    assert shards[-1].stop == blocks
    assert [shard.index for shard in shards] == list(range(count))
    assert {shard.epoch for shard in shards} == {3}
