"""Whether merges keep up with the learners, and what helps where they do not. Pure."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.ramps import interval_at


class Pace(NamedTuple):
    """How one fragment's merges go."""

    fragment: int
    version: int
    merge_s: float
    """`WindowView.merge_s`."""


class LastMerges:
    """How long the last two merges of one fragment took."""

    def __init__(self) -> None:
        self._took = (0.0, 0.0)

    def took(self, seconds: float) -> None:
        """One more."""
        self._took = self._took[1], seconds

    @property
    def merge_s(self) -> float:
        """As `WindowView.merge_s`: the shorter of them; 0 before there are two."""
        return min(self._took)


def slow_merges(
    sync: SyncSpec, fragments: Iterable[Pace], step_times: Sequence[float], syncers: int, allowed: float = 1.0
) -> str | None:
    """A warning if merges take longer than a round, with what helps; None: they keep up, or it is not known yet.

    A round is the planned interval (`ramps.interval_at`) times the median step time of the live learners. What a
    learner trains between its delta and the merge is overwritten when it adopts that: here, more than it publishes.

    Args:
        sync: the run's.
        fragments: those whose merges are looked at.
        step_times: of live learners, s; 0 is not known yet.
        syncers: how many serve the run.
        allowed: rounds that a merge may take.
    """
    known = [s for s in step_times if s > 0]
    if not known:
        return None
    step_s = median(known)
    found = [(one.merge_s / (interval_at(sync, one.version) * step_s), one) for one in fragments]
    slow = [(ratio, one) for ratio, one in found if ratio > allowed]
    if not slow:
        return None
    ratio, worst = max(slow)
    interval = interval_at(sync, worst.version)
    longer = "--sync-interval" if interval == sync.sync_interval else "first_interval"
    helps = ["give the syncer more cores, or fewer neighbours"]
    if syncers < sync.fragments:
        helps.append("start another syncer on another machine")
    if sync.outer == "muon":
        helps.append("take --outer nesterov, which multiplies no matrices, or where the syncer has cores to spare ")
        helps[-1] += "let it use N of them (OPENBLAS_NUM_THREADS=N)"
    helps.append(f"make rounds longer ({longer})")
    return (
        f"merges take longer than a round of the learners ({len(slow)} of {len(found)} fragments; fragment "
        f"{worst.fragment} {worst.merge_s:.1f} s, its round of {interval} steps {worst.merge_s / ratio:.1f} s), "
        f"and what is trained meanwhile is overwritten: {'; or '.join(helps)}"
    )
