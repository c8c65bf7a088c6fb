"""Decide when a learner publishes which fragment, and count its training. Pure: no clock, no torch, no I/O.

Theory of operation (paper, learner). For each fragment, inner steps and tokens are counted since its base was adopted.
A fragment is due after H steps on its base; in the first round at its own offset, so that fragments take turns. If
another learner has opened the fragment's window, this learner follows at its next step. A fragment without any tokens
on its base (all batches were masked) waits for some, because tokens are the delta's weight. There is one delta per
(base, attempt). While nothing is merged, a delta on the bus is renewed: a later attempt takes its place, so that a
crash loses only the work since that attempt. Adoption zeroes the counters; training past the last snapshot is
overwritten by it, and is counted as overwritten.

| state | event | guard | next | published |
|---|---|---|---|---|
| any | adopt | | TRAINING | nothing |
| NO_BASE or DUE or PUBLISHED or AGAIN | trained | | unchanged | nothing |
| TRAINING | trained | fewer than H steps on the base | TRAINING | nothing |
| TRAINING | trained | H steps, without a token | TRAINING | nothing |
| TRAINING | trained | H steps | DUE | nothing |
| NO_BASE | publications | a window is open | NO_BASE | nothing |
| TRAINING | publications | a window is open | PUBLISHED | a delta that follows |
| TRAINING | publications | no window, another version's, or it has this learner's delta | TRAINING | nothing |
| TRAINING | publications | a window is open, no token yet | TRAINING | nothing |
| DUE | publications | there is room | PUBLISHED | a delta that is due |
| AGAIN | publications | there is room | PUBLISHED | the next attempt |
| DUE or AGAIN | publications | there is no room | unchanged | nothing |
| PUBLISHED | publications | on the bus | PUBLISHED | nothing |
| PUBLISHED | publications | on the bus, and enough was trained since | PUBLISHED | a renewal |
| PUBLISHED | publications | on its way, and enough was trained since | PUBLISHED | nothing |
| PUBLISHED | publications | the window reopened without it | PUBLISHED | the next attempt |
| PUBLISHED | not_copied | | AGAIN | nothing |
| PUBLISHED | offer_again | | AGAIN | nothing |
| NO_BASE or TRAINING or DUE or AGAIN | offer_again | | unchanged | nothing |
| NO_BASE | last | | NO_BASE | nothing |
| TRAINING | last | no token | TRAINING | nothing |
| TRAINING | last | | PUBLISHED | a delta that follows |
| TRAINING | last | the run drains | PUBLISHED | a delta that is due |
| DUE | last | | PUBLISHED | a delta that is due |
| PUBLISHED | last | | PUBLISHED | nothing |
| PUBLISHED | last | the window reopened without it | PUBLISHED | the next attempt |
| AGAIN | last | | PUBLISHED | the next attempt |

Events are methods of `Rounds`: after each inner step, `trained` comes first, then `adopt` for each global that has
arrived, then `publications`. `last` is leaving. `tests/workers/test_rounds_table.py` reads this table.

A snapshot is held until its delta is on the bus. Snapshots must not pile up while the bus is slow or unavailable, so
only a few fit in memory at a time. A fragment that does not fit stays due: a later snapshot on the same base contains
everything that an earlier one does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from diloco.pipeline import party_memory
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.ramps import interval_at, interval_in_force

NONE_UPLOADED: Mapping[int, int] = MappingProxyType({})
# A delta is renewed once a sixth has been added to it, if that is more than half an interval. So renewals become rarer
# the longer nothing is merged, and even a very slow upload ends before the next one replaces it.
RENEWED_BY = 6
# Inner steps. With short steps, a round trip to the bus may take this many. A delta that does not arrive whole is
# refused before that.
MIN_RENEWED = 12
# Elements. New snapshots are taken while the held ones are smaller than this, or than a quarter of the model
# (`party_memory.ROOM_SHARE`).
MIN_ROOM = 2**24
# Each group of fragments can always hold this many snapshots, whatever their size: a header must not have to wait
# for the payload before its own.
AT_ONCE = party_memory.MIN_ROOM


@dataclass(frozen=True, slots=True)
class Base:
    """A global fragment as adopted: what the next delta of it is measured from."""

    fragment: int
    version: int
    digest: bytes
    values: Any
    """Flat float32 vector (elements,): an array, or a tensor where deltas are encoded on a device. At rank 0 of
    several: the number of the global, of which each rank has its part."""
    interval: int = 0
    """Inner steps until the fragment is due again, as in `Head.interval`; 0: use `ramps.interval_at`."""


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """The open window of a fragment, as its head shows it."""

    version: int
    attempt: int
    member: bool
    """True if this learner's delta is in it."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A delta to be published now."""

    base: Base
    attempt: int
    serial: int
    """Running number of this incarnation's deltas, from 1."""
    steps: int
    tokens: int
    due: bool
    renews: int = 0
    """Serial of the delta on the bus that this one replaces; 0: none.

    A renewal sends its payload before its header, so that there is a complete delta on the bus at all times."""


