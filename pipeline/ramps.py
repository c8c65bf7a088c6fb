"""What changes in the course of a run, each as a function of a fragment's version. Pure.

A version counts the outer steps of its fragment, is in every head, header and tape record, and goes back when the bus
does: so windows of different fragments, a restarted syncer, a learner that joins and a replay all find the same.
"""

from collections.abc import Iterable

from diloco.pipeline.messages.spec import SyncSpec


def interval_at(sync: SyncSpec, version: int) -> int:
    """Inner steps between two syncs of a fragment whose base has this version.

    It begins at `first_interval`, doubles with every `doubling` outer steps, and stays at `sync_interval` (H).
    """
    doubled = version // sync.doubling
    if not sync.first_interval or doubled >= sync.sync_interval.bit_length():  # doubled so often, 1 is above H
        return sync.sync_interval
    return min(sync.sync_interval, sync.first_interval << doubled)


def outer_at(sync: SyncSpec, version: int, steps: Iterable[int]) -> tuple[float, float]:
    """Outer learning rate and momentum of the step from this version to the next.

    For the first `outer_warmup` outer steps learners are averaged: rate 1, no momentum. While the model changes fast, a
    step beyond what the learners agree on is a step too far. So it is with what learners leave behind when a run ends:
    where no delta holds half an interval, momentum would repeat a whole one's way.

    Args:
        sync: outer_lr, outer_momentum, outer_warmup and what `interval_at` needs.
        version: of the base.
        steps: inner steps of each contribution.
    """
    if version < sync.outer_warmup or 2 * max(steps) < interval_at(sync, version):
        return 1.0, 0.0
    return sync.outer_lr, sync.outer_momentum
