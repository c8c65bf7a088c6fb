"""The calls of the bus to Redis: commands, scripts, pipelines and reads, each sent to the node that has its keys."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import redis.exceptions as rx

from diloco.pipeline.bus import cluster_slots, schema, server
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.redis import zero_copy
from diloco.pipeline.bus.redis.node_connections import BLOCKING, Lane, Lanes
from diloco.pipeline.bus.redis.nodes import Nodes
from diloco.pipeline.bus.redis.redis_errors import refused, scripts_missing
from diloco.pipeline.bus.redis.redis_url import Place
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusUnavailable, DilocoError, NotPermitted, Oversized

# Keys or fields per round trip when all of them are visited.
SCANNED = 1000

# Largest reply with entries that learners wrote. If there is more, the `read_cut` script shortens it on the server.
MAX_READ_BYTES = 2**24

# Position of a command's first key, if it is not the first argument.
_KEY_AT = {"EVALSHA": 3, "EVAL": 3, "XINFO": 2, "MEMORY": 2}
_KEYLESS = frozenset({"ACL", "CONFIG", "INFO", "KEYS", "SCRIPT EXISTS", "SCRIPT LOAD", "TIME"})


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the name under which the server caches it."""

    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return a script of the `lua` folder, with the common prelude before it."""
    folder = resources.files(__package__) / "lua"
    text = (folder / "_prelude.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def scripts() -> dict[str, Script]:
    """Return all scripts by name."""
    names = sorted(path.name for path in (resources.files(__package__) / "lua").iterdir())
    return {name[:-4]: script(name[:-4]) for name in names if name.endswith(".lua") and not name.startswith("_")}


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return a hash as a dict, from Redis's flat reply of alternating names and values."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def unix_ms(time: Sequence[bytes]) -> int:
    """Return the server's Unix time in ms, from its reply to TIME."""
    return int(time[0]) * 1000 + int(time[1]) // 1000


def to_ms(seconds: float) -> int:
    """Return whole milliseconds for Redis, at least 1: an expiry of 0 is refused or deletes, BLOCK 0 waits forever."""
    return max(1, round(seconds * 1000))


def key_of(command: Sequence[Any]) -> bytes | str | None:
    """Return the first key of a command that the bus sends; None if it has no key, so that any node can serve it."""
    name = str(command[0])
    if name in _KEYLESS:
        return None
    at = command.index("STREAMS") + 1 if name == "XREAD" else _KEY_AT.get(name, 1)
    key: bytes | str = command[at]
    return key


