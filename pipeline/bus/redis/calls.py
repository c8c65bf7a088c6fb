"""How the bus calls Redis: commands, scripts, pipelines and reads, each at the node that has its keys."""

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
from diloco.pipeline.errors import BusUnavailable, DilocoError, NotPermitted, Oversized

CONTROL_S = 10.0
BULK_S = 60.0
"""Time limits of one call; a blocking read has its `block_s` on top of CONTROL_S."""
POLL_S = 0.2
"""Between two looks at streams in several slots, which no one read can wait for."""

SCANNED = 1000
"""Keys a round trip, where all are looked at."""

MOST_READ_BYTES = 2**24
"""Of entries that learners wrote, in one reply: with more, they are looked at on the server."""

_KEY_AT = {"EVALSHA": 3, "EVAL": 3, "XINFO": 2}
"""Where a command's first key stands, if it is not the first argument."""
_KEYLESS = frozenset({"ACL", "CONFIG", "INFO", "KEYS", "SCRIPT EXISTS", "SCRIPT LOAD", "TIME"})


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


@cache
def scripts() -> dict[str, Script]:
    """All scripts by name."""
    names = sorted(path.name for path in (resources.files(__package__) / "lua").iterdir())
    return {name[:-4]: script(name[:-4]) for name in names if name.endswith(".lua") and not name.startswith("_")}


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """A hash, of the names and values by turns that Redis gives it as."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def unix_ms(time: Sequence[bytes]) -> int:
    """The server's, of its reply to TIME."""
    return int(time[0]) * 1000 + int(time[1]) // 1000


def to_ms(seconds: float) -> int:
    """Milliseconds as Redis takes them: whole, and never 0, which would mean none or for ever."""
    return max(1, round(seconds * 1000))


def key_of(command: Sequence[Any]) -> bytes | str | None:
    """The first key of a command that the bus sends; None: it has none, and any node will do."""
    name = str(command[0])
    if name in _KEYLESS:
        return None
    at = command.index("STREAMS") + 1 if name == "XREAD" else _KEY_AT.get(name, 1)
    key: bytes | str = command[at]
    return key


