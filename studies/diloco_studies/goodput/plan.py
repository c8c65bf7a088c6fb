"""How many learners to have for given chips: what the run then needs is `pipeline.needs`'s. Pure.

M by goodput and the paper's quality; all else as `diloco plan` has it. Assumptions: docs/explanation/simulator.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.needs import GLOBALS, Needs, needs_of, pace_of
from diloco.pipeline.party_memory import TRAINING_BYTES
from diloco.pipeline.redis_memory import CODECS
from diloco.pipeline.units import counted
from diloco_studies.goodput.constants import DAY_S, USUAL, Constants
from diloco_studies.goodput.fleet import jobs, simulate, together

LEARNERS = (1, 2, 4, 8)
"""Paper: quality is best at M = 8 (text 54.4, 55.0, 55.4, 53.4 at M = 2, 4, 8, 16)."""
WORTH_IT = 0.01
"""Goodput that twice the learners must bring."""
STATE_BYTES = TRAINING_BYTES["fp32"]
CHIP_BYTES = 40e9
"""Memory of a chip that is left for them. Assumed"""
SEEDS, DAYS = 2, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Needs):
    """What the run needs, and what it would do."""

    goodput: float
    uptime: float
    longest_stall_s: float
    mean_participants: float
    overwritten: float


def plan(
    constants: Constants,
    chips: int,
    codec: Literal["auto", Codec] = "auto",
    global_codec: str = USUAL["global_codec"],
    learners: int | None = None,
) -> Plan:
    """A plan for so many chips in the world of the constants.

    Args:
        constants: the world; its own H, P and wire types do not count.
        chips: of the whole run.
        codec, global_codec: as `pipeline.needs.pace_of`.
        learners: as given; None: as many as the goodput wants.

    Raises:
        UsageError: the constants describe no world that can be simulated, or there are fewer chips than learners.
    """
    if learners is not None and not 1 <= learners <= chips:
        raise UsageError(
            f"{chips:,} chips are too few for {learners} learners: use --learners 1 to {chips:,}, or more --chips"
        )
    asked = learners or LEARNERS[-1]
    pace = pace_of(constants, asked, constants.overlap_steps, codec, global_codec, constants.outer)
    changes = {
        "sync_interval": pace.interval,
        "fragments": pace.fragments,
        "wire_bits": 8 * CODECS[pace.codec],
        "global_bits": 8 * GLOBALS[global_codec].pulled,
    }
    chosen = constants.model_copy(update=changes)
    learners, figures, why = _learners(chosen, chips, LEARNERS if learners is None else (learners,), pace.warnings)
    windows = simulate(chosen, "decoupled", chips, learners, DAYS, seed=0).windows
    pace.why["learners"] = why
    needs = needs_of(constants, pace, learners, constants.overlap_steps, constants.outer)
    overwritten = windows.get("overwritten", 1.0)
    known: dict[str, Any] = {one.name: getattr(needs, one.name) for one in fields(needs)} | figures
    # In place of what was reckoned without a simulation: one output has one share.
    known["merged_share"] = max(0.0, 1.0 - overwritten - windows.get("rejected", 0.0))
    return Plan(**known, mean_participants=windows.get("mean_participants", 0.0), overwritten=overwritten)


def _learners(
    constants: Constants, chips: int, among: Sequence[int], warnings: list[str]
) -> tuple[int, dict[str, float], str]:
    least = max(1, math.ceil(constants.params * STATE_BYTES / CHIP_BYTES))
    possible = [m for m in among if chips // m >= least]
    if not possible:
        warnings.append(
            f"{chips:,} chips are too few for the model, which needs {least:,} at {STATE_BYTES} bytes per parameter "
            f"and {CHIP_BYTES / 1e9:g} GB per chip"
        )
        possible = list(among[:1])
    found: list[tuple[int, dict[str, float]]] = [(m, _figures(constants, chips, m)) for m in possible]
    best = max(figures["goodput"] for _, figures in found)
    learners, figures = next(
        (one for one in found if one[1]["goodput"] >= best - WORTH_IT and one[1]["uptime"] > 1 - WORTH_IT / 10),
        found[-1],
    )
    shown = ", ".join(f"M={m} {100 * f['goodput']:.1f} %" for m, f in found)
    holds = f"a learner needs {counted(least, 'chip')} to hold the model"
    if len(among) == 1:
        return learners, figures, f"as requested ({shown}); {holds}"
    return (
        learners,
        figures,
        f"the fewest within {WORTH_IT:.0%} of the best goodput ({shown}) and with {1 - WORTH_IT / 10:.1%} uptime; "
        f"above 8 the paper's quality falls; {holds}",
    )


def _figures(constants: Constants, chips: int, learners: int) -> dict[str, float]:
    """Of the time lines alone: learners never wait."""
    runs = []
    for seed in range(SEEDS):
        useful, _, idle = together(jobs(constants, chips, learners, DAYS, np.random.default_rng(seed)))
        runs.append((useful, 1.0 - idle.total_s / (DAYS * DAY_S), idle.longest_s))
    useful, uptime, longest_s = np.array(runs).T
    return {"goodput": float(useful.mean()), "uptime": float(uptime.mean()), "longest_stall_s": float(longest_s.max())}
