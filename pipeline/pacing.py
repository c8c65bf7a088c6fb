"""Checks whether merges keep up with the learners, and suggests remedies if they do not. Pure.

What a learner trains while its delta is merged is overwritten. Therefore a merge may take `ROOM` of a round of H steps,
or the tau steps that the run plans with if these are more; but never longer than the planned interval.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple, TypedDict

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.needs import INTERVALS
from diloco.pipeline.outer_cost import CHEAPER, Speed
from diloco.pipeline.ramps import interval_at

# A shorter step time in a report means that it is not known yet.
MIN_STEP_S = 1e-6
# Rounds longer than this multiple of H are reported.
LONG_ROUND = 1.5
BLAS = "OPENBLAS_NUM_THREADS"
# Threads of one matrix product: BLAS libraries are not built for more.
MAX_THREADS = 64
# How many remedies a warning names; docs/howto/watch.md has all of them.
MAX_HELPS = 2
# Share of a round: a merge that takes this long overwrites a quarter of the training.
ROOM = 1 / 3


class Pace(NamedTuple):
    """How long one fragment's merges take."""

    fragment: int
    version: int
    merge_s: float
    """The same as `WindowView.merge_s`."""
    outer_s: float = 0.0
    """The same as `WindowView.outer_s`."""

    @property
    def takes_s(self) -> float:
        """Seconds of a merge, as far as they are known."""
        return max(self.merge_s, self.outer_s)


class OuterStep(TypedDict):
    """How the outer step of the slowest fragment fits into a round."""

    outer_s: float
    room_s: float
    share: float
    """Share of the available time; above 1 the step does not fit."""


def budget_steps(sync: SyncSpec, version: int) -> float:
    """Return the inner steps that the merge into this version may take."""
    return min(interval_at(sync, version), full_budget_steps(sync))


def full_budget_steps(sync: SyncSpec) -> float:
    """Return the inner steps that a merge may take once the interval is H."""
    return max(sync.overlap_steps, ROOM * sync.sync_interval)


def min_step_s(sync: SyncSpec, outer_s: float, together_s: float) -> float:
    """Return the shortest inner step, in seconds, with which the outer step fits once the interval is H.

    Args:
        sync: the run's settings.
        outer_s: outer step of one fragment.
        together_s: outer steps of all fragments.
    """
    return max(outer_s / full_budget_steps(sync), together_s / (sync.sync_interval + full_budget_steps(sync)))


def outer_budget(sync: SyncSpec, fragments: Iterable[Pace], step_times: Sequence[float]) -> OuterStep | None:
    """Return how the slowest outer step fits, measured against the full interval; None if nothing is known yet."""
    known, step_s = [one.outer_s for one in fragments if one.outer_s], _usual(step_times)
    if not known or not step_s:
        return None
    outer_s, room_s = max(known), full_budget_steps(sync) * step_s
    return OuterStep(outer_s=outer_s, room_s=room_s, share=outer_s / room_s)


def _usual(step_times: Sequence[float]) -> float | None:
    """Return the median of the known step times in seconds; None if there is none."""
    known = known_steps(step_times)
    return median(known) if known else None


def known_steps(step_times: Iterable[float]) -> list[float]:
    """Return the step times that are plausible: shorter ones are unknown or invented."""
    return [s for s in step_times if s > MIN_STEP_S]


def _shares(
    sync: SyncSpec, fragments: Iterable[Pace], step_times: Sequence[float], together_s: float
) -> list[tuple[float, Pace]]:
    """Return for each fragment its merge time divided by the time available; empty if that is not known yet."""
    step_s = _usual(step_times)
    if step_s is None:
        return []
    # If all outer steps together take longer than a round, the last fragment of the queue waits for the excess.
    queue_s = together_s - sync.sync_interval * step_s
    return [(max(one.takes_s, queue_s) / (budget_steps(sync, one.version) * step_s), one) for one in fragments]


def merge_share(
    sync: SyncSpec, fragments: Iterable[Pace], step_times: Sequence[float], together_s: float = 0.0
) -> float | None:
    """Return the worst merge time over the time available; above 1 `slow_merges` warns. None if it is not known yet."""
    return max((share for share, _ in _shares(sync, fragments, step_times, together_s)), default=None)


def long_rounds(asked: int, intervals: Iterable[int]) -> str | None:
    """Return a warning if rounds are much longer than requested (H), otherwise None. Both are in inner steps."""
    longest = max(intervals, default=0)
    if not asked or longest <= LONG_ROUND * asked:
        return None
    return (
        f"rounds take {longest} inner steps instead of {asked}, because merges arrive late: to shorten them, give "
        "the syncer cores of its own, or use longer steps (a larger batch), a nearer Redis or a smaller codec (doc: "
        "watch.md)"
    )


