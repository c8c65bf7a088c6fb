"""State machine of one fragment's window at one version: it decides who is in, how long to wait and when to merge.

The module is pure: it has no clock and does no I/O.

Theory of operation (paper: minimum quorum, adaptive grace window). A window gathers the deltas of one outer step. It
counts *headers*, as the paper counts reports, so that the time of an upload is not taken from the grace. Once the set
M_t is fixed, the window waits only for the uploads of that set. `admission` decides which headers can be merged into a
head at all.

Of an offer, which is a header:

- *member*: its delta is in this window; *held*: it is kept for the next one;
- *uploaded*: the payload has arrived; *arriving*: it has not, but makes progress; *overdue*: the upload deadline has
  passed and it makes none, so it is refused;
- *in vain*: the window waited for it until the deadline, which counts towards suspecting its learner.

A learner is *expected* if it trains on the current base; *silent*, if it was expected and sent no header in time.

| state | event | guard | next | result |
|---|---|---|---|---|
| IDLE or COLLECTING or GRACE | offer | another learner | unchanged | Accepted |
| IDLE | offer | stale by one | IDLE | Accepted |
| IDLE | offer | a new incarnation of a member | IDLE | Held |
| UPLOADING or MERGING | offer | another learner | unchanged | Held |
| UPLOADING | offer | a later attempt of a member that has not uploaded | UPLOADING | Accepted |
| COLLECTING or GRACE | offer | a later attempt of a member that has uploaded | unchanged | Accepted |
| UPLOADING or MERGING | offer | a later attempt of a member that has uploaded | unchanged | Held |
| COLLECTING or GRACE | offer | a member's on a later base | unchanged | Accepted |
| UPLOADING or MERGING | offer | a member's on a later base | unchanged | Held |
| COLLECTING or GRACE or UPLOADING or MERGING | offer | seen | unchanged | Refused |
| any | offer | unknown base, wrong layout, not positive | unchanged | Refused |
| IDLE | decide | nothing due | IDLE | Wait(no deadline) |
| IDLE | decide | one is due, also of a new incarnation | COLLECTING | Wait(no deadline) |
| IDLE | decide | a suspected learner's is due, and not uploaded | IDLE | Wait(no deadline) |
| IDLE | decide | a suspected learner's is due and uploaded | COLLECTING | Wait(no deadline) |
| IDLE | decide | a suspected learner's is due, its earlier incarnation's is uploaded | COLLECTING | Wait(no deadline) |
| IDLE | decide | a suspected learner's earlier incarnation's is refused, its next is due | IDLE | Wait(no deadline) |
| IDLE | decide | draining, K members, none due | UPLOADING | Wait(upload deadline) |
| COLLECTING | decide | fewer than K in | COLLECTING | Wait(no deadline) |
| COLLECTING | decide | K in, one of them suspected | COLLECTING | Wait(no deadline) |
| COLLECTING | decide | fewer than K in, and one was refused | COLLECTING, attempt + 1 | Reopened |
| COLLECTING | decide | fewer than K in, and a suspected one was refused | COLLECTING | Wait(no deadline) |
| COLLECTING | decide | fewer than K in, a suspected one refused, its next held | COLLECTING, attempt + 1 | Reopened |
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
| UPLOADING | decide | the deadline, uploads come, another's held | COLLECTING, attempt + 1 | Reopened(one in vain) |
| GRACE or UPLOADING | decide | too few are left for K | COLLECTING, attempt + 1 | Reopened |
| MERGING | decide | whatever has changed | MERGING | Merge |
| MERGING | not_merged | the outcome is not finite | COLLECTING | nothing |

`decide` passes through every state whose time is over; the table names the state where it stays. M_t, the set that is
merged, is fixed on entering UPLOADING. While a run drains, any member opens the window, because no delta will be due
any more.

At the upload deadline, a missing upload is refused, with three exceptions. These are held for the next window if this
one is merged:

- a later attempt that replaced a member's delta after M_t was fixed, and has not had the whole upload time (in vain);
- an upload that still makes progress (in vain);
- any upload of a suspected learner, for which the window did not wait.

If fewer than K members have uploaded, and all missing uploads make progress, the deadline is extended, unless another
learner's delta is held.

After a refusal the window is reopened, so that the learner whose delta was refused publishes again at its next step. It
is not reopened for a suspected learner, whose deltas might be refused at every step. Such a learner renews its delta as
it trains on (`workers.rounds`), and takes part with that. `tests/syncer/test_window_table.py` reads this table.

Invariants: a learner is a member at most once; a member's base is the current version or the one before; there is no
merge below the quorum; a delta that was merged is never a member again (`Admission.refusal`). `decide` called twice
with the same arguments gives the same answer, except for `Reopened`, which is returned once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from diloco.pipeline.messages.fragment import Head, RefusalReason
from diloco.pipeline.messages.wire import MAX_MEMBERS
from diloco.syncer.admission import (
    DUPLICATE,
    Accepted,
    Admission,
    DeltaFormat,
    Held,
    NextWindow,
    Offer,
    Refused,
    same_delta,
    same_training,
    superseded,
)
from diloco.syncer.times import TIMES


class State(StrEnum):
    """Names of the phases in the table above."""

    IDLE = "idle"
    COLLECTING = "collecting"
    GRACE = "grace"
    UPLOADING = "uploading"
    MERGING = "merging"


@dataclass(frozen=True, slots=True)
class Conditions:
    """State of the run that `decide` depends on."""

    quorum: int
    """K; while the run drains, at most the number of live learners."""
    expected: frozenset[str]
    """Live learners on the current base. It is pointless to wait for any other."""
    live: int
    grace_s: float | None
    """None before the first estimates; the window uses `first_grace_s` then."""
    upload_s: float
    """Time that the uploads of M_t may take."""
    draining: bool = False
    suspected: frozenset[str] = frozenset()
    """Learners for which no window waits, and whose deltas count only once their payload has arrived."""
    arriving: frozenset[str] = frozenset()
    """Entries of deltas whose upload makes progress, however slowly, or is queued behind earlier uploads of its
    learner. None of them is refused for being late, since the learner would have to upload it again. A wait for one
    still counts against its learner as a wait in vain."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Call `decide` again at `until` (None: there is no deadline), or sooner if something has happened."""

    until: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge these contributions now; `overdue` did not upload in time."""

    contributions: tuple[Offer, ...]
    """Ordered by when their payloads were completed, which is the order of the sum."""
    overdue: tuple[Offer, ...]
    reason: str
    opened_at: float
    quorum_at: float
    fixed_at: float
    """When M_t was fixed."""
    in_vain: tuple[str, ...] = ()
    """Learners that the window waited for until the upload deadline: those of `overdue`, those with a later attempt
    since, and those whose uploads make progress too slowly."""
    silent: frozenset[str] = frozenset()
    """Learners that the window waited for from the quorum to M_t, and that sent no header."""

    @property
    def quorum_s(self) -> float:
        """Quorum time, s: from the window's opening to the K-th header."""
        return self.quorum_at - self.opened_at

    @property
    def grace_s(self) -> float:
        """Seconds from the quorum until M_t was fixed."""
        return self.fixed_at - self.quorum_at


