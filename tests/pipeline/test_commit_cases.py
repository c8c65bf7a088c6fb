"""The owner's steps, case by case, on every adapter: what each changes, and what leaves all as it was.

A refused step is compared by a full dump of the server before and after.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from diloco.pipeline.bus.commits import MAX_HEADERS, Commit, Published, Refusal, Remainder, Republication, Staged
from diloco.pipeline.bus.ports import START, Bus
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.errors import BadMessage, DilocoError, HeadMoved, LeaseLost, PayloadIncomplete
from diloco.pipeline.messages.fragment import (
    NOTHING_MERGED,
    Committed,
    MergedBase,
    RefusalReason,
    Rejected,
    WindowChanged,
    WindowView,
)
from tests import samples
from tests.backdoor import Backdoor
from tests.samples import IDLE

NONCE = "aa" * 8
OTHER = "bb" * 8
FIRST = bytes([1]) * 16


async def stage(bus: Bus, key: str, chunks: int = 2) -> Staged:
    await bus.write_chunks(key, 0, [b"chunk"] * chunks, 60)
    return Staged(key, chunks)


async def commit_on(bus: Bus, expected: tuple[int, bytes] | None, fragment: int = 0, **given: Any) -> Commit:
    """A commit on top of a head, its payloads staged."""
    version = 0 if expected is None else expected[0] + 1
    digest = bytes([version + 1]) * 16
    record = samples.committed(
        fragment=fragment,
        version=version,
        digest=digest,
        base_digest=expected[1] if expected else None,
        contributions=tuple(samples.contribution(name, weight=0.5) for name in ("l0", "l1")) if expected else (),
    )
    commit = Commit(
        nonce=NONCE,
        expected=expected,
        published=Published(
            payload=await stage(bus, bus.keys.global_payload(fragment, version, f"{version:08x}")),
            momentum=await stage(bus, bus.keys.momentum_payload(fragment, version, f"{version:08x}"), 3),
        ),
        window=IDLE,
        merged=(MergedBase(learner="l0", incarnation="0" * 8, base_version=0, tokens=400),) if expected else (),
        record=record,
        merged_tokens=800 if expected else 0,
    )
    return changed(commit, **given)


def changed(commit: Commit, **given: Any) -> Commit:
    """A commit with other fields, of its payloads too."""
    payloads = {one.name: given.pop(one.name) for one in fields(Published) if one.name in given}
    return replace(commit, published=replace(commit.published, **payloads), **given)


async def rest_of(bus: Bus, version: int, fragment: int = 0) -> Remainder:
    """What the global of a version lacks, staged."""
    staged = await stage(bus, bus.keys.rest_payload(fragment, version, f"{version:08x}"))
    return Remainder(staged.key, staged.chunks, bytes([100 + version]) * 16)


async def first_head(bus: Bus, fragment: int = 0) -> tuple[int, bytes]:
    """Version 0, leased under NONCE."""
    assert await bus.acquire_lease(fragment, NONCE, 60)
    commit = await commit_on(bus, None, fragment)
    await bus.commit(commit)
    return 0, commit.record.digest


def rejected(learner: str, lost: int = 0, reason: RefusalReason = RefusalReason.NON_FINITE) -> Rejected:
    return samples.rejected(learner, lost_tokens=lost, reason=reason)


# --- put back ---


async def test_a_head_that_is_put_back_is_the_one_that_was_lost(bus: Bus, backdoor: Backdoor) -> None:
    """Version, digests, payloads that stay, merged bases, and all totals; the next merge goes on from it. Where there
    is one, whatever it is, somebody else was quicker."""
    expected = await first_head(bus)
    await bus.commit(await commit_on(bus, expected))
    (before,) = await bus.read_heads([0])
    at = (before.version, before.digest)
    entry = await bus.offer(samples.header("l0"))
    await bus.refuse(0, Refusal(NONCE, at, (entry,), (), (rejected("l0", 7),), 7))
    (before,) = await bus.read_heads([0])
    backdoor.delete(bus.keys.head(0))
    again = await commit_on(
        bus,
        None,
        payload=Staged(before.payload, before.chunks),
        momentum=Staged(before.momentum, 3),
        merged=before.merged,
        record=Committed(
            fragment=0, version=1, digest=before.digest, reason="put back", syncer="s0", unix_s=2.0, **NOTHING_MERGED
        ),
        lost=before,
    )
    await bus.commit(again)
    (after,) = await bus.read_heads([0])
    assert after == before
    assert backdoor.ttl_s(before.payload) is None
    dump = backdoor.dump()
    with pytest.raises(HeadMoved):
        await bus.commit(again)
    assert backdoor.dump() == dump
    await bus.commit(await commit_on(bus, (1, before.digest)))
    assert (await bus.read_heads([0]))[0].merged_tokens == before.merged_tokens + 800


# --- done --------------------------------------------------------------------------------------------


async def test_a_commit_moves_the_head_and_takes_its_deltas_along(bus: Bus, backdoor: Backdoor) -> None:
    expected = await first_head(bus)
    deltas = [bus.keys.delta_payload(0, name, "0" * 8, 0) for name in ("l0", "l1", "l2")]
    for key in deltas:
        await stage(bus, key)
    entries = [await bus.offer(samples.header(name)) for name in ("l0", "l1", "l2")]
    (old,) = await bus.read_heads([0])
    commit = await commit_on(
        bus, expected, entries=tuple(entries[:2]), delta_payloads=tuple(deltas[:2]), replaced_ttl_s=30.0
    )
    await bus.commit(commit)

    (head,) = await bus.read_heads([0])
    assert (head.version, head.digest, head.previous_digest) == (1, commit.record.digest, expected[1])
    assert (head.payload, head.chunks) == (commit.published.payload.key, 2)
    assert head.momentum == commit.published.momentum.key
    assert head.merged == commit.merged
    assert (head.merged_deltas, head.merged_tokens, head.rejected_tokens) == (2, 800, 0)
    # What was staged stays, what it replaced lives on for a while, the rest is gone.
    assert backdoor.ttl_s(head.payload) is None
    assert backdoor.ttl_s(head.momentum) is None
    assert 20 < (backdoor.ttl_s(old.payload) or 0) <= 30
    assert await bus.count_chunks(old.payload) == 2
    assert await bus.count_chunks(old.momentum) == 0
    assert [await bus.count_chunks(key) for key in deltas] == [0, 0, 2]
    assert [o.entry_id for o in await bus.read_offers(0)] == entries[2:]
    assert [entry.record for entry in await bus.read_tape({0: START})][1:] == [commit.record]


async def test_the_rest_of_a_global_comes_stays_and_goes_with_it(bus: Bus, backdoor: Backdoor) -> None:
    assert await bus.acquire_lease(0, NONCE, 60)
    expected, heads = None, []
    for version in range(3):
        commit = await commit_on(bus, expected, rest=await rest_of(bus, version), replaced_ttl_s=30.0)
        if version == 2:
            commit = changed(commit, rest=None, retired=(heads[0].payload, heads[0].rest))
        await bus.commit(commit)
        heads += await bus.read_heads([0])
        assert heads[-1].rest == "" or backdoor.ttl_s(heads[-1].rest) is None
        expected = version, commit.record.digest
    first, second, third = heads
    assert (second.rest, second.payload_digest) == (bus.keys.rest_payload(0, 1, "00000001"), bytes([101]) * 16)
    assert second.digest == bytes([2]) * 16
    assert 20 < (backdoor.ttl_s(second.rest) or 0) <= 30
    assert 20 < (backdoor.ttl_s(second.payload) or 0) <= 30
    assert [await bus.count_chunks(key) for key in (first.payload, first.rest)] == [0, 0]
    # A global that is exact has none.
    assert (third.rest, third.payload_digest) == ("", None)
    assert backdoor.ttl_s(third.payload) is None


async def test_a_global_is_published_anew_at_its_version(bus: Bus, backdoor: Backdoor) -> None:
    """Version, digest, window, counters and tape stay; what was named before goes as replaced."""
    assert await bus.acquire_lease(0, NONCE, 60)
    await bus.commit(await commit_on(bus, None))
    (first,) = await bus.read_heads([0])
    at = (1, bytes([2]) * 16)
    of = {"payload": Staged(first.payload, 2), "momentum": Staged(first.momentum, 3)}
    await bus.commit(await commit_on(bus, (0, bytes([1]) * 16), **of))
    (before,) = await bus.read_heads([0])
    tape = await bus.read_tape({0: START})
    payload = await stage(bus, bus.keys.global_payload(0, 1, "dd" * 4), 4)
    await bus.republish(0, Republication(NONCE, at, Published(payload, await rest_of(bus, 1)), 30.0))
    (head,) = await bus.read_heads([0])
    named = {"payload": payload.key, "chunks": 4, "momentum": ""}
    rest = {"rest": bus.keys.rest_payload(0, 1, "00000001"), "payload_digest": bytes([101]) * 16}
    assert head == before.model_copy(update=named | rest)
    assert await bus.read_tape({0: START}) == tape
    assert [backdoor.ttl_s(key) for key in (head.payload, head.rest)] == [None, None]
    assert 20 < (backdoor.ttl_s(first.payload) or 0) <= 30
    assert await bus.count_chunks(first.momentum) == 0


async def test_totals_add_up_over_commits_and_refusals(bus: Bus) -> None:
    expected = await first_head(bus)
    one = await commit_on(bus, expected)
    await bus.commit(one)
    entry = await bus.offer(samples.header("l9"))
    await bus.refuse(0, Refusal(NONCE, (1, one.record.digest), (entry,), (), (rejected("l9", 70),), lost_tokens=70))
    await bus.commit(await commit_on(bus, (1, one.record.digest)))
    (head,) = await bus.read_heads([0])
    assert (head.version, head.merged_deltas, head.merged_tokens, head.rejected_tokens) == (2, 4, 1600, 70)


async def test_a_first_commit_may_carry_a_checkpoints_version_and_no_momentum(bus: Bus) -> None:
    await bus.acquire_lease(0, NONCE, 60)
    commit = await commit_on(bus, None, momentum=None)
    await bus.commit(replace(commit, record=commit.record.model_copy(update={"version": 41})))
    (head,) = await bus.read_heads([0])
    assert (head.version, head.momentum, head.previous_digest) == (41, "", None)


async def test_a_commit_of_very_many_entries_is_one_step(bus: Bus) -> None:
    """More than a Lua stack holds."""
    expected = await first_head(bus)
    entries = tuple(f"{i + 1}-0@l{i % 7}" for i in range(20_000))
    gone = tuple(bus.keys.delta_payload(0, "l0", "0" * 8, i) for i in range(20_000))
    await bus.commit(await commit_on(bus, expected, entries=entries, delta_payloads=gone))
    (head,) = await bus.read_heads([0])
    assert head.version == 1


async def test_a_refusal_removes_and_records_and_counts_once(bus: Bus) -> None:
    expected = await first_head(bus)
    delta = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await stage(bus, delta)
    bad, good = await bus.offer(samples.header("l0")), await bus.offer(samples.header("l1"))
    refusal = Refusal(NONCE, expected, (bad,), (delta,), (rejected("l0", 400),), lost_tokens=400)
    await bus.refuse(0, refusal)
    await bus.refuse(0, refusal)  # e.g. after an answer that was lost
    assert [o.entry_id for o in await bus.read_offers(0)] == [good]
    assert await bus.count_chunks(delta) == 0
    (head,) = await bus.read_heads([0])
    assert head.rejected_tokens == 400
    assert head.refused == {"non_finite": 1}
    assert [entry.record for entry in await bus.read_tape({0: START})][1:] == list(refusal.records)


async def test_whoever_names_a_header_that_was_lost_does_not_mean_the_one_that_has_its_id_now(
    bus: Bus, backdoor: Backdoor
) -> None:
    """A server whose clock is behind gives the ids of what it lost to others."""
    expected = await first_head(bus)
    key, ahead_ms = bus.keys.deltas(0, "l0"), int(time.time() * 1000) + 100_000
    backdoor.append(key, b"before", ahead_ms)
    lost = await bus.offer(samples.header("l0"))
    backdoor.delete(key)
    backdoor.append(key, b"before", ahead_ms)
    later = await bus.offer(samples.header("l0", attempt=1, serial=1))
    assert parse_offer_id(later) == parse_offer_id(lost)
    before = await bus.read_heads([0])
    await bus.refuse(0, Refusal(NONCE, expected, (lost,), (), (rejected("l0", 400),), lost_tokens=400))
    assert await bus.read_heads([0]) == before
    assert len(await bus.read_tape({0: START})) == 1
    commit = await commit_on(bus, expected, entries=(lost,))
    await bus.commit(commit)
    assert [one.entry_id for one in await bus.read_offers(0) if one.header] == [later]
    at = 1, commit.record.digest
    await bus.refuse(0, Refusal(NONCE, at, (later,), (), (rejected("l0", 400),), lost_tokens=400))
    assert [one for one in await bus.read_offers(0) if one.header] == []


async def test_refusals_are_counted_by_reason_whether_the_tape_tells_of_them_or_not(bus: Bus) -> None:
    expected = await first_head(bus)
    entries = tuple([await bus.offer(samples.header(f"l{i}")) for i in range(4)])
    untold = (RefusalReason.FLOOD, RefusalReason.FLOOD, RefusalReason.NON_FINITE)
    await bus.refuse(0, Refusal(NONCE, expected, entries, (), (rejected("l0", 4),), lost_tokens=4, untold=untold))
    (head,) = await bus.read_heads([0])
    assert head.refused == {"flood": 2, "non_finite": 2}
    assert len(await bus.read_tape({0: START})) == 2
    await bus.commit(await commit_on(bus, expected))
    (head,) = await bus.read_heads([0])
    assert head.refused == {"flood": 2, "non_finite": 2}, "a commit keeps them"


async def test_all_but_the_last_headers_of_a_flood_are_refused_in_one_step(bus: Bus, backdoor: Backdoor) -> None:
    """Each is counted, though nobody has read it; others' stay. Where there are no more, nothing is done."""
    expected, key = await first_head(bus), bus.keys.deltas(0, "l0")
    kept = await bus.offer(samples.header("l1"))
    for n in range(MAX_HEADERS):
        backdoor.append(key, b"%d" % n)
    cut = Refusal(NONCE, expected, (), (), (rejected("l0", 0, RefusalReason.FLOOD),), cut="l0")
    before = backdoor.dump()
    await bus.refuse(0, cut)
    await bus.refuse(0, replace(cut, cut="nobody"))
    assert backdoor.dump() == before
    for n in range(300):
        backdoor.append(key, b"later %d" % n)
    for refusal in (cut, replace(cut, records=(), untold=(RefusalReason.FLOOD,))):
        await bus.refuse(0, refusal)
        for _ in range(10):
            backdoor.append(key, b"more")
    (head,) = await bus.read_heads([0])
    assert head.refused == {"flood": 300 + 10}
    assert len(await bus.read_tape({0: START})) == 2
    left = [one.entry_id for one in await bus.read_offers(0, {"l0": START})]
    assert len(left) == MAX_HEADERS + 10 + 1
    assert kept in left
    with pytest.raises(LeaseLost):
        await bus.refuse(0, replace(cut, nonce=OTHER))


