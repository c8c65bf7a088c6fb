"""Background work that outlives outages. asyncio."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from diloco.pipeline.errors import BusError, PeerError, SpecMismatch, outage_event
from diloco.syncer.metrics import Metrics

T = TypeVar("T")


async def retrying(metrics: Metrics, work: Callable[[], Awaitable[T]], retry_s: float = 1.0) -> T:
    """Run a coroutine function to its end, again after every outage or unreadable entry.

    Raises:
        SpecMismatch: no other try would help.
    """
    while True:
        try:
            return await work()
        except SpecMismatch:
            raise
        except (BusError, PeerError, OSError) as error:
            metrics.bus_errors.inc()
            event = "disk_failed" if isinstance(error, OSError) else outage_event(error)
            structlog.get_logger().warning(event, error=str(error), retry_s=retry_s)
            await asyncio.sleep(retry_s)
