"""The server dies for good, and another one takes over: with less of the history, and with a clock of its own. asyncio.

The run's own keys, and each group's, are there as they were at a time of their own. What a node writes reaches its
replica in order, and the nodes of a cluster know nothing of each other.

In a split the server that was there before lives on for some parties, who notice nothing. After a while it refuses
their writes, as a server does whose replicas are gone (`min-replicas-max-lag`). When the network heals they find the
one that took over.
"""

import asyncio
from collections.abc import Callable, Sequence

from diloco.pipeline.bus.keys import RunKeys
from diloco_studies.virtual.chance import Chance
from tests.world.link import Link
from tests.world.oracle import Oracle
from tests.world.plan import Fault, Kind
from tests.world.record import Saved, WorldStore, part_of
from tests.world.server import Server
from tests.world.surviving import Surviving

LAGS_S = (0.05, 1.0, 3.0)
"""The most that a replica may be behind."""
UP_TO_DATE = 0.25
"""So often it is not behind at all, of one part of what is stored."""
CLOCKS_S = (0.0, 2.0, 10.0)
"""The clock of a server that takes over is up to so far ahead, or behind."""
STAYS = 0.4
"""So many of the parties stay with the server that was there before, in a split."""
SERVES_S, REFUSES_S = (0.1, 4.0), (0.0, 1.5)
"""A server that was replaced takes writes for so long, and refuses them for so long until the network heals. The first
are up to eight lease times: as the settings stand `min-replicas-max-lag` is two (10 s), and a server may have none."""


class Failovers:
    """Those of one world."""

    def __init__(
        self,
        server: Server,
        store: WorldStore,
        oracle: Oracle,
        keys: RunKeys,
        chance: Chance,
        links: Callable[[], Sequence[Link]],
    ) -> None:
        """`links`: of all parties that live."""
        self._server, self._store, self._oracle = server, store, oracle
        self._keys, self._chance, self._links = keys, chance, links
        self._split = False

    async def strike(self, fault: Fault, happened: Callable[[float], None]) -> None:
        """Have one.

        happened: called once it did, unless something else came first, with how far the clock went forward, s.
        """
        split = fault.kind is Kind.BUS_SPLIT
        if split and self._split:
            return
        if (found := await self._prefixes(fault)) is None:
            return
        saved, fragments = found
        old, stay = (self._divide(fault) if split else None), self._links
        self._server.goes_away(fault.lasts_s / 2)
        moved_s = self._ahead_s(fault) - self._server.clock.ahead_s
        self._server.clock.ahead_s += moved_s
        self._store.fail_over(saved, moved_s)
        self._oracle.rewind(fragments)
        happened(moved_s)
        if old is not None:
            await self._heal(fault, old, stay())

    async def _prefixes(self, fault: Fault) -> tuple[dict[str, Saved], list[Surviving]] | None:
        """What the next server has of each part, and of the fragments; None if something else came first."""
        epoch, began, lags = self._server.epoch, asyncio.get_running_loop().time(), self._lags(fault)
        saved: dict[str, Saved] = {}
        fragments: dict[int, Surviving] = {}
        dies_at = began + max(lags.values())
        for part, lag_s in (*sorted(lags.items(), key=lambda one: (-one[1], one[0])), ("", 0.0)):
            await asyncio.sleep(max(0.0, dies_at - lag_s - asyncio.get_running_loop().time()))
            if not self._server.up or self._server.epoch != epoch:
                return None
            if part:
                saved[part] = self._store.snapshot()
                for p, fragment in enumerate(self._oracle.snapshot()):
                    if part_of(self._keys.head(p)) == part:
                        fragments[p] = fragment
        return saved, [fragments[p] for p in sorted(fragments)]

    def _lags(self, fault: Fault) -> dict[str, float]:
        """By how much each part of what is stored was behind, s."""
        chance, max_s = self._chance, self._chance.one_of(LAGS_S, "lag", fault.id)
        parts = [part_of(self._keys.spec), *(part_of(self._keys.tape(group)) for group in range(self._keys.groups))]
        late = [part for part in parts if chance.share("up to date", fault.id, part) >= UP_TO_DATE]
        return dict.fromkeys(parts, 0.0) | {p: chance.between(0.0, max_s, "behind", fault.id, p) for p in late}

    def _ahead_s(self, fault: Fault) -> float:
        max_s = self._chance.one_of(CLOCKS_S, "clock", fault.id)
        return self._chance.between(-max_s, max_s, "ahead", fault.id)

    # --- a split ----------------------------------------------------------------------------------------

    def _divide(self, fault: Fault) -> WorldStore:
        """Some parties stay with the server that was there before."""
        self._split = True
        old = self._store.beside()
        self._oracle.divide(old)
        for link in self._links():
            if self._chance.share("stays", fault.id, link.party) < STAYS:
                link.bus.move(old)
                link.beside = True
        return old

    async def _heal(self, fault: Fault, old: WorldStore, there: Sequence[Link]) -> None:
        """They may write for a while, then only read; then they reach the one that took over."""
        await asyncio.sleep(self._chance.between(*SERVES_S, "serves", fault.id))
        old.full = True
        await asyncio.sleep(self._chance.between(*REFUSES_S, "refuses", fault.id))
        come = [link for link in there if link.beside]
        for link in come:
            link.bus.move(self._store)
            link.beside = False
            link.break_calls()
        self._oracle.heal(come)
        self._split = False
