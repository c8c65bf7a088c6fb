"""Connections to a run's nodes, and one call on them: its time limit, its turn, and errors as this project names them.

Lanes have connections of their own, so that neither a long payload nor a blocking read holds up control, and nobody
who waits for a payload those who wait for a header; and each node has its own, so that one that is gone holds up nobody
who wants another. There are no retries here: the caller knows what may be repeated.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import redis.exceptions as rx
import structlog
from redis.asyncio import ConnectionPool, Redis

from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.redis.nodes import LOOK_S, Nodes
from diloco.pipeline.bus.redis.redis_errors import ERRORS, IS_IT_THERE, translate
from diloco.pipeline.bus.redis.redis_url import Place
from diloco.pipeline.bus.redis.zero_copy import drop_all
from diloco.pipeline.errors import BusUnavailable, DilocoError, LoginRefused

Lane = Literal["control", "leases", "bulk", "payloads", "blocking", "blocking payloads"]

LANES: dict[Lane, int] = {
    "control": 8,
    "leases": 2,
    "bulk": 8,
    "payloads": 32,
    "blocking": 256,
    "blocking payloads": 256,
}
"""Calls in flight at a node at most; further ones wait for their turn."""
BLOCKING: dict[Lane, Lane] = {"control": "blocking", "payloads": "blocking payloads"}
"""Where a call goes that waits at the server for what it reads."""
CROWDED: frozenset[Lane] = frozenset({"payloads", "blocking", "blocking payloads"})
"""Hundreds of calls may want a turn there: to wait for one says nothing of the server, and is no part of their time."""
LOOK_AGAIN_S = 0.2
"""Least time between two looks that failed calls ask for."""

TAKEN_PLACE = "start it again, unless a replica takes its place, which is found by itself"
"""What to do about a server that sentinels or a cluster have named."""

_CLOSED = re.compile(r"the handler is closed|transport is clos")
"""How an event loop (uvloop's) refuses to write to a connection that was reset a moment ago: as a RuntimeError."""
_DEMOTED = re.compile(r"(^|[-\s])(READONLY|MASTERDOWN|UNBLOCKED)\s")
"""It is no primary: another server may have its address by now, or its place."""
_CUT_OFF = re.compile(r"(^|[-\s])NOREPLICAS\s")
"""It may be an old primary, which the others have replaced."""
_MOVED = re.compile(r"^MOVED ([0-9]+) (.*):([0-9]+)$")


class _Way:
    """Connections of one lane to one node."""

    def __init__(self, options: dict[str, Any], limit: int) -> None:
        self.client = Redis.from_pool(ConnectionPool(**options))
        self.turns = asyncio.Semaphore(limit)
        self.calls: set[asyncio.Timeout] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.left = False

    def leave(self) -> None:
        """End all calls in flight."""
        self.left = True
        for call in self.calls:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Once its calls have ended; at once if this is cancelled."""
        try:
            await self.idle.wait()
        finally:
            await drop_all(self.client.connection_pool)


class Lanes:
    """All connections to the nodes of one server, or several that belong together."""

    def __init__(self, place: Place, nodes: Nodes, found: Callable[[Collection[HostPort | None]], Awaitable[None]]):
        """found: told of nodes that hold keys from now on. Made on a running loop."""
        self.place, self.nodes, self._found = place, nodes, found
        self._ways: dict[tuple[Lane, HostPort | None], _Way] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._closed = False
        self._came: set[HostPort | None] = set()
        """Nodes that came later than this party, and have answered it nothing yet."""
        self._log = structlog.get_logger()
        self._following = self._begin(self._follow()) if nodes.moves else None

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def where(self, address: HostPort | None) -> str:
        """How errors name a node."""
        return str(address) if self.nodes.moves and address else self.place.where

    def translate(self, error: BaseException, address: HostPort | None, key: bytes | str | None = None) -> DilocoError:
        """A node's error as one of ours. key: of what was asked for."""
        if isinstance(error, DilocoError):
            return error
        told = translate(error, self.where(address), self.place.user, key)
        if isinstance(told, LoginRefused) and address in self._came:  # where it came from, the login was good
            told = BusUnavailable(
                f"Redis at {address} is there since a failover, and refuses the login that the others took",
                "give it the users' file that they have: then it goes on by itself",
                told.said,
            )
        if self.nodes.moves and told.remedy == IS_IT_THERE:  # its address is not the URL's
            told.remedy = TAKEN_PLACE
        return told

    def node_of(self, key: bytes | str | None) -> HostPort | None:
        """Who has a key; of no key: any node.

        Raises:
            BusUnavailable: nobody is known to have it.
        """
        try:
            return self.nodes.of(key)
        except BusUnavailable:
            self._look.set()
            raise

    @asynccontextmanager
    async def call(
        self, lane: Lane, limit_s: float, address: HostPort | None, key: bytes | str | None = None
    ) -> AsyncIterator[Any]:
        """A client of the lane for the time of one call; errors leave it translated. key: of what is asked for."""
        if self._closed:
            raise BusUnavailable("the bus is closed")
        if (way := self._ways.get((lane, address))) is None:
            way = self._ways[lane, address] = _Way(self.place.at(address), LANES[lane])
        where = self.where(address)
        try:
            async with asyncio.timeout(None if lane in CROWDED else limit_s) as scope:
                way.calls.add(scope)
                way.idle.clear()
                try:
                    async with way.turns:
                        if scope.when() is None:
                            scope.reschedule(asyncio.get_running_loop().time() + limit_s)
                        yield way.client
                        self._came.discard(address)  # it knows this user
                finally:
                    way.calls.discard(scope)
                    if not way.calls:
                        way.idle.set()
        except ERRORS as error:
            if self._closed:
                raise BusUnavailable("the bus was closed") from None
            if way.left:
                raise BusUnavailable(f"Redis at {where}: it is not the primary any more") from None
            self.notice(error, address)
            if isinstance(error, TimeoutError):
                raise BusUnavailable(f"Redis at {where}: no answer in {limit_s:g} s") from None
            raise self.translate(error, address, key) from error
        except RuntimeError as error:
            if not _CLOSED.search(str(error)):
                raise
            raise BusUnavailable(f"Redis at {where}: the connection was reset") from error

    def notice(self, error: object, address: HostPort | None) -> None:
        """See what an answer says of who is primary."""
        if not isinstance(error, ERRORS):
            return
        text = str(error)
        demoted = isinstance(error, (rx.ReadOnlyError, rx.MasterDownError)) or _DEMOTED.search(text)
        if demoted or (_CUT_OFF.search(text) and not self.nodes.moves):
            self._leave([address])
        if isinstance(error, rx.MovedError):
            self._moved(error.slot_id, error.host, error.port, address)
        elif found := _MOVED.search(text):  # as `zero_copy.receive` gives it
            self._moved(int(found[1]), found[2], int(found[3]), address)
        self._look.set()

    def _moved(self, slot: int, host: str, port: int, told_by: HostPort | None) -> None:
        """A node that does not know the other one's name means its own host."""
        if host in ("", "?") and told_by is not None:
            host = told_by.host
        node = HostPort(host, port)
        if node not in self.nodes.all():
            self._came.add(node)
        self.nodes.moved(slot, node)

    def _leave(self, addresses: Collection[HostPort | None]) -> None:
        """Drop all connections to nodes, the busy ones too: who asks for one of them anew gets new ones."""
        for lane, address in list(self._ways):
            if address in addresses:
                way = self._ways.pop((lane, address))
                way.leave()
                self._begin(way.close())

    async def _follow(self) -> None:
        """Look for the nodes from time to time, and at once where a call found that something is wrong with one."""
        failing = ""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._look.wait()
            self._look.clear()
            before = set(self.nodes.all())
            try:
                await self.nodes.look()
            except Exception as error:
                # What was known stays if nobody answers, or who does talks nonsense.
                said = str(error) or type(error).__name__
                if said != failing:
                    self._log.warning("primary_not_told", error=said)
                failing = said
            else:
                failing = ""
            now = set(self.nodes.all())
            if now != before:
                gone, came = before - now, now - before
                self._came |= came
                self._log.warning("primary_moved", gone=sorted(map(str, gone)), came=sorted(map(str, came)))
                self._leave(gone)
                with suppress(DilocoError):
                    await self._found(came)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def close(self) -> None:
        """End all calls in flight and close all connections."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()
        ways = list(self._ways.values())
        for way in ways:
            way.leave()
        await asyncio.gather(*self._tasks, *(way.close() for way in ways), return_exceptions=True)
