"""How long the sync interval is in the course of a run, as a function of a fragment's version. Pure.

A version counts the outer steps of its fragment. It is in every head, header and tape record, and goes back when Redis
loses data. Therefore the windows of different fragments, a restarted syncer, a learner that joins and a replay all find
the same interval. There is one exception: where round trips are long, the fragment's owner decides a longer interval
with each merge (`stretched`). Learners and later owners read it from the head, replays from the tape.
"""

import math

from diloco.pipeline.messages.spec import SyncSpec

# In steps. Intervals are never stretched beyond this: 156 gained nothing, and longer ones were not measured
# (docs/results/quality-choices.md).
LONGEST = 96


def interval_at(sync: SyncSpec, version: int) -> int:
    """Return the inner steps between two syncs of a fragment whose base has this version.

    The interval begins at `first_interval`, doubles after every `doubling` outer steps, and ends at `sync_interval`
    (H).
    """
    doubled = version // sync.doubling
    if not sync.first_interval or doubled >= sync.sync_interval.bit_length():  # so many doublings exceed H even from 1
        return sync.sync_interval
    return min(sync.sync_interval, sync.first_interval << doubled)


def interval_in_force(sync: SyncSpec, version: int, told: int) -> int:
    """Return the interval of a base: `told` by its head, or the planned one if that is 0 (it was not merged)."""
    return told or interval_at(sync, version)


def is_stretched(sync: SyncSpec, version: int, told: int) -> bool:
    """Return whether the interval of a base is longer than planned because of long round trips."""
    return interval_in_force(sync, version, told) > interval_at(sync, version)


def overlap_in_force(sync: SyncSpec, version: int, told: int) -> int:
    """Return tau of a base, lengthened by the same factor as its interval and rounded up."""
    return math.ceil(sync.overlap_steps * interval_in_force(sync, version, told) / interval_at(sync, version))


def stretched(sync: SyncSpec, version: int, round_trip: float) -> int:
    """Return the interval for a version: `interval_at`, lengthened if round trips are long.

    Args:
        sync: tau, `stretch`, and the settings that `interval_at` needs.
        version: version of the base.
        round_trip: length of a round trip in steps, including the step at which a learner adopts the global
            (`syncer.grace.RoundTrips`).
    """
    planned = interval_at(sync, version)
    return lengthened(planned, sync.sync_interval, sync.overlap_steps, round_trip) if sync.stretch else planned


def lengthened(interval: int, sync_interval: int, overlap_steps: int, round_trip: float) -> int:
    """Lengthen a planned interval where round trips are long.

    What a learner trains during a round trip is overwritten. The interval is lengthened until the overwritten share is
    at most that of a one-step round trip at the planned interval (1/interval), or tau/H if that is more, but never
    beyond `LONGEST`.

    Args:
        interval: the planned interval.
        sync_interval: H.
        overlap_steps: tau. With tau = 0 there is nothing to hide, and the interval is returned unchanged.
        round_trip: as in `stretched`.
    """
    if not overlap_steps:
        return interval
    hides = min(interval, sync_interval / overlap_steps)
    return max(interval, int(min(LONGEST, hides * round_trip)))
