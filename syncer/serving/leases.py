"""Which fragments this syncer serves: keeps their leases, and shares the fragments with the other syncers. asyncio.

Every third of a lease time `keep` prolongs what is held, and `share` says that this syncer is here, which tells who
else is, and then gives back what is above its quota (`sharing`), or takes free leases up to it. An owner that shall
stop ends a merge in hand first, with its lease prolonged meanwhile, and only then is the lease given back; what is
pending stays on the fragment's streams, from which the successor rebuilds the window. A syncer that dies says nothing
any more: its leases and its presence end within a lease time, and the others find them free within a third of one.

The bus may take longer over one call than a lease lasts. So neither loop waits for the other, and a call that is not
answered within a quarter of a lease time is given up and made again: it costs at most one round. It may have taken
effect all the same. A prolonged lease then lasts longer than is known here, which does no harm; one that was taken
is found to be ours by the next round. A lease counts as held for one lease time from before the last call that was
answered, and no longer.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import structlog

from diloco.pipeline.bus.by_group import by_group
from diloco.pipeline.bus.ports import Bus, Clock, FragmentLeases
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.waiting import TICK_S, first_of
from diloco.syncer.serving.sharing import excess, wanted

T = TypeVar("T")

TURNS, CALLS, RETRIES = 3, 4, 12
"""Parts of a lease: it is prolonged each third, a call is given up after a quarter, and made again after a twelfth."""
HEADLESS = 2
"""Leases for which a fragment without a head is left to whoever may remember it."""


class Owner(Protocol):
    """What is asked of a fragment's owner (`owner.FragmentOwner`)."""

    lease: asyncio.Event
    """Set while the lease is held, and is not to be given back."""
    idle: asyncio.Event
    """Set while it does nothing for which it needs the lease."""
    wake: asyncio.Event

    def forget(self) -> None:
        """Another syncer serves the fragment now."""

    def knows(self, head: Head | None) -> bool:
        """None: whether it has a head in its memory."""


