"""A region's Redis, of version 6.2 or newer: plain commands on keys of the run's own prefix, no scripts.

It is not trusted. So all that it answers is read in bounds, its answers to the login too: the library's own reader
makes room for whatever a server announces. Connections (with TLS and all that) are redis-py's.
"""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis.exceptions as rx
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis.address import parse
from diloco.pipeline.bus.redis.bulk import Argument, Reply, drop, drop_all, exchange, of_chunks, pack
from diloco.pipeline.bus.redis.calls import to_ms
from diloco.pipeline.bus.redis.errors import ERRORS, THERE, translate
from diloco.pipeline.bus.region import ENTRY_S, FADING_S, LEASE_S, LEAST_CALL_S, RegionCache
from diloco.pipeline.bus.tls import check_files
from diloco.pipeline.errors import NotPermitted, RegionAway, UsageError

SMALL_BYTES = 64 * 1024
"""Of what is answered to commands that fetch no payload."""
SMALL_VALUES = 1024
"""Members of arrays in such an answer: names that may go are no more."""
_OURS = {"DILOCO_REDIS_CERT and DILOCO_REDIS_KEY": "?ssl_certfile=FILE&ssl_keyfile=FILE in the URL"}
_OURS |= {"DILOCO_REDIS_CA to the file": "?ssl_ca_certs=FILE in the URL, the file"}
_OURS |= {"DILOCO_REDIS_URL": "DILOCO_REGION_REDIS_URL"}


