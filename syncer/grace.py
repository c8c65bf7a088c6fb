"""Estimates of one fragment's times, and how long its window may wait for stragglers by them. Pure: no clock.

`algorithm.grace` is the paper's formula; this module smooths the times that go into it. No learner ever waits for a
grace: too long a grace only makes learners train more steps on their old base. Of the last two round trips, merges and
outer steps, the shorter one counts, so that a single delay has no effect.
"""

from collections.abc import Collection, Iterable, Sequence
from statistics import median_high, median_low

from diloco.pipeline.ema import Ema
from diloco.pipeline.messages.fragment import DeltaHeader
from diloco.pipeline.pacing import known_steps
from diloco.pipeline.waiting import TICK_S
from diloco.syncer import algorithm
from diloco.syncer.times import TIMES

# Share of the old estimate that each observation leaves. The paper smooths too, but does not publish its decay.
DECAY = 0.8

# A reported step time counts up to this multiple of the usual one, so that no report stretches a window further.
SLOWEST_FACTOR = 10.0
# A learner's times are forgotten after this many merges without its delta. With K = 1 each learner may have a merge of
# its own, so several merges can pass between two deltas of one learner.
LATELY = 32


def grace_covers_step(grace_s: float, slowest_s: float | None) -> bool:
    """Return whether a window's grace was as long as its slowest learner's step, or as `max_grace_s`.

    A learner can follow a window only at a step boundary, and may have had none in a grace that the slack made shorter
    than a step. slowest_s is from `MergedTimes.slowest_s`.
    """
    return slowest_s is not None and grace_s > min(slowest_s, TIMES.max_grace_s) - TICK_S


class MergedTimes:
    """Step and pull times of the learners of which a delta was merged lately, as reported in its header.

    A party that may write reports can invent learners. A header, in contrast, counts under the name of its stream, and
    a merged one comes from a learner that trains, so that each real learner has one vote. These times are therefore
    what is usual in a run, and the times in reports count only within bounds of them.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, DeltaHeader]] = {}
        """Learner -> the version that its last merged delta went into, and that delta's header."""

    def merged(self, version: int, headers: Iterable[DeltaHeader]) -> None:
        """Take the headers of a merge and the version that it made."""
        self._last |= {header.learner: (version, header) for header in headers}
        self._last = {learner: last for learner, last in self._last.items() if version - last[0] < LATELY}

    @property
    def learners(self) -> Collection[str]:
        """The learners whose times are known."""
        return self._last.keys()

    @property
    def steps(self) -> list[float]:
        """Step time of each learner, s, as far as known."""
        return known_steps(header.step_s for _, header in self._last.values())

    @property
    def pull_s(self) -> float:
        """Lower median of the pull times of a fragment of mean size, s; 0.0 if not known.

        A median, so that no single header can move it beyond the times of the others.
        """
        return median_low([header.pull_s for _, header in self._last.values()] or [0.0])

    def slowest_s(self, reported: Iterable[float]) -> float | None:
        """Return the step time by which a window waits, s; None before the first merge.

        Args:
            reported: step times of the learners that the window waits for, s; 0.0 means not known and is ignored.
        """
        if not (usual := self.steps):
            return None
        return min(max(known_steps(reported), default=max(usual)), SLOWEST_FACTOR * median_low(usual))


class GraceEstimator:
    """Smoothed quorum time of one fragment, and the part of its sync time that the syncer sees (up to the commit)."""

    def __init__(self) -> None:
        self._quorum = Ema(DECAY)
        self._sync = Ema(DECAY)
        self._hidden_s = 0.0
        """Duration of tau steps, s, as last known; longer observations count as this long."""

    def observe(self, quorum_s: float, sync_s: float, slowest_s: float | None, overlap_steps: int) -> None:
        """Take the times of one window.

        Each counts as at most tau steps, which leave no slack already; a longer time says nothing about later windows.
        So windows soon have a grace again after a night without a quorum, or after a syncer was suspended in a merge.

        If `slowest_s` is None, the last known duration of tau steps is used.
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
        """Return `algorithm.grace`, at most `max_grace_s`; None if no step time, quorum time or sync time is known.

        The slack is computed with the step time of the slowest expected learner: on mixed hardware, a grace measured in
        the steps of the fastest one would close before a straggler's next step boundary. As in the paper, the sync time
        ends when the learners have the global. Only they know how long a pull takes.

        A stretched interval contains the round trip already, grace included (`RoundTrips`). The smoothed times are
        sometimes above and sometimes below that. If they were subtracted once more, every other window would close
        without a grace, and a learner that missed it would lose a long interval's work. So only the cap applies then.

        Args:
            slowest_s: from `MergedTimes.slowest_s`.
            pull_s: from a head to the fragment's global pulled, s; 0.0 before the first pull.
            overlap_steps: tau in force (`ramps.overlap_in_force`).
            stretched: True if the interval was made longer than planned by the round trip (`ramps.is_stretched`).
        """
        if slowest_s is None or self._quorum.value is None or self._sync.value is None:
            return None
        quorum_s, sync_s = (0.0, 0.0) if stretched else (self._quorum.value, self._sync.value + pull_s)
        grace_s = algorithm.grace(slowest_s, quorum_s, sync_s, overlap_steps, gamma, control_latency_s)
        return min(TIMES.max_grace_s, grace_s)


class RoundTrips:
    """Length of the last two round trips of one fragment, in learners' steps.

    After publishing, a learner trains on until the merge of its delta has been pulled, and adopts it after a step. The
    steps of this round trip are overwritten, and `ramps.stretched` lengthens intervals by them. The wait for a quorum
    is not part of the round trip: it depends on the other learners, not on the interval, and deltas are renewed
    meanwhile.
    """

    def __init__(self) -> None:
        self._took = (0.0, 0.0)

    def observe(self, seconds: float) -> None:
        """Take one window's grace and sync time (pull included), s."""
        self._took = self._took[1], seconds

    def steps(self, step_times: Sequence[float], latency_s: float) -> float:
        """Return the round trip in steps, including the step after which a learner adopts; 0 if it is not known yet.

        Args:
            step_times: of the learners that were merged lately, s. Values that are too short count as unknown. The
                higher median counts: of two learners, one that reports very short steps cannot stretch the interval.
        """
        known, round_trip_s = known_steps(step_times), min(self._took)
        return 1 + (round_trip_s + latency_s) / median_high(known) if known and round_trip_s else 0.0


class LastMerges:
    """Durations of one fragment's last two merges; `expected_outer_s` is calculated, and used until it is measured."""

    def __init__(self, expected_outer_s: float = 0.0) -> None:
        self._took = (0.0, 0.0)
        self._outer: tuple[float, ...] = ()
        self._expected_outer_s = expected_outer_s

    def observe(self, merge_s: float, outer_s: float | None = None) -> None:
        """Take a merge's duration, s, and that of the sum and the outer step in it; None if it only averaged."""
        self._took = self._took[1], merge_s
        if outer_s is not None:
            self._outer = *self._outer[-1:], outer_s

    @property
    def merge_s(self) -> float:
        """Duration of a merge, s; 0 before there were two (`WindowView.merge_s`)."""
        return min(self._took)

    @property
    def measured(self) -> bool:
        """True if `outer_s` is measured, not calculated."""
        return len(self._outer) == 2

    @property
    def outer_s(self) -> float:
        """Duration of an outer step, s; before there were two, the calculated one (see `WindowView`)."""
        return min(self._outer) if self.measured else self._expected_outer_s
