"""A learner's deltas on their way: headers first, then payloads, while they are encoded. asyncio.

Of a delta that renews another one the payload goes first: until it is whole, the one before it is there. So a learner
that dies in between has lost the work since that one, and no window waits for it.

Invariants: a report with a learner's tokens is on the bus before the header that carries them; memory is bounded, since
whoever queues keeps to a part of the model at a time (`Rounds.publications`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from diloco.pipeline.errors import BadMessage, BusError
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.payload import codec
from diloco.pipeline.retry import Outages, Retries
from diloco.workers.exchange.carrier import Carrier, delta_key, on_all_lanes
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.reporting import Reporting
from diloco.workers.rounds import Publication

Values = Any
"""A fragment's values as they were, for the carrier; `OwnCarrier`'s: gives its vector (elements,), of the encoder's
kind, to be overwritten, and may wait for a device."""

RENEWED_TTL_S = 10.0
"""One that was renewed is; who is reading it still can end."""


class Publishing:
    """The deltas of one learner that are not on the bus yet."""

    def __init__(
        self,
        member: Member,
        reporting: Reporting,
        latest: Mapping[int, tuple[int, bytes]],
        carrier: Carrier,
    ) -> None:
        """latest: fragment -> (version, digest) last pulled."""
        self._member = member
        self._syncs = [fragment.sync(member.spec.sync) for fragment in member.layout.fragments]
        self._reporting, self._latest, self._carrier = reporting, latest, carrier
        self.newest: dict[int, tuple[int, int]] = {}
        """Fragment -> (base version, attempt) of its last delta."""
        self._offered: dict[int, tuple[int, str]] = {}
        """Fragment -> (serial, entry) of its last header."""
        self._headers: dict[tuple[int, int, bytes], tuple[Publication, Values]] = {}
        """Headers not sent yet: of each fragment and base the newest, since that holds all that older ones do."""
        self._header_wakes = [asyncio.Event() for _ in range(carrier.lanes)]
        self._uploads: list[asyncio.Queue[tuple[Publication, Values]]] = [asyncio.Queue() for _ in range(carrier.lanes)]
        self.unsent = 0
        """Deltas queued and not uploaded."""
        self.all_sent = asyncio.Event()
        self.all_sent.set()

    def queue(self, publications: Iterable[tuple[Publication, Values]]) -> None:
        """Have deltas published; older ones on the same base, of which nothing is sent yet, are not any more."""
        for item in publications:
            base = item[0].base
            self.newest[base.fragment] = (base.version, item[0].attempt)
            key = base.fragment, base.version, base.digest
            self.unsent += key not in self._headers
            self._headers[key] = item
            self.all_sent.clear()
            self._header_wakes[base.fragment % self._carrier.lanes].set()

    async def offer(self) -> None:
        """Send headers as they come, on all lanes; then it is the payload's turn."""
        await on_all_lanes(self._offer_on, self._carrier.lanes)

    async def _offer_on(self, lane: int) -> None:
        lanes, wake, clock = self._carrier.lanes, self._header_wakes[lane], self._member.clock
        retries = Retries(Outages.BACKOFF)
        while True:
            wake.clear()
            mine = [key for key in self._headers if key[0] % lanes == lane]
            key = next((key for key in mine if retries.choose([key[0]], clock.now())[0] is not None), None)
            if key is not None:
                retries.tried(key[0], await self._offer_one(key, self._headers.pop(key)), clock.now())
                continue
            _, wait_s = retries.choose({p for p, *_ in mine}, clock.now())
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await wake.wait()

    async def _offer_one(self, key: tuple[int, int, bytes], item: tuple[Publication, Values]) -> bool:
        """A call of its own, as `_send_one`; whether it is for its payload now.

        If not, a key has what no party writes: it is kept for later, unless a newer one is there, and the other
        fragments go on.
        """
        try:
            if not item[0].renews:
                await self._member.outages.retry(self._send_header, item[0])
        except BadMessage as error:
            self._member.outages.told(error, fragment=key[0])
            self.unsent -= key in self._headers
            self._headers.setdefault(key, item)
            return False
        self._uploads[key[0] % self._carrier.lanes].put_nowait(item)
        return True

    async def _send_header(self, publication: Publication) -> None:
        member, base = self._member, publication.base
        sync, elements = self._syncs[base.fragment], member.layout.fragments[base.fragment].elements
        report = await self._reporting.write()
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
        renews = entry if last == publication.renews else ""
        self._offered[base.fragment] = publication.serial, await member.bus.offer(header, renews)

    async def upload(self) -> None:
        """Upload the payloads of headers that were sent, on all lanes."""
        await on_all_lanes(self._upload_on, self._carrier.lanes)

    async def _upload_on(self, lane: int) -> None:
        while True:
            await self._send_one(*await self._uploads[lane].get())
            self.unsent -= 1
            if not self.unsent:
                self.all_sent.set()

    async def _send_one(self, publication: Publication, values: Values) -> None:
        """A call of its own, so that nothing of it is held while the next one is waited for."""
        try:
            await self._upload_one(publication, values)
        finally:
            released, p = self._member.shared.released, publication.base.fragment
            released[p] = max(publication.serial, released.get(p, 0))

    async def _upload_one(self, publication: Publication, values: Values) -> None:
        member, p, renews = self._member, publication.base.fragment, publication.renews
        whole = await self._carrier.upload(publication, values, partial(self._is_of_use, publication))
        takes_its_place = renews and not self._is_outdone(publication)
        if takes_its_place:
            try:
                await member.outages.retry(self._send_header, publication)
            except BadMessage as error:  # the one before it stays, and the next one holds all that this one does
                member.outages.told(error, fragment=p)
                return
        if whole or self._is_of_use(publication):  # refused before it was whole, perhaps without asking for another
            member.shared.uploaded[p] = publication.serial
        if whole and takes_its_place:
            with suppress(BusError):  # else it expires later
                await member.bus.expire_soon(delta_key(member, p, renews), RENEWED_TTL_S)

    def _is_of_use(self, publication: Publication) -> bool:
        """Whether the syncer can still merge it: not too stale, and no later attempt was made on its base."""
        base, (latest, _) = publication.base.version, self._latest[publication.base.fragment]
        return latest - 1 <= base <= latest and not self._is_outdone(publication)

    def _is_outdone(self, publication: Publication) -> bool:
        base, attempt = self.newest[publication.base.fragment]
        return base == publication.base.version and attempt > publication.attempt
