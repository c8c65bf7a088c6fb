"""How a struck run fared: gaps between commits, step rates around outages, goodput. Pure.

Times are Unix seconds of one machine. Step times are the learners' own, written to their disks, so that an outage of
the bus does not hide them.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco_studies.strikes.schedule import Manner, Party

AROUND_S = 10.0
"""Length of the spans before and after an outage in which step rates are measured."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A strike that took place."""

    manner: Manner
    party: Party
    name: str
    began_s: float
    ended_s: float
    """When the strike was over: the process started again, the connections let through. Of a strike on a primary that
    others take over from: when all keys had one again."""
    detail: str = ""

    @property
    def kind(self) -> str:
        """E.g. `kill learner`."""
        return f"{self.manner} {self.party}"


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without a commit."""

    began_s: float
    ended_s: float

    @property
    def length_s(self) -> float:
        """How long."""
        return self.ended_s - self.began_s


def gaps(commits_s: Iterable[float], began_s: float, ended_s: float) -> list[Gap]:
    """The times between neighbouring commits within a span, its ends included."""
    inside = sorted(at for at in commits_s if began_s < at < ended_s)
    points = [began_s, *inside, ended_s]
    return [Gap(early, late) for early, late in itertools.pairwise(points)]


def longest(found: Iterable[Gap]) -> float:
    """Length of the longest gap; 0.0 if there is none."""
    return max((gap.length_s for gap in found), default=0.0)


def longest_by_kind(found: Iterable[Gap], strikes: Sequence[Struck]) -> dict[str, dict[str, float | None]]:
    """For each kind of strike the longest gap in which one began, and the longest in which no other kind was under way.

    None: there was no such gap.
    """
    kinds: dict[str, dict[str, float | None]] = {
        kind: {"longest_s": None, "alone_s": None} for kind in sorted({strike.kind for strike in strikes})
    }
    for gap in found:
        inside = {strike.kind for strike in strikes if gap.began_s <= strike.began_s < gap.ended_s}
        under_way = {one.kind for one in strikes if one.began_s < gap.ended_s and one.ended_s > gap.began_s}
        for kind in inside:
            names = ("longest_s", "alone_s") if under_way <= {kind} else ("longest_s",)
            for name in names:
                kinds[kind][name] = max(kinds[kind][name] or 0.0, gap.length_s)
    return kinds


# --- step rates ------------------------------------------------------------------------------------------

StepTimes = Mapping[str, Sequence[tuple[str, Sequence[float]]]]
"""Learner -> (incarnation, ends of its inner steps in order), one entry an incarnation."""


@dataclass(slots=True)
class Rate:
    """Inner steps over some time."""

    steps: int = 0
    time_s: float = 0.0

    def add(self, other: "Rate") -> None:
        """Sum up."""
        self.steps += other.steps
        self.time_s += other.time_s

    @property
    def per_s(self) -> float | None:
        """Steps per second; None if nothing was measured."""
        return self.steps / self.time_s if self.time_s > 0 else None


SPANS = ("before", "during", "after")


def around(steps_s: Sequence[float], began_s: float, ended_s: float) -> dict[str, Rate]:
    """One incarnation's step rates before, during and after an outage, between ends of steps.

    Nothing where it did not live through the outage: it needs a step before its beginning and one after its end.
    """
    first, last = bisect_right(steps_s, began_s) - 1, bisect_left(steps_s, ended_s)
    if first < 0 or last >= len(steps_s):
        return {}
    start = bisect_left(steps_s, began_s - AROUND_S)
    stop = bisect_right(steps_s, ended_s + AROUND_S) - 1
    spans = {"before": (start, first), "during": (first, last), "after": (last, stop)}
    return {name: Rate(late - early, steps_s[late] - steps_s[early]) for name, (early, late) in spans.items()}


def outages(strikes: Iterable[Struck], parties: Iterable[Party]) -> list[Gap]:
    """Times in which anyone of these parties was struck; those that overlap as one."""
    wanted = set(parties)
    found: list[Gap] = []
    for strike in sorted((one for one in strikes if one.party in wanted), key=lambda one: one.began_s):
        if found and strike.began_s <= found[-1].ended_s:
            found[-1] = Gap(found[-1].began_s, max(found[-1].ended_s, strike.ended_s))
        else:
            found.append(Gap(strike.began_s, strike.ended_s))
    return found


def rates_around(steps: StepTimes, found: Sequence[Gap]) -> dict[str, dict[str, Rate]]:
    """Per learner, summed over outages and incarnations: rates before, during and after."""
    sums: dict[str, dict[str, Rate]] = {}
    for learner, incarnations in steps.items():
        mine = {span: Rate() for span in SPANS}
        for _, times_s in incarnations:
            for outage in found:
                for span, rate in around(times_s, outage.began_s, outage.ended_s).items():
                    mine[span].add(rate)
        sums[learner] = mine
    return sums


def as_rates(by_learner: Mapping[str, Mapping[str, Rate]]) -> dict[str, float | None]:
    """Steps per second of a learner on average before, during and after, and what is left of it (`ratio`)."""
    total = {span: Rate() for span in SPANS}
    for mine in by_learner.values():
        for span, rate in mine.items():
            total[span].add(rate)
    before, during = total["before"].per_s, total["during"].per_s
    ratio = during / before if before and during is not None else None
    return {**{span: rate.per_s for span, rate in total.items()}, "ratio": ratio}


# --- goodput ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goodput:
    """Share of the learners' time that went into merged tokens."""

    trained: float
    """Share of the learners' time that they spent in inner steps: steps x their usual length / time."""
    merged: float
    """Share of the trained tokens that were merged."""

    @property
    def share(self) -> float:
        """Of all the time."""
        return self.trained * self.merged


def goodput(steps: StepTimes, learners: int, wall_s: float, tokens: int, merged_tokens: int) -> Goodput:
    """Goodput over `wall_s` of a run with `learners` places.

    A step's usual length is the median over all learners; a machine shared by fewer learners makes faster steps, so
    the trained share may come out above 1 and is cut there.
    """
    lengths = sorted(
        late - early
        for incarnations in steps.values()
        for _, times_s in incarnations
        for early, late in itertools.pairwise(times_s)
    )
    usual_s = lengths[len(lengths) // 2] if lengths else math.nan
    made = sum(len(times_s) for incarnations in steps.values() for _, times_s in incarnations)
    trained = min(1.0, made * usual_s / (learners * wall_s)) if lengths and wall_s > 0 else 0.0
    return Goodput(trained, merged_tokens / tokens if tokens else 0.0)
