"""Strikes on Redis servers that fail over, for the monkey: a primary is killed, paused or cut off, a sentinel killed.

A strike on a primary is over as soon as all keys have a primary again. One that was killed for a time is started again
when that is over, and comes back as a replica. asyncio; `servers` does the work.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable

from diloco.pipeline.errors import DilocoError
from diloco_studies.strikes.failing.network import Network
from diloco_studies.strikes.failing.servers import Servers
from diloco_studies.strikes.schedule import Manner, Party, Strike

POLL_S = 0.05
TAKEN_OVER_S = 60.0
"""A failover that takes longer has failed."""


class Topology:
    """The servers of one run, under strikes."""

    def __init__(self, servers: Servers, network: Network | None, far: Callable[[Strike], Iterable[str]]) -> None:
        """far: names of a run's processes that a partition cuts off together with the primary."""
        self._servers, self._network, self._far = servers, network, far

    async def candidates(self, strike: Strike) -> list[str]:
        """Servers that the strike can hit: for good, only those that the others can do without."""
        if strike.party is Party.SENTINEL:
            names = [name for name, node in self._servers.nodes.items() if name.startswith("sentinel") and node.pid]
        else:
            names = await asyncio.to_thread(self._servers.serving)
        if strike.for_good:
            names = [name for name in names if await asyncio.to_thread(self._servers.can_spare, name)]
        return sorted(names)

    async def strike(self, strike: Strike, victim: str, until: Callable[[float], Awaitable[None]]) -> tuple[float, str]:
        """Strike, and undo it when its time is over: when all keys had a primary again, and what to say of it.

        until: waits for so many seconds, or until all is to be undone.

        Raises:
            DilocoError: nobody took over.
        """
        began_s, undo = time.time(), self._begin(strike, victim)
        detail, undone = "", strike.for_good
        lasting = None if strike.for_good else asyncio.ensure_future(until(strike.length_s))
        if strike.party is not Party.SENTINEL:
            while not await asyncio.to_thread(self._all_served, victim, undone and not strike.for_good):
                if time.time() > began_s + TAKEN_OVER_S:
                    raise DilocoError(f"no server took over from {victim} within {TAKEN_OVER_S:g} s")
                if lasting is not None and lasting.done() and not undone:
                    undo()
                    undone = True
                await asyncio.sleep(POLL_S)
            detail = f"{' and '.join(sorted(self._servers.serving()))} after {time.time() - began_s:.1f} s"
        ended_s = time.time()
        if lasting is not None:
            await lasting
        if strike.manner is Manner.PARTITION and not undone:
            lost = await asyncio.to_thread(self._servers.lost_bytes, victim)
            detail += f"; {lost} bytes of what {victim} took meanwhile are nowhere else"
        if not undone:
            undo()
        return ended_s, detail

    def _begin(self, strike: Strike, victim: str) -> Callable[[], None]:
        """Strike; how to undo it."""
        node = self._servers.nodes[victim]
        match strike.manner:
            case Manner.PAUSE:
                node.send(signal.SIGSTOP)
                return lambda: node.send(signal.SIGCONT)
            case Manner.PARTITION:
                network = self._network
                assert network is not None  # noqa: S101  # of a plan with partitions
                network.cut_off([victim, *self._servers.beside(victim), *self._far(strike)])
                return network.heal
            case _:
                node.kill()
                return node.start

    def _all_served(self, victim: str, undone: bool) -> bool:
        serving = self._servers.serving()
        return len(serving) == self._servers.shares and (undone or victim not in serving)
