"""Globals by a region's cache: one brings them, the others take them, and nobody trusts what lies there."""

import asyncio
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis.region import RedisRegionCache
from diloco.pipeline.bus.region import LEASE_S, LEAST_CALL_S
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.payload import Chunk, Update
from diloco.pipeline.payload.codec import Payload, as_bytes, decode, whole_chunk
from diloco.pipeline.testing.memory import MemoryBus, MemoryStore
from diloco.pipeline.testing.memory_region import MemoryRegionCache
from diloco.pipeline.testing.virtual_time import VirtualClock, inline, run_virtual
from diloco.pipeline.transfer import payloads
from diloco.pipeline.transfer.payloads import Wanted, push
from diloco.workers.exchange.region import BACKOFF, LEAST_WAIT_S, Fair, Region, _One
from tests.samples import IDLE
from tests.serving import serving
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, end, sync_spec

ELEMENTS, CHUNK_BYTES = 40_000, 8192
CHUNKS = -(-4 * ELEMENTS // CHUNK_BYTES)
KEY = "diloco:{run:0}:global:0:3:abcd"
THETA = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)
NAME = hashlib.sha256(as_bytes(THETA)).hexdigest()
RATE = 1e6
"""Bytes a second of the line, which learners share."""


def head(**given: Any) -> Head:
    values: dict[str, Any] = {
        **{"fragment": 0, "version": 3, "digest": bytes(16), "payload": KEY, "chunks": CHUNKS, "momentum": ""},
        **{"previous_digest": None, "window": IDLE, "merged": (), "merged_deltas": 0, "merged_tokens": 0},
        **{"rejected_tokens": 0, "sums": {KEY: bytes.fromhex(NAME)}},
    }
    return Head(**{**values, **given})


class Line:
    """The run's Redis behind a line; what a piece takes, it takes of all. Counts what it carried."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus, self._turn, self.carried = bus, asyncio.Lock(), 0
        self.hung: set[asyncio.Task[Any] | None] = set()

    async def read_chunks(self, key: str, first: int, limit: int, *args: Any, **given: Any) -> list[bytes | memoryview]:
        if asyncio.current_task() in self.hung:
            await asyncio.Event().wait()
        chunks = await self._bus.read_chunks(key, first, limit, *args, **given)
        async with self._turn:
            await asyncio.sleep(sum(map(len, chunks)) / RATE)
        self.carried += sum(map(len, chunks))
        return chunks


class Place:
    """A region with learners, their cache, and the line."""

    def __init__(self, monkeypatch: Any = None, piece_chunks: int = 4) -> None:
        self.store, self.clock = MemoryStore(), VirtualClock()
        self.bus = MemoryBus("run", self.clock)
        self.line: Any = Line(self.bus)
        payloads_piece = piece_chunks * CHUNK_BYTES
        if monkeypatch is not None:
            monkeypatch.setattr(payloads, "PIECE_BYTES", payloads_piece)

    async def publish(self, values: np.ndarray = THETA) -> None:
        await push(self.bus, KEY, values, CHUNK_BYTES, 1e6)

    def learner(self, name: str = "a") -> Region:
        cache = MemoryRegionCache("run", self.clock, self.store)
        return Region(cache, self.clock, name, inline, structlog.get_logger().bind(learner=name))

    def fetch(self, region: Region, at: Head | None = None) -> "asyncio.Task[np.ndarray]":
        async def fetched() -> np.ndarray:
            wanted = Wanted(self.line, KEY, ELEMENTS, "fp32", CHUNK_BYTES, 60.0)
            return (await region.fetch(wanted, at or head())).array()

        return asyncio.create_task(fetched())

    @property
    def payload(self) -> Any:
        return self.store.values.get(RunKeys("run").region_payload(NAME))


def wire_bytes() -> int:
    payload = Payload(as_bytes(THETA), CHUNK_BYTES)
    payload.grow_to(payload.nbytes)
    return sum(len(whole_chunk(payload.encoded(index))) for index in range(payload.chunks))


async def all_of(tasks: Sequence["asyncio.Task[np.ndarray]"]) -> None:
    for values in await asyncio.gather(*tasks):
        assert values.tobytes() == THETA.tobytes()


def test_one_of_four_pulls_and_the_others_follow(monkeypatch):
    """The line carries the payload once, and none has it later than the one that pulls by a piece's time and a look."""

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        four = [place.learner(name) for name in "abcd"]
        began = place.clock.now()
        await all_of([place.fetch(one) for one in four])
        assert place.clock.now() - began < 1.1 * wire_bytes() / RATE
        assert place.line.carried == wire_bytes() == sum(one.pulled for one in four)
        assert sum(one.shared for one in four) == 3 * wire_bytes()
        newcomer = place.learner("e")
        await all_of([place.fetch(newcomer)])
        assert (newcomer.pulled, newcomer.shared) == (0, wire_bytes())
        assert {one.state for one in (*four, newcomer)} == {"used"}

    run_virtual(scenario())


