"""What `ports.Bus` promises, on every adapter. Real time, short windows."""

import asyncio
import inspect
import time
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.bus import schema, stored_reports
from diloco.pipeline.bus.commits import Refusal
from diloco.pipeline.bus.ports import START, Bus
from diloco.pipeline.bus.redis_streams import RedisBus
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.errors import (
    BadMessage,
    BadPayload,
    BusError,
    BusFull,
    BusUnavailable,
    LearnerReplaced,
    PayloadIncomplete,
)
from diloco.pipeline.messages.fragment import WindowChanged
from diloco.pipeline.messages.run import Event, InitialUpload, LearnerReport, Phase, SeenReport
from diloco.pipeline.messages.shards import Shard
from diloco.pipeline.messages.spec import Wanted
from diloco.pipeline.messages.wire import MAX_LEASE_S
from diloco.pipeline.payload.codec import Encoded, Payload, encode
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.memory_fragments import whole_chunk
from diloco_studies.virtual.memory_run import LATE_REPORTS
from tests import HANGING_S, samples
from tests.backdoor import Backdoor
from tests.pipeline.test_commit_cases import commit_on
from tests.samples import IDLE

A, B = "aa" * 8, "bb" * 8

SHARDS = [Shard(epoch=0, index=i, start=i * 10, stop=i * 10 + 10) for i in range(3)]


def event(name: str) -> Event:
    return Event(name=name, who="l0", detail="", unix_s=1.0)


async def vanished(bus: Bus, key: str) -> None:
    """Wait until a payload has expired."""
    deadline = time.monotonic() + HANGING_S
    while await bus.count_chunks(key):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def head_of(bus: Bus, fragment: int = 0) -> bytes:
    """Give a fragment its first head."""
    return await samples.commit(bus, fragment, 0, np.arange(600, dtype=np.float32), nonce=A)


# --- the run as a whole ------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [MemoryBus, RedisBus])
def test_an_adapter_makes_every_call_itself(adapter: type[Bus]) -> None:
    """A protocol's own method does nothing, so none may be left to it."""
    calls = {name for name, _ in inspect.getmembers(Bus, inspect.isfunction) if not name.startswith("_")}
    theirs = {name for name in calls if getattr(adapter, name) in {vars(part).get(name) for part in Bus.__mro__}}
    assert {"commit", "read_chunks", "use_spec"} <= calls
    assert theirs == set()


async def test_the_first_spec_proposed_is_the_one_that_holds(bus: Bus) -> None:
    assert await bus.read_spec() is None
    assert await bus.propose_spec(b"one") == b"one"
    assert await bus.propose_spec(b"two") == b"one"
    assert await bus.read_spec() == b"one"


async def test_what_was_wanted_first_holds_until_it_expires(bus: Bus) -> None:
    """Whoever says the same prolongs it; who says something else is told what holds."""
    first, second = Wanted(sync={"tokens": 7, "outer_lr": 0.7, "method": "paper"}), Wanted(sync={"tokens": 8})
    assert await bus.read_wanted() is None
    assert await bus.offer_wanted(first, 0.3) == first
    assert await bus.offer_wanted(second, 50) == first
    assert await bus.offer_wanted(first, 0.3) == first
    assert await bus.read_wanted() == first
    await asyncio.sleep(0.4)
    assert await bus.read_wanted() is None
    assert await bus.offer_wanted(second, 50) == second


async def test_a_spec_is_replaced_only_if_it_is_the_one_that_was_seen(bus: Bus) -> None:
    assert not await bus.replace_spec(b"two", b"one")
    assert await bus.read_spec() is None
    await bus.propose_spec(b"one")
    assert not await bus.replace_spec(b"two", b"another")
    assert await bus.read_spec() == b"one"
    assert await bus.replace_spec(b"two", b"one")
    assert await bus.read_spec() == b"two"


async def test_a_run_never_moves_back_to_an_earlier_phase(bus: Bus) -> None:
    draining = samples.run_state(phase=Phase.DRAINING)
    assert await bus.read_state() is None
    assert (await bus.write_state(samples.run_state())).phase is Phase.RUNNING
    assert await bus.write_state(draining) == draining
    assert await bus.write_state(samples.run_state(tokens=5)) == draining
    again = samples.run_state(phase=Phase.DRAINING, tokens=7)
    assert await bus.write_state(again) == again
    assert await bus.read_state() == again


async def test_only_a_finished_run_begins_again(bus: Bus) -> None:
    again, closing = samples.run_state(tokens=5), samples.run_state(phase=Phase.CLOSING)
    assert not await bus.begin_again(again)
    assert await bus.read_state() is None
    await bus.write_state(closing)
    assert not await bus.begin_again(again)
    assert await bus.read_state() == closing
    await bus.write_state(samples.run_state(phase=Phase.FINISHED))
    assert await bus.begin_again(again)
    assert await bus.read_state() == again
    assert (await bus.write_state(closing)).phase is Phase.CLOSING  # it moves forward as ever


async def test_a_report_replaces_that_of_the_same_incarnation_and_answers_with_the_state(bus: Bus) -> None:
    assert await bus.write_report(samples.report("l0", step=1)) is None
    state = await bus.write_state(samples.run_state())
    assert await bus.write_report(samples.report("l0", step=2)) == state
    await bus.write_report(samples.report("l0", step=3, incarnation="1" * 8, generation=1))
    last = samples.report("l1", step=4, pull_s=1.5)
    await bus.write_report(last)
    seen = await bus.read_reports()
    assert [(s.report.learner, s.report.step) for s in seen] == [("l0", 2), ("l0", 3), ("l1", 4)]
    assert seen[-1].report == last


