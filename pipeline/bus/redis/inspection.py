"""Inspection of a Redis before a run uses it: its settings, round-trip time, clock, and the user's rights.

No data of a run are read or written. Rights are probed by commands with invalid values: a server checks rights first,
so it answers either that they are missing or that the values are wrong, and changes nothing.
"""

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis

from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.keys import RunKeys, run_of
from diloco.pipeline.bus.redis.calls import RedisCalls, key_of, script
from diloco.pipeline.bus.redis.connecting import connect_calls
from diloco.pipeline.bus.redis.nodes import SentinelNodes
from diloco.pipeline.bus.redis.redis_url import is_tls, parse
from diloco.pipeline.bus.redis.zero_copy import drop_all
from diloco.pipeline.bus.server import BUFFER_LIMIT, FULL_COVERAGE, Address, Server
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import DilocoError, NotPermitted

# Settings that INFO does not report. Many hosted services forbid CONFIG.
CONFIG = ("save", "protected-mode", BUFFER_LIMIT)
# XADD refuses this id, so a probe with it adds nothing.
NOWHERE = "0-0"
NO_SCRIPT = "0" * 40
NONCE = "doctor"


def address_of(url: str) -> Address:
    """Return the address of a Redis URL. It resolves the host names, and blocks until that is done.

    Raises:
        UsageError: the URL is malformed.
    """
    place = parse(url)
    own = all(_loopback(address.host) for address in place.hosts)
    certificate: Literal["", "shown"] = "shown" if place.options.get("ssl_certfile") else ""
    password = bool(place.options.get("password"))
    return Address(place.where, own, is_tls(place.options), password, place.user, certificate)


async def unhealthy_sentinels(url: str) -> list[str]:
    """Return the sentinels of a URL that could not help to replace a primary, each with the reason.

    The list is empty if the URL names no sentinels.

    Raises:
        UsageError: the URL is malformed.
    """
    place = parse(url)
    if not place.service:
        return []
    nodes = SentinelNodes(place)
    with suppress(DilocoError):  # `unhealthy` says more, sentinel by sentinel
        await nodes.refresh()
    return await nodes.unhealthy()


