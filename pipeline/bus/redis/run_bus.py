"""The data of a run as a whole on Redis: spec and state, reports, logs, syncers, version 0, and moments."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from diloco.pipeline.bus import schema, stored_reports
from diloco.pipeline.bus.acl import SHARED_LEARNER
from diloco.pipeline.bus.ports import (
    START,
    InitialUploads,
    MomentsBoard,
    MomentsExchange,
    Reports,
    RunLogs,
    SpecAndState,
    SyncerBoard,
)
from diloco.pipeline.bus.redis.calls import RedisCalls, to_ms, unix_ms
from diloco.pipeline.bus.redis.connection import RedisConnection
from diloco.pipeline.bus.redis.run_list import RedisRuns
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadMessage, NotPermitted, Oversized
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import Evaluation, Event, InitialUpload, LearnerReport, Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import Wanted
from diloco.pipeline.messages.wire import MAX_LEASE_S, Message
from diloco.pipeline.payload.codec import decode, encode

T = TypeVar("T", bound=Message)

REPORTS_DROPPED = (
    "this many reports were deleted because there were too many, or they were too large. Each learner's latest "
    "reports were kept first, then those with the most tokens. If the run never had that many processes, someone "
    "with a learner's password is inventing them: stop this with ACL DELUSER learner-NAME"
)
# Upper bound on the protocol's overhead around the largest acceptable reply with reports.
AROUND_BYTES = 2**20


def _state(blob: bytes | None, key: str) -> RunState | None:
    try:
        return schema.decode_state(blob)
    except BadMessage as error:
        raise BadMessage("the run's state is unreadable", schema.unlink(key), str(error)) from error


class RedisRunData(RedisConnection, SpecAndState, Reports, RunLogs, InitialUploads, MomentsExchange, SyncerBoard):
    """A run's data that belong to no fragment. All keys are in `RunKeys`."""

    def __init__(self, calls: RedisCalls, run: str) -> None:
        super().__init__(calls, run)
        self._known: stored_reports.Known = {}

    async def propose_spec(self, spec: bytes) -> bytes:
        return await self._propose(self.keys.spec, spec)

    async def read_spec(self) -> bytes | None:
        spec: bytes | None = await self._redis.command("GET", self.keys.spec)
        return spec

    async def offer_wanted(self, wanted: Wanted, ttl_s: float) -> Wanted:
        if await self._claim(self.keys.wanted, encode(wanted), ttl_s, MAX_LEASE_S):
            return wanted
        return await self.read_wanted() or wanted

    async def read_wanted(self) -> Wanted | None:
        blob = await self._redis.command("GET", self.keys.wanted)
        return decode(Wanted, blob) if blob else None

    async def replace_spec(self, spec: bytes, instead_of: bytes) -> bool:
        return await self._redis.script("replace_spec", [self.keys.spec], spec, instead_of) == [1]

    async def delete_run(self) -> None:
        await RedisRuns(self._redis).free(self.keys.run)

    async def write_state(self, state: RunState) -> RunState:
        (blob,) = await self._redis.script("write_state", [self.keys.state], state.phase.rank, encode(state))
        return decode(RunState, blob)

    async def begin_again(self, state: RunState) -> bool:
        ranks = Phase.FINISHED.rank, state.phase.rank
        return await self._redis.script("begin_again", [self.keys.state], *ranks, encode(state)) == [1]

    async def read_state(self) -> RunState | None:
        blob = await self._redis.command("HGET", self.keys.state, "blob")
        return _state(blob, self.keys.state)

    # Reports: two hashes, of the last reports and of their arrival times, and a string for each id's holder.

    async def write_report(self, report: LearnerReport) -> RunState | None:
        keys = [self.keys.learners, self.keys.seen, self.keys.state, self.keys.holder(report.learner)]
        name = f"{report.learner}/{report.incarnation}"
        holder = (report.generation, stored_reports.holder(report))
        try:
            (blob,) = await self._redis.script("write_report", keys, name, encode(report), report.number, *holder)
        except NotPermitted:
            own = self._redis.user.removeprefix(f"{SHARED_LEARNER}-")
            if own in (self._redis.user, report.learner):
                raise
            found = f"learner id {report.learner!r} does not match user {self._redis.user!r}"
            raise NotPermitted(found, f"set DILOCO_LEARNER_ID={own} (or learner_id=, --learner-id)") from None
        return _state(blob, self.keys.state)

    async def put_back_report(self, seen: SeenReport) -> None:
        name = f"{seen.report.learner}/{seen.report.incarnation}"
        keys = [self.keys.learners, self.keys.seen]
        await self._redis.script("put_back_report", keys, name, encode(seen.report), int(seen.age_s * 1000))

    async def read_reports(self) -> list[SeenReport]:
        now_ms, reports, seen = await self._stored()
        large = stored_reports.oversized(reports, LearnerReport.max_bytes)
        late = stored_reports.oversized(seen, stored_reports.TIME_BYTES)
        if large or late or stored_reports.have_surplus(reports, seen, self._fragments):
            with suppress(NotPermitted, Oversized):  # a syncer has the rights, and cleans up at its next read
                await self._redis.delete(self.keys.seen, late)
                reports = await self._without_surplus(reports, seen, large)
        return stored_reports.seen_reports(now_ms, reports, seen, self._known)

    async def _stored(self) -> tuple[int, Mapping[bytes, bytes], Mapping[bytes, bytes]]:
        """Return the server's time in ms, the reports, and their arrival times."""
        try:
            now_ms, (reports, seen) = await self._redis.timed_hashes(
                self.keys.learners, self.keys.seen, max_bytes=self._max_bytes
            )
            return now_ms, reports, seen
        except Oversized:
            name_bytes = stored_reports.REPORT_NAME_BYTES
            reports, large = await self._redis.scan_hash(self.keys.learners, name_bytes, LearnerReport.max_bytes)
            seen, late = await self._redis.scan_hash(self.keys.seen, name_bytes, stored_reports.TIME_BYTES)
            if large or late:
                self._warn("reports_dropped", reports=max(large, late), kept=len(reports), detail=REPORTS_DROPPED)
            (time,) = await self._redis.at_one_node([("TIME",)], self.keys.learners)
            return unix_ms(time), reports, seen

    @property
    def _max_bytes(self) -> int:
        """Size limit of a reply with reports: the largest that an acceptable number of reports can have."""
        return stored_reports.reports_bytes(stored_reports.MAX_REPORTS, self._fragments) + AROUND_BYTES

    async def _without_surplus(
        self, reports: Mapping[bytes, bytes], seen: Mapping[bytes, bytes], large: Collection[bytes]
    ) -> dict[bytes, bytes]:
        """Delete the reports that are too large or too many, and times without a report; return the other reports.

        Any learner may write any number of reports, and each makes every later read slower.
        """
        gone = set(large)
        kept = {name: blob for name, blob in reports.items() if name not in gone}
        if stored_reports.have_surplus(kept, {}, self._fragments):
            learners = stored_reports.reporting(kept)
            # Read at most the bytes that a valid holder can have: each learner may write anything to its own key.
            held = await self._redis.run_pipeline(
                ("GETRANGE", self.keys.holder(learner), 0, 64) for learner in learners
            )
            holders = dict(zip(learners, held, strict=True))
            surplus = stored_reports.surplus_reports
            gone |= await asyncio.to_thread(surplus, kept, holders, self._fragments)
            kept = {name: blob for name, blob in kept.items() if name not in gone}
        await self._redis.delete(self.keys.learners, gone)
        # Read the names again: a report may have come between the reads of the two hashes, and its time must stay.
        (names,) = await self._redis.at_one_node([("HKEYS", self.keys.learners)], self.keys.learners, self._max_bytes)
        await self._redis.delete(self.keys.seen, seen.keys() - set(names))
        if gone:
            self._warn("reports_dropped", reports=len(gone), kept=len(kept), detail=REPORTS_DROPPED)
        return kept

    # Events and evaluations: two capped streams.

    async def _add(self, key: str, message: Message, cap: int) -> None:
        await self._redis.command("XADD", key, "MAXLEN", "~", cap, "*", "m", encode(message))

    async def _log(self, key: str, kind: type[T], after: str, limit: int) -> list[tuple[str, T]]:
        """Return entries after an id, without unreadable ones: any learner may write there.

        If all entries of one read are unreadable, it reads on: an empty list means that there are no more entries.
        """
        while True:
            found = await self._redis.read({key: after}, limit, 0, value_bytes=kind.max_bytes)
            entries = [entry for _, there in found for entry in there]
            read: list[tuple[str, T]] = []
            for at, data in entries:
                with suppress(BadMessage):
                    read.append((at, decode(kind, data)))
            if read or not entries:
                return read
            after = entries[-1][0]

    async def add_event(self, event: Event) -> None:
        await self._add(self.keys.events, event, schema.EVENTS_CAP)

    async def trim_events(self) -> None:
        await self._redis.command("XTRIM", self.keys.events, "MAXLEN", "~", schema.EVENTS_CAP)

    async def read_events(self, after: str = START, limit: int = 1000) -> list[tuple[str, Event]]:
        return await self._log(self.keys.events, Event, after, limit)

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        await self._add(self.keys.evaluations, evaluation, schema.EVALUATIONS_CAP)

    async def read_evaluations(self, after: str = START, limit: int = 1000) -> list[tuple[str, Evaluation]]:
        return await self._log(self.keys.evaluations, Evaluation, after, limit)

    # Live syncers: a hash, nonce -> expiry, tokens of its checkpoint, name, and page.

    async def announce_syncer(self, nonce: str, name: str, ttl_s: float, saved_tokens: int = 0) -> tuple[str, ...]:
        told = nonce, f"{saved_tokens} {name} {self.page}".rstrip(), to_ms(ttl_s)
        (live,) = await self._redis.script("announce_syncer", [self.keys.syncers], *told)
        return tuple(sorted(one.decode(errors="replace") for one in live))

    async def withdraw_syncer(self, nonce: str) -> None:
        await self._redis.command("HDEL", self.keys.syncers, nonce)

    async def read_syncers(self) -> dict[str, str]:
        return schema.syncer_names(await self._live())

    async def read_pages(self) -> dict[str, str]:
        return schema.pages(await self._live())

    async def read_savers(self) -> Sequence[tuple[int, str, str]]:
        return schema.savers(await self._live())

    async def _live(self) -> list[schema.LiveSyncer]:
        now_ms, (found,) = await self._redis.timed_hashes(self.keys.syncers)
        return schema.live_syncers(now_ms, found)

    # Claim and upload of version 0: expiring strings.

    async def claim_initial(self, nonce: str, ttl_s: float) -> bool:
        return await self._claim(self.keys.init_claim, nonce, ttl_s)

    async def finish_initial(self, upload: InitialUpload, ttl_s: float) -> bool:
        keys = [self.keys.init_claim, self.keys.initial]
        args = upload.nonce, encode(upload), to_ms(ttl_s)
        return await self._redis.script("announce", keys, *args) == [1]

    async def read_initial(self) -> InitialUpload | None:
        key = self.keys.initial
        with suppress(Oversized):
            (blob,) = await self._redis.at_one_node([("GET", key)], key, 2 * InitialUpload.max_bytes)
            return schema.readable(InitialUpload, blob)
        return None

    # Wish, claim and offer of moments: expiring strings.

    async def ask_moments(self, wish: MomentsWish, ttl_s: float) -> None:
        await self._redis.script("ask", [self.keys.moments_wish], encode(wish), to_ms(ttl_s))

    async def read_moments(self) -> MomentsBoard:
        keys = [self.keys.moments_wish, self.keys.moments_claim, self.keys.moments_offer]
        max_bytes = MomentsWish.max_bytes, MomentsOffer.max_bytes
        found = await self._redis.script("read_moments", keys, to_ms(BUS_TIMES.moments_ttl_s), *max_bytes)
        return schema.moments_board(*found)

    async def claim_moments(self, nonce: str, ttl_s: float) -> bool:
        return await self._claim(self.keys.moments_claim, nonce, ttl_s)

    async def finish_moments(self, offer: MomentsOffer, ttl_s: float) -> bool:
        keys = [self.keys.moments_claim, self.keys.moments_offer, self.keys.moments_wish, self.keys.moments_claim]
        return await self._redis.script("announce", keys, offer.nonce, encode(offer), to_ms(ttl_s)) == [1]
