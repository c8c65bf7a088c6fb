"""One job's time line: when it trains, when it is paused, and where its chips' time went. Pure: numpy.

A job is what resizes as one: the whole of a data-parallel run, or one learner. It trains until something happens
(an interruption; for an elastic job also a slice that is back). `gather` later it pauses: an elastic job to go on
with the slices that are there, another until all are back and it has started again. Whatever happens before the
pause is over is dealt with by it. So the next pause depends on nothing but when the last one ended, and the whole
chain is found by looking up, for every event at once, the first event after the pause that it would begin.

Every chip-second is accounted for: `useful` and the `lost` shares add up to 1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.strikes import Strikes
from diloco_studies.goodput.traces import Floats

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stops:
    """Disjoint spans without training, in order: (began_s, ended_s), each (stops,)."""

    began_s: Floats
    ended_s: Floats

    @property
    def total_s(self) -> float:
        """Their length together."""
        return float((self.ended_s - self.began_s).sum())

    @property
    def longest_s(self) -> float:
        """Length of the longest; 0 if there is none."""
        return float((self.ended_s - self.began_s).max(initial=0.0))


def overlap(parts: list[Stops], least: int) -> Stops:
    """Spans in which at least so many of them stop: their union (1), or where all stop (len)."""
    began = np.concatenate([part.began_s for part in parts])
    ended = np.concatenate([part.ended_s for part in parts])
    at_s = np.concatenate([began, ended])
    change = np.concatenate([np.ones(began.size, np.int64), -np.ones(ended.size, np.int64)])
    order = np.lexsort((-change, at_s))  # stops that touch are one
    depth = np.cumsum(change[order])
    inside = depth >= least
    edges = np.diff(np.concatenate([[False], inside]).astype(np.int8))
    at_s = at_s[order]
    starts, stops = at_s[edges == 1], at_s[edges == -1]
    real = stops > starts  # one stops where another goes on: both do for no time
    return Stops(starts[real], stops[real])


class Timeline:
    """Training time as a function of wall time, and back."""

    def __init__(self, stops: Stops, duration_s: float) -> None:
        self.stops, self.duration_s = stops, duration_s
        self._wall = np.concatenate([[0.0], np.ravel(np.column_stack([stops.began_s, stops.ended_s])), [duration_s]])
        steps = np.diff(self._wall)
        steps[1::2] = 0.0
        self._trained = np.concatenate([[0.0], np.cumsum(steps)])

    @property
    def total_s(self) -> float:
        """Training time in all."""
        return float(self._trained[-1])

    def trained(self, wall_s: Floats) -> Floats:
        """Training time until then."""
        return np.asarray(np.interp(wall_s, self._wall, self._trained))


class Job(NamedTuple):
    """What became of a job."""

    timeline: Timeline
    useful: float
    """Share of its chips' time that trained, and counted."""
    lost: dict[str, float]
    """Cause -> share."""


def run_elastic(constants: Constants, strikes: Strikes, slices: float, duration_s: float) -> Job:
    """A job that goes on with what it has: a pause to shrink, a pause to grow.

    Args:
        constants: the world.
        strikes: its interruptions.
        slices: how many it has when all are well.
        duration_s: how long it is watched.
    """
    back_s = strikes.at_s + strikes.away_s
    at_s = np.concatenate([strikes.at_s, back_s])
    struck = np.concatenate([np.ones(strikes.at_s.size, np.int64), np.zeros(back_s.size, np.int64)])
    order = np.argsort(at_s, kind="stable")
    at_s, struck = at_s[order], struck[order]
    last = np.searchsorted(at_s, at_s + constants.gather, "right")
    before = np.concatenate([[0], np.cumsum(struck)])
    fell = before[last] - before[:-1] > 0
    rose = (last - np.arange(at_s.size)) - (before[last] - before[:-1]) > 0
    detect_s = np.where(fell, constants.detect, 0.0)
    pause_s = np.maximum(np.where(fell, constants.down, 0.0), np.where(rose, constants.up, 0.0))
    chosen = _chain(at_s, at_s + constants.gather + detect_s + pause_s)
    began_s, detect_s, fell = at_s[chosen] + constants.gather, detect_s[chosen], fell[chosen]
    ended_s = began_s + detect_s + pause_s[chosen]
    pauses = _clipped(began_s, ended_s, duration_s)
    lost = {
        "detection": _clipped(began_s, began_s + detect_s, duration_s).total_s / duration_s,
        "down": _total(began_s + detect_s, ended_s, fell, duration_s),
        "up": _total(began_s + detect_s, ended_s, ~fell, duration_s),
    }
    rejoin_s = _after(ended_s, back_s, duration_s)
    return _account(strikes, rejoin_s, pauses, slices, lost, duration_s)


