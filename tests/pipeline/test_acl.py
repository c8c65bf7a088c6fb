"""What a party's Redis user can do, tried on a server: all that it needs, and nothing that is another's. Redis 7."""

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.exceptions as rx

from diloco.pipeline.bus import acl
from diloco.pipeline.bus.commits import Published, Refusal, Republication
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import START, Bus
from diloco.pipeline.bus.redis.connecting import connect_calls
from diloco.pipeline.bus.redis.run_list import connect_runs
from diloco.pipeline.bus.redis_streams import RedisBus, connect
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusError, BusUnavailable, NotPermitted, UsageError
from diloco.pipeline.messages.run import Event, InitialUpload, Phase, SeenReport
from diloco.pipeline.messages.shards import DataOrder, Shard
from diloco.pipeline.messages.spec import Wanted
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.transfer.payloads import pull, push
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.status_reader import read_status
from tests import samples
from tests.pipeline.conftest import LEARNERS, Server, as_user, known
from tests.pipeline.test_commit_cases import NONCE, commit_on, first_head, rejected, rest_of, stage

pytestmark = pytest.mark.redis

WANTED = Wanted(sync={"tokens": 7})
VALUES = np.arange(8, dtype=np.float32)
TOP = "18446744073709551615-18446744073709551615"
"""The greatest entry id of a stream: after it, none can be added."""


class Noting:
    """A party's bus that notes which of its methods were called."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self.bus, name)


@pytest.fixture
async def parties(server: Server) -> AsyncIterator[dict[str, Any]]:
    """Name of user -> its bus. The syncer's connects first: it loads the scripts."""
    found = {user.name: Noting(await server.bus(user.name)) for user in server.users}
    yield found
    for party in found.values():
        await party.bus.close()


