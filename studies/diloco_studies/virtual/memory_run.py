"""What concerns a run as a whole, on the bus in memory: spec and state, reports, logs, version 0, moments."""

import re
from contextlib import suppress
from typing import TypeVar

from diloco.pipeline.bus import schema, stored_reports
from diloco.pipeline.bus.keys import run_of
from diloco.pipeline.bus.ports import (
    START,
    InitialUploads,
    MomentsBoard,
    MomentsExchange,
    Reports,
    RunLogs,
    SpecAndState,
)
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import Evaluation, Event, InitialUpload, LearnerReport, Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import Wanted
from diloco.pipeline.messages.wire import MAX_LEASE_S, Message
from diloco.pipeline.payload.codec import decode, encode
from diloco_studies.virtual.memory_calls import MemoryCalls

T = TypeVar("T", bound=Message)

LATE_REPORTS = 64
"""As in `write_report.lua`: what is far above a number is no later report, but another learner's word."""
_HOLDER = re.compile(rb"([0-9]{1,15}) [0-9a-f]+", re.IGNORECASE)


class MemoryRun(MemoryCalls, SpecAndState, Reports, RunLogs, InitialUploads, MomentsExchange):
    """Spec and state, reports, logs, version 0 and moments."""

    async def propose_spec(self, spec: bytes) -> bytes:
        return await self._propose(self.keys.spec, spec)

    async def read_spec(self) -> bytes | None:
        await self._turn()
        return self._bytes(self.keys.spec)

    async def offer_wanted(self, wanted: Wanted, ttl_s: float) -> Wanted:
        if await self._claim(self.keys.wanted, encode(wanted), ttl_s, MAX_LEASE_S):
            return wanted
        return await self.read_wanted() or wanted

    async def read_wanted(self) -> Wanted | None:
        await self._turn()
        blob = self._bytes(self.keys.wanted)
        return decode(Wanted, blob) if blob else None

    async def replace_spec(self, spec: bytes, instead_of: bytes) -> bool:
        await self._turn()
        if self._bytes(self.keys.spec) != instead_of:
            return False
        self.store.need_room()
        self._set(self.keys.spec, spec)
        return True

    async def delete_run(self) -> None:
        await self._turn()
        for key in [key for key in self.store.values if run_of(key.encode()) == self.keys.run]:
            self.store.delete(key)

    async def write_state(self, state: RunState) -> RunState:
        await self._turn()
        now = self._hash(self.keys.state)
        if schema.decode_count("rank", now.get(b"rank")) > state.phase.rank:
            return decode(RunState, now[b"blob"])
        self.store.hset(self.keys.state, {"rank": b"%d" % state.phase.rank, "blob": encode(state)})
        return state

    async def begin_again(self, state: RunState) -> bool:
        await self._turn()
        if self._hash(self.keys.state).get(b"rank") != b"%d" % Phase.FINISHED.rank:
            return False
        self.store.hset(self.keys.state, {"rank": b"%d" % state.phase.rank, "blob": encode(state)})
        return True

    async def read_state(self) -> RunState | None:
        await self._turn()
        return schema.decode_state(self._hash(self.keys.state).get(b"blob"))

    async def write_report(self, report: LearnerReport) -> RunState | None:
        await self._turn()
        name = f"{report.learner}/{report.incarnation}"
        holder, mine = self.keys.holder(report.learner), stored_reports.holder(report)
        held = _HOLDER.fullmatch(self._bytes(holder) or b"")
        if held and held[0] != mine and int(held[1]) >= report.generation:
            raise stored_reports.replaced(holder, int(held[1]))
        state = self._hash(self.keys.state).get(b"blob")
        before = self._hash(self.keys.learners).get(name.encode())
        self._hash(self.keys.seen)  # types before the first write
        with suppress(BadMessage):
            last = decode(LearnerReport, before).number if before else 0
            if report.number < last <= report.number + LATE_REPORTS:
                return schema.decode_state(state)
        self._set(holder, mine)
        self.store.hset(self.keys.learners, {name: encode(report)})
        self.store.hset(self.keys.seen, {name: b"%d" % self._unix_ms()})
        return schema.decode_state(state)

    async def put_back_report(self, seen: SeenReport) -> None:
        await self._turn()
        name = f"{seen.report.learner}/{seen.report.incarnation}"
        self._hash(self.keys.seen)  # types before the first write
        if name.encode() not in self._hash(self.keys.learners):
            self.store.hset(self.keys.learners, {name: encode(seen.report)})
            self.store.hset(self.keys.seen, {name: b"%d" % (self._unix_ms() - int(seen.age_s * 1000))})

    async def read_reports(self) -> list[SeenReport]:
        await self._turn()
        seen, reports = self._hash(self.keys.seen), self._hash(self.keys.learners)
        large = stored_reports.oversized(reports, LearnerReport.max_bytes)
        late = stored_reports.oversized(seen, stored_reports.TIME_BYTES)
        if large or late or stored_reports.have_surplus(reports, seen, self._fragments):
            for name in late:
                del seen[name]
            for name in large:
                del reports[name]
            if stored_reports.have_surplus(reports, {}, self._fragments):
                holders = {name: self._bytes(self.keys.holder(name)) for name in stored_reports.reporting(reports)}
                for name in stored_reports.surplus_reports(reports, holders, self._fragments):
                    del reports[name]
            for name in seen.keys() - reports.keys():
                del seen[name]
        return stored_reports.seen_reports(self._unix_ms(), reports, seen, self._known)

    async def _add_capped(self, key: str, message: Message, cap: int) -> None:
        await self._turn()
        self._stream(key)  # its type before the first write
        self.store.need_room()
        self._xadd(key, encode(message))
        self._cap(key, cap)

    def _cap(self, key: str, cap: int) -> None:
        stream = self._stream(key)
        for at in stream.ids[:-cap]:
            stream.delete(at)

    async def _log(self, key: str, kind: type[T], after: str, limit: int) -> list[tuple[str, T]]:
        found = await self._read({key: after}, limit, 0)
        return [(at, decode(kind, data)) for _, entries in found for at, data in entries]

    async def add_event(self, event: Event) -> None:
        await self._add_capped(self.keys.events, event, schema.EVENTS_CAP)

    async def trim_events(self) -> None:
        await self._turn()
        self._cap(self.keys.events, schema.EVENTS_CAP)

    async def read_events(self, after: str = START, limit: int = 1000) -> list[tuple[str, Event]]:
        return await self._log(self.keys.events, Event, after, limit)

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        await self._add_capped(self.keys.evaluations, evaluation, schema.EVALUATIONS_CAP)

    async def read_evaluations(self, after: str = START, limit: int = 1000) -> list[tuple[str, Evaluation]]:
        return await self._log(self.keys.evaluations, Evaluation, after, limit)

    # --- version 0 -------------------------------------------------------------------------------
    async def _announce(self, claim: str, key: str, nonce: str, announced: Message, ttl_s: float, *gone: str) -> bool:
        """Say that an upload is complete, if its claim is still held; some keys go with that."""
        await self._turn()
        for other in (key, *gone):
            self._bytes(other)
        if self._bytes(claim) != nonce.encode():
            return False
        self.store.need_room()
        self._set(key, encode(announced), ttl_s)
        for other in gone:
            self.store.delete(other)
        return True

    async def claim_initial(self, nonce: str, ttl_s: float) -> bool:
        return await self._claim(self.keys.init_claim, nonce, ttl_s)

    async def finish_initial(self, upload: InitialUpload, ttl_s: float) -> bool:
        return await self._announce(self.keys.init_claim, self.keys.initial, upload.nonce, upload, ttl_s)

    async def read_initial(self) -> InitialUpload | None:
        await self._turn()
        return schema.readable(InitialUpload, self._bytes(self.keys.initial))

    # --- an inner optimizer's moments ------------------------------------------------------------
    async def ask_moments(self, wish: MomentsWish, ttl_s: float) -> None:
        await self._turn()
        if self._bytes(self.keys.moments_wish) is None:
            self.store.need_room()
            self._set(self.keys.moments_wish, encode(wish), ttl_s)

    async def read_moments(self) -> MomentsBoard:
        await self._turn()
        keys = (self.keys.moments_wish, self.keys.moments_claim, self.keys.moments_offer)
        stored = [self._bytes(key) for key in keys]  # types before the first write
        for key in keys:
            self._bound(key, BUS_TIMES.moments_ttl_s)
        return schema.moments_board(*stored)

    async def claim_moments(self, nonce: str, ttl_s: float) -> bool:
        return await self._claim(self.keys.moments_claim, nonce, ttl_s)

    async def finish_moments(self, offer: MomentsOffer, ttl_s: float) -> bool:
        keys = self.keys
        gone = (keys.moments_wish, keys.moments_claim)
        return await self._announce(keys.moments_claim, keys.moments_offer, offer.nonce, offer, ttl_s, *gone)
