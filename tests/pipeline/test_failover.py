"""The machine of a Redis is lost: sentinels or a cluster put another one in its place, and calls go there."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import AuthenticationError, Redis, ResponseError

from diloco.doctor import checks
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.embedded import EmbeddedRedis, find_server, free_port
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.redis import connecting
from diloco.pipeline.bus.redis.connecting import connect_calls
from diloco.pipeline.bus.redis.inspection import examine, unhealthy_sentinels
from diloco.pipeline.bus.redis.nodes import SentinelNodes
from diloco.pipeline.bus.redis.redis_url import parse
from diloco.pipeline.bus.redis_streams import RedisBus, connect
from diloco.pipeline.bus.server import buffers
from diloco.pipeline.bus.times import BUS_TIMES, BusTimes
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusError, BusFull, BusUnavailable, UsageError
from diloco.pipeline.view.status_reader import read_status
from diloco_studies.strikes.failing.servers import DOWN_MS, SERVER, ClusterServers, Node, SentinelServers, Servers
from tests import HANGING_S, samples
from tests.pipeline.conftest import rules_of
from tests.pipeline.test_cluster import everything

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(sys.platform != "linux", reason="servers die with this process"),
]
A = "aa" * 8


@pytest.fixture
def sentinels() -> Iterator[SentinelServers]:
    """For a test that kills some."""
    with SentinelServers() as servers:
        yield servers


@pytest.fixture(scope="module")
def kept() -> Iterator[SentinelServers]:
    """For tests that leave all as it was."""
    with SentinelServers() as servers:
        yield servers


async def until_answered(call: Callable[[], Awaitable[object]], limit_s: float = HANGING_S) -> tuple[float, set[str]]:
    """Seconds until a call is answered, and what it said before."""
    began, said = time.monotonic(), set[str]()
    while True:
        try:
            await call()
        except BusError as error:
            said.add(str(error))
            assert time.monotonic() - began < limit_s, said
            await asyncio.sleep(0.1)
        else:
            return time.monotonic() - began, said


async def moved(servers: Servers, lost: str) -> None:
    await asyncio.to_thread(servers.wait_until, lambda: lost not in servers.primaries())


def make_users(servers: Servers, *users: acl.User) -> None:
    """On every server: none tells another one of its users."""
    for name, node in servers.nodes.items():
        for user in users if name.startswith("redis") else ():
            node.ask("ACL", "SETUSER", user.name, "on", ">pw", *rules_of(user))


@pytest.mark.slow
async def test_parties_with_rights_of_their_own_go_on_at_the_new_primary(sentinels: SentinelServers) -> None:
    """Users are made on replicas too. Scripts, which no replica has, are loaded there by a syncer, which may."""
    make_users(sentinels, acl.syncer("r"), acl.learner("r"))
    url = sentinels.url.replace("://", "://{}:pw@")
    syncer, learner = await connect(url.format("syncer"), "r"), await connect(url.format("learner"), "r")
    await everything(syncer, groups=1)
    assert (await syncer.info()).warnings == ()
    (lost,) = sentinels.primaries()
    sentinels.kill(lost)
    _, said = await until_answered(lambda: learner.write_report(samples.report()))
    assert said
    await moved(sentinels, lost)
    assert (await syncer.read_reports())[0].report == samples.report()
    heads = await syncer.read_heads(range(6))
    assert [head.version for head in heads if head] == [1] * 6
    for bus in (syncer, learner):
        await bus.close()


@pytest.mark.slow
async def test_what_hangs_on_a_primary_that_says_nothing_any_more_ends_with_the_failover(
    sentinels: SentinelServers,
) -> None:
    """No connection is reset: a blocking read and an upload would wait for 20 s and 60 s."""
    bus = await connect(sentinels.url, "r")
    key = bus.keys.delta_payload(0, "l0", "0" * 8, 0)
    await bus.write_chunks(key, 0, [b"a", b"b"], 60)
    read = asyncio.ensure_future(bus.read_tape({0: START}, block_s=20.0))
    await asyncio.sleep(0.1)
    (lost,) = sentinels.primaries()
    sentinels.nodes[lost].send(signal.SIGSTOP)
    began = time.monotonic()
    written = asyncio.ensure_future(bus.write_chunks(key, 2, [bytes(2**20)] * 8, 60))
    outcomes = await asyncio.wait_for(asyncio.gather(read, written, return_exceptions=True), HANGING_S)
    assert all(isinstance(outcome, BusUnavailable) for outcome in outcomes), outcomes
    assert time.monotonic() - began > DOWN_MS / 1000
    await until_answered(lambda: bus.acquire_lease(0, A, 10))
    sentinels.nodes[lost].send(signal.SIGCONT)
    await bus.close()


@pytest.mark.slow
async def test_who_still_reaches_a_primary_that_was_replaced_leaves_it(sentinels: SentinelServers) -> None:
    """It takes writes as ever, and no connection breaks: only the sentinels, asked again and again, know better."""
    bus = await connect(sentinels.url, "r")
    (lost,) = sentinels.primaries()
    old = sentinels.nodes[lost]
    old.ask("ACL", "SETUSER", "default", "-replicaof", "-slaveof")  # sentinels cannot tell it
    old.ask("CONFIG", "SET", "min-replicas-to-write", 0)
    sentinels.nodes["sentinel-0"].ask("SENTINEL", "FAILOVER", "diloco")

    async def left() -> bool:
        """Whether writes go elsewhere; each of them is taken, or fails only as its connection is dropped."""
        key = bus.keys.lease(0)
        with contextlib.suppress(BusUnavailable):
            await bus.acquire_lease(0, A, 60)
        there = old.ask("EXISTS", key)
        old.ask("DEL", key)
        return not there

    await bus.acquire_lease(0, A, 60)
    assert not await left()
    deadline = time.monotonic() + HANGING_S
    while not await left():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert old.ask("ROLE")[0] == "master"
    (primary,) = {name for name in sentinels.primaries() if name != lost}
    assert sentinels.nodes[primary].ask("EXISTS", bus.keys.lease(0)) == 1
    await bus.close()


@pytest.mark.slow
async def test_a_primary_without_replicas_refuses_writes_and_says_so(sentinels: SentinelServers) -> None:
    """With the first one that is lost it is said that there is none to spare any more."""
    bus = await connect(sentinels.url, "r")
    (primary,) = sentinels.primaries()
    others = [name for name in ("redis-0", "redis-1", "redis-2") if name != primary]
    sentinels.kill(others[0])
    deadline = time.monotonic() + HANGING_S
    while not any("once one more server is lost" in one for one in (await bus.info()).warnings):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    sentinels.kill(others[1])

    async def refused() -> None:
        with pytest.raises(BusFull, match="min-replicas-to-write"):
            await bus.acquire_lease(0, A, 60)

    deadline = time.monotonic() + HANGING_S
    while True:
        try:
            await refused()
            break
        except (BusError, pytest.fail.Exception):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
    info = await bus.info()
    assert not info.takes_writes
    assert any("refuses all writes: no replica is connected to it" in one for one in info.warnings)
    status = await read_status(bus, LoopClock())
    assert (status["phase"], status["reason"]) == ("waiting", "waiting for Redis, which refuses all writes")
    assert not any("the run has no syncer" in warning or "quorum" in warning for warning in status["warnings"])
    sentinels.start("redis-1" if primary != "redis-1" else "redis-0")
    await until_answered(lambda: bus.acquire_lease(0, A, 60))
    assert (await bus.info()).takes_writes
    await bus.close()


async def test_all_steps_are_made_on_the_primary_that_sentinels_name(kept: SentinelServers) -> None:
    bus = await connect(kept.url, "steps")
    await everything(bus, groups=1)
    assert not (await bus.info()).cluster
    await bus.close()


async def test_a_server_with_replicas_that_waits_for_none_is_warned_of(kept: SentinelServers) -> None:
    (primary,) = kept.primaries()
    bus = await connect(kept.url, "warned")
    assert (await bus.info()).warnings == ()
    kept.nodes[primary].ask("CONFIG", "SET", "min-replicas-to-write", 0)
    (warned,) = (await bus.info()).warnings
    kept.nodes[primary].ask("CONFIG", "SET", "min-replicas-to-write", 1)
    assert "min-replicas-to-write 0" in warned
    await bus.close()


async def test_replicas_may_fall_behind_here_and_the_doctor_sees_where_they_may_not(kept: SentinelServers) -> None:
    (primary,) = kept.primaries()
    examination = await examine(kept.url)
    found = []
    for limits in ("", "replica 256mb 64mb 60", "replica 0 0 0"):
        if limits:
            kept.nodes[primary].ask("CONFIG", "SET", "client-output-buffer-limit", limits)
        found.append(buffers(*await examination.nodes()).level)
    await examination.close()
    assert found == ["ok", "warning", "ok"]


async def said(url: str, kind: type[Exception]) -> str:
    """What a URL is refused with; never a secret."""
    with pytest.raises(kind) as caught:
        await connect_calls(url)
    assert "secret" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
async def test_a_replica_at_which_sentinels_cannot_log_in_is_named_by_each_of_them(kept: SentinelServers) -> None:
    """It follows the primary and is counted as one of its replicas, and could not take its place."""
    assert await unhealthy_sentinels(kept.url) == []
    replica = kept.nodes[next(name for name in ("redis-0", "redis-1") if name not in kept.primaries())]
    replica.ask("CONFIG", "SET", "requirepass", "another")
    replica.password = "another"  # noqa: S105  # made up
    try:
        for kind in ("normal", "pubsub"):  # a connection that is logged in stays so
            replica.ask("CLIENT", "KILL", "TYPE", kind)
        async with asyncio.timeout(HANGING_S):
            while len(unhealthy := await unhealthy_sentinels(kept.url)) < 3:
                await asyncio.sleep(0.1)
    finally:
        replica.ask("CONFIG", "SET", "requirepass", "")
        replica.password = ""
    assert all(f"cannot reach the replica {HostPort(*replica.address)}, or is refused" in one for one in unhealthy)
    async with asyncio.timeout(HANGING_S):
        while await unhealthy_sentinels(kept.url):
            await asyncio.sleep(0.1)


async def test_each_way_in_which_sentinels_do_not_help_is_said(kept: SentinelServers) -> None:
    url = kept.url.replace("://", "://me:secret@")
    server, sentinel = kept.nodes["redis-0"].address[1], kept.nodes["sentinel-0"].address[1]
    nobody = "redis+sentinel://me:secret@127.0.0.1:1,127.0.0.1:2/diloco"
    assert "do not know service 'other'" in await said(url.replace("/diloco", "/other"), UsageError)
    assert "no sentinel of diloco of sentinels 127.0.0.1:1,127.0.0.1:2 answers" in await said(nobody, BusUnavailable)
    assert "is not a sentinel" in await said(f"redis+sentinel://me:secret@127.0.0.1:{server}/diloco", UsageError)
    assert "is a sentinel" in await said(f"redis://127.0.0.1:{sentinel}", UsageError)
    assert "refuses the login of user 'me'" in await said(url, UsageError)
    assert "sentinel_username" in await said(url + "?sentinel_password=secret", UsageError)


@pytest.mark.slow
async def test_sentinels_say_where_nobody_is_primary(sentinels: SentinelServers) -> None:
    for name in ("redis-0", "redis-1", "redis-2"):
        sentinels.kill(name)
    await asyncio.sleep(3 * DOWN_MS / 1000)
    assert "has no primary now" in await said(sentinels.url, BusUnavailable)


@pytest.mark.slow
async def test_a_clusters_replica_takes_over_and_a_pair_that_is_gone_stops_its_own_groups_alone() -> None:
    with ClusterServers() as servers:
        for node in servers.nodes.values():
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        bus = await connect(servers.url, "r")
        bus.keys = RunKeys(bus.keys.run, 6)
        assert (await bus.info()).cluster
        of_node: dict[object, list[int]] = {}
        for p in range(6):
            await bus.acquire_lease(p, A, 60)
            of_node.setdefault(bus._redis.nodes.of(bus.keys.lease(p)), []).append(p)
        assert sorted(map(len, of_node.values())) == [2, 2, 2]
        lost = servers.primaries()[0]
        (stopped,) = (ps for at, ps in of_node.items() if at == servers.nodes[lost].address)
        servers.kill(lost)
        await until_answered(lambda: bus.acquire_lease(stopped[0], A, 60))
        assert await bus.read_leases(range(6)) == [A] * 6
        await moved(servers, lost)
        (replica,) = {name for name in servers.primaries() if name >= "redis-3"}
        servers.kill(replica)
        others = [p for p in range(6) if p not in stopped]
        await until_answered(lambda: bus.read_leases(others))
        with pytest.raises(BusUnavailable):
            await bus.read_leases(stopped)
        assert await bus.read_tape(dict.fromkeys(map(bus.keys.group, others), START)) == []
        away = set[int]()
        assert await bus.read_tape(dict.fromkeys(range(6), START), away=away) == []
        assert away == set(stopped)
        info = await bus.info()
        assert info.nodes == 3
        assert any(str(servers.nodes[replica].address[1]) in warning for warning in info.warnings)
        ends = await bus.tape_end()
        assert set(ends) == set(others)
        await bus.close()


async def test_behind_one_name_a_replica_is_left_for_the_next_primary(redis_binary: object) -> None:
    """The server behind an address becomes a replica: the connections to it are dropped, busy ones too."""
    with EmbeddedRedis(port=0) as server:
        assert server.url
        bus = await connect(server.url, "r")
        await check_left(bus)


def told(port: int, flags: str = "master", epoch: int = 1) -> list[bytes]:
    """A sentinel's answer."""
    fields = {"ip": "127.0.0.1", "port": str(port), "flags": flags, "config-epoch": str(epoch)}
    return [part.encode() for pair in fields.items() for part in pair]


