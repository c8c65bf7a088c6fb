"""Hostile peers and a server without room, on a real Redis of the test's own, in real time.

The syncer is the production service, the learners are the production exchange with toy training.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from redis.exceptions import OutOfMemoryError

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.redis_streams import RedisBus, connect
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusFull
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, DeltaHeader, Head, RefusalReason, Rejected
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.settings import SyncerProcess
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco_studies.virtual.virtual_time import inline
from tests import HANGING_S, samples
from tests.backdoor import RedisBackdoor
from tests.samples import encode_chunks
from tests.virtual_run import VirtualLearner, end, spec_of, sync_spec

pytestmark = [pytest.mark.redis]

RUN = "hostile"
LIVENESS_S = 1.0


@dataclass
class RealRun:
    """One syncer and some learners on a real server; what `VirtualLearner` needs of its world."""

    server: EmbeddedRedis
    spec: Spec
    clock: LoopClock = field(default_factory=LoopClock)
    bus: Any = None
    service: Any = None
    buses: list[RedisBus] = field(default_factory=list)
    learners: list["RealLearner"] = field(default_factory=list)
    syncer: asyncio.Task[None] | None = None

    async def connect(self) -> RedisBus:
        self.buses.append(await connect(self.server.url, RUN))
        self.buses[-1].use_spec(self.spec)
        return self.buses[-1]

    async def start_syncer(self) -> SyncerService:
        settings = SyncerProcess(syncer_id="syncer", liveness_s=LIVENESS_S, lease_s=1.0)
        self.service = SyncerService(await self.connect(), self.clock, settings, Metrics(), offload=inline)
        self.syncer = asyncio.create_task(self.service.run(asyncio.Event()))
        return self.service

    async def start_learners(self, count: int) -> list["RealLearner"]:
        for i in range(count):
            learner = RealLearner(f"l{i}", self, 0.03, f"{i:016x}")  # type: ignore[arg-type]  # a world as it needs it
            learner.link = await self.connect()
            self.learners.append(learner.start())  # type: ignore[arg-type]
        return self.learners

    async def heads(self) -> list[Head]:
        return [head for head in await self.bus.read_heads(range(self.spec.sync.fragments)) if head]

    async def tape(self) -> list[Any]:
        return [entry.record for entry in await self.bus.read_tape({0: START}, limit=100_000)]

    async def until(self, reached: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + HANGING_S
        while not await reached():
            assert time.monotonic() < deadline, f"waited in vain until {what}: {await self.heads()}"
            await asyncio.sleep(0.02)

    async def until_risen(self, by: int = 2) -> None:
        """Until every fragment has gone on."""
        before = [head.version for head in await self.heads()] or [-1] * self.spec.sync.fragments

        async def risen() -> bool:
            now = [head.version for head in await self.heads()]
            return len(now) == self.spec.sync.fragments and all(b >= a + by for a, b in zip(before, now, strict=True))

        await self.until(risen, f"each version has risen by {by}")


class RealLearner(VirtualLearner):
    """On the server; it can be told to train no further."""

    link: RedisBus
    resting = False

    def connect(self) -> RedisBus:
        return self.link

    async def step(self) -> None:
        await super().step()
        while self.resting:
            await super().step()


@asynccontextmanager
async def real_run(binary: Path | None, learners: int, **sync: Any) -> AsyncIterator[RealRun]:
    settings = {"tokens": 10**9, "quorum": 2, "fragments": 2, "codec": "fp32"} | sync
    with EmbeddedRedis(binary=binary) as server:
        run = RealRun(server, spec_of(sync_spec(**settings)))
        run.bus = await run.connect()
        try:
            await run.start_syncer()
            await run.start_learners(learners)
            await run.until_risen(4)
            yield run
        finally:
            await end(*run.learners)
            if run.syncer is not None:
                run.syncer.cancel()
                await asyncio.gather(run.syncer, return_exceptions=True)
            for bus in run.buses:
                await bus.close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Log lines, as dicts."""
    lines: list[dict[str, Any]] = []

    def keep(_: Any, method: str, event: dict[str, Any]) -> str:
        lines.append({**event, "level": method})
        return ""

    before = structlog.get_config()
    structlog.configure(processors=[keep], logger_factory=structlog.ReturnLoggerFactory())
    yield lines  # type: ignore[misc]
    structlog.configure(**before)