async def test_what_a_peer_says_that_it_lost_never_stops_a_refusal(bus: Bus) -> None:
    """Else a few headers with the largest numbers that a header may have would stop a fragment for ever."""
    expected = await first_head(bus)
    for n in range(3):
        entry = await bus.offer(samples.header(f"l{n}"))
        refusal = Refusal(NONCE, expected, (entry,), (), (rejected("l0", 4),), lost_tokens=2**61 + 2**60)
        await bus.refuse(0, refusal)
    assert await bus.read_offers(0) == []
    (head,) = await bus.read_heads([0])
    assert head.rejected_tokens == 2**61 + 2**60
    assert head.refused == {"non_finite": 3}


async def test_what_a_peer_says_that_it_trained_never_stops_a_commit(bus: Bus) -> None:
    """Else some hundred deltas with the largest number that a header may have would stop a fragment for ever."""
    expected = await first_head(bus)
    for version in range(1, 4):
        one = replace(await commit_on(bus, expected), merged_tokens=2**61 + 2**60)
        await bus.commit(one)
        expected = version, one.record.digest
    (head,) = await bus.read_heads([0])
    assert (head.version, head.merged_deltas, head.merged_tokens) == (3, 6, 2**61 + 2**60)


async def test_a_window_is_published_in_the_head_and_on_the_tape_only_if_it_changed(bus: Bus) -> None:
    expected = await first_head(bus)
    window = WindowView(state="grace", attempt=1, members=("l0",), expected=2, reason="1 of 2", deadline_unix_s=12.5)
    opened = WindowChanged(fragment=0, version=0, attempt=1, reason="opened", unix_s=1.0)
    await bus.write_window(0, NONCE, expected, window, opened)
    await bus.write_window(0, NONCE, expected, window, None)
    (head,) = await bus.read_heads([0])
    assert head.window == window
    assert [entry.record for entry in await bus.read_tape({0: START})][1:] == [opened]


