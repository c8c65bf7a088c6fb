"""Goodput: the share of the learners' time that goes into training that the run keeps. Pure (docs/howto/watch.md).

The time of each learner, from when it first begins to join until it leaves, divides into activities, by its reports:

    training    in the user's code between two calls of `step`, data loading included
    blocked     inside `step`
    joining     from `Learner.open` until training begins
    rejoining   the same after a death
    away        between a death and the beginning of the comeback

All of these except training are badput, and so is training whose tokens were lost (`ledger`, `status`): a token costs
as much time as the run's mean token. So goodput + badput by cause = 1.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, TypedDict

from diloco.pipeline.messages.run import LearnerReport, RunState, SeenReport
from diloco.pipeline.view.merged_share import RECENT_S

ACTIVITIES = ("training", "blocked", "joining", "rejoining", "away")
# The causes of badput that a run without failures does not have.
FAILURES = ("rejoining", "away", "died")
# A learner that claims to have joined for longer, s, is counted with this.
JOINING_S = 24 * 3600.0
Seconds = dict[str, float]  # by activity


class Division(TypedDict):
    """How time divides."""

    seconds: Seconds
    goodput: float | None
    """Share of the time; None if there is none, or the fate of the tokens is not known."""
    badput: dict[str, float]
    """Shares of the time by cause; empty where `goodput` is None."""


class Goodput(TypedDict):
    """Goodput of a run, JSON-able. Its time is the sum of its learners' time."""

    since_start: Division
    """Tokens that may still be merged count as goodput."""
    recent: Division
    """The same for the last five minutes. Of lost tokens only the sum is known, as `not_merged`."""
    learners: dict[str, Seconds]
    """The time of each learner since the start."""
    merged_tokens: int
    """Merged in this time."""


def time_of_learners(
    reports: Sequence[SeenReport], started_s: float, end_s: float, now_s: float, live_s: float, recent: bool = False
) -> dict[str, Seconds]:
    """Return the time of each learner by activity.

    A learner that died is away until an incarnation of it begins to join. If a learner with a new name comes first, it
    takes the place of the dead one: a pod that replaces another one has a new name.

    Args:
        reports: the last report of each incarnation, with their ages at `now_s`, Unix time.
        started_s, end_s: when this part of the run began (nothing was trained before), and when it ended, or now.
        live_s: a learner that was silent for this long is dead.
        recent: only the last five minutes.
    """
    begin_s = end_s - RECENT_S if recent else -math.inf
    found: defaultdict[str, Seconds] = defaultdict(lambda: dict.fromkeys(ACTIVITIES, 0.0))
    silent: dict[str, float] = {}  # learner -> when its last incarnation was heard last, unless that has left
    dead: list[tuple[float, str]] = []  # the same of those that are dead, as a heap; also of some that came back

    def spend(learner: str, activity: str, since_s: float, until_s: float, share: float = 1.0) -> None:
        found[learner][activity] += share * max(0.0, min(until_s, end_s) - max(since_s, begin_s))

    def spend_away(learner: str, since_s: float, until_s: float) -> None:
        since_s, until_s = max(since_s, begin_s), min(until_s, end_s)
        if until_s > since_s:
            found[learner]["away"] += until_s - since_s - (paused_s(until_s) - paused_s(since_s))

    lives = []
    for seen in reports:
        report, heard_s = seen.report, now_s - seen.age_s
        began_s = max(heard_s - report.wall_s, min(started_s, heard_s))
        lives.append((began_s - min(report.joining_s, JOINING_S), began_s, heard_s, report))
    lives.sort(key=lambda life: life[:3])
    paused_s = _paused(lives)
    for joins_s, began_s, heard_s, report in lives:
        learner = report.learner
        before = learner
        if learner not in found:
            while dead and silent.get(dead[0][1]) != dead[0][0]:
                heappop(dead)
            before = dead[0][1] if dead and dead[0][0] <= joins_s else learner
        died = before in silent
        if died:
            gone_s = silent.pop(before)
            spend_away(before, gone_s, joins_s)
        spend(learner, "rejoining" if died else "joining", joins_s, began_s)
        wall_s, blocked_s = report.wall_s, report.blocked_s
        if recent and report.earlier[0] < wall_s:
            wall_s, blocked_s = wall_s - report.earlier[0], blocked_s - report.earlier[1]
        blocked = min(1.0, max(0.0, blocked_s / wall_s)) if wall_s else 0.0
        spend(learner, "training", began_s, heard_s, 1 - blocked)
        spend(learner, "blocked", began_s, heard_s, blocked)
        if not report.left:
            if died and before == learner:  # two lives that begin at the same time, by rounding, may come in any order
                heard_s = max(heard_s, gone_s)
            silent[learner] = heard_s
            if now_s - heard_s > live_s:
                heappush(dead, (heard_s, learner))
    for learner, at_s in silent.items():
        if now_s - at_s > live_s:
            spend_away(learner, at_s, end_s)
    return dict(found)


