"""What one learner writes is of any size, with a user of its own: it holds up neither Redis nor anybody. Redis 7."""

import random
from collections.abc import AsyncIterator

import pytest
import redis.exceptions as rx

from diloco.pipeline.bus.redis.calls import script
from diloco.pipeline.bus.redis_streams import RedisBus
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.run import LearnerReport
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.transfer.payloads import pull
from tests import fuzz, samples
from tests.pipeline.test_acl import Server, server  # noqa: F401  # a fixture

pytestmark = pytest.mark.redis

MB = 2**20


def empties(count: int) -> bytes:
    """An array of empty arrays: a byte each on the wire, some sixty where it is unpacked."""
    return b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count


@pytest.fixture
async def syncer(server: Server) -> AsyncIterator[RedisBus]:  # noqa: F811
    bus = await server.bus("syncer")
    bus.use_spec(samples.spec())
    yield bus
    await bus.close()


@pytest.fixture
async def learner(server: Server, syncer: RedisBus) -> AsyncIterator[RedisBus]:  # noqa: F811
    """One that behaves."""
    bus = await server.bus("learner-l1")
    bus.use_spec(samples.spec())
    yield bus
    await bus.close()


def lua_bytes(server: Server) -> int:  # noqa: F811
    return int(server.admin.info("memory")["used_memory_lua"])


async def test_no_report_that_another_planted_is_unpacked_in_any_size(
    server: Server,  # noqa: F811
    learner: RedisBus,
) -> None:
    """Nothing could break in: a few megabytes hold up Redis for seconds, and half a gigabyte is its end."""
    hostile, before = server.raw("learner-l0"), lua_bytes(server)
    hostile.hset(server.keys.learners, "l1/" + "0" * 8, empties(2 * MB))
    hostile.close()
    await learner.write_report(samples.report("l1", step=5))
    assert lua_bytes(server) < before + 20 * MB
    assert [one.report.step for one in await learner.read_reports()] == [5]


async def test_whatever_stands_in_the_place_of_a_report_gives_way_to_the_next_one(
    server: Server,  # noqa: F811
    learner: RedisBus,
) -> None:
    chance, name = random.Random(1), "l1/" + "0" * 8
    stored = encode(samples.report("l1", number=70_000))
    made = [data for _, data in fuzz.bombs()] + [fuzz.changed(chance, stored) for _ in range(300)]
    for number, data in enumerate(made):
        server.backdoor.hset(server.keys.learners, name, data)
        await learner.write_report(report := samples.report("l1", number=number))
        assert server.admin.hget(server.keys.learners, name) == encode(report)


@pytest.mark.parametrize("owners", ["commit", "refuse", "republish"])
async def test_no_learner_has_fields_of_an_owners_write_unpacked(
    server: Server,  # noqa: F811
    syncer: RedisBus,
    owners: str,
) -> None:
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
        versions=(2**48,) * 4096,
        host=text,
        device=text,
        overwritten=2**110,
        published=2**110,
        **dict.fromkeys(("step", "tokens", "number", "outages", "generation"), 2**62),
    )
    assert 40_000 < len(encode(most)) < LearnerReport.max_bytes - 1000


async def test_no_more_of_a_payload_is_read_than_its_chunks_can_have(
    server: Server,  # noqa: F811
    syncer: RedisBus,
) -> None:
    """A syncer would hold all of it before it finds the first chunk too large, and begin again after each restart."""
    key = server.keys.delta_payload(0, "l0", "0" * 8, 0)
    large, empty = server.keys.delta_payload(0, "l0", "0" * 8, 1), server.keys.delta_payload(0, "l0", "0" * 8, 2)
    hostile = server.raw("learner-l0")
    for index in range(4):
        hostile.xadd(key, {"c": bytes(8 * MB)}, f"{index + 1}-0")
    hostile.xadd(large, {"c": bytes(40 * MB)}, "1-0")
    hostile.execute_command("XADD", empty, "1-0", *[""] * 200_000)
    hostile.close()
    sent = server.admin.info("stats")["total_net_output_bytes"]
    for one in (key, large, empty):
        with pytest.raises(BadPayload):
            await pull(syncer, one, 600, "fp32", 1024)
    assert server.admin.info("stats")["total_net_output_bytes"] < sent + 10 * MB