def _loopback(host: str) -> bool:
    """Return whether all addresses of a host name are loopback addresses; an unknown name is not."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


Probe = Sequence[Any]


def _probes(keys: RunKeys, learner: str) -> dict[str, list[Probe]]:
    """Return the rights that each party needs, as commands that change nothing."""
    here, bad = keys.group(0), ("a", "b", "c")  # a field without a value
    return {
        "syncer": [
            ("SCRIPT EXISTS", NO_SCRIPT),
            ("SCRIPT LOAD", script("write_chunk").text),  # connecting has loaded it already, if this user may
            ("EVALSHA", NO_SCRIPT, 1, keys.head(0)),
            ("HSET", keys.head(0), *bad),
            ("SET", keys.lease(0), NONCE, "none"),
            ("XADD", keys.tape(here), NOWHERE, "a", "b"),
            ("XADD", keys.global_payload(0, 0, NONCE), NOWHERE, "a", "b"),
        ],
        "learner": [
            ("EVALSHA", NO_SCRIPT, 1, keys.deltas(0, learner)),
            ("SCRIPT EXISTS", NO_SCRIPT),
            ("EXISTS", keys.spec),
            ("XLEN", keys.tape(here)),
            ("XADD", keys.deltas(0, learner), NOWHERE, "a", "b"),
            ("XADD", keys.delta_payload(0, learner, NONCE, 0), NOWHERE, "a", "b"),
            ("HSET", keys.learners, *bad),
            ("SET", keys.holder(learner), NONCE, "none"),
            ("XADD", keys.shards, NOWHERE, "a", "b"),
        ],
        "evaluator": [
            ("EXISTS", keys.spec),
            ("XLEN", keys.global_payload(0, 0, NONCE)),
            ("XADD", keys.evaluations, NOWHERE, "a", "b"),
        ],
        "viewer": [("EXISTS", keys.spec), ("HGETALL", keys.syncers), ("HKEYS", keys.senders(here))],
    }


class RedisExamination:
    """A connection for inspection; made by `examine`."""

    def __init__(self, calls: RedisCalls) -> None:
        self._calls = calls
        self.away: list[DilocoError] = []  # errors of nodes that hold keys and did not answer the last `nodes` call

    async def nodes(self) -> list[Server]:
        """Return what each node that holds keys reports about itself."""
        told = await self._calls.on_all_nodes("INFO")
        cluster, found = self._calls.nodes.cluster, list[Server]()
        self.away = [node for node in told.values() if isinstance(node, DilocoError)]
        for address, node in told.items():
            if not isinstance(node, DilocoError):
                names = (*CONFIG, FULL_COVERAGE) if cluster else CONFIG
                config = await self._config(address, names)
                at = str(address) if cluster else ""
                found.append(Server.of(node, config, at, self._calls.nodes.known_replicas))
        return found

    async def user(self) -> str:
        """Return the server's name for this connection's user; "" if the user may not ask and the error names none."""
        async with self._calls.call("control", BUS_TIMES.call_s) as client:
            try:
                return _text(await client.execute_command("ACL WHOAMI"))
            except rx.NoPermissionError as error:
                named = re.search(r"User (\S+) has no permissions", str(error))
                return named[1] if named else ""

    async def run_of(self, user: str) -> str | None:
        """Return the single run that a user is made for; None if it is for several, or may not ask."""
        try:
            found = await self._calls.command("ACL", "GETUSER", user)
        except NotPermitted:
            return None
        runs = set(map(run_of, re.findall(r"~(\S+)", str(found)))) - {""}
        return runs.pop() if len(runs) == 1 else None

    async def _config(self, address: HostPort | None, names: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            try:
                reply = (await self._calls.on_all_nodes("CONFIG", "GET", name, at=[address]))[address]
            except DilocoError:  # CONFIG may be forbidden
                return {}
            flat = list(reply.items()) if isinstance(reply, dict) else list(zip(reply[::2], reply[1::2], strict=True))
            found |= {_text(key): _text(value) for key, value in flat}
        return found

    async def look_at_clock(self, times: int) -> tuple[list[float], float]:
        """Return the round-trip times of `times` small calls, and how far this machine's clock is ahead; all in s."""
        trips, ahead = [], []
        for _ in range(times):
            began, unix = time.perf_counter(), time.time()
            seconds, microseconds = await self._calls.command("TIME")
            trips.append(time.perf_counter() - began)
            ahead.append(unix + trips[-1] / 2 - int(seconds) - int(microseconds) / 1e6)
        return trips, min(ahead, key=abs)

    async def lacks(self, keys: RunKeys, learner: str) -> dict[str, str]:
        """Return party -> a right that the party needs and this user lacks, or "" if the user may be that party.

        learner: the name that a learner would have.
        """
        return {party: await self._missing(probes) for party, probes in _probes(keys, learner).items()}

    async def _missing(self, probes: Sequence[Probe]) -> str:
        answers = await asyncio.gather(*map(self._refused, probes))
        return next((answer for answer in answers if answer), "")

    async def _refused(self, probe: Probe) -> str:
        async with self._calls.call("control", BUS_TIMES.call_s, key_of(probe)) as client:
            try:
                await client.execute_command(*probe)
            except rx.NoPermissionError as error:
                on = "" if probe[0].startswith("SCRIPT") else f" on {_key_of(probe)}"
                return f"it is not allowed to send {probe[0]}{on} ({error})"
            except rx.ResponseError:
                return ""  # the value was refused, so the rights suffice
        return ""

    async def close(self) -> None:
        """Close the connection."""
        await self._calls.close()


def _key_of(probe: Probe) -> str:
    return str(probe[3] if probe[0] == "EVALSHA" else probe[1])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def takes_without_certificate(url: str) -> bool:
    """Return whether a server accepts a TLS connection without a client certificate. It does not try to log in.

    Raises:
        UsageError: the URL is malformed.
    """
    place = parse(url)
    left_out = ("ssl_certfile", "ssl_keyfile", "username", "password")
    options = {name: value for name, value in place.options.items() if name not in left_out}
    pool = ConnectionPool(**replace(place, options=options).at(next(iter(place.hosts), None)))
    client = Redis.from_pool(pool)
    try:
        async with asyncio.timeout(BUS_TIMES.call_s):
            await client.info()
    except (rx.AuthenticationError, rx.ResponseError):
        return True
    except (rx.RedisError, OSError):
        return False
    finally:
        await drop_all(pool)
    return True


async def examine(url: str) -> RedisExamination:
    """Connect to a server to inspect it.

    Raises:
        UsageError, BusUnavailable: see `redis_streams.connect`.
    """
    return RedisExamination(await connect_calls(url, hint=""))