DOWN = told(1, "s_down,o_down,master")
BLIND = "s_down,master,disconnected"
"""Flags of a primary that this sentinel alone does not reach."""


@pytest.mark.parametrize(
    ("answers", "primary"),
    [
        ((told(2), told(2), told(1)), 2),
        ((told(2), told(2), told(3, epoch=999_999)), 2),
        ((told(2), told(2), DOWN), 2),
        ((told(2), told(2), "OK"), 2),
        ((told(2), told(2), []), 2),
        ((told(2), told(2), [b"flags"]), 2),
        ((told(2), told(2), 7), 2),
        ((told(2), told(2), OSError("away")), 2),
        ((told(2), OSError("away"), OSError("away")), 2),
        ((told(2), told(2, BLIND), OSError("away")), 2),
        ((told(2), told(2, BLIND), DOWN), 2),
        ((told(2, BLIND), told(2, BLIND), told(3, epoch=999_999)), "no sentinel .* can reach the primary 127.0.0.1:2"),
        ((told(2, BLIND), told(2, BLIND), told(2, BLIND)), "no sentinel .* can reach the primary 127.0.0.1:2"),
        ((told(2), DOWN, OSError("away")), "do not agree on who is primary"),
        ((DOWN, DOWN, told(3, epoch=999_999)), "has no primary now"),
        ((told(2), told(3, epoch=999_999), OSError("away")), "do not agree on who is primary"),
        (("OK", "OK", []), "is not a sentinel"),
    ],
)
async def test_what_most_sentinels_say_that_answer_counts(
    answers: tuple[Any, ...], primary: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one of several says: that a late vote has chosen its own server, or what no sentinel says."""
    nodes = SentinelNodes(parse("redis+sentinel://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3/diloco"))

    async def ask(_: SentinelNodes) -> list[Any]:
        return list(answers)

    monkeypatch.setattr(SentinelNodes, "_ask", ask)
    if isinstance(primary, int):
        await nodes.refresh()
        assert nodes.all() == [HostPort("127.0.0.1", primary)]
    else:
        with pytest.raises((BusUnavailable, UsageError), match=primary):
            await nodes.refresh()


async def test_sentinels_that_would_not_help_are_named_with_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself: what most of them say hides what is wrong with one. Also where nobody finds the primary."""
    answers: dict[int, Any] = {
        **{1: told(2), 2: told(2, BLIND), 3: told(4), 4: DOWN, 5: OSError("away"), 6: "OK", 7: told(2), 8: told(2)},
        **{9: AuthenticationError("WRONGPASS"), 10: ResponseError("No such master with that name"), 11: told(2)},
    }

    async def ask(host: HostPort, _: Any, __: str, what: str, ___: str) -> Any:
        found = answers[host.port] if what == "MASTER" else replicas.get(host.port, ResponseError("NOPERM"))
        if isinstance(found, Exception):
            raise found
        return found

    replicas: dict[int, Any] = {
        1: [told(5), told(6)],
        7: [told(5), told(6, "s_down,slave")],
        2: [told(6, "s_down,slave")],
    }
    monkeypatch.setattr("diloco.pipeline.bus.redis.nodes._ask", ask)
    url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in answers)}/diloco"
    unhealthy = await unhealthy_sentinels(url)
    assert [one.removeprefix("127.0.0.1:") for one in unhealthy] == [
        "2 cannot reach the primary, or is refused by it (auth-pass)",
        "3 considers 127.0.0.1:4 the primary",
        "4 considers the primary dead",
        "5 does not answer",
        "6 does not answer as a sentinel",
        "7 cannot reach the replica 127.0.0.1:6, or is refused by it (auth-pass)",
        "9 refuses the connection, or its login",
        "10 does not know service 'diloco'",
    ]
    (found,) = checks.sentinels(unhealthy)
    assert found.level == "warning"
    assert "SENTINEL RESET" in found.remedy
    assert list(checks.sentinels([])) == []
    answers |= dict.fromkeys(answers, told(2, BLIND))
    assert len(await unhealthy_sentinels(url)) == len(answers)
    assert await unhealthy_sentinels("redis://127.0.0.1:1") == []


