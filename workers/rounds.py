"""When a learner publishes which fragment, and what its training counts for. Pure: no clock, no torch, no I/O.

Per fragment: inner steps and tokens since its base was adopted (paper, learner). A fragment is due when it has
H steps on its base; in the first round at its offset, so that fragments take turns. It follows an open window
at the next step. One whose steps had no tokens at all (all of their batches masked) waits for some: they are its
weight. One delta per (base, attempt). While nothing is merged, a delta that is on the bus is renewed: a later attempt
takes its place, so that what is lost is no more than the work since. Adopting zeroes the counters; what was trained
past the last snapshot is overwritten, and counted as such.

A snapshot is held until its delta is on the bus. So that they do not pile up while it is away, or slow, there is room
for some at a time. What finds none stays due: a later snapshot on the same base holds all that an earlier one does.
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
RENEWED_BY = 6
"""A delta is renewed when there is a sixth more of it, if half an interval is less: the longer nothing is merged, the
less often, so that an upload ends in the end, however slow it is."""
LEAST_RENEWED = 12
"""Steps: a round trip may take so many where steps are short, and what does not come is refused before."""
LEAST_ROOM = 2**24
"""Elements. Snapshots are taken while those that are held are less, or less than a quarter of the model
(`party_memory.ROOM_SHARE`)."""
AT_ONCE = party_memory.ROOM_LEAST
"""Snapshots that each group has room for, however large: a header waits for no payload before its own."""


@dataclass(frozen=True, slots=True)
class Base:
    """A global fragment as adopted: what the next delta of it is measured from."""

    fragment: int
    version: int
    digest: bytes
    values: Any
    """Flat float32 vector (elements,): an array, or a tensor where deltas are encoded on a device."""
    interval: int = 0
    """As `Head`."""


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """A fragment's window as its head shows it, if it is open."""

    version: int
    attempt: int
    member: bool
    """This learner's delta is in it."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A delta that is to be published now."""

    base: Base
    attempt: int
    serial: int
    """Counts this incarnation's deltas."""
    steps: int
    tokens: int
    due: bool
    renews: int = 0
    """Serial of the one on the bus whose place it takes; the payload goes first, so that there is always a whole one.
    0: of none."""


class Counts(NamedTuple):
    """What an incarnation has trained, as it was at one moment: trained = overwritten + published + the rest."""

    steps: int
    tokens: int
    overwritten: int
    """Token-elements trained past a snapshot and replaced."""
    published: int
    """Token-elements in deltas; of several on one base, the most."""
    part_unix_s: float | None
    """As `LearnerReport`."""


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
    """The delta on this base may be lost: publish it with the next attempt."""
    rounds: int = 0


def renewed_after(sync: SyncSpec, interval: int, steps: int) -> float:
    """Inner steps beyond those of a delta from which on it is renewed.

    Args:
        sync: H.
        interval: in force, at which the fragment is due.
        steps: of the delta.
    """
    return max(max(interval, sync.sync_interval) / 2, LEAST_RENEWED, steps / RENEWED_BY)


class Rounds:
    """Counters of all fragments of one learner's incarnation."""

    def __init__(self, layout: Layout, sync: SyncSpec) -> None:
        self._sync = sync
        count, first = len(layout.fragments), interval_at(sync, 0)
        self._fragments = [_Counters(f.elements, first_due=1 + f.id * first // count) for f in layout.fragments]
        self._room = max(LEAST_ROOM, layout.elements / party_memory.ROOM_SHARE)
        self._held: dict[int, int] = {}
        """Serial -> fragment of each delta whose snapshot is held, as far as is known."""
        self.deltas = 0
        """Published so far."""
        self.steps = 0
        self.tokens = 0
        self.overwritten = 0
        self.published = 0
        self.part_unix_s: float | None = None
        self.counts = Counts(0, 0, 0, 0, None)
        """Replaced whole, so that another thread never sees half a change."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Adopted version of each fragment, -1 before the first."""
        return tuple(-1 if c.base is None else c.base.version for c in self._fragments)

    @property
    def bases(self) -> Iterator[Base]:
        """Those that were adopted."""
        return (counters.base for counters in self._fragments if counters.base is not None)

    def adopt(self, base: Base) -> None:
        """The fragment was overwritten with a global one, newer or (after a rewind) older."""
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
        """Count for the part of the run that is under way. What was trained in an earlier one is in its state already:
        only what was trained on the bases of now, and may still be merged, goes on to count. Of that the state may know
        too: so at most an interval of each learner that survives counts twice."""
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
        """The bus was away and may have lost what it had acknowledged: offer every delta once more.

        One that did arrive is refused as a duplicate, which costs its upload and nothing else.
        """
        for counters in self._fragments:
            counters.again = counters.published_attempt is not None

    def trained(self, tokens: int) -> None:
        """One inner step of the whole model is done; tokens: 0 if there was nothing to train on."""
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
        """What to publish after this step; each is counted as published once it is taken from here.

        Args:
            windows: open ones.
            uploaded: fragment -> serial of the last delta that may be renewed (`exchange.shared.Shared`).
            released: fragment -> serial of the last delta whose snapshot is held no more. Whoever waits longest is
                first, as long as there is room; None: there is, for all. Each group has some of its own: the server
                of another one may be away.
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
        """The fragments to publish after this step; as `publications`, and nothing is counted.

        ahead: so many steps later, if nothing but steps comes in between.
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
        """What is published now of a fragment that was `wanted` on this base; it is counted as published."""
        counters, window = self._fragments[p], self._window(p, windows)
        base = counters.base
        assert base is not None, "wanted without a base"  # noqa: S101
        assert counters.tokens, "wanted without tokens"  # noqa: S101
        replaces = counters.published_attempt is not None and not (counters.again or self._reopened(counters, window))
        due = counters.steps >= self._due_after(counters)
        return self._publication(counters, base, window, due, renews=counters.published_serial * replaces)

    def _window(self, p: int, windows: Mapping[int, OpenWindow]) -> OpenWindow | None:
        """The fragment's, if it is of its base."""
        window, base = windows.get(p), self._fragments[p].base
        return window if window is not None and base is not None and window.version == base.version else None

    @staticmethod
    def _reopened(counters: _Counters, window: OpenWindow | None) -> bool:
        return window is not None and window.attempt > counters.window_attempt and not window.member

    def last(self, windows: Mapping[int, OpenWindow], due: bool) -> Iterator[Publication]:
        """What to publish on leaving: every fragment not published on its base yet, or to be published once more.

        due: the run is draining, so that all of these may open windows; else those may that are due. There are such
        ones where uploads before have kept a snapshot waiting. What was trained past an earlier snapshot on the same
        base can never be merged: it counts as overwritten.
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
        """Nothing is published any more: let go of the bases' values."""
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
        # First round. At the start of a run fragments take turns from the first step on. A learner that joins
        # later must not open windows early, so it takes its turns one interval on; usually it follows first.
        return counters.first_due if base.version == 0 else interval + counters.first_due

    def _renewable(self, counters: _Counters) -> bool:
        """Whether so much was trained since the delta that it is worth another upload."""
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
