"""Decide when a learner publishes which fragment, and count its training. Pure: no clock, no torch, no I/O.

For each fragment, inner steps and tokens are counted since its base was adopted (paper, learner). A fragment is due
after H steps on its base; in the first round it is due at its own offset, so that fragments take turns. If another
learner has opened the fragment's window, this learner follows at its next step. A fragment without any tokens on its
base (all batches were masked) waits for some, because tokens are the delta's weight. There is one delta per (base,
attempt). While nothing is merged, a delta on the bus is renewed: a later attempt takes its place, so that a crash loses
only the work since that attempt. Adoption zeroes the counters; training past the last snapshot is overwritten by it,
and is counted as overwritten.

A snapshot is held until its delta is on the bus. Snapshots must not pile up while the bus is slow or unavailable, so
there is room for a few at a time. A fragment that finds no room stays due: a later snapshot on the same base contains
everything that an earlier one does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
LEAST_RENEWED = 12
# Elements. New snapshots are taken while the held ones are smaller than this, or than a quarter of the model
# (`party_memory.ROOM_SHARE`).
LEAST_ROOM = 2**24
# Each group of fragments always has room for this many snapshots, whatever their size: a header must not have to wait
# for the payload before its own.
AT_ONCE = party_memory.ROOM_LEAST


@dataclass(frozen=True, slots=True)
class Base:
    """A global fragment as adopted: what the next delta of it is measured from."""

    fragment: int
    version: int
    digest: bytes
    values: Any
    """Flat float32 vector (elements,): an array, or a tensor where deltas are encoded on a device."""
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


@dataclass(slots=True)
class _Counters:
    elements: int
    first_due: int
    base: Base | None = None
    steps: int = 0
    tokens: int = 0
    published_tokens: int = 0
    published_steps: int = 0
    published_serial: int = 0
    published_attempt: int | None = None
    window_attempt: int = 0
    """The window's attempt when this learner last published into it."""
    again: bool = False
    """The delta on this base may be lost: publish it once more, as the next attempt."""
    rounds: int = 0


def renewed_after(sync: SyncSpec, interval: int, steps: int) -> float:
    """Return how many inner steps beyond those in a delta must be done before it is renewed.

    Args:
        sync: for H.
        interval: steps after which the fragment is due, as in force now.
        steps: inner steps in the delta.
    """
    return max(max(interval, sync.sync_interval) / 2, LEAST_RENEWED, steps / RENEWED_BY)


