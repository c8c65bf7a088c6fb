"""The syncer's view of the run: who is live, on which versions, and how far the run is. Pure state, no I/O.

`supervisor` refreshes it a few times a second; fragment owners only look.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.pipeline.messages.run import LearnerReport, Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import RefusalReason
from diloco.pipeline.messages.wire import MOST_TOKENS
from diloco.syncer.admission import Offer, Refused
from diloco.syncer.window import Conditions, State, Window

WATCH_S = 0.25
"""How often reports are read; also how fine the end of the budget is met."""
LEAST_UPLOAD_S = 1.0
"""Time for a learner whose machine is busy; also how long one killed while publishing can hold up a merge."""


@dataclass(slots=True)
class RunWatch:
    """Last known reports and run state."""

    sync: SyncSpec
    liveness_s: float
    drain_s: float
    reports: Sequence[SeenReport] = ()
    state: RunState | None = None
    latency_s: float = 0.0
    """Round trip of a control message, smoothed."""
    frozen: bool = False
    """No merge may begin any more: this syncer stops, or the run is closing."""
    quorum_warning: str = ""
    drain_until: float | None = None
    """While the run drains, when that must end. By this syncer's own clock from when it first saw it draining: no
    two machines' clocks are compared, and a syncer that comes later counts anew."""

    _read_at: float = -math.inf
    _steady_since: float = -math.inf
    """Since when readings have come without a gap."""
    _silent_from: float = -math.inf
    """Where the present trouble, or the last, began: the last reading before it."""

    @property
    def draining(self) -> bool:
        """The run gathers its last deltas."""
        return self.state is not None and self.state.phase is not Phase.RUNNING

    def live(self) -> list[SeenReport]:
        """Learners heard from lately that have not left.

        Where this syncer could read nothing for a while, they may have been unable to report: they are given until
        `liveness_s` after it, before they are taken for gone.
        """
        patience_s = self.liveness_s
        if self._read_at - self._steady_since <= self.liveness_s:
            patience_s += self._read_at - self._silent_from
        return [s for s in self.reports if not s.report.left and s.age_s <= patience_s]

    def expected(self, fragment: int, version: int) -> list[SeenReport]:
        """Live learners whose fragment is at this version: only they can send a delta on it."""
        return [s for s in self.live() if s.report.versions[fragment : fragment + 1] == (version,)]

    def trusted(self, fragment: int, version: int, doubted: frozenset[str]) -> list[LearnerReport]:
        """Reports of those that are expected and not doubted: of whom a window waits for."""
        reports = [s.report for s in self.expected(fragment, version)]
        return [report for report in reports if report.learner not in doubted]

    def is_here(self, learner: str, incarnation: str) -> bool:
        """Whether what it announced may still come: it is live. Of one that has left, all was on the bus by then."""
        return any((s.report.learner, s.report.incarnation) == (learner, incarnation) for s in self.live())

    def tokens(self, state: RunState) -> int:
        """Trained tokens of all learners in this run, earlier parts of a resumed run included."""
        counted = sum(s.report.tokens for s in self.reports if s.counts_in(state))
        return min(MOST_TOKENS, state.base_tokens + counted)  # made up reports must not end a run

    def refresh(self, reports: Sequence[SeenReport], state: RunState | None, latency_s: float, now: float) -> bool:
        """Take fresh readings; True if a fragment owner may want to decide anew."""

        def who() -> list[tuple[str, str, tuple[int, ...]]]:
            return [(s.report.learner, s.report.incarnation, s.report.versions) for s in self.live()]

        before = (who(), self.draining)
        self.reports, self.state = reports, state
        if now - self._read_at > self.liveness_s / 2:
            if self._read_at - self._steady_since > self.liveness_s:
                self._silent_from = self._read_at
            self._steady_since = now
        self._read_at = now
        if not self.draining:  # not yet, or no more: the bus has lost it
            self.drain_until = None
        elif self.drain_until is None:
            self.drain_until = now + self.drain_s
        self.latency_s = latency_s if self.latency_s == 0 else 0.8 * self.latency_s + 0.2 * latency_s
        live = len({s.report.learner for s in self.live()})
        short = self.sync.quorum > live and not self.draining
        self.quorum_warning = f"quorum {self.sync.quorum} > {live} live" if short else ""
        return (who(), self.draining) != before

    def conditions(
        self,
        fragment: int,
        version: int,
        grace_s: float | None,
        upload_s: float,
        doubted: frozenset[str] = frozenset(),
        arriving: frozenset[str] = frozenset(),
    ) -> Conditions:
        """What a window must know of the run."""
        live = {s.report.learner for s in self.live()}
        quorum = self.sync.quorum
        if self.draining:  # never lowered while running; at the end the last deltas decide
            able = {
                s.report.learner for s in self.live() if max(s.report.versions, default=-1) >= 0
            }  # not who still joins
            quorum = max(1, min(quorum, len(able - doubted)))
        return Conditions(
            quorum=quorum,
            expected=frozenset(s.report.learner for s in self.expected(fragment, version)) - doubted,
            live=len(live),
            grace_s=grace_s,
            upload_s=upload_s,
            draining=self.draining,
            doubted=doubted,
            arriving=arriving,
        )

    def given_up(
        self,
        window: Window,
        heard_at: Callable[[Offer], float],
        now: float,
        doubted: frozenset[str],
        arriving: frozenset[str],
    ) -> tuple[list[tuple[Offer, Refused]], float | None]:
        """Uploads that have stopped and that nobody waits for, with why; and when to look again.

        Those of learners that are gone, once a merge needs them; and those of doubted ones that are not `arriving`.
        `heard_at`: when last something of an upload came.
        """
        stopped: list[tuple[Offer, Refused]] = []
        again, quiet_s = [], max(LEAST_UPLOAD_S, self.liveness_s)
        needed = window.state is State.UPLOADING
        for offer in window.awaited():
            learner = offer.header.learner
            gone = needed and not self.is_here(learner, offer.header.incarnation)
            if not (gone or learner in doubted):
                continue
            until = now + quiet_s if offer.entry_id in arriving and not gone else heard_at(offer) + quiet_s
            if now < until:
                again.append(until)
            else:
                detail = f"its learner is {'gone' if gone else 'doubted'}, and the upload has stopped"
                stopped.append((offer, Refused(RefusalReason.UPLOAD_TIMEOUT, detail, offer.header.tokens)))
        return stopped, min(again, default=None)