# --- bad deltas --------------------------------------------------------------------------------------


class Forger:
    """Writes what it likes on fragment 0's stream, under names of its own and of others."""

    def __init__(self, run: RealRun, bus: RedisBus) -> None:
        self.run, self.bus, self.serial = run, bus, 0
        self.fragment = layout_of(run.spec.tensors).fragments[0]

    async def header(self, **changes: Any) -> DeltaHeader:
        head = (await self.run.heads())[0]
        self.serial += 1
        values = {
            "learner": "forger",
            "incarnation": "f" * 16,
            "base_version": head.version,
            "base_digest": head.digest,
            "serial": self.serial,
            "chunks": 1,
            "layout": layout_of(self.run.spec.tensors).digest,
        }
        return samples.header(**values | changes)

    async def send(self, values: Any = None, spoil: Callable[[bytes], bytes] = bytes, **changes: Any) -> DeltaHeader:
        """Offer a delta with this payload, or with none."""
        header = await self.header(**changes)
        if values is not None:
            chunks = [spoil(chunk) for chunk in encode_chunks(np.asarray(values, np.float32), 1024)]
            key = self.bus.keys.delta_payload(0, header.learner, header.incarnation, header.serial)
            await self.bus.write_chunks(key, 0, chunks, 60)
        await self.bus.offer(header)
        return header

    async def raw(self, data: bytes) -> None:
        """Any bytes on its stream."""
        keys = self.bus.keys
        named = [keys.deltas(0, "forger"), keys.senders(0), keys.arrivals(0)]
        await self.bus._redis.script("offer", named, "forger", data)


