"""Admission of deltas to a window, by the head, the run's format, and the deltas held for the next window. Pure.

An offer is a delta's header with its stream entry. `window` asks `Admission` before it takes an offer as a member.
`Suspects` tells for which learners no window waits, because of what they sent or failed to send; `UploadProgress`,
which uploads still make progress.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco.pipeline.messages.fragment import DeltaHeader, Head, RefusalReason
from diloco.pipeline.messages.wire import MAX_LEARNERS, MAX_MEMBERS
from diloco.syncer.times import TIMES

# Deltas of one learner that can wait for the next window: on two bases, before and after a restart of the learner.
HELD_A_LEARNER = 4


@dataclass(frozen=True, slots=True)
class Offer:
    """A delta's header and its entry on its learner's stream."""

    entry_id: str
    header: DeltaHeader


@dataclass(frozen=True, slots=True)
class Accepted:
    """The offer is a member; it may have replaced an older one of the same learner."""

    replaced: Offer | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """The offer is held for the next window (M_t is fixed, or its learner is a member already).

    It may have replaced an older attempt there.
    """

    replaced: Offer | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The delta is refused for good."""

    reason: RefusalReason
    detail: str
    lost_tokens: int


class DeltaFormat(NamedTuple):
    """Format that every delta of a fragment must have, by the run's spec."""

    layout: bytes
    """Digest of the layout, which the header must carry."""
    codec: str
    chunks: int
    """Number of chunks, which the header must announce."""

    def __str__(self) -> str:
        return f"{self.layout.hex()[:8]}, {self.codec}, {self.chunks}"


def same_delta(a: DeltaHeader, b: DeltaHeader) -> bool:
    """Return whether two headers announce the same payload."""
    return (a.learner, a.incarnation, a.serial) == (b.learner, b.incarnation, b.serial)


def same_training(a: DeltaHeader, b: DeltaHeader) -> bool:
    """Return whether two headers are attempts at the same training: one learner's, on one base."""
    return (a.learner, a.incarnation, a.base_version) == (b.learner, b.incarnation, b.base_version)


DUPLICATE = Refused(RefusalReason.DUPLICATE, "the same delta is already here", 0)


def superseded(header: DeltaHeader, before: DeltaHeader) -> Refused:
    """Return the refusal of a delta because another attempt at its training counts; its additional tokens are lost."""
    lost = max(0, header.tokens - before.tokens)
    return Refused(RefusalReason.DUPLICATE, "a different delta on this base is already in the window", lost)


class Admission:
    """Tells which headers can be merged into a head at all, in the current window or the next."""

    def __init__(self, head: Head, delta_format: DeltaFormat) -> None:
        self._head, self._format = head, delta_format
        self._merged = {(m.learner, m.incarnation): m for m in head.merged}

    def refusal(self, header: DeltaHeader) -> Refused | None:
        """Return why a header cannot be merged into the head; None if it can."""
        has, head, all_of_it = (
            DeltaFormat(header.layout, header.codec, header.chunks),
            self._head,
            max(0, header.tokens),
        )
        if has != self._format:
            detail = f"layout {has} chunks; the run has {self._format}"
            return Refused(RefusalReason.WRONG_LAYOUT, detail, all_of_it)
        if header.steps <= 0 or header.tokens <= 0:
            detail = f"steps={header.steps} tokens={header.tokens}"
            return Refused(RefusalReason.NOT_POSITIVE, detail, all_of_it)
        before = self._merged.get((header.learner, header.incarnation))
        if before is not None and header.base_version <= before.base_version:
            same_base = header.base_version == before.base_version
            lost = max(0, header.tokens - before.tokens) if same_base else all_of_it
            return Refused(RefusalReason.ALREADY_MERGED, f"base {before.base_version} was merged before", lost)
        if header.base_version < head.version - 1:
            detail = f"base {header.base_version}, the head is at {head.version}"
            return Refused(RefusalReason.TOO_STALE, detail, all_of_it)
        on_record = head.digest if header.base_version == head.version else head.previous_digest
        if header.base_version > head.version or header.base_digest != on_record:
            detail = f"base {header.base_version} {header.base_digest.hex()[:8]}"
            return Refused(RefusalReason.UNKNOWN_BASE, detail, all_of_it)
        return None


