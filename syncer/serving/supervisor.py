"""A syncer's work (asyncio) from the agreed spec until the run ends, or the syncer is stopped.

For each fragment a `FragmentOwner` task does the merging while this syncer has the fragment's lease; `leases` shares
the fragments with other syncers. The syncer that owns fragment 0 is the lead, which moves the run (`lead`); `closing`
ends it.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.server import fill_of_run
from diloco.pipeline.errors import BusError, BusUnavailable, PeerError
from diloco.pipeline.messages.run import REDIS_CHANGED, Event, Phase, RunState, SeenReport
from diloco.pipeline.pacing import long_rounds, merge_share, outer_budget, slow_merges
from diloco.pipeline.settings import SyncerProcess
from diloco.pipeline.waiting import cancel
from diloco.syncer.context import SyncerContext
from diloco.syncer.installing import InitialVersions
from diloco.syncer.owner import FragmentOwner
from diloco.syncer.replay.archive import TapeArchive
from diloco.syncer.serving.bus_recovery import BusRestorer
from diloco.syncer.serving.checkpointing import Checkpoints
from diloco.syncer.serving.closing import finish_run
from diloco.syncer.serving.lead import Lead
from diloco.syncer.serving.leases import RETRIES, Leases, in_time, release_all
from diloco.syncer.serving.retrying import retrying
from diloco.syncer.serving.start import BusWarnings
from diloco.syncer.times import TIMES

SILENT = "it was killed, it lost its connection to Redis, or its machine hangs; merges do not wait for it"


class Serving:
    """Serves one run. It is made once the spec is agreed; `run` does all the work."""

    def __init__(self, context: SyncerContext, settings: SyncerProcess, bus_warnings: BusWarnings) -> None:
        """Make the owners, the leases, and the writers of tape archive and checkpoints.

        Raises:
            UsageError: a folder cannot be written.
        """
        self.context, self._settings, self._bus_warnings = context, settings, bus_warnings
        self._bus, self._clock, self._watch = context.bus, context.clock, context.watch
        initial = InitialVersions(context)
        self.owners = [FragmentOwner(context, layout, initial) for layout in context.layout.fragments]
        self.leases = Leases(self._bus, self._clock, self.owners, context.nonce, context.name, settings.lease_s)
        self._lost = BusRestorer(self._bus, self._clock, context.agreed, self.owners)
        self._lead = Lead(context)
        self._servers: frozenset[str] = frozenset()
        """Ids of the Redis servers that the run has been on."""
        self._archive, self._checkpoints = None, None
        if settings.tape_dir:
            given = context.sync.groups, settings.tape_dir, context.nonce, self.leads, context.offload
            self._archive = TapeArchive(self._bus, *given)
        if settings.checkpoint_dir:
            self._checkpoints = Checkpoints(context, settings.checkpoint_dir, settings.lease_s, self.served)
        self.closing: asyncio.Future[RunState] = asyncio.get_running_loop().create_future()
        """Resolves to the run's state once the run is closing or finished, so that no merge begins any more."""
        self.finished = False
        """True once the run is finished."""
        self._in_order = True
        self._unwritten: list[str] = []  # by a shutdown in progress
        self._log = structlog.get_logger()
        self._show()

    def _show(self) -> None:
        """Connect the gauges to this object's state."""
        metrics, owners = self.context.metrics, self.owners
        metrics.open_windows.set_function(lambda: sum(owner.window_open for owner in owners))
        metrics.suspected_learners.set_function(
            lambda: len({learner for owner in owners if owner.lease.is_set() for learner in owner.suspected})
        )
        metrics.leads.set_function(self._leads_shown)
        metrics.interval.labels(which="asked").set(self.context.sync.sync_interval)
        metrics.interval.labels(which="longest").set_function(lambda: max(self._rounds(), default=0) or math.nan)
        metrics.served_fragments.set_function(lambda: len(self.served()))

    @property
    def problems(self) -> list[str]:
        """Problems with writing to disks, in words, for the status."""
        writers = (self._checkpoints, self.context.recorder, self._archive)
        return [one.problem for one in writers if one is not None and one.problem]

    def leads(self) -> bool:
        """Return whether this syncer serves fragment 0."""
        return self.owners[0].lease.is_set()

    def _leads_shown(self) -> float:
        """Return 1 if this syncer leads, 0 if not, NaN while it ends.

        It has given its leases back then, and saving may take minutes; NaN keeps an alert about a missing lead silent.
        """
        return math.nan if self._watch.frozen else self.leads()

    def served(self) -> list[int]:
        """Return the fragments that this syncer serves."""
        return [p for p, owner in enumerate(self.owners) if owner.lease.is_set()]

    # --- life -----------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> bool:
        """Serve until the run is finished, or `stop` is set; return False if it did not end in order.

        Raises:
            DilocoError: another run has begun under this name.
        """
        background = [asyncio.create_task(work) for work in self._background()]
        owners = [asyncio.create_task(owner.run()) for owner in self.owners]
        bound: list[asyncio.Task[None]] = []
        try:
            await self._until_ended(stop, [*background, *owners])
            async with asyncio.timeout(None) as limit:
                bound.append(asyncio.create_task(self._bound(stop, limit)))
                await self._end(stop, background, owners)
        except TimeoutError:
            told = {"after_s": self._settings.shutdown_s, "not_written": ", ".join(self._unwritten)}
            self._log.error("shutdown_overrun", **told, safe="all committed versions")
            self._in_order = False
        finally:
            await cancel(*background, *owners, *bound)
            with suppress(BusError):
                release = release_all(self._bus, self.context.nonce, len(self.owners))
                await in_time(release, self._settings.lease_s)  # after that they have expired
                await self._bus.withdraw_syncer(self.context.nonce)
        return self._in_order and (self._checkpoints is None or self._checkpoints.in_order)

    def _retrying(self, work: Any, retry_s: float = TIMES.retry_s) -> Any:
        return retrying(self.context.metrics, work, retry_s)

    def _background(self) -> list[Any]:
        """Return the background coroutines. Each runs until it is cancelled or meets an error that no retry fixes."""
        settings, checkpoints = self._settings, self._checkpoints
        works = [
            self._retrying(self.leases.keep, settings.lease_s / RETRIES),
            self._retrying(self.leases.share, min(TIMES.retry_s, settings.lease_s / 6)),
            self._retrying(self._keep_watch),
            self._retrying(self._watch_bus),
            self._retrying(self._archive.follow if self._archive else self._keep_tape_short),
        ]
        if checkpoints and settings.checkpoint_every:
            self.context.metrics.checkpoint_unix.set(self.context.clock.unix())
            works.append(self._retrying(partial(checkpoints.keep, settings.checkpoint_every, self.leads)))
        if checkpoints:
            works.append(self._retrying(checkpoints.help))
        return works

    async def _until_ended(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        stopped = asyncio.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopped, self.closing, *tasks]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(stopped)
        for task in done:
            task.result()  # a background task ends only by an error

    async def _bound(self, stop: asyncio.Event, limit: asyncio.Timeout) -> None:
        """Bound the shutdown after `stop` by `shutdown_s`, and restart that limit with each fragment that is saved."""
        await stop.wait()
        fragment_saved = self._checkpoints.fragment_saved if self._checkpoints else asyncio.Event()
        while True:
            fragment_saved.clear()
            limit.reschedule(asyncio.get_running_loop().time() + self._settings.shutdown_s)
            await fragment_saved.wait()

    async def _end(
        self, stop: asyncio.Event, background: list[asyncio.Task[None]], owners: list[asyncio.Task[None]]
    ) -> None:
        """Let merges in progress be committed and give leases back; then finish a closing run, or save a checkpoint."""
        saves, served = self.leads() or len(self.leases.syncers) <= 1, self.served()
        self._unwritten = ["the last checkpoint"] if self._checkpoints and (saves or self.closing.done()) else []
        self._unwritten += ["the end of the tape's archive"] if self._archive else []
        self._watch.frozen = True
        for owner in self.owners:
            owner.wake.set()
        await self._retrying(self.leases.part)
        await asyncio.wait(owners)
        await cancel(*background)
        if self.closing.done():
            await self._finish(stop, self.closing.result(), served)
        elif self._checkpoints and saves:
            await self._retrying(self._lead.begin)
            await self._retrying(partial(self._checkpoints.save_stopped, served))
        self._unwritten = self._unwritten[-1:] if self._archive else []
        if self._archive:
            await self._retrying(partial(self._finish_archive, self._archive))

    async def _finish(self, stop: asyncio.Event, closing: RunState, served: list[int]) -> None:
        """Finish the closing run and save it; served: the fragments that this syncer has served."""
        bus, nonce, lease_s = self._bus, self.context.nonce, self._settings.lease_s
        finished = await self._retrying(
            partial(finish_run, bus, self._clock, nonce, len(self.owners), lease_s, stop, closing)
        )
        self.finished = finished is not None
        if finished is not None and self._checkpoints:
            await self._retrying(partial(self._checkpoints.save_finished, finished, served))

    async def _finish_archive(self, archive: TapeArchive) -> None:
        try:
            await archive.finish()
        except (OSError, PeerError) as error:  # a value of another kind at the tape's key does not go away
            archive.log_failure(error)
            self._in_order = False

    # --- background -------------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        """Keep `RunWatch` up to date, wake the owners on changes, and move the run while this syncer leads."""
        warnings, presence = _Warnings(), _Presence()
        while not self.closing.done():
            await self._refresh()
            slow = None if self._watch.draining else self._slow_merges(warnings.slow_from)
            long = long_rounds(self.context.sync.sync_interval, self._rounds()) if self._watch.live() else None
            warnings.log_new(self._watch.quorum_warning, slow, long)
            presence.log_changes(self._watch.live(), self._watch.reports, self._watch.liveness_s)
            await asyncio.sleep(TIMES.watch_s)

    async def _refresh(self) -> None:
        watch, lost = self._watch, self._lost
        began = self._clock.now()
        found = await self._bus.read_reports()
        latency = self._clock.now() - began
        state = await lost.state(await self._bus.read_state(), watch.state)
        reports = await lost.reports(found)
        if state is None:  # a first state is written only if no live learner has trained parameters
            watch.refresh(reports, None, latency, self._clock.now())
        if self.leads():
            begun = self._checkpoints.begun if self._checkpoints else ""
            state = await self._lead.move(state, begun, "; ".join(self.problems))
        if self._checkpoints:
            self._checkpoints.see(state)
        if state is not None and state.phase.rank >= Phase.CLOSING.rank:
            self.closing.set_result(state)
        if watch.refresh(reports, state, latency, self._clock.now()):
            for owner in self.owners:
                owner.wake.set()

    def _slow_merges(self, allowed: float) -> str | None:
        """Return the warning of `pacing.slow_merges` about the fragments that this syncer serves; set their gauges."""
        sync, metrics = self.context.sync, self.context.metrics
        steps = [seen.report.step_s for seen in self._watch.live()]
        served = [owner for owner in self.owners if owner.lease.is_set()]
        paces = [pace for owner in served if (pace := owner.pace) is not None]
        outer = outer_budget(sync, paces, steps)
        metrics.outer_room.set(outer["room_s"] if outer else math.nan)
        metrics.outer_share.set(outer["share"] if outer else math.nan)
        reckoned = not any(owner.state.merges.measured for owner in served)
        together_s = sum(pace.outer_s for pace in paces) / self.context.speed.at_once if reckoned else 0.0
        share = merge_share(sync, paces, steps, together_s)
        metrics.merge_share.set(math.nan if share is None else share)
        slow = slow_merges(sync, paces, steps, len(self.leases.syncers), allowed, together_s, self.context.speed)
        return None if slow is None else str(slow)

    def _rounds(self) -> list[int]:
        """Return the inner steps of a round, for each fragment that this syncer serves."""
        return [one.interval for one in self.owners if one.lease.is_set()]

    async def _watch_bus(self) -> None:
        """Report what is wrong with the server, put back the run's spec if it is gone, and bound the run's events."""
        while True:
            await asyncio.sleep(TIMES.server_s)
            info = await self._bus.info()
            fill = fill_of_run(info, self.context.layout.elements, len(self._watch.live()), self.context.sync)
            self._bus_warnings.log_new(info, fill)
            await self._lost.spec()
            await self._tell_change(info)
            if self.leads():
                await self._bus.trim_events()

    async def _tell_change(self, info: BusInfo) -> None:
        """Add an event to the run when its Redis server has changed. Otherwise only logs would tell of a failover."""
        now = frozenset(info.server_id.split("+"))
        if self._servers and not now <= self._servers:
            if self.leads():
                told_by = f"told by {self.context.name}"
                unix_s = self._clock.unix()
                try:
                    await self._bus.add_event(Event(name=REDIS_CHANGED, who="Redis", detail=told_by, unix_s=unix_s))
                except BusUnavailable:
                    raise
                except BusError as error:  # no memory, or damaged events: not worth a retry
                    self._log.warning("event_not_told", event_name=REDIS_CHANGED, error=str(error))
            elif await self._bus.read_leases([0]) == [None]:
                return  # there is no lead now: the next one adds the event
        self._servers |= now

    async def _keep_tape_short(self) -> None:
        """Trim old entries of the tape. Without an archive it only serves to wake the parties."""
        while True:
            await asyncio.sleep(TIMES.tape_kept_s / 10)
            if not self.leads():  # the lead may have an archive, and trims by that
                continue
            for group, end in (await self._bus.tape_end()).items():
                newest_ms = int(end.partition("-")[0])
                await self._bus.trim_tape(group, f"{max(0, newest_ms - int(TIMES.tape_kept_s * 1000))}-0")