async def test_every_kind_of_bad_delta_is_refused_with_its_reason_and_changes_nothing(
    redis_binary: Path | None,
) -> None:
    """Next to honest learners: on the tape, in the metrics, in the status; the global has the digest it had."""
    async with real_run(redis_binary, 2) as run:
        forger = Forger(run, await run.connect())
        size = forger.fragment.elements
        small = np.full(size, 1e-3, np.float32)
        for learner in run.learners:
            learner.resting = True

        async def still() -> bool:
            before = await run.heads()
            await asyncio.sleep(0.5)
            return before == await run.heads() and not await run.bus.read_offers(0)

        await run.until(still, "the honest learners rest")
        before = (await run.heads())[0]
        merged = next(r for r in reversed(await run.tape()) if isinstance(r, Committed) and r.fragment == 0)
        part = merged.contributions[0]
        bad: dict[RefusalReason, list[Callable[[], Awaitable[Any]]]] = {
            RefusalReason.NON_FINITE: [
                lambda: forger.send(np.where(np.arange(size) == 1, np.nan, small)),
                lambda: forger.send(np.where(np.arange(size) == 1, np.inf, small)),
            ],
            RefusalReason.ABSURD_NORM: [lambda: forger.send(np.full(size, 1e6)), lambda: forger.send(small * 1e38)],
            RefusalReason.WRONG_LAYOUT: [
                lambda: forger.send(small, layout=b"x" * 16),
                lambda: forger.send(small, chunks=10**6),
                lambda: forger.send(small, codec="bf16"),
            ],
            RefusalReason.NOT_POSITIVE: [lambda: forger.send(small, steps=0), lambda: forger.send(small, tokens=-1)],
            RefusalReason.UNKNOWN_BASE: [
                lambda: forger.send(small, base_digest=bytes(16)),
                lambda: forger.send(small, base_version=before.version + 5),
            ],
            RefusalReason.TOO_STALE: [lambda: forger.send(small, base_version=0)],
            # An honest learner's delta that was merged, again: under its own name, as anybody can read it.
            RefusalReason.ALREADY_MERGED: [
                lambda: forger.send(
                    small,
                    learner=part.learner,
                    incarnation=part.incarnation,
                    base_version=part.base_version,
                    tokens=part.tokens,
                )
            ],
            RefusalReason.BAD_PAYLOAD: [
                lambda: forger.send(small[:-1]),
                lambda: forger.send(small, lambda chunk: chunk[:-30]),
                lambda: forger.send(small, lambda chunk: chunk[:-1] + b"\x00"),
                lambda: forger.send(small, lambda _: b"\xdd\x00\x10\x00\x00" * 50),
            ],
            RefusalReason.BAD_MESSAGE: [
                lambda: forger.raw(b"not msgpack"),
                lambda: forger.raw(b"\xdd\x00\x01\x00\x00" * 1000),
                lambda: forger.raw(b""),
            ],
            RefusalReason.UPLOAD_TIMEOUT: [lambda: forger.send()],
        }
        bad[RefusalReason.BAD_MESSAGE].append(
            lambda: _then(forger.header(fragment=1), lambda header: forger.raw(encode(header)))
        )
        for reason, sends in bad.items():
            for send in sends:
                count = (await run.heads())[0].refused.get(reason.value, 0)
                await send()

                async def refused(reason: RefusalReason = reason, count: int = count) -> bool:
                    return (await run.heads())[0].refused.get(reason.value, 0) > count

                await run.until(refused, f"one more is refused as {reason.value}")
        after = (await run.heads())[0]
        assert (after.version, after.digest, after.payload) == (before.version, before.digest, before.payload)
        assert await run.bus.read_offers(0) == []
        assert not list(RedisBackdoor(RUN, run.server.url).client.scan_iter("*delta:0:forger*"))

        expected = {reason.value: len(sends) for reason, sends in bad.items()}
        told = Counter(r.reason.value for r in await run.tape() if isinstance(r, Rejected) and r.fragment == 0)
        await forger.bus.write_report(samples.report("forger"))
        status = await read_status(run.bus, run.clock)
        sample = run.service.metrics.registry.get_sample_value
        for reason, count in expected.items():
            assert told[reason] >= count
            assert status["refused"][reason] >= count
            assert sample("diloco_refusals_total", {"reason": reason}) >= count
        assert "forger" in status["fragments"][0]["window"]["suspected"]
        assert any("forger" in warning for warning in status["warnings"])
        async with asyncio.timeout(HANGING_S):  # of a lease that lapses for a moment nothing is told
            while sample("diloco_suspected_learners") != 1:
                await asyncio.sleep(0.1)

        for learner in run.learners:
            learner.resting = False
        for _ in range(3):
            await forger.send(np.full(size, np.nan))
            await run.until_risen(1)
        new = [r for r in await run.tape() if isinstance(r, Committed) and r.version > before.version]
        assert {part.learner for r in new for part in r.contributions} == {"l0", "l1"}


@pytest.mark.slow
async def test_merges_go_on_after_a_flood_of_200_000_headers(redis_binary: Path | None) -> None:
    """Added past us, to a stream of its own, as whoever has a learner's password may: half that nobody can read, half
    such as learners send. All are refused and counted; nobody reads more than some of them."""
    flooded = 200_000
    async with real_run(redis_binary, 2) as run:
        forger = Forger(run, await run.connect())
        key, client = forger.bus.keys.deltas(0, "forger"), RedisBackdoor(RUN, run.server.url).client

        def flood(sound: bytes) -> None:
            for _ in range(0, flooded, 1000):
                pipeline = client.pipeline(transaction=False)
                for n in range(1000):
                    pipeline.xadd(key, {"h": sound if n % 2 else b"x"})
                pipeline.execute()

        async def all_refused() -> bool:
            return not client.xlen(key) and sum((await run.heads())[0].refused.values()) > 0.99 * flooded

        await forger.raw(b"x")
        await asyncio.to_thread(flood, encode(await forger.header()))
        await run.until(all_refused, "nothing of the flood is left")
        await run.until_risen(5)
        told = [r for r in await run.tape() if isinstance(r, Rejected) and r.learner == "forger"]
        assert any(r.reason is RefusalReason.FLOOD and r.last_told for r in told)
        assert {r.learner for r in await run.tape() if isinstance(r, Rejected)} <= {"forger", "l0", "l1", ""}


