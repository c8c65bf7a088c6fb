"""What only a server can do to us, and what its errors are called here."""

import asyncio
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.exceptions as rx
from redis.asyncio import ConnectionPool

from diloco.pipeline.bus.embedded import EmbeddedRedis, find_server
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis import node_connections
from diloco.pipeline.bus.redis.redis_errors import translate
from diloco.pipeline.bus.redis.redis_url import parse
from diloco.pipeline.bus.redis_streams import connect, open_bus
from diloco.pipeline.bus.times import BusTimes
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import (
    BadMessage,
    BusError,
    BusFull,
    BusUnavailable,
    DilocoError,
    LoginRefused,
    NotPermitted,
    ScriptsMissing,
    UsageError,
)
from diloco.pipeline.payload.codec import PayloadReader
from diloco.pipeline.transfer.payloads import arriving, push
from diloco_studies.strikes.proxy import Proxy
from tests import samples
from tests.backdoor import RedisBackdoor

A, B = "aa" * 8, "bb" * 8


@pytest.fixture
def backdoor(redis_server: str) -> Iterator[RedisBackdoor]:
    backdoor = RedisBackdoor("test-redis-only", redis_server)
    backdoor.client.flushdb()
    yield backdoor
    backdoor.client.close()


@pytest.mark.redis
async def test_scripts_that_the_server_forgot_are_sent_again(bus: Bus, backdoor: RedisBackdoor) -> None:
    await bus.acquire_lease(0, A, 10)
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    backdoor.client.script_flush()
    assert not await bus.acquire_lease(0, B, 10)
    await bus.write_chunks(key, 0, [b"a", b"b"], 10)
    assert await bus.count_chunks(key) == 2


@pytest.mark.redis
async def test_an_eviction_policy_that_drops_keys_is_warned_of(bus: Bus, backdoor: RedisBackdoor) -> None:
    backdoor.client.config_set("maxmemory", 2**30)
    backdoor.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        info = await bus.info()
    finally:
        backdoor.client.config_set("maxmemory-policy", "noeviction")
        backdoor.client.config_set("maxmemory", 0)
    assert info.maxmemory_bytes == 2**30
    assert "allkeys-lru" in info.warnings[0]


@pytest.mark.redis
async def test_a_read_longer_than_any_socket_timeout_of_redis_py_is_not_cut_short(bus: Bus) -> None:
    started = time.monotonic()
    assert await bus.read_offers(0, block_s=5.5) == []
    assert time.monotonic() - started > 5.4


