"""The owner of one fragment: reads its stream, drives its window, downloads, merges, commits. asyncio.

Called by `service`; decides nothing itself: `window.decide` does, and every decision is acted on here. What is
cached here is never trusted over the bus: after any failed write the head is read again and the window is
rebuilt from the stream, which holds all that is pending.
"""

import asyncio
import secrets

import structlog

from pipeline import codec
from pipeline.errors import BadPayload, BusFull, BusUnavailable, HeadMoved, LeaseLost, PayloadIncomplete, PeerError
from pipeline.fragments import FragmentLayout
from pipeline.globals import pull_state
from pipeline.messages import Committed, Head, RefusalReason, Rewound, Spec, WindowChanged, WindowView
from pipeline.pacing import LastMerges, Pace
from pipeline.ports import Bus, Clock, Commit, Offered
from pipeline.retry import Backoff
from pipeline.stored import head_after, parse_offer_id
from pipeline.waiting import TICK_S, first_of, pause, woken_or_done
from pipeline.wire import Digest

from .doubts import Doubts
from .folding import Folding
from .fragment import Delta, FragmentState, MakeFragment, Merged, finite, orthogonalises
from .grace import GraceEstimator
from .initial import IDLE_VIEW, Beginning
from .intake import Failed, Intake, Offload, Outcome, given_up
from .mending import Mending
from .metrics import Metrics
from .recording import Recorder
from .refusing import Refusing
from .staging import REPLACED_TTL_S, RandomHex, Staging
from .watch import RunWatch
from .window import Accepted, Conditions, Decision, Late, Merge, Offer, Reopened, State, Wait, Window
from .window import Rejected as Refused

BLOCK_S = 1.0
MOST_ARRIVED = 1024
"""Headers that were read and not looked at; with more, reading waits."""
MOST_AT_ONCE = 256
"""Headers looked at before the window decides again, however many more there are."""
INITIAL_POLL_S = 0.1
BACKOFF = Backoff(0.1, 2.0)
NOT_FINITE_PAUSE_S = 30.0  # the longest, after merges that came to nothing one after the other
DOUBTED_SHOWN = 64