@dataclass(frozen=True, slots=True)
class Reopened:
    """Too few deltas were left: the window is open again with the next attempt. Call `decide` again at once."""

    overdue: tuple[Offer, ...]
    reason: str
    opened_at: float
    in_vain: tuple[str, ...] = ()
    """See `Merge.in_vain`."""


Decision = Wait | Merge | Reopened


# --- the states ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """No due delta has arrived."""

    state: ClassVar[State] = State.IDLE


@dataclass(frozen=True, slots=True)
class Collecting:
    """The quorum is not met."""

    state: ClassVar[State] = State.COLLECTING
    opened_at: float


@dataclass(frozen=True, slots=True)
class Grace:
    """The quorum is met; others may follow until the deadline."""

    state: ClassVar[State] = State.GRACE
    opened_at: float
    quorum_at: float
    deadline: float
    without_header: frozenset[str]
    """Expected learners that were missing when the grace began."""


@dataclass(frozen=True, slots=True)
class Uploading:
    """M_t is fixed; its members upload until the deadline."""

    state: ClassVar[State] = State.UPLOADING
    opened_at: float
    quorum_at: float
    fixed_at: float
    deadline: float
    silent: frozenset[str]
    """See `Merge.silent`."""


@dataclass(frozen=True, slots=True)
class Merging:
    """The merge is decided; only its end changes this phase."""

    state: ClassVar[State] = State.MERGING
    merge: Merge