class RedisCalls:
    """The ways to call a Redis server or cluster; made by `connecting.connect_calls`."""

    def __init__(self, place: Place, nodes: Nodes) -> None:
        self.nodes = nodes
        self.ahead_s = 0.0
        """Of the server's clock, by that of this machine."""
        self._lanes = Lanes(place, nodes, self.ensure_scripts)

    async def info(self) -> BusInfo:
        """The server, or all primaries of a cluster, about themselves; of one that is away, that it is."""
        told = await self.everywhere("INFO")
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
        """A client of the node that has a key, for the time of one call; errors leave it translated."""
        return self._lanes.call(lane, limit_s, self._lanes.node_of(key), key)

    async def everywhere(
        self, *command: Any, at: Collection[HostPort | None] | None = None, lane: Lane = "control"
    ) -> dict[HostPort | None, Any]:
        """One command at each node that holds keys, or at those given; of a node that is away, the error.

        Raises:
            BusUnavailable: all of them are away.
            DilocoError: one refuses it.
        """

        async def ask(address: HostPort | None) -> Any:
            try:
                async with self._lanes.call(lane, CONTROL_S, address) as client:
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
        """One command on the control lane."""
        async with self.call("control", CONTROL_S, key_of(args)) as client:
            return await client.execute_command(*args)

    async def script(self, name: str, keys: Sequence[str], *args: Any, lane: Lane = "control") -> list[Any]:
        """Run a script; returns what it answered after OK."""
        cluster_slots.one_slot(keys)
        command = ("EVALSHA", script(name).sha, len(keys), *keys, *args)
        node = self._lanes.node_of(keys[0])
        for last_try in (False, True):
            async with self._lanes.call(lane, CONTROL_S, node, keys[0]) as client:
                try:
                    reply = await zero_copy.ask(client, command)
                    break
                except rx.NoScriptError:
                    if last_try:
                        raise
            # On this lane, which has reached the node: others may have connections to one that is silent.
            await self.ensure_scripts([node], lane)
        return self.answer(reply)

    async def ensure_scripts(self, nodes: Collection[HostPort | None] | None = None, lane: Lane = "control") -> None:
        """Load the scripts that nodes lack, for all parties: some users may not load any.

        A server that was restarted has none, and a replica none of its primary's.

        nodes: None: all that hold keys. Those that are away are passed over.

        Raises:
            ScriptsMissing: one lacks some, and this user may not load them.
            DilocoError: none of them answers.
        """
        listed = list(scripts().values())
        try:
            told = await self.everywhere("SCRIPT EXISTS", *(one.sha for one in listed), at=nodes, lane=lane)
        except NotPermitted:  # who runs no script, or a few: it is told at the call
            return
        for node, there in told.items():
            if isinstance(there, DilocoError):
                continue
            missing = [one for one, found in zip(listed, there, strict=True) if not found]
            try:
                async with self._lanes.call(lane, CONTROL_S, node) as client:
                    for one in missing:
                        await client.execute_command("SCRIPT LOAD", one.text)
            except NotPermitted:
                raise scripts_missing(self._lanes.where(node)) from None
            except BusUnavailable:  # it was there a moment ago
                continue

    def answer(self, reply: Any, key: bytes | str | None = None) -> list[Any]:
        """What a script answered after OK; raises what it answered else."""
        if isinstance(reply, Exception):
            raise self._error(reply, key) from reply
        if reply[0] != b"OK":
            raise refused(reply)
        return list(reply[1:])

    def _error(self, error: BaseException, key: bytes | str | None) -> DilocoError:
        return self._lanes.translate(error, self._lanes.node_of(key), key)

    def notice(self, replies: Iterable[Any], key: bytes | str | None) -> None:
        """See what errors among replies say of who is primary."""
        for reply in replies:
            if isinstance(reply, rx.ResponseError):
                self._lanes.notice(reply, self._lanes.node_of(key))

    async def pipeline(self, lane: Lane, limit_s: float, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Several commands in one round trip to each node, not atomic; errors are among the replies.

        A node that is away is an error in the place of each of its replies, and holds up none of the others.

        Raises:
            DilocoError: all nodes are away.
        """
        listed = list(commands)
        if not self.nodes.cluster:
            return await self._pipeline(lane, limit_s, self._lanes.node_of(None), listed)
        replies: list[Any] = [None] * len(listed)
        of_node: dict[HostPort | None, list[int]] = {}
        for i, command in enumerate(listed):
            try:
                of_node.setdefault(self._lanes.node_of(key_of(command)), []).append(i)
            except DilocoError as error:
                replies[i] = error

        async def ask(node: HostPort | None, places: list[int]) -> DilocoError | None:
            try:
                found = await self._pipeline(lane, limit_s, node, [listed[i] for i in places])
            except DilocoError as error:
                found = [error] * len(places)
            for i, reply in zip(places, found, strict=True):
                replies[i] = reply
            return found[0] if isinstance(found[0], DilocoError) else None

        await asyncio.gather(*(ask(node, places) for node, places in of_node.items()))
        if replies and all(isinstance(reply, DilocoError) for reply in replies):
            raise replies[0]
        return replies

    async def _pipeline(
        self, lane: Lane, limit_s: float, node: HostPort | None, commands: Sequence[Sequence[Any]]
    ) -> list[Any]:
        async with self._lanes.call(lane, limit_s, node) as client:
            pipeline: Any = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, rx.ResponseError):
                self._lanes.notice(reply, node)
        return replies

    async def many(
        self, commands: Iterable[Sequence[Any]], but_for: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> list[Any]:
        """As `pipeline`, on the control lane; the first error among the replies is raised, `but_for` those."""
        listed = list(commands)
        replies = await self.pipeline("control", CONTROL_S, listed)
        for command, reply in zip(listed, replies, strict=True):
            if isinstance(reply, Exception) and not isinstance(reply, but_for):
                raise self._error(reply, key_of(command)) from reply
        return replies

    async def keys(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """All keys of a pattern, on all nodes, told in parts. Those that come or go meanwhile may be missed."""
        found = set[bytes]()
        for node in self.nodes.all():
            async with self._lanes.call("bulk", BULK_S, node) as client:
                found |= {key async for key in client.scan_iter(match=pattern, count=SCANNED)}
        listed = sorted(found)
        for first in range(0, len(listed), SCANNED):
            yield listed[first : first + SCANNED]

    async def hashes(self, keys: Iterable[str]) -> list[Mapping[bytes, bytes]]:
        """Fields of hashes, in one round trip on the control lane; of one that is not there, none."""
        commands = [("HGETALL", key) for key in keys]
        if self.nodes.cluster:
            return await self.many(commands)
        return [pairs(flat) for flat in await self.at_one_node(commands, None)]

    async def timed_hashes(
        self, *keys: str, most_bytes: int = zero_copy.ANY_SIZE
    ) -> tuple[int, list[Mapping[bytes, bytes]]]:
        """Fields of hashes in one slot, and the server's time in ms after them, in one round trip.

        Plain commands, each seeing the server a little later than the one before: whoever looks on needs no script.

        Raises:
            Oversized: they have more than `most_bytes`, all together.
        """
        cluster_slots.one_slot(keys)
        *flat, time = await self.at_one_node([*(("HGETALL", key) for key in keys), ("TIME",)], keys[0], most_bytes)
        return unix_ms(time), list(map(pairs, flat))

    async def sift(self, key: str, name_bytes: int, value_bytes: int) -> tuple[dict[bytes, bytes], int]:
        """Fields of a hash without those that are larger; how many of these went, which they do where this user may.

        In parts, each bounded: for one that has more than can be read at once.
        """
        found, gone, cursor = dict[bytes, bytes](), 0, b"0"
        while True:
            cursor, removed, flat = await self.script("sift", [key], cursor, name_bytes, value_bytes)
            found |= pairs(flat)
            gone += removed
            if cursor == b"0":
                return found, gone

    async def delete(self, key: str, names: Collection[bytes]) -> int:
        """Delete fields of a hash, some at a time; how many there were."""
        listed, gone = sorted(names), 0
        for i in range(0, len(listed), SCANNED):
            gone += await self.command("HDEL", key, *listed[i : i + SCANNED])
        return gone

    async def at_one_node(
        self, commands: Sequence[Sequence[Any]], key: str | None, most_bytes: int = zero_copy.ANY_SIZE
    ) -> list[Any]:
        """Replies as Redis gives them, of the node that has a key, in one round trip; the first error is raised.

        Raises:
            Oversized: they have more than `most_bytes`, all together.
        """
        async with self.call("control", CONTROL_S, key) as client:
            replies = await zero_copy.send(client, commands, most_bytes)
        self.notice(replies, key)
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, Exception):
                raise self._error(reply, key_of(command)) from reply
        return replies

    @staticmethod
    def xread(cursors: Mapping[str, str], limit: int, block_s: float, lane: Lane) -> tuple[tuple[Any, ...], Lane]:
        """The command, and the lane it belongs to."""
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
        """XREAD: entries after the cursors, by key; waits up to `block_s` for the first.

        Args:
            cursors, limit, block_s: which.
            away: told the keys whose node did not answer. Without it that is an error if the others have nothing.
            value_bytes: of values that learners write into streams of one slot: where there is very much, larger ones
                are cut, to one byte more, and there may be fewer than `limit`.
        """
        for cursor in cursors.values():
            schema.entry_id(cursor)
        if self.nodes.cluster and len(slots := cluster_slots.by_slot(cursors)) > 1:
            return await self._read_slots(slots, limit, block_s, away)
        command, lane = self.xread(cursors, limit, block_s, "control")
        most_bytes = zero_copy.ANY_SIZE if value_bytes is None else MOST_READ_BYTES
        try:
            async with self.call(lane, CONTROL_S + block_s, next(iter(cursors))) as client:
                return _entries(await zero_copy.ask(client, command, most_bytes))
        except Oversized:
            return _entries(await self.script("read_cut", list(cursors), limit, value_bytes, *cursors.values()))

    async def _read_slots(
        self, slots: Sequence[Mapping[str, str]], limit: int, block_s: float, away: set[str] | None
    ) -> list[tuple[str, list[tuple[str, bytes]]]]:
        """A look at all slots in one round trip to each node, again and again until one has something.

        A node that is away hides what it has, and nothing else.
        """
        commands = [self.xread(cursors, limit, 0, "control")[0] for cursors in slots]
        now = asyncio.get_running_loop().time
        until = now() + block_s
        while True:
            replies = await self.pipeline("control", CONTROL_S, commands)
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
                for key, entries in _parsed(reply)
            ]
            if found or now() >= until:
                if error is not None and not found and away is None:
                    raise self._error(error, None) from error
                return found
            await asyncio.sleep(min(POLL_S, max(0.0, until - now())))


def _entries(reply: Any) -> list[tuple[str, list[tuple[str, bytes]]]]:
    """What XREAD answers, as it comes."""
    return [
        (key.decode(), [(at.decode(), fields[1] if fields else b"") for at, fields in entries])
        for key, entries in reply or ()
    ]


def _parsed(reply: Any) -> list[tuple[str, list[tuple[str, bytes]]]]:
    """The same after redis-py has read it."""
    return [
        (key.decode(), [(at.decode(), next(iter(fields.values()), b"")) for at, fields in entries])
        for key, entries in reply or ()
    ]