async def test_a_primary_that_died_before_sentinels_missed_it_is_not_given_up_at_once(
    redis_binary: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes then waits for the next one; not for ever."""
    dead, looks = free_port(), list[Any]()

    async def ask(_: SentinelNodes) -> list[Any]:
        return [looks.pop(0) if looks else told(dead)]

    monkeypatch.setattr(SentinelNodes, "_ask", ask)
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3/diloco"
    with EmbeddedRedis(port=0, binary=redis_binary) as server:
        looks += [DOWN, told(dead), told(dead), DOWN, told(server.port), told(server.port)]
        calls = await connect_calls(url)
        assert calls.nodes.all() == [HostPort("127.0.0.1", server.port)]
        await calls.close()
    looks.clear()
    monkeypatch.setattr(connecting, "BUS_TIMES", BusTimes(next_primary_s=0.5))
    assert "unless a replica takes its place" in await said(url, BusUnavailable)
    looks += [DOWN] * 100
    assert "has no primary now" in await said(url, BusUnavailable)


async def test_a_primary_that_wants_tls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and hangs up; what it may want is said."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    asked = list[int]()

    async def ask(_: SentinelNodes) -> list[Any]:
        asked.append(port)
        return [told(port)]

    monkeypatch.setattr(SentinelNodes, "_ask", ask)
    url = "redis+sentinel://127.0.0.1:1/diloco"
    assert "it may require TLS" in await said(url, BusUnavailable)
    assert asked == [port]
    server.close()


class Moving:
    """A name that leads to one of two servers: the second one is the first one's replica."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port, self.at = free_port(), "127.0.0.1"
        self.nodes = []
        for number, host in enumerate(("127.0.0.1", "127.0.0.2")):
            node = Node(host, folder / host, [str(find_server()), str(folder / host / "redis.conf")], (host, self.port))
            follows = () if not number else (f"replicaof 127.0.0.1 {self.port}",)
            node.configure(*SERVER, *follows)
            node.start()
            self.nodes.append(node)
        real = socket.getaddrinfo

        def found(host: Any, *args: Any, **more: Any) -> Any:
            return real(self.at if host == "moving.test" else host, *args, **more)

        monkeypatch.setattr(socket, "getaddrinfo", found)

    def move(self) -> None:
        """The second one takes over, and the name leads to it."""
        self.nodes[1].ask("REPLICAOF", "NO", "ONE")
        self.at = self.nodes[1].address[0]


@pytest.fixture
def moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moving]:
    found = Moving(tmp_path, monkeypatch)
    yield found
    for node in found.nodes:
        node.kill()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["killed", "silent", "demoted"])