class Rounds:
    """The counters of all fragments, for one incarnation of a learner."""

    def __init__(self, layout: Layout, sync: SyncSpec) -> None:
        self._sync = sync
        count, first = len(layout.fragments), interval_at(sync, 0)
        self._fragments = [_Counters(f.elements, first_due=1 + f.id * first // count) for f in layout.fragments]
        self._room = max(LEAST_ROOM, layout.elements / party_memory.ROOM_SHARE)
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
        return tuple(-1 if c.base is None else c.base.version for c in self._fragments)

    @property
    def bases(self) -> Iterator[Base]:
        """The adopted bases of all fragments that have one."""
        return (counters.base for counters in self._fragments if counters.base is not None)

    def adopt(self, base: Base) -> None:
        """Restart a fragment's counters on a new base: a newer global, or an older one after a rewind."""
        counters = self._fragments[base.fragment]
        self.overwritten += (counters.tokens - counters.published_tokens) * counters.elements
        counters.rounds += counters.base is not None
        counters.base = base
        counters.steps = counters.tokens = counters.published_tokens = counters.published_steps = 0
        counters.published_attempt = None
        counters.window_attempt = 0
        counters.again = False
        self._count()

    def in_part(self, state: RunState | None) -> None:
        """Switch the counts to the part of the run that `state` is in, if that is a new one.

        The run's state already contains what was trained in an earlier part. Only training on the present bases, which
        may still be merged, is carried over. The state may know some of that too, so at most one interval of each
        surviving learner is counted twice.
        """
        if state is None or state.started_unix_s == self.part_unix_s:
            return
        if self.part_unix_s is not None:
            each = self._fragments
            self.tokens = max(counters.tokens for counters in each)
            self.published = sum(counters.published_tokens * counters.elements for counters in each)
            self.overwritten = sum((self.tokens - counters.tokens) * counters.elements for counters in each)
        self.part_unix_s = state.started_unix_s
        self._count()

    def offer_again(self) -> None:
        """Mark every published delta for another attempt: after an outage the bus may have lost what it acknowledged.

        A delta that did arrive is refused as a duplicate, which costs its upload and nothing else.
        """
        for counters in self._fragments:
            counters.again = counters.published_attempt is not None

    def trained(self, tokens: int) -> None:
        """Count one inner step of the whole model; tokens: 0 if there was nothing to train on."""
        self.steps += 1
        self.tokens += tokens
        for counters in self._fragments:
            counters.steps += 1
            counters.tokens += tokens
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
            released: fragment -> serial of the last delta whose snapshot is no longer held. While there is room, the
                fragment that has waited longest comes first. None: there is room for all. Each group has room of its
                own, so that no fragment waits for another group's unavailable server.
        """
        wanted = self.wanted(windows, uploaded)
        if released is None:
            for p in wanted:
                yield self.publication(p, windows)
            return
        self._held = {serial: p for serial, p in self._held.items() if serial > released.get(p, 0)}
        held, lanes = sum(self._fragments[p].elements for p in self._held.values()), self._sync.groups
        busy = Counter(p % lanes for p in self._held.values())
        for p in sorted(wanted, key=lambda p: self._fragments[p].published_serial):
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
        for p, counters in enumerate(self._fragments):
            base, window = counters.base, self._window(p, windows)
            if base is None or counters.tokens == 0:
                continue
            if counters.published_attempt is None:
                due = counters.steps + ahead >= self._due_after(counters)
                if due or (window is not None and not window.member):
                    yield p
            elif (
                counters.again
                or self._reopened(counters, window)
                or (uploaded.get(p) == counters.published_serial and self._renewable(counters))
            ):
                yield p

    def publication(self, p: int, windows: Mapping[int, OpenWindow]) -> Publication:
        """Return what is published now of a fragment that `wanted` has yielded, and count it as published."""
        counters, window = self._fragments[p], self._window(p, windows)
        base = counters.base
        assert base is not None, "wanted without a base"  # noqa: S101
        assert counters.tokens, "wanted without tokens"  # noqa: S101
        replaces = counters.published_attempt is not None and not (counters.again or self._reopened(counters, window))
        due = counters.steps >= self._due_after(counters)
        return self._publication(counters, base, window, due, renews=counters.published_serial * replaces)

    def _window(self, p: int, windows: Mapping[int, OpenWindow]) -> OpenWindow | None:
        """Return the fragment's open window, if it is on the version that this learner has adopted."""
        window, base = windows.get(p), self._fragments[p].base
        return window if window is not None and base is not None and window.version == base.version else None

    @staticmethod
    def _reopened(counters: _Counters, window: OpenWindow | None) -> bool:
        return window is not None and window.attempt > counters.window_attempt and not window.member

    def last(self, windows: Mapping[int, OpenWindow], due: bool) -> Iterator[Publication]:
        """Yield what to publish on leaving: fragments unpublished on their base, or to be published once more.

        Training past an earlier snapshot on the same base can no longer be merged, so it counts as overwritten.

        due: the run is draining, so all of these may open windows. Otherwise only those may that are due by their
        steps; there are some where earlier uploads have kept a snapshot waiting for room.
        """
        for p, counters in enumerate(self._fragments):
            base, window = counters.base, self._window(p, windows)
            unsaid = counters.published_attempt is None or counters.again or self._reopened(counters, window)
            if base is not None and counters.tokens > 0 and unsaid:
                late = counters.steps >= self._due_after(counters)
                yield self._publication(counters, base, window, due or late)
            self.overwritten += (counters.tokens - counters.published_tokens) * counters.elements
            counters.tokens = counters.published_tokens
        self._count()

    def forget(self) -> None:
        """Release the values of all bases, once nothing will be published any more."""
        for counters in self._fragments:
            if counters.base is not None:
                counters.base = replace(counters.base, values=None)

    def _count(self) -> None:
        self.counts = Counts(self.steps, self.tokens, self.overwritten, self.published, self.part_unix_s)

    def _due_after(self, counters: _Counters) -> int:
        base = counters.base
        if base is None:
            return self._sync.sync_interval
        interval = interval_in_force(self._sync, base.version, base.interval)
        if counters.rounds:
            return interval
        # First round. At the start of a run, fragments take turns from the first step on. A learner that joins later
        # must not open windows early, so its turns begin one interval later; by then it has usually followed a window.
        return counters.first_due if base.version == 0 else interval + counters.first_due

    def _renewable(self, counters: _Counters) -> bool:
        """Return whether enough was trained since the delta to be worth another upload."""
        more = counters.steps - counters.published_steps
        late = more >= renewed_after(self._sync, self._due_after(counters), counters.published_steps)
        return late and counters.tokens > counters.published_tokens

    def _publication(
        self, counters: _Counters, base: Base, window: OpenWindow | None, due: bool, renews: int = 0
    ) -> Publication:
        counters.window_attempt = window.attempt if window else 0
        next_attempt = 0 if counters.published_attempt is None else counters.published_attempt + 1
        attempt = max(counters.window_attempt, next_attempt)
        counters.published_attempt, counters.again = attempt, False
        self.published += (counters.tokens - counters.published_tokens) * counters.elements
        counters.published_tokens, counters.published_steps = counters.tokens, counters.steps
        self._count()
        self.deltas += 1
        counters.published_serial = self.deltas
        return Publication(base, attempt, self.deltas, counters.steps, counters.tokens, due, renews)
