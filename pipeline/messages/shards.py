"""Wire types of the data work queue."""

from typing import Annotated, ClassVar

from pydantic import Field

from diloco.pipeline.messages.wire import Count, Message, Text


class DataOrder(Message):
    """What the blocks of an epoch are: all learners of a run have the same ones in the same order."""

    max_bytes: ClassVar[int] = 2**10

    length: Annotated[Count, Field(ge=1)]
    """Blocks in an epoch."""
    seed: Count | None
    """With the epoch it gives the permutation of range(length) that blocks are. None: the learners see to that."""


class Shard(Message):
    """A piece of an epoch: blocks [start, stop) of the epoch's permutation of the data's blocks."""

    max_bytes: ClassVar[int] = 2**10

    epoch: Count
    index: Count
    start: Count
    stop: Count


class ClaimedShard(Message):
    """A shard in a learner's hands."""

    entry_id: Text
    shard: Shard
    position: Count
    """Blocks of it already read by an earlier holder, as last saved."""


class ShardQueue(Message):
    """The work queue as a checkpoint keeps it: shards not yet acknowledged, with their positions."""

    epochs: Count
    """Epochs put on the queue so far."""
    open: Annotated[tuple[tuple[Shard, int], ...], Field(fail_fast=True)]