async def test_a_name_that_leads_elsewhere_is_followed(moving: Moving, lost: str) -> None:
    """The server behind it is dead, says nothing any more, or has become a replica."""
    first, second = moving.nodes
    buses: list[RedisBus] = []

    async def reach() -> None:
        buses.append(await connect(f"redis://moving.test:{moving.port}", "r"))

    await until_answered(reach)  # it is starting
    (bus,) = buses
    await bus.acquire_lease(0, A, 60)
    deadline = time.monotonic() + HANGING_S

    def has_it() -> bool:
        with contextlib.suppress(OSError):  # it is starting too
            return bool(second.ask("EXISTS", bus.keys.lease(0)))
        return False

    while not has_it():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    match lost:
        case "killed":
            first.kill()
        case "silent":
            first.send(signal.SIGSTOP)
        case _:
            first.ask("REPLICAOF", "127.0.0.2", moving.port)
    moving.move()
    reads = asyncio.ensure_future(bus.read_tape({0: START}, block_s=1.0))
    await until_answered(lambda: bus.acquire_lease(1, A, 60), HANGING_S)
    assert second.ask("EXISTS", bus.keys.lease(0), bus.keys.lease(1)) == 2
    await asyncio.gather(reads, return_exceptions=True)
    # Each kind of call has connections of its own, of which one may still lead to the silent server.
    await until_answered(lambda: bus.read_tape({0: START}), 2 * BUS_TIMES.call_s)
    assert await bus.read_tape({0: START}) == []
    first.send(signal.SIGCONT)
    await bus.close()


