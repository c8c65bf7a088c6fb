"""What `region.RegionCache` promises, on both adapters; and a region's Redis that does not behave."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import redis as redis_py

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis import region as adapter
from diloco.pipeline.bus.redis.region import RedisRegionCache
from diloco.pipeline.bus.region import ENTRY_S, FADING_S, RegionCache
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import RegionAway, UsageError
from diloco.pipeline.testing import memory_region
from diloco.pipeline.testing.memory_region import MemoryRegionCache
from tests.backdoor import MemoryBackdoor, RedisBackdoor
from tests.serving import Answer, serving

CHUNKS = [bytes([i]) * 1000 for i in range(5)]
A, B = "aa" * 8, "bb" * 8


@pytest.fixture
async def cache(backdoor) -> AsyncIterator[RegionCache]:
    made: RegionCache
    if isinstance(backdoor, MemoryBackdoor):
        made = MemoryRegionCache(backdoor.run, LoopClock(), backdoor.store)
    else:
        made = RedisRegionCache(backdoor.url, backdoor.run)
    yield made
    await made.close()


async def read(cache: RegionCache, name: str, first: int = 0, limit: int = 9, block_s: float = 0.0) -> list[bytes]:
    return [bytes(one) for one in await cache.read(name, first, limit, 1000, 1.0, block_s)]


async def test_what_was_written_is_read_from_any_chunk_on(cache):
    assert await read(cache, "x") == []
    await cache.write("x", 0, CHUNKS[:2], 1.0)
    await cache.write("x", 2, [memoryview(chunk) for chunk in CHUNKS[2:]], 1.0)
    assert await read(cache, "x") == CHUNKS
    assert await read(cache, "x", 1, 2) == CHUNKS[1:3]
    assert await read(cache, "x", 5) == await read(cache, "y") == []


async def test_as_many_as_are_asked_for_are_read(cache):
    """Nothing of a whole answer is beyond its bound of values."""
    for first in range(0, 300, 100):
        await cache.write("x", first, [b"%d" % index for index in range(first, first + 100)], 1.0)
    for limit in (1, 2, 64, 300, 400):
        assert await read(cache, "x", 0, limit) == [b"%d" % index for index in range(min(limit, 300))]


async def test_a_chunk_that_is_there_stays(cache):
    """Two may bring the same payload, after a claim that lapsed."""
    await cache.write("x", 0, CHUNKS[:3], 1.0)
    await cache.write("x", 1, [b"other", b"other", CHUNKS[3]], 1.0)
    assert await read(cache, "x") == CHUNKS[:4]


async def test_nothing_is_added_to_what_is_gone(cache):
    """A server that was emptied in between has no payload that begins in its middle."""
    await cache.write("x", 2, CHUNKS[2:], 1.0)
    assert await read(cache, "x") == []


async def test_a_read_waits_for_the_next_chunk(cache):
    waiting = asyncio.create_task(read(cache, "x", 1, block_s=5.0))
    await cache.write("x", 0, CHUNKS[:1], 1.0)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await cache.write("x", 1, CHUNKS[1:2], 1.0)
    assert await waiting == CHUNKS[1:2]
    assert await read(cache, "x", 2, block_s=0.05) == []


async def test_one_has_the_claim_until_it_lapses(cache, monkeypatch):
    for module in (adapter, memory_region):
        monkeypatch.setattr(module, "LEASE_S", 0.3)
    assert await cache.claim("x", A) == A
    assert await cache.claim("x", B) == A
    assert await cache.claim("y", B) == B
    await asyncio.sleep(0.2)
    assert await cache.claim("x", A) == A  # prolonged
    await asyncio.sleep(0.2)
    assert await cache.claim("x", B) == A
    await asyncio.sleep(0.2)
    assert await cache.claim("x", B) == B


async def test_what_is_kept_expires_and_what_was_replaced_soon(cache, backdoor):
    keys = RunKeys(backdoor.run)
    for version, name in enumerate(("v0", "v1", "v2", "v3")):
        await cache.write(name, 0, CHUNKS, 1.0)
        await cache.keep(0, version, name, oldest=max(0, version - 1))
    left = {name: backdoor.ttl_s(keys.region_payload(name)) for name in ("v0", "v1", "v2", "v3")}
    assert all(0 < left[name] <= FADING_S for name in ("v0", "v1")), left
    assert all(FADING_S < left[name] <= ENTRY_S for name in ("v2", "v3")), left
    assert 0 < backdoor.ttl_s(keys.region_kept(0)) <= ENTRY_S


async def test_a_payload_is_dropped(cache):
    await cache.write("x", 0, CHUNKS, 1.0)
    await cache.drop("x")
    assert await read(cache, "x") == []


async def test_a_full_server_is_no_cache_and_keeps_no_half(backdoor, redis_binary):
    """It has no payload with a chunk missing in its middle."""
    if isinstance(backdoor, MemoryBackdoor):
        cache: RegionCache = MemoryRegionCache(backdoor.run, LoopClock(), backdoor.store)
        await cache.write("x", 0, CHUNKS[:1], 1.0)
        backdoor.fill_memory()
        with pytest.raises(RegionAway, match="full"):
            await cache.write("x", 1, CHUNKS[1:], 1.0)
        assert await read(cache, "x") == []
        return
    with EmbeddedRedis(binary=redis_binary) as server:  # one of its own: filling it disturbs nobody
        full = RedisBackdoor(backdoor.run, server.url)
        cache = RedisRegionCache(server.url, backdoor.run)
        await cache.write("x", 0, CHUNKS[:1], 1.0)
        full.fill_memory()
        with pytest.raises(RegionAway, match="raise its maxmemory"):
            await cache.write("x", 1, CHUNKS[1:], 1.0)
        assert await read(cache, "x") == []
        full.free_memory()
        await cache.write("x", 0, CHUNKS, 1.0)
        assert await read(cache, "x") == CHUNKS
        full.client.close()
        await cache.close()


async def test_runs_with_one_cache_do_not_meet(backdoor):
    if isinstance(backdoor, MemoryBackdoor):
        caches = [MemoryRegionCache(run, LoopClock(), backdoor.store) for run in ("a", "b")]
    else:
        caches = [RedisRegionCache(backdoor.url, f"{backdoor.run}-{run}") for run in ("a", "b")]
    assert await caches[0].claim("x", A) == A
    assert await caches[1].claim("x", B) == B
    await caches[0].write("x", 0, CHUNKS, 1.0)
    assert await read(caches[1], "x") == []
    for cache in caches:
        await cache.close()


# --- servers that do not behave ---------------------------------------------------------------------------


async def told_by(answer: Answer, url: str = "redis://127.0.0.1:{}") -> str:
    """What a read says of a server that answers so."""
    async with serving(answer) as port:
        cache = RedisRegionCache(url.format(port), "run")
        try:
            with pytest.raises(RegionAway) as error:
                await cache.read("x", 0, 2, 1000, 0.5)
            return str(error.value)
        finally:
            await cache.close()


async def announce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A string of ten gigabytes, of which some come."""
    await reader.read(1000)
    writer.write(b"*1\r\n*2\r\n$1\r\nx\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nc\r\n$10000000000\r\n" + bytes(10_000))
    await writer.drain()
    await reader.read(1000)


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Strings without an end."""
    await reader.read(1000)
    while True:
        writer.write(b"*10\r\n" + b"$10000\r\n%b\r\n" % bytes(10_000) * 10)
        await writer.drain()


async def crumble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Strings of nothing, in arrays of arrays: few bytes, and many values."""
    await reader.read(1000)
    writer.write(b"*2\r\n*8\r\n" + b"$0\r\n\r\n" * 8 + b"*9000\r\n" + b"$0\r\n\r\n" * 9000)
    await writer.drain()
    await reader.read(1000)


