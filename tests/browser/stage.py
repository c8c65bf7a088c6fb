"""What a browser is shown: a toy run in real time on the memory bus, or one that is made up; and the HTTP side."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from diloco.pipeline.settings import HttpSettings
from diloco.pipeline.view.page.collector import Collector
from diloco.syncer.serving.http import start_http
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock
from tests.virtual_run import RUN, VirtualRun


def collector_of(world: VirtualRun) -> Collector:
    """By the clock of the toy run, which is that of the event loop, real or not."""
    return Collector(MemoryBus(RUN, world.clock, world.store), VirtualClock())


@asynccontextmanager
async def page_of(collector: Any, token: str | None = None, port: int = 0) -> AsyncIterator[str]:
    """Address of its page."""

    async def status() -> dict[str, Any]:
        return {}

    settings = HttpSettings(http_port=port, http_token=None if token is None else SecretStr(token))
    runner, _ = await start_http(status, lambda: (True, ""), CollectorRegistry(), collector.follow, settings)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()
