"""Where a learner's training thread and its exchange thread meet: fields with one writer each. Pure."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import ClaimedShard
from diloco.workers.rounds import Base, OpenWindow


@dataclass(slots=True)
class Shared:
    """What the training thread and the exchange thread show each other. Each field has one writer."""

    # written by the exchange
    adoptions: dict[int, Base] = field(default_factory=dict)
    """Newest global of each fragment not adopted yet; the training side pops it."""
    windows: dict[int, OpenWindow] = field(default_factory=dict)
    uploaded: dict[int, int] = field(default_factory=dict)
    """Fragment -> serial of the last delta that may be renewed: header and payload are on the bus, or it was refused
    before they were."""
    released: dict[int, int] = field(default_factory=dict)
    """Fragment -> serial of the last delta whose snapshot is held no more: it is on the bus, or of no use."""
    state: RunState | None = None
    """The last that the bus had; also while it has none, having come back empty."""
    merged_tokens: dict[int, int] = field(default_factory=dict)
    """Of each fragment, up to the global that was pulled last."""
    offer_again: bool = False
    """The bus was away: deltas on the present bases must be offered again. Reset by who counts steps."""
    heal: bool = False
    """What it trains is not finite: drop moments, and adopt the bases once more. Reset by who counts steps."""
    pull_s: float = 0.0
    """As `LearnerReport.pull_s`."""
    shards: "queue.SimpleQueue[ClaimedShard]" = field(default_factory=queue.SimpleQueue)
    # written by the training side
    shard_position: tuple[str, int] | None = None
    """Entry id of the shard in hand and blocks of it already read."""
    shard_handed_out: tuple[str, int] | None = None
    """The same with the block last handed out: what was read when no step is under way."""
    window_seen: Callable[[], None] = lambda: None
    """Called by the exchange when it has looked, and windows are open."""
    shards_wanted: tuple[int, int] | None = None
    """(blocks in an epoch, blocks in a shard), once the training side asks for shards."""
