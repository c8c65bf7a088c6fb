"""What to choose for given chips, model and link, and why. Pure.

M by goodput and the paper's quality, H and P by what the link carries, syncers and Redis nodes by traffic and memory.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .bandwidth import layers_of
from .constants import Constants
from .fleet import jobs, simulate, together
from .units import DAY_S

LEARNERS = (1, 2, 4, 8)
"""Paper: quality is best at M = 8 (text 54.4, 55.0, 55.4, 53.4 at M = 2, 4, 8, 16)."""
WORTH_IT = 0.01
"""Goodput that twice the learners must bring."""
STATE_BYTES = 16
"""Of a parameter in a learner: values, gradient and AdamW's moments. Assumed"""
CHIP_BYTES = 40e9
"""Memory of a chip that is left for them. Assumed"""
INTERVALS = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FRAGMENTS = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TENSORS_A_LAYER = 7
LINK_SHARE = 0.7
"""Of the link, for deltas and globals: the rest is for what waits after an outage."""
PULL_BYTES = 4
"""Globals travel as fp32."""
REDIS_BYTES_PER_S = 1.1 * 2**30
"""Of one node, through a Python client, measured at 1 MiB a value."""
REDIS_MEMORY_BYTES = 256e9
SYNCER_MEMORY_BYTES = 512e9
"""Memory of one machine. Assumed"""
SYNCER_BYTES_PER_S = 100e9 / 8
"""Network of a syncer's machine. Assumed"""
SEEDS, DAYS = 2, 5.0


@dataclass(slots=True)
class Plan:
    """The choice, what it would do, and why."""

    learners: int
    sync_interval: int
    fragments: int
    codec: str
    syncers: int
    redis_nodes: int
    goodput: float
    uptime: float
    longest_stall_s: float
    mean_participants: float
    overwritten: float
    link_load: float
    """Of the busier direction of a learner's link."""
    round_trip_s: float
    syncer_cores: float
    """All syncers together, merging without a pause."""
    syncer_memory_bytes: float
    """All syncers together."""
    redis_memory_bytes: float
    redis_bytes_per_s: float
    why: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plan(constants: Constants, chips: int) -> Plan:
    """A plan for so many chips in the world of the constants."""
    warnings: list[str] = []
    interval, fragments, why = _pace(constants, warnings)
    chosen = constants.model_copy(update={"sync_interval": interval, "fragments": fragments, "wire_bits": 16})
    learners, figures, why["learners"] = _learners(chosen, chips, warnings)
    windows = simulate(chosen, "decoupled", chips, learners, DAYS, seed=0).windows
    round_s = interval * constants.step_time
    up_bytes_per_s, down_bytes_per_s = (b * constants.params / round_s for b in (2, PULL_BYTES))
    traffic = learners * (up_bytes_per_s + down_bytes_per_s) * 2  # learners' side and the syncers'
    redis_memory = constants.params * (2 * 4 + 2 * 4 + 2 * learners)
    by_traffic = math.ceil(traffic / REDIS_BYTES_PER_S / LINK_SHARE)
    by_memory = math.ceil(redis_memory / REDIS_MEMORY_BYTES / LINK_SHARE)
    redis_nodes = max(1, by_traffic, by_memory)
    why["redis_nodes"] = (
        f"{traffic / 1e9:.2f} GB/s take {by_traffic}, at {REDIS_BYTES_PER_S / 1e9:.1f} GB/s and {LINK_SHARE:.0%} each; "
        f"{redis_memory / 1e9:.0f} GB (2 globals, 2 momenta, {learners} deltas) take {by_memory}"
    )
    syncer_memory = constants.params * (4 + 4 + 4) + 2 * (learners + 2) * 4 * constants.params / fragments
    cores = learners * up_bytes_per_s / constants.merge_rate
    syncer_traffic = learners * up_bytes_per_s + 2 * PULL_BYTES * constants.params / round_s
    needs = {
        "memory": math.ceil(syncer_memory / SYNCER_MEMORY_BYTES / LINK_SHARE),
        "network": math.ceil(syncer_traffic / SYNCER_BYTES_PER_S / LINK_SHARE),
        "cores": math.ceil(cores / constants.syncer_cores / LINK_SHARE),
    }
    syncers = max(2, *needs.values())
    why["syncers"] = (
        "two at least, so that one can die; "
        + ", ".join(f"{name} takes {count}" for name, count in needs.items())
        + f" ({syncer_memory / 1e9:.0f} GB for values, momenta and windows, {syncer_traffic / 1e9:.2f} GB/s)"
    )
    load = max(up_bytes_per_s, down_bytes_per_s) * 8 / constants.link
    return Plan(
        learners,
        interval,
        fragments,
        "bf16",
        syncers,
        redis_nodes,
        mean_participants=windows.get("mean_participants", 0.0),
        overwritten=windows.get("overwritten", 1.0),
        link_load=load,
        round_trip_s=_round_trip_s(constants, fragments),
        syncer_cores=cores,
        syncer_memory_bytes=syncer_memory,
        redis_memory_bytes=redis_memory,
        redis_bytes_per_s=traffic,
        why=why,
        warnings=warnings,
        **figures,
    )


