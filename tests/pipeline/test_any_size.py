"""What one learner writes is of any size, with a user of its own: it holds up neither Redis nor anybody. Redis 7."""

import asyncio
import random
from base64 import b64encode
from collections.abc import AsyncIterator

import pytest
import redis.exceptions as rx

from diloco.pipeline.bus import stored_reports
from diloco.pipeline.bus.ports import MomentsBoard, Offered
from diloco.pipeline.bus.redis import calls
from diloco.pipeline.bus.redis.calls import script
from diloco.pipeline.bus.redis_streams import RedisBus
from diloco.pipeline.bus.schema import NO_SHARD, offer_id, parse_offer_id
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.run import MAX_CURVE, Event, LearnerReport
from diloco.pipeline.messages.shards import Shard
from diloco.pipeline.messages.wire import MAX_FRAGMENTS
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.transfer.payloads import pull
from tests import fuzz, samples
from tests.pipeline.conftest import Server

pytestmark = pytest.mark.redis

MB = 2**20


def empties(count: int) -> bytes:
    """An array of empty arrays: a byte each on the wire, some sixty where it is unpacked."""
    return b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count


@pytest.fixture
async def syncer(server: Server) -> AsyncIterator[RedisBus]:
    bus = await server.bus("syncer")
    bus.use_spec(samples.spec())
    yield bus
    await bus.close()


@pytest.fixture
async def learner(server: Server, syncer: RedisBus) -> AsyncIterator[RedisBus]:
    """One that behaves."""
    bus = await server.bus("learner-l1")
    bus.use_spec(samples.spec())
    yield bus
    await bus.close()


def lua_bytes(server: Server) -> int:
    return int(server.admin.info("memory")["used_memory_lua"])


def sent_bytes(server: Server) -> int:
    """To all clients."""
    return int(server.admin.info("stats")["total_net_output_bytes"])


async def test_no_report_that_another_planted_is_unpacked_in_any_size(server: Server, learner: RedisBus) -> None:
    """Nothing could break in: a few megabytes hold up Redis for seconds, and half a gigabyte is its end."""
    hostile, before = server.raw("learner-l0"), lua_bytes(server)
    hostile.hset(server.keys.learners, "l1/" + "0" * 8, empties(2 * MB))
    hostile.close()
    await learner.write_report(samples.report("l1", step=5))
    assert lua_bytes(server) < before + 20 * MB
    assert [one.report.step for one in await learner.read_reports()] == [5]


async def test_whatever_stands_in_the_place_of_a_report_gives_way_to_the_next_one(
    server: Server, learner: RedisBus
) -> None:
    chance, name = random.Random(1), "l1/" + "0" * 8
    stored = encode(samples.report("l1", number=70_000))
    made = [data for _, data in fuzz.bombs()] + [fuzz.changed(chance, stored) for _ in range(150)]
    for number, data in enumerate(made):
        server.backdoor.hset(server.keys.learners, name, data)
        await learner.write_report(report := samples.report("l1", number=number))
        assert server.admin.hget(server.keys.learners, name) == encode(report)


@pytest.mark.parametrize("owners", ["commit", "refuse", "republish"])
async def test_no_learner_has_fields_of_an_owners_write_unpacked(server: Server, syncer: RedisBus, owners: str) -> None:
    """With keys of its own in the place of lease, head and tape it is stopped as early."""
    keys, before = server.keys, lua_bytes(server)
    hostile = server.raw("learner-l0")
    with pytest.raises(rx.ResponseError, match=r"ACL failure in script|can.t run this command"):
        hostile.evalsha(script(owners).sha, 3, keys.holder("l0"), keys.learners, keys.deltas(0, "l0"), empties(2 * MB))
    hostile.close()
    assert lua_bytes(server) < before + 20 * MB


def test_the_largest_report_that_a_learner_can_make_is_within_its_bound() -> None:
    text = "\N{GRINNING FACE}" * 512
    most = samples.report(
        "l" * 64,
        incarnation="0" * 32,
        versions=(2**48,) * MAX_FRAGMENTS,
        host=text,
        device=text,
        overwritten=2**110,
        published=2**110,
        **dict.fromkeys(("step", "tokens", "number", "outages", "generation"), 2**62),
    )
    assert 10_000 < len(encode(most)) < LearnerReport.max_bytes - 1000


