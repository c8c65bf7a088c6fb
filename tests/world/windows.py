"""Whether windows close in time, measured on the stream and not by what their owners say.

A window may stay open from the moment at which the quorum was on the stream for as long as the grace may last; once
everybody is in, there is nobody to wait for. Not counted is what its owner could not help: it reads the stream from
its start (it took the fragment over, or lost its connection), its calls are slow, it is paused, a merge is slow. A
window is closed when its owner says that it waits for uploads, or stages the merged values. A learner that the owner
says it suspects is in once its payload is on the bus too, and nobody waits for it. One that is left out never is.
"""

import math
from collections.abc import Callable

from diloco.pipeline.messages.fragment import DeltaHeader, WindowView
from diloco.pipeline.messages.spec import SyncSpec
from tests.world import reference
from tests.world.link import Link
from tests.world.surviving import Surviving

SETTLE_S = 2.0
"""The grace before an owner's first merge."""
STEPS_S = 0.2
"""An owner acts on what it read within this, besides the time of its calls; a second try included."""
STATES = {name: n for n, name in enumerate(("idle", "collecting", "grace", "uploading", "merging"))}
CLOSED = ("uploading", "merging")
"""What a window's owner says of one that gathers no more."""
CALLS = 12
"""A window closes with so many calls at most."""


