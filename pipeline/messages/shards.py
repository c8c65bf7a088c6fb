"""Wire types of the data work queue."""

from typing import Annotated, ClassVar

from pydantic import Field

from diloco.pipeline.messages.wire import Count, Message, Text


class DataOrder(Message):
    """The definition of an epoch's blocks: all learners of a run have the same blocks in the same order."""

    max_bytes: ClassVar[int] = 2**10

    length: Annotated[Count, Field(ge=1)]
    """Blocks in an epoch."""
    seed: Count | None
    """Seed that, with the epoch, gives the permutation of range(length). None: the learners order the blocks."""


class Shard(Message):
    """A range of an epoch: blocks [start, stop) of the epoch's permutation of the data's blocks."""

    max_bytes: ClassVar[int] = 2**10

    epoch: Count
    index: Count
    start: Count
    stop: Count


class ClaimedShard(Message):
    """A shard that a learner holds."""

    entry_id: Text
    shard: Shard
    position: Count
    """Number of its blocks that earlier holders have read, as last saved."""


class ShardQueue(Message):
    """The work queue in a checkpoint: the shards not yet acknowledged, with their positions."""

    epochs: Count
    """Number of epochs queued so far."""
    open: Annotated[tuple[tuple[Shard, int], ...], Field(fail_fast=True)]