async def test_a_close_that_is_cancelled_closes_all_the_same(redis_binary: Path | None) -> None:
    """Calls that end neither by themselves nor when they are told to hold it up, and no connection is left open."""
    with EmbeddedRedis(binary=redis_binary) as server:
        bus = await connect(server.url, "r")
        go_on = asyncio.Event()

        async def deaf() -> None:
            async with bus._redis.call("control", 10.0) as client:
                await client.ping()
                with contextlib.suppress(asyncio.CancelledError):
                    await go_on.wait()
                await go_on.wait()

        call = asyncio.ensure_future(deaf())
        await asyncio.sleep(0.1)
        closing = asyncio.ensure_future(bus.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with Redis.from_url(server.url, protocol=2) as admin:
            deadline = time.monotonic() + HANGING_S
            while len(admin.client_list()) > 1:  # the server sees the end of a connection a moment later
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        go_on.set()
        await call


async def check_left(bus: RedisBus) -> None:
    await bus.acquire_lease(0, A, 60)
    read = asyncio.ensure_future(bus.read_tape({0: START}, block_s=20.0))
    await asyncio.sleep(0.1)
    await bus._redis.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BusUnavailable):
        await bus.acquire_lease(0, A, 60)
    with pytest.raises(BusUnavailable):
        await asyncio.wait_for(read, 15.0)  # of the 20 s that it asked for
    await bus._redis.command("REPLICAOF", "NO", "ONE")
    await bus.acquire_lease(0, A, 60)
    await bus.close()
