"""Version 0 of a large model: its upload and its copy take longer than what they rest on lives by itself."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.errors import BusFull, BusUnavailable
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.wire import MAX_FRAGMENTS
from diloco.workers.exchange import carrier, first_version
from diloco.workers.times import LearnerTimes
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, end, sync_spec

FRAGMENTS = 8
TIMES = LearnerTimes(initial_claim_ttl_s=1.0, payload_ttl_s=6.0)
"""Of what nobody prolongs; in production ten seconds and ten minutes."""


@pytest.fixture(autouse=True)
def short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (first_version, carrier):
        monkeypatch.setattr(module, "TIMES", TIMES)


def slow(monkeypatch: pytest.MonkeyPatch, upload_s: float = 0.0, copy_s: float = 0.0) -> list[str]:
    """Each fragment takes so long; returns the keys to which learners write initial parameters, as they do."""
    written, write, commit = list[str](), MemoryBus.write_chunks, MemoryBus.commit

    async def write_chunks(self: MemoryBus, key: str, *args: Any) -> None:
        if ":initial:" in key:
            await asyncio.sleep(upload_s)
            written.append(key)
        await write(self, key, *args)

    async def slowly(self: MemoryBus, made: Commit) -> None:
        await asyncio.sleep(copy_s * (made.record.version == 0))
        await commit(self, made)

    monkeypatch.setattr(MemoryBus, "write_chunks", write_chunks)
    monkeypatch.setattr(MemoryBus, "commit", slowly)
    return written


async def begun(learners: int) -> None:
    """Until a run of so many learners has trained a round."""
    world = VirtualRun(sync_spec(fragments=FRAGMENTS, tokens=10**9))
    world.start_syncer()
    party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(learners)]
    await world.until_version(1, 4 * FRAGMENTS * TIMES.payload_ttl_s)
    await end(*party)


@in_virtual_time
async def test_one_learner_uploads_however_long_a_fragment_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim does not lapse meanwhile: the bus never has the parameters twice."""
    written = slow(monkeypatch, upload_s=2.5 * TIMES.initial_claim_ttl_s)
    await begun(learners=3)
    assert len(written) == FRAGMENTS


class FarBus(MemoryBus):
    """Each call takes a while."""

    async def _turn(self) -> None:
        await asyncio.sleep(0.02)
        await super()._turn()


class FarLearner(VirtualLearner):
    def connect(self) -> FarBus:
        return FarBus(RUN, self.world.clock, self.world.store)


@in_virtual_time
async def test_as_many_fragments_as_a_run_may_have_join_in_a_few_round_trips(no_log_lines: None) -> None:
    """One of each after the other, up and down, would take twenty seconds each way."""
    world = VirtualRun(sync_spec(fragments=MAX_FRAGMENTS, tokens=10**12))
    world.start_syncer()
    learner = FarLearner("l0", world).start()
    async with asyncio.timeout(4):
        while not learner.joined:
            await asyncio.sleep(0.1)
    await end(learner)
    await world.kill_syncer()