class _Warnings:
    """Warnings about a running run. Each is logged when it comes up, not at each check."""

    def __init__(self) -> None:
        self._quorum, self._slow, self._long = "", False, False
        self._log = structlog.get_logger()

    @property
    def slow_from(self) -> float:
        """Rounds that a merge may take. Once merges have been slow, they must fall below half a round (hysteresis)."""
        return 0.5 if self._slow else 1.0

    def log_new(self, quorum: str, slow: str | None, long: str | None) -> None:
        """Log the current warnings that are new; "" and None stand for no warning."""
        if quorum and quorum != self._quorum:
            self._log.warning("quorum_short", detail=quorum)
        if slow and not self._slow:
            self._log.warning("merges_slow", detail=slow)
        elif self._slow and not slow:
            self._log.info("merges_in_time")
        if long and not self._long:
            self._log.warning("rounds_long", detail=long)
        self._quorum, self._slow, self._long = quorum, slow is not None, self._long or long is not None


def _life(seen: SeenReport) -> tuple[str, str]:
    return seen.report.learner, seen.report.incarnation


class _Presence:
    """Logs when learners come, fall silent, leave, or are replaced by another incarnation."""

    def __init__(self) -> None:
        self._here: dict[tuple[str, str], SeenReport] = {}
        self._log = structlog.get_logger()

    def log_changes(self, live: Sequence[SeenReport], reports: Sequence[SeenReport], liveness_s: float) -> None:
        """Log the changes since the last call, from the live learners and the last reports of all.

        A syncer that has just started counts as live whoever may be: a learner has come once it reports.
        """
        here = {life: one for one in live if (life := _life(one)) in self._here or one.age_s <= liveness_s}
        for learner, incarnation in sorted(here.keys() - self._here.keys()):
            self._log.info("learner_came", learner=learner, incarnation=incarnation)
        gone = sorted(self._here.keys() - here.keys())
        last = {_life(one): one for one in reports} if gone else {}
        names = {learner for learner, _ in here} if gone else set()
        for who in gone:
            seen = last.get(who, self._here[who])
            told = {"learner": who[0], "incarnation": who[1], "step": seen.report.step}
            if seen.report.left:
                self._log.info("learner_left", **told)
            elif who[0] in names:
                self._log.info("learner_replaced", **told)
            else:
                self._log.warning("learner_fell_silent", **told, silent_s=round(seen.age_s, 1), detail=SILENT)
        self._here = here
