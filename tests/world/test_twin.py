"""The bus in memory is no kinder twin: what a simulated world does to it has the same outcomes on a real Redis."""

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache, lru_cache
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.pipeline.bus.redis import calls as redis_calls
from diloco.pipeline.bus.redis.calls import Script
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import BusFull, LeaseLost
from diloco.pipeline.messages.shards import Shard
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.memory_store import Stream
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual
from tests import samples
from tests.world.__main__ import app
from tests.world.plan import Kind
from tests.world.record import Called, Expired, Full, Recorder, Restarted, Snapshot, WorldStore
from tests.world.twin import Difference, Recorded, record, replay
from tests.world.world import MERGES, RUN

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_log_lines")]

WITHIN_SEEDS = 500
SHORT = 10
"""Least number of merges of a short world: its faults are all there, and it is soon over."""


MUTATIONS = {
    "a commit that does not check the lease": (
        "commit",
        "if redis.call('GET', lease) ~= a.nonce then return {'LEASE', lease} end\n",
        "",
    ),
    "a commit that does not check the head": (
        "commit",
        "refused = head_moved(head, a.was)\n",
        "refused = nil\n",
    ),
    "a commit that deletes the headers before its checks": (
        "commit",
        "if redis.call('GET', lease)",
        "delete_headers(pending_of(a.headers))\nif redis.call('GET', lease)",
    ),
    "a commit that lets its payload expire": (
        "commit",
        "for _, one in ipairs(a.staged) do redis.call('PERSIST', KEYS[one.key]) end",
        "for i = 2, #a.staged do redis.call('PERSIST', KEYS[a.staged[i].key]) end",
    ),
    "a commit that lets its momentum or its rest expire": (
        "commit",
        "for _, one in ipairs(a.staged) do redis.call('PERSIST', KEYS[one.key]) end",
        "redis.call('PERSIST', KEYS[a.staged[1].key])",
    ),
    "a commit that sets the totals": ("commit", "'HINCRBY', head, 'merged_tokens'", "'HSET', head, 'merged_tokens'"),
    "a commit that keeps what it replaced for ever": (
        "commit",
        "for _, key in ipairs(a.replaced) do redis.call('PEXPIRE', KEYS[key], a.replaced_ttl_ms) end\n",
        "",
    ),
    "a commit that keeps the rest of what it replaced for ever": (
        "commit",
        "for _, key in ipairs(a.replaced) do redis.call('PEXPIRE', KEYS[key], a.replaced_ttl_ms) end",
        "if a.replaced[1] then redis.call('PEXPIRE', KEYS[a.replaced[1]], a.replaced_ttl_ms) end",
    ),
    "a commit that deletes one header too few": (
        "commit",
        "delete_headers(pending)\n",
        "table.remove(pending)\ndelete_headers(pending)\n",
    ),
    "a commit that is not on the tape": ("commit", "redis.call('XADD', tape, '*', 'r', a.record)\n", ""),
    "a commit that leaves payloads behind": (
        "commit",
        "for _, key in ipairs(a.gone) do redis.call('UNLINK', KEYS[key]) end",
        "for i = 2, #a.gone do redis.call('UNLINK', KEYS[a.gone[i]]) end",
    ),
    "a refusal that counts twice when repeated": (
        "refuse",
        "if #pending == 0 and #a.headers > 0 then return {'OK'} end\n",
        "",
    ),
    "a refusal that does not check the lease": (
        "refuse",
        "if redis.call('GET', lease) ~= a.nonce then return {'LEASE', lease} end\n",
        "",
    ),
    "a refusal that does not count": ("refuse", "redis.call('HINCRBY', head, 'rejected_tokens', lost_tokens)\n", ""),
    "a refusal whose reason is not counted": ("refuse", "redis.call('HINCRBY', head, one.field, one.more)", ""),
    "a chunk appended again when repeated": (
        "write_chunk",
        "if index == have then redis.call('XADD', payload, string.format('%d-0', index + 1), 'c', chunk) end",
        "redis.call('XADD', payload, string.format('%d-0', have + 1), 'c', chunk)",
    ),
    "a window written without the lease": (
        "write_window",
        "if redis.call('GET', lease) ~= nonce then return {'LEASE', lease} end\n",
        "",
    ),
    "a window that does not wake": ("write_window", "if record ~= '' then", "if false then"),
    "a window refused where memory is short": ("write_window", "redis.call('PERSIST', head)\n", ""),
    "a lease taken from its holder": ("claim", "  elseif holder then\n    bound(key, max_ms, ttl_ms)\n", ""),
    "a lease released by another": ("release", "== ARGV[1] then redis", "then redis"),
}
"""Name -> (script, text, what stands there instead).

Checks that no world comes to are not here, since nothing could find them gone; the contract tests try them: payloads
that lack chunks, chunks for a payload that was committed, an upload whose claim lapsed, a state moved backwards, and
refusals and windows on another head.
"""