class NextWindow:
    """Valid offers for the next window, in order: the newest attempt of each training, `HELD_A_LEARNER` per learner."""

    def __init__(self) -> None:
        self._offers: list[Offer] = []

    @property
    def offers(self) -> tuple[Offer, ...]:
        """All held offers, in the order in which the next window gets them."""
        return tuple(self._offers)

    def has(self, header: DeltaHeader) -> bool:
        """Return whether this delta is held already."""
        return any(same_delta(header, offer.header) for offer in self._offers)

    def hold(self, offer: Offer) -> Held | Refused:
        """Hold an offer if the limit allows it; it replaces an earlier attempt at the same training."""
        header = offer.header
        theirs = [(at, other) for at, other in enumerate(self._offers) if other.header.learner == header.learner]
        for at, other in theirs:
            if same_training(header, other.header):
                if header.attempt < other.header.attempt:
                    return superseded(header, other.header)
                self._offers[at] = offer
                return Held(replaced=other)
        if len(theirs) >= HELD_A_LEARNER or len(self._offers) >= MAX_MEMBERS:
            return Refused(
                RefusalReason.FLOOD, "too many deltas are waiting for the next window", max(0, header.tokens)
            )
        self._offers.append(offer)
        return Held()

    def put_first(self, offers: Sequence[Offer]) -> None:
        """Put members that leave their window before all held offers."""
        self._offers = [*offers, *self._offers]

    def put_last(self, offer: Offer) -> None:
        """Put back an offer that was held before and cannot join while its learner has a member in the window."""
        self._offers.append(offer)

    def remove(self, entry_id: str) -> None:
        """Drop an offer, which was refused after all."""
        self._offers = [offer for offer in self._offers if offer.entry_id != entry_id]

    def pop_all(self) -> tuple[Offer, ...]:
        """Return all held offers and hold none, since the window opens again."""
        offers, self._offers = tuple(self._offers), []
        return offers


# --- suspected learners ---------------------------------------------------------------------------------

# Refusals in a row, or windows that waited unsuccessfully, after which a learner is suspected.
SUSPECTED_AFTER = 3
# One window in this many waits for a silent learner again. Its steps may have become longer than any that the syncer
# knows of, and then no window that does not wait for it would ever get its delta.
ASKED_AGAIN = 16
# Deltas in a row that are not finite, after which a learner counts as diverged. One or two can be cured by the global
# values that it adopts.
MAX_NOT_FINITE = 3
# Stands for all learners of which nothing was merged lately.
STRANGERS = ""
# Reasons that cannot occur three times in a row through faults between learner and syncer.
BAD = frozenset(
    {
        RefusalReason.WRONG_LAYOUT,
        RefusalReason.NON_FINITE,
        RefusalReason.ABSURD_NORM,
        RefusalReason.NOT_POSITIVE,
        RefusalReason.BAD_PAYLOAD,
        RefusalReason.UPLOAD_TIMEOUT,
        RefusalReason.FLOOD,
    }
)