class RedisCalls:
    """All kinds of calls to a Redis server or cluster; made by `connecting.connect_calls`."""

    def __init__(self, place: Place, nodes: Nodes) -> None:
        self.nodes = nodes
        self.ahead_s = 0.0  # the server's clock minus this machine's
        self._lanes = Lanes(place, nodes, self.ensure_scripts)
        self.user = place.user

    async def info(self) -> BusInfo:
        """Return what the server, or all primaries of a cluster, report; a node that is down becomes a warning."""
        told = await self.on_all_nodes("INFO")
        there = {address: reply for address, reply in told.items() if not isinstance(reply, DilocoError)}
        nodes, known_replicas = list(there.values()), self.nodes.known_replicas
        limits = [int(node.get("maxmemory", 0)) for node in nodes]
        limited = [(int(node["used_memory"]), limit) for node, limit in zip(nodes, limits, strict=True) if limit]
        servers = [
            server.Server.of(node, at=str(address), known_replicas=known_replicas) for address, node in there.items()
        ]
        warnings = set(server.warnings(servers))
        warnings |= {str(reply) for reply in told.values() if isinstance(reply, DilocoError)}
        return BusInfo(
            server_id="+".join(sorted(str(node["run_id"]) for node in nodes)),
            version=str(nodes[0]["redis_version"]),
            maxmemory_bytes=sum(limits) if all(limits) else 0,
            used_bytes=sum(int(node["used_memory"]) for node in nodes),
            cluster=self.nodes.cluster,
            nodes=len(told),
            warnings=tuple(sorted(warnings)),
            takes_writes=not all(one.cut_off for one in servers),
            up_s=math.inf if self.nodes.cluster else float(nodes[0].get("uptime_in_seconds", math.inf)),
            received_bytes=sum(int(node.get("total_net_input_bytes", 0)) for node in nodes),
            sent_bytes=sum(int(node.get("total_net_output_bytes", 0)) for node in nodes),
            node=max(limited, key=lambda one: one[0] / one[1], default=None),
            backlogs_bytes=server.backlogs_bytes(servers),
        )

    async def close(self) -> None:
        """End all calls in flight and close all connections."""
        await self._lanes.close()

    def call(self, lane: Lane, limit_s: float, key: bytes | str | None = None) -> AbstractAsyncContextManager[Any]:
        """Return a context manager for one call at the node that has a key.

        It yields a redis-py client, and translates the errors that leave it.
        """
        return self._lanes.call(lane, limit_s, self._lanes.node_of(key), key)

    async def on_all_nodes(
        self, *command: Any, at: Collection[HostPort | None] | None = None, lane: Lane = "control"
    ) -> dict[HostPort | None, Any]:
        """Send one command to each node that holds keys, or to those in `at`; return the reply of each.

        The reply of a node that is down is the error.

        Raises:
            BusUnavailable: all of them are down.
            DilocoError: one refuses the command.
        """

        async def ask(address: HostPort | None) -> Any:
            try:
                async with self._lanes.call(lane, BUS_TIMES.call_s, address) as client:
                    return await client.execute_command(*command)
            except DilocoError as error:
                return error

        nodes = list(self.nodes.all() if at is None else at)
        replies = await asyncio.gather(*map(ask, nodes))
        errors = [reply for reply in replies if isinstance(reply, DilocoError)]
        refusal = next((error for error in errors if not isinstance(error, BusUnavailable)), None)
        if refusal is not None:
            raise refusal
        if errors and len(errors) == len(nodes):
            raise errors[0]
        return dict(zip(nodes, replies, strict=True))

    async def command(self, *args: Any) -> Any:
        """Send one command on the control lane; return its reply."""
        async with self.call("control", BUS_TIMES.call_s, key_of(args)) as client:
            return await client.execute_command(*args)

    async def script(self, name: str, keys: Sequence[str], *args: Any, lane: Lane = "control") -> list[Any]:
        """Run a script; return what it answered after OK. If the node lacks the script, load it and try once more."""
        cluster_slots.one_slot(keys)
        command = ("EVALSHA", script(name).sha, len(keys), *keys, *args)
        node = self._lanes.node_of(keys[0])
        for last_try in (False, True):
            async with self._lanes.call(lane, BUS_TIMES.call_s, node, keys[0]) as client:
                try:
                    reply = await zero_copy.ask(client, command)
                    break
                except rx.NoScriptError:
                    if last_try:
                        raise
            # Load on the same lane, since its connection has just answered. Connections of other lanes may still lead
            # to a server that this one has replaced and that is silent now.
            await self.ensure_scripts([node], lane)
        return self.answer(reply)

    async def ensure_scripts(self, nodes: Collection[HostPort | None] | None = None, lane: Lane = "control") -> None:
        """Load all scripts that nodes lack, other parties' included, since some users may not load any.

        A restarted server has no scripts, and a promoted replica has none of its primary's.

        nodes: None means all that hold keys. Nodes that are down are skipped.

        Raises:
            ScriptsMissing: a node lacks some, and this user may not load them.
            DilocoError: none of them answers.
        """
        listed = list(scripts().values())
        try:
            told = await self.on_all_nodes("SCRIPT EXISTS", *(one.sha for one in listed), at=nodes, lane=lane)
        except NotPermitted:  # this user runs few scripts or none; if one is missing, its call raises
            return
        for node, there in told.items():
            if isinstance(there, DilocoError):
                continue
            missing = [one for one, found in zip(listed, there, strict=True) if not found]
            try:
                async with self._lanes.call(lane, BUS_TIMES.call_s, node) as client:
                    for one in missing:
                        await client.execute_command("SCRIPT LOAD", one.text)
            except NotPermitted:
                raise scripts_missing(self._lanes.where(node)) from None
            except BusUnavailable:  # the node went down since the first command: skip it too
                continue

    def answer(self, reply: Any, key: bytes | str | None = None) -> list[Any]:
        """Return what a script answered after OK; raise the error that any other answer stands for."""
        if isinstance(reply, Exception):
            raise self._error(reply, key) from reply
        if reply[0] != b"OK":
            raise refused(reply)
        return list(reply[1:])

    def _error(self, error: BaseException, key: bytes | str | None) -> DilocoError:
        return self._lanes.translate(error, self._lanes.node_of(key), key)

    async def send(
        self,
        commands: Sequence[Sequence[Any]],
        key: bytes | str | None,
        lane: Lane = "control",
        limit_s: float = BUS_TIMES.call_s,
        max_bytes: int = zero_copy.ANY_SIZE,
    ) -> list[Any]:
        """Send commands to the node that has a key in one round trip; return raw replies, errors included.

        Raises:
            Oversized: all replies together have more than `max_bytes`.
        """
        node = self._lanes.node_of(key)
        async with self._lanes.call(lane, limit_s, node, key) as client:
            replies = await zero_copy.send(client, commands, max_bytes)
        for reply in replies:
            self._lanes.notice(reply, node)
        return replies

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send several commands in one round trip to each node, not atomically; errors are among the raw replies.

        If a node is down, each of its replies is the error; the other nodes are not held up.

        Raises:
            DilocoError: all nodes are down.
        """
        replies: list[Any] = [None] * len(commands)
        of_node: dict[HostPort | None, list[int]] = {}
        for i, command in enumerate(commands):
            try:
                of_node.setdefault(self._lanes.node_of(key_of(command)), []).append(i)
            except DilocoError as error:
                replies[i] = error

        async def ask(places: list[int]) -> None:
            try:
                found = await self.send([commands[i] for i in places], key_of(commands[places[0]]))
            except DilocoError as error:
                found = [error] * len(places)
            for i, reply in zip(places, found, strict=True):
                replies[i] = reply

        await asyncio.gather(*map(ask, of_node.values()))
        if replies and all(isinstance(reply, DilocoError) for reply in replies):
            raise replies[0]
        return replies

    async def run_pipeline(
        self, commands: Iterable[Sequence[Any]], but_for: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> list[Any]:
        """Run a `pipeline` and raise its first error reply.

        but_for: types of errors that are returned among the replies instead.
        """
        listed = list(commands)
        return self._sound(listed, await self.pipeline(listed), but_for)

    def _sound(
        self,
        commands: Sequence[Sequence[Any]],
        replies: list[Any],
        but_for: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> list[Any]:
        """Return the replies; raise the first error among them, except for types in `but_for`."""
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, Exception) and not isinstance(reply, but_for):
                raise self._error(reply, key_of(command)) from reply
        return replies

    async def keys(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """Yield the keys of all nodes that match a pattern, in parts; keys added or deleted meanwhile may be missed."""
        found = set[bytes]()
        for node in self.nodes.all():
            async with self._lanes.call("bulk", BUS_TIMES.payload_call_s, node) as client:
                found |= {key async for key in client.scan_iter(match=pattern, count=SCANNED)}
        listed = sorted(found)
        for first in range(0, len(listed), SCANNED):
            yield listed[first : first + SCANNED]

    async def hashes(self, keys: Iterable[str]) -> list[Mapping[bytes, bytes]]:
        """Return the fields of hashes, read in one round trip on the control lane; a missing hash has no fields."""
        return [pairs(flat) for flat in await self.run_pipeline(("HGETALL", key) for key in keys)]

    async def timed_hashes(
        self, *keys: str, max_bytes: int = zero_copy.ANY_SIZE
    ) -> tuple[int, list[Mapping[bytes, bytes]]]:
        """Return the server's time in ms and the fields of hashes in one slot, read in one round trip.

        The commands are plain, so that read-only users need no script. They are not atomic: each sees a slightly later
        state than the previous one, and the time is read last.

        Raises:
            Oversized: all replies together have more than `max_bytes`.
        """
        cluster_slots.one_slot(keys)
        *flat, time = await self.at_one_node([*(("HGETALL", key) for key in keys), ("TIME",)], keys[0], max_bytes)
        return unix_ms(time), list(map(pairs, flat))

    async def scan_hash(self, key: str, name_bytes: int, value_bytes: int) -> tuple[dict[bytes, bytes], int]:
        """Read a hash in bounded parts, for one that is too large to be read at once.

        Returns:
            Its fields without those that are larger than `name_bytes` or `value_bytes`; and how many of the larger ones
            were deleted, which happens if this user has the right.
        """
        found, gone, cursor = dict[bytes, bytes](), 0, b"0"
        while True:
            cursor, removed, flat = await self.script("sift", [key], cursor, name_bytes, value_bytes)
            found |= pairs(flat)
            gone += removed
            if cursor == b"0":
                return found, gone

    async def delete(self, key: str, names: Collection[bytes]) -> int:
        """Delete fields of a hash, some at a time; return how many existed."""
        listed, gone = sorted(names), 0
        for i in range(0, len(listed), SCANNED):
            gone += await self.command("HDEL", key, *listed[i : i + SCANNED])
        return gone

    async def at_one_node(
        self, commands: Sequence[Sequence[Any]], key: str | None, max_bytes: int = zero_copy.ANY_SIZE
    ) -> list[Any]:
        """Send commands to the node that has a key in one round trip; return raw replies or raise the first error.

        Raises:
            Oversized: all replies together have more than `max_bytes`.
        """
        return self._sound(commands, await self.send(commands, key, max_bytes=max_bytes))

    @staticmethod
    def xread(cursors: Mapping[str, str], limit: int, block_s: float, lane: Lane) -> tuple[tuple[Any, ...], Lane]:
        """Return an XREAD command and its lane: a blocking one has a lane of its own so that it holds up no other."""
        block = ("BLOCK", to_ms(block_s)) if block_s > 0 else ()
        command = ("XREAD", "COUNT", limit, *block, "STREAMS", *cursors, *cursors.values())
        return command, BLOCKING[lane] if block else lane

    async def read(
        self,
        cursors: Mapping[str, str],
        limit: int,
        block_s: float,
        away: set[str] | None = None,
        value_bytes: int | None = None,
    ) -> list[tuple[str, list[tuple[str, bytes]]]]:
        """Return the entries after the cursors, by key (XREAD); wait up to `block_s` for the first.

        Args:
            cursors: key of a stream -> entry id.
            limit: maximum number of entries of each stream.
            block_s: how long to wait; 0 returns what exists now.
            away: receives the keys whose node did not answer. If it is None, a silent node is an error unless the
                others have entries.
            value_bytes: largest valid value, for streams of one slot into which learners write. If the reply would be
                very large, longer values are cut to `value_bytes` + 1, and there may be fewer than `limit` entries.
        """
        for cursor in cursors.values():
            schema.entry_id(cursor)
        if self.nodes.cluster and len(slots := cluster_slots.by_slot(cursors)) > 1:
            return await self._read_slots(slots, limit, block_s, away)
        command, lane = self.xread(cursors, limit, block_s, "control")
        max_bytes = zero_copy.ANY_SIZE if value_bytes is None else MAX_READ_BYTES
        try:
            async with self.call(lane, BUS_TIMES.call_s + block_s, next(iter(cursors))) as client:
                return _entries(await zero_copy.ask(client, command, max_bytes))
        except Oversized:
            return _entries(await self.script("read_cut", list(cursors), limit, value_bytes, *cursors.values()))

    async def _read_slots(
        self, slots: Sequence[Mapping[str, str]], limit: int, block_s: float, away: set[str] | None
    ) -> list[tuple[str, list[tuple[str, bytes]]]]:
        """Poll the streams of all slots, with one round trip to each node, until one has entries or the time is over.

        A node that is down hides only its own entries.
        """
        commands = [self.xread(cursors, limit, 0, "control")[0] for cursors in slots]
        now = asyncio.get_running_loop().time
        until = now() + block_s
        while True:
            replies = await self.pipeline(commands)
            error = next((reply for reply in replies if isinstance(reply, Exception)), None)
            if away is not None:
                away |= {
                    key
                    for cursors, reply in zip(slots, replies, strict=True)
                    if isinstance(reply, Exception)
                    for key in cursors
                }
            found = [
                (key, entries)
                for reply in replies
                if not isinstance(reply, Exception)
                for key, entries in _entries(reply)
            ]
            if found or now() >= until:
                if error is not None and not found and away is None:
                    raise self._error(error, None) from error
                return found
            await asyncio.sleep(min(BUS_TIMES.poll_s, max(0.0, until - now())))


def _entries(reply: Any) -> list[tuple[str, list[tuple[str, bytes]]]]:
    """Convert Redis's raw reply to XREAD."""
    return [
        (key.decode(), [(at.decode(), fields[1] if fields else b"") for at, fields in entries])
        for key, entries in reply or ()
    ]