class Counts(NamedTuple):
    """A consistent view of what an incarnation has trained: trained = overwritten + published + not yet published."""

    steps: int
    tokens: int
    overwritten: int
    """Token-elements that were trained past a snapshot and then replaced by a global."""
    published: int
    """Token-elements in deltas; of several deltas on one base, only the largest counts."""
    part_unix_s: float | None
    """Start of the part of the run that these counts belong to (`LearnerReport.part_unix_s`)."""


class State(StrEnum):
    """States of one fragment, named as in the table above."""

    NO_BASE = "no base"
    TRAINING = "training"
    """Nothing was published on the base, and nothing is due."""
    DUE = "due"
    PUBLISHED = "published"
    AGAIN = "again"
    """Published, but the bus may have lost it."""


@dataclass(slots=True)
class _Fragment:
    elements: int
    offset: int
    """Steps after which it is due in the first round."""
    state: State = State.NO_BASE
    base: Base | None = None
    due_after: int = 0
    """Steps on the base."""
    steps: int = 0
    tokens: int = 0
    published_steps: int = 0
    """Steps in the newest delta on this base; `published_tokens` are its tokens."""
    published_tokens: int = 0
    serial: int = 0
    """Serial of the newest delta on any base."""
    next_attempt: int = 0
    window_attempt: int = 0
    """The window's attempt when this learner last published into it."""

    def window(self, windows: Mapping[int, OpenWindow]) -> OpenWindow | None:
        """Return the fragment's open window, if it is on the version that this learner has adopted."""
        if self.base is None or (window := windows.get(self.base.fragment)) is None:
            return None
        return window if window.version == self.base.version else None

    def reopened(self, window: OpenWindow | None) -> bool:
        """Return whether the window asks for another attempt."""
        return window is not None and window.attempt > self.window_attempt and not window.member


def renewed_after(sync: SyncSpec, interval: int, steps: int) -> float:
    """Return how many inner steps beyond those in a delta must be done before it is renewed.

    Args:
        sync: for H.
        interval: steps after which the fragment is due, as in force now.
        steps: inner steps in the delta.
    """
    return max(max(interval, sync.sync_interval) / 2, MIN_RENEWED, steps / RENEWED_BY)


