"""Downloads of one fragment's deltas: gathers the chunks as they come, has each delta judged. asyncio.

`owner` says which offers to download and takes the outcomes; nothing here decides about a window.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from pipeline.codec import PayloadReader
from pipeline.errors import BadPayload, BusError
from pipeline.fragments import FragmentLayout
from pipeline.messages import RefusalReason, SyncSpec
from pipeline.payloads import follow
from pipeline.ports import Bus, Clock

from .fragment import Delta
from .grace import LEAST_UPLOAD_S, UploadEstimator
from .norms import DeltaNorms, Float64
from .watch import RunWatch
from .window import Offer, State, Window

Offload = Callable[..., Awaitable[Any]]
Outcome = Delta | tuple[RefusalReason, str]
"""A sound delta, or why it is refused."""
Failed = tuple[Offer, RefusalReason, str]
"""A delta that leaves the window, and why."""
Judge = Callable[[Offer, Any, Float64], Outcome]
"""As `FragmentState.judge`."""

RETRY_S = 0.2


class Intake:
    """The downloads in flight and the deltas that are here."""

    def __init__(
        self, bus: Bus, clock: Clock, layout: FragmentLayout, sync: SyncSpec, wake: asyncio.Event, offload: Offload
    ) -> None:
        self._bus, self._clock, self._layout, self._sync = bus, clock, layout, sync
        self._wake, self._offload = wake, offload
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._uploads = UploadEstimator()
        self.deltas: dict[str, Delta] = {}
        """Header entry -> sound delta."""
        self.outcomes: deque[tuple[Offer, Outcome]] = deque()

    @property
    def upload_s(self) -> float:
        """How long the uploads of a fixed set may take, from measured transfer times."""
        return self._uploads.upload_s

    @property
    def now(self) -> float:
        """By the clock of its times."""
        return self._clock.now()

    def start(self, offers: Iterable[Offer], judge: Judge) -> None:
        """Begin the downloads that have not begun yet; tell again of what is here already, for an earlier window."""
        for offer in offers:
            if offer.entry_id in self.deltas:
                self.outcomes.append((offer, self.deltas[offer.entry_id]))
                self._wake.set()
            elif offer.entry_id not in self._tasks:
                self._began[offer.entry_id] = self._heard[offer.entry_id] = self._clock.now()
                self._tasks[offer.entry_id] = asyncio.create_task(self._download(offer, judge))

    def taken(self) -> Iterator[tuple[Offer, Outcome]]:
        """Takes the outcomes, oldest first; a sound delta stays in `deltas`, unless it was forgotten meanwhile."""
        while self.outcomes:
            offer, outcome = self.outcomes.popleft()
            self._tasks.pop(offer.entry_id, None)
            if isinstance(outcome, Delta) and offer.entry_id in self._began:
                self.deltas[offer.entry_id] = outcome
            yield offer, outcome

    def timed_out(self, entries: Iterable[str]) -> None:
        """These did not end in time."""
        now = self._clock.now()
        self._uploads.timed_out([now - self._began[entry_id] for entry_id in entries if entry_id in self._tasks])

    def heard_at(self, offer: Offer) -> float:
        """When last something of a payload came, or the bus failed; infinite once all of it is here."""
        return self._heard.get(offer.entry_id, math.inf)

    def forget(self, entries: Iterable[str]) -> None:
        """These were merged or refused."""
        for entry_id in entries:
            if task := self._tasks.pop(entry_id, None):
                task.cancel()
            self._began.pop(entry_id, None)
            self._heard.pop(entry_id, None)
            self.deltas.pop(entry_id, None)

    async def close(self) -> None:
        """End all downloads and forget everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._began.clear()
        self._heard.clear()
        self.deltas.clear()
        self.outcomes.clear()

    async def _download(self, offer: Offer, judge: Judge) -> None:
        h, sync, began = offer.header, self._sync, self._clock.now()
        key = self._bus.keys.delta_payload(h.fragment, h.learner, h.incarnation, h.serial)
        outcome: Outcome

        def heard() -> None:
            self._heard[offer.entry_id] = self._clock.now()

        while True:
            norms = DeltaNorms(self._layout)

            def look(reader: PayloadReader, norms: DeltaNorms = norms) -> None:
                norms.advance(reader.so_far())

            try:
                reader = await follow(
                    self._bus,
                    key,
                    self._layout.elements,
                    sync.codec,
                    sync.chunk_bytes,
                    heard,
                    self._offload,
                    look,
                )
                self._heard[offer.entry_id] = math.inf
                outcome = await self._offload(judge, offer, reader.vector(), norms.norms())
                self._uploads.observe(self._clock.now() - began)
                break
            except BadPayload as error:
                outcome = RefusalReason.BAD_PAYLOAD, str(error)
                break
            except BusError:
                heard()
                await asyncio.sleep(RETRY_S)  # until it works, or the window's deadline ends this task
        self.outcomes.append((offer, outcome))
        self._wake.set()


def given_up(
    window: Window, intake: Intake, watch: RunWatch, doubted: frozenset[str]
) -> tuple[list[Failed], float | None]:
    """What has stopped to come and nobody waits for: of learners that are gone, once a merge needs it, and of doubted
    ones; it leaves the window. And when to look again."""
    failed: list[Failed] = []
    again, quiet_s = [], max(LEAST_UPLOAD_S, watch.liveness_s)
    needed = window.state is State.UPLOADING
    for offer in window.awaited():
        learner = offer.header.learner
        gone = needed and not watch.is_here(learner, offer.header.incarnation)
        if not (gone or learner in doubted):
            continue
        until = intake.heard_at(offer) + quiet_s
        if intake.now < until:
            again.append(until)
        else:
            window.failed(offer)
            detail = f"its learner is {'gone' if gone else 'doubted'}, and the upload has stopped"
            failed.append((offer, RefusalReason.UPLOAD_TIMEOUT, detail))
    return failed, min(again, default=None)
