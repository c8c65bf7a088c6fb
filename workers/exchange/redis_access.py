"""Connect a learner to its Redis; wait, with log lines, if that is not there yet."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import structlog

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis_streams import RedisBus, connect, open_bus
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.errors import BusUnavailable, UsageError, outage_event
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process import logs
from diloco.pipeline.retry import retry
from diloco.pipeline.settings import PARTIES, BusSettings, load
from diloco.pipeline.sources import check_variables
from diloco.workers.exchange.scripts import Scripts
from diloco.workers.times import TIMES

T = TypeVar("T")


def in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that takes no part in a run and return its result.

    If this thread has a running event loop, as in a notebook, the coroutine runs in another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def url_of(given: str | None) -> str:
    """Return the Redis URL that a learner was given or that its environment names; set up logging on the way.

    Raises:
        UsageError: there is none.
    """
    settings = load(BusSettings, {"redis_url": given or None})
    if not structlog.is_configured():  # a program that embeds the learner may have its own configuration
        logs.configure(settings.log_level)
    for warning in check_variables(PARTIES, wanted=BusSettings.model_fields):
        structlog.get_logger().warning("variable_unknown", detail=warning)
    url = settings.bus_url()
    if not url:
        raise UsageError(
            "no Redis URL: pass redis_url= or set DILOCO_REDIS_URL, e.g. redis://localhost:6379 for a `diloco redis` "
            "on this machine"
        )
    return url


def _ask(url: str, run: str, question: Callable[[Bus], Coroutine[Any, Any, T]]) -> T:
    """Return the answer to a question about a run.

    Raises:
        BusUnavailable: there is no Redis.
    """

    async def ask() -> T:
        async with open_bus(url, run) as bus:
            return await question(bus)

    return in_own_loop(ask())


def read_spec(url: str, run: str) -> Spec | None:
    """Return the spec of a run, or None if the run is not there; raises what `_ask` does."""
    return _ask(url, run, read_run)


async def read_run(bus: Bus) -> Spec | None:
    """Return the spec of the bus's run and make the bus ready for its fragments; None: there is no spec yet."""
    if (encoded := await bus.read_spec()) is None:
        return None
    spec = decode_spec(bus.keys, encoded)
    bus.use_spec(spec)
    return spec


class FirstSpecSettings(NamedTuple):
    """The settings that the bus gives to the proposer of a run's first spec."""

    wanted: Mapping[str, Any] = MappingProxyType({})
    """Settings that a syncer waiting for a spec wants for the run, if it was given some."""
    cluster: bool = False


def read_first_spec_settings(url: str, run: str) -> FirstSpecSettings:
    """Return the `FirstSpecSettings` of a run that has no spec; raises what `_ask` does."""

    async def settings(bus: Bus) -> FirstSpecSettings:
        cluster, wanted = (await bus.info()).cluster, await bus.read_wanted()
        return FirstSpecSettings({} if wanted is None else wanted.sync, cluster)

    return _ask(url, run, settings)


def has_version_0(url: str, run: str) -> bool:
    """Return whether a run has parameters, so that a joining learner need not upload its own.

    Raises what `_ask` does.
    """

    async def is_there(bus: Bus) -> bool:
        spec = await read_run(bus)
        return spec is not None and None not in await bus.read_heads(range(spec.sync.fragments))

    return _ask(url, run, is_there)


def wait_for_spec(read: Callable[[], T], learner: str | None, check: Callable[[], None] = lambda: None) -> T:
    """Return what `read` returns, as soon as its Redis is there.

    Args:
        read: such as `read_spec`.
        learner: its id, for log lines, if it has one yet.
        check: called before each try; may raise.
    """
    waits = TIMES.reach_retry.waits()
    while True:
        check()
        try:
            return read()
        except BusUnavailable as error:
            wait_s = next(waits)
            _say(error, wait_s, learner)
            time.sleep(wait_s)


async def reach(url: str, run: str, learner: str) -> tuple[RedisBus, Scripts]:
    """Return a bus and its scripts, as soon as Redis is there and has the scripts that the learner calls."""
    say = partial(_say, learner=learner)
    bus = await retry(lambda: connect(url, run), TIMES.reach_retry.waits(), BusUnavailable, say)
    scripts = Scripts(bus, learner)
    try:
        await retry(scripts.look, TIMES.reach_retry.waits(), BusUnavailable, say)
    except BaseException:
        await bus.close()
        raise
    return bus, scripts


def _say(error: BaseException, wait_s: float, learner: str | None) -> None:
    structlog.get_logger().warning(outage_event(error), learner=learner, error=str(error), retry_s=wait_s)
