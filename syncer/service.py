"""The syncer as a whole: starts, holds leases, keeps the run's state, drains and finishes it.

`start` finds the spec. One `FragmentOwner` task a fragment does the merging while this syncer has the fragment's
lease; `leases` shares the fragments with other syncers. The owner of fragment 0 is the lead: it moves the run from
running to draining to closing, and `closing` ends it. asyncio; the bus, the clock and the offloading of heavy work
are injected, so that the same code runs in virtual time.
"""

import asyncio
import math
import os
import secrets
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from pipeline.clock import LoopClock, fast_loop
from pipeline.errors import BusError, BusUnavailable, DilocoError, PeerError, SpecMismatch, UsageError, outage_event
from pipeline.fragments import Layout, layout_of
from pipeline.pacing import slow_merges
from pipeline.ports import Bus, Clock
from pipeline.run_messages import Phase, RunState
from pipeline.settings import SyncerProcess
from pipeline.shares import recent_share, sample_due, with_sample
from pipeline.spec_messages import Spec
from pipeline.status import Status, merged_tokens, read_status

from .archive import TapeArchive
from .checkpoint import is_saved, save_checkpoint
from .closing import POLL_S, finish_run
from .fragment import FragmentState, MakeFragment
from .initial import Beginning
from .intake import Offload
from .leases import Leases, holding, release_all
from .lost import Lost
from .metrics import Metrics
from .owner import FragmentOwner
from .recording import Recorder
from .staging import RandomHex
from .start import Start, check_memory
from .watch import RunWatch

