"""A run: one job, or learners that are a job each, and what its chips' time went into. Pure: numpy.

Decoupled learners never wait, so their time lines do not depend on one another, and neither does the goodput: what
the syncer decides, which `windows` follows, is about what is merged. Learners of synchronous DiLoCo wait for every
merge, so there the window's decisions come first and the goodput after.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import SyncSpec
from diloco_studies.goodput.constants import DAY_S, Constants
from diloco_studies.goodput.job import Job, Stops, Timeline, overlap, run_elastic, run_rigid
from diloco_studies.goodput.parties import bare
from diloco_studies.goodput.strikes import Strikes, draw, draw_regions, of_region
from diloco_studies.goodput.windows import Follower, Learner

Method = Literal["data-parallel", "elastic", "diloco", "decoupled"]
FOLLOWED_MERGES = 300
"""Windows followed of decoupled learners, whose goodput does not depend on them."""
METHODS: tuple[Method, ...] = ("data-parallel", "elastic", "diloco", "decoupled")


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of one cell."""

    goodput: float
    """Share of the chips' time that trained (paper). What decoupled learners trained and had overwritten is in it."""
    lost: dict[str, float]
    """Cause -> share; goodput and these add up to 1."""
    uptime: float
    """Share of the time in which at least one learner advances."""
    longest_stall_s: float
    """Longest time in which none does."""
    learners: tuple[Learner, ...] = ()
    windows: dict[str, float] = field(default_factory=dict)
    """What the syncer did: see `windows.Tally.summary`."""


Jobs = Callable[[Constants, Strikes, float, float], Job]


def jobs(
    constants: Constants, chips: int, learners: int, days: float, rng: np.random.Generator, *, rigid: bool = False
) -> list[Job]:
    """Every learner's job, with chips shared evenly.

    Raises:
        UsageError: a learner would have no chip.
    """
    if chips < learners:
        raise UsageError(f"{chips:,} chips are too few for {learners} learners: use more chips or fewer learners")
    duration_s = days * DAY_S
    outages = draw_regions(constants, duration_s, rng)
    run: Jobs = run_rigid if rigid else run_elastic
    made = []
    for m in range(learners):
        mine = chips // learners + (m < chips % learners)
        slices = max(1.0, mine / constants.slice_chips)
        parts = [draw(constants, mine, duration_s, rng)]
        if learners == 1:  # spread over all regions
            parts += [of_region(constants, at_s, slices / constants.regions) for at_s in outages]
        else:
            parts.append(of_region(constants, outages[m % constants.regions], slices))
        made.append(run(constants, Strikes.merged(parts), slices, duration_s))
    return made


def step_times(constants: Constants, learners: int) -> list[float]:
    """Each learner's."""
    older = round(constants.older_learners * learners)
    return [constants.step_time * (1.0 + constants.older_slowdown * (m >= learners - older)) for m in range(learners)]


def together(made: list[Job]) -> tuple[float, dict[str, float], Stops]:
    """Useful share, lost shares, and when nobody trains, of learners of one size."""
    lost: dict[str, float] = {}
    for job in made:
        for cause, share in job.lost.items():
            lost[cause] = lost.get(cause, 0.0) + share / len(made)
    useful = sum(job.useful for job in made) / len(made)
    stops = [job.timeline.stops for job in made]
    return useful, lost, stops[0] if len(made) == 1 else overlap(stops, len(made))


def finish(constants: Constants, made: list[Job], days: float) -> Run:
    """A run of learners that do not wait for one another."""
    useful, lost, idle = together(made)
    times = step_times(constants, len(made))
    learners = tuple(Learner(job.timeline, s) for job, s in zip(made, times, strict=True))
    return Run(useful, lost, 1.0 - idle.total_s / (days * DAY_S), idle.longest_s, learners)


def simulate(constants: Constants, method: Method, chips: int, learners: int, days: float, seed: int) -> Run:
    """One run. Equal arguments give equal results.

    Args:
        constants: the world.
        method: data-parallel (no elasticity) and elastic have one job, whatever `learners` says.
        chips: of all learners.
        learners: M.
        days: simulated time.
        seed: of everything random.
    """
    count = learners if method in ("diloco", "decoupled") else 1
    rng = np.random.default_rng([seed, METHODS.index(method), chips, count])
    made = jobs(constants, chips, count, days, rng, rigid=method == "data-parallel")
    run = finish(constants, made, days)
    if method == "decoupled":
        return _follow(constants, run, days, rng)
    if method == "diloco" and count > 1:
        return _follow_waiting(constants, run, days, rng)
    return run


def sync_of(constants: Constants, *, quorum: int, interval: int, fragments: int) -> SyncSpec:
    """What the parties agree on."""
    return bare(
        SyncSpec,
        fragments=fragments,
        sync_interval=interval,
        quorum=quorum,
        overlap_steps=constants.overlap_steps,
        grace_gamma=constants.grace_gamma,
        first_interval=0,
        doubling=1,
    )


def _follow(constants: Constants, run: Run, days: float, rng: np.random.Generator) -> Run:
    """A decoupled run, with what the syncer did over the first windows."""
    sync = sync_of(
        constants,
        quorum=min(constants.quorum, len(run.learners)),
        interval=constants.sync_interval,
        fragments=constants.fragments,
    )
    follower = Follower(constants, run.learners, sync, rng, waits=False)
    follower.run(days * DAY_S, FOLLOWED_MERGES)
    return replace(run, windows=follower.tally.summary(constants.fragments))


def _follow_waiting(constants: Constants, run: Run, days: float, rng: np.random.Generator) -> Run:
    """Synchronous DiLoCo: K = M, one fragment, and learners that wait; every window of the run is followed."""
    sync = sync_of(constants, quorum=len(run.learners), interval=constants.diloco_interval, fragments=1)
    duration_s = days * DAY_S
    follower = Follower(constants, run.learners, sync, rng, waits=True)
    follower.run(duration_s)
    stops, waited = [], 0.0
    for learner, (spans, waited_s) in zip(run.learners, follower.waits(), strict=True):
        mine = Stops(np.array([a for a, _ in spans]), np.array([b for _, b in spans]))
        stops.append(overlap([learner.timeline.stops, mine], 1))
        waited += waited_s / max(1e-9, learner.timeline.total_s) / len(run.learners)
    idle = overlap(stops, len(stops))
    useful = run.goodput * (1.0 - waited)
    return replace(
        run,
        goodput=useful,
        lost={**run.lost, "waiting for merges": run.goodput - useful},
        uptime=1.0 - idle.total_s / duration_s,
        longest_stall_s=idle.longest_s,
        learners=tuple(
            Learner(Timeline(mine, duration_s), learner.step_s)
            for mine, learner in zip(stops, run.learners, strict=True)
        ),
        windows=follower.tally.summary(1),
    )