Phase = Idle | Collecting | Grace | Uploading | Merging


@dataclass(slots=True)
class _Member:
    offer: Offer
    since: float
    arrival: int | None = None
    """How many payloads of the window were complete before this one; None while it is not complete."""


class Window:
    """One fragment's window at one version."""

    def __init__(self, head: Head, delta_format: DeltaFormat, now: float) -> None:
        """Make the window of a head. It is open if the head shows an open one, whose learners wait for a merge."""
        self._admission = Admission(head, delta_format)
        self.version = head.version
        self.attempt = head.window.attempt
        self.phase: Phase = Idle() if head.window.state == "idle" else Collecting(now)
        self.held = NextWindow()
        self._members: dict[str, _Member] = {}
        self._uploads_seen = 0
        self._refused: set[str] = set()
        """Learners whose delta was refused in this attempt. They are no longer expected in it."""

    @property
    def state(self) -> State:
        """Name of the current phase."""
        return self.phase.state

    @property
    def members(self) -> tuple[str, ...]:
        """Learners whose delta is in this window, in the order of arrival."""
        return tuple(self._members)

    def member_offers(self) -> tuple[Offer, ...]:
        """Return the members' offers, in the order of `members`."""
        return tuple(m.offer for m in self._members.values())

    def not_uploaded(self) -> tuple[Offer, ...]:
        """Return the members' offers whose payload is not known to have arrived."""
        return tuple(m.offer for m in self._members.values() if m.arrival is None)

    def complete(self) -> tuple[Offer, ...]:
        """Return the members' offers whose payload has arrived, in the order of its arrival, which the merge keeps."""
        here = [(m.arrival, m.offer) for m in self._members.values() if m.arrival is not None]
        return tuple(offer for _, offer in sorted(here, key=lambda one: one[0]))

    def pending(self) -> tuple[Offer, ...]:
        """Return all offers that this window holds, members first."""
        return (*self.member_offers(), *self.held.offers)

    # --- events ------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> Accepted | Held | Refused:
        """Take a header that arrived: as a member's, for the next window, or not at all."""
        header = offer.header
        if (refusal := self._admission.refusal(header)) is not None:
            return refusal
        if self.held.has(header):
            return DUPLICATE
        fixed = isinstance(self.phase, Uploading | Merging)
        member = self._members.get(header.learner)
        if member is not None:
            return self._offer_again(member, offer, now, fixed)
        if fixed:
            return self.held.hold(offer)
        if len(self._members) >= MAX_MEMBERS:
            return Refused(RefusalReason.FLOOD, f"the window already has {MAX_MEMBERS} learners", max(0, header.tokens))
        return self._accept(offer, now, None)

    def _offer_again(self, member: _Member, offer: Offer, now: float, fixed: bool) -> Accepted | Held | Refused:
        """Take another offer of a member: in the place of its current one, for the next window, or not at all."""
        header, before = offer.header, member.offer.header
        if same_delta(header, before):
            return DUPLICATE
        again = same_training(header, before)
        if again and header.attempt < before.attempt:
            return superseded(header, before)
        # A later attempt holds more training, so it replaces the earlier one. It does so even in a fixed set while the
        # earlier payload is awaited, because a learner never uploads an attempt that it has replaced. A complete member
        # of a fixed set stays: if each later attempt replaced it, it might never be merged. The later attempt is held.
        complete = fixed and member.arrival is not None
        in_its_place = again and not complete and not isinstance(self.phase, Merging)
        if in_its_place or (not fixed and header.base_version > before.base_version):
            return self._accept(offer, now, member.offer)
        return self.held.hold(offer)

    def uploaded(self, offer: Offer) -> None:
        """Note that a member's payload has arrived, complete and sound."""
        member = self._members.get(offer.header.learner)
        if member is not None and member.offer.entry_id == offer.entry_id and member.arrival is None:
            member.arrival, self._uploads_seen = self._uploads_seen, self._uploads_seen + 1

    def refused(self, offer: Offer) -> None:
        """Take a delta out of the window, or out of those held for the next, since its payload was refused or vanished.

        While the window is idle, a held delta of the same learner takes its place, and is `not_uploaded` from then on.
        """
        member = self._members.get(offer.header.learner)
        if member is not None and member.offer.entry_id == offer.entry_id:
            del self._members[offer.header.learner]
            self._refused.add(offer.header.learner)
        self.held.remove(offer.entry_id)
        if self.state is State.IDLE:
            self._let_in()

    def not_merged(self, merge: Merge) -> None:
        """Refuse all that was in the decided merge, whose outcome is not finite, and collect again."""
        for offer in (*merge.contributions, *merge.overdue):
            self.refused(offer)
        self.phase = Collecting(merge.opened_at)

    # --- the decision --------------------------------------------------------------------------------

    def decide(self, now: float, given: Conditions) -> Decision:
        """Make the transitions that `_next` finds, one after the other, and return what to do, with a reason."""
        while not isinstance(step := self._next(now, given), Wait | Merge | Reopened):
            if isinstance(step, Merging):
                self._put_off(step.merge.overdue)
            self.phase = step
        if isinstance(step, Reopened):
            self._reopen(step, now)
        return step

    def _next(self, now: float, given: Conditions) -> Phase | Decision:
        """Return the phase that follows the current one, or what to do in the current one. Changes nothing."""
        phase, count = self.phase, self._count(given)
        missing = given.expected - self._refused - self._members.keys()
        left = f"{count} of quorum {given.quorum}"
        match phase:
            case Merging():
                return phase.merge
            case Idle():
                if (given.draining and self._members) or self._is_due(given.suspected):
                    return Collecting(now)
                return Wait(None, f"no delta asks for a merge, {len(self._members)} waiting")
            case Collecting():
                if count >= given.quorum:
                    grace_s = TIMES.first_grace_s if given.grace_s is None else given.grace_s
                    return Grace(phase.opened_at, now, now + grace_s, missing)
                if self._refused - given.suspected - self._members.keys() or self._others_wait():
                    return Reopened((), f"{left} left after a refusal", phase.opened_at)
                return Wait(None, f"{left} in, {given.live} live")
            case Grace():
                if count < given.quorum:
                    return Reopened((), f"{left} left", phase.opened_at)
                if missing and now < phase.deadline:
                    return Wait(phase.deadline, f"grace: {count} in, waiting for {', '.join(sorted(missing))}")
                silent = phase.without_header & missing
                return Uploading(phase.opened_at, phase.quorum_at, now, now + given.upload_s, silent)
            case Uploading():
                if count < given.quorum:
                    return Reopened((), f"{left} left", phase.opened_at)
                return self._next_of_uploads(phase, now, given, missing)

    def _is_due(self, suspected: frozenset[str]) -> bool:
        """Return whether a delta on the current base asks for a merge (it is due).

        A suspected learner's delta counts only if no upload of that learner is awaited. Otherwise a learner that sends
        nothing sound could make all others merge after each of their steps.
        """
        comes = suspected & {offer.header.learner for offer in self.not_uploaded()}
        here = [offer.header for offer in self.pending() if offer.header.learner not in comes]
        return any(header.due and header.base_version == self.version for header in here)

    def _count(self, given: Conditions) -> int:
        """Return how many headers count for the quorum."""
        return sum(m.arrival is not None or learner not in given.suspected for learner, m in self._members.items())

    def _others_wait(self) -> bool:
        """Return whether a learner that is not a member has a delta for the next window."""
        return any(offer.header.learner not in self._members for offer in self.held.offers)

    def _next_of_uploads(
        self, phase: Uploading, now: float, given: Conditions, missing: frozenset[str]
    ) -> Uploading | Merging | Wait | Reopened:
        done = self.complete()
        waiting = {
            learner: m for learner, m in self._members.items() if m.arrival is None and learner not in given.suspected
        }
        if waiting and now < phase.deadline:
            reason = f"{len(done)} of {len(self._members)} uploaded, waiting for {', '.join(waiting)}"
            return Wait(phase.deadline, reason)
        overdue, in_vain = _overdue(phase, waiting, now, given.arriving), tuple(waiting)
        if len(done) < given.quorum:
            all_come = all(m.offer.entry_id in given.arriving for m in waiting.values())
            if waiting and all_come and not self._others_wait():
                until = now + max(given.upload_s, TIMES.min_upload_s)
                return replace(phase, deadline=until)
            reason = f"{len(done)} of quorum {given.quorum} uploaded in time"
            return Reopened(overdue, reason, phase.opened_at, in_vain)
        absent = sorted({*missing, *waiting})
        reason = (
            f"{len(done)} in, without {', '.join(absent)}" if absent else (f"all {len(done)} expected learners are in")
        )
        times = phase.opened_at, phase.quorum_at, phase.fixed_at
        return Merging(Merge(done, overdue, reason, *times, in_vain, phase.silent))

    # --- transitions -----------------------------------------------------------------------------------

    def _accept(self, offer: Offer, now: float, replaced: Offer | None) -> Accepted:
        self._members[offer.header.learner] = _Member(offer, now)
        return Accepted(replaced)

    def _put_off(self, overdue: tuple[Offer, ...]) -> None:
        """Move the awaited members that are not overdue to the front of the next window."""
        later = [offer for offer in self.not_uploaded() if offer not in overdue]
        for offer in later:
            del self._members[offer.header.learner]
        self.held.put_first(later)

    def _reopen(self, reopened: Reopened, now: float) -> None:
        """Begin the next attempt with the members that are left and the deltas that were late."""
        for offer in reopened.overdue:
            del self._members[offer.header.learner]
        self.attempt += 1
        self._refused.clear()
        self.phase = Collecting(reopened.opened_at)
        self._let_in(now)

    def _let_in(self, now: float = -math.inf) -> None:
        """Make members of the deltas held for the next window, one of each learner."""
        for offer in self.held.pop_all():
            if offer.header.learner in self._members:
                self.held.put_last(offer)
            else:
                self._members[offer.header.learner] = _Member(offer, now)


def _overdue(
    phase: Uploading, waiting: Mapping[str, _Member], now: float, arriving: frozenset[str]
) -> tuple[Offer, ...]:
    """Return the awaited offers whose upload makes no progress and has had the whole upload time.

    That time begins when M_t was fixed, or when the offer came if it came later (a later attempt in a member's place).
    """
    time_s = phase.deadline - phase.fixed_at
    stopped = [m for m in waiting.values() if m.offer.entry_id not in arriving]
    return tuple(m.offer for m in stopped if m.since <= phase.fixed_at or now - m.since >= time_s)
