"""Another server takes over in a simulated world: with less of each part's history, and with a clock of its own."""

import asyncio

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import BusFull
from diloco.pipeline.fragments import layout_of
from diloco_studies.virtual.chance import Chance
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual
from tests.world.failover import CLOCKS_S, LAGS_S, Failovers
from tests.world.link import Fate, Link
from tests.world.oracle import Oracle
from tests.world.plan import FAILOVERS, FRAGMENTS, Fault, Kind, plan
from tests.world.record import WorldBus, WorldStore, part_of
from tests.world.server import Server

SEEDS = 400
KEYS = RunKeys("run", 2)
WRITTEN = (KEYS.spec, KEYS.head(0), KEYS.head(1))
PARTS = {part_of(key) for key in WRITTEN}


class Place:
    """A server and two parties that write to it."""

    def __init__(self, seed: int) -> None:
        given = plan(0)
        layout = layout_of(given.spec.tensors)
        self.store, self.clock = WorldStore(), VirtualClock()
        self.oracle = Oracle(given, layout, self.store, KEYS, self.clock.now)
        self.server = Server(self.store, self.oracle, self.clock)
        self.links = [Link(self._bus(), self, f"party-{i}", 0, 0.1) for i in range(2)]
        self.failovers = Failovers(self.server, self.store, self.oracle, KEYS, Chance(seed), lambda: self.links)
        self.moved_s: list[float] = []

    def _bus(self) -> WorldBus:
        bus = WorldBus("run", self.server.clock, self.store)
        bus.keys = RunKeys("run", 2)
        return bus

    def bus_up(self, link: Link) -> bool:
        return link.beside or self.server.up

    def fate(self, party: str, number: int, method: str) -> Fate:
        return Fate(0.0)

    def crash_point(self, *given: object, **more: object) -> None:
        pass

    observe = later = overtaken = crash_point

    async def strike(self, kind: Kind) -> None:
        await self.failovers.strike(Fault("one", kind, 0.0, 0, 1.0), self.moved_s.append)


async def keep_writing(store: WorldStore) -> None:
    """Every key of the run and of both groups says how late it is, in ms."""
    for ms in range(10_000):
        for key in WRITTEN:
            store.values[key] = b"%d" % ms
        await asyncio.sleep(0.001)


def parts_after(seed: int) -> dict[str, int]:
    """What each part has of a history that was over when the server died, from its end, in ms."""

    async def main() -> dict[str, int]:
        place = Place(seed)
        writing = asyncio.create_task(keep_writing(place.store))
        await asyncio.sleep(4.0)
        before = asyncio.get_running_loop().time()
        await place.strike(Kind.BUS_FAILED_OVER)
        took_ms = round(1000 * (asyncio.get_running_loop().time() - before))
        writing.cancel()
        assert not place.server.up
        assert place.server.clock.ahead_s == place.moved_s[0]
        return {part_of(key): 4000 + took_ms - int(value) for key, value in place.store.values.items()}

    return run_virtual(main())


def test_each_part_has_a_prefix_of_its_own_and_some_have_all() -> None:
    lags = [parts_after(seed) for seed in range(12)]
    assert all(found.keys() == PARTS for found in lags)
    assert all(-2 <= lag <= 1000 * max(LAGS_S) + 2 for found in lags for lag in found.values())
    assert any(max(found.values()) > min(found.values()) + 100 for found in lags)
    assert any(lag <= 2 for found in lags for lag in found.values())


def test_what_expires_does_so_by_the_clock_of_the_server_that_is_there() -> None:
    """Both ways: some worlds' next server is ahead, and some worlds' is behind."""

    async def main(seed: int) -> tuple[float, float]:
        place = Place(seed)
        place.store.values[KEYS.lease(0)], place.store.expiries[KEYS.lease(0)] = b"aa", 100.0
        await place.strike(Kind.BUS_FAILED_OVER)
        return place.moved_s[0], place.store.expiries[KEYS.lease(0)]

    found = [run_virtual(main(seed)) for seed in range(20)]
    assert all(until == 100.0 - moved_s and abs(moved_s) <= max(CLOCKS_S) for moved_s, until in found)
    assert min(moved for moved, _ in found) < -1 < 1 < max(moved for moved, _ in found)


def test_in_a_split_some_write_to_what_is_lost_until_they_are_refused_and_then_find_the_other_server() -> None:
    async def main(seed: int) -> bool:
        place = Place(seed)
        striking = asyncio.create_task(place.strike(Kind.BUS_SPLIT))
        while not place.moved_s:
            await asyncio.sleep(0.001)
        beside, other = sorted(place.links, key=lambda link: not link.beside)
        if not beside.beside or other.beside:
            await striking
            return False
        assert await beside.propose_spec(b"lost") == b"lost"
        assert KEYS.spec not in place.store.values
        while not beside.bus.server.full:
            await asyncio.sleep(0.01)
        try:
            await beside.replace_spec(b"more", b"lost")
        except BusFull:
            assert await beside.read_spec() == b"lost"
        else:
            raise AssertionError("a server without replicas took a write")
        await striking
        assert not beside.beside
        assert await beside.read_spec() is None
        assert await other.propose_spec(b"kept") == b"kept" == await beside.read_spec()
        return True

    assert any(run_virtual(main(seed)) for seed in range(20))


def test_worlds_fail_over_in_clusters_and_alone_with_learners_of_several_ranks_and_without() -> None:
    worlds = [world for world in map(plan, range(SEEDS)) if world.fails_over]
    assert SEEDS / 4 < len(worlds) < SEEDS / 2
    assert {world.spec.sync.groups for world in worlds} == {1, FRAGMENTS}
    with_ranks = sum(any(world.together) for world in worlds)
    assert len(worlds) / 4 < with_ranks < len(worlds)
    kinds = {one.kind for world in worlds for one in (*world.faults, *world.end_faults)}
    assert kinds >= set(FAILOVERS)
    assert any(one.kind in FAILOVERS for world in worlds for one in world.end_faults)
    others = [world for world in map(plan, range(SEEDS)) if not world.fails_over]
    assert not any(one.kind in FAILOVERS for world in others for one in (*world.faults, *world.end_faults))
