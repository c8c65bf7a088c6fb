"""The syncer as a whole: agrees on the spec, holds leases, keeps the run's state, drains and finishes it.

One `FragmentOwner` task a fragment does the merging. The owner of fragment 0 is the lead: it alone moves the
run from running to draining to finished. asyncio; the bus, the clock and the offloading of heavy work are
injected, so that the same code runs in virtual time.
"""

import asyncio
import os
import secrets
import socket
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from pipeline import codec
from pipeline.clock import LoopClock, fast_loop
from pipeline.errors import BusError, BusUnavailable, DilocoError, PeerError, UsageError
from pipeline.fragments import Layout, layout_of
from pipeline.messages import Phase, RunState, Spec
from pipeline.ports import Bus, Clock
from pipeline.settings import SyncerProcess, SyncSettings, agree
from pipeline.status import read_status

from .archive import TapeArchive
from .checkpoint import load_checkpoint, restore_checkpoint, save_checkpoint
from .intake import Offload
from .metrics import Metrics
from .owner import FragmentOwner, RandomHex
from .recording import Recorder
from .watch import RunWatch

WATCH_S = 0.25
"""How often reports are read; also how fine the end of the budget is met."""
TAPE_KEPT_S = 600.0
"""How much of the tape stays on the bus where nobody archives it."""
RESERVE_BYTES = 32 * 2**20
"""Memory on the bus for everything that is not a payload."""