class Windows:
    """The windows of one run."""

    def __init__(
        self,
        sync: SyncSpec,
        fragments: int,
        slowest_step_s: float,
        latency_s: float,
        now: Callable[[], float],
        uploaded: Callable[[DeltaHeader], bool],
    ) -> None:
        self._sync, self._now, self._uploaded = sync, now, uploaded
        self._slowest_step_s = slowest_step_s
        self._grace_s = [0.0] * fragments
        """The slack cannot be more than all compute time that hides a sync: tau steps, more where H is stretched."""
        self._acts_s = STEPS_S + CALLS * latency_s
        self.learners: set[str] = set()
        """That a window may wait for."""
        self._in: list[set[str]] = [set() for _ in range(fragments)]
        """Of whom something that can be merged is on the stream."""
        self._suspected: list[frozenset[str]] = [frozenset()] * fragments
        self._quorum_at: list[float | None] = [None] * fragments
        self._all_at: list[float | None] = [None] * fragments
        self._closed: set[tuple[Link, int]] = set()
        """Owners that have closed a fragment's window; of two that believe that they own it, each has its own."""
        self._attempts: dict[tuple[Link, int], int] = {}
        """The attempt with which an owner last opened a window again."""
        self._shown: dict[tuple[Link, int], WindowView] = {}
        """What an owner last said of its window at this version."""
        self._began: dict[tuple[Link, int], float] = {}
        self._merged: dict[tuple[Link, int], bool] = {}
        """Owners that merged the fragment -> whether they are known to know of it."""

    def joined(self, learner: str) -> None:
        """A window may wait for this one."""
        self.learners.add(learner)
        self._all_at = [
            at if learner in there | suspected else None
            for at, there, suspected in zip(self._all_at, self._in, self._suspected, strict=True)
        ]

    def changed(self, p: int, state: Surviving) -> None:
        """What is pending on a fragment's stream, or what of it is uploaded, is another now."""
        version, there = state.version, set[str]()
        hides = self._sync.overlap_steps
        if state.interval:  # else it is as planned, or nothing is installed
            hides = math.ceil(hides * state.interval / reference.interval(self._sync, version))
        self._grace_s[p] = self._sync.grace_gamma * hides * self._slowest_step_s
        for header in state.pending.values():
            base = header.base_version
            known = version - 1 <= base <= version and header.base_digest == state.digests.get(base)
            counts = header.learner not in self._suspected[p] or self._uploaded(header)
            if known and counts and (header.learner, header.incarnation, base) not in state.merged:
                there.add(header.learner)
        self._in[p] = there
        now, quorum = self._now(), self._quorum_at[p]
        if not state.may_open or len(there) < self._sync.quorum:
            self._quorum_at[p] = self._all_at[p] = None
            return
        self._quorum_at[p] = now if quorum is None else quorum
        everybody = there >= self.learners - self._suspected[p]
        before = self._all_at[p]
        self._all_at[p] = None if not everybody else now if before is None else before

    def moved(self, link: Link, p: int) -> None:
        """A merge was committed: a new window."""
        self._quorum_at[p] = self._all_at[p] = None
        self._closed = {(owner, of) for owner, of in self._closed if of != p}
        self._shown = {(owner, of): window for (owner, of), window in self._shown.items() if of != p}
        self._attempts = {(owner, of): attempt for (owner, of), attempt in self._attempts.items() if of != p}
        if not link.late:
            self._merged[link, p] = self._merged.get((link, p), False)

    def read(self, link: Link, p: int, found_closed: bool) -> None:
        """An owner reads a stream from its start: all over again. found_closed: its head says that of the window."""
        self._began[link, p] = self._now()
        self.begins(link, p)
        (self._closed.add if found_closed else self._closed.discard)((link, p))
        if not self._merged.get((link, p), True):
            del self._merged[link, p]  # it may not have heard of its merge

    def begins(self, link: Link, p: int) -> None:
        """An owner has read the head: what it says next it decides from its window's beginning."""
        self._shown.pop((link, p), None)

    def came(self, link: Link) -> None:
        """An owner that was with another server is here from now on: whatever it does, it does not know this one."""
        self._began |= {(link, p): self._now() for p in range(len(self._in))}

    def shown(self, link: Link, p: int, window: WindowView, state: Surviving) -> str | None:
        """A window's state was written; returns what was wrong."""
        suspected = frozenset(window.suspected)
        if self._suspected[p] != suspected:
            self._suspected[p] = suspected
            self.changed(p, state)
        if window.state in CLOSED:
            return self.closed(link, p)
        # It is open again. An owner that reads all over again finds it closed, and says so only by the next attempt.
        again = (link, p) in self._closed or window.attempt > self._attempts.get((link, p), 0)
        if again and window.state in ("collecting", "grace") and not link.late:
            self._closed.discard((link, p))
            self._began[link, p], self._attempts[link, p] = self._now(), window.attempt
        return None

    def opened_again(self, link: Link, p: int, window: WindowView) -> str | None:
        """A window's state was written; returns what was wrong if it has gone back to an earlier one.

        A learner whose delta was refused publishes once more if it reads of a later attempt.
        """
        if link.late:
            return None
        before, self._shown[link, p] = self._shown.get((link, p)), window
        if before is None or window.attempt > before.attempt:
            return None
        if STATES[window.state] >= STATES[before.state]:
            return None
        return f"{before.state}, attempt {before.attempt}; then {window.state}, attempt {window.attempt}"

    def closed(self, link: Link, p: int) -> str | None:
        """A window gathers no more; returns what was wrong."""
        quorum, everybody, began = self._quorum_at[p], self._all_at[p], self._began.get((link, p))
        if link.late:
            return None
        closed = (link, p) in self._closed
        self._closed.add((link, p))
        if closed or quorum is None or began is None:
            return None
        if (link, p) in self._merged:
            self._merged[link, p] = True
        now, since = self._now(), max(quorum, began)
        grace_s = self._grace_s[p] if self._merged.get((link, p)) else SETTLE_S
        ends = since + grace_s
        if everybody is not None:
            ends = min(ends, max(since, everybody))
        if (late_s := now - ends - self._acts_s) <= 0 or late_s <= link.held_up_s(since):
            return None
        told = "not" if everybody is None else f"{now - everybody:.3f} s ago"
        held_s = link.held_up_s(since)
        return f"quorum {now - since:.3f} s ago, all in {told}, grace {grace_s:.3f} s, held up {held_s:.3f} s"
