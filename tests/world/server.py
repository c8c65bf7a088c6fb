"""What happens to the server behind the bus: it goes away and comes back, with all it had or without its last second,
and it is full for a while (`failover`: another one takes over). asyncio."""

import asyncio
from collections.abc import Callable

from diloco_studies.virtual.virtual_time import UNIX_START_S, VirtualClock
from tests.world.oracle import Oracle
from tests.world.plan import Fault, Kind
from tests.world.record import WorldStore

LOST_S = 1.0
"""How much a server loses that comes back without its last second."""


class ServerClock:
    """The server's: what it says its time is, which another server sees differently; spans are as everywhere."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def unix(self) -> float:
        """As `TIME` says it."""
        return UNIX_START_S + self.ahead_s + asyncio.get_running_loop().time()


class Server:
    """One world's."""

    def __init__(self, store: WorldStore, oracle: Oracle, clock: VirtualClock) -> None:
        self._store, self._oracle, self._clock = store, oracle, clock
        self.clock = ServerClock()
        self.epoch = 0
        """Counts restarts."""
        self._down_until = self._full_until = 0.0

    @property
    def up(self) -> bool:
        """Whether it answers."""
        return self._clock.now() >= self._down_until

    async def restart(self, fault: Fault, happened: Callable[[], None]) -> None:
        """Go away and come back; `happened` is called once it did, unless something else came first."""
        saved, epoch = None, self.epoch
        if fault.kind is Kind.BUS_REWOUND:
            saved = self._store.snapshot(), self._oracle.snapshot()
            await asyncio.sleep(LOST_S * min(1.0, fault.lasts_s))
        if not self.up or self.epoch != epoch:
            return  # it is down already, or what was saved is of the life before: it must not come back
        self.goes_away(fault.lasts_s / 2)
        if saved is None:
            self._store.come_back()
        else:
            self._store.restart(saved[0])
            self._oracle.rewind(saved[1])
        happened()

    def goes_away(self, lasts_s: float) -> None:
        """It does not answer for so long, and breaks off what it was at."""
        self.epoch += 1
        self._down_until = self._clock.now() + lasts_s

    # --- memory -----------------------------------------------------------------------------------------

    async def fill(self, lasts_s: float) -> None:
        """Have no memory for writes; of two such times that overlap, until the later end."""
        self._store.full = True
        self._full_until = max(self._full_until, self._clock.now() + lasts_s)
        await asyncio.sleep(lasts_s)
        if self._clock.now() >= self._full_until:
            self._store.full = False
