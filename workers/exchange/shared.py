"""The fields in which a learner's training thread and exchange thread meet. Pure."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import ClaimedShard
from diloco.workers.rounds import Base, OpenWindow


@dataclass(slots=True)
class Shared:
    """The state that the two threads share, without a lock: only single operations on a field are atomic."""

    # written by the exchange
    adoptions: dict[int, Base] = field(default_factory=dict)
    """Fragment -> its newest global that is not adopted yet; the training side pops it."""
    windows: dict[int, OpenWindow] = field(default_factory=dict)
    uploaded: dict[int, int] = field(default_factory=dict)
    """Fragment -> serial of the last delta that may be renewed: its header and payload are on the bus, or it was
    refused before they were."""
    released: dict[int, int] = field(default_factory=dict)
    """Fragment -> serial of the last delta whose snapshot is no longer held: it is on the bus, or of no use any more.
    """
    state: RunState | None = None
    """The run's state as last read; it is kept while a bus that came back empty has none."""
    merged_tokens: dict[int, int] = field(default_factory=dict)
    """Fragment -> merged tokens, up to the global that was pulled last."""
    offer_again: bool = False
    """The bus was unavailable, so deltas on the current bases must be offered again. The training side resets it."""
    heal: bool = False
    """What this learner trains is not finite: drop the moments and return to the bases. The training side resets it."""
    pull_s: float = 0.0
    """See `LearnerReport.pull_s`."""
    shards: "queue.SimpleQueue[ClaimedShard]" = field(default_factory=queue.SimpleQueue)
    # written by the training side
    shard_position: tuple[str, int] | None = None
    """Entry id of the shard being read, and the number of its blocks that were read."""
    shard_handed_out: tuple[str, int] | None = None
    """The same, including the block last handed out. Between two steps, this is what was really read."""
    window_seen: Callable[[], None] = lambda: None
    """The exchange calls it after a poll that found open windows."""
    shards_wanted: tuple[int, int] | None = None
    """(blocks in an epoch, blocks in a shard), from when the training side first asks for shards."""
