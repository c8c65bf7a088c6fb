"""The window of one fragment at one version: who is in, how long to wait, when to merge. Pure: no clock, no I/O.

Theory of operation (paper: minimum quorum, adaptive grace window). A window gathers the deltas of one outer
step. It counts *headers*, as the paper counts reports, so that an upload does not eat the grace; once the set
M_t is fixed it waits for the uploads of that set only. `admission` says which headers can be merged into a head at all.

| state | event | guard | next | result |
|---|---|---|---|---|
| IDLE or COLLECTING or GRACE | offer | another learner | unchanged | Accepted |
| IDLE | offer | stale by one | IDLE | Accepted |
| IDLE | offer | its learner left a delta here and came back | IDLE | Late |
| UPLOADING or MERGING | offer | another learner | unchanged | Late |
| UPLOADING | offer | a later attempt of a member that has not uploaded | UPLOADING | Accepted |
| COLLECTING or GRACE | offer | a later attempt of a member that has uploaded | unchanged | Accepted |
| UPLOADING or MERGING | offer | a later attempt of a member that has uploaded | unchanged | Late |
| COLLECTING or GRACE | offer | a member's on a later base | unchanged | Accepted |
| UPLOADING or MERGING | offer | a member's on a later base | unchanged | Late |
| COLLECTING or GRACE or UPLOADING or MERGING | offer | seen | unchanged | Refused |
| any | offer | unknown base, wrong layout, not positive | unchanged | Refused |
| IDLE | decide | nothing due | IDLE | Wait(no deadline) |
| IDLE | decide | one is due, also of a learner that came back | COLLECTING | Wait(no deadline) |
| IDLE | decide | a doubted learner's is due, and not uploaded | IDLE | Wait(no deadline) |
| IDLE | decide | a doubted learner's is due and uploaded | COLLECTING | Wait(no deadline) |
| IDLE | decide | a doubted learner's is due, what it left here is uploaded | COLLECTING | Wait(no deadline) |
| IDLE | decide | what a doubted learner left here is refused, its next is due | IDLE | Wait(no deadline) |
| IDLE | decide | draining, K members, none due | UPLOADING | Wait(upload deadline) |
| COLLECTING | decide | fewer than K in | COLLECTING | Wait(no deadline) |
| COLLECTING | decide | K in, one of them doubted | COLLECTING | Wait(no deadline) |
| COLLECTING | decide | fewer than K in, and one was refused | COLLECTING, attempt + 1 | Reopened |
| COLLECTING | decide | fewer than K in, and a doubted one was refused | COLLECTING | Wait(no deadline) |
| COLLECTING | decide | the same, and another delta of its learner waits | COLLECTING, attempt + 1 | Reopened |
| COLLECTING | decide | K in, others expected, grace > 0 | GRACE | Wait(grace deadline) |
| GRACE | decide | others expected, the grace goes on | GRACE | Wait(grace deadline) |
| COLLECTING or GRACE | decide | K in, and all expected | UPLOADING | Wait(upload deadline) |
| GRACE | decide | others expected, the grace is over | UPLOADING | Wait(upload deadline) |
| UPLOADING | decide | uploads are missing before the deadline | UPLOADING | Wait(upload deadline) |
| UPLOADING | decide | all of M_t uploaded | MERGING | Merge |
| UPLOADING | decide | the deadline, at least K uploaded | MERGING | Merge |
| UPLOADING | decide | the deadline, at least K uploaded, what is missing comes | MERGING | Merge(one in vain) |
| UPLOADING | decide | the deadline, fewer than K uploaded | COLLECTING, attempt + 1 | Reopened |
| UPLOADING | decide | the deadline, fewer than K uploaded, what is missing comes | UPLOADING | Wait(another deadline) |
| UPLOADING | decide | the same, and another learner waits | COLLECTING, attempt + 1 | Reopened(one in vain) |
| GRACE or UPLOADING | decide | too few are left for K | COLLECTING, attempt + 1 | Reopened |
| MERGING | decide | whatever has changed | MERGING | Merge |
| MERGING | not_merged | the outcome is not finite | COLLECTING | nothing |

`decide` passes through every state whose time is over; the table names the one where it stays. M_t, the set that is
merged, is fixed on entering UPLOADING. While a run drains, any member opens the window: there will be no due ones any
more. An attempt that took a member's place had less than the whole time when the upload deadline is over: it is late
then, not refused. So is an upload that comes, if too slowly. Their learners were waited for in vain all the same, and
are doubted for it. Below the quorum what comes is waited for, unless somebody else is held up.

A refusal opens the window again so that its learner publishes anew, at its next step. One that is doubted is not asked:
it would be refused as often as it steps. It renews its delta as it trains on (`workers.rounds`), and is in by that.
`tests/syncer/test_window_table.py` reads this table.

Invariants: a learner is a member at most once; a member's base is the current version or the one before; no
merge below the quorum; what was merged before is never a member again. `decide` called twice with the same
arguments gives the same answer, but for `Reopened`, which is said once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.tape import RefusalReason
from diloco.syncer.admission import (
    DUPLICATE,
    MAX_MEMBERS,
    Accepted,
    Admission,
    DeltaFormat,
    Late,
    NextWindow,
    Offer,
    Refused,
    outdone,
    same_delta,
    same_training,
)

SETTLE_S = 2.0
"""The grace before the first estimates."""
LEAST_MORE_S = 1.0
"""Time that uploads are given once more, at least."""


class State(StrEnum):
    """See the table above."""

    IDLE = "idle"
    COLLECTING = "collecting"
    GRACE = "grace"
    UPLOADING = "uploading"
    MERGING = "merging"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What `decide` needs to know of the world."""

    quorum: int
    """K; while draining at most the number of live learners."""
    expected: frozenset[str]
    """Live learners on the current base: waiting for anybody else is pointless."""
    live: int
    grace_s: float | None
    """None before the first estimates: `SETTLE_S` is used."""
    upload_s: float
    """Time that M_t's uploads may take."""
    draining: bool = False
    doubted: frozenset[str] = frozenset()
    """Learners that count only once their payload is here, and that nobody waits for."""
    arriving: frozenset[str] = frozenset()
    """Entries of deltas that come, if slowly, or whose turn on their learner's line is still to come: none is refused
    for being late, since the line would have to carry it again. Their learners were waited for in vain like others."""


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
    opened_at: float
    quorum_at: float
    fixed_at: float
    """When M_t was fixed."""
    in_vain: tuple[str, ...] = ()
    """Learners that were waited for until the upload deadline: the overdue, those with an attempt since, and those
    whose uploads come too slowly."""
    silent: frozenset[str] = frozenset()
    """Learners that were waited for from the quorum to M_t, and sent no header."""

    @property
    def quorum_s(self) -> float:
        """The quorum time: from the window's opening to the K-th header."""
        return self.quorum_at - self.opened_at

    @property
    def grace_s(self) -> float:
        """From the quorum to M_t."""
        return self.fixed_at - self.quorum_at