def test_another_goes_on_where_a_dead_one_was(monkeypatch):
    """Nothing that it had brought is pulled again."""

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        dying = place.fetch(place.learner("a"))
        await asyncio.sleep(0.0)
        others = [place.fetch(place.learner(name)) for name in "bcd"]
        await asyncio.sleep(0.5 * wire_bytes() / RATE)
        dying.cancel()
        carried, began = place.line.carried, place.clock.now()
        assert 0 < carried < wire_bytes()
        await all_of(others)
        assert place.line.carried <= wire_bytes() + 4 * (CHUNK_BYTES + 100)  # the piece that was under way
        assert place.clock.now() - began < LEASE_S + wire_bytes() / RATE

    run_virtual(scenario())


def test_who_is_there_and_brings_nothing_is_waited_for_no_longer_than_is_fair(monkeypatch):
    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        hung, waiting = place.fetch(place.learner("a")), place.learner("b")
        place.line.hung.add(hung)
        await asyncio.sleep(0.01)
        waiting._fair.observe(wire_bytes(), 2.0)
        began = place.clock.now()
        await all_of([place.fetch(waiting)])
        took = place.clock.now() - began
        assert 4.0 < took < 4.3 + wire_bytes() / RATE
        assert waiting.pulled == wire_bytes()
        assert waiting.state == "used"
        hung.cancel()

    run_virtual(scenario())


@pytest.mark.parametrize("each_s", [0.0, 0.7, 5.0])
@pytest.mark.parametrize("measured", [False, True])
def test_neighbours_that_only_say_so_are_waited_for_no_longer_than_one(monkeypatch, each_s, measured):
    """A cache may always name another one that brings it, at once or each after a while."""

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        learner, names = place.learner(), iter(range(10**6))
        if measured:
            learner._fair.observe(wire_bytes(), 2.0)
        cache: Any = learner._cache

        async def claim(name: str, nonce: str) -> str:
            await asyncio.sleep(0)
            return f"{place.clock.now() // each_s if each_s else next(names)}"

        cache.claim = claim
        began = place.clock.now()
        await all_of([place.fetch(learner)])
        due = (4.0 if measured else LEAST_WAIT_S) + wire_bytes() / RATE
        assert due - 0.05 < place.clock.now() - began < due + 0.3
        assert learner.pulled == wire_bytes()
        assert learner.state == "used"

    run_virtual(scenario())


def test_a_cache_that_brings_it_chunk_by_chunk_is_followed_no_longer_than_is_fair(monkeypatch):
    """Each of them is right, and comes just in time: so the learner that has the claim pulls the rest itself."""

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        await lies(place, THETA)
        learner = place.learner()
        cache: Any = learner._cache
        read = cache.read

        async def drips(name: str, first: int, limit: int, *given: Any) -> Any:
            await asyncio.sleep(0.9)
            return await read(name, first, 1, *given) if first or claimed else []

        claimed, claim = False, cache.claim

        async def claims(name: str, nonce: str) -> str:
            nonlocal claimed
            claimed = True
            return await claim(name, nonce)

        cache.read, cache.claim = drips, claims
        began = place.clock.now()
        await all_of([place.fetch(learner)])
        assert 0 < learner.shared < wire_bytes() / 4
        assert place.clock.now() - began < LEAST_WAIT_S + 0.9 + wire_bytes() / RATE

    run_virtual(scenario())