async def test_megabytes_where_learners_may_write_stop_no_merge_and_are_gone_soon(
    redis_binary: Path | None,
) -> None:
    """Nobody has to do anything."""
    async with real_run(redis_binary, 2) as run:
        forger, keys, client = Forger(run, await run.connect()), run.bus.keys, RedisBackdoor(RUN, run.server.url).client
        large, report = bytes(17 * 2**20), "forger/" + "f" * 16
        client.hset(keys.senders(0), large[: 2 * 2**20], "")
        client.xadd(keys.arrivals(0), {"l": large})
        client.hset(keys.learners, report, large)
        client.hset(keys.seen, large, "")
        await forger.raw(large)
        header = await forger.header()
        key = keys.delta_payload(0, "forger", header.incarnation, header.serial)
        client.xadd(key, {"c": large}, "1-0")
        await forger.bus.offer(header)

        async def gone() -> bool:
            refused = (await run.heads())[0].refused
            shared = [client.hkeys(one) for one in (keys.senders(0), keys.learners, keys.seen)]
            return (
                all(refused.get(reason.value) for reason in (RefusalReason.BAD_MESSAGE, RefusalReason.BAD_PAYLOAD))
                and not client.exists(key)
                and not client.xlen(keys.deltas(0, "forger"))
                and not any(len(name) > 100 for _, told in client.xrange(keys.arrivals(0)) for name in told.values())
                and not any(len(name) > 100 or name == report.encode() for names in shared for name in names)
            )

        await run.until(gone, "it is gone")
        await run.until_risen(1)
        status = await read_status(run.bus, run.clock)
        assert [one["id"] for one in status["learners"]] == ["l0", "l1"]
        assert not run.syncer.done()


async def _then(first: Awaitable[Any], more: Callable[[Any], Awaitable[None]]) -> None:
    await more(await first)


# --- a server without room -----------------------------------------------------------------------------


def used_bytes(run: RealRun) -> int:
    return int(RedisBackdoor(RUN, run.server.url).client.info()["used_memory"])


async def held_up(run: RealRun, seconds: float) -> None:
    """Nothing can be written for a while: learners train on, and what they hold stays bounded."""
    steps = [learner.rounds.steps + 20 for learner in run.learners]
    await asyncio.sleep(seconds)

    async def trained() -> bool:
        return all(learner.rounds.steps >= goal for learner, goal in zip(run.learners, steps, strict=True))

    await run.until(trained, "each learner has made 20 steps")
    for learner in run.learners:
        assert len(learner.exchange.publishing._headers) <= 2 * run.spec.sync.fragments
        assert learner.exchange.publishing._uploads[0].qsize() <= 2 * run.spec.sync.fragments