class RedisRegionCache(RegionCache):
    """Connects when it is first asked, and again after whatever has happened."""

    def __init__(self, url: str, run: str) -> None:
        """url: as the run's. Certificates are options of it (ssl_ca_certs=FILE ...).

        Raises:
            UsageError: malformed, or a file in it is not there.
        """
        try:
            self._place = parse(url)
            check_files(self._place.options)
        except UsageError as error:
            found = f"the region's Redis (DILOCO_REGION_REDIS_URL): {error.found}"
            raise UsageError(found, error.remedy, error.said) from None
        if self._place.service or len(self._place.hosts) > 1:
            raise UsageError("the region's Redis (DILOCO_REGION_REDIS_URL) is one server, at one address")
        if self._place.options.get("username") and not self._place.options.get("password"):
            raise UsageError("the region's Redis (DILOCO_REGION_REDIS_URL) has a user and no password")
        given = {**self._place.at(next(iter(self._place.hosts), None)), "retry": Retry(NoBackoff(), 0)}
        if "path" not in given:  # over a socket of this machine the library logs in by itself in any case
            given = {name: value for name, value in given.items() if name not in ("username", "password", "db")}
            given["redis_connect_func"] = self._log_in
        try:
            self._pool = ConnectionPool(**given)
            self._pool.make_connection()  # type: ignore[no-untyped-call]  # which judges the URL's options; it is not connected
        except (ValueError, TypeError):
            raise UsageError("the region's Redis URL has an option (?name=value) that cannot be used") from None
        self._keys = RunKeys(run)

    async def read(
        self, name: str, first: int, limit: int, chunk_bytes: int, within_s: float, block_s: float = 0.0
    ) -> Sequence[bytes | memoryview]:
        block = ("BLOCK", to_ms(block_s)) if block_s > 0 else ()
        command = ("XREAD", "COUNT", limit, *block, "STREAMS", self._keys.region_payload(name), f"{first}-0")
        reply = await self._call([command], within_s + block_s, *of_chunks(limit, chunk_bytes))
        return reply.strings()[3::3][:limit]  # key, and of each entry id, field, value

    async def claim(self, name: str, nonce: str) -> str:
        key = self._keys.region_claim(name)
        ms = to_ms(LEASE_S)
        reply = await self._call([("SET", key, nonce, "NX", "PX", ms), ("GET", key)], LEAST_CALL_S)
        holder = b"".join(reply.strings()[-1:]).decode(errors="replace")
        if holder == nonce:
            await self._call([("PEXPIRE", key, ms)], LEAST_CALL_S)
        return holder

    async def write(self, name: str, first: int, chunks: Sequence[bytes | memoryview], within_s: float) -> None:
        key = self._keys.region_payload(name)
        commands: list[Sequence[Argument]] = [
            ("XADD", key, *(("NOMKSTREAM",) if index else ()), f"{index + 1}-0", "c", chunk)
            for index, chunk in enumerate(chunks, first)
        ]
        try:
            await self._call([*commands, ("PEXPIRE", key, to_ms(ENTRY_S))], within_s, there=True)
        except RegionAway:
            with suppress(RegionAway):  # it may lack one in the middle
                await self.drop(name)
            raise

    async def keep(self, fragment: int, version: int, name: str, oldest: int) -> None:
        key = self._keys.region_kept(fragment)
        old = ("ZRANGEBYSCORE", key, "-inf", f"({oldest}")
        found = await self._call([("ZADD", key, version, name), ("PEXPIRE", key, to_ms(ENTRY_S)), old], LEAST_CALL_S)
        gone = [bytes(one).decode(errors="replace") for one in found.strings()]
        fading = [("PEXPIRE", self._keys.region_payload(one), to_ms(FADING_S)) for one in gone]
        if fading:
            await self._call([*fading, ("ZREMRANGEBYSCORE", key, "-inf", f"({oldest}")], LEAST_CALL_S)

    async def drop(self, name: str) -> None:
        await self._call([("UNLINK", self._keys.region_payload(name))], LEAST_CALL_S)

    async def close(self) -> None:
        await drop_all(self._pool)

    async def _call(
        self,
        commands: Sequence[Sequence[Any]],
        within_s: float,
        most_bytes: int = SMALL_BYTES,
        most_values: int = SMALL_VALUES,
        there: bool = False,
    ) -> Reply:
        """Their replies, none of which is an error; there: but for what says that an entry is there."""
        try:
            async with asyncio.timeout(within_s):
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                try:
                    reply = await _exchange(connection, commands, most_bytes, most_values)
                except BaseException:
                    await drop(connection)  # the rest of the replies may still come
                    raise
                finally:
                    await self._pool.release(connection)
            reply.errors = [error for error in reply.errors if not (there and THERE.search(error))]
            reply.strings()
            return reply
        except ERRORS as error:
            if isinstance(error, TimeoutError) and not str(error):
                error = TimeoutError(f"no answer in {within_s:.3g} s")
            raise self._told(error) from error
        except (RuntimeError, ValueError, TypeError) as error:
            # An event loop's way to refuse a connection that was reset; or an option of the URL that does not exist.
            raise self._told(rx.ConnectionError(str(error))) from error

    def _told(self, error: BaseException) -> RegionAway:
        told = translate(error, self._place.where, self._place.user)
        if isinstance(told, NotPermitted):
            run = self._keys.run
            told.found += f" in run {run!r}"
            told.remedy = f"name its user in DILOCO_REDIS_URL (`diloco acl --region --run {run}` makes it for this run)"
        remedy = told.remedy
        for ours, theirs in _OURS.items():
            remedy = remedy.replace(ours, theirs)
        return RegionAway(f"the region's {told.found}", remedy, told.said)

    async def _log_in(self, connection: AbstractConnection) -> None:
        """The library does this itself otherwise, and takes an answer of any size."""
        connection._parser.on_connect(connection)  # type: ignore[no-untyped-call]
        user, password, db = (self._place.options.get(name) for name in ("username", "password", "db"))
        commands: list[Sequence[Argument]] = []
        if password:
            commands.append(("AUTH", *((user,) if user else ()), password))
        if db:
            commands.append(("SELECT", db))
        if not commands:
            return
        try:
            errors = (await _exchange(connection, commands)).errors
        except BaseException:
            await drop(connection)  # or its next user would be nobody, and would read these replies
            raise
        if errors:
            wrong = re.match("WRONGPASS|ERR (AUTH|Client sent AUTH|invalid password)", errors[0])
            raise (rx.AuthenticationError if wrong else rx.ResponseError)(errors[0].removeprefix("WRONGPASS "))


async def _exchange(
    connection: AbstractConnection,
    commands: Sequence[Sequence[Any]],
    most_bytes: int = SMALL_BYTES,
    most_values: int = SMALL_VALUES,
) -> Reply:
    packed = [part for command in commands for part in pack(command)]
    return await exchange(connection, packed, len(commands), most_bytes, most_values)
