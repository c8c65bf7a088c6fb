"""Whether what nobody serves is taken over in time, by an onlooker who is told what there is. Pure.

The promise: no fragment's lease is free for longer than two lease times while a syncer is here that can take it.

Two lease times are counted anew whenever something happens after which the syncers need another round: one of them
starts, ends, dies, is paused or cut off, or comes back from that; a call of theirs about leases meets with a fault of
its own, or takes effect late (the word of one that has left, that it is here, keeps the others waiting); the bus was
away or full. Where another server takes over whose clock is behind, what was to end by that clock
ends so much later, and the two lease times begin only then. The death of a syncer itself gives no time: its lease is
held until it ends, and only then is it free. An owner that has lost a lease begins anew only when it has ended what it
was at (a merge, a call that hangs); that time does not count either, for this fragment. Where the bus has lost the
head too, two more lease times go by: those who may remember it come first.
"""

from collections.abc import Collection, Sequence

LEASE_CALLS = frozenset(("read_state", "announce_syncer", "read_leases", "acquire_lease", "release_lease"))
"""A fault of one of these may cost a syncer a round."""
LEASE_WRITES = LEASE_CALLS - {"read_state", "read_leases"}
"""One of these that comes late may cost the others a round."""


class Takeover:
    """Watches the leases of one run."""

    def __init__(self, fragments: int, lease_s: float) -> None:
        self._limit_s = 2 * lease_s
        self._free_since: list[float | None] = [None] * fragments
        self._able: Collection[str] = ()
        self._disturbed_s = 0.0

    def disturbed(self, now: float) -> None:
        """Something happened after which the syncers need another round."""
        self._disturbed_s = max(self._disturbed_s, now)

    def taken(self, fragment: int) -> None:
        """A syncer took or prolonged its lease."""
        self._free_since[fragment] = None

    def look(
        self, now: float, free: Sequence[bool], able: Collection[str], bus_is_well: bool, lost: Collection[int] = ()
    ) -> str | None:
        """What there is now; call it many times in a lease time.

        Args:
            now: seconds of a clock that only goes forward.
            free: per fragment, whether nobody holds its lease, and no owner is still busy with it.
            able: lives of the syncers that serve, and are neither paused, cut off, nor told to stop; in order.
            bus_is_well: it answers, and has room.
            lost: fragments whose heads the bus no longer has.

        Returns:
            How the promise was broken, or None.
        """
        if not bus_is_well or able != self._able:
            self._able = able
            self.disturbed(now)
        for p, is_free in enumerate(free):
            before = self._free_since[p]
            since = self._free_since[p] = None if not is_free else now if before is None else before
            limit_s = self._limit_s * (2 if p in lost else 1)
            if able and since is not None and now - max(since, self._disturbed_s) > limit_s:
                return f"fragment {p}'s lease is free since {since:.2f} s, and {', '.join(able)} did not take it"
        return None