async def test_an_older_report_that_arrives_late_replaces_nothing(bus: Bus, backdoor: Backdoor) -> None:
    """As a call does that its sender gave up, and the server served all the same."""
    await bus.write_report(samples.report(step=2, number=2, left=True, curve="AAAAQAAAgD8=" * 50, overwritten=2**109))
    await bus.write_report(samples.report(step=1, number=1))
    assert [s.report.left for s in await bus.read_reports()] == [True]
    await bus.write_report(samples.report(step=3, number=3))
    backdoor.hset(bus.keys.learners, "l1/00000000", b"\xc1")  # one that cannot be read is replaced by any
    await bus.write_report(samples.report("l1", step=4, number=0))
    assert [s.report.step for s in await bus.read_reports()] == [3, 4]


@pytest.mark.parametrize("ahead", [2**61, LATE_REPORTS])
async def test_a_number_that_another_learner_made_up_silences_nobody_for_long(
    bus: Bus, backdoor: Backdoor, ahead: int
) -> None:
    """The hash of reports is everybody's; one call that comes late is some dozens of reports behind, not more."""
    forged = encode(samples.report(number=ahead, left=True))
    backdoor.hset(bus.keys.learners, "l0/" + "0" * 8, forged)
    for number in range(LATE_REPORTS + 1):
        await bus.write_report(samples.report(number=number, step=number))
    assert [(s.report.step, s.report.left) for s in await bus.read_reports()] == [(LATE_REPORTS, False)]


async def test_of_those_with_one_learners_id_the_first_of_the_greatest_generation_is_heard(
    bus: Bus, backdoor: Backdoor
) -> None:
    """Whoever is replaced is told so and changes nothing, also where the bus has forgotten everything meanwhile."""

    def report(incarnation: str, generation: int, learner: str = "l0") -> LearnerReport:
        return samples.report(learner, incarnation=incarnation * 8, generation=generation)

    await bus.write_report(report("a", 1))
    await bus.write_report(report("a", 1))
    await bus.write_report(report("c", 1, "l1"))
    before = backdoor.dump()
    with pytest.raises(LearnerReplaced) as refused:  # began at the same time, and was slower
        await bus.write_report(report("b", 1))
    assert refused.value.generation == 1
    assert backdoor.dump() == before
    await bus.write_report(report("b", 12))
    for late in (report("a", 1), report("c", 9), report("c", 12)):
        with pytest.raises(LearnerReplaced) as refused:
            await bus.write_report(late)
        assert refused.value.generation == 12
    assert [seen.report.incarnation[0] for seen in await bus.read_reports()] == ["a", "b", "c"]
    backdoor.delete(bus.keys.holder("l0"))
    await bus.write_report(report("a", 1))
    await bus.write_report(report("b", 12))
    with pytest.raises(LearnerReplaced):
        await bus.write_report(report("a", 1))


async def test_a_holder_that_cannot_be_read_holds_nothing(bus: Bus, backdoor: Backdoor) -> None:
    backdoor.plant(bus.keys.holder("l0"), "string")
    await bus.write_report(samples.report())
    with pytest.raises(LearnerReplaced):
        await bus.write_report(samples.report(incarnation="1" * 8))


async def test_a_lost_report_that_is_put_back_is_as_old_as_it_was_and_takes_nobodys_place(bus: Bus) -> None:
    """Neither that of the incarnation itself nor that of its successor, which holds the id."""
    old = SeenReport(report=samples.report(step=5, incarnation="a" * 8, generation=1), age_s=60.0)
    newer = SeenReport(report=samples.report(step=7, incarnation="b" * 8, generation=2), age_s=0.0)
    await bus.write_report(newer.report)
    await bus.put_back_report(old)
    await bus.put_back_report(SeenReport(report=samples.report(step=6, incarnation="b" * 8, generation=2), age_s=9.0))
    was, still = sorted(await bus.read_reports(), key=lambda seen: seen.report.incarnation)
    assert (was.report, still.report) == (old.report, newer.report)
    assert 59.9 < was.age_s < 90
    assert still.age_s < 30
    await bus.write_report(newer.report.model_copy(update={"number": 9}))


async def test_reports_age_by_the_servers_clock(bus: Bus) -> None:
    await bus.write_report(samples.report())
    await asyncio.sleep(0.1)
    (seen,) = await bus.read_reports()
    assert 0.09 <= seen.age_s < 30


async def test_a_report_whose_time_is_gone_keeps_the_time_that_was_read_before(bus: Bus, backdoor: Backdoor) -> None:
    """Or is new to who has read none: it is no learner that has been silent since 1970. It grows older as ever."""
    await bus.write_report(samples.report())
    await bus.read_reports()
    await asyncio.sleep(0.1)
    backdoor.delete(bus.keys.seen)
    (seen,) = await bus.read_reports()
    assert 0.09 <= seen.age_s < 30
    other = await backdoor.connect()
    await other.read_reports()
    await asyncio.sleep(0.1)
    (seen,) = await other.read_reports()
    assert 0.09 <= seen.age_s < 30
    await other.close()


async def test_events_and_evaluations_are_read_in_order_from_any_point(bus: Bus) -> None:
    for name in ("one", "two", "three"):
        await bus.add_event(event(name))
    events = await bus.read_events()
    assert [e.name for _, e in events] == ["one", "two", "three"]
    assert [e.name for _, e in await bus.read_events(events[0][0])] == ["two", "three"]
    assert [e.name for _, e in await bus.read_events(limit=2)] == ["one", "two"]
    await bus.add_evaluation(evaluation := samples.evaluation())
    assert [e for _, e in await bus.read_evaluations()] == [evaluation]


