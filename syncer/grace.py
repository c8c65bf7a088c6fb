"""How long a window may wait for stragglers. Pure: no clock.

`algorithm.grace` is the paper's formula; here are the smoothed times that go into it. Nothing here makes a learner
wait: too long a grace only makes learners train more steps on their old base.
"""

from collections.abc import Collection, Iterable
from statistics import median_low

from diloco.pipeline.ema import Ema
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.pacing import known_steps
from diloco.pipeline.waiting import TICK_S
from diloco.syncer import algorithm

DECAY = 0.8
"""Share of the old estimate that each observation leaves; the paper smooths, the decay is not published."""

SLOWEST_FACTOR = 10.0
"""A step time counts up to so many times the usual one: nobody's word stretches a window further."""
MOST_GRACE_S = 60.0
"""No window waits longer, whatever is said of steps. It is as long as a step of the slowest machines that train in
earnest; whose steps take longer is in a window now and then, and in each that it opens itself."""
LATELY = 32
"""Merges, of which K = 1 may take one for each learner: so many without its delta, and its times are forgotten."""


def awaited_a_step(grace_s: float, slowest_s: float | None) -> bool:
    """Whether a window waited for as long as its slowest learner's step takes, or as it may at most.

    In a grace without a whole step, cut by the slack, a learner may have had no step boundary. slowest_s: as
    `MergedTimes.slowest_s`.
    """
    return slowest_s is not None and grace_s > min(slowest_s, MOST_GRACE_S) - TICK_S


class MergedTimes:
    """Step and pull times of the learners of whom a delta was merged lately, as its header says them.

    Whoever may report may do so under any name, also of learners that are not there. A header counts under the name of
    its stream, and one that was merged is of somebody who trains: each learner has one voice. So these are what is
    usual in a run, and what reports say counts within bounds of it.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, DeltaHeader]] = {}
        """Learner -> version that its last merged delta went into, and its header."""

    def merged(self, version: int, headers: Iterable[DeltaHeader]) -> None:
        """One more merge; version: that it made."""
        self._last |= {header.learner: (version, header) for header in headers}
        self._last = {learner: last for learner, last in self._last.items() if version - last[0] < LATELY}

    @property
    def learners(self) -> Collection[str]:
        """Whose they are."""
        return self._last.keys()

    @property
    def steps(self) -> list[float]:
        """Step time of each, s, as far as known."""
        return known_steps(header.step_s for _, header in self._last.values())

    @property
    def pull_s(self) -> float:
        """The lower median of pulls, of a fragment of mean size; 0.0: not known. One word alone moves it no further
        than the others' go."""
        return median_low([header.pull_s for _, header in self._last.values()] or [0.0])

    def slowest_s(self, reported: Iterable[float]) -> float | None:
        """The step time by which a window waits, s; None before the first merge.

        reported: step times of those that it waits for; 0.0 is not known yet and is ignored.
        """
        if not (usual := self.steps):
            return None
        return min(max(known_steps(reported), default=max(usual)), SLOWEST_FACTOR * median_low(usual))


class GraceEstimator:
    """Estimates of one fragment: quorum time, and sync time as far as the syncer sees it: to the commit's answer."""

    def __init__(self) -> None:
        self._quorum = Ema(DECAY)
        self._sync = Ema(DECAY)
        self._hidden_s = 0.0
        """Tau steps, as last known; nothing counts for longer."""

    def observe(self, quorum_s: float, sync_s: float, slowest_s: float | None, overlap_steps: int) -> None:
        """The times of one window.

        Each counts for tau steps at most: those leave no slack, and how much longer it took says nothing of the windows
        to come. So they have their grace after a night without a quorum, or when a syncer was suspended in a merge.

        Args:
            quorum_s: from its opening to the K-th header.
            sync_s: the syncer's part of a sync time: uploads, merge, outer step and commit.
            slowest_s: as of `grace_s`; if none is known, it is as it was.
            overlap_steps: the same.
        """
        if slowest_s is not None:
            self._hidden_s = overlap_steps * slowest_s
        self._quorum.observe(min(quorum_s, self._hidden_s))
        self._sync.observe(min(sync_s, self._hidden_s))

    def grace_s(
        self,
        slowest_s: float | None,
        pull_s: float,
        overlap_steps: int,
        gamma: float,
        control_latency_s: float,
        stretched: bool = False,
    ) -> float | None:
        """Length of the grace window, or None before the first estimates exist.

        The step time in the slack is the slowest expected learner's: grace is there for stragglers, and one
        measured in the steps of the fastest would close on mixed hardware before a straggler's next step
        boundary, where alone it can follow. For the same reason nothing is gained by waiting longer than one
        such step, as long as it may be, and the latency of a header: that is the cap, within `MOST_GRACE_S`.

        The sync time ends when learners have the global, as the paper's does. How long a pull takes only they know.

        A stretched interval has the round trip in it, the grace too, by the shorter of the last two. Smoothed times are
        now above it and now below. Were they taken off once more, every other window would close without a grace, and
        whoever missed it would lose a long interval's work. So only the cap is left there.

        Args:
            slowest_s: as `MergedTimes.slowest_s`.
            pull_s: from a head to the fragment's global pulled, s; 0.0 before the first.
            overlap_steps: tau in force (`ramps.overlap_in_force`).
            gamma: share of the slack, below 1.
            control_latency_s: from a learner's decision to follow to its header at the syncer.
            stretched: the interval was made longer than planned, by the round trip (`ramps.is_stretched`).

        Returns:
            Seconds, 0 or more; None if no step time, quorum time or sync time is known.
        """
        if slowest_s is None or self._quorum.value is None or self._sync.value is None:
            return None
        quorum_s, sync_s = (0.0, 0.0) if stretched else (self._quorum.value, self._sync.value + pull_s)
        return min(MOST_GRACE_S, algorithm.grace(slowest_s, quorum_s, sync_s, overlap_steps, gamma, control_latency_s))
