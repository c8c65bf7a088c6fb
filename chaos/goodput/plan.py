"""What to choose for given chips, model and link, and why. Pure.

M by goodput and the paper's quality; H by what the globals take of the link; the codec and P by whether a fragment's
round trip hides behind tau steps; syncers and Redis nodes by traffic and memory.
docs/explanation/simulator.md has the assumptions.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

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
"""Of the link, for deltas and globals: the rest is for what waits after an outage. Assumed"""
SCALE_BYTES = 2 / 256
"""Of an element in a codec of blocks: each of 256 elements has a scale of 2 bytes."""
CODECS = {
    "bf16": 2.0,
    "int8": 1.0 + SCALE_BYTES,
    "e3m0": 0.5 + SCALE_BYTES,
    "int4": 0.5 + SCALE_BYTES,
    "fp32": 4.0,
}
"""Bytes of an element of a delta."""


class Global(NamedTuple):
    """Bytes of an element of a global."""

    pulled: float
    """By each learner."""
    rest: float
    """What the syncer writes beside it, so that the values stay exact; of key frames on the average."""
    momentum: float
    """What the syncer writes for whoever takes over."""
    there: float
    """On the bus, momentum included, with what was replaced last."""


KEY_FRAMES = 8
"""Versions from one to the next."""
GLOBALS = {
    "fp32": Global(4.0, 0.0, 4.0, 16.0),
    "bf16": Global(2.0, 2.0, 4.0, 16.0),
    "int8": Global(
        1 + SCALE_BYTES, 4 / KEY_FRAMES, 1 + SCALE_BYTES + 4 / KEY_FRAMES, 16.0 + 2 * KEY_FRAMES * (1 + SCALE_BYTES)
    ),
}
BY_CHOICE = ("bf16", "int8", "e3m0")
"""Codecs that the planner chooses from, the paper's main setting first. Paper: int4 costs vision quality (34.4 for
36.6); Streaming DiLoCo: E3M0 loses nothing."""
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
    global_codec: str
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


class _Pace(NamedTuple):
    """How often, in how many parts and in which type deltas travel."""

    interval: int
    fragments: int
    codec: str
    trip_s: float


def plan(constants: Constants, chips: int, codec: str = "auto", global_codec: str = "fp32") -> Plan:
    """A plan for so many chips in the world of the constants.

    Args:
        constants: the world; its own H, P and wire types do not count.
        chips: of the whole run.
        codec: one of `CODECS`, or auto: bf16, unless a fragment's round trip cannot hide with it and can with less.
        global_codec: one of `GLOBALS`.

    Raises:
        UsageError: the constants describe no world that can be simulated.
    """
    warnings: list[str] = []
    shown = GLOBALS[global_codec]
    pace, why = _pace(constants, codec, global_codec, warnings)
    interval, fragments = pace.interval, pace.fragments
    wire_bytes = CODECS[pace.codec]
    changes = {
        "sync_interval": interval,
        "fragments": fragments,
        "wire_bits": 8 * wire_bytes,
        "global_bits": 8 * shown.pulled,
    }
    chosen = constants.model_copy(update=changes)
    learners, figures, why["learners"] = _learners(chosen, chips, warnings)
    windows = simulate(chosen, "decoupled", chips, learners, DAYS, seed=0).windows
    round_s = interval * constants.step_time
    up_bytes_per_s, down_bytes_per_s = (b * constants.params / round_s for b in (wire_bytes, shown.pulled))
    own_bytes_per_s = constants.params * (shown.pulled + shown.rest + shown.momentum) / round_s  # of the syncers
    traffic = learners * (up_bytes_per_s + down_bytes_per_s) * 2  # learners' side and the syncers'
    traffic += constants.params * shown.rest / round_s
    redis_memory = constants.params * (shown.there + wire_bytes * learners)
    by_traffic = math.ceil(traffic / REDIS_BYTES_PER_S / LINK_SHARE)
    by_memory = math.ceil(redis_memory / REDIS_MEMORY_BYTES / LINK_SHARE)
    why["redis_nodes"] = (
        f"{traffic / 1e9:.2f} GB/s take {by_traffic}, at {REDIS_BYTES_PER_S / 1e9:.1f} GB/s and {LINK_SHARE:.0%} each; "
        f"{redis_memory / 1e9:.0f} GB (2 globals, 2 momenta, {learners} deltas) take {by_memory}"
    )
    syncer_memory = constants.params * (4 + 4 + 4) + 2 * (learners + 2) * 4 * constants.params / fragments
    cores = learners * up_bytes_per_s / constants.merge_rate
    syncer_traffic = learners * up_bytes_per_s + own_bytes_per_s
    needs = {
        "memory": math.ceil(syncer_memory / SYNCER_MEMORY_BYTES / LINK_SHARE),
        "network": math.ceil(syncer_traffic / SYNCER_BYTES_PER_S / LINK_SHARE),
        "cores": math.ceil(cores / constants.syncer_cores / LINK_SHARE),
    }
    why["syncers"] = (
        "two at least, so that one can die; "
        + ", ".join(f"{name} takes {count}" for name, count in needs.items())
        + f" ({syncer_memory / 1e9:.0f} GB for values, momenta and windows, {syncer_traffic / 1e9:.2f} GB/s, "
        f"{cores:.2f} cores)"
    )
    return Plan(
        learners,
        interval,
        fragments,
        pace.codec,
        global_codec,
        max(2, *needs.values()),
        max(1, by_traffic, by_memory),
        mean_participants=windows.get("mean_participants", 0.0),
        overwritten=windows.get("overwritten", 1.0),
        link_load=max(up_bytes_per_s, down_bytes_per_s) * 8 / constants.link,
        round_trip_s=pace.trip_s,
        syncer_cores=cores,
        syncer_memory_bytes=syncer_memory,
        redis_memory_bytes=redis_memory,
        redis_bytes_per_s=traffic,
        why=why,
        warnings=warnings,
        **figures,
    )


def _pace(constants: Constants, codec: str, global_codec: str, warnings: list[str]) -> tuple[_Pace, dict[str, str]]:
    """H, P, codec and why."""
    pulled, wire = GLOBALS[global_codec].pulled, CODECS[BY_CHOICE[0] if codec == "auto" else codec]
    widest = max(pulled, wire)
    busier = f"the globals ({global_codec})" if pulled >= wire else "the deltas"

    def load(interval: int) -> float:
        return 8 * widest * constants.params / (interval * constants.step_time) / constants.link

    interval = next((h for h in INTERVALS if load(h) <= LINK_SHARE), None)
    if interval is None:
        interval = INTERVALS[-1]
        warnings.append(
            f"even at H = {interval} {busier} would take {load(interval):.0%} of the link: it needs "
            f"{load(interval) / LINK_SHARE:.1f} times the bandwidth, or a smaller model"
        )
    most = min(interval, TENSORS_A_LAYER * layers_of(constants.params))
    hidden_s = constants.overlap_steps * constants.step_time
    tried = [
        _fragmented(constants, interval, most, hidden_s, one, pulled)
        for one in (BY_CHOICE if codec == "auto" else [codec])
    ]

    def beyond(pace: _Pace) -> int:
        """Steps of each round that are trained in vain."""
        return max(0, math.ceil((pace.trip_s - hidden_s) / constants.step_time))

    pace = min(tried, key=beyond)  # of equal ones the first
    if beyond(pace):
        warnings.append(
            f"a fragment's round trip takes {pace.trip_s:.1f} s, more than the {constants.overlap_steps} steps it may "
            f"hide behind: {beyond(pace)} more steps of each round of {interval} are overwritten"
        )
    why = {
        "sync_interval": f"the shortest at which {busier}, the busier direction, take at most "
        f"{LINK_SHARE:.0%} of the link: {load(interval):.0%}; the paper has 24, and longer ones cost quality",
        "fragments": f"the fewest whose round trip ({pace.trip_s:.1f} s) hides behind {constants.overlap_steps} steps "
        f"({hidden_s:.1f} s), {most} at most",
        "codec": _why_codec(codec, pace, tried[0], beyond(tried[0]), global_codec),
    }
    return pace, why


def _why_codec(asked: str, pace: _Pace, first: _Pace, beyond: int, global_codec: str) -> str:
    if asked != "auto":
        return f"as asked for: {CODECS[asked]:.3g} bytes an element"
    if pace.codec == first.codec:
        return (
            "the paper's main setting, and the link carries it; 4 bits cost vision quality there"
            if not beyond
            else f"the paper's main setting; fewer bits would save no step of a round, for globals are {global_codec}"
        )
    return (
        f"{CODECS[pace.codec]:.3g} bytes an element: with {first.codec} a round trip takes {first.trip_s:.1f} s, and "
        f"{beyond} more steps of each round would be overwritten"
    )


def _fragmented(constants: Constants, interval: int, most: int, hidden_s: float, codec: str, pulled: float) -> _Pace:
    """The fewest fragments whose round trip is hidden; if none, the most."""
    fitting = [p for p in FRAGMENTS if p <= most]
    trips = {p: _round_trip_s(constants, p, CODECS[codec], pulled) for p in fitting}
    fragments = next((p for p, trip_s in trips.items() if trip_s <= hidden_s), fitting[-1])
    return _Pace(interval, fragments, codec, trips[fragments])


def _round_trip_s(constants: Constants, fragments: int, wire_bytes: float, pulled: float) -> float:
    """Upload, merge of the most learners that are recommended, and pull."""
    elements = constants.params / fragments
    merge_s = LEARNERS[-1] * elements * wire_bytes / constants.merge_rate / constants.syncer_cores
    transfer_s = 8 * elements * (wire_bytes + pulled) / constants.link
    return 2 * constants.latency + transfer_s + merge_s + constants.sync_time


def _learners(constants: Constants, chips: int, warnings: list[str]) -> tuple[int, dict[str, float], str]:
    least = max(1, math.ceil(constants.params * STATE_BYTES / CHIP_BYTES))
    possible = [m for m in LEARNERS if chips // m >= least]
    if not possible:
        warnings.append(
            f"{chips:,} chips are too few for the model, which needs {least:,} at {STATE_BYTES} bytes a parameter and "
            f"{CHIP_BYTES / 1e9:g} GB a chip"
        )
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