def test_on_a_thin_line_newcomers_find_out_what_is_fair_by_a_chunk_each(monkeypatch):
    """They had pulled nothing before. The pull takes longer than they wait unmeasured, and they go on sharing it."""
    monkeypatch.setattr("tests.workers.test_region_pulls.RATE", 20_000.0)

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        four = [place.learner(name) for name in "abcd"]
        await all_of([place.fetch(one) for one in four])
        chunk = wire_bytes() / CHUNKS
        assert wire_bytes() / RATE > 2 * LEAST_WAIT_S
        assert wire_bytes() < place.line.carried < wire_bytes() + 3.1 * chunk
        await all_of([place.fetch(one) for one in four])
        assert place.line.carried < wire_bytes() + 3.1 * chunk

    run_virtual(scenario())


@pytest.mark.parametrize("measured_s", [0.0, 0.1, 3.0])
async def test_a_cache_that_never_answers_costs_a_newcomer_what_is_fair(monkeypatch, measured_s):
    """A server that takes what is said and is silent; no line was measured, or a fast one, or a slow one."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    monkeypatch.setattr(f"{Region.__module__}.LEAST_WAIT_S", 0.4)
    monkeypatch.setattr(f"{Region.__module__}.LEAST_CALL_S", 0.2)
    place = Place(monkeypatch, piece_chunks=CHUNKS)
    await place.publish()
    async with serving(silent) as port:
        cache, clock = RedisRegionCache(f"redis://127.0.0.1:{port}", "run"), LoopClock()
        region = Region(cache, clock, "a", inline, structlog.get_logger())
        if measured_s:
            region._fair.observe(10 * wire_bytes(), measured_s)
        began = clock.now()
        with capture_logs() as said:
            await all_of([place.fetch(region)])
        due = {0.0: 0.4, 0.1: 0.2, 3.0: 0.6}[measured_s] + wire_bytes() / RATE
        assert due - 0.05 < clock.now() - began < due + 0.3
        assert [one["event"] for one in said] == ["region_unavailable"]
        await region.close()


def test_how_long_is_fair():
    fair = Fair()
    assert fair.wait_s(10**9) == fair.call_s(10**9) == LEAST_WAIT_S  # no line was measured yet
    assert not fair.measured
    fair.observe(1000, 0.001)
    assert fair.measured
    assert fair.wait_s(1000) == LEAST_WAIT_S > LEASE_S
    assert fair.call_s(1000) == LEAST_CALL_S
    assert fair.wait_s(10_000_000) == 20.0


async def lies(place: Place, values: np.ndarray, chunks: int = CHUNKS) -> None:
    """Somebody puts these in the cache under the name of what the head says."""
    payload = Payload(as_bytes(values), CHUNK_BYTES)
    payload.grow_to(payload.nbytes)
    cache = MemoryRegionCache("run", place.clock, place.store)
    await cache.write(NAME, 0, [whole_chunk(payload.encoded(index)) for index in range(chunks)], 1.0)


def test_other_values_are_refused_however_well_they_are_made(monkeypatch):
    """Each chunk and the whole have the xxh3 digests that they say; the head has another sum."""

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        await lies(place, THETA + np.float32(1e-3))
        learner = place.learner()
        with capture_logs() as said:
            await all_of([place.fetch(learner)])
        assert [one["event"] for one in said] == ["region_entry_refused"]
        assert place.payload is None
        assert learner.pulled == wire_bytes()
        assert learner.state == "away"
        await asyncio.sleep(BACKOFF.first_s)
        with capture_logs() as said:
            await all_of([place.fetch(learner)])
        assert [one["event"] for one in said] == ["region_found"]
        assert learner.state == "used"
        neighbour = place.learner("b")
        await all_of([place.fetch(neighbour)])
        assert neighbour.pulled == 0

    run_virtual(scenario())


def test_a_beginning_that_is_wrong_is_refused_though_the_rest_is_the_runs_own(monkeypatch):
    """The learner goes on from it, as from a dead neighbour's, and finds out at the end."""

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        wrong = THETA.copy()
        wrong[7] = 1.0
        await lies(place, wrong, 5)
        learner = place.learner()
        with capture_logs() as said:
            await all_of([place.fetch(learner)])
        assert [one["event"] for one in said] == ["region_entry_refused"]
        assert place.payload is None

    run_virtual(scenario())