async def test_no_more_of_a_payload_is_read_than_its_chunks_can_have(server: Server, syncer: RedisBus) -> None:
    """A syncer would hold all of it before it finds the first chunk too large, and begin again after each restart."""
    key = server.keys.delta_payload(0, "l0", "0" * 8, 0)
    large, empty = server.keys.delta_payload(0, "l0", "0" * 8, 1), server.keys.delta_payload(0, "l0", "0" * 8, 2)
    hostile = server.raw("learner-l0")
    for index in range(4):
        hostile.xadd(key, {"c": bytes(5 * MB)}, f"{index + 1}-0")
    hostile.xadd(large, {"c": bytes(20 * MB)}, "1-0")
    hostile.execute_command("XADD", empty, "1-0", *[""] * 100_000)
    hostile.close()
    sent = sent_bytes(server)
    for one in (key, large, empty):
        with pytest.raises(BadPayload):
            await pull(syncer, one, 600, "fp32", 1024)
    assert sent_bytes(server) < sent + 10 * MB


async def test_names_and_arrivals_of_any_size_keep_no_owner_from_the_next_header_and_go(
    server: Server, syncer: RedisBus, learner: RedisBus
) -> None:
    """Each read of headers would take all of them, for as long as the run lasts."""
    keys, viewer = server.keys, await server.bus("viewer")
    hostile = server.raw("learner-l0")
    hostile.hsetnx(keys.senders(0), b"x" * 5 * MB, "")
    for name in ("no name", "x" * 65, b"\xff"):
        hostile.hsetnx(keys.senders(0), name, "")
    hostile.hsetnx(keys.senders(0), "l0", bytes(5 * MB))
    first = await learner.offer(samples.header("l1"))
    hostile.xadd(keys.arrivals(0), {"l": bytes(5 * MB)})
    for bus in (viewer, syncer):
        assert [one.entry_id for one in await bus.read_offers(0)] == [first]
    assert server.admin.hkeys(keys.senders(0)) == [b"l1"]
    waiting = asyncio.create_task(syncer.read_offers(0, {"l1": "9999999999999-0"}, block_s=10))
    while server.admin.xlen(keys.arrivals(0)):  # whoever waits for headers takes off what is none
        await asyncio.sleep(0.01)
    hostile.xadd(keys.arrivals(0), {"l": bytes(20 * MB)})
    hostile.close()
    l2 = await server.bus("learner")
    second = await l2.offer(samples.header("l2"))
    assert [one.entry_id for one in await waiting] == [second]
    sent = sent_bytes(server)
    assert [one.entry_id for one in await syncer.read_offers(0, block_s=1)] == [first, second]
    assert sent_bytes(server) < sent + 2 * MB
    for bus in (viewer, l2):
        await bus.close()


