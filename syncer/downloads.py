"""Input of one fragment (asyncio): headers are read as they arrive, payloads are downloaded, timed and judged.

`session` offers the headers to the window, says which payloads to download, and takes the outcomes; nothing here
decides about a window.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from diloco.pipeline.bus.commits import MAX_HEADERS
from diloco.pipeline.bus.ports import START, Clock, Offered, Offers, PayloadStore
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.ema import Ema
from diloco.pipeline.errors import BadPayload, BusError
from diloco.pipeline.messages.fragment import RefusalReason
from diloco.pipeline.payload.codec import TRAITS, PayloadReader
from diloco.pipeline.transfer.payloads import Offload, arriving
from diloco.pipeline.waiting import cancel
from diloco.syncer.admission import TIMEOUT_FACTOR, Offer, UploadProgress
from diloco.syncer.grace import DECAY
from diloco.syncer.merging.fragment import Delta, FragmentState
from diloco.syncer.merging.merge import DeltaNorms
from diloco.syncer.times import TIMES

# A sound delta, or the reason and detail of its refusal.
Outcome = Delta | tuple[RefusalReason, str]

# Bound of the headers that were read but not handled yet; reading waits while there are as many.
MAX_ARRIVED = 1024
# Headers handled before the window decides again, so that a flood cannot keep it from deciding.
MAX_AT_ONCE = 256


# The upload deadline is this many times the smoothed upload time.
UPLOAD_FACTOR = 4.0


class Arrivals:
    """Headers read ahead of the window, from the start of the streams, which hold all pending deltas."""

    def __init__(self, bus: Offers, fragment: int, wake: asyncio.Event) -> None:
        """Begin to read; `wake` is set whenever a header has come, and once reading has ended."""
        self._bus, self._p, self._wake = bus, fragment, wake
        self._arrived: asyncio.Queue[Offered] = asyncio.Queue(MAX_ARRIVED)
        self._waiting, self._looked = Counter[str](), dict[str, str]()
        """How many headers of each learner were read but not handled, and the id of the last handled one."""
        self._flooding, self._cut = dict[str, None](), asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: wake.set())

    @property
    def empty(self) -> bool:
        """True if all headers that were read have been handled."""
        return self._arrived.empty()

    def some(self) -> Iterator[Offered]:
        """Yield the oldest unhandled headers, at most `MAX_AT_ONCE`."""
        for _ in range(min(self._arrived.qsize(), MAX_AT_ONCE)):
            entry = self._arrived.get_nowait()
            learner, self._looked[learner] = parse_offer_id(entry.entry_id)
            self._waiting[learner] -= 1
            yield entry

    def flooding(self) -> Iterator[str]:
        """Yield the learners that have more than `MAX_HEADERS` headers waiting.

        The caller must cut each learner's stream before it takes the next one from this iterator. Headers of such a
        learner that were read are dropped, since handling each would keep the other learners waiting. Those that
        remain on the stream after the cut are read again.
        """
        for learner in self._flooding:
            kept = [entry for _ in range(self._arrived.qsize()) if _of(entry := self._arrived.get_nowait()) != learner]
            for entry in kept:
                self._arrived.put_nowait(entry)
            self._waiting[learner] = 0
            yield learner
        self._flooding = {}
        self._cut.set()

    def check(self) -> None:
        """Raise what ended the reader, if it has ended.

        Raises:
            BusError: the bus failed. Headers that came before an outage may be lost, so the streams must be read again.
        """
        if self._reader.done():
            self._reader.result()

    async def close(self) -> None:
        """Stop reading."""
        await cancel(self._reader)

    async def _read(self) -> None:
        after: dict[str, str] = {}
        while True:
            entries = await self._bus.read_offers(self._p, after, BUS_TIMES.block_s, MAX_HEADERS + 1)
            self._waiting.update(found := [_of(entry) for entry in entries])
            flooding = dict.fromkeys(learner for learner in found if self._waiting[learner] > MAX_HEADERS)
            if flooding:
                self._cut.clear()
                self._flooding = flooding
                self._wake.set()
            for entry in entries:
                learner, after_id = parse_offer_id(entry.entry_id)
                if learner not in flooding:
                    after[learner] = after_id
                    self._wake.set()  # before `put` too, which blocks while the queue is full and nobody empties it
                    await self._arrived.put(entry)
                    self._wake.set()
            if flooding:
                await self._cut.wait()
                after |= {learner: self._looked.get(learner, START) for learner in flooding}
                await asyncio.sleep(TIMES.flooded_s)


def _of(entry: Offered) -> str:
    """Return the learner on whose stream an entry is."""
    return parse_offer_id(entry.entry_id)[0]


class UploadEstimator:
    """Estimate of one fragment's upload time: how long the uploads of a window's fixed set may take."""

    def __init__(self) -> None:
        self._upload = Ema(DECAY)

    @property
    def upload_s(self) -> float:
        """Upload deadline, s: how long the uploads of a fixed set may take."""
        measured = self._upload.value
        return TIMES.first_upload_s if measured is None else max(TIMES.min_upload_s, UPLOAD_FACTOR * measured)

    def observe(self, seconds: float) -> bool:
        """Take the duration of an upload that has ended; return whether it was within the deadline."""
        in_time = seconds <= self.upload_s
        self._upload.observe(seconds)
        return in_time

    def timed_out(self, waited_s: list[float]) -> None:
        """Record how long (s) uploads were awaited before they timed out.

        They must lengthen the deadline: on a network that has become slower, no upload would ever be in time otherwise.
        """
        most = TIMEOUT_FACTOR * self.upload_s / UPLOAD_FACTOR
        for seconds in waited_s:
            self._upload.observe(min(seconds, most))


@dataclass(slots=True)
class _Download:
    """One delta, from the start of its download until it is forgotten."""

    began_s: float
    heard_s: float
    """When a chunk last came or the bus last failed; infinite once all has come."""
    came_s: float = -math.inf
    """When the last chunk came."""
    slow: bool = False
    """True if it took longer than the deadline."""
    task: asyncio.Task[None] | None = None
    """None once `ended` has yielded the outcome."""


class Downloads:
    """The downloads in flight, and the sound deltas that have arrived."""

    def __init__(
        self,
        bus: PayloadStore,
        clock: Clock,
        fragment: FragmentState,
        wake: asyncio.Event,
        offload: Offload,
        uploads: UploadEstimator,
        progress: UploadProgress,
    ) -> None:
        """Begin with no downloads; `wake` is set whenever one ends. `progress` is shared by all fragments."""
        self._bus, self._clock, self._fragment = bus, clock, fragment
        self._wake, self._offload, self._uploads, self._progress = wake, offload, uploads, progress
        self._known: dict[str, _Download] = {}
        """By header entry."""
        self.deltas: dict[str, Delta] = {}
        """Header entry -> sound delta."""
        self.outcomes: deque[tuple[Offer, Outcome]] = deque()

    def start(self, offers: Iterable[Offer]) -> None:
        """Begin the downloads that have not begun; report deltas again that arrived for an earlier window."""
        for offer in offers:
            if offer.entry_id in self.deltas:
                self.outcomes.append((offer, self.deltas[offer.entry_id]))
                self._wake.set()
            elif (known := self._known.get(offer.entry_id)) is None or known.task is None:
                self._known[offer.entry_id] = new = _Download(self._clock.now(), self._clock.now())
                new.task = asyncio.create_task(self._download(offer, new))

    def ended(self) -> Iterator[tuple[Offer, Outcome]]:
        """Yield the downloads that have ended, oldest first. A sound delta stays in `deltas` until it is forgotten."""
        while self.outcomes:
            offer, outcome = self.outcomes.popleft()
            if (known := self._known.get(offer.entry_id)) is None:
                continue  # it was refused meanwhile
            known.task = None
            if isinstance(outcome, Delta):
                self.deltas[offer.entry_id] = outcome
            yield offer, outcome

    async def as_merged(self, offers: Iterable[Offer]) -> list[Delta]:
        """Return the offers' sound deltas. Stale ones are rebased first, once each, off the event loop."""
        found = []
        for offer in offers:
            delta = self.deltas[offer.entry_id]
            if self._fragment.rebases(delta):
                delta = self.deltas[offer.entry_id] = await self._offload(self._fragment.rebased, delta)
            found.append(delta)
        return found

    def timed_out(self, entries: Iterable[str]) -> None:
        """Lengthen the upload deadline by those of these uploads that are still in flight; all have missed it."""
        now, known = self._clock.now(), (self._known.get(entry_id) for entry_id in entries)
        self._uploads.timed_out([now - one.began_s for one in known if one is not None and one.task is not None])

    def note_complete(self, offer: Offer) -> None:
        """Note that a payload is whole on the bus, which counts like the arrival of a chunk."""
        if known := self._known.get(offer.entry_id):
            known.heard_s = self._clock.now()

    def last_progress_s(self, offer: Offer) -> float:
        """Return when the last chunk of a payload came or the bus last failed; infinite once all has arrived."""
        known = self._known.get(offer.entry_id)
        return math.inf if known is None else known.heard_s

    def came_in_time(self, offer: Offer) -> bool:
        """Return whether a completed upload was within the deadline."""
        known = self._known.get(offer.entry_id)
        return known is None or not known.slow

    def arriving(self, offers: Iterable[Offer]) -> frozenset[str]:
        """Return the entries of those incomplete uploads that make progress, or are queued behind ones that do."""
        now, upload_s = self._clock.now(), self._uploads.upload_s
        came = {entry_id: known.came_s for entry_id, known in self._known.items()}
        return frozenset(
            one.entry_id
            for one in offers
            if self._progress.is_progressing(one.header, came.get(one.entry_id, -math.inf), now, upload_s)
        )

    def forget(self, entries: Iterable[str]) -> None:
        """Cancel and drop these deltas, which were merged or refused."""
        for entry_id in entries:
            if (known := self._known.pop(entry_id, None)) and (task := known.task):
                known.task = None  # a cancelled task keeps its frame, and with it `known`: a cycle that keeps the delta
                task.cancel()
            self.deltas.pop(entry_id, None)

    async def close(self) -> None:
        """End all downloads, and release all deltas."""
        tasks = [known.task for known in self._known.values() if known.task]
        self.forget(list(self._known))
        self.outcomes.clear()
        await cancel(*tasks)

    async def _download(self, offer: Offer, known: _Download) -> None:
        h, layout, sync = offer.header, self._fragment.layout, self._fragment.sync
        key = self._bus.keys.delta_payload(h.fragment, h.learner, h.incarnation, h.serial)
        outcome: Outcome
        while True:
            norms, reader = DeltaNorms(layout), PayloadReader(layout.elements, sync.codec, sync.chunk_bytes)
            try:
                async for chunks in arriving(self._bus, key, reader):
                    # If decoding is quick, it and the sum are cheaper here, with the chunk still in the CPU cache,
                    # than in another thread.
                    if TRAITS[sync.codec].quick:
                        feed(reader, norms, chunks)
                    else:
                        await self._offload(feed, reader, norms, chunks)
                    known.heard_s = known.came_s = now = self._clock.now()
                    self._progress.chunk_arrived(h, now)
                known.heard_s = math.inf
                outcome = await self._offload(self._fragment.judge, offer, reader.vector(), norms.norms())
                known.slow = not self._uploads.observe(self._clock.now() - known.began_s)
                break
            except BadPayload as error:
                outcome = RefusalReason.BAD_PAYLOAD, str(error)
                break
            except BusError:
                known.heard_s = self._clock.now()
                await asyncio.sleep(TIMES.download_retry_s)  # until the bus answers, or this is cancelled
            except Exception as error:  # a bug here must not block the window, so only this delta is refused
                outcome = RefusalReason.BAD_PAYLOAD, f"{type(error).__name__}: {error}"
                structlog.get_logger().error("delta_not_judged", learner=h.learner, fragment=h.fragment, exc_info=error)
                break
        self.outcomes.append((offer, outcome))
        self._wake.set()


def feed(reader: PayloadReader, norms: DeltaNorms, chunks: Sequence[bytes | memoryview]) -> None:
    """Decode the chunks that have come of a delta into its array, and add them to its norms."""
    for chunk in chunks:
        reader.feed(chunk)
        norms.advance(reader.so_far())