async def test_the_server_says_who_it_is(bus: Bus) -> None:
    info = await bus.info()
    assert info.server_id == (await bus.info()).server_id
    assert info.server_id
    assert info.used_bytes >= 0
    assert not info.warnings


# --- floods ------------------------------------------------------------------------------------------


async def test_names_that_somebody_made_up_cost_owners_nothing_and_no_header(
    bus: Bus, backdoor: Backdoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is anybody's to add, and each costs every read of headers."""
    monkeypatch.setattr(schema, "MAX_NEW_SENDERS", 3)
    bus.use_spec(samples.spec())
    senders = bus.keys.senders(0)
    pending = {await bus.offer(samples.header("l0")), await bus.offer(samples.header("l1", fragment=1))}
    for name in ("a", "b", "c", "not a name"):
        backdoor.hset(senders, name, b"")
    found = {one.entry_id for p in (0, 1) for one in await bus.read_offers(p)}
    assert found == pending
    assert set(backdoor.dump()[senders][0]) == {b"l0", b"l1"}
    waiting = asyncio.create_task(bus.read_offers(0, {"l0": "9999999999999-0"}, block_s=10))
    await asyncio.sleep(0.1)
    entry = await bus.offer(samples.header("b"))
    async with asyncio.timeout(HANGING_S):
        assert [one.entry_id for one in await waiting] == [entry]


async def test_names_that_once_had_a_header_go_as_well_where_there_are_more_than_a_run_may_have(
    bus: Bus, backdoor: Backdoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without users of their own a learner may offer under any number of names."""
    monkeypatch.setattr(schema, "MAX_NEW_SENDERS", 2)
    monkeypatch.setattr(schema, "MAX_SENDERS", 4)
    bus.use_spec(samples.spec())
    senders, names = bus.keys.senders(0), ("a", "b", "c", "d")
    for name in names:
        await bus.offer(samples.header(name))
    after = dict(map(parse_offer_id, [one.entry_id for one in await bus.read_offers(0)]))
    for name in names:
        backdoor.delete(bus.keys.deltas(0, name))
    await bus.read_offers(0, after)
    assert len(backdoor.dump()[senders][0]) == 4
    pending = await bus.offer(samples.header("l0"))
    await bus.read_offers(0, after)
    assert set(backdoor.dump()[senders][0]) == {b"l0"}
    after |= {"e": START}
    assert schema.offer_cursors([b"l0"], after) == {"l0": START}, "nor is a name read that is off the list"
    assert [one.entry_id for one in await bus.read_offers(0, after)] == [pending]
    await asyncio.sleep(0.002)  # ids are times, and the stream that was deleted had one
    again = await bus.offer(samples.header("a"))
    assert [one.entry_id for one in await bus.read_offers(0, after)] == [again, pending]


async def test_reports_that_somebody_made_up_go_and_nobodys_own_nor_what_was_trained(
    bus: Bus, backdoor: Backdoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of too many, the latest of each learner stay, also a newcomer's, and those of most tokens."""
    monkeypatch.setattr(stored_reports, "MAX_REPORTS", 6)
    monkeypatch.setattr(stored_reports, "REPORTS_LEFT", 3)

    def plant(report: LearnerReport, name: str = "") -> None:
        name = name or f"{report.learner}/{report.incarnation}"
        backdoor.hset(bus.keys.learners, name, encode(report))
        backdoor.hset(bus.keys.seen, name, b"1")

    await bus.write_report(samples.report("l0", tokens=900))
    await bus.write_report(samples.report("l0", tokens=0, incarnation="1" * 8, generation=1))
    for n in range(3):
        plant(samples.report("l0", tokens=n, incarnation=f"{n + 2:08}", generation=9))
        plant(samples.report(f"x{n}", tokens=n))
    plant(samples.report("l0", tokens=2**60), "elsewhere")
    await bus.write_report(samples.report("l1", tokens=0))
    found = await bus.read_reports()
    assert [(s.report.learner, s.report.tokens) for s in found] == [("l0", 900), ("l0", 0), ("l1", 0)]
    stored = backdoor.dump()
    assert len(stored[bus.keys.learners][0]) == len(stored[bus.keys.seen][0]) == 3


# --- version 0 ---------------------------------------------------------------------------------------


async def test_one_learner_holds_the_claim_to_version_0_until_it_lapses(bus: Bus) -> None:
    assert await bus.claim_initial(A, 0.15)
    assert not await bus.claim_initial(B, 10)
    assert await bus.claim_initial(A, 0.15)
    await asyncio.sleep(0.2)
    assert await bus.claim_initial(B, 10)
    assert not await bus.claim_initial(A, 10)


async def test_a_claim_to_version_0_that_would_last_lapses_as_any_other(bus: Bus, backdoor: Backdoor) -> None:
    """Any learner may write there: one that never expires would keep the run from beginning for good."""
    backdoor.plant(bus.keys.init_claim, "string")
    assert not await bus.claim_initial(B, 0.15)
    await asyncio.sleep(0.2)
    assert await bus.claim_initial(B, 10**6)
    assert not await bus.claim_initial(A, 10)
    assert (backdoor.ttl_s(bus.keys.init_claim) or 99) <= 10


async def test_a_lease_that_would_last_lapses_as_any_other(bus: Bus, backdoor: Backdoor) -> None:
    """Without an end, or with one that no syncer asks for; one that a syncer may have is left as it is."""
    key = bus.keys.lease(0)
    backdoor.plant(key, "string")
    assert not await bus.acquire_lease(0, A, 0.15)
    await asyncio.sleep(0.2)
    assert await bus.acquire_lease(0, A, 30)
    assert not await bus.acquire_lease(0, B, 0.1)
    assert (backdoor.ttl_s(key) or 0) > 20
    assert await bus.acquire_lease(0, A, 2 * MAX_LEASE_S)
    assert not await bus.acquire_lease(0, B, 0.1)
    await asyncio.sleep(0.15)
    assert await bus.acquire_lease(0, B, 10)
    assert not await bus.acquire_lease(0, A, 0.1, 11)
    assert (backdoor.ttl_s(key) or 0) > 5
    assert not await bus.acquire_lease(0, A, 0.1, 5)
    await asyncio.sleep(0.15)
    assert await bus.acquire_lease(0, A, 10)


async def test_an_upload_of_version_0_that_cannot_be_read_is_none(bus: Bus, backdoor: Backdoor) -> None:
    backdoor.plant(bus.keys.initial, "string")
    assert await bus.read_initial() is None
    await bus.claim_initial(A, 10)
    upload = InitialUpload(learner="l0", nonce=A)
    assert await bus.finish_initial(upload, 10)
    assert await bus.read_initial() == upload


async def test_an_upload_of_version_0_counts_only_while_its_claim_is_held(bus: Bus) -> None:
    upload = InitialUpload(learner="l0", nonce=A)
    assert not await bus.finish_initial(upload, 10)
    await bus.claim_initial(B, 10)
    assert not await bus.finish_initial(upload, 10)
    assert await bus.read_initial() is None
    mine = InitialUpload(learner="l1", nonce=B)
    assert await bus.finish_initial(mine, 10)
    assert await bus.read_initial() == mine


# --- payloads ----------------------------------------------------------------------------------------


async def test_a_payload_is_read_as_it_was_written_and_writing_it_again_is_harmless(bus: Bus) -> None:
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await bus.write_chunks(key, 0, [b"a", b"b"], 10)
    await bus.write_chunks(key, 0, [b"other", b"b"], 10)
    await bus.write_chunks(key, 1, [b"b", b"c"], 10)
    assert await bus.count_chunks(key) == 3
    assert await bus.read_chunks(key, 0, 10, 2**20) == [b"a", b"b", b"c"]
    assert await bus.read_chunks(key, 1, 1, 2**20) == [b"b"]
    assert await bus.read_chunks(key, 3, 10, 2**20) == []


async def test_chunks_that_are_larger_than_the_spec_says_are_a_bad_payload(bus: Bus) -> None:
    """Whoever wrote them is to blame: to read them again would not help. What may be there is read as ever."""
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await bus.write_chunks(key, 0, [bytes(1024)] * 3, 10)
    assert len(await bus.read_chunks(key, 0, 3, 1024)) == 3
    await bus.write_chunks(key, 3, [bytes(200_000)], 10)
    with pytest.raises(BadPayload, match="larger than the spec's 1024 bytes"):
        await bus.read_chunks(key, 0, 10, 1024)
    with pytest.raises(BadPayload):
        await bus.read_chunks(key, 3, 1, 1024, block_s=5)
    assert len(await bus.read_chunks(key, 0, 3, 1024)) == 3


async def test_a_reader_waits_for_the_next_chunk(bus: Bus, backdoor: Backdoor) -> None:
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    other = await backdoor.connect()
    read = asyncio.ensure_future(bus.read_chunks(key, 0, 10, 2**20, block_s=60))
    await asyncio.sleep(0.05)
    await other.write_chunks(key, 0, [b"a"], 10)
    async with asyncio.timeout(HANGING_S):
        assert await read == [b"a"]
    await other.close()


async def test_a_payload_never_has_a_hole(bus: Bus) -> None:
    """A sender whose payload expired under it is told to start over."""
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    with pytest.raises(PayloadIncomplete):
        await bus.write_chunks(key, 2, [b"c"], 10)
    assert await bus.count_chunks(key) == 0


def large(count: int, size: int = 100_000) -> list[Encoded]:
    """Encoded chunks of a payload that are large enough to travel in parts."""
    payload = Payload(memoryview(bytes(range(256)) * (count * size // 256)), size)
    payload.grow_to(count * size)
    return [payload.encoded(i) for i in range(count)]


async def test_large_chunks_are_read_as_they_were_written_and_writing_them_again_is_harmless(bus: Bus) -> None:
    """They travel in parts, and not all of them through a script."""
    key, chunks = bus.keys.delta_payload(0, "l0", "0" * 8, 0), large(12)
    await bus.write_chunks(key, 0, chunks[:5], 10)
    await bus.write_chunks(key, 2, chunks[2:9], 10)
    await bus.write_chunks(key, 0, [bytes(100), *chunks[1:4]], 10)
    await bus.write_chunks(key, 9, chunks[9:], 10)
    await bus.write_chunks(key, 0, chunks, 10)
    assert [bytes(chunk) for chunk in await bus.read_chunks(key, 0, 100, 2**20)] == [
        whole_chunk(chunk) for chunk in chunks
    ]
    assert [bytes(chunk) for chunk in await bus.read_chunks(key, 7, 2, 2**20)] == [
        whole_chunk(chunk) for chunk in chunks[7:9]
    ]


async def test_a_payload_of_large_chunks_never_has_a_hole(bus: Bus, backdoor: Backdoor) -> None:
    """Nor is one that has expired made anew from its middle, or one that a commit made stay longer."""
    key, chunks = bus.keys.delta_payload(0, "l0", "0" * 8, 0), large(8)
    with pytest.raises(PayloadIncomplete):
        await bus.write_chunks(key, 2, chunks[2:], 10)
    assert await bus.count_chunks(key) == 0
    await bus.write_chunks(key, 0, chunks[:3], 10)
    with pytest.raises(PayloadIncomplete):
        await bus.write_chunks(key, 4, chunks[4:], 10)
    assert await bus.count_chunks(key) == 3
    assert 5 < (backdoor.ttl_s(key) or 0) <= 10
    await head_of(bus)
    (head,) = await bus.read_heads([0])
    before = await bus.read_chunks(head.payload, 0, 100, 2**20)
    with pytest.raises(PayloadIncomplete):
        await bus.write_chunks(head.payload, len(before), chunks[:4], 1)
    assert await bus.read_chunks(head.payload, 0, 100, 2**20) == before
    assert backdoor.ttl_s(head.payload) is None


async def test_an_abandoned_payload_expires(bus: Bus) -> None:
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await bus.write_chunks(key, 0, [b"a"], 0.1)
    assert await bus.count_chunks(key) == 1
    await vanished(bus, key)


async def test_a_reader_keeps_a_payload_alive_but_never_makes_it_expire_sooner(bus: Bus, backdoor: Backdoor) -> None:
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await bus.write_chunks(key, 0, [b"a"], 1)
    await bus.read_chunks(key, 0, 1, 2**20, extend_s=50)
    assert 40 < (backdoor.ttl_s(key) or 0) <= 50
    await bus.read_chunks(key, 0, 1, 2**20, extend_s=1)
    assert 40 < (backdoor.ttl_s(key) or 0) <= 50


async def test_a_header_that_is_renewed_goes_in_the_same_step(bus: Bus) -> None:
    """One that is gone by then is no error."""
    first = await bus.offer(samples.header("l0"))
    await bus.offer(samples.header("l1"))
    second = await bus.offer(samples.header("l0", attempt=1, serial=1), first)
    third = await bus.offer(samples.header("l0", attempt=2, serial=2), first)
    assert {entry.entry_id for entry in await bus.read_offers(0)} >= {second, third}
    assert [e.header.serial for e in await bus.read_offers(0) if e.header and e.header.learner == "l0"] == [1, 2]


async def test_a_header_that_renews_one_of_a_server_that_is_gone_stays_though_it_has_its_very_id(
    bus: Bus, backdoor: Backdoor
) -> None:
    """The server that took over lacks the earlier one, and its clock is behind: ids rise from the last one there."""
    key, ahead_ms = bus.keys.deltas(0, "l0"), int(time.time() * 1000) + 100_000
    backdoor.append(key, b"before", ahead_ms)
    first = await bus.offer(samples.header("l0"))
    backdoor.delete(key)
    backdoor.append(key, b"before", ahead_ms)
    second = await bus.offer(samples.header("l0", attempt=1, serial=1), first)
    assert parse_offer_id(second) == parse_offer_id(first)
    assert second != first, "the name tells them apart"
    assert [e.header.serial for e in await bus.read_offers(0) if e.header] == [1]


async def test_a_payload_that_is_needed_no_more_expires_sooner_and_never_later(bus: Bus, backdoor: Backdoor) -> None:
    """One that a commit made stay, stays; one that is not there is no error."""
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await bus.write_chunks(key, 0, [b"a"], 100)
    await bus.expire_soon(key, 50)
    assert 40 < (backdoor.ttl_s(key) or 0) <= 50
    await bus.expire_soon(key, 90)
    assert 40 < (backdoor.ttl_s(key) or 0) <= 50
    await head_of(bus)
    (head,) = await bus.read_heads([0])
    await bus.expire_soon(head.payload, 1)
    assert backdoor.ttl_s(head.payload) is None
    await bus.expire_soon(bus.keys.delta_payload(0, "l0", "0" * 8, 1), 1)


async def test_a_committed_payload_stays_whatever_readers_and_late_senders_do(bus: Bus, backdoor: Backdoor) -> None:
    await head_of(bus)
    (head,) = await bus.read_heads([0])
    before = await bus.read_chunks(head.payload, 0, 100, 2**20, extend_s=1)
    await bus.write_chunks(head.payload, 0, before, 1)
    assert backdoor.ttl_s(head.payload) is None
    with pytest.raises(PayloadIncomplete):
        await bus.write_chunks(head.payload, len(before), [b"more"], 1)
    assert await bus.read_chunks(head.payload, 0, 100, 2**20) == before


# --- fragments: learners -----------------------------------------------------------------------------


async def test_headers_are_pending_in_order_until_they_are_refused_or_merged(bus: Bus) -> None:
    entries = [await bus.offer(samples.header(name)) for name in ("l0", "l1", "l2")]
    offers = await bus.read_offers(0)
    assert [o.entry_id for o in offers] == entries
    assert [o.header.learner for o in offers if o.header] == ["l0", "l1", "l2"]
    known = dict(map(parse_offer_id, entries[:2]))
    assert [o.entry_id for o in await bus.read_offers(0, after=known)] == entries[2:]
    again = await bus.offer(samples.header("l0", serial=1))
    assert [o.entry_id for o in await bus.read_offers(0, after=known)] == [again, entries[2]]
    assert [o.entry_id for o in await bus.read_offers(0, limit=1)] == entries
    assert await bus.read_offers(1) == []


async def test_a_header_that_does_not_decode_is_reported_and_does_not_hide_the_next(
    bus: Bus, backdoor: Backdoor
) -> None:
    await bus.offer(samples.header("l0", fragment=1))
    backdoor.append(bus.keys.deltas(0, "l0"), b"\xc1 no message")
    backdoor.append(bus.keys.deltas(0, "l0"), encode(samples.header("l0", fragment=1)))
    backdoor.append(bus.keys.deltas(0, "l0"), encode(samples.header("l1")))
    await bus.offer(samples.header("l0"))
    first, second, forged, third = await bus.read_offers(0)
    assert first.header is None
    assert "msgpack" in first.problem
    assert second.header is None
    assert "fragment 1" in second.problem
    assert forged.header is None
    assert "header of l1 on the stream of l0" in forged.problem
    assert third.header is not None


async def test_an_owner_waits_for_the_next_header(bus: Bus, backdoor: Backdoor) -> None:
    """Of a learner that never offered before, and of one that did, while others are known."""
    other = await backdoor.connect()
    known: dict[str, str] = {}
    for header in (samples.header("l0"), samples.header("l1"), samples.header("l0", serial=1)):
        read = asyncio.ensure_future(bus.read_offers(0, dict(known), block_s=60))
        await asyncio.sleep(0.05)
        entry = await other.offer(header)
        async with asyncio.timeout(HANGING_S):
            assert [o.entry_id for o in await read] == [entry]
        known |= dict([parse_offer_id(entry)])
    await other.offer(samples.header("l2", fragment=1))
    assert await bus.read_offers(0, known, block_s=0.2) == []
    await other.close()


async def test_a_blocking_read_ends_empty_when_its_time_is_over_and_holds_up_nobody(bus: Bus) -> None:
    started = time.monotonic()
    reads = [asyncio.ensure_future(bus.read_offers(p, block_s=2.0)) for p in range(20)]
    await asyncio.sleep(0.01)
    for _ in range(5):
        await bus.read_heads([0])
    assert not any(read.done() for read in reads)
    async with asyncio.timeout(HANGING_S):
        assert await asyncio.gather(*reads) == [[]] * 20
    assert time.monotonic() - started > 1.9


async def test_heads_come_in_the_order_asked_for(bus: Bus) -> None:
    digest = await head_of(bus, 1)
    first, second = await bus.read_heads([0, 1])
    assert first is None
    assert (second.fragment, second.version, second.digest) == (1, 0, digest)
    assert await bus.read_heads([]) == []


async def test_a_follower_of_the_tape_misses_nothing_after_its_cursor(bus: Bus, backdoor: Backdoor) -> None:
    at = 0, await head_of(bus)
    ends = await bus.tape_end()
    assert set(ends) == {0}
    assert await bus.read_tape(ends) == []
    other = await backdoor.connect()
    read = asyncio.ensure_future(bus.read_tape(ends, block_s=5))
    await asyncio.sleep(0.05)
    records = [WindowChanged(fragment=0, version=0, attempt=i, reason="opened", unix_s=0.0) for i in range(3)]
    for record in records:
        await other.write_window(0, A, at, IDLE, record)
    got = await read
    while len(got) < 3:
        got += await bus.read_tape({0: got[-1].entry_id}, block_s=5)
    assert [entry.record for entry in got] == records
    assert len(await bus.read_tape({0: START})) == 4
    assert (await bus.tape_end())[0] == got[-1].entry_id
    await other.close()


async def test_an_archived_part_of_the_tape_is_dropped_and_the_rest_stays(bus: Bus) -> None:
    at = 0, await head_of(bus)
    for i in range(3):
        await bus.write_window(0, A, at, IDLE, WindowChanged(fragment=0, version=0, attempt=i, reason="", unix_s=0.0))
    entries = [entry.entry_id for entry in await bus.read_tape({0: START})]
    await bus.trim_tape(0, entries[2])
    assert [entry.entry_id for entry in await bus.read_tape({0: START})] == entries[2:]


async def test_groups_have_tapes_of_their_own(bus: Bus) -> None:
    bus.use_spec(samples.spec(groups=2))
    assert await bus.tape_end() == {0: START, 1: START}
    await head_of(bus, 1)
    await head_of(bus, 2)
    found = await bus.read_tape({0: START, 1: START}, block_s=1)
    assert sorted((entry.group, entry.record.fragment) for entry in found) == [(0, 2), (1, 1)]


# --- leases ------------------------------------------------------------------------------------------


async def test_a_lease_has_one_owner_until_it_lapses_or_is_given_back(bus: Bus) -> None:
    assert await bus.acquire_lease(0, A, 0.15)
    assert not await bus.acquire_lease(0, B, 10)
    assert await bus.acquire_lease(1, B, 10)
    await asyncio.sleep(0.2)
    assert await bus.acquire_lease(0, B, 10)
    await bus.release_lease(0, A)
    assert not await bus.acquire_lease(0, A, 10)
    await bus.release_lease(0, B)
    assert await bus.acquire_lease(0, A, 10)


async def test_renewing_a_lease_prolongs_it(bus: Bus, backdoor: Backdoor) -> None:
    assert await bus.acquire_lease(0, A, 1)
    assert await bus.acquire_lease(0, A, 50)
    assert 40 < (backdoor.ttl_s(bus.keys.lease(0)) or 0) <= 50


async def test_the_holders_of_leases_are_read_in_the_order_asked_for(bus: Bus) -> None:
    await bus.acquire_lease(2, A, 10)
    await bus.acquire_lease(0, B, 10)
    assert await bus.read_leases([0, 1, 2]) == [B, None, A]
    await bus.release_lease(0, B)
    assert await bus.read_leases([0]) == [None]
    assert await bus.read_leases([]) == []


async def test_a_syncer_is_here_until_its_time_is_over_or_it_withdraws(bus: Bus) -> None:
    assert await bus.read_syncers() == {}
    assert await bus.announce_syncer(B, "two", 10) == (B,)
    assert await bus.announce_syncer(A, "one", 0.15) == (A, B)
    assert await bus.read_syncers() == {A: "one", B: "two"}
    await asyncio.sleep(0.2)
    assert await bus.read_syncers() == {B: "two"}
    assert await bus.announce_syncer(B, "two", 10) == (B,)
    assert await bus.announce_syncer(A, "one", 10) == (A, B)
    await bus.withdraw_syncer(B)
    await bus.withdraw_syncer(B)
    assert await bus.read_syncers() == {A: "one"}


async def test_syncers_with_a_checkpoint_are_told_with_the_most_tokens_last(bus: Bus) -> None:
    await bus.announce_syncer(A, "one-more", 10, saved_tokens=500)
    await bus.announce_syncer(B, "two", 10, saved_tokens=70)
    await bus.announce_syncer("cc" * 8, "three", 10)
    assert [tuple(one) for one in await bus.read_savers()] == [(70, B, "two"), (500, A, "one-more")]
    assert (await bus.read_syncers())[A] == "one-more"
    await bus.announce_syncer(A, "one-more", 10)
    assert [name for _, _, name in await bus.read_savers()] == ["two"]


async def test_the_pages_of_syncers_are_read_by_their_names_if_they_can_be_shown(bus: Bus, backdoor: Backdoor) -> None:
    """A page is one line of bounded length and without control characters, whatever is in the table."""
    await bus.announce_syncer(B, "two", 10)
    bus.page = "http://127.0.0.1:8080/ on gpu-7"
    await bus.announce_syncer(A, "one", 10, saved_tokens=5)
    strange = ("http://x/\x1b[2J", "javascript:alert()", f"http://{'x' * 256}/", "http://x/ on a b")
    for number, page in enumerate(strange):
        backdoor.hset(bus.keys.syncers, f"strange-{number}", f"9999999999999 0 three-{number} {page}".encode())
    assert await bus.read_pages() == {"one": "http://127.0.0.1:8080/ on gpu-7"}
    assert {"one", "two", "three-0"} <= set((await bus.read_syncers()).values())
    assert [tuple(one) for one in await bus.read_savers()] == [(5, A, "one")]
    bus.page = ""
    await bus.announce_syncer(A, "one", 10)
    assert await bus.read_pages() == {}


async def test_a_run_that_is_deleted_leaves_nothing(bus: Bus, backdoor: Backdoor) -> None:
    await bus.announce_syncer(A, "one", 10)
    await bus.acquire_lease(1, A, 10)
    await bus.propose_spec(b"spec")
    assert backdoor.dump()
    await bus.delete_run()
    assert not backdoor.dump()


async def test_announcing_a_syncer_again_prolongs_its_time(bus: Bus) -> None:
    await bus.announce_syncer(A, "one", 0.2)
    await bus.announce_syncer(A, "one", 10)
    await asyncio.sleep(0.25)
    assert await bus.announce_syncer(B, "two", 10) == (A, B)


async def test_a_syncer_is_announced_even_where_memory_is_short(bus: Bus, backdoor: Backdoor) -> None:
    """Who cannot say that it is here would have its fragments taken away."""
    backdoor.fill_memory()
    assert await bus.announce_syncer(A, "one", 0.1) == (A,)
    await asyncio.sleep(0.15)
    assert await bus.announce_syncer(B, "two", 10) == (B,)


async def test_what_is_no_syncer_in_their_table_is_dropped(bus: Bus, backdoor: Backdoor) -> None:
    for field, value in (("strange", b"\xff"), ("short", b"99999999999999"), ("x", b"soon one")):
        backdoor.hset(bus.keys.syncers, field, value)
    assert await bus.read_syncers() == {}
    assert await bus.announce_syncer(A, "one", 10) == (A,)
    assert list(backdoor.dump()[bus.keys.syncers][0]) == [A.encode()]
    backdoor.plant(bus.keys.syncers, "string")
    with pytest.raises(BadMessage):
        await bus.announce_syncer(A, "one", 10)


# --- what goes wrong ---------------------------------------------------------------------------------


async def test_a_closed_bus_ends_calls_in_flight_and_takes_no_more(bus: Bus) -> None:
    reads = [asyncio.ensure_future(bus.read_offers(0, block_s=30)), asyncio.ensure_future(bus.tape_end())]
    await reads[1]
    await asyncio.sleep(0.1)
    await bus.close()
    async with asyncio.timeout(HANGING_S):
        with pytest.raises(BusUnavailable):
            await reads[0]
    with pytest.raises(BusUnavailable):
        await bus.read_spec()
    await bus.close()


async def test_a_cancelled_read_leaves_the_bus_usable(bus: Bus) -> None:
    read = asyncio.ensure_future(bus.read_offers(0, block_s=30))
    await asyncio.sleep(0.05)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert await bus.read_offers(0) == []
    await bus.offer(samples.header())
    assert len(await bus.read_offers(0, block_s=1)) == 1


async def test_stored_control_values_that_do_not_decode_are_named(bus: Bus, backdoor: Backdoor) -> None:
    await head_of(bus)
    backdoor.hset(bus.keys.head(0), "window", b"\xc1")
    with pytest.raises(BadMessage):
        await bus.read_heads([0])
    backdoor.hset(bus.keys.head(1), "version", b"1")
    with pytest.raises(BadMessage, match="fragment 1"):
        await bus.read_heads([1])
    backdoor.hset(bus.keys.state, "blob", b"nonsense")
    with pytest.raises(BadMessage):
        await bus.read_state()


async def test_a_key_of_another_type_is_reported_and_left_alone(bus: Bus, backdoor: Backdoor) -> None:
    keys = bus.keys
    await bus.offer(samples.header(fragment=1))  # so that there is a learner to read of
    deltas = keys.deltas(0, "l0")
    for key in (deltas, keys.shard_positions, keys.state, keys.seen, keys.spec, keys.init_claim):
        backdoor.plant(key, "string" if key not in (keys.spec, keys.init_claim) else "hash")
    before = backdoor.dump()
    for call in (
        bus.offer(samples.header()),
        bus.read_offers(0),
        bus.fill_shards(0, SHARDS),
        bus.claim_shard("l0.00", 10),
        bus.read_shards(),
        bus.save_position("l0.00", "1-0", 1),
        bus.finish_shard("l0.00", "1-0"),
        bus.write_state(samples.run_state()),
        bus.write_report(samples.report()),
        bus.read_reports(),
        bus.read_spec(),
        bus.replace_spec(b"two", b"one"),
        bus.claim_initial(A, 1),
        bus.write_chunks(deltas, 0, [b"a"], 1),
    ):
        with pytest.raises(BadMessage):
            await call
    assert backdoor.dump() == before


async def test_a_malformed_cursor_changes_nothing(bus: Bus) -> None:
    with pytest.raises(BusError, match="entry id"):
        await bus.read_tape({0: "yesterday"})
    with pytest.raises(BusError, match="entry id"):
        await bus.finish_shard("l0.00", "1-x")


async def test_full_memory_refuses_bulk_and_lets_the_owner_finish(bus: Bus, backdoor: Backdoor) -> None:
    """Deltas stop coming in; leases, commits, windows, refusals, reports and the run's state go on."""
    digest = await head_of(bus)
    delta = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await bus.write_chunks(delta, 0, [b"a"], 50)
    entry = await bus.offer(samples.header())
    commit = await commit_on(bus, (0, digest), entries=(entry,), delta_payloads=(delta,))
    backdoor.fill_memory()
    before = backdoor.dump()
    for call in (
        bus.offer(samples.header("l1")),
        bus.write_chunks(delta, 1, [b"b"], 50),
        bus.fill_shards(0, SHARDS),
        bus.add_event(event("one")),
        bus.propose_spec(b"spec"),
    ):
        with pytest.raises(BusFull):
            await call
    assert backdoor.dump() == before
    assert await bus.acquire_lease(0, A, 50)
    assert await bus.acquire_lease(7, A, 50)
    await bus.commit(commit)
    at = 1, commit.record.digest
    await bus.write_window(0, A, at, IDLE, None)
    await bus.refuse(0, Refusal(nonce=A, expected=at, entries=(), delta_payloads=(delta,), records=()))
    await bus.write_state(samples.run_state())
    await bus.write_report(samples.report())
    (head,) = await bus.read_heads([0])
    assert head.version == 1
    assert await bus.read_offers(0) == []


async def test_a_spec_that_is_set_is_told_where_memory_is_short(bus: Bus, backdoor: Backdoor) -> None:
    """A learner can come back to a run whose Redis is full."""
    await bus.propose_spec(b"first")
    backdoor.fill_memory()
    assert await bus.propose_spec(b"second") == b"first"


async def test_a_step_over_several_cluster_slots_is_a_mistake_everywhere(bus: Bus, backdoor: Backdoor) -> None:
    """It would pass unnoticed on a single node and fail on a cluster."""
    bus.use_spec(samples.spec(groups=2))
    digest = await head_of(bus)
    commit = await commit_on(bus, (0, digest), delta_payloads=(bus.keys.head(1),))
    before = backdoor.dump()
    with pytest.raises(ValueError, match="several cluster slots"):
        await bus.commit(commit)
    with pytest.raises(ValueError, match="several cluster slots"):
        await bus.refuse(
            0, Refusal(nonce=A, expected=(0, digest), entries=(), delta_payloads=(bus.keys.head(1),), records=())
        )
    assert backdoor.dump() == before


async def test_leases_that_are_asked_for_at_once_are_one_call_and_a_damaged_one_holds_up_no_other(
    bus: Bus, backdoor: Backdoor
) -> None:
    """A syncer that has much to do must not lose leases for having many; who gave up hears nothing of the others."""
    backdoor.plant(bus.keys.lease(3), "hash")
    assert await bus.acquire_lease(5, B, 10)
    calls = 0
    if isinstance(bus, RedisBus):
        script = bus._redis.script

        async def counting(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            return await script(*args, **more)

        bus._redis.script = counting  # type: ignore[method-assign]
    asked = [asyncio.create_task(bus.acquire_lease(p, A, 10)) for p in range(200)]
    await asyncio.sleep(0)
    asked[7].cancel()
    held = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(held[3], BadMessage)
    assert isinstance(held[7], asyncio.CancelledError)
    assert [p for p, one in enumerate(held) if one is not True] == [3, 5, 7]
    assert calls <= 1
    asked = [asyncio.create_task(bus.acquire_lease(p, A, 10)) for p in range(2)]
    await asyncio.sleep(0)
    asked[0].cancel()  # who makes the call for both
    held = await asyncio.gather(*asked, return_exceptions=True)
    assert held[1] is True or isinstance(held[1], BusUnavailable)
    assert await bus.acquire_lease(1, A, 10)


async def test_one_lease_that_is_asked_for_several_times_at_once_is_held_by_all_who_ask(bus: Bus) -> None:
    """A round that prolongs it and one that takes it may meet; who gives up ends no other's call."""
    assert await asyncio.gather(*(bus.acquire_lease(0, A, 10) for _ in range(3))) == [True] * 3
    asked = [asyncio.create_task(bus.acquire_lease(p, A, 10)) for p in (0, 0, 1, 0)]
    await asyncio.sleep(0)
    asked[1].cancel()
    held = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(held.pop(1), asyncio.CancelledError)
    assert held == [True] * 3
