"""The window of one fragment at one version: who is in, how long to wait, when to merge. Pure: no clock, no I/O.

Theory of operation (paper: minimum quorum, adaptive grace window). A window gathers the deltas of one outer
step. It counts *headers*, as the paper counts reports, so that an upload does not eat the grace; once the set
M_t is fixed it waits for the uploads of that set only. An offer is a delta's header with its stream entry.

| state | event | guard | next | result |
|---|---|---|---|---|
| IDLE | offer | current base, due | COLLECTING | Accepted |
| IDLE | offer | current base, not due | IDLE | Accepted |
| IDLE | offer | stale by one | IDLE | Accepted |
| IDLE | offer | current base, due; its learner left a delta here and came back | COLLECTING | Late |
| COLLECTING or GRACE | offer | another learner | unchanged | Accepted |
| UPLOADING or MERGING | offer | another learner | unchanged | Late |
| UPLOADING | offer | a later attempt of a member that has not uploaded | UPLOADING | Accepted |
| UPLOADING or MERGING | offer | a later attempt of a member that has uploaded | unchanged | Refused |
| COLLECTING or GRACE or UPLOADING or MERGING | offer | seen | unchanged | Refused |
| any | offer | unknown base, wrong layout, not positive | unchanged | Refused |
| IDLE | decide | nothing due | IDLE | Wait(no deadline) |
| IDLE | decide | draining, K members, none due | UPLOADING | Wait(upload deadline) |
| COLLECTING | decide | fewer than K in | COLLECTING | Wait(no deadline) |
| COLLECTING | decide | fewer than K in, and one was refused | COLLECTING, attempt + 1 | Reopened |
| COLLECTING | decide | K in, others expected, grace > 0 | GRACE | Wait(grace deadline) |
| GRACE | decide | others expected, the grace goes on | GRACE | Wait(grace deadline) |
| COLLECTING or GRACE | decide | K in, and all expected | UPLOADING | Wait(upload deadline) |
| GRACE | decide | others expected, the grace is over | UPLOADING | Wait(upload deadline) |
| UPLOADING | decide | uploads are missing before the deadline | UPLOADING | Wait(upload deadline) |
| UPLOADING | decide | all of M_t uploaded | MERGING | Merge |
| UPLOADING | decide | the deadline, at least K uploaded | MERGING | Merge |
| UPLOADING | decide | the deadline, fewer than K uploaded | COLLECTING, attempt + 1 | Reopened |
| GRACE or UPLOADING | decide | too few are left for K | COLLECTING, attempt + 1 | Reopened |
| MERGING | decide | whatever has changed | MERGING | Merge |
| MERGING | not_merged | the outcome is not finite | COLLECTING | the contributions |

`decide` passes through every state whose time is over; the table names the one where it stays. M_t, the set that is
merged, is fixed on entering UPLOADING. While a run drains, any member opens the window: there will be no due ones any
more. An attempt that took a member's place had less than the whole time when the upload deadline is over: it is late
then, not refused. `tests/test_window_table.py` reads this table.

Invariants: a learner is a member at most once; a member's base is the current version or the one before; no
merge below the quorum; what was merged before is never a member again. `decide` called twice with the same
arguments gives the same answer, but for `Reopened`, which is said once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.messages import DeltaHeader, Head, MergedBase, RefusalReason
from pipeline.wire import MAX_LEARNERS

MAX_MEMBERS = MAX_LEARNERS // 2
"""The head keeps the bases of two merges."""
LATE_A_LEARNER = 4
"""Deltas of one learner that wait for the next window at most: of two bases, before and after a restart."""


class State(StrEnum):
    """See the table above."""

    IDLE = "idle"
    COLLECTING = "collecting"
    GRACE = "grace"
    UPLOADING = "uploading"
    MERGING = "merging"


@dataclass(frozen=True, slots=True)
class Offer:
    """A delta's header and its entry on its learner's stream."""

    entry_id: str
    header: DeltaHeader


@dataclass(frozen=True, slots=True)
class Accepted:
    """The offer is a member; it may have taken the place of an older one of the same learner."""

    replaced: Offer | None = None


@dataclass(frozen=True, slots=True)
class Late:
    """M_t is fixed, or the learner is a member already: kept for the next window; maybe in an older attempt's place."""

    replaced: Offer | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The offer is refused once and for all."""

    reason: RefusalReason
    detail: str
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class Conditions:
    """What `decide` needs to know of the world."""

    quorum: int
    """K; while draining at most the number of live learners."""
    expected: frozenset[str]
    """Live learners on the current base: waiting for anybody else is pointless."""
    live: int
    grace_s: float | None
    """None before the first estimates: `settle_s` is used."""
    upload_s: float
    """Time that M_t's uploads may take."""
    draining: bool = False
    settle_s: float = 2.0
    doubted: frozenset[str] = frozenset()
    """Learners that count only once their payload is here, and that nobody waits for."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at `until`, or when something happened (no deadline: None)."""

    until: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge these contributions now; `overdue` did not upload in time."""

    contributions: tuple[Offer, ...]
    """In the order in which their payloads were complete: they are summed so."""
    overdue: tuple[Offer, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Reopened:
    """Too few were left: the window is open again with the next attempt. Ask again at once."""

    overdue: tuple[Offer, ...]
    reason: str


Decision = Wait | Merge | Reopened


@dataclass(slots=True)
class _Member:
    offer: Offer
    since: float
    uploaded: int | None = None
    """How many were here before it was."""


@dataclass(slots=True)
class Window:
    """One fragment's window at one version."""

    version: int
    digest: bytes
    previous_digest: bytes | None
    layout: bytes
    """Digest that every delta must carry."""
    codec: str
    chunks: int
    """Chunk count that every delta must announce."""
    merged: dict[tuple[str, str], MergedBase]
    """(learner, incarnation) -> its last merged delta."""
    attempt: int = 0
    state: State = State.IDLE
    opened_at: float | None = None
    quorum_at: float | None = None
    fixed_at: float | None = None
    deadline: float | None = None
    late: list[Offer] = field(default_factory=list)
    """Valid offers for the next window, in order of arrival."""
    refused: set[str] = field(default_factory=set)
    """Learners whose delta was refused in this attempt: not expected any more."""
    _members: dict[str, _Member] = field(default_factory=dict)
    _uploads_seen: int = 0
    _merge: Merge | None = None

    @classmethod
    def at(cls, head: Head, layout: bytes, codec: str, chunks: int, now: float) -> "Window":
        """A window on a head: idle, or open if the head's was (its former owner is gone, its learners wait)."""
        window = cls(
            version=head.version,
            digest=head.digest,
            previous_digest=head.previous_digest,
            layout=layout,
            codec=codec,
            chunks=chunks,
            merged={(m.learner, m.incarnation): m for m in head.merged},
            attempt=head.window.attempt,
        )
        if head.window.state != "idle":
            window._open(now)
        return window

    @property
    def members(self) -> tuple[str, ...]:
        """Learners whose delta is in this window, in order of arrival."""
        return tuple(self._members)

    def member_offers(self) -> tuple[Offer, ...]:
        """Their headers, in the same order."""
        return tuple(m.offer for m in self._members.values())

    def awaited(self) -> tuple[Offer, ...]:
        """Those of them whose payload is not known to be here."""
        return tuple(m.offer for m in self._members.values() if m.uploaded is None)

    def complete(self) -> tuple[Offer, ...]:
        """Those of them whose payload is here, in the order in which they came to be: that of the merge."""
        here = [(m.uploaded, m.offer) for m in self._members.values() if m.uploaded is not None]
        return tuple(offer for _, offer in sorted(here, key=lambda one: one[0]))

    def pending(self) -> tuple[Offer, ...]:
        """All offers held here, members first."""
        return (*self.member_offers(), *self.late)

    # --- events ------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> Accepted | Late | Rejected:
        """A header arrived."""
        header = offer.header
        if (refusal := self._refusal(header)) is not None:
            return refusal
        if any(self._same(header, late.header) for late in self.late):
            return Rejected(RefusalReason.DUPLICATE, "the same delta is already here", 0)
        member = self._members.get(header.learner)
        replaced: Offer | None = None
        if member is not None:
            before = member.offer.header
            if self._same(header, before):
                return Rejected(RefusalReason.DUPLICATE, "the same delta is already here", 0)
            same_training = before.incarnation == header.incarnation and before.base_version == header.base_version
            if same_training and (member.uploaded is not None or header.attempt < before.attempt):
                lost = max(0, header.tokens - before.tokens)
                return Rejected(RefusalReason.DUPLICATE, "another delta on this base is in the window", lost)
            # While its payload is awaited too: a learner never uploads what it has outdone.
            outdone = same_training and self.state is not State.MERGING
            if not outdone and (self._fixed or header.base_version <= before.base_version):
                return self._hold(offer, now)
            replaced = member.offer
        elif self._fixed:
            return self._hold(offer, now)
        elif len(self._members) >= MAX_MEMBERS:
            return Rejected(RefusalReason.FLOOD, f"{MAX_MEMBERS} learners are in the window", max(0, header.tokens))
        self._members[header.learner] = _Member(offer, now)
        self._open_for(header, now)
        return Accepted(replaced)

    def uploaded(self, offer: Offer) -> None:
        """A member's payload is here, complete and sound."""
        member = self._members.get(offer.header.learner)
        if member is not None and member.offer.entry_id == offer.entry_id and member.uploaded is None:
            member.uploaded, self._uploads_seen = self._uploads_seen, self._uploads_seen + 1

    def failed(self, offer: Offer) -> None:
        """A payload was refused, or vanished: its delta leaves the window, also if it is late by now."""
        member = self._members.get(offer.header.learner)
        if member is not None and member.offer.entry_id == offer.entry_id:
            del self._members[offer.header.learner]
            self.refused.add(offer.header.learner)
        self.late = [late for late in self.late if late.entry_id != offer.entry_id]

    def not_merged(self) -> tuple[Offer, ...]:
        """Nothing came of the merge: what was in it leaves, and is returned; the window opens with the next attempt."""
        assert self._merge is not None  # noqa: S101  # decided
        gone = self._merge.contributions
        for offer in (*gone, *self._merge.overdue):
            self.failed(offer)
        self._merge, self.state = None, State.COLLECTING
        return gone

    # --- the decision --------------------------------------------------------------------------------

    def decide(self, now: float, given: Conditions) -> Decision:
        """What to do now, with the reason in words."""
        if self._merge is not None:
            return self._merge
        if self.state is State.IDLE:
            if not (given.draining and self._members):
                return Wait(None, f"no delta due, {len(self._members)} waiting")
            self._open(now)
        count, missing = self._count(given), given.expected - self.refused - self._members.keys()
        if self.state is State.COLLECTING:
            if count < given.quorum and self.refused:
                return self._reopen((), now, f"{count} of quorum {given.quorum} left after a refusal")
            if count < given.quorum:
                return Wait(None, f"{count} of quorum {given.quorum} in, {given.live} live")
            self.quorum_at = now
            self.deadline = now + (given.settle_s if given.grace_s is None else given.grace_s)
            self.state = State.GRACE
        elif count < given.quorum:
            return self._reopen((), now, f"{count} of quorum {given.quorum} left")
        if self.state is State.GRACE:
            assert self.deadline is not None  # noqa: S101  # set on entering the state
            if missing and now < self.deadline:
                return Wait(self.deadline, f"grace: {count} in, waiting for {', '.join(sorted(missing))}")
            self.state = State.UPLOADING
            self.fixed_at = now
            self.deadline = now + given.upload_s
        return self._uploads(now, given, missing)

    def _count(self, given: Conditions) -> int:
        """Headers that count for the quorum."""
        return sum(m.uploaded is not None or learner not in given.doubted for learner, m in self._members.items())

    def _uploads(self, now: float, given: Conditions, missing: Iterable[str]) -> Decision:
        done = self.complete()
        doubted = given.doubted
        waiting = [m for learner, m in self._members.items() if m.uploaded is None and learner not in doubted]
        names = [m.offer.header.learner for m in waiting]
        assert self.deadline is not None and self.fixed_at is not None  # noqa: S101, PT018  # set on entering the state
        if waiting and now < self.deadline:
            return Wait(self.deadline, f"{len(done)} of {len(self._members)} uploaded, waiting for {', '.join(names)}")
        time_s = self.deadline - self.fixed_at
        recent = {id(m) for m in waiting if m.since > self.fixed_at and now - m.since < time_s}
        overdue = tuple(m.offer for m in waiting if id(m) not in recent)
        later = [o for o in self.awaited() if o not in overdue]
        for offer in later:
            del self._members[offer.header.learner]
        self.late[:0] = later
        if len(done) < given.quorum:
            return self._reopen(overdue, now, f"{len(done)} of quorum {given.quorum} uploaded in time")
        absent = sorted({*missing, *names})
        reason = f"{len(done)} in, without {', '.join(absent)}" if absent else f"all {len(done)} expected in"
        self.state = State.MERGING
        self._merge = Merge(done, overdue, reason)
        return self._merge

    # --- inside ----------------------------------------------------------------------------------------

    @property
    def _fixed(self) -> bool:
        return self.state in (State.UPLOADING, State.MERGING)

    def _open_for(self, header: DeltaHeader, now: float) -> None:
        if self.state is State.IDLE and header.due and header.base_version == self.version:
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = State.COLLECTING
        self.opened_at = now

    def _hold(self, offer: Offer, now: float) -> Late | Rejected:
        """Keep it for the next window: of one training the newest attempt, of one learner so many trainings."""
        header = offer.header
        theirs = [late for late in self.late if late.header.learner == header.learner]
        for late in theirs:
            before = late.header
            if (before.incarnation, before.base_version) == (header.incarnation, header.base_version):
                if header.attempt < before.attempt:
                    lost = max(0, header.tokens - before.tokens)
                    return Rejected(RefusalReason.DUPLICATE, "another delta on this base is in the window", lost)
                self.late[self.late.index(late)] = offer
                return Late(replaced=late)
        if len(theirs) >= LATE_A_LEARNER or len(self.late) >= MAX_MEMBERS:
            return Rejected(RefusalReason.FLOOD, "too many deltas wait for the next window", max(0, header.tokens))
        self.late.append(offer)
        self._open_for(header, now)  # its learner left a delta behind, and came back
        return Late()

    def _reopen(self, overdue: tuple[Offer, ...], now: float, reason: str) -> Reopened:
        for offer in overdue:
            del self._members[offer.header.learner]
        self.attempt += 1
        self.state = State.COLLECTING
        self.quorum_at = self.fixed_at = self.deadline = None
        self.refused.clear()
        back, self.late = self.late, []
        for offer in back:
            if offer.header.learner in self._members:
                self.late.append(offer)
            else:
                self._members[offer.header.learner] = _Member(offer, now)
        return Reopened(overdue, reason)

    @staticmethod
    def _same(a: DeltaHeader, b: DeltaHeader) -> bool:
        return (a.learner, a.incarnation, a.serial) == (b.learner, b.incarnation, b.serial)

    def _refusal(self, header: DeltaHeader) -> Rejected | None:
        def no(reason: RefusalReason, detail: str, lost: int | None = None) -> Rejected:
            return Rejected(reason, detail, max(0, header.tokens) if lost is None else lost)

        if (header.layout, header.codec, header.chunks) != (self.layout, self.codec, self.chunks):
            return no(
                RefusalReason.WRONG_LAYOUT,
                f"layout {header.layout.hex()[:8]}, {header.codec}, {header.chunks} chunks; "
                f"the run has {self.layout.hex()[:8]}, {self.codec}, {self.chunks}",
            )
        if header.steps <= 0 or header.tokens <= 0:
            return no(RefusalReason.NOT_POSITIVE, f"steps={header.steps} tokens={header.tokens}")
        before = self.merged.get((header.learner, header.incarnation))
        if before is not None and header.base_version <= before.base_version:
            lost = max(0, header.tokens - before.tokens) if header.base_version == before.base_version else None
            return no(RefusalReason.ALREADY_MERGED, f"base {before.base_version} was merged before", lost)
        if header.base_version < self.version - 1:
            return no(RefusalReason.TOO_STALE, f"base {header.base_version}, the head is at {self.version}")
        on_record = self.digest if header.base_version == self.version else self.previous_digest
        if header.base_version > self.version or header.base_digest != on_record:
            return no(RefusalReason.UNKNOWN_BASE, f"base {header.base_version} {header.base_digest.hex()[:8]}")
        return None