@pytest.mark.parametrize("summed", [False, True])
def test_it_is_found_out_while_another_lane_fetches_on_the_same_region(monkeypatch, summed):
    """On a Redis Cluster fetches of several fragments are under way at once: each knows what it took by itself."""

    async def scenario() -> None:
        place, other = Place(monkeypatch), "diloco:{run:1}:global:1:3:abcd"
        await place.publish()
        theirs = THETA[: ELEMENTS // 2]
        await push(place.bus, other, theirs, CHUNK_BYTES, 1e6)
        wrong = THETA.copy()
        wrong[7] = 1.0
        await lies(place, wrong, 5)
        learner = place.learner()
        with capture_logs() as said:
            first = place.fetch(learner)
            await asyncio.sleep(0.03)
            assert learner.shared > 0, "it has what is wrong"
            assert not first.done(), "and is pulling the rest"
            wanted = Wanted(place.line, other, len(theirs), "fp32", CHUNK_BYTES, 60.0)
            sums = {other: hashlib.sha256(as_bytes(theirs)).digest()} if summed else {}
            second = await learner.fetch(wanted, head(fragment=1, payload=other, sums=sums))
            await all_of([first])
        assert second.array().tobytes() == theirs.tobytes()
        assert [one["event"] for one in said] == ["region_entry_refused"]
        assert place.payload is None

    run_virtual(scenario())


def test_bytes_that_are_no_chunks_are_refused(monkeypatch):
    async def scenario() -> None:
        for first, chunk in itertools.product((0, 2), (b"no msgpack", b"", bytes(10**5))):
            place = Place(monkeypatch)
            await place.publish()
            cache = MemoryRegionCache("run", place.clock, place.store)
            await lies(place, THETA, first)
            await cache.write(NAME, first, [chunk], 1.0)
            with capture_logs() as said:
                await all_of([place.fetch(place.learner())])
            assert [one["event"] for one in said] == ["region_entry_refused"], chunk[:20]
            assert place.payload is None

    run_virtual(scenario())


def test_a_truncated_payload_is_completed(monkeypatch):
    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        await lies(place, THETA, 7)
        learner = place.learner()
        await all_of([place.fetch(learner)])
        assert learner.shared > 0
        assert learner.pulled + learner.shared == wire_bytes()
        assert len(place.payload.ids) == CHUNKS

    run_virtual(scenario())


def test_a_cache_that_is_away_is_said_once_and_found_again(monkeypatch):
    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        learner = place.learner()
        cache: Any = learner._cache
        cache.away = "gone for now"
        with capture_logs() as said:
            for _ in range(5):
                await all_of([place.fetch(learner)])
                await asyncio.sleep(5.0)
            assert learner.state == "away"
            cache.away = ""
            await asyncio.sleep(BACKOFF.most_s)
            await all_of([place.fetch(learner)])
        assert [one["event"] for one in said] == ["region_unavailable", "region_found"]
        assert "gone for now" in said[0]["detail"]
        assert learner.state == "used"
        assert place.payload is not None

    run_virtual(scenario())


def test_a_full_cache_costs_its_claimant_nothing(monkeypatch):
    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        place.store.maxmemory_bytes = 50_000
        learner = place.learner()
        with capture_logs() as said:
            await all_of([place.fetch(learner)])
        assert [one["event"] for one in said] == ["region_unavailable"]
        assert learner.pulled == wire_bytes()

    run_virtual(scenario())


def test_a_payload_without_a_sum_goes_straight(monkeypatch):
    """The head is of a syncer that knew of no cache."""

    async def scenario() -> None:
        place = Place(monkeypatch)
        await place.publish()
        learner = place.learner()
        await all_of([place.fetch(learner, head(sums={}))])
        assert place.store.values == {}
        assert learner.pulled == wire_bytes()

    run_virtual(scenario())


def test_what_the_runs_redis_lacks_is_its_own_fault(monkeypatch):
    """The cache is not blamed, though it has a beginning, and whoever pulls tries again as ever."""

    async def scenario() -> None:
        for first in (0, 3):
            place = Place(monkeypatch)
            learner = place.learner()
            await lies(place, THETA, first)
            with capture_logs() as said:
                result = (await asyncio.gather(place.fetch(learner), return_exceptions=True))[0]
            assert f"has {first} of" in str(result)
            assert learner.state == "used"
            assert said == []

    run_virtual(scenario())


def test_which_versions_a_heads_payloads_are_of():
    """A key frame two behind, and four updates: the oldest leads to the version three before."""
    names = [f"update-{version}" for version in (6, 7, 8, 9)]
    updates = tuple(Update(payload=name, chunks=1, base=bytes(16), averaged=False) for name in names)
    at = head(version=9, updates=updates, behind=2)
    found = {
        key: _One(Wanted(None, key, 1, "fp32", 1, 0.0), at, 0.0)  # type: ignore[arg-type]
        for key in (KEY, *names)
    }
    assert {key: one.version for key, one in found.items()} == {KEY: 7, **{f"update-{v}": v for v in (6, 7, 8, 9)}}
    assert {one.oldest for one in found.values()} == {6}
    assert _One(Wanted(None, KEY, 1, "fp32", 1, 0.0), head(), 0.0).oldest == 3  # type: ignore[arg-type]


# --- whole runs -------------------------------------------------------------------------------------------


def sum_of(world: VirtualRun, key: str) -> bytes:
    """Of the bytes that are on the bus."""
    chunks = [decode(Chunk, data).data for data in world.store.values[key].data]  # type: ignore[union-attr]
    return hashlib.sha256(b"".join(chunks)).digest()


@pytest.mark.parametrize("global_codec", ["fp32", "bf16", "int8"])
def test_in_a_run_one_of_three_pulls_what_heads_vouch_for(global_codec, monkeypatch):
    """Heads have the sum of each payload that learners pull, as it is on the bus; one pull brings it for all."""
    monkeypatch.setattr("diloco.workers.exchange.region.LEAST_BYTES", 0)

    async def scenario() -> None:
        world = VirtualRun(sync_spec(tokens=10**9, global_codec=global_codec, key_frame_interval=3))
        world.start_syncer()
        store, log = MemoryStore(), structlog.get_logger()
        party = []
        for name in ("l0", "l1", "l2"):
            region = Region(MemoryRegionCache(RUN, world.clock, store), world.clock, name, inline, log)
            party.append(VirtualLearner(name, world, incarnation=f"{len(party):016x}", region=region).start())
        await world.until_version(8)
        for head in await world.heads():
            named = {head.payload, *(update.payload for update in head.updates)}
            assert head.sums == {key: sum_of(world, key) for key in named}
        pulled = [one.region.pulled for one in party if one.region]
        shared = [one.region.shared for one in party if one.region]
        assert all(shared)
        assert sum(pulled) < 0.7 * sum(shared), (pulled, shared)
        assert {report.report.region for report in await world.bus.read_reports()} == {"used"}
        await end(*party)
        world.stop.set()

    run_virtual(scenario())


def test_in_a_run_without_a_cache_no_sums_are_made():
    async def scenario() -> None:
        world = VirtualRun(sync_spec(tokens=10**9))
        world.start_syncer()
        learner = VirtualLearner("l0", world).start()
        await world.until_version(2)
        assert [head.sums for head in await world.heads()] == [{}, {}]
        assert {report.report.region for report in await world.bus.read_reports()} == {""}
        await end(learner)
        world.stop.set()

    run_virtual(scenario())
