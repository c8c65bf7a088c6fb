"""Scripts that a server loses: who puts them back, and what is said where nobody does. Needs Redis 7, for its users."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import structlog

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.redis import calls
from diloco.pipeline.bus.redis.calls import script
from diloco.pipeline.bus.redis_streams import RedisBus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import ScriptsMissing
from diloco.pipeline.messages.run import SCRIPTS_FOUND, SCRIPTS_MISSING, Event, SeenReport
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.view import trouble
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.status_reader import read_status
from diloco.pipeline.view.trouble import EventFacts
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving import service
from diloco.syncer.times import SyncerTimes
from diloco.workers.exchange import redis_access
from tests import HANGING_S, samples
from tests.pipeline.conftest import Server, as_user
from tests.pipeline.test_commit_cases import NONCE

SAID = "wait for a syncer to load them, which takes seconds, as after each restart of Redis; if no syncer is running"


@pytest.fixture
async def syncer(server: Server) -> AsyncIterator[RedisBus]:
    bus = await server.bus("syncer")
    yield bus
    await bus.close()


@pytest.mark.redis
async def test_a_syncer_puts_back_scripts_that_no_call_of_its_own_misses(
    server: Server, syncer: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner may call one that a syncer never does, after a restart of Redis."""
    monkeypatch.setattr(service, "TIMES", SyncerTimes(scripts_s=0.05))
    server.admin.script_flush()
    for name, one in calls.scripts().items():
        if name != "offer":
            server.admin.script_load(one.text)
    assert await syncer.announce_syncer(NONCE, "s0", 60) == (NONCE,)
    learner = await server.bus("learner-l0")
    with pytest.raises(ScriptsMissing, match=SAID):
        await learner.offer(samples.header("l0"))
    keeping = asyncio.create_task(service._keep_scripts(syncer.ensure_scripts, Metrics()))
    async with asyncio.timeout(HANGING_S):
        while not all(server.admin.script_exists(script("offer").sha)):
            await asyncio.sleep(0.02)
    assert await learner.offer(samples.header("l0"))
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await learner.close()


@pytest.mark.redis
async def test_who_looks_on_needs_no_script_that_redis_has_lost(
    server: Server, syncer: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of Redis, once a run is over: nobody is there who may load scripts."""
    await syncer.propose_spec(encode(samples.spec()))
    assert await syncer.announce_syncer(NONCE, "s0", 60) == (NONCE,)
    await syncer.put_back_report(SeenReport(report=samples.report(), age_s=60.0))
    learner = await server.bus("learner-l0")
    offered = await learner.offer(samples.header("l0"))
    await learner.close()
    server.admin.script_flush()
    viewer = await server.bus("viewer")
    status = await read_status(viewer, LoopClock())
    assert ([one["id"] for one in status["syncers"]], len(status["learners"])) == (["s0"], 1)
    assert (await read_ledger_inputs(viewer, 1, 5.0)).reports == (samples.report(),)
    assert 60 <= (await viewer.read_reports())[0].age_s < 60 + HANGING_S
    monkeypatch.setattr(schema, "MAX_NEW_SENDERS", 0)
    viewer.use_spec(samples.spec())
    assert [one.entry_id for one in await viewer.read_offers(0)] == [offered]
    assert not any(server.admin.script_exists(*(one.sha for one in calls.scripts().values())))
    await viewer.close()


@pytest.mark.redis
async def test_a_learner_whose_scripts_nobody_loads_waits_and_says_so_in_the_status_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not joined meanwhile, so nobody waits for it. It goes on by itself once a syncer was there."""
    server.admin.script_flush()
    with structlog.testing.capture_logs() as said:
        reached = asyncio.create_task(redis_access.reach(as_user(server.url, "learner-l0"), server.run, "l0"))
        viewer = await server.bus("viewer")
        async with asyncio.timeout(HANGING_S):
            while not await viewer.read_events():
                await asyncio.sleep(0.02)
        assert not reached.done()
        reader = Collector(viewer, LoopClock())._reader
        for status in (await read_status(viewer, LoopClock()), (await reader.poll()).status):
            (warning,) = [one for one in status["warnings"] if "scripts" in one]
            assert "that l0 needs" in warning
            assert "start a syncer" in warning
        syncer = await server.bus("syncer")
        learner, scripts = await asyncio.wait_for(reached, HANGING_S)
    assert {one["event"] for one in said} == {"scripts_missing", "scripts_found"}
    assert all(re.search(SAID, one["error"]) for one in said if one["event"] == "scripts_missing")
    for status in (await read_status(viewer, LoopClock()), (await reader.poll()).status):
        assert not [one for one in status["warnings"] if "scripts" in one]
    assert await learner.write_report(samples.report()) is None
    server.admin.script_flush()  # while it trains
    for _ in range(2):
        with pytest.raises(ScriptsMissing):
            await scripts.look()
    await syncer.ensure_scripts()
    await scripts.look()
    assert [one.name for _, one in await viewer.read_events()] == [SCRIPTS_MISSING, SCRIPTS_FOUND] * 2
    for bus in (learner, viewer, syncer):
        await bus.close()


def test_what_a_learner_said_of_its_scripts_holds_until_anything_else_befalls_it_or_an_hour_has_passed() -> None:
    def event(name: str, who: str, unix_s: float) -> Event:
        return Event(name=name, who=who, detail="", unix_s=unix_s)

    found = EventFacts().after([event(SCRIPTS_MISSING, who, 100.0) for who in ("l0", "l1", "l2")], 100.0)
    assert trouble.without_scripts(found.scriptless).count("l0, l1, l2") == 1
    found = found.after([event("learner_killed", "l1", 200.0), event(SCRIPTS_MISSING, "l2", 200.0)], 200.0)
    assert set(found.scriptless) == {"l0", "l2"}
    assert set(found.after([], 3750.0).scriptless) == {"l2"}
    assert trouble.without_scripts({}) == ""
    many = [event(SCRIPTS_MISSING, f"l{i}", 0.0) for i in range(2 * trouble.MAX_TRACKED)]
    assert len(EventFacts().after(many, 0.0).scriptless) == trouble.MAX_TRACKED
