"""Which deltas may be in a window: by the head, the run's format, and what waits for the next window. Pure.

An offer is a delta's header with its stream entry. `window` asks here before it takes one as a member. `Doubts` says of
which learners nobody waits for one, because of what they sent.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.tape import RefusalReason
from diloco.pipeline.messages.wire import MAX_LEARNERS

MAX_MEMBERS = MAX_LEARNERS // 2
"""The head keeps the bases of two merges."""
LATE_A_LEARNER = 4
"""Deltas of one learner that wait for the next window at most: of two bases, before and after a restart."""


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
class Refused:
    """A delta is refused once and for all."""

    reason: RefusalReason
    detail: str
    lost_tokens: int


class DeltaFormat(NamedTuple):
    """What every delta of a fragment must be, by the run's spec."""

    layout: bytes
    """Digest that it must carry."""
    codec: str
    chunks: int
    """That it must announce."""

    def __str__(self) -> str:
        return f"{self.layout.hex()[:8]}, {self.codec}, {self.chunks}"


def same_delta(a: DeltaHeader, b: DeltaHeader) -> bool:
    """Whether two headers announce one payload."""
    return (a.learner, a.incarnation, a.serial) == (b.learner, b.incarnation, b.serial)


def same_training(a: DeltaHeader, b: DeltaHeader) -> bool:
    """Whether two headers are of one learner's training on one base: attempts at it."""
    return (a.learner, a.incarnation, a.base_version) == (b.learner, b.incarnation, b.base_version)


DUPLICATE = Refused(RefusalReason.DUPLICATE, "the same delta is already here", 0)


def outdone(header: DeltaHeader, before: DeltaHeader) -> Refused:
    """Another attempt at its training counts: what it has beyond that one is lost."""
    lost = max(0, header.tokens - before.tokens)
    return Refused(RefusalReason.DUPLICATE, "another delta on this base is in the window", lost)


class Admission:
    """Which headers can be merged into a head at all, now or with the next window."""

    def __init__(self, head: Head, delta_format: DeltaFormat) -> None:
        self._head, self._format = head, delta_format
        self._merged = {(m.learner, m.incarnation): m for m in head.merged}

    def refusal(self, header: DeltaHeader) -> Refused | None:
        """Why a header is refused by the head; None if it is not."""
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
    """Valid offers for the window to come, in order: of one training the newest attempt, of a learner so many."""

    def __init__(self) -> None:
        self._offers: list[Offer] = []

    @property
    def offers(self) -> tuple[Offer, ...]:
        """All, in the order in which the next window gets them."""
        return tuple(self._offers)

    def has(self, header: DeltaHeader) -> bool:
        """Whether this delta waits already."""
        return any(same_delta(header, offer.header) for offer in self._offers)

    def hold(self, offer: Offer) -> Late | Refused:
        """Keep one more, if there is room for it."""
        header = offer.header
        theirs = [(at, other) for at, other in enumerate(self._offers) if other.header.learner == header.learner]
        for at, other in theirs:
            if same_training(header, other.header):
                if header.attempt < other.header.attempt:
                    return outdone(header, other.header)
                self._offers[at] = offer
                return Late(replaced=other)
        if len(theirs) >= LATE_A_LEARNER or len(self._offers) >= MAX_MEMBERS:
            return Refused(RefusalReason.FLOOD, "too many deltas wait for the next window", max(0, header.tokens))
        self._offers.append(offer)
        return Late()

    def put_first(self, offers: Sequence[Offer]) -> None:
        """Members that leave their window, before all that came for the next one."""
        self._offers = [*offers, *self._offers]

    def put_last(self, offer: Offer) -> None:
        """One that was here before, and fits into no attempt yet."""
        self._offers.append(offer)

    def remove(self, entry_id: str) -> None:
        """One is refused after all."""
        self._offers = [offer for offer in self._offers if offer.entry_id != entry_id]

    def pop_all(self) -> tuple[Offer, ...]:
        """Empty it: the window opens again."""
        offers, self._offers = tuple(self._offers), []
        return offers


# --- doubted learners ---------------------------------------------------------------------------------

