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

What it may take: one connection is one request. There are so many at a time, of which the oldest makes room for the
next one, and each has so long, whatever it does or does not do; all of that also before a token is asked for. Who
follows the page's events may stay longer, and comes back by itself; so there are fewer of them at a time.
"""

import asyncio
import hmac
import ipaddress
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.view.page.files import POLICY, served

CONNECTIONS = 64
"""Open ones at a time, at most; an eighth of the process's file descriptors, where those are few."""
HEAD_S = 5.0
"""A connection that has not sent the head of its request by then is closed."""
STATUS_S = 10.0
"""A status that takes the bus longer is not waited for."""
CONNECTION_S = 20.0
"""A connection ends by then, also one that does not read its answer."""
STREAMS, STREAM_S = 16, 600.0
"""Pages that follow at a time, at most, of which the oldest makes room; and how long one does before it asks anew."""
WRITE_S = 10.0
"""One that does not read for so long is not waited for."""
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64
LOG_S = 10.0
"""Broken requests write one line in this time; the next one says how many did not."""

Answer = Callable[[], Awaitable[web.Response]]
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


def _guard(
    token: str | None, listens_on: str, public: Mapping[str, Any]
) -> Callable[[web.BaseRequest], web.Response | None]:
    """What refuses a request, if anything does. public: paths that ask for no token."""
    expected = f"Bearer {token}".encode()

    def check(request: web.BaseRequest) -> web.Response | None:
        if request.path == "/healthz":
            return None
        if token is not None:
            if request.path in public:
                return None
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if hmac.compare_digest(given, expected):  # how long that takes does not tell how much of it was right
                return None
            hint = "a token is asked for here: send the header Authorization: Bearer <DILOCO_HTTP_TOKEN>\n"
            return web.Response(status=401, text=hint, headers={"WWW-Authenticate": "Bearer"})
        if _is_ours(request.headers.get("Host"), listens_on):
            return None
        hint = "not answered under this name (Host header): ask by IP address, or set DILOCO_HTTP_TOKEN and send it\n"
        return web.Response(status=421, text=hint)

    return check


