"""Connections to a run's nodes, and single calls on them: time limits, concurrency limits and error translation.

Each lane has its own connections, so that neither a long payload nor a blocking read holds up control calls, and calls
that wait for a payload do not hold up those that wait for a header. Each node has its own connections too, so that a
dead node does not hold up calls to the others. Nothing is retried here: only the caller knows what may be repeated.
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
from diloco.pipeline.bus.redis.nodes import Nodes
from diloco.pipeline.bus.redis.redis_errors import CHECK_ADDRESS, ERRORS, USE_PRIMARY, translate
from diloco.pipeline.bus.redis.redis_url import Place
from diloco.pipeline.bus.redis.zero_copy import drop_all
from diloco.pipeline.bus.times import BUS_TIMES
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
# The lane of a call that blocks at the server until there is something to read.
BLOCKING: dict[Lane, Lane] = {"control": "blocking", "payloads": "blocking payloads"}
# Lanes on which hundreds of calls may wait for a turn. That wait says nothing about the server, so it does not count
# towards a call's time limit.
CROWDED: frozenset[Lane] = frozenset({"payloads", "blocking", "blocking payloads"})

# Remedy for a server that was named by sentinels or a cluster, not by the URL.
TAKEN_PLACE = "start it again, unless a replica takes its place, which is detected automatically"

# When a connection has just been reset, uvloop refuses a write by a RuntimeError with this text.
_CLOSED = re.compile(r"the handler is closed|transport is clos")
# The server is not a primary any more: by now another server may have its address or its role.
_DEMOTED = re.compile(r"(^|[-\s])(READONLY|MASTERDOWN|UNBLOCKED)\s")
# The server may be an old primary that the others have replaced.
_CUT_OFF = re.compile(r"(^|[-\s])NOREPLICAS\s")
_MOVED = re.compile(r"^MOVED ([0-9]+) (.*):([0-9]+)$")


class _NodeLane:
    """The connections of one lane to one node."""

    def __init__(self, options: dict[str, Any], limit: int) -> None:
        self.client = Redis.from_pool(ConnectionPool(**options))
        self.turns = asyncio.Semaphore(limit)
        self.calls: set[asyncio.Timeout] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.left = False

    def leave(self) -> None:
        """End all calls in flight: their timeouts expire now."""
        self.left = True
        for call in self.calls:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Wait until all calls have ended, then close the connections; close them at once if this is cancelled."""
        try:
            await self.idle.wait()
        finally:
            await drop_all(self.client.connection_pool)