DOUBTED_AFTER = 3
"""Refusals in a row, or windows that waited in vain."""
ASKED_AGAIN = 16
"""Windows after which one waits for a silent learner again: its steps may have become longer than any that the syncer
knows of, and none that does not wait for it would ever have it."""
NOT_FINITE_MOST = 3
"""Deltas of one learner that are not finite, in a row: one or two are mended by what it adopts."""
STRANGERS = ""
"""Stands for all learners of whom nothing was merged lately."""
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
"""Reasons that no fault between a learner and its syncer explains, three times in a row."""


class Doubts:
    """Which learners of one fragment are not waited for, because of what they sent.

    A learner whose deltas were refused several times in a row for what was in them, or did not come in time, costs all
    time with each new one: the quorum counts its header, and falls short again. So from then on it counts only once its
    delta is here and sound, and nobody waits for it. One sound delta that took no longer than uploads have ends the
    doubt. It is no punishment: whoever forges another learner's name only makes the others not wait for that one.

    Nor is one waited for that sent no header in several windows that could have had it. A header ends that. Whoever
    writes reports may make up any number of learners, under other names each time: so those of whom nothing was merged
    lately count as one, until something of one is merged.

    At most as many learners as a run may have are remembered, the longest silent one goes.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._silent: dict[str, int] = {}
        """Learner, or `STRANGERS` -> windows that waited in vain; and once none waits, all windows since."""

    def refused(self, learner: str, reason: RefusalReason) -> None:
        """A delta of this learner was refused."""
        if reason in BAD:
            self._in_a_row[learner] = self._in_a_row.pop(learner, 0) + 1
            if len(self._in_a_row) > MAX_LEARNERS:
                del self._in_a_row[next(iter(self._in_a_row))]

    def heard(self, learner: str) -> None:
        """A header of it came; of `STRANGERS`: one of them was merged."""
        self._silent.pop(learner, None)

    def closed(self, silent: Iterable[str], known: Collection[str]) -> None:
        """A window was merged.

        Args:
            silent: waited for, for as long as a step takes, and sent no header.
            known: learners of whom something was merged lately.
        """
        for learner in self._given_up():
            self._silent[learner] += 1
        for learner in {learner if learner in known else STRANGERS for learner in silent}:
            self._silent[learner] = self._silent.pop(learner, 0) + 1
        while len(self._silent) > MAX_LEARNERS:
            del self._silent[next(iter(self._silent))]

    def _given_up(self) -> frozenset[str]:
        return frozenset(who for who, times in self._silent.items() if times >= DOUBTED_AFTER and times % ASKED_AGAIN)

    def sound(self, learner: str) -> None:
        """A delta of it came in time, and can be merged."""
        self._in_a_row.pop(learner, None)

    @property
    def learners(self) -> frozenset[str]:
        """Those that nobody waits for."""
        bad = frozenset(learner for learner, times in self._in_a_row.items() if times >= DOUBTED_AFTER)
        return (bad | self._given_up()) - {STRANGERS}

    @property
    def strangers(self) -> bool:
        """Whether nobody waits for learners of whom nothing was merged lately."""
        return STRANGERS in self._given_up()

    def among(self, learners: Collection[str], known: Collection[str]) -> frozenset[str]:
        """The same with those of these learners that are strangers, while nobody waits for any. known: as `closed`."""
        return self.learners | (frozenset(learners).difference(known) if self.strangers else frozenset())


class Diverged:
    """Learners whose deltas are not finite again and again, and of whom none was merged since; of all fragments.

    What they train is lost. They bring the run no further: else they would use up its budget (`RunState.set_aside`).
    """

    def __init__(self) -> None:
        self._times: dict[str, dict[int, int]] = {}
        """Learner -> fragment -> deltas in a row."""

    def refused(self, learner: str, fragment: int) -> None:
        """A delta of it has elements that are not finite."""
        times = self._times[learner] = self._times.pop(learner, {})
        times[fragment] = times.get(fragment, 0) + 1
        if len(self._times) > MAX_LEARNERS:
            del self._times[next(iter(self._times))]

    def merged(self, learner: str) -> None:
        """One of it was merged."""
        self._times.pop(learner, None)

    @property
    def learners(self) -> frozenset[str]:
        """Their names."""
        return frozenset(who for who, times in self._times.items() if max(times.values()) >= NOT_FINITE_MOST)