async def test_headers_of_any_size_are_refused_as_such_and_hide_no_others(
    server: Server, syncer: RedisBus, learner: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_READ_BYTES", MB)
    keys, hostile = server.keys, server.raw("learner-l0")
    hostile.hsetnx(keys.senders(0), "l0", "")
    large = [hostile.xadd(keys.deltas(0, "l0"), {"h": bytes(5 * MB)}).decode() for _ in range(5)]
    hostile.xadd(keys.deltas(0, "l0"), {str(n): "" for n in range(100_000)})
    hostile.close()
    entries = [await learner.offer(samples.header("l1", serial=serial)) for serial in range(2)]
    sent = sent_bytes(server)
    found, after = list[Offered](), dict[str, str]()
    while some := await syncer.read_offers(0, after):
        assert found or {parse_offer_id(one.entry_id)[0] for one in some} == {"l0", "l1"}
        found += some
        after |= dict(parse_offer_id(one.entry_id) for one in some)
    assert sent_bytes(server) < sent + 10 * MB
    assert [one.entry_id for one in found if one.header] == entries
    refused = {one.entry_id: one.problem for one in found if not one.header}
    assert len(refused) == 6
    assert all("exceeds the limit of 4096" in refused[offer_id("l0", at)] for at in large)


async def test_reports_of_any_size_hide_no_others_and_go(
    server: Server, syncer: RedisBus, learner: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the times at which they came, and what is not too large to be read and larger than a report."""
    monkeypatch.setattr(stored_reports, "MAX_REPORTS", 200)
    keys, viewer, name = server.keys, await server.bus("viewer"), b"l0/" + b"0" * 8
    viewer.use_spec(samples.spec())
    await learner.write_report(samples.report("l1"))
    hostile = server.raw("learner-l0")
    for number in range(2):
        server.admin.delete(keys.seen)
        await learner.write_report(samples.report("l1", number=number + 1))
        hostile.hset(keys.learners, name, bytes((8 if number == 0 else 0) * MB + 70_000))
        hostile.hset(keys.learners, b"x" * (100 if number else 5 * MB), b"x")
        hostile.hset(keys.seen, name, b"9" * (100 if number else 5 * MB))
        for bus in (viewer, learner, syncer):
            sent = sent_bytes(server)
            assert [one.report.learner for one in await bus.read_reports()] == ["l1"]
            assert sent_bytes(server) < sent + 5 * MB
        for key in (keys.learners, keys.seen):
            assert server.admin.hkeys(key) == [b"l1/" + b"0" * 8]
    hostile.close()
    await viewer.close()


@pytest.mark.parametrize("fragments", [1, 8, MAX_FRAGMENTS])
def test_as_many_reports_as_are_allowed_fit_though_all_are_long(fragments: int) -> None:
    """With a whole curve, and with names and numbers that are longer than in any run."""
    made = samples.report(
        **{"learner": "l" * 64, "incarnation": "0" * 32, "versions": (2**48,) * fragments},
        **dict.fromkeys(("step", "tokens", "number", "outages", "generation"), 2**62),
        **{"overwritten": 2**100, "published": 2**100, "host": "h" * 64, "device": "d" * 64, "moments": "m" * 16},
        **{"curve_s": 64.0, "curve": b64encode(bytes(4 * MAX_CURVE)).decode(), "part_unix_s": 1e9},
    )
    blob = encode(made)
    reports = {f"{n:>64}/{n:032}".encode(): blob for n in range(stored_reports.MAX_REPORTS)}
    assert not stored_reports.have_surplus(reports, dict.fromkeys(reports, b"1" * 13), fragments)


async def test_the_most_that_one_learner_can_report_leaves_room_for_others(
    server: Server, syncer: RedisBus, learner: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its reports is too large, nor are they too many: all together they are."""
    monkeypatch.setattr(stored_reports, "MAX_REPORTS", 200)
    monkeypatch.setattr(stored_reports, "REPORTS_LEFT", 80)
    keys, hostile = server.keys, server.raw("learner-l0")
    await learner.write_report(samples.report("l1", tokens=0))
    for number in range(100):
        made = samples.report("l0", tokens=2**62, incarnation=f"{number:08}", versions=(2**48,) * MAX_FRAGMENTS)
        hostile.hset(keys.learners, f"l0/{number:08}", encode(made))
    hostile.close()
    for _ in range(2):
        found = await syncer.read_reports()
        assert [one.report.tokens for one in found if one.report.learner == "l1"] == [0]
        assert 2 <= len(found) <= 20
        assert server.admin.hlen(keys.learners) == len(found)


async def test_what_else_learners_share_is_read_within_its_bounds(
    server: Server, syncer: RedisBus, learner: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, the word that version 0 is there, moments, shards."""
    monkeypatch.setattr(calls, "MAX_READ_BYTES", MB)
    keys, hostile, viewer = server.keys, server.raw("learner-l0"), await server.bus("viewer")
    await learner.fill_shards(0, [Shard(epoch=0, index=0, start=0, stop=8)])
    hostile.xadd(keys.shards, {"s": bytes(5 * MB)})
    hostile.hset(keys.shard_positions, b"x" * 5 * MB, bytes(5 * MB))
    hostile.xadd(keys.events, {"m": bytes(5 * MB)})
    await learner.add_event(event := Event(name="learner_joined", who="l1", detail="", unix_s=0.0))
    hostile.xadd(keys.events, {"m": bytes(5 * MB)})
    for key in (keys.initial, keys.moments_wish, keys.moments_claim):
        hostile.set(key, bytes(5 * MB))
    hostile.set(keys.moments_offer, bytes(17 * MB))
    hostile.close()
    sent = sent_bytes(server)
    assert [one for _, one in await viewer.read_events()] == [event]
    assert await syncer.read_initial() is None
    assert await learner.read_moments() == MomentsBoard(wish=None, claimed=True, offer=None)
    assert await learner.claim_shard("l1.00", 10)
    found = await learner.claim_shard("l1.01", 10)
    assert found is not None
    assert found.shard == NO_SHARD
    assert len((await syncer.read_shards()).open) == 1
    assert sent_bytes(server) < sent + 10 * MB
    await viewer.close()