@lru_cache(maxsize=8)
def world(seed: int, merges: int = MERGES) -> Recorded:
    """A recorded world, for several tests."""
    return record(seed, merges)


def difference(recorded: Recorded, url: str) -> Difference | None:
    with asyncio.Runner(loop_factory=fast_loop) as runner:
        return runner.run(replay(recorded, url))


def recorded(story: Callable[[Callable[[str], MemoryBus], WorldStore], Awaitable[None]]) -> Recorded:
    """A short history made by hand: the story gets a way to connect, and the server."""
    recorder, store = Recorder(), WorldStore()
    recorder.watch(store)

    async def main() -> None:
        clock = VirtualClock()
        await story(lambda who: recorder.bus(RUN, clock, store, who), store)

    run_virtual(main())
    return Recorded(0, None, recorder.events, store, 1)


# --- worlds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 6]
)  # 6: an initial learner that came back while Redis was full
def test_what_a_world_did_in_memory_it_does_on_redis(seed: int, redis_server: str) -> None:
    """Call by call the same outcome, and in the end the same content; full, restarts and rewinds included."""
    assert difference(world(seed, SHORT), redis_server) is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_worlds_with_every_kind_of_fault_do_the_same_on_redis(redis_server: str) -> None:
    """Whatever can happen to a call or to the server happened in some of them."""
    fired: Counter[str] = Counter()
    for seed in range(50):
        one = record(seed)
        assert difference(one, redis_server) is None
        fired.update(one.result.fired)
    print(dict(fired))
    assert all(fired[kind] > 0 for kind in Kind), fired


# --- the replay would see a difference -----------------------------------------------------------------


def altered(recorded: Recorded, index: int, **changes: Any) -> Recorded:
    events = list(recorded.events)
    events[index] = dataclasses.replace(events[index], **changes)
    return dataclasses.replace(recorded, events=events)


def test_a_difference_names_the_seed_the_call_both_answers_and_how_to_see_it_again(redis_server: str) -> None:
    """All that a person needs to begin."""
    one = world(6, SHORT)
    index, call = next((i, e) for i, e in enumerate(one.events) if isinstance(e, Called) and e.method == "commit")
    found = difference(altered(one, index, outcome=LeaseLost("made up")), redis_server)
    assert (found.seed, found.index, found.redis) == (6, index, "None")
    text = str(found)
    assert f"seed 6, event {index}: {call.at_s:.6f} {call.who} commit(commit=Commit(" in text
    assert "memory: LeaseLost: made up" in text
    assert "python -m tests.world twin 6" in text


def test_what_memory_alone_holds_in_the_end_is_a_difference(redis_server: str) -> None:
    """One for each kind of value, a key too many, an expiry, and an entry that another was put in place of."""

    async def story(connect: Callable[[str], MemoryBus], store: WorldStore) -> None:
        bus = connect("a")
        await bus.propose_spec(b"spec")
        await bus.acquire_lease(0, "0" * 16, 1.0)
        await bus.offer(samples.header())
        await bus.fill_shards(0, [Shard(epoch=0, index=0, start=0, stop=9)])
        claimed = await bus.claim_shard("a.0", 1.0)
        await bus.save_position("a.0", claimed.entry_id, 3)

    one = recorded(story)
    keys, values, expiries = MemoryBus(RUN, VirtualClock(), one.store).keys, one.store.values, one.store.expiries
    assert difference(one, redis_server) is None
    header_key = keys.deltas(0, "l0")
    deltas, shards = values[header_key], values[keys.shards]
    for wrong in (
        {keys.spec: b"another"},
        {keys.tape(0): Stream()},
        {header_key: dataclasses.replace(deltas, data=[b"another"])},
        {header_key: dataclasses.replace(deltas, ids=[(1, 0)])},
        {keys.shards: dataclasses.replace(shards, held={})},
        {keys.shard_positions: {b"1-0": b"3"}},
        {keys.lease(0): {b"another": b"type"}},
    ):
        one.store.values = values | wrong
        assert next(iter(wrong)) in str(difference(one, redis_server))
    one.store.values = values
    one.store.expiries = {}
    assert keys.lease(0) in str(difference(one, redis_server))
    one.store.expiries = expiries
    assert difference(one, redis_server) is None


# --- the server's own events -----------------------------------------------------------------------------


