"""How long the interval is in the course of a run, as a function of a fragment's version. Pure.

A version counts the outer steps of its fragment, is in every head, header and tape record, and goes back when the bus
does: so windows of different fragments, a restarted syncer, a learner that joins and a replay all find the same.
The one thing that follows from more than the version is the interval where round trips are long: the owner decides it
with each merge (`stretched`). The head says it to learners and successors, the tape to replays.
"""

import math

from diloco.pipeline.messages.spec import SyncSpec

LONGEST = 96
"""Steps. No interval is made longer: 156 gained nothing, more were not measured (docs/results/quality-choices.md)."""


def interval_at(sync: SyncSpec, version: int) -> int:
    """Inner steps between two syncs of a fragment whose base has this version.

    It begins at `first_interval`, doubles with every `doubling` outer steps, and stays at `sync_interval` (H).
    """
    doubled = version // sync.doubling
    if not sync.first_interval or doubled >= sync.sync_interval.bit_length():  # doubled so often, 1 is above H
        return sync.sync_interval
    return min(sync.sync_interval, sync.first_interval << doubled)


def interval_in_force(sync: SyncSpec, version: int, told: int) -> int:
    """The interval of a base: what its head says, or as planned, if that says 0 (installed)."""
    return told or interval_at(sync, version)


def is_stretched(sync: SyncSpec, version: int, told: int) -> bool:
    """Whether the interval of a base is longer than planned, by round trips."""
    return interval_in_force(sync, version, told) > interval_at(sync, version)


def overlap_in_force(sync: SyncSpec, version: int, told: int) -> int:
    """Tau of a base whose head says this interval: as many times longer as that is, and whole."""
    return math.ceil(sync.overlap_steps * interval_in_force(sync, version, told) / interval_at(sync, version))


def stretched(sync: SyncSpec, version: int, round_trip: float) -> int:
    """`interval_at`, made longer where round trips take long.

    Args:
        sync: tau, `stretch`, and what `interval_at` needs.
        version: of the base.
        round_trip: steps, that in which a learner adopts among them (`syncer.committing.RoundTrips`).
    """
    planned = interval_at(sync, version)
    return lengthened(planned, sync.sync_interval, sync.overlap_steps, round_trip) if sync.stretch else planned


def lengthened(interval: int, sync_interval: int, overlap_steps: int, round_trip: float) -> int:
    """A planned interval, made longer where round trips take long.

    What is trained in a round trip is overwritten. It is no greater a share than where a round trip takes one step; and
    once the interval is H, no greater a share than tau of H; as far as `LONGEST` goes.

    Args:
        interval: as planned.
        sync_interval, overlap_steps: H and tau. With tau = 0 nothing is to be hidden: it is as planned.
        round_trip: as `stretched`.
    """
    if not overlap_steps:
        return interval
    hides = min(interval, sync_interval / overlap_steps)
    return max(interval, int(min(LONGEST, hides * round_trip)))
