"""A learner's way to its Redis: one that is not there yet is waited for, and it is said so."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from pipeline import codec
from pipeline.errors import BusUnavailable, outage_event
from pipeline.redis_streams import connect
from pipeline.spec_messages import Spec

FIRST_S, MOST_S = 0.1, 5.0


def read_spec(url: str, run: str) -> Spec | None:
    """The spec of a run that is already there, else None.

    Raises:
        BusUnavailable: there is no Redis.
    """

    async def ask() -> bytes | None:
        bus = await connect(url, run)
        try:
            return await bus.read_spec()
        finally:
            await bus.close()

    data = asyncio.run(ask())
    return None if data is None else codec.decode(Spec, data)


def wait_for_spec(read: Callable[[], Spec | None], learner: str, check: Callable[[], None]) -> Spec | None:
    """The spec of a run, once its Redis is there.

    check: called before each try; may raise.
    """
    pauses = _pauses()
    while True:
        check()
        try:
            return read()
        except BusUnavailable as error:
            time.sleep(_said(error, learner, next(pauses)))


async def reach(url: str, run: str, learner: str) -> Any:
    """A bus, once its Redis is there."""
    pauses = _pauses()
    while True:
        try:
            return await connect(url, run)
        except BusUnavailable as error:
            await asyncio.sleep(_said(error, learner, next(pauses)))


def _pauses() -> Iterator[float]:
    pause_s = FIRST_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MOST_S)


def _said(error: BusUnavailable, learner: str, retry_s: float) -> float:
    structlog.get_logger().warning(outage_event(error), learner=learner, error=str(error), retry_s=retry_s)
    return retry_s