class SyncerService:
    """One syncer process's work, on any bus and clock."""

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
        self.id = settings.syncer_id or f"{socket.gethostname()[:48]}-{os.getpid()}"
        self.nonce = random_hex(8)
        self.owners: list[FragmentOwner] = []
        self.spec: Spec | None = None
        self.in_order = True
        """False once a shutdown took longer than its budget."""
        self._offload, self._random_hex = offload, random_hex
        self._watch: RunWatch | None = None
        self._finished = asyncio.Event()
        self._log = structlog.get_logger()

    # --- what the HTTP side asks --------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """The run's status (`pipeline.status`)."""
        if self.spec is None:
            return {"run": self.bus.keys.run, "phase": "waiting", "reason": "no learner has proposed a spec yet"}
        return await read_status(self.bus, self.clock, self.settings.liveness_s)

    def ready(self) -> tuple[bool, str]:
        """Whether merges can happen here, and why not."""
        if self.spec is None:
            return False, "waiting for the run's spec"
        held = sum(owner.lease.is_set() for owner in self.owners)
        return held > 0, f"{held} of {len(self.owners)} leases held"

    # --- life -----------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the run is finished, or `stop` is set.

        Raises:
            DilocoError: settings, spec or checkpoint cannot be used.
        """
        spec = await self._until(stop, self._agree())
        if spec is None:
            return
        layout = layout_of(spec.tensors)
        self.bus.use_groups(spec.sync.groups)
        await self._retrying(partial(self._check_memory, layout))
        recorder = None
        if self.settings.record_deltas:
            recorder = await self._offload(Recorder, self.settings.record_deltas, spec, self._random_hex(8))
        self._watch = watch = RunWatch(spec.sync, self.settings.liveness_s)
        self.owners = [
            FragmentOwner(
                self.bus,
                self.clock,
                spec,
                fragment,
                layout.digest,
                watch,
                self.metrics,
                nonce=self.nonce,
                syncer=self.id,
                offload=self._offload,
                random_hex=self._random_hex,
                recorder=recorder,
            )
            for fragment in layout.fragments
        ]
        self.metrics.open_windows.set_function(lambda: sum(owner.window_open for owner in self.owners))
        self.spec = spec
        self._log.info("spec_agreed", fragments=len(self.owners), elements=layout.elements, quorum=spec.sync.quorum)
        archive = TapeArchive(self.bus, spec.sync.groups, self.settings.tape_dir) if self.settings.tape_dir else None
        background = [self._retrying(self._keep_leases), self._retrying(self._keep_watch)]
        background.append(self._retrying(archive.follow if archive else self._keep_tape_short))
        if self.settings.checkpoint_dir and self.settings.checkpoint_every:
            background.append(self._retrying(self._keep_checkpoints))
        tasks = [asyncio.create_task(work) for work in background]
        serving = [asyncio.create_task(owner.run()) for owner in self.owners]
        try:
            await self._until_ended(stop, [*tasks, *serving])
            async with asyncio.timeout(self.settings.shutdown_s if stop.is_set() else None):
                await self._let_go(serving, watch)
                await _cancel(tasks)
                await self._retrying(self._conclude)
                if archive:
                    await self._retrying(archive.finish)
        except TimeoutError:
            self._log.error("shutdown_overrun", after_s=self.settings.shutdown_s, safe="all committed versions")
            self.in_order = False
        finally:
            await _cancel([*tasks, *serving])
            if archive:
                archive.close()
            with suppress(BusError):
                for owner in self.owners:
                    await self.bus.release_lease(owner.id, self.nonce)

    async def _until_ended(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(self._finished.wait())]
        try:
            done, _ = await asyncio.wait([*ends, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(ends)
        for task in done:
            task.result()  # a background task ends only by an error

    async def _let_go(self, serving: list[asyncio.Task[None]], watch: RunWatch) -> None:
        """Let merges in hand be committed, and no more begin; if the run is over, the rest is refused."""
        watch.frozen = True
        watch.finishing = self._finished.is_set()
        for owner in self.owners:
            owner.wake.set()
        await asyncio.wait(serving)

    async def _conclude(self) -> None:
        """Write the manifest if the run is over, and the last checkpoint."""
        watch = self._watch
        assert watch is not None  # noqa: S101  # set by run
        heads = await self.bus.read_heads(range(len(self.owners)))
        complete = [head for head in heads if head is not None]
        state = await self.bus.read_state()
        if watch.finishing and state is not None and state.phase is not Phase.FINISHED:
            manifest = tuple((head.version, head.digest) for head in complete)
            finished = state.model_copy(
                update={"phase": Phase.FINISHED, "tokens": watch.tokens(), "manifest": manifest}
            )
            await self.bus.write_state(finished)
            self._log.info("run_finished", tokens=finished.tokens, outer_steps=sum(h.version for h in complete))
        if self.settings.checkpoint_dir and len(complete) == len(self.owners):
            try:
                await self._checkpoint()
            except OSError as error:
                self._log.error("checkpoint_failed", error=str(error), safe="all committed versions, on the bus")
                self.in_order = False

    async def _until(self, stop: asyncio.Event, work: Any) -> Any:
        """Result of `work`, or None if `stop` came first."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await _cancel([task, stopped])

    async def _retrying(self, work: Any) -> None:
        """Run a background coroutine function to its end, again after every outage or unreadable entry."""
        while True:
            try:
                await work()
                return
            except (BusError, PeerError, OSError) as error:
                self.metrics.bus_errors.inc()
                self._log.warning("bus_unavailable", error=str(error), retry_s=1.0)
                await asyncio.sleep(1.0)

    # --- start ------------------------------------------------------------------------------------------

    async def _agree(self) -> Spec:
        """The run's spec: from a checkpoint onto an empty bus, or as the first learner proposed it."""
        waiting, resuming = False, self.settings.resume is not None
        while True:
            try:
                if resuming:
                    await self._resume()
                    resuming = False
                data = await self.bus.read_spec()
            except BusUnavailable as error:
                self._log.warning("bus_unavailable", error=str(error), retry_s=1.0)
                await asyncio.sleep(1.0)
                continue
            if data is not None:
                break
            if not waiting:
                self._log.info("waiting_for_spec", run=self.bus.keys.run)
                waiting = True
            await asyncio.sleep(0.1)
        spec = codec.decode(Spec, data)
        agree(self.settings, spec.sync.model_dump(), SyncSettings)
        return spec

    async def _resume(self) -> None:
        """Put the checkpoint on the bus, or what is missing of it: an outage or a restart may have come between.

        A learner may have proposed the spec already; what counts is that no fragment has a head of another run.
        """
        path = self.settings.resume
        assert path is not None  # noqa: S101  # asked by the caller
        if (data := await self.bus.read_spec()) is not None:
            present = codec.decode(Spec, data).sync
            self.bus.use_groups(present.groups)
            if all(await self.bus.read_heads(range(present.fragments))):
                state = await self.bus.read_state()
                if state is None or not state.base_tokens:
                    raise UsageError("the run was started before: resume under a --run name that is not in use")
                self._log.info("already_restored", base_tokens=state.base_tokens)
                return
        checkpoint = await self._offload(load_checkpoint, path)
        spec = checkpoint.spec
        if "tokens" in self.settings.model_fields_set:
            spec = spec.model_copy(update={"sync": spec.sync.model_copy(update={"tokens": self.settings.tokens})})
        agree(self.settings, spec.sync.model_dump(), SyncSettings)
        self.bus.use_groups(spec.sync.groups)
        for p in range(spec.sync.fragments):
            if not await self.bus.acquire_lease(p, self.nonce, self.settings.lease_s):
                raise UsageError(f"fragment {p} is leased by another syncer: only one may resume a checkpoint")
        holding = asyncio.create_task(self._hold(spec.sync.fragments))
        try:
            await restore_checkpoint(self.bus, checkpoint, spec, self.nonce, self.id, self.clock)
        finally:
            await _cancel([holding])
        self._log.info("checkpoint_restored", path=str(path), tokens=checkpoint.state.tokens)

    async def _hold(self, fragments: int) -> None:
        """Keep leases while a large checkpoint is being restored."""
        while True:
            await asyncio.sleep(self.settings.lease_s / 3)
            for p in range(fragments):
                await self.bus.acquire_lease(p, self.nonce, self.settings.lease_s)

    async def _check_memory(self, layout: Layout) -> None:
        assert layout.fragments  # noqa: S101  # a spec has at least one tensor
        info = await self.bus.info()
        for warning in info.warnings:
            self._log.warning("bus_warning", detail=warning)
        spec_bytes = 4 * layout.elements
        # 2 globals, 2 momenta, a bf16 delta of each of at least four learners
        needed = 4 * spec_bytes + 4 * spec_bytes // 2 + RESERVE_BYTES
        if 0 < info.maxmemory_bytes < needed:
            raise UsageError(
                f"Redis has maxmemory {info.maxmemory_bytes / 2**20:.0f} MiB; this model needs at least "
                f"{needed / 2**20:.0f} MiB (2 globals, 2 momenta, 4 deltas and a reserve): raise maxmemory"
            )

    # --- background -------------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        while True:
            for owner in self.owners:
                held = await self.bus.acquire_lease(owner.id, self.nonce, self.settings.lease_s)
                if held != owner.lease.is_set():
                    self._log.info("lease_taken" if held else "lease_lost", fragment=owner.id)
                    (owner.lease.set if held else owner.lease.clear)()
            await asyncio.sleep(self.settings.lease_s / 3)

    async def _keep_watch(self) -> None:
        watch = self._watch
        assert watch is not None  # noqa: S101  # set before the background starts
        warned = ""
        while not self._finished.is_set():
            began = self.clock.now()
            reports = await self.bus.read_reports()
            latency = self.clock.now() - began
            state = await self.bus.read_state()
            if self.owners[0].lease.is_set():
                state = await self._lead(watch, state)
            if state is not None and state.phase is Phase.FINISHED:  # by another syncer, or before this one started
                self._finished.set()
            if watch.refresh(reports, state, latency):
                for owner in self.owners:
                    owner.wake.set()
            if watch.quorum_warning and watch.quorum_warning != warned:
                self._log.warning("quorum_short", detail=watch.quorum_warning)
            warned = watch.quorum_warning
            await asyncio.sleep(WATCH_S)

    async def _lead(self, watch: RunWatch, state: RunState | None) -> RunState:
        """Move the run forward: count tokens, drain at the budget, finish when drained."""
        now = self.clock.unix()
        if state is None:
            assert self.spec is not None  # noqa: S101  # known before the background starts
            state = RunState(
                phase=Phase.RUNNING,
                tokens=0,
                base_tokens=0,
                budget_tokens=self.spec.sync.tokens,
                started_unix_s=now,
                drain_deadline_unix_s=None,
                reason="training",
                manifest=(),
            )
        update: dict[str, Any] = {"tokens": max(state.tokens, watch.tokens())}
        if state.phase is Phase.RUNNING and update["tokens"] >= state.budget_tokens:
            update |= {"phase": Phase.DRAINING, "reason": "the token budget is reached"}
        draining = update.get("phase", state.phase) is Phase.DRAINING
        if draining and state.drain_deadline_unix_s is None:
            update["drain_deadline_unix_s"] = now + self.settings.drain_s
        state = state.model_copy(update=update)
        if state.phase is not Phase.FINISHED:
            state = await self.bus.write_state(state)
        if state.phase is Phase.DRAINING and state.drain_deadline_unix_s is not None:
            overdue = now >= state.drain_deadline_unix_s + 2 * WATCH_S
            if overdue or await self._drained(watch):
                self._finished.set()
        return state

    async def _drained(self, watch: RunWatch) -> bool:
        """Everybody has left (or died), and nothing is pending."""
        if not watch.draining or watch.live():
            return False
        for owner in self.owners:
            if await self.bus.read_offers(owner.id, limit=1):
                return False
        return True

    async def _keep_checkpoints(self) -> None:
        while True:
            await asyncio.sleep(self.settings.checkpoint_every)
            try:
                await self._checkpoint()
            except (UsageError, OSError) as error:  # not all fragments are there yet, or the disk is full
                self._log.error("checkpoint_failed", error=str(error))

    async def _keep_tape_short(self) -> None:
        """Without an archive the tape is for waking only: what is old goes."""
        while True:
            await asyncio.sleep(TAPE_KEPT_S / 10)
            for group, end in (await self.bus.tape_end()).items():
                newest_ms = int(end.partition("-")[0])
                await self.bus.trim_tape(group, f"{max(0, newest_ms - int(TAPE_KEPT_S * 1000))}-0")

    async def _checkpoint(self) -> None:
        assert self.spec is not None and self.settings.checkpoint_dir is not None  # noqa: S101, PT018
        path = await save_checkpoint(self.bus, self.spec, self.settings.checkpoint_dir, self.clock, self._offload)
        self._log.info("checkpoint_saved", path=str(path))


