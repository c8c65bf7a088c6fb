"""Asyncio loop of one loaded fragment: it takes headers as they arrive, merges and commits, again and again.

`owner` makes a session for as long as the lease is held and the bus answers. Each delta passes through `run` in the
same order: its header arrives and is offered to the window, its payload is downloaded, the window decides, and the
merge is committed. `window` and `membership` decide which deltas are in, which are given up, and when to merge; this
module acts on their decisions.
"""

import asyncio
from collections.abc import Callable

import structlog

from diloco.pipeline.bus.ports import Offered
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import RefusalReason, WindowChanged, WindowView
from diloco.pipeline.outer_cost import operations_of
from diloco.pipeline.payload import codec
from diloco.pipeline.ramps import is_stretched, overlap_in_force, stretched
from diloco.pipeline.waiting import TICK_S, first_of, pause
from diloco.syncer.admission import STRANGERS, Accepted, DeltaFormat, Held, Offer, Refused, Suspects
from diloco.syncer.committing import Committing, Loaded, Staging, payload_key
from diloco.syncer.context import SyncerContext
from diloco.syncer.downloads import Arrivals, Downloads, UploadEstimator
from diloco.syncer.grace import GraceEstimator, LastMerges, MergedTimes, RoundTrips, grace_covers_step
from diloco.syncer.installing import Repair
from diloco.syncer.merging.fragment import Delta
from diloco.syncer.refusals import Refusals
from diloco.syncer.times import TIMES
from diloco.syncer.window import Conditions, Decision, Merge, Reopened, Wait, Window

SUSPECTED_SHOWN = 64


class OwnerState:
    """State that an owner keeps from one session to the next: its estimates, and its record of uploaded payloads."""

    def __init__(self, context: SyncerContext, layout: FragmentLayout) -> None:
        bus, clock, sync = context.bus, context.clock, layout.sync(context.sync)
        self.suspects, self.grace, self.uploads = Suspects(), GraceEstimator(), UploadEstimator()
        self.times = MergedTimes()
        operations = operations_of((slot.tensor for slot in layout.slots), sync.outer)
        self.merges, self.round_trips = LastMerges(operations / context.speed.flops), RoundTrips()
        self.not_finite_times = 0
        """How many merges in a row had an outcome that was not finite."""
        self.refusals = Refusals(bus, clock, context.metrics, layout.id, context.nonce)
        self.staging = Staging(bus, clock, layout, sync, context.random_hex)
        self.repair = Repair(context, layout)