# --- what each can do --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["learner-l0", "learner"])
async def test_every_party_can_make_all_its_calls(server: Server, parties: dict[str, Any], name: str) -> None:
    """A run in short, each call as the user of the party that makes it: between them, all that a bus can do."""
    syncer, learner, evaluator, viewer = (parties[user] for user in ("syncer", name, "evaluator", "viewer"))
    keys = server.keys
    # Joining, and version 0.
    spec = samples.spec()
    assert await learner.read_spec() is None
    assert not (await learner.info()).cluster
    assert await syncer.offer_wanted(WANTED, 10) == await learner.read_wanted() == WANTED
    assert await learner.propose_spec(encode(spec)) == encode(spec)
    assert await learner.propose_spec(b"another") == encode(spec)
    assert await learner.write_report(samples.report()) is None
    await learner.add_event(Event(name="learner_joined", who="l0", detail="", unix_s=0.0))
    assert await learner.claim_initial(NONCE, 10)
    assert await learner.claim_initial(NONCE, 10)
    await push(learner, keys.initial_payload(0, NONCE), VALUES, 1024, 60)
    assert await learner.finish_initial(InitialUpload(learner="l0", nonce=NONCE), 60)
    assert await learner.count_chunks(keys.initial_payload(0, NONCE)) == 1
    # The syncer takes over.
    assert await syncer.read_initial() is not None
    assert await pull(syncer, keys.initial_payload(0, NONCE), 8, "fp32", 1024)
    assert await syncer.announce_syncer(NONCE, "s0", 10) == (NONCE,)
    await syncer.write_state(samples.run_state())
    assert not await syncer.begin_again(samples.run_state())
    assert await syncer.replace_spec(encode(spec), encode(spec))
    await syncer.put_back_report(SeenReport(report=samples.report(), age_s=60.0))
    expected = await first_head(syncer)
    assert await syncer.read_leases([0]) == [NONCE]
    assert await syncer.tape_end()
    # Training: shards, heads, a global, deltas.
    assert await learner.propose_data_order(order := DataOrder(length=24, seed=None)) == order
    assert await learner.propose_data_order(DataOrder(length=25, seed=1)) == order
    assert await learner.count_epochs() == 0
    assert await learner.fill_shards(0, [Shard(epoch=0, index=i, start=8 * i, stop=8 * i + 8) for i in range(3)])
    first = await learner.claim_shard("l0.00", 10)
    await learner.save_position("l0.00", first.entry_id, 3)
    await learner.release_shards("l0.00")
    again = await learner.claim_shard("l0.00", 10)
    assert (again.entry_id, again.position) == (first.entry_id, 3)
    await learner.finish_shard("l0.00", first.entry_id)
    cursors = dict.fromkeys(await learner.tape_end(), START)
    assert len(await learner.read_tape(cursors, block_s=0.01)) == 1
    (head,) = await learner.read_heads([0])
    assert await learner.read_state() is not None
    assert await learner.read_initial() is not None
    assert len(await learner.read_syncers()) == 1
    assert await learner.read_chunks(head.payload, 0, 10, 2**20, extend_s=60) == [b"chunk"] * 2
    delta = keys.delta_payload(0, "l0", "0" * 8, 0)
    entry = await learner.offer(samples.header("l0", layout=bytes(16)))
    await stage(learner, delta)
    await stage(learner, keys.delta_payload(0, "l0", "0" * 8, 1))
    renewed = await learner.offer(samples.header("l0", serial=1))
    bad = await learner.offer(samples.header("l0", serial=2), renewed)
    # Moments for who joins.
    await learner.ask_moments(samples.moments_wish("l0"), 10)
    assert (await learner.read_moments()).wish is not None
    assert await learner.claim_moments(NONCE, 10)
    await push(learner, keys.moments_payload(0, "exp_avg", NONCE), VALUES, 1024, 60)
    assert await learner.finish_moments(samples.moments_offer(nonce=NONCE), 60)
    assert await pull(learner, keys.moments_payload(0, "exp_avg", NONCE), 8, "fp32", 1024)
    assert len(await learner.read_reports()) == 1
    # Merging.
    assert [one.entry_id for one in await syncer.read_offers(0, block_s=0.01)] == [entry, bad]
    assert await syncer.read_chunks(delta, 0, 10, 2**20) == [b"chunk"] * 2
    await learner.expire_soon(delta, 30)
    assert await syncer.count_chunks(delta) == 2
    await syncer.write_window(0, NONCE, expected, samples.IDLE, None)
    await syncer.refuse(0, Refusal(NONCE, expected, (bad,), (), (rejected("l0", 5),), 5))
    rest = await rest_of(syncer, 1)
    given = {"rest": rest, "entries": (entry,), "delta_payloads": (delta,)}
    await syncer.commit(await commit_on(syncer, expected, **given))
    assert await syncer.count_chunks(delta) == 0
    for party in (learner, evaluator):
        assert await party.read_chunks(head.payload, 0, 10, 2**20, extend_s=60) == [b"chunk"] * 2
    payload = await stage(syncer, keys.global_payload(0, 1, "ee" * 4))
    await syncer.republish(0, Republication(NONCE, (1, bytes([2]) * 16), Published(payload, rest)))
    # A slow pull of a global that was replaced: a learner cannot let it live on, and reads it all the same.
    assert await learner.read_chunks(head.payload, 0, 10, 2**20, extend_s=600) == [b"chunk"] * 2
    # Evaluating, looking.
    assert await evaluator.read_spec() is not None
    assert await evaluator.read_state() is not None
    (head,) = await evaluator.read_heads([0])
    for payload in (head.payload, head.rest):
        assert await evaluator.read_chunks(payload, 0, 10, 2**20, extend_s=600) == [b"chunk"] * 2
    await evaluator.add_evaluation(samples.evaluation(loss=1.0))
    status = await read_status(viewer, LoopClock())
    assert status["evaluation"]["loss"] == 1.0
    assert status["outer_steps"] == 1
    assert (await read_ledger_inputs(viewer, 1, 5.0)).reports
    assert len(await viewer.read_tape({0: START})) == 3
    assert len(await viewer.read_events()) == 1
    await Collector(viewer, LoopClock())._reader.poll()
    # The end.
    await syncer.trim_tape(0, "1-0")
    await syncer.trim_events()
    assert (await syncer.read_shards()).epochs == 1
    assert await syncer.read_data_order() == order
    with pytest.raises(UsageError, match="already has data shards"):
        await syncer.restore_shards(await syncer.read_shards())
    await syncer.delete_data()
    assert await syncer.read_data_order() is None
    await syncer.release_lease(0, NONCE)
    await syncer.withdraw_syncer(NONCE)
    assert await syncer.read_syncers() == {}
    assert await syncer.read_pages() == {}
    assert await syncer.read_savers() == []
    assert (await syncer.info()).version
    await syncer.delete_run()
    assert await syncer.read_spec() is None
    called = set().union(*(party.called for party in parties.values()))
    everything = {name for name, _ in inspect.getmembers(Bus, inspect.iscoroutinefunction)}
    assert everything - called == {"close"}
    workers = Path(__file__).parents[2] / "workers"
    for evaluates, party in ((False, learner), (True, evaluator)):
        sources = [path.read_text() for path in workers.rglob("*.py") if (path.stem == "evaluating") is evaluates]
        theirs = everything.intersection(re.findall(r"bus\.(\w+)\(", "".join(sources)))
        assert theirs <= party.called | {"close"}
    log = server.admin.acl_log()
    refused = {(one["username"], one["object"]) for one in log if one["username"].startswith(name)}
    # Only what may be: loading scripts, letting a global live on, telling the server the name of the library.
    assert {what for _, what in refused} <= {"script|load", head.payload, "client|setinfo", "pexpire"} | {
        keys.global_payload(0, version, f"{version:08x}") for version in range(2)
    }