class FragmentOwner:
    """Serves one fragment while its lease is held; a merge in hand is ended first when the lease is given back."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        spec: Spec,
        layout: FragmentLayout,
        layout_digest: Digest,
        watch: RunWatch,
        metrics: Metrics,
        beginning: Beginning,
        *,
        nonce: str,
        syncer: str,
        offload: Offload = asyncio.to_thread,
        random_hex: RandomHex = secrets.token_hex,
        recorder: Recorder | None = None,
        make_fragment: MakeFragment = FragmentState,
    ) -> None:
        self._bus, self._clock, self._spec, self._layout = bus, clock, spec, layout
        self._layout_digest, self._watch, self._metrics = layout_digest, watch, metrics
        self._nonce, self._syncer, self._offload = nonce, syncer, offload
        self._beginning, self._recorder, self._make_fragment = beginning, recorder, make_fragment
        self._refusing, self._doubts = Refusing(bus, clock, metrics, layout.id, nonce), Doubts()
        self._staging = Staging(bus, clock, layout, spec.sync, random_hex)
        self._mending = Mending(bus, clock, layout, spec.sync, nonce, random_hex)
        self.id = self._p = layout.id
        self._log = structlog.get_logger().bind(fragment=layout.id)
        self.lease = asyncio.Event()
        """Set while the lease is held, and is not to be given back."""
        self.idle = asyncio.Event()
        """Set while this owner does nothing for which it needs the lease."""
        self.idle.set()
        self.wake = asyncio.Event()
        """Set to have the window decide anew."""
        self._fragment: FragmentState | None = None
        self._head: Head | None = None
        self._window: Window | None = None
        self._intake = Intake(bus, clock, layout, spec.sync, self.wake, offload)
        self._folding = Folding(layout, spec.sync, offload, metrics)
        self._grace = GraceEstimator()
        self._not_finite_times = 0  # merges in a row whose outcome was not finite
        self._view = IDLE_VIEW
        self._merges = LastMerges()

    @property
    def pace(self) -> Pace | None:
        """How long merges take; None before the fragment is loaded."""
        return None if self._fragment is None else Pace(self._p, self._fragment.version, self._merges.merge_s)

    @property
    def doubted(self) -> frozenset[str]:
        """Learners that this owner does not wait for."""
        return self._doubts.learners

    @property
    def window_open(self) -> bool:
        """Whether deltas are being gathered right now."""
        return self._window is not None and self._window.state is not State.IDLE

    # --- life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the run is frozen; survives lost leases, moved heads and bus outages."""
        waits = BACKOFF.waits()
        while not self._watch.frozen:
            await self._lease_or_freeze()
            if not self._serving:
                continue
            self.idle.clear()
            began = self._clock.now()
            try:
                await self._serve()
                continue
            except LeaseLost:
                self._log.warning("lease_lost")
                self._metrics.lease_losses.inc()
                self.lease.clear()
                continue
            except (HeadMoved, PayloadIncomplete) as error:
                self._log.warning("commit_refused", error=str(error))
            except (BusUnavailable, BusFull, PeerError) as error:  # among them a payload that is gone: its head moved
                self._log.warning("fragment_reloading", error=str(error))
                self._metrics.bus_errors.inc()
            finally:
                self.idle.set()
            await asyncio.sleep(waits.after(self._clock.now() - began))

    def forget(self) -> None:
        """Another syncer serves the fragment now: what is cached is of no more use."""
        self._fragment = self._head = None

    @property
    def _serving(self) -> bool:
        """Whether a merge may begin."""
        return self.lease.is_set() and not self._watch.frozen

    async def _lease_or_freeze(self) -> None:
        while not (self.lease.is_set() or self._watch.frozen):
            self.wake.clear()
            await first_of(self.lease, self.wake)

    async def _serve(self) -> None:
        if not await self._load():
            return
        arrived: asyncio.Queue[Offered] = asyncio.Queue(MOST_ARRIVED)
        reader = asyncio.create_task(self._read(arrived))
        unmerged: list[Failed] = []
        try:
            while self._serving:
                self.wake.clear()
                if self._clock.now() >= self._mending.due_s:
                    await self._mend()
                for _ in range(min(arrived.qsize(), MOST_AT_ONCE)):
                    await self._offered(arrived.get_nowait())
                downloaded = [one for one in map(self._downloaded, self._intake.taken()) if one is not None]
                failed, unmerged = [*unmerged, *downloaded], []
                assert self._window is not None  # noqa: S101  # loaded before the loop
                gone, look_again = given_up(self._window, self._intake, self._watch, self._doubts.learners)
                if reader.done():
                    reader.result()  # raises what ended it: what came before an outage may be lost with it
                decision = self._decide()
                # The window is open again before what it lacks is refused: were it the other way round, an owner that
                # loses the bus in between would find a window for which nobody is asked again.
                await self._publish_window(decision)
                for offer, reason, detail in (*failed, *gone):
                    await self._reject(offer, reason, detail, offer.header.tokens)
                if isinstance(decision, Merge):
                    unmerged = await self._merge(decision)
                elif isinstance(decision, Reopened):
                    await self._refuse_overdue(decision.overdue, f"reopened: {decision.reason}")
                    self._start_downloads()
                elif arrived.empty():
                    self._fold()
                    until = min(at for at in (decision.until, look_again, self._mending.due_s) if at is not None)
                    await woken_or_done(self.wake, reader, max(TICK_S, until - self._clock.now()))
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._folding.close()
            await self._intake.close()
            self._window = None

    async def _mend(self) -> None:
        assert self._fragment is not None and self._head is not None  # noqa: S101, PT018  # loaded before the loop
        self._head = await self._mending.look(self._head, self._fragment, self._watch)

    # --- loading ----------------------------------------------------------------------------------------

    async def _load(self) -> bool:
        """Make the cached state equal to the head on the bus; False if told to stop before version 0."""
        sync = self._spec.sync
        while (head := (await self._bus.read_heads([self._p]))[0]) is None:
            async with self._beginning.turns:
                if not self._serving:
                    return False
                begun = await self._begin()
            if not begun:
                await asyncio.sleep(INITIAL_POLL_S)
        cached = self._fragment
        if cached is not None and cached.version > head.version:
            record = Rewound(
                fragment=self._p, version=head.version, was_version=cached.version, unix_s=self._clock.unix()
            )
            self._log.warning("rewound", version=head.version, was_version=cached.version)
            await self._bus.write_window(self._p, self._nonce, (head.version, head.digest), IDLE_VIEW, record)
            head = head.model_copy(update={"window": IDLE_VIEW})
        if cached is None or (cached.version, cached.digest) != (head.version, head.digest):
            if told := await self._beginning.another_spec():
                raise BadPayload(f"the head may be another run's, whose spec the bus has:\n{told}")
            state = await pull_state(self._bus, head, self._layout.elements, sync, self._offload)
            if not await self._offload(finite, *state):
                raise BadPayload(f"version {head.version} on the bus is not finite: resume from an earlier checkpoint")
            fragment = self._make_fragment(self._layout, sync, head.version, head.digest, *state)
            if self._recorder is not None:
                await self._offload(self._recorder.loaded, fragment)
            self._fragment = fragment
        self._head = head
        self._mending.due_s = self._clock.now()  # a commit may have been refused because something has gone
        self._window = self._new_window(head)
        self._view = head.window
        return True

    async def _begin(self) -> bool:
        """Give the fragment a head: the one that it had when this owner last saw it, else version 0; whether it has."""
        fragment, head = self._fragment, self._head
        if fragment is None or head is None:
            return await self._beginning.commit(self._layout, self._watch)
        if self._recorder is not None:
            await self._offload(self._recorder.loaded, fragment)
        await self._mending.put_back(head, fragment, self._watch, self._view.attempt + 1, self._syncer)
        return True

    def look(self) -> None:
        """The bus may have lost something: see at once."""
        self._mending.due_s = self._clock.now()
        self.wake.set()

    def knows(self, head: Head | None) -> bool:
        """Whether this is the head that this owner has; None: whether it has one."""
        mine = self._head
        return mine is not None and (head is None or (head.version, head.digest) == (mine.version, mine.digest))

    @property
    def _at(self) -> tuple[int, bytes]:
        """The head by which this owner judges; a write fails if it is another one by now."""
        assert self._fragment is not None  # noqa: S101  # loaded before the loop
        return self._fragment.version, self._fragment.digest

    def _new_window(self, head: Head) -> Window:
        sync = self._spec.sync
        chunks = codec.chunk_count(self._layout.elements, sync.codec, sync.chunk_bytes)
        return Window.at(head, self._layout_digest, sync.codec, chunks, self._clock.now())

    # --- offers -----------------------------------------------------------------------------------------

    async def _read(self, arrived: asyncio.Queue[Offered]) -> None:
        after: dict[str, str] = {}
        while True:
            for entry in await self._bus.read_offers(self._p, after, BLOCK_S):
                learner, after_id = parse_offer_id(entry.entry_id)
                after = {**after, learner: after_id}
                self.wake.set()
                await arrived.put(entry)
                self.wake.set()

    async def _offered(self, entry: Offered) -> None:
        assert self._window is not None  # noqa: S101  # loaded before the loop
        if entry.header is None or entry.header.fragment != self._p:
            problem = entry.problem or "the header names another fragment"
            await self._refusing.refuse(self._at, entry.entry_id, None, RefusalReason.BAD_MESSAGE, problem)
            return
        offer = Offer(entry.entry_id, entry.header)
        answer = self._window.offer(offer, self._clock.now())
        match answer:
            case Accepted(replaced):
                if replaced is not None:
                    await self._outdone(replaced, offer)
                self._start_downloads()
            case Refused(reason, detail, lost):
                self._doubts.refused(offer.header.learner, reason)
                await self._reject(offer, reason, detail, lost)
            case Late(replaced):
                self._log.debug("delta_held", learner=offer.header.learner)
                if replaced is not None:
                    await self._outdone(replaced, offer)

    def _key(self, offer: Offer) -> str:
        h = offer.header
        return self._bus.keys.delta_payload(self._p, h.learner, h.incarnation, h.serial)

    async def _reject(self, offer: Offer, reason: RefusalReason, detail: str, lost: int) -> None:
        assert self._window is not None  # noqa: S101  # loaded before the loop
        key = self._key(offer)
        still_needed = any(self._key(other) == key for other in self._window.pending() if other is not offer)
        self._intake.forget([offer.entry_id])
        gone = () if still_needed else (key,)
        await self._refusing.refuse(
            self._at, offer.entry_id, offer.header, reason, detail, lost_tokens=lost, payloads=gone
        )

    async def _outdone(self, replaced: Offer, offer: Offer) -> None:
        same = replaced.header.base_version == offer.header.base_version
        reason = RefusalReason.DUPLICATE if same else RefusalReason.TOO_STALE
        lost = 0 if same else replaced.header.tokens
        await self._reject(replaced, reason, "a newer delta of the same learner took its place", lost)

    async def _refuse_overdue(self, overdue: tuple[Offer, ...], detail: str) -> None:
        self._intake.timed_out(offer.entry_id for offer in overdue)
        for offer in overdue:
            self._doubts.refused(offer.header.learner, RefusalReason.UPLOAD_TIMEOUT)
            await self._reject(offer, RefusalReason.UPLOAD_TIMEOUT, detail, offer.header.tokens)

    # --- downloads ----------------------------------------------------------------------------------------

    def _start_downloads(self) -> None:
        assert self._window is not None and self._fragment is not None  # noqa: S101, PT018  # loaded before the loop
        self._intake.start(self._window.awaited(), self._fragment.judge)

    def _fold(self) -> None:
        """Sum what is complete while the rest is awaited."""
        assert self._window is not None  # noqa: S101  # loaded before the loop
        self._folding.fold([self._intake.deltas[offer.entry_id] for offer in self._window.complete()])

    def _downloaded(self, taken: tuple[Offer, Outcome]) -> Failed | None:
        assert self._window is not None  # noqa: S101  # loaded before the loop
        offer, outcome = taken
        if isinstance(outcome, Delta):
            self._window.uploaded(offer)
            self._doubts.sound(offer.header.learner)
            return None
        self._window.failed(offer)
        self._doubts.refused(offer.header.learner, outcome[0])
        return offer, *outcome

    # --- decisions ----------------------------------------------------------------------------------------

    def _conditions(self) -> Conditions:
        assert self._fragment is not None  # noqa: S101  # loaded before the loop
        watch, sync, version = self._watch, self._spec.sync, self._fragment.version
        doubted = self._doubts.learners
        expected = watch.expected(self._p, version)
        steps = [s.report.step_s for s in expected if s.report.learner not in doubted]
        grace = self._grace.grace_s(steps, sync.overlap_steps, sync.grace_gamma, 2 * watch.latency_s)
        if watch.drain_until is not None:
            grace = max(0.0, watch.drain_until - self._clock.now())
        return watch.conditions(self._p, version, grace, self._intake.upload_s, doubted)

    def _decide(self) -> Decision:
        assert self._window is not None  # noqa: S101  # loaded before the loop
        return self._window.decide(self._clock.now(), self._conditions())

    async def _publish_window(self, decision: Decision) -> None:
        """Write the window's state to the head when it changed; wake followers when it opened."""
        window, now = self._window, self._clock.now()
        assert window is not None  # noqa: S101  # loaded before the loop
        deadline = window.deadline if isinstance(decision, Wait) else None
        view = WindowView(
            state=window.state.value,
            attempt=window.attempt,
            members=window.members,
            expected=len(self._conditions().expected),
            doubted=tuple(sorted(self._doubts.learners))[:DOUBTED_SHOWN],
            merge_s=self._merges.merge_s,
            reason=decision.reason[:500],
            deadline_unix_s=None if deadline is None else self._clock.unix() + deadline - now,
        )
        before = self._view
        changed = view.model_copy(update={"deadline_unix_s": before.deadline_unix_s}) != before
        if not changed or isinstance(decision, Merge):
            return
        opened = window.state.value != "idle" and (before.state == "idle" or before.attempt != view.attempt)
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
        await self._bus.write_window(self._p, self._nonce, self._at, view, record)
        self._view = view

    # --- merging ------------------------------------------------------------------------------------------

    async def _merge(self, decision: Merge) -> list[Failed]:
        """Commit a merge; returns what is to be refused instead, if the outcome is not finite."""
        fragment, window, head = self._fragment, self._window, self._head
        assert fragment is not None and window is not None and head is not None  # noqa: S101, PT018
        began = self._clock.now()
        await self._refuse_overdue(decision.overdue, "the upload did not end in time")
        deltas = [self._intake.deltas[offer.entry_id] for offer in decision.contributions]
        room = await self._folding.room(deltas)
        outer_momentum = fragment.outer(deltas)[1]
        room.gather(outer_momentum, orthogonalises(self._layout, self._spec.sync, outer_momentum))

        async def merging() -> Merged:
            merged: Merged = await self._offload(fragment.merge, deltas, head.merged, room)
            if self._recorder is not None and merged.finite:
                await self._offload(self._recorder.merge, fragment, deltas, merged)
            return merged

        merged, published = await self._staging.stage(head, room, not outer_momentum, merging())
        if not merged.finite:
            return await self._not_finite(window)
        now = self._clock.now()
        opened, quorum, fixed = (
            t if t is not None else began for t in (window.opened_at, window.quorum_at, window.fixed_at)
        )
        record = Committed(
            fragment=self._p,
            version=merged.version,
            digest=merged.digest,
            base_digest=fragment.digest,
            contributions=merged.contributions,
            reason=decision.reason[:500],
            norm=merged.norm,
            quorum_s=quorum - opened,
            grace_s=fixed - quorum,
            upload_s=began - fixed,
            merge_s=now - began,
            syncer=self._syncer,
            unix_s=self._clock.unix(),
        )
        self._merges.took(record.merge_s)
        offers = decision.contributions
        commit = Commit(
            nonce=self._nonce,
            expected=(fragment.version, fragment.digest),
            version=merged.version,
            digest=merged.digest,
            payload=published.payload,
            rest=published.rest,
            momentum=published.momentum,
            updates=published.updates,
            behind=published.behind,
            window=IDLE_VIEW.model_copy(update={"merge_s": self._merges.merge_s}),
            merged=merged.merged,
            record=record,
            entries=tuple(o.entry_id for o in offers),
            delta_payloads=tuple(self._key(o) for o in offers),
            merged_tokens=sum(o.header.tokens for o in offers),
            replaced_ttl_s=REPLACED_TTL_S,
            retired=self._staging.retire(head, published),
        )
        await self._bus.commit(commit)
        self._grace.observe_quorum(record.quorum_s)
        self._grace.observe_sync(self._clock.now() - fixed)
        self._metrics.merged(record)
        self._log.info(
            "fragment_merged",
            version=merged.version,
            learners=[c.learner for c in merged.contributions],
            tokens=commit.merged_tokens,
            reason=decision.reason,
            norm=round(merged.norm, 5),
            **{name: round(getattr(record, name), 3) for name in ("quorum_s", "grace_s", "upload_s", "merge_s")},
        )
        fragment.advance(merged)
        self._not_finite_times = 0
        await self._next_window(window, commit, head)
        return []

    async def _not_finite(self, window: Window) -> list[Failed]:
        """The version stays, and learners are asked for other deltas; less and less often if it happens again."""
        gone = window.not_merged()
        detail = f"merged with it, fragment {self._p} would not be finite: version {window.version} is kept"
        pause_s = min(2.0 ** min(self._not_finite_times, 5), NOT_FINITE_PAUSE_S)
        self._not_finite_times += 1
        self._log.error("merge_not_finite", learners=[o.header.learner for o in gone], detail=detail, pause_s=pause_s)
        await pause(self.wake, lambda: self._serving, self._clock, pause_s)
        return [(offer, RefusalReason.NON_FINITE, detail) for offer in gone]

    async def _next_window(self, window: Window, commit: Commit, head: Head) -> None:
        """The head moved: a new window, into which late offers are replayed."""
        self._intake.forget(commit.entries)
        self._head = head_after(head, commit)
        self._view = commit.window
        self._window = self._new_window(self._head)
        self._refusing.new_window()
        for offer in window.late:
            await self._offered(Offered(offer.entry_id, offer.header))
