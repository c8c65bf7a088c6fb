"""Reads a run for its page and for `/metrics`, and sends the page's model to all that follow it. Runs on asyncio.

It only reads, with a viewer's rights. Each poll reads the current state (heads, reports, state, leases) and what is new
since the last poll (tape, events, evaluations). The result is encoded once for all followers.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from diloco.pipeline.bus.ports import START, Bus, BusInfo, Clock, TapeEntry
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.bus.tape_reading import lost, previous_id
from diloco.pipeline.errors import BusError, DilocoError, PeerError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import TapeRecord
from diloco.pipeline.messages.run import Evaluation, Event
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.view.loss_curves import loss_curves
from diloco.pipeline.view.page.join_command import RedisRoute
from diloco.pipeline.view.page.last_poll import Reading
from diloco.pipeline.view.page.model import Model, PageModel, Poll
from diloco.pipeline.view.status import NO_FACTS, Status
from diloco.pipeline.view.status_reader import read_status_of, redis_fill

Entry = TypeVar("Entry", tuple[str, Event], tuple[str, Evaluation])

# Seconds between two polls, with and without followers.
WATCHED_S, UNWATCHED_S = 0.5, 2.0
# Seconds until the next poll after one that failed because of a bug.
AGAIN_S = 10.0
# The server's own state is read at most this often.
INFO_S = 2.0
# The most entries of a stream in one poll. The next polls read the rest.
MAX_READ = 50_000
# Drawing this many entries would block the event loop noticeably, so it is done in a thread.
MANY = 2000
# Updates kept for pages that read slowly. A page that has missed more gets a snapshot.
KEPT_PATCHES, KEPT_BYTES = 240, 8 * 2**20


@dataclass(frozen=True, slots=True)
class Update:
    """One server-sent event."""

    number: int
    data: bytes


class Collector:
    """Follows one run as long as `run` runs."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        live_s: float | None = None,
        idle_s: float = UNWATCHED_S,
        route: RedisRoute | None = None,
    ) -> None:
        """Create a collector that has read nothing yet.

        Args:
            bus: the run's bus.
            clock: the event loop's clock.
            live_s: a learner that was silent for this long is not live. None: the value of the run's syncers.
            idle_s: seconds between two polls without followers.
            route: how parties reach the run's Redis, so that the page can say how to join.
        """
        self._clock, self._idle_s = clock, idle_s
        self._new_reader = partial(RunReader, bus, clock, live_s)
        self._reader = self._new_reader()
        self._new_model = partial(PageModel, bus.keys.run, route or RedisRoute())
        self.model, self.reading = self._new_model(), Reading()
        self._updates: deque[Update] = deque()
        self._bytes = self._number = 0
        self._whole = Update(-1, b"")
        self._news = asyncio.Event()
        self._followers = 0
        self._wanted = asyncio.Event()
        self._away_since: float | None = None

    async def run(self) -> None:
        """Poll repeatedly until cancelled."""
        while True:
            if not await self.poll():
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                async with asyncio.timeout(WATCHED_S if self._followers else self._idle_s):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            self._wanted.clear()

    async def poll(self) -> bool:
        """Take one poll, and send the result to the followers.

        If a bug makes it fail, send that instead and return False; the next poll reads everything again.
        """
        try:
            await self._poll()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            trace = None if isinstance(error, DilocoError) else error  # its message says all that a trace would
            structlog.get_logger().error("page_failed", error=text, retry_s=AGAIN_S, exc_info=trace)
            self._reader = self._new_reader()
            self._start_over()
            self.model.failed(self._clock.unix(), text[:300])
            self._publish(self.model.patch())
            return False
        return True

    async def _poll(self) -> None:
        began_s = self._clock.unix()
        try:
            poll = await self._reader.poll()
            self._away_since = None
            if poll.started_over:
                self._start_over()
            self.reading.see(poll)
            if len(poll.records) > MANY and not self._number:  # no update was sent, so nothing uses the model meanwhile
                await asyncio.to_thread(self.model.see, poll)
            else:
                self.model.see(poll)
        except (BusError, PeerError) as error:
            now_s = self._clock.unix()
            self._away_since = self._away_since or began_s
            spoilt = isinstance(error, PeerError)
            text = f"{type(error).__name__}: {error.problem if spoilt else error}"[:300]
            self.model.away(now_s, self._away_since, text, spoilt, error.remedy)
        self._publish(self.model.patch())

    def _start_over(self) -> None:
        """Start a new model. Followers then get a snapshot, because no patch leads to it.

        The gap in the update numbers makes `follow` notice.
        """
        self.model = self._new_model()
        self._updates.clear()
        self._bytes, self._number = 0, self._number + 1

    def _publish(self, patch: Model) -> None:
        self._number += 1
        update = Update(self._number, self._event("patch", patch))
        self._updates.append(update)
        self._bytes += len(update.data)
        while len(self._updates) > KEPT_PATCHES or self._bytes > KEPT_BYTES:
            self._bytes -= len(self._updates.popleft().data)
        # Wake all current waiters. Each event is set once and never cleared, so a follower that took it before it read
        # the updates (see `follow`) cannot miss this one.
        self._news.set()
        self._news = asyncio.Event()

    @staticmethod
    def _event(kind: str, model: Model) -> bytes:
        data = dumps(model, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield server-sent events without end: a snapshot, then patches; a snapshot again if some were dropped."""
        self._followers += 1
        try:
            self._wanted.set()
            if not self._number:
                await self._news.wait()
            number = self._number
            yield self._snapshot()
            while True:
                news = self._news  # taken before the updates are read: one that is published later sets this event
                missed = [one for one in self._updates if one.number > number]
                if missed and missed[0].number > number + 1:  # it reads so slowly that some updates were dropped
                    number = self._number
                    yield self._snapshot()
                    continue
                for one in missed:
                    number = one.number
                    yield one.data
                if number == self._number:
                    await news.wait()
        finally:
            self._followers -= 1

    def _snapshot(self) -> bytes:
        """Return a snapshot, encoded once for all requests between two polls."""
        if self._whole.number != self._number:
            self._whole = Update(self._number, self._event("snapshot", self.model.snapshot()))
        return self._whole.data


class RunReader:
    """Reads what a poll needs, and remembers how far each stream was read."""

    def __init__(self, bus: Bus, clock: Clock, live_s: float | None) -> None:
        self._bus, self._clock, self._live_s = bus, clock, live_s
        self._spec_bytes: bytes | None = None
        self._spec: Spec | None = None
        self._shares: dict[int, float] = {}
        self._tape: dict[int, TapeEntry | None] = {}
        """By group: the entry that was read last."""
        self._cursors = {"events": START, "evaluations": START}
        self._server_id = ""
        """Id of the server that all of this was read from; empty if another one may have replaced it."""
        self._started_over = False
        self._evaluation: Evaluation | None = None
        self._told = NO_FACTS
        self._info: BusInfo | None = None
        self._asked_s = 0.0
        self._answers_from_s: float | None = -math.inf
        """Since when the bus has answered; None if the last call failed."""

    async def poll(self) -> Poll:
        """Read what is new since the last poll, or everything again if another server lacks some of what was read.

        Raises:
            BusError: the bus cannot be read. The cursors stay where they were, so streams are read again.
            PeerError: what is stored is not a run of this build.
        """
        try:
            return await self._poll()
        except BusError:
            self._answers_from_s = None
            raise

    async def _poll(self) -> Poll:
        bus = self._bus
        await self._read_spec()
        info = await self._ask_server()
        # "" until all is read: if a read fails half way, the next poll compares with the server again.
        before, self._server_id = self._server_id, ""
        away = set[int]()
        if before != info.server_id and await self._lost(away):
            self._tape, self._cursors = dict.fromkeys(self._tape), dict.fromkeys(self._cursors, START)
            self._evaluation, self._told, self._started_over = None, NO_FACTS, True
        tape, records = dict(self._tape), list[TapeRecord]()
        while len(records) < MAX_READ and tape:
            entries = await bus.read_tape({p: START if one is None else one.entry_id for p, one in tape.items()})
            for entry in entries:
                tape[entry.group] = entry
                records.append(entry.record)
            if not entries:
                break
        events, at_event = await self._news("events", bus.read_events)
        evaluations, at_evaluation = await self._news("evaluations", bus.read_evaluations)
        evaluation = evaluations[-1][1] if evaluations else self._evaluation
        told = self._told.after((one for _, one in events), self._clock.unix())
        if self._answers_from_s is None:
            self._answers_from_s = self._clock.now()
        given = self._spec, evaluation, info, self._live_s, told, self._clock.now() - self._answers_from_s
        status, heads, state, reports = await read_status_of(bus, self._clock, *given)
        # The cursors only move once everything is read: after a failed poll, the next one reads the same again.
        self._tape, self._cursors = tape, {"events": at_event, "evaluations": at_evaluation}
        self._evaluation, self._told = evaluation, told
        self._server_id = "" if away else info.server_id
        started_over, self._started_over = self._started_over, False
        return Poll(
            now_s=self._clock.unix(),
            status=status,
            started_over=started_over,
            info=info,
            nearly_full=self._nearly_full(info, status),
            shares=self._shares,
            heads=[(head.fragment, head.version, head.digest) for head in heads if head is not None],
            began_s=None if state is None else state.started_unix_s,
            began_tokens=0 if state is None else state.base_tokens,
            origin_s=None if state is None else state.began_unix_s,
            records=records,
            events=[one for _, one in events],
            evaluations=[one for _, one in evaluations],
            curves=loss_curves(reports, self._clock.unix(), 0.0 if state is None else state.began_unix_s),
        )

    async def _read_spec(self) -> None:
        data = await self._bus.read_spec()
        if data != self._spec_bytes:
            self._spec = None if data is None else decode_spec(self._bus.keys, data)
            self._spec_bytes, self._shares = data, {}
            if self._spec is not None:
                layout = layout_of(self._spec.tensors)
                self._shares = {one.id: one.elements / layout.elements for one in layout.fragments}
                self._bus.use_spec(self._spec)
                self._tape = {group: self._tape.get(group) for group in range(self._spec.sync.groups)}

    async def _ask_server(self) -> BusInfo:
        now = self._clock.now()
        if self._info is None or now - self._asked_s >= INFO_S:
            self._info, self._asked_s = await self._bus.info(), now
        return self._info

    async def _lost(self, away: set[int]) -> bool:
        """Return whether an entry that was read last is missing now (see `tape_reading`). `away`: as in `lost`."""
        if await lost(self._bus, [last for last in self._tape.values() if last is not None], away):
            return True
        for stream, read in (("events", self._bus.read_events), ("evaluations", self._bus.read_evaluations)):
            at = self._cursors[stream]
            if at != START and [found for found, _ in await read(previous_id(at), 1)] != [at]:
                return True
        return False

    def _nearly_full(self, info: BusInfo, status: Status) -> bool:
        live = {one["id"] for one in status["learners"] if one["live"]}
        return self._spec is not None and redis_fill(info, self._spec, live).level != "ok"

    async def _news(self, stream: str, read: Callable[..., Awaitable[list[Entry]]]) -> tuple[list[Entry], str]:
        at, found = self._cursors[stream], list[Entry]()
        while len(found) < MAX_READ and (more := await read(at)):
            at = more[-1][0]
            found += more
        return found, at
