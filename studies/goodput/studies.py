"""Mixed hardware, and compute that comes and goes. Pure."""

from typing import Any, NamedTuple

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.pipeline.units import DAY_S
from diloco.studies.goodput.constants import Constants
from diloco.studies.goodput.fleet import finish, jobs, step_times, sync_of
from diloco.studies.goodput.windows import SETTLED, Follower

MIXED = {"older_learners": 1 / 8, "older_slowdown": 0.18, "step_jitter": 0.10, "link": 1e12}
"""Paper: '18 % + 10 % random slower'; that one of eight learners is the slower one is assumed, and fits its 84 %."""
MIXED_PAPER = {"K = M, waits": 0.84, "K = 1, no grace": 1.0, "K = 1, grace": 1.0}


class Mixed(NamedTuple):
    """One way of merging on mixed hardware."""

    goodput: float
    """Share of the learners' time that they do not wait; nobody is interrupted here."""
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
        run = finish(world, made, step_times(world, learners * world.slice_chips, learners, rng), days)
        sync = sync_of(world, quorum=quorum, interval=world.sync_interval, fragments=world.fragments)
        follower = Follower(world, run.learners, sync, rng, waits=waits)
        follower.run(days * DAY_S)
        waited = float(np.mean([waited_s for _, waited_s in follower.waits()])) / (days * DAY_S) if waits else 0.0
        summary = follower.tally.summary(world.fragments)
        if not summary:
            raise UsageError(f"{days:g} days are too short for two merges after the first {SETTLED}: take more")
        found[name] = Mixed(1.0 - waited, summary["mean_participants"], summary["overwritten"], summary["mean_grace_s"])
    return found


SCAVENGED_SHARE = 0.5
"""Of the run's work, done while the extra compute is there. Calibrated: the paper's decoupled row is
(1 - 0.5) + 0.5 / (1 + extra) to the last digit but one."""
DATA_PARALLEL_COMM = 0.44
"""What reducing gradients between the places adds to a step, as share of the usual step. Calibrated on that row."""
EXTRA = (0.0, 0.25, 0.5, 1.0, 3.0)
SCAVENGING_PAPER = {
    "data-parallel": (1.00, 1.07, 1.09, 1.02, 0.80),
    "decoupled": (1.00, 0.90, 0.83, 0.75, 0.62),
}


def scavenging(extra: float, share: float = SCAVENGED_SHARE, comm: float = DATA_PARALLEL_COMM) -> dict[str, float]:
    """Time of a run relative to one without extra compute.

    Args:
        extra: compute that is added for a part of the run, as share of the usual.
        share: of the work, done in that part.
        comm: of a usual step, what data-parallel training adds to each step while it spans both places. Decoupled
            learners add nothing: the new ones are learners of their own.
    """
    faster = 1.0 / (1.0 + extra)
    return {
        "data-parallel": 1.0 - share + share * (faster + (comm if extra else 0.0)),
        "decoupled": 1.0 - share + share * faster,
    }


def rows() -> list[dict[str, Any]]:
    """The paper's columns of both, with its figures."""
    return [
        {
            "extra": extra,
            **scavenging(extra),
            **{f"paper, {name}": values[i] for name, values in SCAVENGING_PAPER.items()},
        }
        for i, extra in enumerate(EXTRA)
    ]
