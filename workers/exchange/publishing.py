"""Publish a learner's deltas: headers first, then payloads while they are encoded. Runs on asyncio.

A delta that renews an earlier one sends its payload first: until that payload is complete, the earlier delta stays
valid. So a learner that dies in between loses the work since the earlier delta, and no window waits for a payload that
never comes.

Invariants: a report that contains a learner's tokens is on the bus before the header that carries these tokens. Memory
is bounded, because the training side queues only part of the model at a time (`Rounds.publications`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from diloco.pipeline.errors import BadMessage, BusError
from diloco.pipeline.messages.fragment import DeltaHeader
from diloco.pipeline.payload import codec
from diloco.pipeline.retry import Retries
from diloco.workers.exchange.carrier import Carrier, delta_key, on_all_lanes
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.reporting import Reporting
from diloco.workers.rounds import Publication
from diloco.workers.times import TIMES

S = TypeVar("S")


class Publishing(Generic[S]):
    """One learner's deltas that are not on the bus yet. S: the carrier's form of a fragment's snapshot."""

    def __init__(
        self,
        member: Member,
        reporting: Reporting,
        latest: Mapping[int, tuple[int, bytes]],
        carrier: Carrier[S],
    ) -> None:
        """latest: fragment -> (version, digest) last pulled; `Pulling` keeps it up to date."""
        self._member = member
        self._syncs = [fragment.sync(member.spec.sync) for fragment in member.layout.fragments]
        self._reporting, self._latest, self._carrier = reporting, latest, carrier
        self.newest: dict[int, tuple[int, int]] = {}  # fragment -> (base version, attempt) of its last delta
        self._offered: dict[int, tuple[int, str]] = {}  # fragment -> (serial, entry id) of its last header
        # Deltas whose header is not sent yet, by (fragment, base version, base digest). Only the newest one is kept for
        # each key, since it contains all the training of the older ones.
        self._headers: dict[tuple[int, int, bytes], tuple[Publication, S]] = {}
        self._header_wakes = [asyncio.Event() for _ in range(carrier.lanes)]
        self._uploads: list[asyncio.Queue[tuple[Publication, S]]] = [asyncio.Queue() for _ in range(carrier.lanes)]
        self.unsent = 0  # deltas that are queued and not uploaded
        self.all_sent = asyncio.Event()
        self.all_sent.set()

    def queue(self, publications: Iterable[tuple[Publication, S]], adopted: bool = False) -> None:
        """Queue deltas for publication; each replaces a queued one on the same base of which nothing was sent yet.

        adopted: the learner has adopted fragments, which others should learn soon.
        """
        for item in publications:
            base = item[0].base
            self.newest[base.fragment] = (base.version, item[0].attempt)
            key = base.fragment, base.version, base.digest
            self.unsent += key not in self._headers
            self._headers[key] = item
            self.all_sent.clear()
            self._header_wakes[base.fragment % self._carrier.lanes].set()
        if adopted:
            self._reporting.soon()

    async def offer(self) -> None:
        """Send queued headers on all lanes, and queue each one's payload for `upload`; runs until cancelled."""
        await on_all_lanes(self._offer_on, self._carrier.lanes)

    async def _offer_on(self, lane: int) -> None:
        lanes, wake, clock = self._carrier.lanes, self._header_wakes[lane], self._member.clock
        retries = Retries(TIMES.retry)
        while True:
            wake.clear()  # before looking: a delta queued after the look sets it again, so the wait below ends at once
            mine = [key for key in self._headers if key[0] % lanes == lane]
            now = clock.now()
            key = next((key for key in mine if retries.choose([key[0]], now)[0] is not None), None)
            if key is not None:
                retries.tried(key[0], await self._offer_one(key, self._headers.pop(key)), clock.now())
                continue
            _, wait_s = retries.choose({p for p, *_ in mine}, now)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await wake.wait()

    async def _offer_one(self, key: tuple[int, int, bytes], item: tuple[Publication, S]) -> bool:
        """Send one header; return whether the delta was passed on to `upload`.

        This is a function of its own for the same reason as `_send_one`. It returns False if a key on the bus holds
        something that no party writes. The delta is then kept for later, unless a newer one was queued, and the other
        fragments continue.
        """
        try:
            if not item[0].renews:  # a renewal's header follows its payload (`_upload_one`)
                await self._member.outages.retry(self._send_header, item[0])
        except BadMessage as error:
            self._member.outages.log_error(error, fragment=key[0])
            self.unsent -= key in self._headers  # a newer delta may have taken the key during the await, and is counted
            self._headers.setdefault(key, item)
            return False
        self._uploads[key[0] % self._carrier.lanes].put_nowait(item)
        return True

    async def _send_header(self, publication: Publication) -> None:
        member, base = self._member, publication.base
        sync, elements = self._syncs[base.fragment], member.layout.fragments[base.fragment].elements
        report = await self._reporting.write()  # first: the syncer must know of the tokens before a header claims them
        header = DeltaHeader(
            learner=member.learner,
            incarnation=member.incarnation,
            fragment=base.fragment,
            base_version=base.version,
            base_digest=base.digest,
            attempt=publication.attempt,
            serial=publication.serial,
            steps=publication.steps,
            tokens=publication.tokens,
            due=publication.due,
            codec=sync.codec,
            chunks=codec.chunk_count(elements, sync.codec, sync.chunk_bytes),
            layout=member.layout.digest,
            step_s=report.step_s,
            pull_s=report.pull_s,
        )
        last, entry = self._offered.get(base.fragment, (0, ""))
        renews = entry if last == publication.renews else ""  # only if that delta's header is still the last one sent
        self._offered[base.fragment] = publication.serial, await member.bus.offer(header, renews)

    async def upload(self) -> None:
        """Upload the payloads of deltas that `offer` has passed on, on all lanes; runs until cancelled."""
        await on_all_lanes(self._upload_on, self._carrier.lanes)

    async def _upload_on(self, lane: int) -> None:
        while True:
            await self._send_one(*await self._uploads[lane].get())
            self.unsent -= 1
            if not self.unsent:
                self.all_sent.set()

    async def _send_one(self, publication: Publication, snapshot: S) -> None:
        """Upload one delta, then report its snapshot as released.

        This is a function of its own, so that its local variables keep no snapshot alive while the lane waits for the
        next one.
        """
        try:
            await self._upload_one(publication, snapshot)
        finally:
            released, p = self._member.shared.released, publication.base.fragment
            released[p] = max(publication.serial, released.get(p, 0))  # even on cancellation: it releases the memory

    async def _upload_one(self, publication: Publication, snapshot: S) -> None:
        member, p, renews = self._member, publication.base.fragment, publication.renews
        whole = await self._carrier.upload(publication, snapshot, partial(self._can_still_merge, publication))
        takes_its_place = renews and not self._is_superseded(publication)
        # The header is sent even if the payload is not whole, because it came too late or the bus lost it: these tokens
        # count as published, so the syncer has to refuse them, or the ledger would miss them.
        if takes_its_place:
            try:
                await member.outages.retry(self._send_header, publication)
            except BadMessage as error:  # the renewed delta stays; the next one will contain this one's training too
                member.outages.log_error(error, fragment=p)
                takes_its_place = False
        # A delta of use that is not whole was refused early, perhaps without a new attempt being asked for. It counts
        # as uploaded, since otherwise it would never be renewed.
        if whole or self._can_still_merge(publication):
            member.shared.uploaded[p] = publication.serial
        if whole and takes_its_place:
            with suppress(BusError):  # without this call the old payload expires by its own, longer TTL
                await member.bus.expire_soon(delta_key(member, p, renews), TIMES.renewed_ttl_s)

    def _can_still_merge(self, publication: Publication) -> bool:
        """Return whether the syncer can still merge it: at most one version stale, and no later attempt on its base."""
        base, (latest, _) = publication.base.version, self._latest[publication.base.fragment]
        return latest - 1 <= base <= latest and not self._is_superseded(publication)

    def _is_superseded(self, publication: Publication) -> bool:
        """Return whether a later attempt on the same base was queued."""
        base, attempt = self.newest[publication.base.fragment]
        return base == publication.base.version and attempt > publication.attempt