# --- refused -----------------------------------------------------------------------------------------

Step = Callable[[Bus, Commit], Awaitable[None]]


async def committing(bus: Bus, commit: Commit) -> None:
    await bus.commit(commit)


async def refusing(bus: Bus, commit: Commit) -> None:
    record = rejected("l0", 9)
    refusal = Refusal(commit.nonce, commit.expected, commit.entries, commit.delta_payloads, (record,), lost_tokens=9)
    await bus.refuse(0, refusal)


async def republishing(bus: Bus, commit: Commit) -> None:
    await bus.republish(0, Republication(commit.nonce, commit.expected, commit.published))


async def publishing(bus: Bus, commit: Commit) -> None:
    window = IDLE.model_copy(update={"attempt": 9})
    record = WindowChanged(fragment=0, version=0, attempt=9, reason="", unix_s=0.0)
    await bus.write_window(0, commit.nonce, commit.expected, window, record)


@dataclass(frozen=True)
class Case:
    """One way in which a step is refused: what is done to the server, what to the commit."""

    name: str
    error: type[DilocoError]
    plant: Callable[[Backdoor, Bus], object] = lambda backdoor, bus: None
    change: Callable[[Commit], Commit] = lambda commit: commit


ANY_STEP = [
    Case("wrong nonce", LeaseLost, change=lambda c: replace(c, nonce=OTHER)),
    Case("part of the nonce", LeaseLost, change=lambda c: replace(c, nonce=NONCE[:8])),
    Case("lease lapsed", LeaseLost, lambda b, bus: b.delete(bus.keys.lease(0))),
    Case("digest differs", HeadMoved, change=lambda c: replace(c, expected=(0, bytes(16)))),
    Case("head moved on", HeadMoved, lambda b, bus: b.hset(bus.keys.head(0), "version", b"7")),
    Case("head came back", HeadMoved, change=lambda c: later(c, (1, FIRST))),
    Case("no head", HeadMoved, lambda b, bus: b.delete(bus.keys.head(0))),
    Case("lease of another type", BadMessage, lambda b, bus: b.plant(bus.keys.lease(0), "hash")),
    Case("head of another type", BadMessage, lambda b, bus: b.plant(bus.keys.head(0), "string")),
    Case("tape of another type", BadMessage, lambda b, bus: b.plant(bus.keys.tape(0), "hash")),
]
REMOVING_STEP = [
    Case("headers of another type", BadMessage, lambda b, bus: b.plant(bus.keys.deltas(0, "l0"), "string")),
    Case("total not a number", BadMessage, lambda b, bus: b.hset(bus.keys.head(0), "rejected_tokens", b"many")),
    Case("total out of bounds", BadMessage, lambda b, bus: b.hset(bus.keys.head(0), "rejected_tokens", b"%d" % 2**62)),
]
STAGED_STEP = [
    Case("payload missing", PayloadIncomplete, lambda b, bus: b.delete(bus.keys.global_payload(0, 1, "00000001"))),
    Case("payload short", PayloadIncomplete, change=lambda c: changed(c, payload=Staged(c.published.payload.key, 3))),
    Case("payload long", PayloadIncomplete, change=lambda c: changed(c, payload=Staged(c.published.payload.key, 1))),
    Case("rest missing", PayloadIncomplete, lambda b, bus: b.delete(bus.keys.rest_payload(0, 1, "00000001"))),
    Case(
        "rest short",
        PayloadIncomplete,
        change=lambda c: changed(c, rest=Remainder(c.published.rest.key, 3, FIRST) if c.published.rest else None),
    ),
    Case("rest of another type", BadMessage, lambda b, bus: b.plant(bus.keys.rest_payload(0, 1, "00000001"), "hash")),
    Case("momentum missing", PayloadIncomplete, lambda b, bus: b.delete(bus.keys.momentum_payload(0, 1, "00000001"))),
    Case(
        "payload of another type",
        BadMessage,
        lambda b, bus: b.plant(bus.keys.global_payload(0, 1, "00000001"), "string"),
    ),
    Case(
        "momentum of another type",
        BadMessage,
        lambda b, bus: b.plant(bus.keys.momentum_payload(0, 1, "00000001"), "hash"),
    ),
    Case("lease before head", LeaseLost, change=lambda c: replace(c, nonce=OTHER, expected=(0, bytes(16)))),
    Case(
        "head before payload",
        HeadMoved,
        lambda b, bus: b.delete(bus.keys.global_payload(0, 1, "00000001")),
        lambda c: replace(c, expected=(0, bytes(16))),
    ),
]
COMMIT_STEP = [
    Case("there is a head already", HeadMoved, change=lambda c: replace(c, expected=None)),
    Case("total not a number", BadMessage, lambda b, bus: b.hset(bus.keys.head(0), "merged_tokens", b"1.5")),
]


