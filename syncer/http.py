"""The syncer's HTTP side, for probes, people and Prometheus. The only user of aiohttp; `service` starts it.

With a token (DILOCO_HTTP_TOKEN), all but /healthz asks for `Authorization: Bearer TOKEN`. Without one, whoever reaches
the address may read all of it: it is loopback unless it is told otherwise.

/healthz  200 while the event loop runs
/readyz   200 when the syncer merges, or stands by for one that does, else 503 with the reason
/status   the run's status as JSON (`pipeline.status`)
/metrics  Prometheus text
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pipeline.errors import DilocoError, UsageError
from pipeline.plain_json import to_json


def _asks_for(token: str) -> Middleware:
    """Refuses requests without the token; how long that takes does not tell how much of it was right."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path != "/healthz" and not hmac.compare_digest(given, expected):
            hint = "a token is asked for here: send the header Authorization: Bearer <DILOCO_HTTP_TOKEN>\n"
            return web.Response(status=401, text=hint, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may be of any address
        return False


async def start_http(
    status: Callable[[], Awaitable[dict[str, Any]]],
    ready: Callable[[], tuple[bool, str]],
    registry: CollectorRegistry,
    host: str,
    port: int,
    token: str | None = None,
) -> web.AppRunner:
    """Serve until the returned runner's `cleanup()`. Port 0 takes a free one: see the runner's `addresses`.

    With a token, requests without it get 401, but those of /healthz.

    Raises:
        UsageError: the address cannot be listened on.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        is_ready, reason = ready()
        return web.Response(status=200 if is_ready else 503, text=reason + "\n")

    async def show_status(_: web.Request) -> web.Response:
        try:
            body, code = await status(), 200
        except DilocoError as error:  # the bus is away: say so, and go on
            body, code = {"error": f"{type(error).__name__}: {error}"}, 503
        return web.Response(status=code, text=to_json(body, 1) + "\n", content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[] if token is None else [_asks_for(token)])
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/status", show_status),
            web.get("/metrics", metrics),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise UsageError(f"cannot listen on http_host={host} http_port={port}: {error.strerror or error}") from error
    log = structlog.get_logger()
    log.info("http_listening", address=runner.addresses[0])
    if token is None and not _is_loopback(host):
        hint = "whoever reaches it can read status and metrics: set DILOCO_HTTP_TOKEN, or keep to 127.0.0.1"
        log.warning("http_open", host=host, detail=hint)
    return runner
