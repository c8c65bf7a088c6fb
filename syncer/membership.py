"""The syncer's view of the run: which learners are live, on which versions, and how far the run is. No I/O.

`supervisor` refreshes it a few times per second; fragment owners only read it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.pipeline.liveness import quorum_missed
from diloco.pipeline.messages.fragment import RefusalReason
from diloco.pipeline.messages.run import LearnerReport, Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import MAX_TOKENS
from diloco.syncer.admission import Offer, Refused
from diloco.syncer.times import TIMES
from diloco.syncer.window import Conditions, State, Window


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
    """True if no merge may begin any more, because this syncer stops or the run is closing."""
    quorum_warning: str = ""
    drain_until: float | None = None
    """While the run drains: when that must end. It is counted on this syncer's own clock from when it first saw the run
    draining, so that clocks of two machines are never compared. A syncer that comes later starts counting again."""

    _read_at: float = -math.inf
    _steady_since: float = -math.inf
    """Time since which readings have come without a gap."""
    _silent_from: float = -math.inf
    """Time of the last reading before the current gap, or before the last one."""

    @property
    def draining(self) -> bool:
        """True if the run gathers its last deltas, or has done so."""
        return self.state is not None and self.state.phase is not Phase.RUNNING

    def live(self) -> list[SeenReport]:
        """Return the reports of learners that have reported lately and have not left.

        If this syncer could read nothing for a while, learners may have been unable to report. They count as live until
        `liveness_s` after the gap.
        """
        patience_s = self.liveness_s
        if self._read_at - self._steady_since <= self.liveness_s:
            patience_s += self._read_at - self._silent_from
        return [s for s in self.reports if not s.report.left and s.age_s <= patience_s]

    def expected(self, fragment: int, version: int) -> list[SeenReport]:
        """Return the live learners whose fragment is at this version, since only they can send a delta on it."""
        return [s for s in self.live() if s.report.versions[fragment : fragment + 1] == (version,)]

    def trusted(self, fragment: int, version: int, suspected: frozenset[str]) -> list[LearnerReport]:
        """Return the reports of the learners that a window waits for: expected and not suspected."""
        reports = [s.report for s in self.expected(fragment, version)]
        return [report for report in reports if report.learner not in suspected]

    def is_here(self, learner: str, incarnation: str) -> bool:
        """Return whether this life of a learner is live, so that what it announced may still come.

        A learner that has left had put everything on the bus before.
        """
        return any((s.report.learner, s.report.incarnation) == (learner, incarnation) for s in self.live())

    def tokens(self, state: RunState) -> int:
        """Return the tokens trained by all learners in this run, earlier parts of a resumed run included."""
        counted = sum(s.report.tokens for s in self.reports if s.counts_in(state))
        return min(MAX_TOKENS, state.base_tokens + counted)  # invented reports must not break the state

    def refresh(self, reports: Sequence[SeenReport], state: RunState | None, latency_s: float, now: float) -> bool:
        """Take fresh readings; return True if fragment owners should decide again."""

        def who() -> list[tuple[str, str, tuple[int, ...]]]:
            return [(s.report.learner, s.report.incarnation, s.report.versions) for s in self.live()]

        before = (who(), self.draining)
        self.reports, self.state = reports, state
        if now - self._read_at > self.liveness_s / 2:
            if self._read_at - self._steady_since > self.liveness_s:
                self._silent_from = self._read_at
            self._steady_since = now
        self._read_at = now
        if not self.draining:  # not yet, or no longer because the bus has lost the state
            self.drain_until = None
        elif self.drain_until is None:
            self.drain_until = now + self.drain_s
        self.latency_s = latency_s if self.latency_s == 0 else 0.8 * self.latency_s + 0.2 * latency_s
        live = len({s.report.learner for s in self.live()})
        self.quorum_warning = "" if self.draining else quorum_missed(self.sync.quorum, live)
        return (who(), self.draining) != before

    def conditions(
        self,
        fragment: int,
        version: int,
        grace_s: float | None,
        upload_s: float,
        suspected: frozenset[str] = frozenset(),
        arriving: frozenset[str] = frozenset(),
    ) -> Conditions:
        """Return the conditions for a window's decision (see `Conditions` for the arguments)."""
        live = {s.report.learner for s in self.live()}
        quorum = self.sync.quorum
        if self.draining:  # the quorum is never lowered while the run trains, only for the last deltas
            able = {
                s.report.learner for s in self.live() if max(s.report.versions, default=-1) >= 0
            }  # without learners that are still joining
            quorum = max(1, min(quorum, len(able - suspected)))
        return Conditions(
            quorum=quorum,
            expected=frozenset(s.report.learner for s in self.expected(fragment, version)) - suspected,
            live=len(live),
            grace_s=grace_s,
            upload_s=upload_s,
            draining=self.draining,
            suspected=suspected,
            arriving=arriving,
        )

    def given_up(
        self,
        window: Window,
        heard_at: Callable[[Offer], float],
        now: float,
        suspected: frozenset[str],
        arriving: frozenset[str],
    ) -> tuple[list[tuple[Offer, Refused]], float | None]:
        """Find uploads that have stopped and that the window need not wait for.

        These are the uploads of learners that are gone, once a merge needs them, and those of suspected learners that
        are not `arriving` (see `Conditions`). `heard_at` returns when the last chunk of an upload came.

        Returns:
            The uploads, each with its refusal; and when to look again (None: no upload may become one of them).
        """
        stopped: list[tuple[Offer, Refused]] = []
        again, quiet_s = [], max(TIMES.min_upload_s, self.liveness_s)
        needed = window.state is State.UPLOADING
        for offer in window.not_uploaded():
            learner = offer.header.learner
            gone = needed and not self.is_here(learner, offer.header.incarnation)
            if not (gone or learner in suspected):
                continue
            until = now + quiet_s if offer.entry_id in arriving and not gone else heard_at(offer) + quiet_s
            if now < until:
                again.append(until)
            else:
                detail = f"its learner is {'gone' if gone else 'suspected'}, and its upload has stopped"
                stopped.append((offer, Refused(RefusalReason.UPLOAD_TIMEOUT, detail, offer.header.tokens)))
        return stopped, min(again, default=None)
