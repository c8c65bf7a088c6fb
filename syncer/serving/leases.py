"""Leases of the fragments that this syncer serves (asyncio): renewing them, and sharing fragments with other syncers.

ARCHITECTURE.md tells how, under "Several syncers". `keep` renews the held leases; `share` compares their number with
this syncer's quota (`sharing`), and takes leases or gives them back, each once its owner has ended its merge.

The bus may take longer over one call than a lease lasts. So neither loop waits for the other, and a call that is not
answered within a quarter of a lease time is given up and made again, which costs at most one round. It may have taken
effect all the same: a renewed lease then lasts longer than is known here, which does no harm, and a lease that was
taken is found to be ours in the next round. A lease counts as held only for one lease time from before the last
answered call.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from diloco.pipeline.bus.by_group import by_group
from diloco.pipeline.bus.ports import Bus, Clock, FragmentLeases
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.waiting import TICK_S, cancel, first_of
from diloco.syncer.owner import FragmentOwner
from diloco.syncer.serving.sharing import excess, wanted

T = TypeVar("T")

# Parts of a lease time: a lease is renewed every third, a call is given up after a quarter, and made again after a
# twelfth.
TURNS, CALLS, RETRIES = 3, 4, 12
# Lease times for which a fragment without a head is left to a syncer that may have its values in memory.
HEADLESS = 2


class Leases:
    """One syncer's leases, from its start until it parts; `owners` are those of all fragments, in order."""

    def __init__(
        self, bus: Bus, clock: Clock, owners: Sequence[FragmentOwner], nonce: str, name: str, lease_s: float
    ) -> None:
        self._bus, self._clock, self._owners = bus, clock, owners
        self._nonce, self._name, self._lease_s = nonce, name, lease_s
        self.syncers: tuple[str, ...] = ()
        """Nonces of the live syncers, this one included, as last seen."""
        self._answered_at = -math.inf
        """When the last answered call for the run's state began."""
        self._held: dict[int, float] = {}
        """Fragment -> when the call began that last took or renewed its lease."""
        self._stopping: set[int] = set()
        """Held leases that are given back once their owners have stopped."""
        self._headless: dict[int, float] = {}
        """Fragments without a head that other syncers may have in memory -> when that was first seen."""
        self._parting = False
        self._prolonging, self._sharing = asyncio.Lock(), asyncio.Lock()
        self._log = structlog.get_logger()

    def ready(self) -> tuple[bool, str]:
        """Return whether this syncer merges, or would take over at once if another one died, and the state in words."""
        held, count, others = len(self._held), len(self._owners), max(0, len(self.syncers) - 1)
        if self._clock.now() - self._answered_at > self._lease_s:
            return False, "no contact with Redis"
        spare = f": standby among {others + 1} syncers" if not held and others else ""
        return held > 0 or others > 0, f"{held} of {count} leases held{spare}"

    async def keep(self) -> None:
        """Renew the held leases until cancelled; after an error, call it again within a twelfth of a lease time.

        Raises:
            BusError: some leases were not renewed.
        """
        while True:
            due = self._clock.now() + self._lease_s / TURNS
            async with self._prolonging:
                await self._prolong()
            await asyncio.sleep(max(0.0, due - self._clock.now()))

    async def share(self) -> None:
        """Announce this syncer, and take and give back leases, until `part`; after an error, call it again.

        Raises:
            BusError: the other syncers may not know that this one is live.
        """
        while not self._parting:
            due = self._clock.now() + self._lease_s / TURNS
            async with self._sharing:
                await self._share()
            await self._give_back(due)

    async def part(self) -> None:
        """Give each lease back once its owner has stopped, then withdraw this syncer. `keep` must continue meanwhile.

        Raises:
            BusError: call it again; leases that are not given back expire.
        """
        self._parting = True
        async with self._sharing:  # wait for a `_share` that takes leases, so that these are given back too
            self._stop(self._held)
        while self._held:
            await self._give_back(self._clock.now() + self._lease_s / TURNS)
        await self._in_time(self._bus.withdraw_syncer(self._nonce))

    # --- held leases ------------------------------------------------------------------------------------

    async def _prolong(self) -> None:
        """Renew all held leases concurrently, so that none lapses only because there are many."""
        began = self._clock.now()
        self._lapse(began)
        # The bus has few calls in flight at a time, so the leases that were renewed longest ago come first.
        held = sorted(self._held, key=lambda p: (self._held[p], p))
        calls = (
            in_time(
                self._bus.acquire_lease(p, self._nonce, self._lease_s),
                min(self._lease_s / CALLS, self._held[p] + self._lease_s - began),
            )
            for p in held
        )
        errors: list[BaseException] = []
        for p, answer in zip(held, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
            elif not answer:
                self._lose(p)
            else:
                self._held[p] = began
                if p not in self._stopping:
                    self._owners[p].lease.set()  # its owner may have cleared it on a `LeaseLost`
        if errors:
            self._lapse(self._clock.now())
            raise errors[0]

    def _lapse(self, now: float) -> None:
        """Lose the leases that were not renewed for a lease time.

        Another syncer may hold them by now, so their owners must read everything again.
        """
        for p in [p for p, since in self._held.items() if now - since >= self._lease_s]:
            self._lose(p)

    def _lose(self, p: int) -> None:
        self._log.warning("lease_lost", fragment=p)
        self._stop([p])
        del self._held[p]
        self._stopping.discard(p)

    def _stop(self, fragments: Iterable[int]) -> None:
        for p in fragments:
            self._stopping.add(p)
            self._owners[p].lease.clear()
            self._owners[p].wake.set()

    async def _give_back(self, until: float) -> None:
        """Release each lease whose owner has stopped, until a time, or until a parting syncer holds none."""
        parting = self._parting
        while until - self._clock.now() > TICK_S and self._parting is parting and (self._held or not parting):
            # Without this lock, a renewal in flight could take a lease again right after its release. Once a fragment
            # is out of `_held`, nothing renews its lease.
            async with self._prolonging:
                stopped = [p for p in sorted(self._stopping) if self._owners[p].idle.is_set()]
                for p in stopped:
                    self._stopping.discard(p)
                    self._held.pop(p, None)
                    self._log.info("lease_given_back", fragment=p)
            await asyncio.gather(*(self._in_time(self._bus.release_lease(p, self._nonce)) for p in stopped))
            if not stopped:
                await self._pause(until - self._clock.now())

    async def _pause(self, limit_s: float) -> None:
        """Wait until an owner that was told to stop has stopped, or the time is over."""
        if not self._stopping:
            await asyncio.sleep(limit_s)
            return
        await first_of(*(self._owners[p].idle for p in sorted(self._stopping)), timeout_s=limit_s)

    # --- sharing ------------------------------------------------------------------------------------------

    async def _share(self) -> None:
        """Compare the held leases with this syncer's quota among the live syncers; give back, or take."""
        began = self._clock.now()
        state = await self._in_time(self._bus.read_state())
        self._answered_at = began
        if self._parting or (state is not None and state.phase.rank >= Phase.CLOSING.rank):
            return  # the syncer that ends the run needs all leases
        here = await self._in_time(self._bus.read_syncers())
        syncers = await self._in_time(self._bus.announce_syncer(self._nonce, self._name, self._lease_s))
        forgotten = self._nonce in self.syncers and self._nonce not in here
        if syncers != self.syncers:
            self._log.info("syncers_changed", syncers=len(syncers))
        self.syncers = syncers
        if forgotten:  # the bus has lost the presence of syncers, and maybe leases: their holders renew them first
            return
        if await self._awaits_saver(state):
            self._stop(self._held.keys() - self._stopping)  # the syncer that restores its checkpoint needs all
            return
        sharing = syncers.index(self._nonce), len(syncers), len(self._owners)
        self._stop(excess(self._held.keys() - self._stopping, *sharing))
        await self._take(sharing)

    async def _awaits_saver(self, state: RunState | None) -> bool:
        """Return whether another syncer is about to put its checkpoint, or the missing part of it, on the bus."""
        if len(self.syncers) == 1:
            return False
        savers = await self._in_time(self._bus.read_savers())
        if state is None or not savers:
            return bool(savers)
        everything, read = range(len(self._owners)), self._bus.read_heads
        heads = await by_group(self._bus.keys, everything, lambda some: self._in_time(read(some)), lambda _: None)
        # A missing head that is in memory here is put back by its owner, which needs the lease.
        return any(head is None and not self._owners[p].knows(None) for p, head in heads.items())

    async def _take(self, sharing: tuple[int, int, int]) -> None:
        """Take free leases up to the quota; sharing is (rank, syncers, fragments)."""
        everything = range(len(self._owners))
        holders = await by_group(self._bus.keys, everything, lambda some: self._in_time(self._bus.read_leases(some)))
        for p, holder in holders.items():
            if holder not in (None, self._nonce) and p not in self._held and self._owners[p].idle.is_set():
                self._owners[p].forget()  # the cached version is older than the other syncer's
        # A lease that is held by no live syncer might never expire. This call shortens it to one lease time of ours.
        stray_leases = [p for p, holder in holders.items() if holder not in (None, *self.syncers)]
        lease_s = self._lease_s
        asking = (self._in_time(self._bus.acquire_lease(p, self._nonce, lease_s, lease_s)) for p in stray_leases)
        for p, answer in zip(stray_leases, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if answer is True:  # it had expired meanwhile, and this call took it
                holders[p] = self._nonce
        free = [
            p
            for p, holder in holders.items()
            # A lease that is ours but not in `_held`: the answer to the call that took it was lost. The owner must have
            # stopped (idle) before it may begin again.
            if holder in (None, self._nonce) and p not in self._held and self._owners[p].idle.is_set()
        ]
        mine, free = await self._by_memory(free, sharing)
        while not self._parting and (some := mine or wanted(self._held, free, *sharing)):
            began = self._clock.now()
            calls = (self._in_time(self._bus.acquire_lease(p, self._nonce, self._lease_s)) for p in some)
            errors: list[BaseException] = []
            for p, answer in zip(some, await asyncio.gather(*calls, return_exceptions=True), strict=True):
                if isinstance(answer, BaseException):
                    errors.append(answer)
                elif answer:
                    self._held[p] = began
                    self._owners[p].lease.set()
                    self._log.info("lease_taken", fragment=p)
            if errors:
                raise errors[0]
            free, mine = free if mine else free[len(some) :], []

    async def _by_memory(self, free: list[int], sharing: tuple[int, int, int]) -> tuple[list[int], list[int]]:
        """Split free fragments into those whose lost heads are in memory here, and others that may be taken.

        The first are taken even above the quota, so that their heads are put back before another syncer starts them
        from scratch; they are given back afterwards. A fragment without a head that another syncer may have in memory
        is left to it for `HEADLESS` lease times, and is in neither list.
        """
        if not free:
            self._headless.clear()
            return [], []
        # A head that cannot be read is left alone: learners and status report it.
        asked = by_group(self._bus.keys, free, lambda some: self._in_time(self._bus.read_heads(some)), lambda _: None)
        heads = await asked
        free, gone = list(heads), {p for p, head in heads.items() if head is None}
        mine = [p for p in free if p in gone and self._owners[p].knows(None)]
        now, begun = self._clock.now(), bool(gone) and await self._trained()
        self._headless = {p: self._headless.get(p, now) for p in gone} if begun else {}
        young = {p for p, since in self._headless.items() if now - since < HEADLESS * self._lease_s}
        return mine, [p for p in free if p not in mine and p not in young]

    async def _trained(self) -> bool:
        """Return whether a learner has adopted a version, which means that a missing head was lost."""
        reports = await self._in_time(self._bus.read_reports())
        return any(max(seen.report.versions, default=-1) >= 0 for seen in reports)

    async def _in_time(self, call: Awaitable[T]) -> T:
        return await in_time(call, self._lease_s / CALLS)


async def in_time(call: Awaitable[T], limit_s: float) -> T:
    """Return the answer to a call if it comes within the limit.

    Raises:
        BusUnavailable: there was no answer in time. The call may take effect all the same.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await call
    except TimeoutError:
        raise BusUnavailable(f"no answer within {limit_s:.2g} s, the limit for a lease call") from None


@asynccontextmanager
async def holding(bus: FragmentLeases, fragments: Iterable[int], nonce: str, lease_s: float) -> AsyncIterator[None]:
    """Renew leases, which must be held already, while the block runs. If renewing fails, they expire."""

    async def prolong() -> None:
        await asyncio.sleep(lease_s / TURNS)
        while True:
            calls = (in_time(bus.acquire_lease(p, nonce, lease_s), lease_s / CALLS) for p in ids)
            await asyncio.gather(asyncio.sleep(lease_s / TURNS), *calls, return_exceptions=True)

    ids = tuple(fragments)
    task = asyncio.create_task(prolong())
    try:
        yield
    finally:
        await cancel(task)


async def release_all(bus: FragmentLeases, nonce: str, fragments: int) -> None:
    """Release all leases that `nonce` holds."""
    await asyncio.gather(*(bus.release_lease(p, nonce) for p in range(fragments)))