class Rounds:
    """The states and counters of all fragments, for one incarnation of a learner."""

    def __init__(self, layout: Layout, sync: SyncSpec) -> None:
        self._sync = sync
        count, first = len(layout.fragments), interval_at(sync, 0)
        self._fragments = [_Fragment(f.elements, offset=1 + f.id * first // count) for f in layout.fragments]
        self._room = max(MIN_ROOM, layout.elements / party_memory.ROOM_SHARE)
        # Serial -> fragment of each delta whose snapshot is still held, as far as the training thread knows.
        self._held: dict[int, int] = {}
        self.deltas = 0  # published so far
        self.steps = 0
        self.tokens = 0
        self.overwritten = 0
        self.published = 0
        self.part_unix_s: float | None = None
        # The exchange thread reads this for reports. It is replaced as a whole, so that it never sees half a change.
        self.counts = Counts(0, 0, 0, 0, None)

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment, -1 before the first."""
        return tuple(-1 if f.base is None else f.base.version for f in self._fragments)

    @property
    def bases(self) -> Iterator[Base]:
        """The adopted bases of all fragments that have one."""
        return (f.base for f in self._fragments if f.base is not None)

    def adopt(self, base: Base) -> None:
        """Restart a fragment's counters on a new base: a newer global, or an older one after a rewind."""
        f = self._fragments[base.fragment]
        self.overwritten += (f.tokens - f.published_tokens) * f.elements
        f.due_after = self._due_after(f, base)
        f.base, f.state = base, State.TRAINING
        f.steps = f.tokens = f.published_steps = f.published_tokens = f.next_attempt = f.window_attempt = 0
        self._count()

    def in_part(self, state: RunState | None) -> None:
        """Switch the counts to the part of the run that `state` is in, if that is a new one.

        The run's state already contains what was trained in an earlier part. Only training on the current bases, which
        may still be merged, is carried over. The state may know some of that too, so at most one interval of each
        surviving learner is counted twice.
        """
        if state is None or state.started_unix_s == self.part_unix_s:
            return
        if self.part_unix_s is not None:
            self.tokens = max(f.tokens for f in self._fragments)
            self.published = sum(f.published_tokens * f.elements for f in self._fragments)
            self.overwritten = sum((self.tokens - f.tokens) * f.elements for f in self._fragments)
        self.part_unix_s = state.started_unix_s
        self._count()

    def offer_again(self) -> None:
        """Mark every published delta for another attempt: after an outage the bus may have lost what it acknowledged.

        A delta that did arrive is refused as a duplicate, which costs its upload and nothing else.
        """
        for f in self._fragments:
            if f.state is State.PUBLISHED:
                f.state = State.AGAIN

    def not_copied(self, publication: Publication) -> None:
        """Take back that a delta is published: copying its values failed, and the loop may survive that error."""
        self._fragments[publication.base.fragment].state = State.AGAIN
        self._held.pop(publication.serial, None)

    def trained(self, tokens: int) -> None:
        """Count one inner step of the whole model; tokens: 0 if there was nothing to train on."""
        self.steps += 1
        self.tokens += tokens
        for f in self._fragments:
            f.steps += 1
            f.tokens += tokens
            if f.state is State.TRAINING and f.tokens and f.steps >= f.due_after:
                f.state = State.DUE
        self._count()

    def publications(
        self,
        windows: Mapping[int, OpenWindow],
        uploaded: Mapping[int, int] = NONE_UPLOADED,
        released: Mapping[int, int] | None = None,
    ) -> Iterator[Publication]:
        """Yield what to publish after this step; each item counts as published once it is taken from the iterator.

        Args:
            windows: the open ones, by fragment.
            uploaded: fragment -> serial of the last delta that may be renewed (`exchange.shared.Shared`).
            released: fragment -> serial of the last delta whose snapshot is no longer held. While memory is left, the
                fragment that has waited longest comes first. None: all fit. Each group has a budget of its own, so that
                no fragment waits for another group's unavailable server.
        """
        wanted = self.wanted(windows, uploaded)
        if released is None:
            for p in wanted:
                yield self.publication(p, windows)
            return
        self._held = {serial: p for serial, p in self._held.items() if serial > released.get(p, 0)}
        held, lanes = sum(self._fragments[p].elements for p in self._held.values()), self._sync.groups
        busy = Counter(p % lanes for p in self._held.values())
        for p in sorted(wanted, key=lambda p: self._fragments[p].serial):
            if held < self._room or busy[p % lanes] < AT_ONCE:
                publication = self.publication(p, windows)
                held += self._fragments[p].elements
                busy[p % lanes] += 1
                self._held[publication.serial] = p
                yield publication

    def wanted(
        self, windows: Mapping[int, OpenWindow], uploaded: Mapping[int, int] = NONE_UPLOADED, ahead: int = 0
    ) -> Iterator[int]:
        """Yield the fragments to publish after this step; see `publications` for the arguments. Nothing is counted.

        ahead: answer for this many steps later, if nothing but steps happens until then.
        """
        for p, f in enumerate(self._fragments):
            window = f.window(windows)
            match f.state:
                case State.NO_BASE:
                    wanted = False
                case State.TRAINING:
                    follows = window is not None and not window.member
                    wanted = f.tokens > 0 and (follows or f.steps + ahead >= f.due_after)
                case State.PUBLISHED:
                    on_bus = uploaded.get(p) == f.serial
                    wanted = f.reopened(window) or (on_bus and self._renewable(f))
                case State.DUE | State.AGAIN:
                    wanted = True
            if wanted:
                yield p

    def publication(self, p: int, windows: Mapping[int, OpenWindow]) -> Publication:
        """Return what is published now of a fragment that `wanted` has yielded, and count it as published."""
        f = self._fragments[p]
        assert f.tokens, "requested without tokens"  # noqa: S101
        return self._publication(f, windows, due=False)

    def last(self, windows: Mapping[int, OpenWindow], due: bool) -> Iterator[Publication]:
        """Yield what a leaving learner publishes: fragments unpublished on their base, or to be published again.

        Training past an earlier snapshot on the same base can no longer be merged, so it counts as overwritten.

        due: the run is draining, so all of these may open windows. Otherwise only those may that are due by their
        steps; there are some where earlier uploads have kept a snapshot waiting for memory.
        """
        for f in self._fragments:
            is_on_bus = f.state is State.PUBLISHED and not f.reopened(f.window(windows))
            if f.base is not None and f.tokens and not is_on_bus:
                yield self._publication(f, windows, due)
            self.overwritten += (f.tokens - f.published_tokens) * f.elements
            f.tokens = f.published_tokens
        self._count()

    def forget(self) -> None:
        """Release the values of all bases, once nothing will be published any more."""
        for f in self._fragments:
            if f.base is not None:
                f.base = replace(f.base, values=None)

    def _publication(self, f: _Fragment, windows: Mapping[int, OpenWindow], due: bool) -> Publication:
        """due: it may open a window, however few its steps."""
        assert f.base is not None, "published without a base"  # noqa: S101
        window = f.window(windows)
        # Only a delta that is surely on the bus, and that no window has asked to be replaced, can be renewed.
        renews = f.serial if f.state is State.PUBLISHED and not f.reopened(window) else 0
        f.window_attempt = window.attempt if window else 0
        attempt = max(f.window_attempt, f.next_attempt)
        self.deltas += 1
        self.published += (f.tokens - f.published_tokens) * f.elements
        f.state, f.serial, f.next_attempt = State.PUBLISHED, self.deltas, attempt + 1
        f.published_steps, f.published_tokens = f.steps, f.tokens
        self._count()
        return Publication(f.base, attempt, f.serial, f.steps, f.tokens, due or f.steps >= f.due_after, renews)

    def _due_after(self, f: _Fragment, base: Base) -> int:
        """Return the steps on a new base after which the fragment is due."""
        interval = interval_in_force(self._sync, base.version, base.interval)
        if f.state is not State.NO_BASE:
            return interval
        # First round. At the start of a run, fragments take turns from the first step on. A learner that joins later
        # must not open windows early, so its turns begin one interval later; by then it has usually followed a window.
        return f.offset if base.version == 0 else interval + f.offset

    def _renewable(self, f: _Fragment) -> bool:
        """Return whether enough was trained since the delta to be worth another upload."""
        late = f.steps - f.published_steps >= renewed_after(self._sync, f.due_after, f.published_steps)
        return late and f.tokens > f.published_tokens

    def _count(self) -> None:
        self.counts = Counts(self.steps, self.tokens, self.overwritten, self.published, self.part_unix_s)