def _paused(lives: Iterable[tuple[float, float, float, LearnerReport]]) -> Callable[[float], float]:
    """Return a function: the sum of the run's pauses before a Unix time, s.

    In a pause the last learner has left, and the run has not been extended yet.

    lives: when each began to join, began to train and was heard last, with its report; in order.
    """
    pauses, sums = list[tuple[float, float]](), [0.0]
    last_s, left = -math.inf, False
    for joins_s, _, heard_s, report in lives:
        if left and joins_s > last_s:
            pauses.append((last_s, joins_s))
            sums.append(sums[-1] + joins_s - last_s)
        if heard_s >= last_s:
            last_s, left = heard_s, report.left

    def until(at_s: float) -> float:
        n = bisect_right(pauses, at_s, key=itemgetter(0))  # not a loop: there may be thousands of pauses and of deaths
        return sums[n] - (max(0.0, pauses[n - 1][1] - at_s) if n else 0.0)

    return until


def summed(learners: Mapping[str, Seconds]) -> Seconds:
    """Return the time of all learners by activity."""
    return {name: sum(one[name] for one in learners.values()) for name in ACTIVITIES}


def divide(seconds: Seconds, kept: float | None, lost: Mapping[str, float]) -> Division:
    """Return how time divides into goodput and badput.

    kept: tokens that were trained and are not lost, or their share; None if not known. lost: those lost, by cause.
    """
    total_s = sum(seconds.values())
    if kept is None or not total_s:
        return {"seconds": seconds, "goodput": None, "badput": {}}
    training, *others = (seconds[name] / total_s for name in ACTIVITIES)
    tokens = kept + sum(lost.values())
    badput = dict(zip(ACTIVITIES[1:], others, strict=True))
    badput |= {cause: training * one / tokens if tokens else 0.0 for cause, one in lost.items()}
    return {"seconds": seconds, "goodput": training * kept / tokens if tokens else training, "badput": badput}


def goodput(
    reports: Sequence[SeenReport],
    state: RunState | None,
    tokens: tuple[int, int, Mapping[str, int]],
    recent_share: float | None,
    times: tuple[float, float, float],
) -> Goodput:
    """Return the goodput of a run, or of the part of it that `state` began.

    tokens: trained, merged, and lost by cause. recent_share: merged share of the last five minutes; None if not known,
    or if they are the whole run. times: `end_s`, `now_s` and `live_s` of `time_of_learners`.
    """
    reports = [seen for seen in reports if seen.counts_in(state)]
    started_s = -math.inf if state is None else state.started_unix_s
    learners, recently = (time_of_learners(reports, started_s, *times, recent) for recent in (False, True))
    trained, merged, lost = tokens
    not_merged = {} if recent_share is None else {"not_merged": 1 - recent_share}
    return {
        "since_start": divide(summed(learners), trained - sum(lost.values()), lost),
        "recent": divide(summed(recently), recent_share, not_merged),
        "learners": learners,
        "merged_tokens": merged,
    }


def cost(goodput: Mapping[str, Any] | None, price: float) -> dict[str, Any] | None:
    """Return what a run has cost since the start, JSON-able; None if not known. `failures` is the part of `badput` that
    failures cause. Learners that are away cost as much as others.

    goodput: in a status or report. price: of an hour of one learner.
    """
    if goodput is None or goodput["since_start"]["goodput"] is None:
        return None
    division, merged_tokens = goodput["since_start"], goodput["merged_tokens"]
    total = price * sum(division["seconds"].values()) / 3600
    badput = {cause: total * share for cause, share in division["badput"].items()}
    return {
        "total": total,
        "per_million_merged_tokens": total / merged_tokens * 1e6 if merged_tokens else None,
        "badput": badput,
        "failures": sum(badput.get(cause, 0.0) for cause in FAILURES),
    }