async def _cancel(tasks: list[asyncio.Task[Any]] | list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def serve(settings: SyncerProcess) -> int:
    """Run a syncer against a real Redis until the run is finished or a signal comes."""
    from pipeline.lifecycle import stop_event
    from pipeline.redis_streams import connect

    from .http import start_http

    if settings.redis_url is None:
        raise UsageError("no Redis URL: set DILOCO_REDIS_URL or --redis-url, e.g. redis://localhost:6379")
    stop, log, clock = stop_event(), structlog.get_logger(), LoopClock()
    while True:
        try:
            bus = await connect(settings.redis_url.get_secret_value(), settings.run)
            break
        except BusUnavailable as error:
            log.warning("bus_unavailable", error=str(error), retry_s=1.0)
            if stop.is_set():
                return 0
            await asyncio.sleep(1.0)
    metrics = Metrics()
    service = SyncerService(bus, clock, settings, metrics)
    http = await start_http(service.status, service.ready, metrics.registry, settings.http_host, settings.http_port)
    try:
        await service.run(stop)
        return 0 if service.in_order else 1
    finally:
        await http.cleanup()
        await bus.close()


def main(settings: SyncerProcess) -> int:
    """Entry point of `diloco syncer`: the exit status."""
    from pipeline import logs

    logs.configure(settings.log_level)
    try:
        with asyncio.Runner(loop_factory=fast_loop) as runner:
            return runner.run(serve(settings))
    except DilocoError as error:
        structlog.get_logger().error("syncer_failed", error=str(error))
        return 1
