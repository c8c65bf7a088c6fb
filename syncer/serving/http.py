"""The syncer's HTTP side, for probes, people and Prometheus. The only user of aiohttp; `service` starts it.

/healthz  200 while the event loop runs
/readyz   200 when the syncer merges, or stands by for one that does, else 503 with the reason
/status   the run's status as JSON (`pipeline.view.status`)
/metrics  Prometheus text
/         the page (`pipeline.view.page`): its files are under /page/, what it shows comes from /page/events

Who may read: with a token (DILOCO_HTTP_TOKEN), all asks for `Authorization: Bearer TOKEN` but /healthz and the page's
files, which hold nothing of the run: they ask whoever looks at them for the token, and send it. Without one,
whoever reaches the address may read all of it (it is loopback unless it is told otherwise), but a browser on behalf of
a page from elsewhere: the Host header must be one that no such page can have (`_is_ours`).

What it may take: one connection is one request, which has so long, whatever it does or does not do. A connection above
the most is closed at once. Whoever follows the page's events may stay longer. A reverse proxy does more than that: put
one in front where it faces more than your own network.
"""

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.view.page.files import POLICY, served

CONNECTIONS = 64
"""Open ones at a time, at most."""
HEAD_S = 5.0
"""A connection that has not sent the head of its request by then is closed."""
STATUS_S = 10.0
"""A status that takes the bus longer is not waited for."""
CONNECTION_S = 20.0
"""A connection ends by then, also one that does not read its answer."""
STREAM_S = 600.0
"""Whoever follows the page's events asks anew by then."""
WRITE_S = 10.0
"""One that does not read for so long is not waited for."""

Follow = Callable[[str], AsyncIterator[bytes]]
"""`follow(last_id)`: server-sent events after the one of this id, without end (`pipeline.view.page.collector`)."""
EVENTS = "/page/events"
SAFE = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Headers of all that a browser is to show."""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may be of any address
        return False


def _is_ours(given: str | None, listens_on: str) -> bool:
    """Whether a Host header is one that no page from elsewhere can have.

    A page whose own name was made to point here (DNS rebinding) has that name in it. So: none (no browser leaves it
    out), any IP address (which is no name), localhost, the name that this side was told to listen on; and, where it
    listens beyond loopback, names without a dot, as containers have for one another.
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
    """What is answered to a request that may not read."""
    if request.path == "/healthz":
        return None
    if token is not None:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        # How long it takes to compare does not tell how much of it was right.
        if request.path in served() or hmac.compare_digest(given, f"Bearer {token}".encode()):
            return None
        hint = "a token is asked for here: send the header Authorization: Bearer <DILOCO_HTTP_TOKEN>\n"
        return web.Response(status=401, text=hint, headers={"WWW-Authenticate": "Bearer"})
    if _is_ours(request.headers.get("Host"), listens_on):
        return None
    hint = "not answered under this name (Host header): ask by IP address, or set DILOCO_HTTP_TOKEN and send it\n"
    return web.Response(status=421, text=hint)


class _Server(web.Server):
    """Bounds the connections: their number and their time."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        silent = logging.Logger("http")  # aiohttp has a traceback for each request that is no HTTP
        silent.disabled = True
        super().__init__(
            handler,
            handler_cancellation=True,
            logger=silent,
            access_log=None,
            keepalive_timeout=HEAD_S,
            lingering_time=1.0,
            auto_decompress=False,
        )
        self._limits: dict[object, asyncio.TimerHandle] = {}
        """Of each open connection, by its handler."""

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Take it, if there is room."""
        super().connection_made(handler, transport)
        if len(self._limits) >= CONNECTIONS:
            transport.abort()
        else:
            self._limits[handler] = asyncio.get_running_loop().call_later(CONNECTION_S, transport.abort)

    def keep(self, handler: Any) -> bool:
        """Let whoever has this connection see to its end. False: half of all are kept so, the others are for probes."""
        if sum(limit.cancelled() for limit in self._limits.values()) >= CONNECTIONS // 2:
            return False
        if (limit := self._limits.get(handler)) is not None:
            limit.cancel()
        return True

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Forget it."""
        if (limit := self._limits.pop(handler, None)) is not None:
            limit.cancel()
        super().connection_lost(handler, exc)


async def _send_events(request: web.BaseRequest, follow: Follow) -> web.StreamResponse:
    """Until whoever asked is gone, is too slow, or has to ask anew."""
    response = web.StreamResponse(headers={**SAFE, "Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    response.force_close()
    events = follow(request.headers.get("Last-Event-ID", "")[:64])
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(STREAM_S), aclosing(events):  # type: ignore[type-var]  # a generator
            await response.prepare(request)
            async for event in events:
                async with asyncio.timeout(WRITE_S):
                    await response.write(event)
    if request.transport is not None:
        request.transport.abort()  # its end may be as slow to be read
    return response


async def start_http(
    status: Callable[[], Awaitable[Mapping[str, Any]]],
    ready: Callable[[], tuple[bool, str]],
    registry: CollectorRegistry,
    follow: Follow,
    host: str,
    port: int,
    token: str | None = None,
) -> web.ServerRunner:
    """Serve until the returned runner's `cleanup()`. Port 0 takes a free one: see the runner's `addresses`.

    Raises:
        UsageError: the address cannot be listened on.
    """
    one_at_a_time, log = asyncio.Lock(), structlog.get_logger()

    async def healthz() -> web.Response:
        return web.Response(text="ok\n")

    async def readyz() -> web.Response:
        is_ready, reason = ready()
        return web.Response(status=200 if is_ready else 503, text=reason + "\n")

    async def show_status() -> web.Response:
        try:
            async with asyncio.timeout(STATUS_S), one_at_a_time:
                body, code = await status(), 200
        except DilocoError as error:  # the bus is away: say so, and go on
            body, code = {"error": f"{type(error).__name__}: {error}"}, 503
        except TimeoutError:
            body, code = {"error": f"no status in {STATUS_S:g} s: Redis is slow, or too many ask"}, 503
        return web.Response(status=code, text=dumps(body, indent=1) + "\n", content_type="application/json")

    async def metrics() -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    pages = {"/healthz": healthz, "/readyz": readyz, "/status": show_status, "/metrics": metrics}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        path, files = request.path, served()
        if (response := _refusal(request, token, host)) is None:
            if path not in pages and path not in files and path != EVENTS:
                response = web.Response(status=404, text=f"there are {', '.join((*pages, '/'))}\n")
            elif request.method not in {"GET", "HEAD"}:
                response = web.Response(status=405, text="only GET and HEAD\n", headers={"Allow": "GET, HEAD"})
            elif path == EVENTS and server.keep(request.protocol):
                return await _send_events(request, follow)
            elif path == EVENTS:
                full = f"{CONNECTIONS // 2} pages follow this run already: close one\n"
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
    try:  # what waits in the backlog is accepted at one go, so that it counts too
        await web.TCPSite(runner, host, port, backlog=CONNECTIONS).start()
    except OSError as error:
        await runner.cleanup()
        why = f"{error.strerror or error}; port 0 takes a free one"
        raise UsageError(f"cannot listen on http_host={host} http_port={port}: {why}") from error
    log.info("http_listening", address=runner.addresses[0])
    if token is None and not _is_loopback(host):
        hint = "whoever reaches it can read status and metrics: set DILOCO_HTTP_TOKEN, or keep to 127.0.0.1"
        log.warning("http_open", host=host, detail=hint)
    return runner