class Lanes:
    """All connections to a run's nodes. If the nodes can change, a background task follows them."""

    def __init__(self, place: Place, nodes: Nodes, found: Callable[[Collection[HostPort | None]], Awaitable[None]]):
        """Must be called on a running event loop. found: called with the nodes that newly hold keys."""
        self.place, self.nodes, self._found = place, nodes, found
        self._ways: dict[tuple[Lane, HostPort | None], _NodeLane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closed = False
        # Nodes that joined after this party connected and have not served it yet: see `translate`.
        self._came: set[HostPort | None] = set()
        self._log = structlog.get_logger()
        self._following = self._begin(self._follow()) if nodes.moves else None

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def where(self, address: HostPort | None) -> str:
        """Return the name of a node in error messages."""
        return str(address) if self.nodes.moves and address else self.place.where

    def translate(self, error: BaseException, address: HostPort | None, key: bytes | str | None = None) -> DilocoError:
        """Translate a node's error into one of this project. key: the key that was asked for."""
        if isinstance(error, DilocoError):
            return error
        told = translate(error, self.where(address), self.place.user, key)
        # Other nodes have accepted this login, so the new node's list of users is wrong, not the login. That can be
        # fixed while the run continues; a LoginRefused would end this party.
        if isinstance(told, LoginRefused) and address in self._came:
            told = BusUnavailable(
                f"Redis at {address} has been the server since a failover, and refuses the login that the other "
                "servers accepted",
                "give it the same users' file as the others; this party then continues on its own",
                told.said,
            )
        if self.nodes.moves and told.remedy == CHECK_ADDRESS:  # the node's address does not come from the URL
            told.remedy = TAKEN_PLACE
        elif self.nodes.moves and told.remedy == USE_PRIMARY:
            told.remedy = ""
        return told

    def node_of(self, key: bytes | str | None) -> HostPort | None:
        """Return the node that has a key; for None, any node. If it is unknown, request a lookup.

        Raises:
            BusUnavailable: no node is known to have it.
        """
        try:
            return self.nodes.of(key)
        except BusUnavailable:
            self._wake.set()
            raise

    @asynccontextmanager
    async def call(
        self, lane: Lane, limit_s: float, address: HostPort | None, key: bytes | str | None = None
    ) -> AsyncIterator[Any]:
        """Yield a client of the lane for one call, with its time limit; translate errors. key: the one asked for."""
        if self._closed:
            raise BusUnavailable("the bus is closed")
        if (way := self._ways.get((lane, address))) is None:
            way = self._ways[lane, address] = _NodeLane(self.place.at(address), LANES[lane])
        where = self.where(address)
        try:
            async with asyncio.timeout(None if lane in CROWDED else limit_s) as scope:
                way.calls.add(scope)
                way.idle.clear()
                try:
                    async with way.turns:
                        if scope.when() is None:  # a crowded lane: the time limit starts with the call's turn
                            scope.reschedule(asyncio.get_running_loop().time() + limit_s)
                        yield way.client
                        self._came.discard(address)  # it has accepted this user's login
                finally:
                    way.calls.discard(scope)
                    if not way.calls:
                        way.idle.set()
        except ERRORS as error:
            if self._closed:
                raise BusUnavailable("the bus was closed") from None
            if way.left:
                remedy = "" if self.nodes.moves else USE_PRIMARY
                raise BusUnavailable(f"Redis at {where} is not the primary", remedy) from None
            self.notice(error, address)
            if isinstance(error, TimeoutError):
                raise BusUnavailable(f"Redis at {where}: no answer in {limit_s:g} s") from None
            raise self.translate(error, address, key) from error
        except RuntimeError as error:
            if not _CLOSED.search(str(error)):
                raise
            raise BusUnavailable(f"Redis at {where}: the connection was reset") from error

    def notice(self, error: object, address: HostPort | None) -> None:
        """Look in an error for signs that the primary has changed: leave a demoted node, and request a lookup."""
        if not isinstance(error, ERRORS):
            return
        text = str(error)
        demoted = isinstance(error, (rx.ReadOnlyError, rx.MasterDownError)) or _DEMOTED.search(text)
        if demoted or (_CUT_OFF.search(text) and not self.nodes.moves):
            self._leave([address])
        if isinstance(error, rx.MovedError):
            self._moved(error.slot_id, error.host, error.port, address)
        elif found := _MOVED.search(text):  # `zero_copy.receive` raises it as a plain ResponseError
            self._moved(int(found[1]), found[2], int(found[3]), address)
        self._wake.set()

    def _moved(self, slot: int, host: str, port: int, told_by: HostPort | None) -> None:
        """Record a redirection. A node that does not know the other one's host means its own host."""
        if host in ("", "?") and told_by is not None:
            host = told_by.host
        node = HostPort(host, port)
        if node not in self.nodes.all():
            self._came.add(node)
        self.nodes.moved(slot, node)

    def _leave(self, addresses: Collection[HostPort | None]) -> None:
        """Drop all connections to nodes, busy ones included; later calls to these nodes get new connections."""
        for lane, address in list(self._ways):
            if address in addresses:
                way = self._ways.pop((lane, address))
                way.leave()
                self._begin(way.close())

    async def _follow(self) -> None:
        """Look the nodes up every `refresh_s`, and at once when a call has found a problem with one."""
        failing = ""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BUS_TIMES.refresh_s):
                    await self._wake.wait()
            self._wake.clear()
            before = set(self.nodes.all())
            try:
                await self.nodes.refresh()
            except Exception as error:
                # Keep the known nodes if no answer comes or it makes no sense. Each new kind of failure is logged once.
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
            await asyncio.sleep(BUS_TIMES.poll_s)

    async def close(self) -> None:
        """End all calls in flight and close all connections."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()
        ways = list(self._ways.values())
        for way in ways:
            way.leave()
        await asyncio.gather(*self._tasks, *(way.close() for way in ways), return_exceptions=True)
