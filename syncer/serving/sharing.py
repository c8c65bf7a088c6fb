"""How several syncers share a run's fragments: all follow the same rule, without a coordinator. Pure.

Each syncer knows its own rank among the live syncers, its own leases, and which leases are free. The quotas of all
ranks add up to the number of fragments. So once all see the same syncers, those above their quota give back as many
fragments as those below it need, and then nothing moves any more.
"""

from collections.abc import Collection, Sequence


def quota(rank: int, syncers: int, fragments: int) -> int:
    """Return how many fragments the syncer of a rank (0, 1 ...) serves."""
    return fragments // syncers + (rank < fragments % syncers)


def excess(held: Collection[int], rank: int, syncers: int, fragments: int) -> list[int]:
    """Return the fragments to give back: the highest ones, so that fragment 0, and with it the lead, does not move."""
    return sorted(held)[quota(rank, syncers, fragments) :]


def wanted(held: Collection[int], free: Sequence[int], rank: int, syncers: int, fragments: int) -> list[int]:
    """Return the fragments to take: free ones, in the order given, up to the quota."""
    return list(free)[: max(0, quota(rank, syncers, fragments) - len(held))]