@dataclass(frozen=True, slots=True)
class Reopened:
    """Too few were left: the window is open again with the next attempt. Ask again at once."""

    overdue: tuple[Offer, ...]
    reason: str
    opened_at: float
    in_vain: tuple[str, ...] = ()
    """As of a `Merge`."""


Decision = Wait | Merge | Reopened


# --- the states ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """No due delta is here."""

    state: ClassVar[State] = State.IDLE


@dataclass(frozen=True, slots=True)
class Collecting:
    """Fewer than K learners are in."""

    state: ClassVar[State] = State.COLLECTING
    opened_at: float


@dataclass(frozen=True, slots=True)
class Grace:
    """K are in: others may follow until the deadline."""

    state: ClassVar[State] = State.GRACE
    opened_at: float
    quorum_at: float
    deadline: float
    awaited: frozenset[str]
    """Who was missing as it began."""


@dataclass(frozen=True, slots=True)
class Uploading:
    """M_t is fixed, and uploads until the deadline."""

    state: ClassVar[State] = State.UPLOADING
    opened_at: float
    quorum_at: float
    fixed_at: float
    deadline: float
    silent: frozenset[str]
    """As of a `Merge`."""


@dataclass(frozen=True, slots=True)
class Merging:
    """Decided; nothing but the merge's end changes it."""

    state: ClassVar[State] = State.MERGING
    merge: Merge


Phase = Idle | Collecting | Grace | Uploading | Merging


@dataclass(slots=True)
class _Member:
    offer: Offer
    since: float
    uploaded: int | None = None
    """How many were here before it was."""