# --- what a learner cannot do ------------------------------------------------------------------------


def families(keys: RunKeys) -> dict[str, str]:
    """Key families that are not a learner's to write, with an example of each."""
    return {
        "head": keys.head(0),
        "lease": keys.lease(0),
        "global_payload": keys.global_payload(0, 0, "00000000"),
        "rest_payload": keys.rest_payload(0, 0, "00000000"),
        "momentum_payload": keys.momentum_payload(0, 0, "00000000"),
        "tape": keys.tape(0),
        "wanted": keys.wanted,
        "state": keys.state,
        "syncers": keys.syncers,
        "evaluations": keys.evaluations,
        "deltas": keys.deltas(0, "l1"),
        "holder": keys.holder("l1"),
        "delta_payload": keys.delta_payload(0, "l1", "0" * 8, 0),
    }


SHARED = {
    *("spec", "learners", "seen", "events", "shards", "shard_positions", "shard_epoch", "init_claim", "initial"),
    *("initial_payload", "moments_wish", "moments_claim", "moments_offer", "moments_payload", "senders", "arrivals"),
    "data_order",
}
"""Families that learners write together; what one can do to the others there stands in SECURITY.md."""


def test_every_key_family_is_either_guarded_or_known_to_be_shared() -> None:
    """A new key is somebody's decision, not an oversight."""
    named = {name for name in vars(RunKeys) if not name.startswith("_")} - {"run", "groups", "group"}
    assert named == families(RunKeys("r")).keys() | SHARED


async def story(server: Server, parties: dict[str, Any]) -> tuple[int, bytes]:
    """A run under way: a head, a lease, a pending delta of each learner; every guarded key is there."""
    syncer = parties["syncer"]
    expected = await first_head(syncer)
    await rest_of(syncer, 0)
    await syncer.announce_syncer(NONCE, "s0", 60)
    await syncer.offer_wanted(WANTED, 60)
    await syncer.write_state(samples.run_state())
    for name in LEARNERS:
        learner = parties[f"learner-{name}"]
        await learner.write_report(samples.report(learner=name))
        await stage(learner, server.keys.delta_payload(0, name, "0" * 8, 0))
        await learner.offer(samples.header(name))
    await parties["evaluator"].add_evaluation(samples.evaluation())
    there = server.backdoor.dump()
    assert all(key in there for key in families(server.keys).values())
    return expected


