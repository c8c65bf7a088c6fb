"""Retries of background work after outages. Runs on asyncio."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from diloco.pipeline.errors import BusError, PeerError, SpecMismatch, outage_event
from diloco.pipeline.retry import Backoff, retry
from diloco.syncer.metrics import Metrics
from diloco.syncer.times import TIMES

T = TypeVar("T")

EVENLY = Backoff(TIMES.retry_s, TIMES.retry_s)


def warn(error: BaseException, wait_s: float) -> None:
    """Log an error after which the work is retried in `wait_s` seconds."""
    event = "disk_failed" if isinstance(error, OSError) else outage_event(error)
    structlog.get_logger().warning(event, error=str(error), retry_s=wait_s)


async def retrying(metrics: Metrics, work: Callable[[], Awaitable[T]], retry_s: float = TIMES.retry_s) -> T:
    """Run a coroutine function to its end, and start it again after every outage or unreadable entry.

    Raises:
        SpecMismatch: retrying would not help.
    """

    def failed(error: BaseException, wait_s: float) -> None:
        metrics.bus_errors.inc()
        warn(error, wait_s)

    return await retry(work, Backoff(retry_s, retry_s).waits(), (BusError, PeerError, OSError), failed, SpecMismatch)