class Window:
    """One fragment's window at one version."""

    def __init__(self, head: Head, delta_format: DeltaFormat, now: float) -> None:
        """A window on a head: idle, or open if the head's was (its former owner is gone, its learners wait)."""
        self._admission = Admission(head, delta_format)
        self.version = head.version
        self.attempt = head.window.attempt
        self.phase: Phase = Idle() if head.window.state == "idle" else Collecting(now)
        self.late = NextWindow()
        self._members: dict[str, _Member] = {}
        self._uploads_seen = 0
        self._refused: set[str] = set()
        """Learners whose delta was refused in this attempt: not expected any more."""

    @property
    def state(self) -> State:
        """The name of its phase."""
        return self.phase.state

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
        return (*self.member_offers(), *self.late.offers)

    # --- events ------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> Accepted | Late | Refused:
        """A header arrived."""
        header = offer.header
        if (refusal := self._admission.refusal(header)) is not None:
            return refusal
        if self.late.has(header):
            return DUPLICATE
        fixed = isinstance(self.phase, Uploading | Merging)
        member = self._members.get(header.learner)
        if member is not None:
            return self._offer_again(member, offer, now, fixed)
        if fixed:
            return self.late.hold(offer)
        if len(self._members) >= MAX_MEMBERS:
            return Refused(RefusalReason.FLOOD, f"{MAX_MEMBERS} learners are in the window", max(0, header.tokens))
        return self._accept(offer, now, None)

    def _offer_again(self, member: _Member, offer: Offer, now: float, fixed: bool) -> Accepted | Late | Refused:
        """Of a learner that is a member: one in its place, one for the next window, or one too many."""
        header, before = offer.header, member.offer.header
        if same_delta(header, before):
            return DUPLICATE
        again = same_training(header, before)
        if again and header.attempt < before.attempt:
            return outdone(header, before)
        # A later attempt holds more. While the payload of a fixed set is awaited too: a learner never uploads what it
        # has outdone. One that is complete stays; the later one is kept until it is merged, lest it never is.
        complete = fixed and member.uploaded is not None
        in_its_place = again and not complete and not isinstance(self.phase, Merging)
        if in_its_place or (not fixed and header.base_version > before.base_version):
            return self._accept(offer, now, member.offer)
        return self.late.hold(offer)

    def uploaded(self, offer: Offer) -> None:
        """A member's payload is here, complete and sound."""
        member = self._members.get(offer.header.learner)
        if member is not None and member.offer.entry_id == offer.entry_id and member.uploaded is None:
            member.uploaded, self._uploads_seen = self._uploads_seen, self._uploads_seen + 1

    def refused(self, offer: Offer) -> None:
        """A payload was refused, or vanished: its delta leaves the window, also if it is late by now.

        Before the window opens, another one of its learner that waited takes its place, and is `awaited` from now on.
        """
        member = self._members.get(offer.header.learner)
        if member is not None and member.offer.entry_id == offer.entry_id:
            del self._members[offer.header.learner]
            self._refused.add(offer.header.learner)
        self.late.remove(offer.entry_id)
        if self.state is State.IDLE:
            self._let_in()

    def not_merged(self, merge: Merge) -> None:
        """Nothing came of the merge that was decided: what was in it is refused; the window opens once more."""
        for offer in (*merge.contributions, *merge.overdue):
            self.refused(offer)
        self.phase = Collecting(merge.opened_at)

    # --- the decision --------------------------------------------------------------------------------

    def decide(self, now: float, given: Conditions) -> Decision:
        """What to do now, with the reason in words; makes the transitions that `_next` finds, one after the other."""
        while not isinstance(step := self._next(now, given), Wait | Merge | Reopened):
            if isinstance(step, Merging):
                self._put_off(step.merge.overdue)
            self.phase = step
        if isinstance(step, Reopened):
            self._reopen(step, now)
        return step

    def _next(self, now: float, given: Conditions) -> Phase | Decision:
        """The phase that follows the present one by now, or what to do in this one. Changes nothing."""
        phase, count = self.phase, self._count(given)
        missing = given.expected - self._refused - self._members.keys()
        left = f"{count} of quorum {given.quorum}"
        match phase:
            case Merging():
                return phase.merge
            case Idle():
                if (given.draining and self._members) or self._is_due(given.doubted):
                    return Collecting(now)
                return Wait(None, f"no delta asks for a merge, {len(self._members)} waiting")
            case Collecting():
                if count >= given.quorum:
                    grace_s = SETTLE_S if given.grace_s is None else given.grace_s
                    return Grace(phase.opened_at, now, now + grace_s, missing)
                if self._refused - given.doubted - self._members.keys() or self._others_wait():
                    return Reopened((), f"{left} left after a refusal", phase.opened_at)
                return Wait(None, f"{left} in, {given.live} live")
            case Grace():
                if count < given.quorum:
                    return Reopened((), f"{left} left", phase.opened_at)
                if missing and now < phase.deadline:
                    return Wait(phase.deadline, f"grace: {count} in, waiting for {', '.join(sorted(missing))}")
                silent = phase.awaited & missing
                return Uploading(phase.opened_at, phase.quorum_at, now, now + given.upload_s, silent)
            case Uploading():
                if count < given.quorum:
                    return Reopened((), f"{left} left", phase.opened_at)
                return self._next_of_uploads(phase, now, given, missing)

    def _is_due(self, doubted: frozenset[str]) -> bool:
        """Whether a delta on the current base is here whose learner asks for a merge; of a doubted one, if it is whole.

        Else one that sends nothing sound could have all others merge after every step of theirs.
        """
        comes = doubted & {offer.header.learner for offer in self.awaited()}
        here = [offer.header for offer in self.pending() if offer.header.learner not in comes]
        return any(header.due and header.base_version == self.version for header in here)

    def _count(self, given: Conditions) -> int:
        """Headers that count for the quorum."""
        return sum(m.uploaded is not None or learner not in given.doubted for learner, m in self._members.items())

    def _others_wait(self) -> bool:
        """Whether somebody who is not in has a delta for the next window."""
        return any(offer.header.learner not in self._members for offer in self.late.offers)

    def _next_of_uploads(
        self, phase: Uploading, now: float, given: Conditions, missing: frozenset[str]
    ) -> Uploading | Merging | Wait | Reopened:
        done = self.complete()
        waiting = {
            learner: m for learner, m in self._members.items() if m.uploaded is None and learner not in given.doubted
        }
        if waiting and now < phase.deadline:
            reason = f"{len(done)} of {len(self._members)} uploaded, waiting for {', '.join(waiting)}"
            return Wait(phase.deadline, reason)
        overdue, in_vain = _overdue(phase, waiting, now, given.arriving), tuple(waiting)
        if len(done) < given.quorum:
            all_come = all(m.offer.entry_id in given.arriving for m in waiting.values())
            if waiting and all_come and not self._others_wait():
                until = now + max(given.upload_s, LEAST_MORE_S)
                return replace(phase, deadline=until)
            reason = f"{len(done)} of quorum {given.quorum} uploaded in time"
            return Reopened(overdue, reason, phase.opened_at, in_vain)
        absent = sorted({*missing, *waiting})
        reason = f"{len(done)} in, without {', '.join(absent)}" if absent else f"all {len(done)} expected in"
        times = phase.opened_at, phase.quorum_at, phase.fixed_at
        return Merging(Merge(done, overdue, reason, *times, in_vain, phase.silent))

    # --- transitions -----------------------------------------------------------------------------------

    def _accept(self, offer: Offer, now: float, replaced: Offer | None) -> Accepted:
        self._members[offer.header.learner] = _Member(offer, now)
        return Accepted(replaced)

    def _put_off(self, overdue: tuple[Offer, ...]) -> None:
        """Who is awaited and not overdue is first in the next window."""
        later = [offer for offer in self.awaited() if offer not in overdue]
        for offer in later:
            del self._members[offer.header.learner]
        self.late.put_first(later)

    def _reopen(self, reopened: Reopened, now: float) -> None:
        """All that are left, and those who were late, are in the next attempt."""
        for offer in reopened.overdue:
            del self._members[offer.header.learner]
        self.attempt += 1
        self._refused.clear()
        self.phase = Collecting(reopened.opened_at)
        self._let_in(now)

    def _let_in(self, now: float = -math.inf) -> None:
        """Make members of those that waited, one of each learner."""
        for offer in self.late.pop_all():
            if offer.header.learner in self._members:
                self.late.put_last(offer)
            else:
                self._members[offer.header.learner] = _Member(offer, now)


def _overdue(
    phase: Uploading, waiting: Mapping[str, _Member], now: float, arriving: frozenset[str]
) -> tuple[Offer, ...]:
    """Of those that are waited for and do not come, who had the whole time: since M_t was fixed, or it came later."""
    time_s = phase.deadline - phase.fixed_at
    stopped = [m for m in waiting.values() if m.offer.entry_id not in arriving]
    return tuple(m.offer for m in stopped if m.since <= phase.fixed_at or now - m.since >= time_s)
