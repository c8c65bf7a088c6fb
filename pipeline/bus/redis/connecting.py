"""Connecting to a Redis server or cluster: discovery, checks, and clear errors for a server that cannot be used."""

import asyncio
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis

from diloco.pipeline.bus import server
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.redis.calls import RedisCalls, unix_ms
from diloco.pipeline.bus.redis.node_connections import TAKEN_PLACE
from diloco.pipeline.bus.redis.nodes import ClusterNodes, Nodes, NoSentinel, SentinelNodes
from diloco.pipeline.bus.redis.redis_errors import CHECK_ADDRESS, ERRORS, NAME_REDIS, NO_TLS, translate
from diloco.pipeline.bus.redis.redis_url import Place, is_tls, parse
from diloco.pipeline.bus.redis.zero_copy import drop_all
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusUnavailable, DilocoError, ScriptsMissing, UsageError
from diloco.pipeline.tls import check_files

# Appended to errors of a server that refuses a party, or does not answer, at the party's start.
DOCTOR = " (`diloco doctor` finds out more)"


async def connect_calls(url: str, hint: str = DOCTOR) -> RedisCalls:
    """Connect to a Redis server or cluster; see `redis_streams.connect`.

    hint: appended to the error of a server that refuses or does not answer.

    Raises:
        UsageError: the URL is malformed, the login is refused, or the server is older than 6.2.
        BusUnavailable: there is no answer.
    """
    place = parse(url)
    check_files(place.options)
    try:
        nodes = await _nodes(place)
    except DilocoError as error:
        found, remedy = (error.found, f"{error.remedy}{hint}") if error.remedy else (f"{error.found}{hint}", "")
        raise type(error)(found, remedy, error.said) from None
    calls = RedisCalls(place, nodes)
    try:
        with suppress(ScriptsMissing):  # plain reads, e.g. of the spec, need no scripts
            await calls.ensure_scripts()
        calls.ahead_s = unix_ms(await calls.command("TIME")) / 1000 - time.time()
    except BaseException:
        await calls.close()
        raise
    return calls


async def _nodes(place: Place) -> Nodes:
    if place.service:
        sentinels = SentinelNodes(place)
        try:
            await _find_primary(sentinels, place)
        except NoSentinel as error:
            raise await _hinted(error, place.where, place, place.hosts) from None
        return sentinels
    if not place.hosts:
        if await _is_cluster(place, None):
            raise UsageError(f"Redis at {place.where} is a cluster", "use a redis:// or rediss:// URL, not unix://")
        return Nodes(None)
    failed: DilocoError | None = None
    for host in place.hosts:
        try:
            cluster = await _is_cluster(place, host)
        except BusUnavailable as error:
            failed = failed or error
            continue
        if cluster:
            found = ClusterNodes(place)
            await found.refresh()
            return found
        if len(place.hosts) > 1:
            raise UsageError(
                f"Redis at {host} is not a cluster, but several hosts are given",
                "give one of them; for a primary with replicas, give its sentinels "
                "(redis+sentinel://host,host,host/service)",
            )
        return Nodes(host)
    assert failed is not None  # noqa: S101  # there is a host
    raise failed


async def _find_primary(sentinels: SentinelNodes, place: Place) -> None:
    """Find a primary that answers. If it has just died, wait up to `next_primary_s` until another one is there.

    Raises:
        UsageError: it cannot be used.
        BusUnavailable: there is no primary, or it does not answer.
        NoSentinel: no sentinel answers.
    """
    failed: BusUnavailable | None = None
    try:
        async with asyncio.timeout(BUS_TIMES.next_primary_s):
            while True:
                try:
                    await sentinels.refresh()
                    (primary,) = sentinels.all()
                    if await _is_cluster(place, primary):
                        raise UsageError(
                            f"Redis at {primary} is a node of a cluster, which has no sentinels", "use a redis:// URL"
                        )
                    return
                except NoSentinel:
                    raise
                except BusUnavailable as error:
                    if error.remedy not in ("", CHECK_ADDRESS):  # it runs, but needs another kind of connection
                        raise
                    failed = error
                await asyncio.sleep(BUS_TIMES.poll_s)
    except TimeoutError:
        assert failed is not None  # noqa: S101  # one lookup and one connection take less than the limit
        raise BusUnavailable(failed.found, failed.remedy and TAKEN_PLACE, failed.said) from None


async def _is_cluster(place: Place, address: HostPort | None) -> bool:
    """Check that a usable Redis answers at an address; return whether it is a node of a cluster.

    Raises:
        UsageError: it cannot be used.
        BusUnavailable: no server answers.
    """
    where = place.where if address is None else str(address)
    try:
        probe = Redis.from_pool(ConnectionPool(**place.at(address)))
    except (ValueError, TypeError):
        raise UsageError("Redis URL with an option (?name=value) that cannot be used") from None
    try:
        async with asyncio.timeout(2 * BUS_TIMES.connect_s):
            info: dict[str, Any] = await probe.info()
    except TypeError:
        raise UsageError("Redis URL with an option (?name=value) that does not exist") from None
    except ERRORS as error:
        raise await _hinted(translate(error, where, place.user), where, place, [address] if address else []) from None
    finally:
        await drop_all(probe.connection_pool)
    if "redis_version" not in info:
        raise UsageError(f"the server at {where} is not Redis", "set DILOCO_REDIS_URL to the host and port of Redis")
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        raise UsageError(f"the server at {where} is a sentinel", f"use redis+sentinel://{where}/SERVICE")
    if (found := server.version(server.Server.of(info))).level == "error":
        raise UsageError(f"Redis at {where} is {found.found}", found.remedy)
    return bool(info.get("cluster_enabled"))


async def _hinted(error: DilocoError, where: str, place: Place, asked: Iterable[HostPort]) -> DilocoError:
    """Return a more helpful error for a server or sentinel that closes connections or is silent.

    It may expect another kind of connection (TLS, no TLS, a client certificate), which its silence does not tell.
    """
    tls, kind = is_tls(place.options), "+sentinel" if place.service else ""
    unavailable = isinstance(error, BusUnavailable)
    if (
        unavailable
        and tls
        and any(await asyncio.gather(*(_probe_plaintext(one, b"PING\r\n", BUS_TIMES.connect_s) for one in asked)))
    ):
        return UsageError(f"Redis at {where}: {NO_TLS}", f"{NAME_REDIS}{kind}://")
    if unavailable and re.search("closed by server|reset by peer|[Cc]onnection lost|Broken pipe", str(error)):
        unasked = [] if tls else await asyncio.gather(*(_probe_plaintext(one, b"", BUS_TIMES.ask_s) for one in asked))
        if refusal := next((said[1:] for said in unasked if said.startswith("-")), ""):
            told = translate(rx.ResponseError(refusal), where, place.user)
            return told if isinstance(told, BusUnavailable) else BusUnavailable(error.found, "", refusal)
        wants = "a client certificate (DILOCO_REDIS_CERT, DILOCO_REDIS_KEY)" if tls else f"TLS (rediss{kind}://)"
        return BusUnavailable(error.found, f"it may require {wants}", error.said)
    return error


async def _probe_plaintext(address: HostPort, asked: bytes, within_s: float) -> str:
    """Send `asked` without TLS; return the first line if a Redis answers, or says why it hangs up; otherwise ""."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(asked)
                line = await reader.readline()
                return line.decode(errors="replace").strip() if line.startswith((b"+PONG", b"-")) else ""
            finally:
                writer.close()
    except (OSError, ValueError):
        return ""
