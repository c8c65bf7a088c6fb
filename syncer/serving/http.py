"""The syncer's HTTP server, for probes, people and Prometheus. `service` starts it; only this module uses aiohttp.

/healthz  200 while the event loop runs
/readyz   200 when the syncer merges, or is a spare for one that does, otherwise 503 with the reason
/status   the run's status as JSON (`pipeline.view.status`)
/metrics  Prometheus text
/         the page (`pipeline.view.page`): its files are under /page/, its data comes from /page/events

SECURITY.md tells who may read what. Each connection serves one request and has a fixed time for it, however it behaves;
only readers of the page's events may stay longer. A connection above the maximum number is closed at once.
"""

import asyncio
import errno
import hmac
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from typing_extensions import override

from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.settings import HttpSettings
from diloco.pipeline.view.page.assets import POLICY, served
from diloco.pipeline.view.page.join_command import ANYWHERE
from diloco.syncer.times import TIMES

# Maximum number of open connections.
CONNECTIONS = 64
# Number of ports that are tried after the default one, if that is in use.
NEXT_PORTS = 20

# `follow()` yields server-sent events without end (`pipeline.view.page.collector`).
Follow = Callable[[], AsyncIterator[bytes]]
EVENTS = "/page/events"
# Paths that need no token, for probes that cannot send one: their answers contain nothing of a run.
PROBES = ("/healthz", "/readyz")
# Headers of everything that a browser shows.
SAFE = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for any address
        return False


def _is_ours(given: str | None, listens_on: str) -> bool:
    """Return whether a Host header is one that no page from elsewhere can have.

    A page whose own name was made to point here (DNS rebinding) sends that name. So these are accepted: no header (no
    browser leaves it out), any IP address (which is not a name), localhost, and the name that this server was told to
    listen on; and, if it listens beyond loopback, names without a dot, such as containers have for one another.
    """
    if given is None:
        return True
    name, colon, port = given.rpartition(":")
    host = (name if colon and port.isdigit() else given).lower().rstrip(".")
    if host in {"localhost", listens_on.lower()} or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return bool(host) and "." not in host and ":" not in host and not _is_loopback(listens_on)
    return True


def _refusal(request: web.BaseRequest, token: str | None, listens_on: str) -> web.Response | None:
    """Return the refusal of a request that may not read; None if it may."""
    if request.path in PROBES:
        return None
    if token is not None:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        # `compare_digest` takes constant time, so that timing does not reveal how much of a guessed token was right.
        if request.path in served() or hmac.compare_digest(given, f"Bearer {token}".encode()):
            return None
        hint = "a token is required: send the header Authorization: Bearer <DILOCO_HTTP_TOKEN>\n"
        return web.Response(status=401, text=hint, headers={"WWW-Authenticate": "Bearer"})
    if _is_ours(request.headers.get("Host"), listens_on):
        return None
    hint = (
        "requests to this host name (Host header) are not answered: use an IP address, or set DILOCO_HTTP_TOKEN "
        "and send it\n"
    )
    return web.Response(status=421, text=hint)