async def test_a_server_whose_memory_is_full_stops_no_learner_and_says_what_to_do(
    redis_binary: Path | None, told: list[dict[str, Any]]
) -> None:
    """The status names it as well; given memory, all goes on by itself."""
    async with real_run(redis_binary, 3) as run:
        client = RedisBackdoor(RUN, run.server.url).client
        before = used_bytes(run)
        client.config_set("maxmemory", before // 2)
        await held_up(run, 4.0)
        assert used_bytes(run) < before + 2**20
        full = [line for line in told if line["event"] == "bus_full"]
        assert full
        assert all("raise its maxmemory" in line["error"] for line in full)
        status = await read_status(run.bus, run.clock)
        assert any("raise maxmemory to" in warning for warning in status["warnings"])
        client.config_set("maxmemory", 0)
        await run.until_risen()


async def test_a_small_maxmemory_bounds_what_the_run_takes(redis_binary: Path | None) -> None:
    """Merges go on in it for as long as it holds the globals, and come back when it does not for a while."""
    async with real_run(redis_binary, 3) as run:
        client = RedisBackdoor(RUN, run.server.url).client
        client.config_set("maxmemory", used_bytes(run) + 4 * 2**20)
        limit = int(client.config_get("maxmemory")["maxmemory"])
        ballast = 0
        for _ in range(3):
            while True:  # somebody else fills it to the brim
                try:
                    client.set(f"ballast:{ballast}", bytes(64 * 1024))
                    ballast += 1
                except OutOfMemoryError:
                    break
            await held_up(run, 1.5)
            assert used_bytes(run) < limit + 2**20
            for n in range(ballast):
                client.delete(f"ballast:{n}")
            ballast = 0
            await run.until_risen()


async def test_a_server_that_refuses_every_write_is_waited_for(
    redis_binary: Path | None, told: list[dict[str, Any]]
) -> None:
    """As with a full disk: leases lapse, nothing is said or merged, learners train on; then all goes on by itself."""
    async with real_run(redis_binary, 3) as run:
        client = RedisBackdoor(RUN, run.server.url).client
        client.config_set("min-replicas-to-write", 1)
        with pytest.raises(BusFull, match="min-replicas-to-write"):
            await run.bus.offer(await Forger(run, run.buses[0]).header())
        was = [head.version for head in await run.heads()]
        await held_up(run, 4.0)
        now = [head.version for head in await run.heads()]
        assert all(b <= a + 1 for a, b in zip(was, now, strict=True))
        assert any(line["event"] == "bus_full" and "lower its min-replicas-to-write" in line["error"] for line in told)
        client.config_set("min-replicas-to-write", 0)
        await run.until_risen()


async def test_a_disk_that_cannot_be_written_is_named_in_the_status(redis_binary: Path | None) -> None:
    """Redis refuses every write once saving fails; training goes on, and so do merges when it can save again."""
    async with real_run(redis_binary, 2) as run:
        client = RedisBackdoor(RUN, run.server.url).client
        in_the_way = Path(client.config_get("dir")["dir"]) / "dump.rdb"
        in_the_way.mkdir()  # a folder, which no file can take the place of
        client.config_set("save", "1 1")

        async def refuses() -> bool:
            return client.info()["rdb_last_bgsave_status"] == "err"

        await run.until(refuses, "saving has failed")
        await held_up(run, 2.0)
        status = await read_status(run.bus, run.clock)
        assert any("cannot write to its disk" in warning for warning in status["warnings"])
        with pytest.raises(BusFull, match="free disk space where it keeps its data"):
            await run.bus.offer(await Forger(run, run.buses[0]).header())
        in_the_way.rmdir()
        client.config_set("save", "")
        client.bgsave()
        await run.until_risen()


async def test_a_slow_reader_holds_no_more_than_one_replaced_global(redis_binary: Path | None) -> None:
    """It takes a second for each piece while the others merge: the server's memory stays what it was."""
    async with real_run(redis_binary, 3) as run:
        slow = run.learners[2].link
        read = slow.read_chunks

        async def slowly(*args: Any, **more: Any) -> list[bytes]:
            await asyncio.sleep(1.0)
            return await read(*args, **more)

        slow.read_chunks = slowly  # type: ignore[method-assign]
        await run.until_risen(3)
        before = used_bytes(run)
        await run.until_risen(10)
        client = RedisBackdoor(RUN, run.server.url).client
        buffers = sum(int(one["omem"]) for one in client.client_list())
        assert buffers < 2**20
        assert used_bytes(run) < before + 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("behind_s", [7200, -7200])
async def test_times_are_the_servers_whatever_the_clock_of_a_machine_says(
    redis_binary: Path | None, behind_s: int, popen: Callable[..., Any]
) -> None:
    """Of a syncer's machine: a run of some seconds is no two hours old, and no delta is awaited until tomorrow."""
    code = f"""
import sys, time
real = time.time
time.time = lambda: real() - {behind_s}
from diloco.__main__ import main
sys.exit(main())
"""
    with EmbeddedRedis(binary=redis_binary) as server:
        run = RealRun(server, spec_of(sync_spec(tokens=10**9, quorum=2, fragments=2, codec="fp32")))
        run.bus = await run.connect()
        named = ["--run", RUN, "--redis-url", server.url, "--http-port", "0"]
        began = time.time()
        popen([sys.executable, "-c", code, "syncer", *named])
        await run.start_learners(2)
        try:
            await run.until_risen(4)
            status, state = await read_status(run.bus, run.bus.clock), await run.bus.read_state()
            events = [one for _, one in await run.bus.read_events()]
            tape = [one.unix_s for one in await run.tape()]
        finally:
            await end(*run.learners)
            for bus in run.buses:
                await bus.close()
        assert 0 < status["elapsed_s"] < time.time() - began + 1
        for unix_s in (state.started_unix_s, *tape, *(one.unix_s for one in events)):
            assert began - 1 < unix_s < time.time() + 1
