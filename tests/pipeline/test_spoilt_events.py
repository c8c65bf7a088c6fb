"""Any learner may write to the run's events: what it spoils there blinds nobody, and keeps nobody out."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from diloco.pipeline.bus.ports import START, Bus
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.bus.schema import EVENTS_CAP
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.fragment import WindowChanged
from diloco.pipeline.messages.run import Event
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.view.status_reader import read_status
from diloco.workers.exchange.joining import Joining
from tests.backdoor import RedisBackdoor
from tests.system.test_hostile_redis import RUN, real_run

pytestmark = pytest.mark.redis
LAST_ID = "18446744073709551615-18446744073709551615"


def event(who: str) -> Event:
    return Event(name="learner_joined", who=who, detail="", unix_s=1.0)


@pytest.fixture
async def spoilt(redis_server: str) -> AsyncIterator[tuple[Bus, RedisBackdoor]]:
    run = f"r-{secrets.token_hex(3)}"
    backdoor = RedisBackdoor(run, redis_server)
    async with open_bus(redis_server, run) as bus:
        yield bus, backdoor
    backdoor.free_memory()
    backdoor.client.close()


async def test_an_event_that_cannot_be_read_is_as_good_as_none(spoilt: tuple[Bus, RedisBackdoor]) -> None:
    """Also where all that one reading brings is such; the status is there as ever."""
    bus, backdoor = spoilt
    await bus.add_event(event("one"))
    for field in ("e", "m", "e", "m", "e"):
        backdoor.client.xadd(bus.keys.events, {field: "garbage"})
    await bus.add_event(event("two"))
    found = await bus.read_events(limit=2)
    assert [one.who for _, one in found] == ["one"]
    assert [one.who for _, one in await bus.read_events(found[-1][0], limit=2)] == ["two"]
    assert (await read_status(bus, LoopClock()))["phase"] == "waiting"


async def test_an_unreadable_tape_entry_is_logged_once_and_skipped(spoilt: tuple[Bus, RedisBackdoor]) -> None:
    """Also where all that one reading brings is such, and before the first readable one of a reading that waits."""
    bus, backdoor = spoilt
    key, record = bus.keys.tape(0), WindowChanged(fragment=0, version=0, attempt=0, reason="", unix_s=0.0)
    ids = [backdoor.client.xadd(key, {"bogus": "x"}).decode() for _ in range(3)]
    with capture_logs() as lines:
        read = asyncio.ensure_future(bus.read_tape({0: START}, 5.0, limit=2))
        await asyncio.sleep(0.2)
        assert not read.done()
        backdoor.client.xadd(key, {"r": encode(record)})
        assert [entry.record for entry in await read] == [record]
        assert [entry.record for entry in await bus.read_tape({0: START})] == [record]
    assert [(line["event"], line["key"], line["entry"]) for line in lines] == [
        ("tape_entry_skipped", key, at) for at in ids
    ]
    assert all(f"XDEL '{key}' {at}" in line["detail"] for line, at in zip(lines, ids, strict=True))


async def test_who_joins_does_not_need_the_events(spoilt: tuple[Bus, RedisBackdoor]) -> None:
    """A stream whose last possible id is taken takes no more; an outage is waited for as ever."""
    bus, backdoor = spoilt
    backdoor.client.xadd(bus.keys.events, {"x": "x"}, id=LAST_ID)
    joining = object.__new__(Joining)
    joining._bus, joining._log = bus, structlog.get_logger()
    with capture_logs() as lines:
        await joining._tell(event("anna"))
    assert [(line["event"], line["name"]) for line in lines] == [("event_not_told", "learner_joined")]
    await bus.close()
    with pytest.raises(BusUnavailable):
        await joining._tell(event("anna"))


async def test_events_by_the_ten_thousand_are_gone_once_a_syncer_has_looked(redis_binary: Path | None) -> None:
    """Whoever asks for the status reads all that are there: their number is bounded without an honest event."""
    async with real_run(redis_binary, 2) as run:
        client, key = RedisBackdoor(RUN, run.server.url).client, run.bus.keys.events
        for _ in range(30):
            pipeline = client.pipeline(transaction=False)
            for _ in range(1000):
                pipeline.xadd(key, {"m": "garbage"})
            pipeline.execute()

        async def bounded() -> bool:
            return bool(client.xlen(key) <= EVENTS_CAP + 1000)

        await run.until(bounded, "the events are as few as ever")