class _Server(web.Server):
    """A server that bounds the number of connections and the time of each."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        silent = logging.Logger("http")  # aiohttp logs a traceback for each malformed request
        silent.disabled = True
        super().__init__(
            handler,
            handler_cancellation=True,
            logger=silent,
            access_log=None,
            keepalive_timeout=TIMES.http_head_s,
            lingering_time=1.0,
            auto_decompress=False,
        )
        self._limits: dict[object, asyncio.TimerHandle] = {}
        """Handler of each open connection -> the timer that aborts it."""

    @override
    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._limits) >= CONNECTIONS:
            transport.abort()
        else:
            self._limits[handler] = asyncio.get_running_loop().call_later(TIMES.http_connection_s, transport.abort)

    def keep(self, handler: Any) -> bool:
        """Remove the time limit of a connection, whose caller then bounds it.

        Returns False if half of all connections are kept already, since the others must stay free for probes.
        """
        if sum(limit.cancelled() for limit in self._limits.values()) >= CONNECTIONS // 2:
            return False
        if (limit := self._limits.get(handler)) is not None:
            limit.cancel()
        return True

    @override
    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        if (limit := self._limits.pop(handler, None)) is not None:
            limit.cancel()
        super().connection_lost(handler, exc)


async def _send_events(request: web.BaseRequest, follow: Follow) -> web.StreamResponse:
    """Send the page's events until the client is gone, is too slow, or `http_stream_s` is over."""
    response = web.StreamResponse(headers={**SAFE, "Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    response.force_close()
    events = follow()
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(TIMES.http_stream_s), aclosing(events):  # type: ignore[type-var]  # a generator
            await response.prepare(request)
            async for event in events:
                async with asyncio.timeout(TIMES.http_write_s):
                    await response.write(event)
    if request.transport is not None:
        request.transport.abort()  # an orderly close would wait for a client that may not read
    return response


async def start_http(
    status: Callable[[], Awaitable[Mapping[str, Any]]],
    ready: Callable[[], tuple[bool, str]],
    registry: CollectorRegistry,
    follow: Follow,
    settings: HttpSettings,
    tell: Callable[[str], object] = lambda line: None,
) -> tuple[web.ServerRunner, str]:
    """Start the server; return its runner, until whose `cleanup()` it runs, and the page's address on this machine.

    Port 0 takes a free port. If the default port is in use, the next free one is taken. `tell` gets the line for users.

    Raises:
        UsageError: the server cannot listen on the address.
    """
    host, port = settings.http_host, settings.http_port
    token = None if settings.http_token is None else settings.http_token.get_secret_value()
    one_at_a_time, log = asyncio.Lock(), structlog.get_logger()

    async def healthz() -> web.Response:
        return web.Response(text="ok\n")

    async def readyz() -> web.Response:
        is_ready, reason = ready()
        return web.Response(status=200 if is_ready else 503, text=reason + "\n")

    async def show_status() -> web.Response:
        try:
            async with asyncio.timeout(TIMES.http_status_s), one_at_a_time:
                body, code = await status(), 200
        except DilocoError as error:  # for example, the bus is unavailable
            body, code = {"error": f"{type(error).__name__}: {error}"}, 503
        except TimeoutError:
            body, code = (
                {"error": f"no status within {TIMES.http_status_s:g} s: Redis is slow, or there are too many requests"},
                503,
            )
        return web.Response(status=code, text=dumps(body, indent=1) + "\n", content_type="application/json")

    async def metrics() -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    pages = {"/healthz": healthz, "/readyz": readyz, "/status": show_status, "/metrics": metrics}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        path, files = request.path, served()
        if (response := _refusal(request, token, host)) is None:
            if path not in pages and path not in files and path != EVENTS:
                response = web.Response(status=404, text=f"use one of {', '.join((*pages, '/'))}\n")
            elif request.method not in {"GET", "HEAD"}:
                response = web.Response(
                    status=405, text="only GET and HEAD are allowed\n", headers={"Allow": "GET, HEAD"}
                )
            elif path == EVENTS and server.keep(request.protocol):
                return await _send_events(request, follow)
            elif path == EVENTS:
                full = f"{CONNECTIONS // 2} pages already follow this run: close one\n"
                response = web.Response(status=503, text=full)
            elif path in files:
                kind, content = files[path]
                response = web.Response(body=content, content_type=kind, charset="utf-8", headers=SAFE)
            else:
                response = await pages[path]()
        response.force_close()
        return response

    async def answer_or_log(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await answer(request)
        except Exception as error:
            log.error("http_answer_failed", error=f"{type(error).__name__}: {error}")
            raise

    server = _Server(answer_or_log)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    last = port if "http_port" in settings.model_fields_set or port == 0 else port + NEXT_PORTS
    for tried in range(port, last + 1):
        try:  # the event loop accepts a whole backlog at once, so it must not be longer than the number of connections
            await web.TCPSite(runner, host, tried, backlog=CONNECTIONS).start()
            break
        except OSError as error:
            if error.errno == errno.EADDRINUSE and tried < last:
                continue
            await runner.cleanup()
            why = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:  # the event loop's own sentence is long
                why = f"{os.strerror(error.errno)}; pass --http-port 0 for any free port"
            raise UsageError(f"cannot listen on http_host={host} http_port={port}: {why}") from error
    log.info("http_listening", address=runner.addresses[0])
    if tried != port:
        log.warning("http_port_taken", port=port, instead=tried, detail="probes and scrapes of it reach another server")
    shown = {"::": "::1"}.get(host, "127.0.0.1") if host in ANYWHERE else host
    name = f"[{shown}]" if ":" in shown else shown
    page = f"http://{name}:{runner.addresses[0][1]}/"
    taken = f" (port {port} is in use)" if tried != port else ""
    tell(f"page {page}{taken}{' (it requires DILOCO_HTTP_TOKEN)' if token else ''}")
    if token is None and not _is_loopback(host):
        hint = "anyone who can reach it can read status and metrics: set DILOCO_HTTP_TOKEN, or listen on 127.0.0.1 only"
        log.warning("http_open", host=host, detail=hint)
    return runner, page


def announced_page(page: str, host: str) -> str:
    """Return a page's address for readers elsewhere; `host`: where it listens.

    " on NAME" follows a loopback address. So it does if the server listens on all addresses: which of them, and which
    name, others can reach is not known here.
    """
    return f"{page} on {socket.gethostname()}" if host in ANYWHERE or _is_loopback(host) else page
