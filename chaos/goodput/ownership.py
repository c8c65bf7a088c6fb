"""When a fragment has an owner while syncers fail: the syncers' own rule of sharing, in virtual time. Pure.

Every third of a lease time a living syncer prolongs what it holds, gives back what is above its quota and takes free
leases up to it (`syncer/sharing.py`). The dead one's leases and presence end a lease time after it last prolonged them.
"""

import numpy as np

from syncer.sharing import excess, wanted

from .constants import Constants
from .job import Stops
from .strikes import Floats, times_of


def unowned(constants: Constants, duration_s: float, rng: np.random.Generator, fragment: int = 0) -> Stops:
    """Spans in which nobody serves a fragment."""
    if not constants.syncer_mtbi:
        return Stops(np.empty(0), np.empty(0))
    count, lease_s = constants.syncers, constants.lease
    free_at = [-1.0] * count
    strikes = []
    for at_s in times_of(count / constants.syncer_mtbi, duration_s, rng):
        struck = int(rng.integers(count))
        if at_s >= free_at[struck]:  # it is alive
            free_at[struck] = at_s + constants.syncer_repair
            strikes += [(float(at_s), struck, False), (float(free_at[struck]), struck, True)]
    syncers = _Syncers(constants, rng.random(count) * lease_s / 3)
    syncers.settle(0.0, 4 * lease_s)
    gaps: list[tuple[float, float]] = []
    since: float | None = None
    ends = [at_s for at_s, _, _ in sorted(strikes)[1:]] + [duration_s]
    for (at_s, struck, back), until_s in zip(sorted(strikes), ends, strict=True):
        syncers.change(at_s, struck, back)
        if since is None and syncers.holder(fragment) is None:
            since = at_s
        taken = syncers.settle(at_s, until_s, None if since is None else fragment)
        if since is not None and taken is not None:
            gaps.append((since, taken))
            since = None
    if since is not None:
        gaps.append((since, duration_s))
    began, ended = (np.array([min(gap[i], duration_s) for gap in gaps]) for i in (0, 1))
    return Stops(began, ended)


class _Syncers:
    def __init__(self, constants: Constants, phases: Floats) -> None:
        self._fragments, self._lease_s = constants.fragments, constants.lease
        self._held: list[set[int]] = [set() for _ in phases]
        self._alive = [True] * len(phases)
        self._seen_s = [0.0] * len(phases)
        """When each was last here."""
        self._phases = [float(phase) for phase in phases]

    def holder(self, fragment: int) -> int | None:
        """The living syncer that serves it."""
        return next((s for s, held in enumerate(self._held) if self._alive[s] and fragment in held), None)

    def change(self, now: float, syncer: int, back: bool) -> None:
        """A syncer dies (it prolonged its leases at its last tick), or is back with none."""
        third = self._lease_s / 3
        self._alive[syncer] = back
        self._seen_s[syncer] = now if back else self._phases[syncer] + (now - self._phases[syncer]) // third * third
        if back:
            self._held[syncer] = set()

    def settle(self, now: float, until: float, fragment: int | None = None) -> float | None:
        """Let the living tick until all have their quota, or until a time; when `fragment` was taken, if it was."""
        third, taken = self._lease_s / 3, None
        limit = min(until, now + 6 * self._lease_s)
        ticks = [
            (phase + (now - phase) // third * third + k * third, s)
            for s, phase in enumerate(self._phases)
            for k in range(1, 19)
        ]
        for at, s in sorted(ticks):
            if at >= limit:
                break
            if not self._alive[s]:
                continue
            self._seen_s[s] = at
            here = [r for r, seen in enumerate(self._seen_s) if self._alive[r] or at - seen < self._lease_s]
            for r in range(len(self._held)):
                if r not in here:
                    self._held[r] = set()  # lapsed
            sharing = here.index(s), len(here), self._fragments
            self._held[s] -= set(excess(self._held[s], *sharing))
            free = sorted(set(range(self._fragments)) - set().union(*self._held))
            mine = wanted(self._held[s], free, *sharing)
            self._held[s] |= set(mine)
            if taken is None and fragment in mine:
                taken = at
        return taken