class SlowMerges(NamedTuple):
    """A warning in two parts; as text it is both."""

    found: str
    helps: str

    def __str__(self) -> str:
        return f"{self.found}: {self.helps}"


def slow_merges(
    sync: SyncSpec,
    fragments: Iterable[Pace],
    step_times: Sequence[float],
    syncers: int,
    allowed: float = 1.0,
    together_s: float = 0.0,
    speed: Speed | None = None,
) -> SlowMerges | None:
    """Return a warning with remedies if merges take longer than the time available; None if they fit or nothing is
    known yet.

    A round is the planned interval (`ramps.interval_at`) times the median step time of the live learners.

    Args:
        sync: the run's settings.
        fragments: the fragments to check.
        step_times: step times of live learners in seconds; 0 is not known yet.
        syncers: how many serve the run.
        allowed: factor by which a merge may exceed the time available.
        together_s: seconds of the outer steps of all these fragments on all cores of their syncer; set only if
            estimated.
        speed: of the machine that merges; None if the caller does not know it.
    """
    step_s = _usual(step_times)
    found = _shares(sync, fragments, step_times, together_s)
    slow = [(ratio, one) for ratio, one in found if ratio > allowed]
    if step_s is None or not slow:
        return None
    queue_s = together_s - sync.sync_interval * step_s
    ratio, worst = max(slow)
    takes_s, interval = max(worst.takes_s, queue_s), interval_at(sync, worst.version)
    round_s = interval * step_s
    by_outer = max(worst.outer_s, queue_s) > takes_s / 2
    outer = f", {as_time(worst.outer_s)} of it the outer step" if by_outer else ""
    return SlowMerges(
        f"merges are too slow for the learners' rounds ({len(slow)} of {len(found)} fragments; fragment "
        f"{worst.fragment} takes {as_time(takes_s)}{outer}; it has {as_time(takes_s / ratio)} of a {as_time(round_s)} "
        f"round of {interval} steps), so learners now train longer between syncs",
        "; or ".join(islice(_helps(sync, worst, step_s, together_s, syncers, speed), MAX_HELPS)),
    )


def as_time(seconds: float) -> str:
    """Format seconds as '2.6 s', '12 ms', '0.25 ms'."""
    if seconds >= 0.1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def _helps(
    sync: SyncSpec, worst: Pace, step_s: float, together_s: float, syncers: int, speed: Speed | None
) -> Iterator[str]:
    """Yield remedies for the worst merge with their costs, cheapest first."""
    room_s, round_s = full_budget_steps(sync) * step_s, sync.sync_interval * step_s
    queue_s = together_s - round_s
    takes_s = max(worst.takes_s, queue_s)
    if interval_at(sync, worst.version) < sync.sync_interval and takes_s <= room_s:
        yield f"wait until the interval has grown to {sync.sync_interval}, at which merges keep up"
        yield "start with longer rounds (first_interval), with which short runs learn less"
        return
    by_outer = max(worst.outer_s, queue_s) > takes_s / 2 and sync.outer == "halley"
    times, now, most = math.ceil(worst.outer_s / room_s), 1, MAX_THREADS
    if speed is not None:
        now, most = speed.threads, min(most, speed.at_once * speed.threads)
    if by_outer and queue_s <= room_s and times > 1 and (threads := times * now) <= most:
        whose = "of its otherwise idle cores" if speed else "otherwise idle cores, if it has that many"
        yield f"let the syncer multiply matrices on {threads} {whose} ({BLAS}={threads})"
    if queue_s > room_s and syncers < sync.fragments and together_s / (syncers + 1) <= round_s + room_s:
        yield "start another syncer on another machine"
    longer = _longer(sync, worst, step_s, together_s)
    if by_outer:
        yield f"start the run with {CHEAPER}"
    if longer:
        yield f"start the run with longer rounds (--sync-interval {longer}; a short run with 48 ended 6 to 8 % higher)"
    if by_outer:
        return
    yield "give the syncer more cores, or a machine that it shares with fewer processes"
    if syncers < sync.fragments:
        yield "start another syncer on another machine"


def _longer(sync: SyncSpec, worst: Pace, step_s: float, together_s: float) -> int | None:
    """Return the shortest interval beyond H of a plan at which this merge fits; None if there is none."""

    def fits(interval: int) -> bool:
        room_s = max(sync.overlap_steps, ROOM * interval) * step_s
        return max(worst.takes_s, together_s - interval * step_s) <= room_s

    return next((interval for interval in INTERVALS if interval > sync.sync_interval and fits(interval)), None)
