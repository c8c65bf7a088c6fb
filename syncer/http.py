"""The syncer's HTTP side, for probes, people and Prometheus. The only user of aiohttp; `service` starts it.

/healthz  200 while the event loop runs
/readyz   200 when the syncer merges, or stands by for one that does, else 503 with the reason
/status   the run's status as JSON (`pipeline.status`)
/metrics  Prometheus text
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pipeline.errors import DilocoError, UsageError


async def start_http(
    status: Callable[[], Awaitable[dict[str, Any]]],
    ready: Callable[[], tuple[bool, str]],
    registry: CollectorRegistry,
    host: str,
    port: int,
) -> web.AppRunner:
    """Serve until the returned runner's `cleanup()`. Port 0 takes a free one: see the runner's `addresses`.

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
        return web.Response(status=code, text=json.dumps(body, indent=1) + "\n", content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
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
    structlog.get_logger().info("http_listening", address=runner.addresses[0])
    return runner