def test_who_is_gone_is_as_memory_saw_it(redis_server: str) -> None:
    """The replay takes no time, yet a silent holder is gone there, one that reports is not, and the edge is sharp."""
    header = samples.report()
    name, incarnation = header.learner, header.incarnation

    async def story(connect: Callable[[str], MemoryBus], store: WorldStore) -> None:
        bus = connect("a")
        await bus.fill_shards(0, [Shard(epoch=0, index=i, start=0, stop=9) for i in range(2)])
        await bus.write_report(header)
        first = await bus.claim_shard(f"{name}.{incarnation}", 1.0)
        await asyncio.sleep(0.999)
        second = await bus.claim_shard("other.00", 1.0)
        assert second.entry_id != first.entry_id
        assert await bus.claim_shard("third.00", 1.0) is None
        await asyncio.sleep(0.001)
        taken = await bus.claim_shard("third.00", 1.0)
        assert taken.entry_id == first.entry_id

    one = recorded(story)
    assert difference(one, redis_server) is None
    index, call = [(i, e) for i, e in enumerate(one.events) if isinstance(e, Called) and e.method == "claim_shard"][-1]
    assert call.times.stamps
    now = {key: dict.fromkeys(fields, (0, b"")) for key, fields in call.times.stamps.items()}
    found = difference(altered(one, index, times=dataclasses.replace(call.times, stamps=now)), redis_server)
    assert found.index == index


def test_which_syncers_are_here_is_as_memory_saw_it(redis_server: str) -> None:
    """One whose time is over is gone there too, one whose time is nearly over is not."""

    async def story(connect: Callable[[str], MemoryBus], store: WorldStore) -> None:
        bus = connect("a")
        first, second = "a" * 16, "b" * 16
        await bus.announce_syncer(first, "one", 1.0)
        await asyncio.sleep(0.999)
        assert await bus.announce_syncer(second, "two", 1.0) == (first, second)
        await asyncio.sleep(0.001)
        store.full = True  # which does not keep anybody from telling the time
        assert await bus.read_syncers() == {second: "two"}
        assert await bus.announce_syncer(second, "two", 1.0) == (second,)

    assert difference(recorded(story), redis_server) is None


def test_what_expired_was_lost_or_came_back_is_the_same_there(redis_server: str) -> None:
    """A lapsed lease can be taken, a rewind brings back what was there before, and a full server refuses."""

    async def story(connect: Callable[[str], MemoryBus], store: WorldStore) -> None:
        bus = connect("a")
        assert await bus.acquire_lease(0, "a" * 16, 1.0)
        await bus.write_chunks(bus.keys.initial_payload(0, "a" * 16), 0, [b"one"], 60.0)
        saved = store.snapshot()
        await asyncio.sleep(2.0)
        assert await bus.acquire_lease(0, "b" * 16, 1.0)
        lost = await bus.offer(samples.header())
        store.full = True
        with pytest.raises(BusFull):
            await bus.offer(samples.header())
        store.restart(saved)
        store.full = False
        await asyncio.sleep(0.5)
        assert await bus.read_offers(0) == []
        again = await bus.offer(samples.header())
        assert await bus.read_offers(0, dict([parse_offer_id(lost)])) == await bus.read_offers(0)
        assert (await bus.read_offers(0))[0].entry_id == again
        store.come_back()
        assert await bus.acquire_lease(0, "c" * 16, 1.0)

    one = recorded(story)
    assert {type(event) for event in one.events} == {Called, Expired, Snapshot, Restarted, Full}
    assert difference(one, redis_server) is None
    for index, event in enumerate(one.events):
        if isinstance(event, (Expired, Full)) or event == Restarted(0):
            left_out = dataclasses.replace(one, events=one.events[:index] + one.events[index + 1 :])
            if event != Full(False):  # where it is left out, the restart's own restoring is what fails
                assert difference(left_out, redis_server) is not None, event


# --- mutations of the scripts ------------------------------------------------------------------------------


def mutant(name: str) -> tuple[str, Script]:
    """The name of the script that is mutated, and what it has become."""
    mutated, old, new = MUTATIONS[name]
    text = redis_calls.script(mutated).text.replace(old, new)
    return mutated, Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_changes_its_script(name: str) -> None:
    """One that does not would prove nothing; the slow tests come too late to say so."""
    mutated, script = mutant(name)
    assert script.text != redis_calls.script(mutated).text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_a_script_is_found(name: str, redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 500 seeds, by an outcome or by the content in the end."""
    real, (mutated, patched) = redis_calls.script, mutant(name)
    assert patched.text != real(mutated).text
    monkeypatch.setattr(redis_calls, "script", lambda script: patched if script == mutated else real(script))
    # Those of before would be loaded.
    monkeypatch.setattr(redis_calls, "scripts", cache(redis_calls.scripts.__wrapped__))
    for seed in range(WITHIN_SEEDS):
        found = difference(world(seed, SHORT), redis_server)
        if found is not None:
            print(f"{name}: found in seed {seed}, event {found.index}: {found.what[:200]}")
            return
    pytest.fail(f"{name}: not found in {WITHIN_SEEDS} seeds")


@pytest.mark.slow
def test_the_command_says_that_a_world_is_the_same_on_redis() -> None:
    """It brings its own Redis."""
    done = CliRunner().invoke(app, ["twin", "2"])
    assert done.exit_code == 0, done.output
    assert "seed 2" in done.output
    assert "the same on Redis" in done.output