def _pace(constants: Constants, warnings: list[str]) -> tuple[int, int, dict[str, str]]:
    """H, P and why."""

    def load(interval: int) -> float:
        return 8 * PULL_BYTES * constants.params / (interval * constants.step_time) / constants.link

    interval = next((h for h in INTERVALS if load(h) <= LINK_SHARE), None)
    if interval is None:
        interval = INTERVALS[-1]
        warnings.append(
            f"even at H = {interval} globals would take {load(interval):.0%} of the link: it needs "
            f"{load(interval) / LINK_SHARE:.1f} times the bandwidth, or a codec below bf16, which this version has not"
        )
    most = min(interval, TENSORS_A_LAYER * layers_of(constants.params))
    hidden_s = constants.overlap_steps * constants.step_time
    fitting = [p for p in FRAGMENTS if p <= most]
    fragments = next((p for p in fitting if _round_trip_s(constants, p) <= hidden_s), fitting[-1])
    trip_s = _round_trip_s(constants, fragments)
    if trip_s > hidden_s:
        steps = math.ceil(trip_s / constants.step_time)
        warnings.append(
            f"a fragment's round trip takes {trip_s:.1f} s, more than the {constants.overlap_steps} steps it may hide "
            f"behind: {steps} of {interval + steps} steps of each round are overwritten"
        )
    why = {
        "sync_interval": f"the shortest at which the globals (fp32, the busier direction) take at most "
        f"{LINK_SHARE:.0%} of the link: {load(interval):.0%}; the paper has 24, and longer ones cost quality",
        "fragments": f"the fewest whose round trip ({trip_s:.1f} s) hides behind {constants.overlap_steps} steps "
        f"({hidden_s:.1f} s), {most} at most",
        "codec": "the paper's main setting; 4 bits cost vision quality there, and this version has bf16 and fp32",
    }
    return interval, fragments, why


def _round_trip_s(constants: Constants, fragments: int) -> float:
    elements = constants.params / fragments
    return 2 * constants.latency + elements * 8 * (2 + PULL_BYTES) / constants.link


def _learners(constants: Constants, chips: int, warnings: list[str]) -> tuple[int, dict[str, float], str]:
    least = max(1, math.ceil(constants.params * STATE_BYTES / CHIP_BYTES))
    possible = [m for m in LEARNERS if chips // m >= least]
    if not possible:
        warnings.append(f"{chips} chips are too few for the model, which needs {least} (STATE_BYTES, CHIP_BYTES)")
        possible = [1]
    found: list[tuple[int, dict[str, float]]] = [(m, _figures(constants, chips, m)) for m in possible]
    best = max(figures["goodput"] for _, figures in found)
    learners, figures = next(
        (one for one in found if one[1]["goodput"] >= best - WORTH_IT and one[1]["uptime"] > 1 - WORTH_IT / 10),
        found[-1],
    )
    shown = ", ".join(f"M={m} {100 * f['goodput']:.1f} %" for m, f in found)
    return (
        learners,
        figures,
        f"the fewest within {WORTH_IT:.0%} of the best goodput ({shown}) and with {1 - WORTH_IT / 10:.1%} uptime; "
        f"above 8 the paper's quality falls, and a learner needs {least} chips to hold the model",
    )


def _figures(constants: Constants, chips: int, learners: int) -> dict[str, float]:
    """Of the time lines alone: learners never wait."""
    runs = []
    for seed in range(SEEDS):
        useful, _, idle = together(jobs(constants, chips, learners, DAYS, np.random.default_rng(seed)))
        runs.append((useful, 1.0 - idle.total_s / (DAYS * DAY_S), idle.longest_s))
    useful, uptime, longest_s = np.array(runs).T
    return {"goodput": float(useful.mean()), "uptime": float(uptime.mean()), "longest_stall_s": float(longest_s.max())}
