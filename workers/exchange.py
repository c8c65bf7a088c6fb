"""All of a learner's network work: joining, following heads, publishing deltas, reporting, claiming shards.

Coroutines over the bus, no torch: `learner` gives them a thread of their own, tests and simulations run them in
virtual time. The training side never waits for anything here. The two sides meet in `Shared`, whose fields each
have one writer, and in `stepped`, which only queues.

Invariants: a report with a learner's tokens is on the bus before the header that carries them; memory is
bounded by the model's size (one delta a fragment and base, one adoption a fragment); an outage of the bus is
retried for as long as it lasts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from pipeline import codec
from pipeline.buffers import pooled
from pipeline.chunks import Payload
from pipeline.delta_messages import DeltaHeader
from pipeline.errors import (
    BadPayload,
    BusError,
    BusUnavailable,
    DilocoError,
    PayloadIncomplete,
    PeerError,
    SpecMismatch,
    outage_event,
)
from pipeline.fragments import Layout
from pipeline.global_formats import FORMATS
from pipeline.globals import Held, pull_shown
from pipeline.head_messages import Head
from pipeline.payloads import push_growing
from pipeline.ports import Bus, Clock
from pipeline.run_messages import Event, LearnerReport
from pipeline.spec_messages import Spec
from pipeline.tape_messages import Committed, TapeRecord, WindowChanged

from .agreement import Agreement, compare
from .claims import ShardClaims
from .encoding import Encoder, OnHost
from .feedback import ErrorFeedback
from .identity import Identity
from .joining import look_for_syncers, meanwhile, say_why
from .retries import Retries
from .rounds import Base, OpenWindow, Publication
from .shared import Shared
from .version_0 import CLAIM_TTL_S, Version0

Float32 = npt.NDArray[np.float32]
Offload = Callable[..., Awaitable[Any]]
Values = Callable[[], Any]

REPORT_S = 0.3
"""Time between reports while nothing else calls for one."""
LEAST_REPORT_S = 0.05
TAPE_BLOCK_S = 1.0
BACKOFF_S = (0.1, 2.0)
DELTA_TTL_S = 600.0
"""A delta that nobody merged or refused is gone after this."""
POLL_S = 0.05
SLOW_PULL_S = 60.0
ABANDON_S = 2.0
LOOK_AT_ALL_S = 5.0
"""Time between two looks at all heads, whatever the tape says."""
LOST_HEADS_S = 15.0
"""Heads that are gone for so long are not put back by a syncer: learners begin again with what they have adopted."""


class Exchange:
    """One learner's connection to its run, from joining to leaving."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        learner: str,
        incarnation: str,
        report: Callable[[bool], LearnerReport],
        *,
        offload: Offload = asyncio.to_thread,
        encoder: Encoder | None = None,
    ) -> None:
        """report: called with `left` whenever a report is due; must not block. encoder: None: `OnHost`."""
        self._bus, self._clock, self._id, self._incarnation = bus, clock, learner, incarnation
        self._report_now, self._offload = report, offload
        self._log = structlog.get_logger().bind(learner=learner)
        self.shared = Shared()
        self._spec: Spec | None = None
        self._layout: Layout | None = None
        self._bases: dict[int, Base] = {}
        self._latest: dict[int, tuple[int, bytes]] = {}
        """(version, digest) last handed to the training side."""
        self._wanted: dict[int, Head] = {}
        self._looks = 0
        self._looked: dict[int, int] = {}
        """Number of the look by which each fragment's head was last known."""
        self._pull_wake, self._report_wake = asyncio.Event(), asyncio.Event()
        self._headers: dict[tuple[int, int, bytes], tuple[Publication, Values]] = {}
        """Headers not sent yet: of each fragment and base the newest, since that holds all that older ones do."""
        self._header_wake = asyncio.Event()
        self._uploads: asyncio.Queue[tuple[Publication, Values]] = asyncio.Queue()
        self._newest: dict[int, tuple[int, int]] = {}
        """(base version, attempt) of the last delta of each fragment."""
        self._unsent = 0
        self._left = False
        self._encoder: Encoder = encoder or OnHost()
        self._feedback = ErrorFeedback(learner, incarnation, self._encoder.grown)
        self._identity = Identity(bus, clock, learner, incarnation, self._retry)
        self._reports = self._outages = 0
        self._told_s = 0.0
        self._outage = False
        """A call failed; all heads must be read anew."""
        self._look_at_all_s = 0.0
        self._lost_since_s: float | None = None
        """Since when heads are missing that were there."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.claims = ShardClaims(bus, f"{learner}.{incarnation}", self.shared)

    # --- joining ----------------------------------------------------------------------------------------

    async def join(self, spec: Spec, layout: Layout, initial: Callable[[int], Float32]) -> None:
        """Agree on the spec and fetch every fragment; upload version 0 if nobody has. Learners wait here only.

        Args:
            spec: this learner's proposal.
            layout: of its model.
            initial: fragment -> flat float32 vector (elements,) of the initial parameters.

        Raises:
            SpecMismatch: the run was set up otherwise.
            IdTaken: another process is this learner.
        """
        held = codec.decode(Spec, await self._retry(self._bus.propose_spec, codec.encode(spec)))
        compare(spec, held)
        if spec.frozen and held.frozen is None:
            self._log.warning("frozen_not_compared", detail="the run lets frozen parameters differ (same_frozen=False)")
        self._spec, self._layout = held, layout
        self._agreement = agreement = Agreement(self._bus, self._clock, self._id, held)
        self._version_0 = Version0(self._bus, self._id, held.sync.chunk_bytes, layout, agreement, self._retry)
        self._bus.use_groups(held.sync.groups)
        fragments = range(len(layout.fragments))
        await self._identity.take(self._tell)
        async with meanwhile(self._forever(self._report), say_why(self._bus, fragments, CLAIM_TTL_S, self._log)):
            await self._version_0.begin(self._incarnation, initial, trained=False)
            while missing := [p for p in fragments if p not in self._latest]:
                for head in await self._retry(self._bus.read_heads, missing):
                    if head is not None and not await self._retry(self._pull, head):
                        await self._retry(self._tell)  # its owner sees that there is somebody who cannot
                        await asyncio.sleep(POLL_S)
        joined = Event(name="learner_joined", who=self._id, detail=self._incarnation, unix_s=self._clock.unix())
        await self._retry(self._bus.add_event, joined)
        self._outages = 0  # those until here lost nothing: nothing was published
        self._log.info("learner_joined", incarnation=self._incarnation, versions=[v for v, _ in self._latest.values()])

    async def abandon(self) -> None:
        """Joining came to nothing: nobody must wait for this learner. Instead of `leave`, with nothing running."""
        if self._reports:
            self._left = True
            with suppress(TimeoutError, DilocoError):
                async with asyncio.timeout(ABANDON_S):
                    await self._tell()

    # --- running ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled; ends early only by a bug."""
        async with asyncio.TaskGroup() as group:
            publishing = (self._offer, self._upload, self._report, self.claims.keep, self._agreement.keep_agreed)
            for work in (self._follow, self._pull_wanted, *publishing, self._look_for_syncers):
                group.create_task(self._forever(work))

    def stepped(self, publications: Iterable[tuple[Publication, Values]], adopted: bool) -> None:
        """An inner step is done: queue its deltas; if fragments were adopted, others learn of it soon.

        With each delta comes a function that gives the fragment's vector (elements,) as it was then, of the encoder's
        kind, to be overwritten; it may wait for a device.
        """
        for item in publications:
            base = item[0].base
            self._newest[base.fragment] = (base.version, item[0].attempt)
            key = base.fragment, base.version, base.digest
            self._unsent += key not in self._headers
            self._headers[key] = item
            self._idle.clear()
            self._header_wake.set()
        if adopted:
            self._report_wake.set()

    async def leave(self, deadline_s: float) -> bool:
        """Flush what is queued, give back what is unread, say goodbye; True if all of it was in time."""
        flushed = True
        self.claims.leave()
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
                await self.claims.returned.wait()
        except TimeoutError:
            flushed = False
        self._left = flushed  # what is reported from now on must not take it back
        with suppress(TimeoutError, BusError):
            async with asyncio.timeout(max(2.0, deadline_s / 4)):
                await self._tell()
                left = Event(name="learner_left", who=self._id, detail=self._incarnation, unix_s=self._clock.unix())
                await self._bus.add_event(left)
        self._log.info("learner_left", unsent=self._unsent)
        return flushed

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        delay = BACKOFF_S[0]
        while True:
            began = self._clock.now()
            try:
                await work()
            except SpecMismatch:
                raise
            except (BusError, PeerError) as error:
                self._outage |= isinstance(error, BusUnavailable)
                self._outages += isinstance(error, BusUnavailable)
                if self._clock.now() - began > BACKOFF_S[1]:
                    delay = BACKOFF_S[0]
                self._log.warning(outage_event(error), task=work.__name__.strip("_"), error=str(error), retry_s=delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, BACKOFF_S[1])

    async def _retry(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        delay = BACKOFF_S[0]
        while True:
            try:
                return await call(*args)
            except BusError as error:
                self._outages += isinstance(error, BusUnavailable)
                self._log.warning(outage_event(error), error=str(error), retry_s=delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, BACKOFF_S[1])

    # --- following the heads ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """The tape wakes, the head decides; after any gap, all heads are read again."""
        outage, self._outage = self._outage, False
        cursors = await self._bus.tape_end()
        self._look_at_all_s = 0.0
        if outage:
            self.shared.republish = True  # what the bus acknowledged before may be lost with its last second
        while not self._outage:
            if self._clock.now() >= self._look_at_all_s:
                await self._look_at_all()
            entries = await self._bus.read_tape(cursors, TAPE_BLOCK_S)
            cursors |= {entry.group: entry.entry_id for entry in entries}
            for record in (entry.record for entry in entries):
                if isinstance(record, Committed):
                    # One that was put back: what was offered on it may be lost with its head.
                    if record.base_digest is None:
                        self.shared.republish = True
                    self._feedback.merged(record.fragment, record.contributions)
                    self._feedback.passed(record.fragment, record.version)
            told = {entry.record.fragment for entry in entries if not self._knows(entry.record)}
            if told:
                await self._look(sorted(told))

    def _knows(self, record: TapeRecord) -> bool:
        """Whether a record is of no news here: a first attempt on a base that this learner has published on.

        It asks for nothing that was not given, and the next record of the fragment is looked at anyway.
        """
        if not isinstance(record, WindowChanged) or record.attempt > 0:
            return False
        return self._newest.get(record.fragment, (-1, 0))[0] == record.version

    async def _look_at_all(self) -> None:
        """See what all heads say. Should some be gone for long, the run begins again with what was adopted of them."""
        now, lost = self._clock.now(), self._lost_since_s
        self._look_at_all_s = now + LOOK_AT_ALL_S
        if await self._look(range(len(self._fragments))):
            if lost is not None:
                self._log.info("heads_found", after_s=round(now - lost, 1))
                self._lost_since_s, self.shared.republish = None, True
            return
        self._look_at_all_s = now + TAPE_BLOCK_S
        if lost is None:
            self._lost_since_s = now
            detail = f"a syncer puts them back, or this learner uploads what it has adopted in {LOST_HEADS_S:g} s"
            self._log.warning("heads_lost", detail=detail)
        elif now - lost >= LOST_HEADS_S:
            nonce = f"{self._looks:04x}{self._incarnation}"[:32]  # a fresh one: other values than at first
            await self._version_0.begin(nonce, lambda p: self._encoder.read(self._bases[p].values), trained=True)
            self._look_at_all_s = now

    async def _look(self, fragments: Iterable[int]) -> bool:
        """See what the heads say; False if one is not there."""
        self._looks += 1
        number = self._looks
        heads = await self._bus.read_heads(list(fragments))
        for head in heads:
            if head is None or self._looked.get(head.fragment, 0) > number:
                continue  # a look that began later was answered first
            p, window = head.fragment, head.window
            self._looked[p] = number
            self._feedback.merged(p, head.merged)  # the tape told of it already, but for a gap
            if window.state in ("collecting", "grace"):
                member = self._id in window.members
                self.shared.windows[p] = OpenWindow(head.version, window.attempt, member)
            else:
                self.shared.windows.pop(p, None)
            if self._latest.get(p) != (head.version, head.digest):
                self._wanted[p] = head
                self._pull_wake.set()
            else:
                self._wanted.pop(p, None)
        return None not in heads

    async def _pull_wanted(self) -> None:
        retries = Retries(POLL_S, BACKOFF_S[1])
        while True:
            self._pull_wake.clear()
            p, wait_s = retries.choose(self._wanted, self._clock.now())
            if p is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._pull_wake.wait()
                continue
            head = self._wanted[p]
            pulled = await self._pull(head)
            wanted = self._wanted.get(p)
            if wanted is not None and (wanted.version, wanted.digest) == (head.version, head.digest):
                del self._wanted[p]  # also if it was looked at again meanwhile: adopting twice would cost training
            retries.tried(p, pulled, self._clock.now())
            if not pulled:
                await self._look([p])

    async def _pull(self, head: Head) -> bool:
        """Fetch a head's global and hand it over; False if it was replaced meanwhile."""
        assert self._spec is not None  # noqa: S101  # set by join
        p, elements = head.fragment, self._fragments[head.fragment].elements
        sync, held = self._spec.sync, None
        if FORMATS[sync.global_codec].follows and (base := self._bases.get(p)) is not None:
            held = Held(base.version, base.digest, await self._offload(self._encoder.read, base.values))
        try:
            pulled = await pull_shown(self._bus, head, elements, sync, self._offload, SLOW_PULL_S, held)
        except BadPayload as error:
            self._log.warning("pull_failed", fragment=p, version=head.version, error=str(error))
            return False
        values = await self._apart(elements, self._encoder.keep, pulled)
        if p in self._latest and head.version <= self._latest[p][0]:
            self._feedback.reset(p)
        self._latest[p] = (head.version, head.digest)
        self._bases[p] = self.shared.adoptions[p] = Base(p, head.version, head.digest, values)
        self._log.debug("fragment_pulled", fragment=p, version=head.version)
        return True

    @property
    def _fragments(self) -> Any:
        assert self._layout is not None  # noqa: S101  # set by join
        return self._layout.fragments

    # --- publishing ---------------------------------------------------------------------------------------

    async def _offer(self) -> None:
        while True:
            self._header_wake.clear()
            while self._headers:
                await self._offer_one(self._headers.pop(next(iter(self._headers))))
            await self._header_wake.wait()

    async def _offer_one(self, item: tuple[Publication, Values]) -> None:
        """A call of its own, as `_upload_one`."""
        await self._retry(self._send_header, item[0])
        self._uploads.put_nowait(item)

    async def _send_header(self, publication: Publication) -> None:
        assert self._spec is not None and self._layout is not None  # noqa: S101, PT018  # set by join
        sync, base, report = self._spec.sync, publication.base, await self._tell()
        header = DeltaHeader(
            learner=self._id,
            incarnation=self._incarnation,
            fragment=base.fragment,
            base_version=base.version,
            base_digest=base.digest,
            attempt=publication.attempt,
            serial=publication.serial,
            steps=publication.steps,
            tokens=publication.tokens,
            due=publication.due,
            codec=sync.codec,
            chunks=codec.chunk_count(self._fragments[base.fragment].elements, sync.codec, sync.chunk_bytes),
            layout=self._layout.digest,
            step_s=report.step_s,
        )
        await self._bus.offer(header)

    async def _upload(self) -> None:
        while True:
            await self._upload_one(*await self._uploads.get())
            self._unsent -= 1
            if not self._unsent:
                self._idle.set()

    async def _upload_one(self, publication: Publication, values: Values) -> None:
        """A call of its own, so that nothing of it is held while the next one is waited for."""
        assert self._spec is not None  # noqa: S101  # set by join
        if not self._wants(publication):
            return
        sync, base, loop = self._spec.sync, publication.base, asyncio.get_running_loop()
        wire, more = pooled(codec.payload_bytes(len(base.values), sync.codec)), asyncio.Event()
        payload = Payload(codec.as_bytes(wire), sync.chunk_bytes, partial(loop.call_soon_threadsafe, more.set))

        async def encode() -> None:
            residual = self._feedback.residual(base.fragment)
            given = base.values, values, sync.codec, residual, wire, payload.grow_to
            error = await self._apart(len(base.values), self._encoder.encode, *given)
            if error is not None:
                self._feedback.sent(base.fragment, (base.version, publication.tokens), residual, error)

        key = self._bus.keys.delta_payload(base.fragment, self._id, self._incarnation, publication.serial)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(encode())
                await self._push_while_wanted(publication, key, payload, more)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _apart(self, elements: int, work: Callable[..., Any], *args: Any) -> Any:
        """In another thread, unless that takes longer than the work itself."""
        return work(*args) if elements <= self._encoder.at_once else await self._offload(work, *args)

    def _wants(self, publication: Publication) -> bool:
        """Whether the syncer can still merge it: not too stale, and no later attempt was made on its base."""
        p, base = publication.base.fragment, publication.base.version
        newest_base, newest_attempt = self._newest[p]
        outdone = newest_base == base and newest_attempt > publication.attempt
        return self._latest[p][0] - 1 <= base <= self._latest[p][0] and not outdone

    async def _push_while_wanted(
        self, publication: Publication, key: str, payload: Payload, more: asyncio.Event
    ) -> None:
        assert self._spec is not None  # noqa: S101  # set by join
        delay, base = BACKOFF_S[0], publication.base
        while self._wants(publication):
            try:
                await push_growing(self._bus, key, payload, self._spec.sync.chunk_bytes, DELTA_TTL_S, more)
                self._log.debug("delta_published", fragment=base.fragment, base=base.version, tokens=publication.tokens)
                return
            except PayloadIncomplete:
                return  # what was there is gone: the syncer refused it meanwhile, or the bus lost it
            except BusError as error:
                self._outages += isinstance(error, BusUnavailable)
                self._log.warning(outage_event(error), error=str(error), retry_s=delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, BACKOFF_S[1])

    # --- reports ------------------------------------------------------------------------------------------

    async def _tell(self) -> LearnerReport:
        """Write a report, and learn the run's state by it."""
        self._report_wake.clear()
        self._told_s = self._clock.now()
        self._reports += 1
        report = self._report_now(self._left).model_copy(update={"number": self._reports, "outages": self._outages})
        self.shared.state = await self._identity.write(report)
        return report

    async def _report(self) -> None:
        saved: tuple[str, int] | None = None
        while True:
            position, began = self.shared.shard_position, self._clock.now()
            await self._tell()
            if position is not None and position != saved:
                await self.claims.save(position)
                saved = position
            while (rest_s := began + REPORT_S - self._clock.now()) > LEAST_REPORT_S:
                if not self._report_wake.is_set():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(rest_s):
                            await self._report_wake.wait()
                elif self._clock.now() - self._told_s >= LEAST_REPORT_S:
                    break
                else:  # a delta's own report may tell of it meanwhile
                    await asyncio.sleep(LEAST_REPORT_S)
            else:
                await asyncio.sleep(LEAST_REPORT_S)

    async def _look_for_syncers(self) -> None:
        await look_for_syncers(self._bus, self._log)