WATCH_S = 0.25
"""How often reports are read; also how fine the end of the budget is met."""
BUS_LOOK_S = 5.0
SAMPLE_RETRY_S = 1.0
TAPE_KEPT_S = 600.0
"""How much of the tape stays on the bus where nobody archives it."""


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
        make_fragment: MakeFragment = FragmentState,
    ) -> None:
        self.bus, self.clock, self.settings, self.metrics = bus, clock, settings, metrics
        self.nonce = random_hex(8)
        self.id = settings.syncer_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{self.nonce[:6]}"
        self.owners: list[FragmentOwner] = []
        self.spec: Spec | None = None
        self.in_order = True
        """False once a shutdown took longer than its budget."""
        self._offload, self._random_hex, self._make_fragment = offload, random_hex, make_fragment
        self._watch: RunWatch | None = None
        self._layout: Layout | None = None
        self._sample_from_s = 0.0
        self._lost: Lost | None = None
        self._unsaved = ""
        """Why the last checkpoint could not be saved, in words for the status."""
        self._files: list[TapeArchive | Recorder] = []
        self._leases: Leases | None = None
        self._closing = asyncio.Event()
        """No merge begins any more: the run is closing, or finished."""
        self._log = structlog.get_logger()

    # --- what the HTTP side asks --------------------------------------------------------------------

    async def status(self) -> Status | dict[str, str]:
        """The run's status (`pipeline.status`)."""
        if self.spec is None:
            return {"run": self.bus.keys.run, "phase": "waiting", "reason": "no learner has proposed a spec yet"}
        status = await read_status(self.bus, self.clock, self.settings.liveness_s)
        status["warnings"] += [problem for problem in (self._unsaved, *(one.problem for one in self._files)) if problem]
        return status

    def ready(self) -> tuple[bool, str]:
        """Whether this syncer merges, or stands by for others to fail, and why not."""
        return self._leases.ready() if self._leases else (False, "waiting for the run's spec")

    # --- life -----------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the run is finished, or `stop` is set.

        Raises:
            DilocoError: settings, spec or checkpoint cannot be used.
        """
        start = Start(self.bus, self.clock, self.settings, self.nonce, self.id, self._offload)
        spec = await self._until(stop, start.spec())
        if spec is None:
            return
        self._layout = layout = layout_of(spec.tensors)
        self.bus.use_groups(spec.sync.groups)
        await self._retrying(partial(check_memory, self.bus, layout))
        recorder = None
        if self.settings.record_deltas:
            recorder = await self._offload(Recorder, self.settings.record_deltas, spec, self._random_hex(8))
            self._files.append(recorder)
        beginning = Beginning(self.bus, self.clock, spec, nonce=self.nonce, syncer=self.id)
        self._watch = watch = RunWatch(spec.sync, self.settings.liveness_s, self.settings.drain_s)
        self.owners = [
            FragmentOwner(
                self.bus,
                self.clock,
                spec,
                fragment,
                layout.digest,
                watch,
                self.metrics,
                beginning,
                nonce=self.nonce,
                syncer=self.id,
                offload=self._offload,
                random_hex=self._random_hex,
                recorder=recorder,
                make_fragment=self._make_fragment,
            )
            for fragment in layout.fragments
        ]
        self.metrics.open_windows.set_function(lambda: sum(owner.window_open for owner in self.owners))
        self.metrics.doubted_learners.set_function(
            lambda: len({learner for owner in self.owners if owner.lease.is_set() for learner in owner.doubted})
        )
        self.metrics.merged_share.set_function(partial(_share, watch))
        self.metrics.recent_merged_share.set_function(partial(_share, watch, recent=True))
        self.spec, self._lost = spec, Lost(self.bus, self.clock, beginning, self.owners)
        self._log.info("spec_agreed", fragments=len(self.owners), elements=layout.elements, quorum=spec.sync.quorum)
        self._leases = leases = Leases(self.bus, self.clock, self.owners, self.nonce, self.id, self.settings.lease_s)
        archive = None
        if self.settings.tape_dir:
            archive = TapeArchive(self.bus, spec.sync.groups, self.settings.tape_dir, self.nonce, self._leads)
            self._files.append(archive)
        background = [
            self._retrying(leases.keep, self.settings.lease_s / 12),
            self._retrying(leases.share, min(1.0, self.settings.lease_s / 6)),
            self._retrying(self._keep_watch),
            self._retrying(self._watch_bus),
        ]
        background.append(self._retrying(archive.follow if archive else self._keep_tape_short))
        if self.settings.checkpoint_dir and self.settings.checkpoint_every:
            background.append(self._retrying(self._keep_checkpoints))
        tasks = [asyncio.create_task(work) for work in background]
        serving = [asyncio.create_task(owner.run()) for owner in self.owners]
        bound: list[asyncio.Task[None]] = []
        try:
            await self._until_ended(stop, [*tasks, *serving])
            async with asyncio.timeout(None) as limit:
                bound.append(asyncio.create_task(self._bound(stop, limit)))
                await self._end(stop, tasks, serving, watch)
                if archive:
                    await self._retrying(partial(self._finish_archive, archive))
        except TimeoutError:
            self._log.error("shutdown_overrun", after_s=self.settings.shutdown_s, safe="all committed versions")
            self.in_order = False
        finally:
            await _cancel([*tasks, *serving, *bound])
            if archive:
                archive.close()
            with suppress(BusError):
                await release_all(self.bus, self.nonce, len(self.owners))
                await self.bus.withdraw_syncer(self.nonce)

    def _leads(self) -> bool:
        """Whether this syncer serves fragment 0."""
        return self.owners[0].lease.is_set()

    async def _until_ended(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(self._closing.wait())]
        try:
            done, _ = await asyncio.wait([*ends, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(ends)
        for task in done:
            task.result()  # a background task ends only by an error

    async def _bound(self, stop: asyncio.Event, limit: asyncio.Timeout) -> None:
        """A syncer that was told to stop has so much time, and no more."""
        await stop.wait()
        limit.reschedule(asyncio.get_running_loop().time() + self.settings.shutdown_s)

    async def _end(
        self, stop: asyncio.Event, tasks: list[asyncio.Task[None]], serving: list[asyncio.Task[None]], watch: RunWatch
    ) -> None:
        """Let merges in hand be committed and give everything back; see the run to its end if it is closing."""
        assert self._leases is not None  # noqa: S101  # set by run
        saves = self._leads() or len(self._leases.syncers) <= 1
        watch.frozen = True
        for owner in self.owners:
            owner.wake.set()
        await self._retrying(self._leases.part)
        await asyncio.wait(serving)
        await _cancel(tasks)
        if self._closing.is_set():
            assert watch.state is not None  # noqa: S101  # that of the closing run
            finishing = partial(
                finish_run, self.bus, self.clock, self.nonce, len(self.owners), self.settings.lease_s, stop, watch.state
            )
            finished = await self._retrying(finishing)
            if finished is not None and self.settings.checkpoint_dir:
                await self._retrying(partial(self._save_finished, self.settings.checkpoint_dir, finished))
        elif self.settings.checkpoint_dir and saves:
            await self._retrying(self._save_stopped)

    async def _save_stopped(self) -> None:
        """The checkpoint of a syncer that is told to stop, if the run has begun."""
        if all(await self.bus.read_heads(range(len(self.owners)))):
            await self._last_checkpoint()

    async def _save_finished(self, directory: Path, state: RunState) -> None:
        """The last checkpoint, unless another syncer saved it there: one after the other, whoever is left."""
        if len(state.manifest) < len(self.owners):
            return  # it was stopped before all fragments had a version
        while not await self.bus.acquire_lease(0, self.nonce, self.settings.lease_s):  # noqa: ASYNC110  # on the bus
            await asyncio.sleep(min(POLL_S, self.settings.lease_s / 3))
        async with holding(self.bus, [0], self.nonce, self.settings.lease_s):
            if not await self._offload(is_saved, directory, state):
                await self._last_checkpoint()
        await self.bus.release_lease(0, self.nonce)

    async def _until(self, stop: asyncio.Event, work: Any) -> Any:
        """Result of `work`, or None if `stop` came first."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await _cancel([task, stopped])

    async def _retrying(self, work: Any, retry_s: float = 1.0) -> Any:
        """Run a coroutine function to its end, again after every outage or unreadable entry."""
        while True:
            try:
                return await work()
            except SpecMismatch:
                raise
            except (BusError, PeerError, OSError) as error:
                self.metrics.bus_errors.inc()
                event = "disk_failed" if isinstance(error, OSError) else outage_event(error)
                self._log.warning(event, error=str(error), retry_s=retry_s)
                await asyncio.sleep(retry_s)

    # --- background -------------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        watch, lost = self._watch, self._lost
        assert watch is not None and lost is not None  # noqa: S101, PT018  # set before the background starts
        warned, was_slow = "", False
        while not self._closing.is_set():
            began = self.clock.now()
            found = await self.bus.read_reports()
            latency = self.clock.now() - began
            state = await lost.state(await self.bus.read_state(), watch.state)
            reports = await lost.reports(found)
            if self._leads():
                state = await self._lead(watch, state)
            if state is not None and state.phase.rank >= Phase.CLOSING.rank:
                self._closing.set()
            if watch.refresh(reports, state, latency, self.clock.now()):
                for owner in self.owners:
                    owner.wake.set()
            if watch.quorum_warning and watch.quorum_warning != warned:
                self._log.warning("quorum_short", detail=watch.quorum_warning)
            warned = watch.quorum_warning
            # It has passed once merges take no more than half a round.
            slow = None if watch.draining else self._slow_merges(watch, 0.5 if was_slow else 1.0)
            if slow and not was_slow:
                self._log.warning("merges_slow", detail=slow)
            elif was_slow and not slow:
                self._log.info("merges_in_time")
            was_slow = slow is not None
            await asyncio.sleep(WATCH_S)

    async def _watch_bus(self) -> None:
        """Say what is wrong with the server, once each time it comes up, and that it has the run's spec."""
        assert self._lost is not None  # noqa: S101  # set before the background starts
        warned: frozenset[str] = frozenset()
        while True:
            await asyncio.sleep(BUS_LOOK_S)
            warnings = frozenset((await self.bus.info()).warnings)
            for warning in sorted(warnings - warned):
                self._log.warning("bus_warning", detail=warning)
            warned = warnings
            await self._lost.spec()

    async def _lead(self, watch: RunWatch, state: RunState | None) -> RunState:
        """Move the run forward: count tokens, drain at the budget, close it when drained."""
        if state is None:
            assert self.spec is not None  # noqa: S101  # known before the background starts
            state = RunState(
                phase=Phase.RUNNING,
                tokens=0,
                base_tokens=0,
                budget_tokens=self.spec.sync.tokens,
                started_unix_s=self.clock.unix(),
                reason="training",
                manifest=(),
            )
        update: dict[str, Any] = {"tokens": max(state.tokens, watch.tokens())}
        if state.phase.rank < Phase.CLOSING.rank and sample_due(state.samples, unix_s := self.clock.unix()):
            merged = await self._merged_tokens()
            if merged is not None:
                sample = unix_s, update["tokens"], min(merged, update["tokens"])
                update["samples"] = with_sample(state.samples, sample)
        if state.phase is Phase.RUNNING and update["tokens"] >= state.budget_tokens:
            update |= {"phase": Phase.DRAINING, "reason": "the token budget is reached"}
        state = state.model_copy(update=update)
        if state.phase is Phase.DRAINING and watch.drain_until is not None:
            overdue = self.clock.now() >= watch.drain_until + 2 * WATCH_S
            if overdue or await self._drained(watch):
                state = state.model_copy(update={"phase": Phase.CLOSING})
        return state if state.phase is Phase.FINISHED else await self.bus.write_state(state)

    async def _merged_tokens(self) -> int | None:
        """Of the whole model; None before every fragment has a head: a resumed run's have merged tokens already."""
        assert self._layout is not None  # noqa: S101  # set before the background starts
        now = self.clock.now()
        if now < self._sample_from_s:
            return None
        self._sample_from_s = now + SAMPLE_RETRY_S
        heads = [head for head in await self.bus.read_heads(range(len(self.owners))) if head is not None]
        return merged_tokens(self._layout, heads) if len(heads) == len(self.owners) else None

    def _slow_merges(self, watch: RunWatch, allowed: float) -> str | None:
        """What `pacing.slow_merges` says of the fragments that this syncer serves."""
        assert self._leases is not None  # noqa: S101  # set before the background starts
        steps = [seen.report.step_s for seen in watch.live()]
        paces = [owner.pace for owner in self.owners if owner.lease.is_set()]
        return slow_merges(watch.sync, [p for p in paces if p], steps, len(self._leases.syncers), allowed)

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
            if not self._leads():
                continue
            await self._checkpoint()

    async def _keep_tape_short(self) -> None:
        """Without an archive the tape is for waking only: what is old goes."""
        while True:
            await asyncio.sleep(TAPE_KEPT_S / 10)
            if not self._leads():  # which may have an archive
                continue
            for group, end in (await self.bus.tape_end()).items():
                newest_ms = int(end.partition("-")[0])
                await self.bus.trim_tape(group, f"{max(0, newest_ms - int(TAPE_KEPT_S * 1000))}-0")

    async def _checkpoint(self) -> bool:
        """Save one; False, and said in log and status, if that fails. The run goes on, the next try comes by itself."""
        assert self.spec is not None and self.settings.checkpoint_dir is not None  # noqa: S101, PT018
        directory = self.settings.checkpoint_dir
        try:
            path = await save_checkpoint(self.bus, self.spec, directory, self.clock, self._offload)
        except (UsageError, PeerError, OSError) as error:  # not all fragments are there yet, or the disk is full
            self._log.error("checkpoint_failed", error=str(error), safe="all committed versions, on the bus")
            if not isinstance(error, UsageError):
                self._unsaved = f"the last checkpoint could not be saved in {directory}, and is tried again: {error}"
            return False
        self._unsaved = ""
        self._log.info("checkpoint_saved", path=str(path))
        return True

    async def _last_checkpoint(self) -> None:
        if not await self._checkpoint():
            self.in_order = False

    async def _finish_archive(self, archive: TapeArchive) -> None:
        try:
            await archive.finish()
        except OSError as error:
            self._log.error("tape_not_archived", error=str(error), safe="it stays on the bus")
            self.in_order = False


