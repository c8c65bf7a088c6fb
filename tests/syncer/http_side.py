"""An HTTP side for tests."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from diloco.pipeline.settings import HttpSettings
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.http import start_http
from tests.serving import no_events

TOKEN = "correct-horse"  # noqa: S105  # made up


async def fine() -> dict[str, Any]:
    return {"phase": "running"}


@asynccontextmanager
async def listening(
    status: Callable[[], Awaitable[dict[str, Any]]] = fine,
    ready: Callable[[], tuple[bool, str]] = lambda: (True, "2 of 2 leases held"),
    metrics: Metrics | None = None,
    events: Callable[[], AsyncIterator[bytes]] = no_events,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> AsyncIterator[int]:
    """Its port."""
    settings = HttpSettings(http_host=host, http_port=0, http_token=None if token is None else SecretStr(token))
    runner, _ = await start_http(status, ready, (metrics or Metrics()).registry, events, settings)
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