@pytest.mark.parametrize(("upload_s", "copy_s"), [(TIMES.payload_ttl_s / 3, 0.0), (0.0, 0.9 * TIMES.payload_ttl_s)])
@in_virtual_time
async def test_what_was_uploaded_first_is_there_until_the_last_is_copied(
    upload_s: float, copy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all of it takes longer than a payload lives that nobody prolongs."""
    written = slow(monkeypatch, upload_s, copy_s)
    await begun(learners=2)
    assert len(written) == FRAGMENTS


@in_virtual_time
async def test_who_lost_its_claim_leaves_the_upload_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus was away for one learner for longer than a claim lasts: it stops, and one whole upload is there."""
    slow(monkeypatch, upload_s=0.4)
    claim, away = MemoryBus.claim_initial, set[str]()

    async def claim_initial(self: MemoryBus, nonce: str, ttl_s: float) -> bool:
        if nonce in away:
            await asyncio.sleep(2 * TIMES.initial_claim_ttl_s)
            away.clear()
            raise BusUnavailable("no answer")
        return await claim(self, nonce, ttl_s)

    monkeypatch.setattr(MemoryBus, "claim_initial", claim_initial)
    world = VirtualRun(sync_spec(fragments=FRAGMENTS, tokens=10**9))
    world.start_syncer()
    first = VirtualLearner("l0", world, 0.1, "a" * 16).start()
    await asyncio.sleep(0.6)
    away.add("a" * 16)
    second = VirtualLearner("l1", world, 0.1, "b" * 16).start()
    await world.until_version(1, 300.0)
    installed = [one.reason for one in await world.tape() if isinstance(one, Committed) and one.version == 0]
    assert installed == ["initial parameters of l1"] * FRAGMENTS
    await end(first, second)


@in_virtual_time
async def test_a_full_bus_is_said_and_tried_again_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has memory: then the run begins."""
    write, full = MemoryBus.write_chunks, [True]

    async def write_chunks(self: MemoryBus, key: str, *args: Any) -> None:
        if full and ":initial:" in key:
            raise BusFull("its memory is full", "raise its maxmemory")
        await write(self, key, *args)

    monkeypatch.setattr(MemoryBus, "write_chunks", write_chunks)
    world = VirtualRun(sync_spec(fragments=FRAGMENTS, tokens=10**9))
    world.start_syncer()
    with capture_logs() as log:
        learner = VirtualLearner("l0", world, 0.1, "a" * 16).start()
        await asyncio.sleep(20.0)
    told = [one["error"] for one in log if one["event"] == "bus_full"]
    assert set(told) == {"its memory is full; raise its maxmemory"}
    assert 5 < len(told) < 20
    full.clear()
    await world.until_version(1, 30.0)
    await end(learner)


@pytest.mark.parametrize("lost", [range(FRAGMENTS), [3], [FRAGMENTS - 1]])
@pytest.mark.parametrize("by_another", [False, True])
@in_virtual_time
async def test_what_a_failover_has_lost_of_an_upload_is_uploaded_again(
    lost: Iterable[int], by_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by whoever claims it first, though the word that it is there has survived on another server."""
    written, claim, refused = slow(monkeypatch, copy_s=0.9 * TIMES.payload_ttl_s), MemoryBus.claim_initial, set[str]()

    async def claim_initial(self: MemoryBus, nonce: str, ttl_s: float) -> bool:
        return nonce not in refused and await claim(self, nonce, ttl_s)

    monkeypatch.setattr(MemoryBus, "claim_initial", claim_initial)
    world = VirtualRun(sync_spec(fragments=FRAGMENTS, tokens=10**9))
    party = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    while (upload := await world.bus.read_initial()) is None:
        await asyncio.sleep(0.01)
    for p in lost:
        world.store.delete(world.bus.keys.initial_payload(p, upload.nonce))
    refused.update([upload.nonce] * by_another)
    world.start_syncer()
    await asyncio.sleep(TIMES.initial_claim_ttl_s)
    refused.clear()
    await world.until_version(1, 4 * FRAGMENTS * TIMES.payload_ttl_s)
    await end(*party)
    times = Counter(int(key.split(":initial:")[1].split(":")[0]) for key in written)
    assert all(times[p] == 2 for p in lost)
    assert set(times.values()) <= {1, 2}


@in_virtual_time
async def test_of_a_lost_upload_only_what_has_no_head_is_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest would lie on the bus for nothing: no commit takes it away."""
    written = slow(monkeypatch, copy_s=0.5 * TIMES.payload_ttl_s)
    world = VirtualRun(sync_spec(fragments=FRAGMENTS, tokens=10**9))
    learner = VirtualLearner("l0", world, 0.1).start()
    world.start_syncer()
    while None in (heads := await world.bus.read_heads([0, 1])):
        await asyncio.sleep(0.05)
    assert all(heads)
    for key in [key for key in world.store.values if ":initial:" in key]:
        world.store.delete(key)
    await world.until_version(1, 4 * FRAGMENTS * TIMES.payload_ttl_s)
    await end(learner)
    assert len(written) < 2 * FRAGMENTS
    assert len(set(written[FRAGMENTS:])) == len(written) - FRAGMENTS


@in_virtual_time
async def test_a_head_that_took_its_upload_with_it_is_not_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the payload is gone by the time a learner looks that saw no head."""
    written = slow(monkeypatch)
    commit, seen = MemoryBus.commit, asyncio.Event()

    async def as_somebody_looks(self: MemoryBus, made: Commit) -> None:
        if made.record.version == 0:
            await seen.wait()
        await commit(self, made)

    count = MemoryBus.count_chunks

    async def count_chunks(self: MemoryBus, key: str) -> int:
        if ":initial:" in key:
            seen.set()
            await asyncio.sleep(0.5)
        return await count(self, key)

    monkeypatch.setattr(MemoryBus, "commit", as_somebody_looks)
    monkeypatch.setattr(MemoryBus, "count_chunks", count_chunks)
    await begun(learners=2)
    assert len(written) == FRAGMENTS