def later(commit: Commit, expected: tuple[int, bytes]) -> Commit:
    record = commit.record.model_copy(update={"version": expected[0] + 1})
    return replace(commit, expected=expected, record=record)


CASES = [
    *((step, case) for step in (committing, refusing, publishing, republishing) for case in ANY_STEP),
    *((step, case) for step in (committing, refusing) for case in REMOVING_STEP),
    *((step, case) for step in (committing, republishing) for case in STAGED_STEP),
    *((committing, case) for case in COMMIT_STEP),
]


@pytest.mark.parametrize(
    ("step", "case"), CASES, ids=[f"{step.__name__}-{case.name}".replace(" ", "-") for step, case in CASES]
)
async def test_a_refused_step_changes_nothing(bus: Bus, backdoor: Backdoor, step: Step, case: Case) -> None:
    expected = await first_head(bus)
    delta = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await stage(bus, delta)
    entry = await bus.offer(samples.header("l0"))
    commit = await commit_on(bus, expected, rest=await rest_of(bus, 1), entries=(entry,), delta_payloads=(delta,))
    case.plant(backdoor, bus)
    before = backdoor.dump()
    with pytest.raises(case.error):
        await step(bus, case.change(commit))
    assert backdoor.dump() == before


@pytest.mark.parametrize("step", [committing, refusing, publishing, republishing])
async def test_a_tape_of_another_type_is_the_key_that_is_named(bus: Bus, backdoor: Backdoor, step: Step) -> None:
    commit = await commit_on(bus, await first_head(bus))
    backdoor.plant(bus.keys.tape(0), "hash")
    with pytest.raises(BadMessage, match=re.escape(bus.keys.tape(0))):
        await step(bus, commit)