async def drone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A line without an end."""
    await reader.read(1000)
    while True:
        writer.write(b"+" + bytes([65]) * 60_000)
        await writer.drain()


async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1000)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n$x\r\n")
    await writer.drain()
    await reader.read(1000)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (announce, "a string of 10000000000"),
        (pour, "not a reply: more than"),
        (crumble, "an array of 9000, with more values than were asked for"),
        (drone, "not a reply: more than"),
        (silent, "no answer in 0.5 s"),
        (hang_up, "connection lost"),
    ],
)
@pytest.mark.parametrize("login", ["", "learner:secret-of-mine@"], ids=["without a login", "at the login"])
async def test_what_a_server_says_is_bounded_whenever_it_says_it(answer, said, login):
    told = await told_by(answer, f"redis://{login}127.0.0.1:{{}}")
    assert said in told
    assert "secret-of-mine" not in told


async def test_a_login_that_was_cut_short_is_made_anew():
    """Else the next call would be made by nobody, and would take the login's late answer for its own."""
    heard = list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while asked := await reader.read(1000):
            heard.append(asked)
        ended.set()

    async with serving(serve) as port:
        cache = RedisRegionCache(f"redis://u:p@127.0.0.1:{port}", "run")
        for _ in range(2):
            ended = asyncio.Event()
            with pytest.raises(RegionAway, match="no answer"):
                await cache.read("x", 0, 2, 1000, 0.2)
            await asyncio.wait_for(ended.wait(), 5.0)
        await cache.close()
    assert len(heard) == 2
    assert all(b"AUTH" in asked and b"XREAD" not in asked for asked in heard)


async def test_what_is_no_redis_is_no_cache():
    assert "the region's" in await told_by(babble, "redis://u:p@127.0.0.1:{}")


@pytest.mark.redis
async def test_a_wrong_password_is_told_without_it(redis_binary):
    with EmbeddedRedis(binary=redis_binary, password="right" * 3) as server:
        path = server.url.removeprefix("unix://")
        cache = RedisRegionCache(f"unix://:{'wrong' * 3}@{path}", "run")
        with pytest.raises(RegionAway, match=r"refuses the login.*DILOCO_REGION_REDIS_URL") as error:
            await cache.claim("x", A)
        assert "wrongwrong" not in str(error.value)
        await cache.close()
        cache = RedisRegionCache(f"unix://:{'right' * 3}@{path}", "run")
        assert await cache.claim("x", A) == A
        await cache.close()


async def test_nobody_there_is_no_cache():
    cache = RedisRegionCache(f"unix:///tmp/nothing-{os.getpid()}.sock", "run")
    with pytest.raises(RegionAway):
        await cache.drop("x")
    await cache.close()


@pytest.mark.redis
async def test_another_database_of_the_server_is_used(redis_binary):
    with EmbeddedRedis(binary=redis_binary) as server:
        cache = RedisRegionCache(f"{server.url}?db=3", "run")
        await cache.write("x", 0, CHUNKS, 1.0)
        with redis_py.Redis.from_url(server.url, db=3, protocol=2) as client:
            assert client.keys() == [RunKeys("run").region_payload("x").encode()]
        await cache.close()


@pytest.mark.parametrize(
    "url",
    ["localhost:6379", "rediss://h:1?ssl_ca_certs=/nowhere.pem", "redis://h:1?nonsense=1", "redis://me@h:1"],
)
def test_a_url_that_cannot_be_used_is_refused_at_once(url):
    with pytest.raises(UsageError, match="region's Redis"):
        RedisRegionCache(url, "run")