class Leases:
    """One syncer's leases, from its start until it parts."""

    def __init__(self, bus: Bus, clock: Clock, owners: Sequence[Owner], nonce: str, name: str, lease_s: float) -> None:
        """`owners`: of all fragments, in order; each serves while its `lease` is set."""
        self._bus, self._clock, self._owners = bus, clock, owners
        self._nonce, self._name, self._lease_s = nonce, name, lease_s
        self.syncers: tuple[str, ...] = ()
        """Nonces of the syncers that are here, this one included, as last seen."""
        self._answered_at = -math.inf
        """When the bus last told the run's state, as of before the call."""
        self._held: dict[int, float] = {}
        """Fragment -> when its lease was last taken or prolonged, as of before the call."""
        self._stopping: set[int] = set()
        """Of those held: given back once their owners have stopped."""
        self._headless: dict[int, float] = {}
        """Fragments without a head that others may remember -> since when that is known."""
        self._parting = False
        self._prolonging, self._sharing = asyncio.Lock(), asyncio.Lock()
        self._log = structlog.get_logger()

    def ready(self) -> tuple[bool, str]:
        """Whether this syncer merges, or would at once if another one died; and how that is, in words."""
        held, count, others = len(self._held), len(self._owners), max(0, len(self.syncers) - 1)
        if self._clock.now() - self._answered_at > self._lease_s:
            return False, "not in touch with Redis"
        spare = f": a spare of {others + 1} syncers" if not held and others else ""
        return held > 0 or others > 0, f"{held} of {count} leases held{spare}"

    async def keep(self) -> None:
        """Prolong what is held, until cancelled; after an error, call it again within a twelfth of a lease time.

        Raises:
            BusError: some leases were not prolonged.
        """
        while True:
            due = self._clock.now() + self._lease_s / TURNS
            async with self._prolonging:
                await self._prolong()
            await asyncio.sleep(max(0.0, due - self._clock.now()))

    async def share(self) -> None:
        """Say that this syncer is here, take and give back, until `part`; after an error, call it again.

        Raises:
            BusError: the others may not know that this syncer is here.
        """
        while not self._parting:
            due = self._clock.now() + self._lease_s / TURNS
            async with self._sharing:
                await self._share()
            await self._give_back(due)

    async def part(self) -> None:
        """Give every lease back as soon as its owner has stopped, and say that this syncer is gone; `keep` goes on.

        Raises:
            BusError: call it again; what is not given back ends by itself.
        """
        self._parting = True
        async with self._sharing:  # what is being taken is given back too
            self._stop(self._held)
        while self._held:
            await self._give_back(self._clock.now() + self._lease_s / TURNS)
        await self._in_time(self._bus.withdraw_syncer(self._nonce))

    # --- held leases ------------------------------------------------------------------------------------

    async def _prolong(self) -> None:
        """All that is held, at once: a lease must not lapse because there are many."""
        began = self._clock.now()
        self._lapse(began)
        # Few calls are on their way at a time: what had no turn in the last round comes first in this one.
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
                    self._owners[p].lease.set()  # its owner may have met with a lapse
        if errors:
            self._lapse(self._clock.now())
            raise errors[0]

    def _lapse(self, now: float) -> None:
        """Others may hold by now what was not prolonged for a lease time: its owner must read everything again."""
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
        """Until a time, release each lease whose owner has stopped; returns early when a parting syncer has none."""
        parting = self._parting
        while until - self._clock.now() > TICK_S and self._parting is parting and (self._held or not parting):
            async with self._prolonging:  # a call under way might take it again once it is released
                stopped = [p for p in sorted(self._stopping) if self._owners[p].idle.is_set()]
                for p in stopped:  # from here on nobody prolongs it
                    self._stopping.discard(p)
                    self._held.pop(p, None)
                    self._log.info("lease_given_back", fragment=p)
            await asyncio.gather(*(self._in_time(self._bus.release_lease(p, self._nonce)) for p in stopped))
            if not stopped:
                await self._pause(until - self._clock.now())

    async def _pause(self, limit_s: float) -> None:
        """Until an owner that shall stop has stopped, or the time is over."""
        if not self._stopping:
            await asyncio.sleep(limit_s)
            return
        await first_of(*(self._owners[p].idle for p in sorted(self._stopping)), timeout_s=limit_s)

    # --- sharing ------------------------------------------------------------------------------------------

    async def _share(self) -> None:
        """Compare what is held with the quota among the syncers that are here; give back, or take."""
        began = self._clock.now()
        state = await self._in_time(self._bus.read_state())
        self._answered_at = began
        if self._parting or (state is not None and state.phase.rank >= Phase.CLOSING.rank):
            return  # who ends the run needs all leases
        here = await self._in_time(self._bus.read_syncers())
        syncers = await self._in_time(self._bus.announce_syncer(self._nonce, self._name, self._lease_s))
        forgotten = self._nonce in self.syncers and self._nonce not in here
        if syncers != self.syncers:
            self._log.info("syncers_changed", syncers=len(syncers))
        self.syncers = syncers
        if forgotten:  # the bus has lost who is here, and may have lost leases: who held them takes them again first
            return
        if await self._awaits_saver(state):
            self._stop(self._held.keys() - self._stopping)  # who puts its checkpoint on the bus needs all leases
            return
        sharing = syncers.index(self._nonce), len(syncers), len(self._owners)
        self._stop(excess(self._held.keys() - self._stopping, *sharing))
        await self._take(sharing)

    async def _awaits_saver(self, state: RunState | None) -> bool:
        """Whether another syncer puts its checkpoint on the bus, or what is missing of it."""
        if len(self.syncers) == 1:
            return False
        savers = await self._in_time(self._bus.read_savers())
        if state is None or not savers:
            return bool(savers)
        everything, read = range(len(self._owners)), self._bus.read_heads
        heads = await by_group(self._bus.keys, everything, lambda some: self._in_time(read(some)), lambda _: None)
        # One that is remembered here is put back by its owner, which needs its lease.
        return any(head is None and not self._owners[p].knows(None) for p, head in heads.items())

    async def _take(self, sharing: tuple[int, int, int]) -> None:
        """Take free leases up to the quota; `sharing`: (rank, syncers, fragments)."""
        everything = range(len(self._owners))
        holders = await by_group(self._bus.keys, everything, lambda some: self._in_time(self._bus.read_leases(some)))
        for p, holder in holders.items():
            if holder not in (None, self._nonce) and p not in self._held and self._owners[p].idle.is_set():
                self._owners[p].forget()  # what is cached here is older, and of no more use
        # Held by no syncer that is here, for ever perhaps: it ends within a lease of ours, whoever has it.
        strays = [p for p, holder in holders.items() if holder not in (None, *self.syncers)]
        lease_s = self._lease_s
        asking = (self._in_time(self._bus.acquire_lease(p, self._nonce, lease_s, lease_s)) for p in strays)
        for p, answer in zip(strays, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if answer is True:  # it had ended meanwhile
                holders[p] = self._nonce
        free = [
            p
            for p, holder in holders.items()
            # Ours without being held: the answer to our call was lost. An owner must have stopped to begin anew.
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
        """Free fragments whose heads the bus has lost and that are remembered here; and others that may be taken.

        The first are taken above the quota too, to be put back before anybody begins them anew, and given back then.
        What another syncer may remember is left to it for two lease times.
        """
        if not free:
            self._headless.clear()
            return [], []
        # One that cannot be read is left as it is: learners and status say so.
        asked = by_group(self._bus.keys, free, lambda some: self._in_time(self._bus.read_heads(some)), lambda _: None)
        heads = await asked
        free, gone = list(heads), {p for p, head in heads.items() if head is None}
        mine = [p for p in free if p in gone and self._owners[p].knows(None)]
        now, begun = self._clock.now(), bool(gone) and await self._trained()
        self._headless = {p: self._headless.get(p, now) for p in gone} if begun else {}
        young = {p for p, since in self._headless.items() if now - since < HEADLESS * self._lease_s}
        return mine, [p for p in free if p not in mine and p not in young]

    async def _trained(self) -> bool:
        """Whether a learner has adopted something: then a head that is not there was lost."""
        reports = await self._in_time(self._bus.read_reports())
        return any(max(seen.report.versions, default=-1) >= 0 for seen in reports)

    async def _in_time(self, call: Awaitable[T]) -> T:
        return await in_time(call, self._lease_s / CALLS)


async def in_time(call: Awaitable[T], limit_s: float) -> T:
    """The answer to a call, for which a lease does not wait longer than this.

    Raises:
        BusUnavailable: there is none. The call may take effect all the same.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await call
    except TimeoutError:
        raise BusUnavailable(f"no answer in {limit_s:.2g} s, which a lease can wait for one") from None


@asynccontextmanager
async def holding(bus: FragmentLeases, fragments: Iterable[int], nonce: str, lease_s: float) -> AsyncIterator[None]:
    """Prolong leases, which are held already, for as long as the block takes; should that fail, they lapse."""

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
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def release_all(bus: FragmentLeases, nonce: str, fragments: int) -> None:
    """Give back what is held of all leases."""
    await asyncio.gather(*(bus.release_lease(p, nonce) for p in range(fragments)))
