"""How long the interval is in the course of a run, as a function of a fragment's version. Pure.

A version counts the outer steps of its fragment, is in every head, header and tape record, and goes back when the bus
does: so windows of different fragments, a restarted syncer, a learner that joins and a replay all find the same.
The one thing that follows from more than the version is the interval where round trips are long: the owner decides it
with each merge (`syncer.committing.stretched`). The head says it to learners and successors, the tape to replays.
"""

import math

from diloco.pipeline.messages.spec import SyncSpec


def interval_at(sync: SyncSpec, version: int) -> int:
    """Inner steps between two syncs of a fragment whose base has this version.

    It begins at `first_interval`, doubles with every `doubling` outer steps, and stays at `sync_interval` (H).
    """
    doubled = version // sync.doubling
    if not sync.first_interval or doubled >= sync.sync_interval.bit_length():  # doubled so often, 1 is above H
        return sync.sync_interval
    return min(sync.sync_interval, sync.first_interval << doubled)


def interval_in_force(sync: SyncSpec, version: int, told: int) -> int:
    """The interval of a base: what its head says, or as planned, if that says 0 (installed, or by an earlier build)."""
    return told or interval_at(sync, version)


def overlap_in_force(sync: SyncSpec, version: int, told: int) -> int:
    """Tau of a base whose head says this interval: as many times longer as that is, and whole."""
    return math.ceil(sync.overlap_steps * interval_in_force(sync, version, told) / interval_at(sync, version))