def run_rigid(constants: Constants, strikes: Strikes, slices: float, duration_s: float) -> Job:
    """A job without elasticity: waits until all struck slices are back, then restarts from a checkpoint."""
    at_s, back_s = strikes.at_s, strikes.at_s + strikes.away_s
    last = np.searchsorted(at_s, at_s + constants.gather, "right")
    all_back_s = _window_max(back_s, last)
    dead_s = at_s + constants.gather + constants.detect
    waited_s = np.maximum(all_back_s, dead_s)
    chosen = _chain(at_s, waited_s + constants.restart)
    began_s, dead_s, waited_s = at_s[chosen] + constants.gather, dead_s[chosen], waited_s[chosen]
    ended_s = waited_s + constants.restart
    pauses = _clipped(began_s, ended_s, duration_s)
    lost = {
        "detection": _clipped(began_s, dead_s, duration_s).total_s / duration_s,
        "repair": _clipped(dead_s, waited_s, duration_s).total_s / duration_s,
        "restart": _clipped(waited_s, ended_s, duration_s).total_s / duration_s,
    }
    job = _account(strikes, _after(ended_s, at_s, duration_s), pauses, slices, lost, duration_s)
    return _with_checkpoints(constants, job, pauses, duration_s)


def _with_checkpoints(constants: Constants, job: Job, pauses: Stops, duration_s: float) -> Job:
    """Take off what was done again, and the time that checkpoints took."""
    every_s, write_s = constants.checkpoint_every, constants.checkpoint_write
    if every_s == 0:
        return job
    trained_s = np.concatenate([pauses.began_s, [duration_s]]) - np.concatenate([[0.0], pauses.ended_s])
    written = np.floor(trained_s / (every_s + write_s))
    again_s = trained_s - written * (every_s + write_s)
    again_s[-1] = 0.0  # nothing has been lost yet
    whole_s = trained_s.sum()
    scale = job.useful / whole_s if whole_s > 0 else 0.0  # chips that were away lost nothing more
    lost = {
        **job.lost,
        "rework": float(again_s.sum()) * scale,
        "checkpoint": float(written.sum()) * write_s * scale,
    }
    return Job(job.timeline, job.useful - lost["rework"] - lost["checkpoint"], lost)


def _chain(at_s: Floats, over_s: Floats) -> Ints:
    """Which events begin a pause: the first one, then always the first after the pause before it."""
    following = np.searchsorted(at_s, over_s, "right").tolist()
    chosen, here = [], 0
    while here < len(following):
        chosen.append(here)
        here = following[here]
    return np.array(chosen, dtype=np.int64)


def _window_max(values: Floats, last: Ints) -> Floats:
    """max(values[i:last[i]]) for each i; every window has at least one."""
    if not values.size:
        return values
    pairs = np.ravel(np.column_stack([np.arange(values.size), last]))
    return np.asarray(np.maximum.reduceat(np.append(values, -np.inf), pairs)[::2])


def _clipped(began_s: Floats, ended_s: Floats, duration_s: float) -> Stops:
    return Stops(np.minimum(began_s, duration_s), np.minimum(ended_s, duration_s))


def _total(began_s: Floats, ended_s: Floats, which: npt.NDArray[np.bool_], duration_s: float) -> float:
    return _clipped(began_s[which], ended_s[which], duration_s).total_s / duration_s


def _after(ended_s: Floats, at_s: Floats, duration_s: float) -> Floats:
    """End of the pause that deals with what happened then."""
    return np.append(ended_s, duration_s)[np.searchsorted(ended_s, at_s, "left")]


def _account(
    strikes: Strikes, rejoin_s: Floats, pauses: Stops, slices: float, lost: dict[str, float], duration_s: float
) -> Job:
    """Chips that are away while the others train; a job without any slice stops too."""
    timeline = Timeline(pauses, duration_s)
    at_s = np.minimum(np.concatenate([strikes.at_s, rejoin_s]), duration_s)
    change = np.concatenate([strikes.slices, -strikes.slices])
    order = np.argsort(at_s, kind="stable")
    at_s = np.append(at_s[order], duration_s)
    away = np.minimum(np.cumsum(change[order]), slices)
    span_s = np.diff(timeline.trained(at_s))
    share = float((away * span_s).sum()) / slices / duration_s
    empty = (away >= slices) & (span_s > 0)
    useful = timeline.total_s / duration_s - share
    if empty.any():
        none_left = Stops(at_s[:-1][empty], at_s[1:][empty])
        timeline = Timeline(overlap([pauses, none_left], 1), duration_s)
    return Job(timeline, useful, {**lost, "away": share})