def _share(watch: RunWatch, recent: bool = False) -> float:
    """The merged share as of the lead's last sample; NaN if it is not known."""
    samples = () if watch.state is None else watch.state.samples
    if not samples or not samples[-1][1]:
        return math.nan
    _, trained, merged = samples[-1]
    share = recent_share(samples, samples[-1])[0] if recent else merged / trained
    return math.nan if share is None else share


async def _cancel(tasks: list[asyncio.Task[Any]] | list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def serve(settings: SyncerProcess) -> int:
    """Run a syncer against a real Redis until the run is finished or a signal comes."""
    from pipeline.lifecycle import stop_event
    from pipeline.redis_streams import connect

    from .http import start_http

    url = settings.bus_url()
    if url is None:
        raise UsageError("no Redis URL: set DILOCO_REDIS_URL or --redis-url, e.g. redis://localhost:6379")
    stop, log, clock = stop_event(), structlog.get_logger(), LoopClock()
    while True:
        try:
            bus = await connect(url, settings.run)
            break
        except BusUnavailable as error:
            log.warning(outage_event(error), error=str(error), retry_s=1.0)
            if stop.is_set():
                return 0
            await asyncio.sleep(1.0)
    metrics = Metrics()
    service = SyncerService(bus, clock, settings, metrics)
    token = None if settings.http_token is None else settings.http_token.get_secret_value()
    http = await start_http(
        service.status, service.ready, metrics.registry, settings.http_host, settings.http_port, token
    )
    try:
        await service.run(stop)
        return 0 if service.in_order else 1
    finally:
        await http.cleanup()
        await bus.close()


def main(settings: SyncerProcess) -> int:
    """Entry point of `diloco syncer`: the exit status."""
    from pipeline import logs
    from pipeline.cores import one_blas_thread

    logs.configure(settings.log_level)
    one_blas_thread()
    try:
        with asyncio.Runner(loop_factory=fast_loop) as runner:
            return runner.run(serve(settings))
    except DilocoError as error:
        structlog.get_logger().error("syncer_failed", error=str(error))
        return 1
