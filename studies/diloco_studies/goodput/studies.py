"""Mixed hardware, and compute that comes and goes. Pure."""

from typing import Any, NamedTuple

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco_studies.goodput.constants import DAY_S, Constants
from diloco_studies.goodput.fleet import finish, jobs, sync_of
from diloco_studies.goodput.windows import SETTLED, Follower

MIXED = {"older_learners": 1 / 2, "older_slowdown": 0.18, "step_jitter": 0.10, "link": 1e12}
"""Paper: two generations of chips, half of the learners on each; '18 % + 10 % random slower'."""
MIXED_PAPER = {"K = M, waits": 0.84, "K = 1, no grace": 1.0, "K = 1, grace": 1.0}


class Mixed(NamedTuple):
    """One way of merging on mixed hardware."""

    goodput: float
    """Share of its time that the fastest learner does not wait: the run's pace against the one that it could have."""
    trained: float
    """The same share of all learners' time. Nobody is interrupted here."""
    mean_participants: float
    overwritten: float
    mean_grace_s: float


def mixed(constants: Constants, learners: int, days: float, seed: int) -> dict[str, Mixed]:
    """All learners in step, K = 1, and K = 1 with grace, without interruptions.

    Raises:
        UsageError: the time is too short.
    """
    calm = constants.model_copy(update={"mtbi": 1e15})
    ways = {
        "K = M, waits": (learners, True, constants.grace_gamma),
        "K = 1, no grace": (1, False, 0.0),
        "K = 1, grace": (1, False, constants.grace_gamma),
    }
    found = {}
    for name, (quorum, waits, gamma) in ways.items():
        rng = np.random.default_rng(seed)
        world = calm.model_copy(update={"grace_gamma": gamma})
        made = jobs(world, learners * world.slice_chips, learners, days, rng)
        run = finish(world, made, days)
        sync = sync_of(world, quorum=quorum, interval=world.sync_interval, fragments=world.fragments)
        follower = Follower(world, run.learners, sync, rng, waits=waits)
        follower.run(days * DAY_S)
        trained = [1.0 - waited_s / (days * DAY_S) for _, waited_s in follower.waits()]
        summary = follower.tally.summary(world.fragments)
        if not summary:
            raise UsageError(f"{days:g} days are too short for two merges after the first {SETTLED}: use more")
        means = (summary[key] for key in ("mean_participants", "overwritten", "mean_grace_s"))
        found[name] = Mixed(min(trained), float(np.mean(trained)), *means)
    return found


SCAVENGING_PAPER = {
    0.25: (1.07, 0.90),
    0.5: (1.09, 0.83),
    1.0: (1.02, 0.75),
    3.0: (0.80, 0.62),
}
"""Extra compute, as share of the usual -> time of a run relative to one without: data-parallel, decoupled."""
FITTED_EXTRA = 1.0
"""The one column that the constants below are fitted to; the others are predicted."""


class Scavenged(NamedTuple):
    """How extra compute for a part of a run counts: two constants, of which decoupled learners have the first."""

    share: float
    """Of the run's work, what is done while the extra compute is there."""
    comm: float
    """Of a usual step, what reducing gradients between the places adds to each data-parallel step meanwhile."""

    def times(self, extra: float) -> dict[str, float]:
        """Time of a run relative to one without extra compute; `extra` is above 0, as share of the usual.

        Decoupled learners add nothing to a step: the new ones are learners of their own.
        """
        faster = 1.0 / (1.0 + extra)
        return {
            "data-parallel": 1.0 - self.share + self.share * (faster + self.comm),
            "decoupled": 1.0 - self.share + self.share * faster,
        }


def scavenged(extra: float) -> Scavenged:
    """The constants that meet one column of the paper's: `share` its decoupled cell, `comm` its data-parallel one."""
    whole, apart = SCAVENGING_PAPER[extra]
    share = (1.0 - apart) / (1.0 - 1.0 / (1.0 + extra))
    return Scavenged(share, (whole - apart) / share)


def rows() -> list[dict[str, Any]]:
    """The paper's columns with its figures, what the constants of one of them make of each, and its own constants."""
    fitted = scavenged(FITTED_EXTRA)
    return [
        {
            "extra": extra,
            "fitted": extra == FITTED_EXTRA,
            **fitted.times(extra),
            **{f"paper, {name}": value for name, value in zip(fitted.times(extra), paper, strict=True)},
            **{f"its own {name}": value for name, value in scavenged(extra)._asdict().items()},
        }
        for extra, paper in SCAVENGING_PAPER.items()
    ]