@pytest.mark.redis
async def test_payloads_that_do_not_come_hold_up_neither_a_header_nor_a_payload_that_is_there(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A syncer waits for as many as are announced: hundreds, where all learners leave."""
    monkeypatch.setattr(node_connections, "LANES", dict.fromkeys(node_connections.LANES, 1))
    values, waiting = np.arange(3.0, dtype=np.float32), bus.keys.delta_payload(0, "l0", "0" * 8, 1)
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await push(bus, key, values, 4, 60)
    async with asyncio.TaskGroup() as group:
        idle = group.create_task(bus.read_chunks(waiting, 0, 1, 4, block_s=30))
        await asyncio.sleep(0.1)
        header = group.create_task(bus.read_offers(0, block_s=30))
        await bus.offer(samples.header("l0"))
        assert len(await header) == 1
        reader = PayloadReader(3, "fp32", 4)
        async for chunks in arriving(bus, key, reader):
            for chunk in chunks:
                reader.feed(chunk)
        assert not idle.done()
        idle.cancel()


@pytest.mark.redis
async def test_a_key_with_what_no_party_writes_is_named_with_what_to_do_about_it(
    bus: Bus, backdoor: RedisBackdoor
) -> None:
    """A value of another kind, a head or a state that cannot be read, and what a script refuses to touch."""
    head, state, senders = bus.keys.head(0), bus.keys.state, bus.keys.senders(0)
    backdoor.client.set(bus.keys.arrivals(0), "x")
    with pytest.raises(BadMessage, match=r"UNLINK 'diloco:.*:arrivals'"):
        await bus.read_offers(0, block_s=0.1)
    backdoor.client.delete(bus.keys.arrivals(0))
    backdoor.client.set(bus.keys.head(1), "x")
    with pytest.raises(BadMessage, match=r"UNLINK 'diloco:.*:head:1'"):
        await bus.read_heads([0, 1])
    backdoor.client.hset(head, mapping={"version": "3"})
    backdoor.client.hset(state, mapping={"blob": b"garbage"})
    backdoor.client.set(senders, "x")
    for ask, key in (
        (bus.read_heads([0]), head),
        (bus.read_state(), state),
        (bus.read_offers(0), senders),
        (bus.offer(samples.header()), senders),
    ):
        with pytest.raises(BadMessage) as told:
            await ask
        assert f"delete it (UNLINK '{key}'); the run's parties put the right value back" in str(told.value)


def test_a_script_that_met_a_wrong_type_names_no_key() -> None:
    """The caller knows its first key, and any other may be the wrong one."""
    told = "WRONGTYPE Operation against a key holding the wrong kind of value script: f_1, on @user_script:1."
    assert "lease" not in str(translate(rx.ResponseError(told), "host:1", key="diloco:{r:0}:lease:0"))


@pytest.mark.redis
async def test_a_replica_is_named_with_the_address_to_use(bus: Bus, backdoor: RedisBackdoor) -> None:
    """Also a call in flight at another call's refusal."""
    client = backdoor.client
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        waits = asyncio.ensure_future(bus.read_offers(0, block_s=30.0))
        await asyncio.sleep(0.1)
        with pytest.raises(BusUnavailable, match=r"is a replica.*use the primary's address in DILOCO_REDIS_URL"):
            await bus.acquire_lease(0, A, 10)
        with pytest.raises(BusUnavailable, match=r"is not the primary; .*use the primary's address"):
            await waits
    finally:
        client.execute_command("REPLICAOF", "NO", "ONE")


@pytest.mark.redis
@pytest.mark.parametrize("renamed", ["EVALSHA", "SCRIPT", "XADD"])
async def test_a_server_without_scripts_or_streams_is_refused_with_what_a_run_needs(
    renamed: str, tmp_path: Path, popen: Callable[..., Any], redis_binary: Path | None
) -> None:
    path = tmp_path / "s"
    told = ["--port", "0", "--unixsocket", str(path), "--save", "", "--rename-command", renamed, ""]
    popen([redis_binary or find_server(), *told], stdout=subprocess.DEVNULL)
    while not path.exists():  # a process has no event to wait for
        await asyncio.sleep(0.02)
    with pytest.raises(UsageError, match=r"does not have .*; use a service that allows scripts .* and streams"):
        async with open_bus(f"unix://{path}", "r") as bus:
            await bus.offer(samples.header())


@pytest.mark.redis
async def test_a_turn_that_comes_late_is_no_silence_of_the_server(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls would fail, and what they had downloaded would begin anew."""
    monkeypatch.setattr(node_connections, "LANES", dict.fromkeys(node_connections.LANES, 1))
    monkeypatch.setattr("diloco.pipeline.bus.redis.fragment_bus.BUS_TIMES", BusTimes(payload_call_s=0.3))
    keys = [bus.keys.delta_payload(0, "l0", "0" * 8, serial) for serial in range(4)]
    assert await asyncio.gather(*(bus.read_chunks(key, 0, 1, 4, block_s=0.2) for key in keys)) == [[]] * 4


IN_SCRIPT = "Error running script (call to f_1): @user_script:9: @user_script: 9: "


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (rx.ConnectionError("Connection reset by peer"), BusUnavailable),
        (rx.TimeoutError("Timeout connecting to server"), BusUnavailable),
        (ConnectionRefusedError(111, "refused"), BusUnavailable),
        (rx.ResponseError(IN_SCRIPT + "-READONLY You can't write against a read only replica."), BusUnavailable),
        (rx.ResponseError("UNBLOCKED force unblock from blocking operation"), BusUnavailable),
        (rx.ResponseError("BUSY Redis is busy running a script."), BusUnavailable),
        (rx.TryAgainError("TRYAGAIN Multiple keys request during rehashing of slot"), BusUnavailable),
        (rx.ResponseError("MOVED 3999 10.0.0.2:6379"), BusUnavailable),
        (rx.ResponseError(IN_SCRIPT + "-OOM command not allowed when used memory > 'maxmemory'."), BusFull),
        (rx.ResponseError("NOREPLICAS Not enough good replicas to write."), BusFull),
        (rx.ResponseError(IN_SCRIPT + "WRONGTYPE Operation against a key"), BadMessage),
        (rx.ResponseError("The user executing the script can't run this command or subcommand"), NotPermitted),
        (rx.ResponseError("ACL failure in script: No permissions to access a key"), NotPermitted),
        (rx.NoScriptError("No matching script. Please use EVAL."), ScriptsMissing),
        (rx.ConnectionError("[SSL: WRONG_VERSION_NUMBER] wrong version number"), UsageError),
        (rx.ResponseError("unknown command 'EVALSHA', with args beginning with: 'abc'"), UsageError),
        (rx.ResponseError("unknown command `EVALSHA`, with args beginning with: `abc`"), UsageError),
        (rx.ResponseError("unknown command `xadd`, with args beginning with: `key`"), UsageError),
        (rx.ResponseError(IN_SCRIPT + "Unknown Redis command called from script"), UsageError),
        (rx.ResponseError(IN_SCRIPT + "Unknown Redis command called from Lua script"), UsageError),
        (rx.ResponseError(IN_SCRIPT + "This Redis command is not allowed from scripts"), UsageError),
        (rx.ResponseError("value is not an integer; key diloco:{BOOM x}"), BusError),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[-30:],
)
def test_each_error_of_the_server_has_one_name_here(error: Exception, kind: type[DilocoError]) -> None:
    assert type(translate(error, "host:1")) is kind


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (rx.MovedError("3999 10.0.0.2:6379"), "has handed a slot to another node"),
        (rx.AskError("3999 10.0.0.2:6379"), "is moving a slot"),
        (rx.MasterDownError("Link with MASTER is down"), "is a replica that has lost its primary"),
        (rx.ClusterDownError("The cluster is down"), "belongs to a cluster that is down"),
    ],
)
def test_an_error_that_is_a_kind_of_another_is_told_as_what_it_is(error: Exception, ours: str) -> None:
    """The client library makes one a subclass of the other, and takes their codes away."""
    assert ours in translate(error, "host:1").found


@pytest.mark.parametrize(
    ("said", "kind", "ours"),
    [
        (
            "NOAUTH Authentication required.",
            LoginRefused,
            "requires a login; set user and password in DILOCO_REDIS_URL",
        ),
        ("WRONGPASS invalid username-password pair", LoginRefused, "refuses the login of user 'syncer': name or"),
        ("OOM command not allowed when used memory > 'maxmemory'.", BusFull, "its memory is full; raise its maxmemory"),
        ("MISCONF Redis is configured to save RDB snapshots", BusFull, "it cannot write to its disk; free disk space"),
        ("NOPERM No permissions to access a key", NotPermitted, "does not let user 'syncer' do that in run 'r' (key "),
        ("NOPERM this user has no permissions to run the 'script|load' command", NotPermitted, "send SCRIPT LOAD in"),
        (
            "READONLY You can't write against a read only replica.",
            BusUnavailable,
            "is a replica, which accepts no writes; if no",
        ),
        ("LOADING Redis is loading the dataset in memory", BusUnavailable, "is loading its data"),
        ("CLUSTERDOWN The cluster is down", BusUnavailable, "a cluster that is down; start the node that is down"),
    ],
)
def test_our_words_come_first_and_the_servers_last_in_brackets(said: str, kind: type[DilocoError], ours: str) -> None:
    """Whether redis-py has read the error or our own reader has, which knows no kinds."""
    code, _, text = said.partition(" ")
    read = {"NOPERM": rx.NoPermissionError, "OOM": rx.OutOfMemoryError, "READONLY": rx.ReadOnlyError}
    read |= {"LOADING": rx.BusyLoadingError, "NOAUTH": rx.AuthenticationError, "WRONGPASS": rx.AuthenticationError}
    for error in (rx.ResponseError(said), *([read[code](text)] if code in read else [])):
        told = translate(error, "host:1", "syncer", b"diloco:{r:0}:head:0")
        assert type(told) is kind
        assert str(told).startswith("Redis at host:1 ")
        assert ours in str(told)
        assert str(told).endswith(f"({error})".replace(".)", ")")) or str(told).endswith(f"({error})")


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        (
            "IP address mismatch, certificate is not valid for '10.0.0.7'.",
            "is for a different host name; use the certificate's host name",
        ),
        (
            "Hostname mismatch, certificate is not valid for 'h'.",
            "is for a different host name; use the certificate's host name in DILOCO_REDIS_URL",
        ),
        ("self-signed certificate", "is not trusted; set DILOCO_REDIS_CA"),
    ],
)
def test_a_certificate_is_refused_with_what_is_wrong_with_it(said: str, ours: str) -> None:
    """Another authority's file mends none that is another host's."""
    error = rx.ConnectionError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {said} (_ssl.c:1006).")
    assert f"Redis at host:1: its certificate {ours}" in str(translate(error, "host:1"))


@pytest.mark.parametrize(
    "said",
    [
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006).",
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid (_ssl.c:1006).",
        "[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired (_ssl.c:2580)",
    ],
)
def test_a_certificate_that_has_expired_is_an_outage_until_it_is_renewed(said: str) -> None:
    """The server's or the party's own: nothing that a party was told is wrong, and it may be under way for weeks."""
    told = translate(rx.ConnectionError(f"Error 1 connecting to 10.0.0.7:6379. {said}"), "host:1")
    assert type(told) is BusUnavailable
    assert "a certificate has expired, or is not valid yet; have it renewed" in str(told)


def test_that_this_process_may_open_no_more_files_is_not_said_of_the_server() -> None:
    error = rx.ConnectionError("Error 24 connecting to 10.0.0.7:6379. Too many open files.")
    assert "this process cannot open more connections" in str(translate(error, "host:1"))


def test_tls_verifies_the_certificate_and_the_name_unless_told_otherwise() -> None:
    place = parse("rediss://user:secret@example.org:7000")
    connection = ConnectionPool(**place.at(place.hosts[0])).make_connection()
    assert connection.cert_reqs == ssl.CERT_REQUIRED
    assert connection.check_hostname
    assert place.where == "example.org:7000"


@pytest.mark.redis
def test_connections_that_are_reset_at_any_moment_are_an_outage_and_nothing_else(redis_binary: Path | None) -> None:
    """On the loop that processes run, which says in its own way that a connection was reset a moment ago."""
    unavailable = answered = 0

    async def main(server: EmbeddedRedis) -> None:
        async with Proxy(server.socket_path) as proxy:
            await proxy.add("a")
            bus = await connect(proxy.url("a"), "r")
            over = asyncio.Event()

            async def ask() -> None:
                nonlocal unavailable, answered
                while not over.is_set():
                    try:
                        await bus.read_leases([0, 1])
                        answered += 1
                    except BusUnavailable:
                        unavailable += 1
                    await asyncio.sleep(0.003)

            async with asyncio.TaskGroup() as group:
                for _ in range(6):
                    group.create_task(ask())
                for _ in range(15):
                    await asyncio.sleep(0.05)
                    proxy["a"].cut()
                    await asyncio.sleep(0.05)
                    proxy["a"].restore()
                seen = answered
                while answered == seen:  # it answers again
                    await asyncio.sleep(0.01)
                over.set()
            await bus.close()

    with EmbeddedRedis(binary=redis_binary) as server, asyncio.Runner(loop_factory=fast_loop) as runner:
        runner.run(main(server))
    assert unavailable
