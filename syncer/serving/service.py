"""The syncer as a process: it waits for the run's spec, serves the run, and answers HTTP requests about it.

`start` finds the spec, `supervisor` serves the run. The module uses asyncio; the bus, the clock and the offloading of
heavy work are injected, so that the same code also runs in virtual time.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog

from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import BusUnavailable, DilocoError, exit_status
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.output import survive_closed_pipes
from diloco.pipeline.process.party_names import own_name
from diloco.pipeline.process.signals import AGAIN_STATUS, stop_event
from diloco.pipeline.retry import retry
from diloco.pipeline.settings import SyncerProcess
from diloco.pipeline.transfer.payloads import Offload
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.page.join_command import RedisRoute
from diloco.pipeline.view.status import Status
from diloco.pipeline.view.status_reader import StatusReader
from diloco.pipeline.waiting import cancel, in_background
from diloco.syncer.context import AgreedSpec, RandomHex, SyncerContext
from diloco.syncer.membership import RunWatch
from diloco.syncer.metrics import Metrics
from diloco.syncer.owner import FragmentOwner
from diloco.syncer.replay.recording import Recorder
from diloco.syncer.run_metrics import RunMetrics
from diloco.syncer.serving.retrying import EVENLY, retrying, warn
from diloco.syncer.serving.start import BusWarnings, Start, check_memory, speed_for
from diloco.syncer.serving.supervisor import Serving
from diloco.syncer.times import TIMES


class SyncerService:
    """The work of one syncer process, on any bus and clock."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        settings: SyncerProcess,
        metrics: Metrics,
        offload: Offload = asyncio.to_thread,
        random_hex: RandomHex = secrets.token_hex,
    ) -> None:
        self.bus, self.clock, self.settings, self.metrics = bus, clock, settings, metrics
        self._status = StatusReader(bus, clock, settings.liveness_s)
        self.nonce = random_hex(8)
        self.id = settings.syncer_id or own_name(self.nonce)
        self.serving: Serving | None = None
        """None before the spec is agreed."""
        self.finished = False
        """True once the run has ended."""
        self.in_order = True
        """False once a shutdown took longer than its budget, or left incomplete data on disk."""
        self._offload, self._random_hex = offload, random_hex

    @property
    def status_at_exit(self) -> int:
        """Exit status of the process once `run` has returned: 1 if it did not end in order, 75 if its run continues."""
        if not self.in_order:
            return 1
        return 0 if self.finished else AGAIN_STATUS

    @property
    def owners(self) -> list[FragmentOwner]:
        """Owners of all fragments, in order; none before the spec is agreed."""
        return self.serving.owners if self.serving else []

    # --- called by the HTTP side --------------------------------------------------------------------

    async def status(self) -> Status | dict[str, str]:
        """Return the run's status (`pipeline.view.status`)."""
        if self.serving is None:
            return {"run": self.bus.keys.run, "phase": "waiting", "reason": "no learner has proposed a spec yet"}
        status = await self._status.read()
        told = status["warnings"]
        told += [one for one in self.serving.problems if not any(one in warning for warning in told)]
        return status

    def ready(self) -> tuple[bool, str]:
        """Return whether this syncer merges, or is a spare that would take over, and the reason in words."""
        return self.serving.leases.ready() if self.serving else (False, "waiting for the run's spec")

    def leads(self) -> bool:
        """Return whether this syncer leads the run."""
        return self.serving is not None and self.serving.leads()

    # --- life -----------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the run is finished, or `stop` is set.

        Raises:
            DilocoError: the settings, the spec or the checkpoint cannot be used.
        """
        warnings = BusWarnings()
        start = Start(self.bus, self.clock, self.settings, self.nonce, self.id, self._offload, warnings)
        spec = await _until(stop, start.spec())
        if spec is None:
            self.finished = start.finished
            return
        context = await self._context(spec)
        self.serving = Serving(context, self.settings, warnings)
        fragments, elements = len(context.layout.fragments), context.layout.elements
        structlog.get_logger().info("spec_agreed", fragments=fragments, elements=elements, quorum=spec.sync.quorum)
        self.in_order = await self.serving.run(stop)
        self.finished = self.serving.finished

    async def _context(self, spec: Spec) -> SyncerContext:
        """Check that the bus has memory for the run, and return the context in which it is served."""
        settings, layout = self.settings, layout_of(spec.tensors)
        self.bus.use_spec(spec)
        await retrying(self.metrics, partial(check_memory, self.bus, layout, spec.sync))
        recorder = None
        if settings.record_deltas:
            given = settings.record_deltas, spec, self._random_hex(8), self._offload
            recorder = await self._offload(Recorder, *given)
        return SyncerContext(
            bus=self.bus,
            clock=self.clock,
            agreed=AgreedSpec(self.bus, spec),
            layout=layout,
            watch=RunWatch(spec.sync, settings.liveness_s, settings.drain_s),
            metrics=self.metrics,
            nonce=self.nonce,
            name=self.id,
            offload=self._offload,
            random_hex=self._random_hex,
            recorder=recorder,
            speed=await speed_for(spec.sync, layout, self._offload),
        )


async def _until(stop: asyncio.Event, work: Any) -> Any:
    """Return the result of `work`, or None if `stop` was set first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel(task, stopped)


async def _reach(url: str, run: str) -> Bus:
    """Connect to the run's bus, and check that this Redis user may read the run before anything of it is served.

    Raises:
        NotPermitted: the user may not read the run.
        BusUnavailable: there is no answer.
    """
    from diloco.pipeline.bus.redis_streams import connect

    bus = await connect(url, run)
    try:
        await bus.read_spec()
    except BaseException:
        await bus.close()
        raise
    return bus


async def serve(settings: SyncerProcess) -> int:
    """Run a syncer against a real Redis until the run is finished or a signal comes; return the exit status."""
    from diloco.syncer.serving.http import announced_page, start_http

    survive_closed_pipes()
    tell = partial(print, flush=True)  # for people; logs go to standard error
    url = settings.need_url()
    stop, metrics = stop_event(), Metrics(settings.run)
    reach = partial(_reach, url, settings.run)
    bus = await _until(stop, retry(reach, EVENLY.waits(), BusUnavailable, warn))
    if bus is None:
        return AGAIN_STATUS
    service = SyncerService(bus, bus.clock, settings, metrics)
    collector = Collector(bus, service.clock, settings.liveness_s, route=RedisRoute.of(url))
    metrics.registry.register(RunMetrics(collector.reading, service.clock, service.leads))
    http, page = await start_http(service.status, service.ready, metrics.registry, collector.follow, settings, tell)
    bus.page = announced_page(page, settings.http_host)
    try:
        async with in_background(collector.run(), _keep_scripts(bus.ensure_scripts, metrics)):
            await service.run(stop)
        return service.status_at_exit
    finally:
        await http.cleanup()
        await bus.close()


async def _keep_scripts(ensure: Callable[[], Awaitable[None]], metrics: Metrics) -> None:
    """Keep all Lua scripts loaded on the servers until cancelled, including those that only learners call."""

    async def keep() -> None:
        while True:
            await ensure()
            await asyncio.sleep(TIMES.scripts_s)

    await retrying(metrics, keep)


def main(settings: SyncerProcess) -> int:
    """Run `diloco syncer`, and return its exit status."""
    from diloco.pipeline.process.cores import one_blas_thread

    one_blas_thread()
    try:
        with asyncio.Runner(loop_factory=fast_loop) as runner:
            return runner.run(serve(settings))
    except DilocoError as error:
        structlog.get_logger().error("syncer_failed", error=str(error))
        return exit_status(error)