async def test_of_many_commits_on_one_head_one_is_done(bus: Bus) -> None:
    expected = await first_head(bus)
    commits = [
        await commit_on(bus, expected, payload=await stage(bus, bus.keys.global_payload(0, 1, f"{i:08x}")))
        for i in range(8)
    ]
    results = await asyncio.gather(*(bus.commit(c) for c in commits), return_exceptions=True)
    assert sum(result is None for result in results) == 1
    assert sum(isinstance(result, HeadMoved) for result in results) == 7
    (head,) = await bus.read_heads([0])
    assert (head.version, head.merged_tokens) == (1, 800)


async def test_a_commit_that_contradicts_itself_never_reaches_the_server(bus: Bus, backdoor: Backdoor) -> None:
    commit = await commit_on(bus, await first_head(bus))
    before = backdoor.dump()
    with pytest.raises(ValueError, match="commit of version 5"):
        await bus.commit(replace(commit, record=commit.record.model_copy(update={"version": 5})))
    assert backdoor.dump() == before


async def test_a_commit_that_deletes_what_it_names_never_reaches_the_server(bus: Bus, backdoor: Backdoor) -> None:
    commit = await commit_on(bus, await first_head(bus))
    before = backdoor.dump()
    with pytest.raises(ValueError, match="both uses and deletes"):
        await bus.commit(replace(commit, retired=(commit.published.payload.key,)))
    assert backdoor.dump() == before