def plain_writes(key: str, own: str) -> list[tuple[Any, ...]]:
    """Commands that would change a key, or take its place."""
    return [
        *(
            ("SET", key, "x"),
            ("SETNX", key, "x"),
            ("GETSET", key, "x"),
            ("APPEND", key, "x"),
            ("SETRANGE", key, 0, "x"),
        ),
        *(("DEL", key), ("UNLINK", key), ("GETDEL", key), ("GETEX", key, "PX", 1), ("INCR", key), ("MSET", key, "x")),
        *(("EXPIRE", key, 0), ("PEXPIRE", key, 1), ("EXPIREAT", key, 1), ("PEXPIREAT", key, 1), ("PERSIST", key)),
        *(("RENAME", key, own), ("RENAME", own, key), ("RENAMENX", own, key), ("COPY", own, key, "REPLACE")),
        *(
            ("RESTORE", key, 0, b"", "REPLACE"),
            ("MOVE", key, 1),
            ("SORT", own, "STORE", key),
            ("BITOP", "NOT", key, own),
        ),
        *(("HSET", key, "version", "9"), ("HSETNX", key, "x", "x"), ("HDEL", key, "version"), ("HINCRBY", key, "x", 1)),
        *(("XADD", key, "*", "r", "x"), ("XADD", key, "MAXLEN", 1, "*", "h", "x"), ("XADD", key, TOP, "h", "x")),
        *(("XDEL", key, "1-0"), ("XTRIM", key, "MAXLEN", 0), ("XSETID", key, TOP), ("XACK", key, "g", "1-0")),
        *(("XGROUP", "CREATE", key, "g", "0"), ("XREADGROUP", "GROUP", "g", "c", "STREAMS", key, ">")),
        *(("LPUSH", key, "x"), ("SADD", key, "x"), ("ZADD", key, 1, "x"), ("PFADD", key, "x"), ("SETBIT", key, 0, 1)),
    ]