class _OneLine:
    """What aiohttp takes for a logger: one line for a request that went wrong, without a traceback, and few of them."""

    def __init__(self) -> None:
        self._log = structlog.get_logger()
        self._next_s, self._unsaid = 0.0, 0

    def exception(self, _: str, *args: object, exc_info: BaseException | None = None) -> None:
        """A request that is no HTTP; or, by a bug, an answer that failed."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s:
            self._unsaid += 1
            return
        more = {"unsaid": self._unsaid} if self._unsaid else {}
        self._next_s, self._unsaid = now_s + LOG_S, 0
        error = f"{type(exc_info).__name__}: {' '.join(str(exc_info).split())[:200]}"
        if isinstance(exc_info, HttpProcessingError):
            self._log.info("http_request_broken", remote=str(*args[:1]), error=error, **more)
        else:
            self._log.error("http_answer_failed", error=error, **more)

    def debug(self, *args: Any, exc_info: Any = None) -> None:
        """A first request with an unknown method comes here: TLS, or another protocol."""
        if exc_info is not None:
            self.exception(*args, exc_info=exc_info)


class _Server(web.Server):
    """Bounds the connections: their number and their time."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], most: int) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            logger=_OneLine(),
            access_log=None,
            keepalive_timeout=HEAD_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=1.0,
            auto_decompress=False,
        )
        self._most = most
        self._open: dict[object, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        """By handler, the oldest first."""

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Make room for it."""
        super().connection_made(handler, transport)
        if len(self._open) >= self._most:
            oldest, limit = self._open.pop(next(iter(self._open)))
            limit.cancel()
            oldest.abort()
        self._open[handler] = transport, asyncio.get_running_loop().call_later(CONNECTION_S, transport.abort)

    def keep(self, handler: Any) -> None:
        """A connection of someone who follows may last."""
        if (held := self._open.get(handler)) is not None:
            held[1].cancel()
            later = asyncio.get_running_loop().call_later(STREAM_S + WRITE_S, held[0].abort)
            self._open[handler] = held[0], later

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Forget it."""
        if (held := self._open.pop(handler, None)) is not None:
            held[1].cancel()
        super().connection_lost(handler, exc)


class _Streams:
    """Those who follow the page's events."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._limits: dict[asyncio.Timeout, None] = {}
        """Of each, the oldest first."""

    async def serve(self, request: web.BaseRequest, server: _Server) -> web.StreamResponse:
        """Send events until whoever asked is gone, is too slow, or makes room for another."""
        response = web.StreamResponse(
            headers={**SAFE, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        response.force_close()
        await response.prepare(request)
        server.keep(request.protocol)
        if len(self._limits) >= STREAMS:
            oldest = next(iter(self._limits))
            del self._limits[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
        events = self._follow(request.headers.get("Last-Event-ID", "")[:64])
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(STREAM_S) as limit, aclosing(events):  # type: ignore[type-var]  # a generator
                self._limits[limit] = None
                try:
                    async for event in events:
                        async with asyncio.timeout(WRITE_S):
                            await response.write(event)
                finally:
                    self._limits.pop(limit, None)
        if request.transport is not None:
            request.transport.abort()  # its end may be as slow to be read
        return response


def _most_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, max(4, files // 8))


async def start_http(
    status: Callable[[], Awaitable[Mapping[str, Any]]],
    ready: Callable[[], tuple[bool, str]],
    registry: CollectorRegistry,
    host: str,
    port: int,
    token: str | None = None,
    follow: Follow | None = None,
) -> web.ServerRunner:
    """Serve until the returned runner's `cleanup()`. Port 0 takes a free one: see the runner's `addresses`.

    With a token, requests without it get 401, but those of /healthz and of the page's files; without one, those under a
    strange name get 421.

    Args:
        status: for /status.
        ready: for /readyz.
        registry: for /metrics.
        host: address.
        port: 0 takes a free one.
        token: what is asked for.
        follow: for the page; None: there is none.

    Raises:
        UsageError: the address cannot be listened on.
    """
    public = {} if follow is None else served()
    refused, one_at_a_time = _guard(token, host, public), asyncio.Lock()
    streams = None if follow is None else _Streams(follow)

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

    pages: dict[str, Answer] = {
        "/healthz": healthz,
        "/readyz": readyz,
        "/status": show_status,
        "/metrics": metrics,
    }
    known = [*pages, *(("/",) if streams else ())]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        page, file = pages.get(request.path), public.get(request.path)
        follows = streams is not None and request.path == EVENTS
        if (response := refused(request)) is None:
            if page is None and file is None and not follows:
                response = web.Response(status=404, text=f"there are {', '.join(known)}\n")
            elif request.method not in {"GET", "HEAD"}:
                response = web.Response(status=405, text="only GET and HEAD\n", headers={"Allow": "GET, HEAD"})
            elif streams is not None and follows:
                return await streams.serve(request, server)
            elif file is not None:
                response = web.Response(body=file[1], content_type=file[0], charset="utf-8", headers=SAFE)
            elif page is not None:
                response = await page()
        assert response is not None  # noqa: S101  # one of them is there
        response.force_close()
        return response

    most = _most_connections()
    server = _Server(answer, most)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    try:  # what waits in the backlog is accepted at one go, so that it counts too
        await web.TCPSite(runner, host, port, backlog=most).start()
    except OSError as error:
        await runner.cleanup()
        why = f"{error.strerror or error}; port 0 takes a free one"
        raise UsageError(f"cannot listen on http_host={host} http_port={port}: {why}") from error
    log = structlog.get_logger()
    log.info("http_listening", address=runner.addresses[0])
    if token is None and not _is_loopback(host):
        hint = "whoever reaches it can read status and metrics: set DILOCO_HTTP_TOKEN, or keep to 127.0.0.1"
        log.warning("http_open", host=host, detail=hint)
    return runner