class Session:
    """Head, values and window of one fragment, with its downloads, its running sum and its pending refusals."""

    def __init__(
        self,
        context: SyncerContext,
        layout: FragmentLayout,
        loaded: Loaded,
        state: OwnerState,
        wake: asyncio.Event,
        goes_on: Callable[[], bool],
    ) -> None:
        """Begin at the loaded head. `wake` makes the window decide again; `goes_on` tells whether a merge may begin."""
        self._context, self._bus, self._clock, self._p = context, context.bus, context.clock, layout.id
        self._loaded, self._state, self._wake, self._goes_on = loaded, state, wake, goes_on
        self._size = layout.elements * len(context.layout.fragments) / context.layout.elements
        """Size of the fragment, in units of the mean fragment's size."""
        sync = layout.sync(context.sync)
        self._format = DeltaFormat(
            context.layout.digest, sync.codec, codec.chunk_count(layout.elements, sync.codec, sync.chunk_bytes)
        )
        self.window = self._new_window()
        of_all = context.offload, state.uploads, context.upload_progress
        self._downloads = Downloads(self._bus, self._clock, loaded.fragment, wake, *of_all)
        self._committing = Committing(context, loaded.fragment, state.staging, state.merges)
        self._left: list[tuple[Offer, Refused]] = []
        """Deltas that have left the window, and are still to be refused."""
        self._rest_s = 0.0
        self._log = structlog.get_logger().bind(fragment=layout.id)

    def _new_window(self) -> Window:
        return Window(self._loaded.head, self._format, self._clock.now())

    async def run(self) -> None:
        """Serve the fragment until `goes_on` returns False.

        Raises:
            LeaseLost, HeadMoved, PayloadIncomplete, BusError: the cached state may be wrong by now.
        """
        arrivals = Arrivals(self._bus, self._p, self._wake)
        loaded, repair = self._loaded, self._state.repair
        try:
            while self._goes_on():
                self._wake.clear()  # before anything is read: what happens from here on ends the wait below
                if self._clock.now() >= repair.due_s:
                    loaded.head = await repair.check(loaded.head, loaded.fragment)
                for learner in arrivals.flooding():
                    self._state.suspects.refused(learner, RefusalReason.FLOOD)
                    await self._state.refusals.cut(self._loaded.at, learner)
                for entry in arrivals.some():
                    await self._offered(entry)
                self._downloaded()
                look_again = await self._give_up()
                arrivals.check()
                conditions = self._conditions()
                decision = self.window.decide(self._clock.now(), conditions)
                # The window must be shown as open before its missing deltas are refused. In the other order, an owner
                # that loses the bus in between would find a window for which no learner is asked to publish again.
                await self._show_window(decision, conditions)
                await self._refuse_left()
                await self._rest()
                match decision:
                    case Merge():
                        await self._merge(decision)
                    case Reopened():
                        await self._refuse_overdue(decision, f"reopened: {decision.reason}")
                        self._download()
                    case Wait() if arrivals.empty:
                        # The complete members are summed while the rest are awaited.
                        self._committing.sum.follow(await self._downloads.as_merged(self.window.complete()))
                        until = min(t for t in (decision.until, look_again, repair.due_s) if t is not None)
                        await first_of(self._wake, timeout_s=max(TICK_S, until - self._clock.now()))
        finally:
            await arrivals.close()
            self._committing.sum.close()
            await self._downloads.close()

    # --- headers ------------------------------------------------------------------------------------------

    async def _offered(self, entry: Offered) -> None:
        """Offer an arrived header to the window: its payload is downloaded, or it is held for the next, or refused."""
        if entry.header is None or entry.header.fragment != self._p:
            problem = entry.problem or "the header names a different fragment"
            bad = Refused(RefusalReason.BAD_MESSAGE, problem, 0)
            await self._state.refusals.refuse(self._loaded.at, entry.entry_id, None, bad)
            return
        offer = Offer(entry.entry_id, entry.header)
        self._state.suspects.header_arrived(offer.header.learner)
        answer = self.window.offer(offer, self._clock.now())
        match answer:
            case Accepted(replaced):
                if replaced is not None:
                    await self._refuse_replaced(replaced, offer)
                self._download()
            case Held(replaced):
                self._log.debug("delta_held", learner=offer.header.learner)
                if replaced is not None:
                    await self._refuse_replaced(replaced, offer)
            case Refused():
                self._state.suspects.refused(offer.header.learner, answer.reason)
                await self._refuse(offer, answer)

    # --- downloads ----------------------------------------------------------------------------------------

    def _download(self) -> None:
        """Start the downloads that the window awaits and that are not in flight yet."""
        self._downloads.start(self.window.not_uploaded())

    def _downloaded(self) -> None:
        """Tell the window of the downloads that have ended, sound or not."""
        for offer, outcome in self._downloads.ended():
            if isinstance(outcome, Delta):
                self.window.uploaded(offer)
                if self._downloads.came_in_time(offer):
                    self._state.suspects.delta_usable(offer.header.learner)
            else:
                reason, detail = outcome
                if reason is RefusalReason.NON_FINITE:
                    self._context.diverged.refused(offer.header.learner, self._p)
                self._state.suspects.refused(offer.header.learner, reason)
                self._leaves(offer, Refused(reason, detail, offer.header.tokens))

    async def _give_up(self) -> float | None:
        """Take uploads that have stopped, and that the window need not wait for, out of it; return when to look again.

        An upload that is whole on the bus has not stopped: only its download is slow.
        """
        suspected, arriving = self.suspected(), self._downloads.arriving(self.window.not_uploaded())
        stopped, look_again = self._context.watch.given_up(
            self.window, self._downloads.last_progress_s, self._clock.now(), suspected, arriving
        )
        for offer, refused in stopped:
            if await self._bus.count_chunks(payload_key(self._bus, offer)) < offer.header.chunks:
                self._leaves(offer, refused)
            else:
                self._downloads.note_complete(offer)
        return look_again

    # --- decisions ----------------------------------------------------------------------------------------

    def _conditions(self) -> Conditions:
        watch, sync, state, version = self._context.watch, self._context.sync, self._state, self.window.version
        overlap = overlap_in_force(sync, version, self._loaded.head.interval)
        longer = is_stretched(sync, version, self._loaded.head.interval)
        times = self._slowest_s(), self._pull_s(), overlap
        grace = state.grace.grace_s(*times, sync.grace_gamma, 2 * watch.latency_s, longer)
        if watch.drain_until is not None:
            grace = max(0.0, watch.drain_until - self._clock.now())
        arriving = self._downloads.arriving(self.window.not_uploaded())
        return watch.conditions(self._p, version, grace, state.uploads.upload_s, self.suspected(), arriving)

    def _slowest_s(self) -> float | None:
        """Return `MergedTimes.slowest_s` for the learners that the window waits for."""
        trusted = self._context.watch.trusted(self._p, self.window.version, self.suspected())
        return self._state.times.slowest_s(report.step_s for report in trusted)

    def suspected(self) -> frozenset[str]:
        """Return the learners for which the window does not wait."""
        state = self._state
        expected = self._context.watch.expected(self._p, self.window.version) if state.suspects.strangers else ()
        return state.suspects.among([seen.report.learner for seen in expected], state.times.learners)

    def _pull_s(self) -> float:
        """Return the pull time of this fragment, s: `MergedTimes.pull_s` scaled by the fragment's size."""
        return self._state.times.pull_s * self._size

    async def _show_window(self, decision: Decision, conditions: Conditions) -> None:
        """Write the window's state to the head if it changed; wake the learners that follow it if it opened."""
        window, before, now = self.window, self._loaded.head.window, self._clock.now()
        until = decision.until if isinstance(decision, Wait) else None
        view = WindowView(
            state=window.state.value,
            attempt=window.attempt,
            members=window.members,
            expected=len(conditions.expected),
            suspected=tuple(sorted(conditions.suspected))[:SUSPECTED_SHOWN],
            merge_s=self._state.merges.merge_s,
            outer_s=self._state.merges.outer_s,
            reason=decision.reason[:500],
            deadline_unix_s=None if until is None else self._clock.unix() + until - now,
        )
        changed = view.model_copy(update={"deadline_unix_s": before.deadline_unix_s}) != before
        merges = isinstance(decision, Merge)
        if not changed or (merges and view.merge_s < TIMES.shown_merge_s):
            return
        opened = not merges and view.state != "idle" and (before.state == "idle" or before.attempt != view.attempt)
        record = None
        if opened:
            self._log.debug("window_opened", attempt=window.attempt, reason=decision.reason)
            record = WindowChanged(
                fragment=self._p,
                version=window.version,
                attempt=window.attempt,
                reason=view.reason,
                unix_s=self._clock.unix(),
            )
        await self._bus.write_window(self._p, self._context.nonce, self._loaded.at, view, record)
        self._loaded.head = self._loaded.head.model_copy(update={"window": view})

    # --- refusals -----------------------------------------------------------------------------------------

    def _leaves(self, offer: Offer, refused: Refused) -> None:
        """Take a delta out of the window now, to be refused once the window is shown.

        A held delta of the same learner may take its place, so downloads are started again.
        """
        self.window.refused(offer)
        self._download()
        self._left.append((offer, refused))

    async def _refuse_left(self) -> None:
        left, self._left = self._left, []
        for offer, refused in left:
            await self._refuse(offer, refused)

    async def _refuse(self, offer: Offer, refused: Refused, tell: bool = True) -> None:
        key = payload_key(self._bus, offer)
        pending = self.window.pending()
        still_needed = any(payload_key(self._bus, other) == key for other in pending if other is not offer)
        self._downloads.forget([offer.entry_id])
        gone = () if still_needed else (key,)
        await self._state.refusals.refuse(self._loaded.at, offer.entry_id, offer.header, refused, gone, tell)

    async def _refuse_replaced(self, replaced: Offer, offer: Offer) -> None:
        same = replaced.header.base_version == offer.header.base_version
        reason = RefusalReason.DUPLICATE if same else RefusalReason.TOO_STALE
        lost = 0 if same else replaced.header.tokens
        refused = Refused(reason, "a newer delta of the same learner replaced it", lost)
        await self._refuse(replaced, refused, tell=not same)

    async def _refuse_overdue(self, decision: Merge | Reopened, detail: str) -> None:
        """Refuse the overdue deltas, and count each as a failed wait for its learner, even if the upload continues."""
        for learner in decision.in_vain:
            self._state.suspects.refused(learner, RefusalReason.UPLOAD_TIMEOUT)
        self._downloads.timed_out(offer.entry_id for offer in decision.overdue)
        for offer in decision.overdue:
            await self._refuse(offer, Refused(RefusalReason.UPLOAD_TIMEOUT, detail, offer.header.tokens))

    # --- merging ------------------------------------------------------------------------------------------

    async def _merge(self, merge: Merge) -> None:
        """Commit a merge and begin the next version's window; or keep this window, if the outcome is not finite."""
        state, began = self._state, self._clock.now()
        await self._refuse_overdue(merge, "the upload did not finish in time")
        deltas = await self._downloads.as_merged(merge.contributions)
        record = await self._committing.commit(self._loaded, merge, deltas, began, self._next_interval())
        if record is None:
            await self._not_finite(merge)
            return
        merged = [offer.header for offer in merge.contributions]
        if any(header.learner not in state.times.learners for header in merged):
            state.suspects.header_arrived(STRANGERS)
        state.times.merged(record.version, merged)
        for header in merged:
            self._context.diverged.merged(header.learner)
        sync_s, slowest_s = self._clock.now() - merge.fixed_at, self._slowest_s()
        overlap = overlap_in_force(self._context.sync, self.window.version, record.interval)
        state.grace.observe(record.quorum_s, sync_s, slowest_s, overlap)
        waited = grace_covers_step(record.grace_s, slowest_s)
        state.suspects.closed(merge.silent if waited else (), state.times.learners)
        if not merge.in_vain:  # a wait for an upload that did not come would lengthen the round trip without reason
            state.round_trips.observe(record.grace_s + sync_s + self._pull_s())
        state.not_finite_times = 0
        self._downloads.forget(offer.entry_id for offer in merge.contributions)
        late, self.window = self.window.held.offers, self._new_window()
        for offer in late:
            await self._offered(Offered(offer.entry_id, offer.header))

    def _next_interval(self) -> int:
        """Return the interval of the version that a merge makes, from the round trips before it."""
        round_trip = self._state.round_trips.steps(self._state.times.steps, 2 * self._context.watch.latency_s)
        return stretched(self._context.sync, self.window.version + 1, round_trip)

    async def _not_finite(self, merge: Merge) -> None:
        """Keep the version and refuse the merged deltas, so that learners send others; back off if it happens again."""
        window, state, gone = self.window, self._state, merge.contributions
        window.not_merged(merge)
        detail = f"merging it would make fragment {self._p} non-finite: version {window.version} is kept"
        pause_s = min(2.0 ** min(state.not_finite_times, 5), TIMES.not_finite_pause_s)
        state.not_finite_times += 1
        self._log.error("merge_not_finite", learners=[o.header.learner for o in gone], detail=detail, pause_s=pause_s)
        refused = [Refused(RefusalReason.MERGE_NOT_FINITE, detail, offer.header.tokens) for offer in gone]
        self._left += zip(gone, refused, strict=True)
        self._rest_s = pause_s

    async def _rest(self) -> None:
        """Pause after a merge whose outcome was not finite. This must come after its refusals are on the bus.

        A learner that reads its refusal renews its delta meanwhile, which may remove the cause.
        """
        rest_s, self._rest_s = self._rest_s, 0.0
        if rest_s:
            await pause(self._wake, self._goes_on, self._clock, rest_s)