KEYLESS: list[tuple[Any, ...]] = [
    *(("FLUSHDB",), ("FLUSHALL",), ("SWAPDB", 0, 1), ("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "GET", "*")),
    *(("ACL", "SETUSER", "default", "on"), ("ACL", "LIST"), ("EVAL", "while true do end", 0), ("SCRIPT", "FLUSH")),
    *(("SCRIPT", "KILL"), ("FUNCTION", "FLUSH"), ("CLIENT", "KILL", "TYPE", "normal"), ("CLIENT", "PAUSE", 9999)),
    *(("KEYS", "*"), ("SCAN", 0), ("PUBLISH", "c", "x"), ("MONITOR",), ("REPLICAOF", "NO", "ONE")),
]


@pytest.mark.parametrize(
    ("user", "family"),
    [
        *(("learner-l0", family) for family in families(RunKeys("r"))),
        # A user for learners of any name writes the deltas of any name, and holds any.
        *(("learner", f) for f in families(RunKeys("r")) if not f.startswith(("delta", "holder"))),
    ],
)
async def test_no_plain_command_of_a_learner_changes_what_is_not_its_own(
    server: Server, parties: dict[str, Any], user: str, family: str
) -> None:
    """Heads, leases, globals, momenta, tapes, the run's state, syncers, evaluations, other learners' deltas."""
    await story(server, parties)
    before = server.backdoor.dump()
    own = server.keys.delta_payload(0, "l0", "0" * 8, 0)
    client = server.raw(user)
    for command in plain_writes(families(server.keys)[family], own):
        with pytest.raises(rx.NoPermissionError):
            client.execute_command(*command)
    client.close()
    assert server.backdoor.dump() == before


@pytest.mark.parametrize("user", ["learner-l0", "learner", "evaluator", "viewer"])
async def test_no_party_but_the_operator_administers_the_server(server: Server, user: str) -> None:
    """Nor does any send scripts of its own: one without an end would stop everybody."""
    client = server.raw(user)
    for command in KEYLESS:
        with pytest.raises(rx.NoPermissionError):
            client.execute_command(*command)
    client.close()


Step = Callable[[Bus, RunKeys, tuple[int, bytes]], Awaitable[object]]


SCRIPTED: dict[str, Step] = {
    "commit": lambda bus, keys, at: bus.commit(COMMITS[keys.run]),
    "republish": lambda bus, keys, at: bus.republish(0, Republication(NONCE, at, COMMITS[keys.run].published)),
    "refuse": lambda bus, keys, at: bus.refuse(0, Refusal(NONCE, at, (), (), (rejected("l1"),))),
    "write_window": lambda bus, keys, at: bus.write_window(0, NONCE, at, samples.IDLE, None),
    "acquire_lease": lambda bus, keys, at: bus.acquire_lease(0, NONCE, 60),
    "acquire_free_lease": lambda bus, keys, at: bus.acquire_lease(7, NONCE, 60),
    "release_lease": lambda bus, keys, at: bus.release_lease(0, NONCE),
    "write_state": lambda bus, keys, at: bus.write_state(samples.run_state(phase=Phase.FINISHED)),
    "begin_again": lambda bus, keys, at: bus._redis.script(  # type: ignore[attr-defined]
        "begin_again",
        [keys.state],
        Phase.RUNNING.rank,
        Phase.RUNNING.rank,
        "blob",  # as if it were finished
    ),
    "announce_syncer": lambda bus, keys, at: bus.announce_syncer("cc" * 8, "s1", 60),
    "offer_wanted": lambda bus, keys, at: bus.offer_wanted(WANTED, 600),
    "withdraw_syncer": lambda bus, keys, at: bus.withdraw_syncer(NONCE),
    "trim_tape": lambda bus, keys, at: bus.trim_tape(0, "9999999999999-0"),
    "stage_global": lambda bus, keys, at: stage(bus, keys.global_payload(0, 1, "dd" * 4)),
    "stage_momentum": lambda bus, keys, at: stage(bus, keys.momentum_payload(0, 1, "dd" * 4)),
    "chunk_of_another": lambda bus, keys, at: bus.write_chunks(keys.delta_payload(0, "l1", "0" * 8, 0), 2, [b"x"], 60),
    "offer_as_another": lambda bus, keys, at: bus.offer(samples.header("l1", serial=9)),
    "claim_on_a_head": lambda bus, keys, at: bus._redis.script("claim", [keys.head(9)], "x", 1, 1),  # type: ignore[attr-defined]
    "write_report_elsewhere": lambda bus, keys, at: bus._redis.script(  # type: ignore[attr-defined]
        "write_report", [keys.state, keys.seen, keys.state, keys.holder("l0")], "blob", "9", 1, 1, "0" * 8
    ),
    "take_anothers_place": lambda bus, keys, at: bus.write_report(
        samples.report("l1", incarnation="f" * 8, generation=9)
    ),
}
COMMITS: dict[str, Any] = {}
"""Run -> a commit that would succeed, were it the syncer's."""


@pytest.mark.parametrize("step", SCRIPTED)
async def test_no_script_does_for_a_learner_what_it_could_not_do_outside(
    server: Server, parties: dict[str, Any], step: str
) -> None:
    """The same calls that succeed as the syncer: nonce, head and payloads are right, only the user is not."""
    expected = await story(server, parties)
    COMMITS[server.run] = await commit_on(parties["syncer"].bus, expected)
    before = server.backdoor.dump()
    with pytest.raises(NotPermitted):
        await SCRIPTED[step](parties["learner-l0"].bus, server.keys, expected)
    assert server.backdoor.dump() == before


async def test_who_only_looks_changes_nothing(server: Server, parties: dict[str, Any]) -> None:
    """Neither do the viewer and the evaluator come by deltas, momenta or a learner's moments to read."""
    expected = await story(server, parties)
    COMMITS[server.run] = await commit_on(parties["syncer"].bus, expected)
    before = server.backdoor.dump()
    for user in ("viewer", "evaluator"):
        client = server.raw(user)
        for name, key in families(server.keys).items():
            for command in plain_writes(key, key):
                if (user, name, command[0]) != ("evaluator", "evaluations", "XADD"):
                    with pytest.raises(rx.NoPermissionError):
                        client.execute_command(*command)
        for key in (families(server.keys)["delta_payload"], families(server.keys)["momentum_payload"]):
            with pytest.raises(rx.NoPermissionError):
                client.xread({key: "0"})
        client.close()
        for step in SCRIPTED.values():
            with pytest.raises(NotPermitted):
                await step(parties[user].bus, server.keys, expected)
    assert server.backdoor.dump() == before


# --- learners among themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack", [("MAXLEN", "1", "*"), ("MAXLEN", "0", "*"), ("MINID", TOP, "*"), (TOP,)], ids=["1", "0", "minid", "top"]
)
async def test_xadd_of_a_learner_neither_trims_nor_blocks_what_others_offer(
    server: Server, parties: dict[str, Any], attack: tuple[str, ...]
) -> None:
    """MAXLEN 1 and the greatest id: on its own stream it harms itself, on another's it may not be sent."""
    expected = await story(server, parties)
    syncer, neighbour, client = parties["syncer"], parties["learner-l1"], server.raw("learner-l0")
    theirs = [one for one in await syncer.read_offers(0) if parse_offer_id(one.entry_id)[0] == "l1"]
    assert len(theirs) == 1
    with pytest.raises(rx.NoPermissionError):
        client.execute_command("XADD", server.keys.deltas(0, "l1"), *attack, "h", "x")
    client.execute_command("XADD", server.keys.deltas(0, "l0"), *attack, "h", "x")
    client.close()
    assert [one for one in await syncer.read_offers(0) if parse_offer_id(one.entry_id)[0] == "l1"] == theirs
    # The owner has seen all that is there, the greatest id too; who offers next is read as before, and merged.
    known = dict(parse_offer_id(one.entry_id) for one in await syncer.read_offers(0))
    waiting = asyncio.ensure_future(syncer.read_offers(0, known, block_s=5))
    entry = await neighbour.offer(samples.header("l1", serial=1))
    assert [one.entry_id for one in await waiting] == [entry]
    own = [one.entry_id for one in await syncer.read_offers(0) if one.header is None]
    assert own == [] or parse_offer_id(own[0])[0] == "l0"
    await syncer.refuse(0, Refusal(NONCE, expected, tuple(own), (), (rejected("l0"),)))
    await syncer.commit(await commit_on(syncer.bus, expected, entries=(theirs[0].entry_id, entry)))
    assert all(one.header is not None and one.header.learner == "l0" for one in await syncer.read_offers(0))


async def test_a_learner_that_used_up_its_own_ids_is_told_and_nobody_else_notices(
    server: Server, parties: dict[str, Any]
) -> None:
    await story(server, parties)
    client = server.raw("learner-l0")
    client.execute_command("XADD", server.keys.deltas(0, "l0"), TOP, "h", "x")
    client.close()
    with pytest.raises(BusError):
        await parties["learner-l0"].offer(samples.header("l0", serial=2))
    assert await parties["learner-l1"].offer(samples.header("l1", serial=2))


async def test_names_of_senders_cannot_be_taken_back_or_lead_elsewhere(server: Server, parties: dict[str, Any]) -> None:
    """A learner may add names: those that are no learner's are passed over, and nobody's name can be removed."""
    await story(server, parties)
    client, senders = server.raw("learner-l0"), server.keys.senders(0)
    for name in ("", "a:b", "l0}:x", "x" * 65, b"\xff"):
        client.hsetnx(senders, name, "")
    for command in (("HDEL", senders, "l1"), ("HSET", senders, "l1", "x"), ("DEL", senders), ("PEXPIRE", senders, 1)):
        with pytest.raises(rx.NoPermissionError):
            client.execute_command(*command)
    client.close()
    assert {parse_offer_id(one.entry_id)[0] for one in await parties["syncer"].read_offers(0)} == set(LEARNERS)


async def test_a_learner_does_not_come_by_what_others_trained(server: Server, parties: dict[str, Any]) -> None:
    """Neither their headers nor their payloads; an outer momentum is the syncer's alone, and what a global lacks."""
    await story(server, parties)
    client = server.raw("learner-l0")
    for name in ("deltas", "delta_payload", "momentum_payload", "rest_payload"):
        for command in (("XREAD", "STREAMS", families(server.keys)[name], "0"), ("XLEN", families(server.keys)[name])):
            with pytest.raises(rx.NoPermissionError):
                client.execute_command(*command)
    client.close()


# --- connecting --------------------------------------------------------------------------------------


async def test_learners_wait_for_a_syncer_to_load_the_scripts(server: Server) -> None:
    """They may not send scripts, so after a restart of the server they wait for a party that does."""
    server.admin.script_flush()
    learner = await server.bus("learner-l0")
    with pytest.raises(BusUnavailable, match="if no syncer is running, start one"):
        await learner.write_report(samples.report())
    with pytest.raises(BusUnavailable, match="if no syncer is running, start one"):
        await learner.write_chunks(server.keys.delta_payload(0, "l0", "0" * 8, 0), 0, [b"x"], 60)
    syncer = await server.bus("syncer")
    assert await learner.write_report(samples.report()) is None
    server.admin.script_flush()
    assert await syncer.acquire_lease(0, NONCE, 60)  # meets with it, and loads all
    assert await learner.write_report(samples.report(number=2)) is None
    await learner.close()
    await syncer.close()


async def test_a_learner_under_anothers_name_is_told_which_setting_is_wrong(
    server: Server, parties: dict[str, Any]
) -> None:
    """In one line, and not which users there might be: it is nearly always a typing error."""
    with pytest.raises(NotPermitted) as refused:
        await parties["learner-l0"].write_report(samples.report("l9"))
    assert str(refused.value) == (
        "learner id 'l9' does not match user 'learner-l0'; set DILOCO_LEARNER_ID=l0 (or learner_id=, --learner-id)"
    )
    with pytest.raises(NotPermitted, match="put this party's own user in DILOCO_REDIS_URL") as refused:
        await parties["learner-l0"].offer(samples.header("l9"))
    assert "pw-" not in str(refused.value)


async def test_a_viewer_is_told_that_lists_and_changes_need_the_operator(
    server: Server, parties: dict[str, Any]
) -> None:
    with pytest.raises(NotPermitted, match="send SCAN; listing runs needs the operator's user"):
        async with connect_runs(as_user(server.url, "viewer")) as runs:
            await runs.taken()
    with pytest.raises(NotPermitted, match=r"in DILOCO_REDIS_URL \(to change a run, the operator's\)"):
        await parties["viewer"].write_state(samples.run_state())


async def test_users_of_one_run_do_not_reach_another(server: Server) -> None:
    other = await connect(as_user(server.url, "syncer"), f"{server.run}x")
    with pytest.raises(NotPermitted):
        await other.read_spec()
    await other.close()


async def test_users_of_any_run_reach_each(server: Server) -> None:
    """As in the file that is shipped."""
    with known(server.admin, [acl.User("any", acl.learner().rules)]):
        calls = await connect_calls(as_user(server.url, "any"))
        bus = RedisBus(calls, server.run)
        bus.use_spec(samples.spec(groups=3))
        assert await bus.read_spec() is None
        assert await bus.read_heads([0, 1]) == [None, None]
        with pytest.raises(NotPermitted):
            await bus.acquire_lease(1, NONCE, 1)
        await bus.close()
