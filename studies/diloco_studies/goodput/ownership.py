"""When a fragment has an owner while syncers fail: their production leases on the memory bus, in virtual time. asyncio.

`leases` does all: it prolongs, lapses, shares, takes and gives back. A syncer that dies is one whose tasks end
without a word, and one that is back begins with no lease and another nonce. Between two such changes nothing happens
once all have their quota, so the rest of a longer time is left out, in whole rounds of the syncers.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import structlog

from diloco.pipeline.messages.head import Head
from diloco.syncer.serving.leases import Leases
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.job import Stops
from diloco_studies.goodput.strikes import times_of
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual

SETTLED_LEASES = 6
"""Lease times after which everybody has its quota: dead ones lapse within one, and sharing takes a few thirds."""


class _Change(NamedTuple):
    at_s: float
    syncer: int
    back: bool


def unowned(constants: Constants, duration_s: float, rng: np.random.Generator, fragment: int = 0) -> Stops:
    """Spans in which nobody serves a fragment."""
    if not constants.syncer_mtbi:
        return Stops(np.empty(0), np.empty(0))
    count = constants.syncers
    free_at = [-1.0] * count
    changes = []
    for at_s in times_of(count / constants.syncer_mtbi, duration_s, rng):
        struck = int(rng.integers(count))
        if at_s >= free_at[struck]:  # it is alive
            free_at[struck] = at_s + constants.syncer_repair
            changes += [_Change(float(at_s), struck, False), _Change(free_at[struck], struck, True)]
    changes = [change for change in sorted(changes) if change.at_s < duration_s]
    with _silent():
        gaps = run_virtual(_Syncers(constants, fragment, rng).watch(changes, duration_s))
    began, ended = (np.array([gap[i] for gap in gaps]) for i in (0, 1))
    return Stops(began, ended)


@contextmanager
def _silent() -> Iterator[None]:
    """Without a line for every lease that is taken."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


class _Lease(asyncio.Event):
    """Tells when it is set and cleared."""

    def __init__(self, told: Callable[[bool], None]) -> None:
        super().__init__()
        self._told = told

    def set(self) -> None:
        super().set()
        self._told(True)

    def clear(self) -> None:
        super().clear()
        self._told(False)


class _Owner:
    """A fragment's owner as its leases see it; it stops at once when it is told to."""

    def __init__(self, told: Callable[[bool], None]) -> None:
        self.lease: asyncio.Event = _Lease(told)
        self.wake, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()

    def forget(self) -> None:
        """It has cached nothing."""

    def knows(self, head: Head | None) -> bool:
        """It has cached nothing."""
        return False


class _Syncers:
    def __init__(self, constants: Constants, fragment: int, rng: np.random.Generator) -> None:
        self._constants, self._fragment, self._rng = constants, fragment, rng
        self._store = MemoryStore()
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._serving: set[int] = set()
        """Syncers that believe they serve the fragment: one, or none."""
        self._skipped_s = 0.0
        """How far the simulated time is ahead of the loop's."""
        self._since: float | None = None
        self._gaps: list[tuple[float, float]] = []

    async def watch(self, changes: list[_Change], duration_s: float) -> list[tuple[float, float]]:
        """All spans without an owner, once the first ones have shared the fragments."""
        lease_s = self._constants.lease
        settled_s = SETTLED_LEASES * lease_s
        for syncer in range(self._constants.syncers):
            self._start(syncer)
            await asyncio.sleep(lease_s / 3 * float(self._rng.random()))
        await asyncio.sleep(settled_s)
        self._skipped_s, self._since = -self._loop_s, None
        for at_s, syncer, back in changes:
            await asyncio.sleep(min(settled_s, at_s - self._now_s))
            self._skipped_s += (at_s - self._now_s) // (lease_s / 3) * (lease_s / 3)
            await asyncio.sleep(at_s - self._now_s)
            if back:
                self._start(syncer)
            else:
                await self._kill(syncer)
        await asyncio.sleep(max(0.0, min(settled_s, duration_s - self._now_s)))
        if self._since is not None:
            self._gaps.append((self._since, duration_s))
        gaps = [(began, min(ended, duration_s)) for began, ended in self._gaps if began < duration_s]
        for syncer in list(self._tasks):
            await self._kill(syncer)
        return gaps

    @property
    def _loop_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _now_s(self) -> float:
        return self._loop_s + self._skipped_s

    def _start(self, syncer: int) -> None:
        clock = VirtualClock()
        bus = MemoryBus("simulated", clock, self._store)

        def told(of: int) -> Callable[[bool], None]:
            return lambda served: self._told(syncer, served) if of == self._fragment else None

        owners = [_Owner(told(p)) for p in range(self._constants.fragments)]
        nonce = f"{int(self._rng.integers(2**63)):016x}"
        leases = Leases(bus, clock, owners, nonce, f"syncer-{syncer}", self._constants.lease)
        self._tasks[syncer] = [asyncio.create_task(leases.keep()), asyncio.create_task(leases.share())]

    async def _kill(self, syncer: int) -> None:
        tasks = self._tasks.pop(syncer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._told(syncer, False)

    def _told(self, syncer: int, served: bool) -> None:
        """A syncer begins to serve the fragment, or ends it."""
        if served:
            self._serving.add(syncer)
        else:
            self._serving.discard(syncer)
        if not self._serving and self._since is None:
            self._since = self._now_s
        elif self._serving and self._since is not None:
            self._gaps.append((self._since, self._now_s))
            self._since = None
