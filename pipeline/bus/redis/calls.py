"""How calls reach Redis: connections, scripts, time limits, and errors as this project names them.

Three lanes with connections of their own, so that neither a long payload nor a blocking read holds up control.
There are no retries here: the caller knows what may be repeated.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from diloco.pipeline.bus import cluster_slots, server, stored_values
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.redis import bulk
from diloco.pipeline.bus.redis.errors import ERRORS, NO_TLS, refused, translate
from diloco.pipeline.bus.tls import check_files
from diloco.pipeline.errors import (
    BusUnavailable,
    DilocoError,
    UsageError,
)

Lane = Literal["control", "bulk", "blocking"]
Client = Redis | RedisCluster

LANES: dict[Lane, int] = {"control": 8, "bulk": 8, "blocking": 256}
"""Calls in flight at most; further ones wait for their turn."""
CONNECT_S = 5.0
CONTROL_S = 10.0
BULK_S = 60.0
"""Time limits of one call; a blocking read has its `block_s` on top of CONTROL_S."""

SCANNED = 1000
"""Keys a round trip, where all are looked at."""

_CLOSED = re.compile(r"the handler is closed|transport is clos")
"""How an event loop (uvloop's) refuses to write to a connection that was reset a moment ago: as a RuntimeError."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the name under which the server caches it."""

    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """A script of the `lua` folder behind the common prelude."""
    folder = resources.files(__package__) / "lua"
    text = (folder / "_prelude.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def to_ms(seconds: float) -> int:
    """Milliseconds as Redis takes them: whole, and never 0, which would mean none or for ever."""
    return max(1, round(seconds * 1000))


def parse(url: str) -> tuple[dict[str, Any], str]:
    """A URL as arguments of redis-py's connections, and as a place that may be shown to anybody.

    Raises:
        UsageError: malformed.
    """
    try:
        parsed: dict[str, Any] = dict(parse_url(url))
        if not _is_whole(urlsplit(url)):
            raise ValueError
    except ValueError:  # its text may hold a part of a password
        raise UsageError(
            "not a usable Redis URL: it is redis://[user:password@]host:port, rediss://... for TLS, or "
            "unix:///path/to/socket; special characters in a password are percent-encoded"
        ) from None
    where = parsed.get("path") or f"{parsed.get('host', 'localhost')}:{parsed.get('port', 6379)}"
    # socket_timeout would cut blocking reads short; every call has its own time limit instead.
    options = {**parsed, "socket_timeout": None, "socket_connect_timeout": CONNECT_S, "protocol": 2}
    options |= {"decode_responses": False, "socket_read_size": 2**20, "max_connections": 2**20}
    if "path" not in parsed:
        options["socket_keepalive"] = True
    return options, where


def _is_whole(url: SplitResult) -> bool:
    """Whether it names a host or a socket, and nothing that redis-py leaves out: then it would reach another server."""
    if url.scheme == "unix":
        return bool(url.path) and not url.fragment
    return bool(url.hostname) and not url.fragment and re.fullmatch("(/[0-9]*)?", url.path) is not None


DOCTOR = " (`diloco doctor` looks into it)"
"""What errors end with of a server that refuses a party, or does not answer it at its start."""


async def connect_calls(url: str, hint: str = DOCTOR) -> "RedisCalls":
    """Reach a Redis server or cluster; see `redis_streams.connect`.

    hint: what the errors of a server that refuses, or does not answer, end with.

    Raises:
        UsageError: the URL is malformed, the login is refused, or the server is older than 6.2.
        BusUnavailable: there is no answer.
    """
    options, where = parse(url)
    check_files(options)
    try:
        probe = Redis.from_pool(ConnectionPool(**options))
    except (ValueError, TypeError):
        raise UsageError("Redis URL with an option (?name=value) that cannot be used") from None
    try:
        async with asyncio.timeout(2 * CONNECT_S):
            info: dict[str, Any] = await probe.info()
    except TypeError:
        raise UsageError("Redis URL with an option (?name=value) that does not exist") from None
    except ERRORS as error:
        refused = await _hinted(translate(error, where, str(options.get("username") or "")), where, options)
        raise type(refused)(f"{refused}{hint}") from None
    finally:
        await probe.aclose()
    if "redis_version" not in info:
        raise UsageError(f"what answers at {where} is no Redis{hint}")
    if (found := server.version(server.Server.of(info))).level == "error":
        raise UsageError(f"Redis at {where} is {found}")
    cluster = bool(info.get("cluster_enabled"))
    if cluster and "path" in options:
        raise UsageError(f"Redis at {where} is a cluster: reach it by redis:// or rediss://, not by unix://")
    calls = RedisCalls(options, where, cluster)
    try:
        await calls.load_scripts()
    except BaseException:
        await calls.close()
        raise
    return calls


async def _hinted(error: DilocoError, where: str, options: Mapping[str, Any]) -> DilocoError:
    """A server that hangs up, or is silent, may want another kind of connection, and cannot say so."""
    tls = is_tls(options)
    if isinstance(error, BusUnavailable) and tls and await _answers_in_the_clear(options):
        return UsageError(f"Redis at {where}: {NO_TLS}")
    if isinstance(error, BusUnavailable) and re.search("closed by server|reset by peer", str(error)):
        wants = "a client certificate (DILOCO_REDIS_CERT, DILOCO_REDIS_KEY)" if tls else "TLS (rediss://)"
        return BusUnavailable(f"{error}; perhaps it wants {wants}")
    return error


async def _answers_in_the_clear(options: Mapping[str, Any]) -> bool:
    """Whether there is a Redis without TLS: it is asked for a sign of life, and told no secret."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(options.get("host", "localhost"), options.get("port", 6379))
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith((b"+PONG", b"-"))
            finally:
                writer.close()
    except (OSError, ValueError):
        return False


def is_tls(options: Mapping[str, Any]) -> bool:
    """Whether connections with these options are encrypted."""
    kind = options.get("connection_class")
    return kind is not None and kind.__name__ == "SSLConnection"


def _client(options: dict[str, Any], cluster: bool) -> Client:
    if not cluster:
        return Redis.from_pool(ConnectionPool(**options))
    rest = {name: value for name, value in options.items() if name not in ("connection_class", "db")}
    return RedisCluster(**rest, ssl=is_tls(options), retry=Retry(NoBackoff(), 0))


class RedisCalls:
    """The ways to call a Redis server or cluster; made by `connect_calls`."""

    def __init__(self, options: dict[str, Any], where: str, cluster: bool) -> None:
        self.cluster = cluster
        self._translate = partial(translate, where=where, user=str(options.get("username") or ""))
        self._where = where
        self._clients: dict[Lane, Client] = {lane: _client(options, cluster) for lane in LANES}
        self._turns = {lane: asyncio.Semaphore(limit) for lane, limit in LANES.items()}
        self._calls: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._closed = False

    async def info(self) -> BusInfo:
        """The server, or all primaries of a cluster, about themselves."""
        targets = {"target_nodes": "primaries"} if self.cluster else {}
        async with self.call("control", CONTROL_S) as client:
            reply: Any = await client.execute_command("INFO", **targets)
        nodes = list(reply.values()) if self.cluster and "redis_version" not in reply else [reply]
        limits = [int(node.get("maxmemory", 0)) for node in nodes]
        limited = [(int(node["used_memory"]), limit) for node, limit in zip(nodes, limits, strict=True) if limit]
        warnings = {warning for node in nodes for warning in server.warnings(server.Server.of(node))}
        return BusInfo(
            server_id="+".join(sorted(str(node["run_id"]) for node in nodes)),
            version=str(nodes[0]["redis_version"]),
            maxmemory_bytes=sum(limits) if all(limits) else 0,
            used_bytes=sum(int(node["used_memory"]) for node in nodes),
            cluster=self.cluster,
            nodes=len(nodes),
            warnings=tuple(sorted(warnings)),
            received_bytes=sum(int(node.get("total_net_input_bytes", 0)) for node in nodes),
            sent_bytes=sum(int(node.get("total_net_output_bytes", 0)) for node in nodes),
            node=max(limited, key=lambda one: one[0] / one[1], default=None),
        )

    async def close(self) -> None:
        """End all calls in flight and close all connections."""
        self._closed = True
        for call in self._calls:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())
        if self._calls:
            await self._idle.wait()
        for client in self._clients.values():
            await client.aclose()
            if isinstance(client, RedisCluster):  # whose aclose does nothing after a lost connection
                await client.nodes_manager.aclose()
                await client.nodes_manager.aclose("startup_nodes")

    @asynccontextmanager
    async def call(self, lane: Lane, limit_s: float) -> AsyncIterator[Any]:
        """A client of the lane for the time of one call; errors leave it translated."""
        if self._closed:
            raise BusUnavailable("the bus is closed")
        try:
            async with asyncio.timeout(limit_s) as scope:
                self._calls.add(scope)
                self._idle.clear()
                try:
                    async with self._turns[lane]:
                        yield self._clients[lane]
                finally:
                    self._calls.discard(scope)
                    if not self._calls:
                        self._idle.set()
        except ERRORS as error:
            if self._closed:
                raise BusUnavailable("the bus was closed") from None
            if isinstance(error, TimeoutError):
                raise BusUnavailable(f"Redis at {self._where}: no answer in {limit_s:g} s") from None
            raise self._translate(error) from error
        except RuntimeError as error:
            if not _CLOSED.search(str(error)):
                raise
            raise BusUnavailable(f"Redis at {self._where}: the connection was reset") from error

    async def command(self, *args: Any) -> Any:
        """One command on the control lane."""
        async with self.call("control", CONTROL_S) as client:
            return await client.execute_command(*args)

    async def script(self, name: str, keys: Sequence[str], *args: Any) -> list[Any]:
        """Run a script; returns what it answered after OK."""
        cluster_slots.one_slot(keys)
        command = ("EVALSHA", script(name).sha, len(keys), *keys, *args)
        async with self.call("control", CONTROL_S) as client:
            try:
                reply = await (client.execute_command(*command) if self.cluster else bulk.ask(client, command))
            except rx.NoScriptError:
                reply = None
        if reply is None:
            await self.load_scripts()
            reply = await self.command(*command)
        return self.answer(reply)

    async def load_scripts(self) -> None:
        """Give the server all scripts, for all parties: a user that may not, waits for one that may.

        Those of the release before too, for its learners: they may not load theirs, and its syncers may be gone.
        """
        folder = resources.files(__package__) / "lua"
        names = (path.name for path in folder.iterdir())
        texts = [script(name[:-4]).text for name in names if name.endswith(".lua") and not name.startswith("_")]
        if (earlier := folder / "earlier").is_dir():
            texts += [path.read_text() for path in earlier.iterdir()]
        async with self.call("control", CONTROL_S) as client:
            nodes = client.get_primaries() if isinstance(client, RedisCluster) else [None]
            for node in nodes:
                there = {} if node is None else {"target_nodes": node}
                try:
                    for text in texts:
                        await client.execute_command("SCRIPT LOAD", text, **there)
                except rx.NoPermissionError:
                    return

    def answer(self, reply: Any) -> list[Any]:
        """What a script answered after OK; raises what it answered else."""
        if isinstance(reply, Exception):
            raise self._translate(reply) from reply
        if reply[0] != b"OK":
            raise refused(reply)
        return list(reply[1:])

    async def pipeline(self, lane: Lane, limit_s: float, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Several commands in one round trip, not atomic; errors are among the replies."""
        async with self.call(lane, limit_s) as client:
            pipeline: Any = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

    async def many(
        self, commands: Iterable[Sequence[Any]], but_for: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> list[Any]:
        """As `pipeline`, on the control lane; the first error among the replies is raised, `but_for` those."""
        replies = await self.pipeline("control", CONTROL_S, commands)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, but_for):
                raise self._translate(reply) from reply
        return replies

    async def keys(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """All keys of a pattern, on all nodes, told in parts. Those that come or go meanwhile may be missed."""
        async with self.call("bulk", BULK_S) as client:
            found = sorted({key async for key in client.scan_iter(match=pattern, count=SCANNED)})
        for first in range(0, len(found), SCANNED):
            yield found[first : first + SCANNED]

    async def hashes(self, keys: Iterable[str]) -> list[Mapping[bytes, bytes]]:
        """Fields of hashes, in one round trip on the control lane; of one that is not there, none."""
        commands = [("HGETALL", key) for key in keys]
        if self.cluster:
            return await self.many(commands)
        async with self.call("control", CONTROL_S) as client:
            replies = await bulk.send(client, commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._translate(reply) from reply
        return [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in replies]

    @staticmethod
    def xread(cursors: Mapping[str, str], limit: int, block_s: float, lane: Lane) -> tuple[tuple[Any, ...], Lane]:
        """The command, and the lane it belongs to."""
        block = ("BLOCK", to_ms(block_s)) if block_s > 0 else ()
        command = ("XREAD", "COUNT", limit, *block, "STREAMS", *cursors, *cursors.values())
        return command, "blocking" if block else lane

    async def read(
        self, cursors: Mapping[str, str], limit: int, block_s: float, lane: Lane = "control"
    ) -> list[tuple[str, list[tuple[str, bytes]]]]:
        """XREAD: entries after the cursors, by key; waits up to `block_s` for the first."""
        for cursor in cursors.values():
            stored_values.entry_id(cursor)
        if self.cluster and len(slots := cluster_slots.by_slot(cursors)) > 1:
            return await self._read_slots(slots, limit, block_s)
        limit_s = BULK_S if lane == "bulk" else CONTROL_S
        command, lane = self.xread(cursors, limit, block_s, lane)
        async with self.call(lane, limit_s + block_s) as client:
            if isinstance(client, RedisCluster):
                await client.initialize()
                node = client.get_node_from_key(next(iter(cursors)))
                found = await client.execute_command(*command, target_nodes=node)
            else:
                return [
                    (key.decode(), [(at.decode(), fields[1] if fields else b"") for at, fields in entries])
                    for key, entries in await bulk.ask(client, command) or ()
                ]
        return [
            (key.decode(), [(at.decode(), next(iter(fields.values()), b"")) for at, fields in entries])
            for key, entries in found or ()
        ]

    async def _read_slots(
        self, slots: Iterable[Mapping[str, str]], limit: int, block_s: float
    ) -> list[tuple[str, list[tuple[str, bytes]]]]:
        """One read for each slot; the first that has something ends the waiting."""
        reads = [asyncio.ensure_future(self.read(cursors, limit, block_s)) for cursors in slots]
        when = asyncio.FIRST_COMPLETED if block_s > 0 else asyncio.ALL_COMPLETED
        pending, found = set(reads), list[tuple[str, list[tuple[str, bytes]]]]()
        try:
            while pending and not found:
                done, pending = await asyncio.wait(pending, return_when=when)
                found = [part for read in reads if read in done for part in read.result()]
        finally:
            for read in pending:
                read.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return found