class Suspects:
    """Learners of one fragment for which its windows do not wait, because of what they sent or failed to send.

    If a learner's deltas were refused for their content several times in a row, or came too late, each further one
    would cost all others time: the quorum counts its header and falls short again. From then on its delta counts only
    once it has arrived and is sound, and no window waits for it. One sound delta that was uploaded within the deadline
    ends the suspicion. Being suspected is not a punishment: somebody who forges another learner's name only achieves
    that no window waits for that learner.

    A learner that sent no header in several windows that waited for it is not waited for either, until it sends one. A
    party that writes false reports can invent any number of learners, under new names each time. So all learners of
    which nothing was merged lately count as one (`STRANGERS`), until a delta of one of them is merged.

    At most as many learners are remembered as a run may have; the oldest entries are dropped.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._silent: dict[str, int] = {}
        """Learner, or `STRANGERS` -> windows that waited for it and timed out; once given up, all windows count."""

    def refused(self, learner: str, reason: RefusalReason) -> None:
        """Note that a delta of this learner was refused, or was waited for unsuccessfully."""
        if reason in BAD:
            self._in_a_row[learner] = self._in_a_row.pop(learner, 0) + 1
            if len(self._in_a_row) > MAX_LEARNERS:
                del self._in_a_row[next(iter(self._in_a_row))]

    def header_arrived(self, learner: str) -> None:
        """Note that a header of a learner came, or (for `STRANGERS`) that a delta of one of them was merged."""
        self._silent.pop(learner, None)

    def closed(self, silent: Iterable[str], known: Collection[str]) -> None:
        """Note that a window was merged.

        Args:
            silent: learners that sent no header although the window waited for them for as long as a step takes.
            known: learners of which something was merged lately.
        """
        for learner in self._given_up():
            self._silent[learner] += 1
        for learner in {learner if learner in known else STRANGERS for learner in silent}:
            self._silent[learner] = self._silent.pop(learner, 0) + 1
        while len(self._silent) > MAX_LEARNERS:
            del self._silent[next(iter(self._silent))]

    def _given_up(self) -> frozenset[str]:
        return frozenset(who for who, times in self._silent.items() if times >= SUSPECTED_AFTER and times % ASKED_AGAIN)

    def delta_usable(self, learner: str) -> None:
        """Note that a delta of a learner came in time and can be merged."""
        self._in_a_row.pop(learner, None)

    @property
    def learners(self) -> frozenset[str]:
        """The learners for which no window waits, without strangers."""
        bad = frozenset(learner for learner, times in self._in_a_row.items() if times >= SUSPECTED_AFTER)
        return (bad | self._given_up()) - {STRANGERS}

    @property
    def strangers(self) -> bool:
        """True if no window waits for learners of which nothing was merged lately."""
        return STRANGERS in self._given_up()

    def among(self, learners: Collection[str], known: Collection[str]) -> frozenset[str]:
        """Return the suspected learners, plus those not in `known` while no window waits for strangers."""
        return self.learners | (frozenset(learners).difference(known) if self.strangers else frozenset())


class Diverged:
    """Learners whose deltas were repeatedly not finite, with none merged since. Covers all fragments.

    Their training is lost, so their tokens are not counted against the run's budget, which they would otherwise use up
    (`RunState.set_aside`).
    """

    def __init__(self) -> None:
        self._times: dict[str, dict[int, int]] = {}
        """Learner -> fragment -> number of deltas in a row that were not finite."""

    def refused(self, learner: str, fragment: int) -> None:
        """Note that a delta of this learner has elements that are not finite."""
        times = self._times[learner] = self._times.pop(learner, {})
        times[fragment] = times.get(fragment, 0) + 1
        if len(self._times) > MAX_LEARNERS:
            del self._times[next(iter(self._times))]

    def merged(self, learner: str) -> None:
        """Note that a delta of this learner was merged."""
        self._times.pop(learner, None)

    @property
    def learners(self) -> frozenset[str]:
        """Names of the diverged learners."""
        return frozenset(who for who, times in self._times.items() if max(times.values()) >= MAX_NOT_FINITE)


# --- uploads on their way --------------------------------------------------------------------------------

# Uploads that missed the deadline lengthen it by at most this factor.
TIMEOUT_FACTOR = 2.0
# An upload has stopped if nothing came for this many times its last gap between two chunks, or for `TIMEOUT_FACTOR`
# upload deadlines, whichever is shorter.
SILENT_CHUNKS = 4


class UploadProgress:
    """Progress of each learner's uploads, in all fragments of one syncer.

    On each of its lanes a learner uploads its deltas in the order of their serials. So a delta of which nothing has
    come yet is still queued while earlier ones make progress. The silence between two chunks is measured for each
    learner. However long its gaps are, a learner may be silent for at most `TIMEOUT_FACTOR` upload deadlines.
    """

    # Bound of the incarnations that are remembered; those that were silent for longest are dropped.
    MAX_TRACKED = 1024

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float, float]] = {}
        """Incarnation -> serial of the delta whose chunk came last, when it came, and the gap before it, s."""

    def chunk_arrived(self, header: DeltaHeader, now: float) -> None:
        """Note that a chunk of this delta came."""
        serial, at, gap_s = self._last.pop(header.incarnation, (header.serial, now, 0.0))
        self._last[header.incarnation] = header.serial, now, now - at if serial == header.serial else gap_s
        while len(self._last) > self.MAX_TRACKED:
            del self._last[next(iter(self._last))]

    def is_progressing(self, header: DeltaHeader, came_s: float, now: float, upload_s: float) -> bool:
        """Return whether an upload makes progress, or is queued behind earlier ones that do.

        `came_s` is when its last chunk came.
        """
        serial, at, gap_s = self._last.get(header.incarnation, (header.serial, -math.inf, 0.0))
        since = now - max(TIMES.min_upload_s, min(SILENT_CHUNKS * gap_s, TIMEOUT_FACTOR * upload_s))
        return came_s >= since or (serial < header.serial and at >= since)
