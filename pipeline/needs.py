"""Planning of a run: sync interval, fragments and codec; memory, bandwidth and cores of the syncers and of Redis. Pure.

H follows from the share of a learner's link that the globals take; the codec, P and the threads of an outer step follow
from whether a fragment's round trip is hidden behind tau steps; syncers and Redis nodes follow from traffic, memory and
operations. `diloco plan` prints the result, the syncer checks its Redis with it, and `diloco simulate plan` adds how
many learners the goodput requires.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from diloco.pipeline.messages.wire import Codec, OuterName
from diloco.pipeline.methods import NESTEROV
from diloco.pipeline.outer_cost import CHEAPER, CORE_FLOPS
from diloco.pipeline.party_memory import (
    CHECKPOINT_BYTES,
    TRAINING_BYTES,
    Precision,
    learner_bytes,
    syncer_bytes,
    syncer_share,
)
from diloco.pipeline.ramps import lengthened
from diloco.pipeline.redis_memory import CODECS, redis_bytes, redis_holds
from diloco.pipeline.settings import SyncSettings, defaults
from diloco.pipeline.site import Site, outer_operations, shape_of
from diloco.pipeline.units import as_bytes, as_rate, written

# The defaults of a run. A plan changes them only where it must.
USUAL = defaults(SyncSettings)
INTERVALS = (USUAL["sync_interval"], 32, 48, 64, 96, 128, 192, 256, 384, 512)
FRAGMENTS = (USUAL["fragments"], 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TENSORS_A_LAYER = 7
# Usable share of a link, of a machine's memory and of its cores. The rest is for the backlog after an outage. Assumed.
LINK_SHARE = 0.7


class Global(NamedTuple):
    """Bytes per element of a global, by purpose."""

    pulled: float
    """Pulled by each learner."""
    rest: float
    """Written by the syncer in addition, so that the values stay exact."""
    momentum: float
    """Written by the syncer for a successor."""


GLOBALS: dict[str, Global] = {"fp32": Global(4.0, 0.0, 4.0), "bf16": Global(2.0, 2.0, 4.0)}
# Codecs that a plan may choose, the paper's main setting first. Paper: 4 bits cost vision quality (34.4 for 36.6).
BY_CHOICE: tuple[Codec, ...] = ("bf16", "int8", "int4")
# In steps. A round trip may exceed its limit by this much, which is rounding error.
ROUNDING = 1e-9
OUTER_SETTINGS = ("outer_lr", "outer_momentum", "outer_warmup")
# Of one node through a Python client, measured with values of 1 MiB.
REDIS_BYTES_PER_S = 1.1 * 2**30
# maxmemory of a Redis node (its machine has `MACHINE_TIMES` as much), and memory of a syncer's machine. Assumed.
REDIS_MEMORY_BYTES, SYNCER_MEMORY_BYTES = 256e9, 512e9
# Network bandwidth of a syncer's machine. Assumed.
SYNCER_BYTES_PER_S = 100e9 / 8
# Core seconds per parameter and round for a learner's exchange. Measured at 100M (docs/results/performance.md).
LEARNER_S = 3.4e-9


def busiest_share(fragments: int, ranks: int) -> float:
    """Return the share of a learner's traffic and cores that falls to the rank that serves the most fragments."""
    return math.ceil(fragments / ranks) / fragments


class Pace(NamedTuple):
    """How often deltas travel, in how many fragments, and in which codec."""

    interval: int
    fragments: int
    codec: Codec
    global_codec: str
    threads: int
    """Threads of a syncer's matrix products."""
    outer_s: float
    """Outer step of one fragment on these threads, in seconds."""
    trip_s: float
    """Round trip of one fragment in seconds: upload, merge, outer step, pull."""
    why: dict[str, str]
    warnings: list[str]
    fits: bool = True
    """False if the link is too slow even at the longest interval."""


def pace_of(
    site: Site,
    learners: int,
    overlap_steps: int,
    codec: Literal["auto", Codec],
    global_codec: str,
    outer: OuterName,
) -> Pace:
    """Choose H, P and codecs for a site.

    Args:
        site: the model, and the machines and links.
        learners: most learners in a merge.
        overlap_steps: tau.
        codec: one of `CODECS`, or auto: bf16, unless a fragment's round trip is hidden only with fewer bytes.
        global_codec: one of `GLOBALS`.
        outer: the outer optimizer.
    """
    warnings: list[str] = []
    pulled, wire = GLOBALS[global_codec].pulled, CODECS[BY_CHOICE[0] if codec == "auto" else codec]
    widest = max(pulled, wire)
    busier = f"the globals ({global_codec})" if pulled >= wire else "the deltas"

    def load(interval: int) -> float:
        return 8 * widest * site.params / (interval * site.step_time) / site.link

    interval = next((h for h in INTERVALS if load(h) <= LINK_SHARE), INTERVALS[-1])
    fits = load(interval) <= LINK_SHARE
    if not fits:
        warnings.append(
            f"even at H = {interval}, {busier} would take {load(interval):.0%} of the link: it needs "
            f"{load(interval) / LINK_SHARE:.1f} times the bandwidth, or a smaller model"
        )
    most = min(interval, int(TENSORS_A_LAYER * shape_of(site)[1]))
    hidden_s, alone_s = overlap_steps * site.step_time, outer_operations(site, outer) / CORE_FLOPS
    step_s = alone_s / site.syncer_cores

    def fragmented(name: Codec) -> tuple[int, Codec, float]:
        """Return (fragments, codec, round trip): the fewest fragments whose round trip is hidden, or else the most."""
        fitting = [p for p in FRAGMENTS if p <= most] or [most]
        trips = {p: round_trip_s(site, learners, p, CODECS[name], pulled, step_s / p) for p in fitting}
        fragments = next((p for p, trip_s in trips.items() if not beyond(trip_s)), fitting[-1])
        return fragments, name, trips[fragments]

    def beyond(trip_s: float) -> int:
        """Return by how many steps a round trip is too long."""
        return max(0, math.ceil((trip_s - hidden_s) / site.step_time - ROUNDING))

    tried = [fragmented(one) for one in (BY_CHOICE if codec == "auto" else [codec])]
    fragments, chosen, trip_s = min(tried, key=lambda one: beyond(one[2]))  # of equal ones the preferred codec
    if beyond(trip_s):
        longer = in_force(interval, overlap_steps, trip_s / site.step_time)
        warnings.append(
            f"a fragment's round trip takes {trip_s:.1f} s, more than the {overlap_steps} steps that can hide it: "
            + (
                f"the run lengthens its rounds from {interval} to {longer} steps, which costs quality"
                if longer > interval
                else "what learners train in the rest of it is overwritten"
            )
        )
    # BLAS threads that wait for each other are lost to other fragments, so this is the smallest number that is enough.
    rest_s = hidden_s - (trip_s - step_s / fragments)
    needed = alone_s / fragments / rest_s if rest_s > 0 else math.inf
    threads = max(1, min(site.syncer_cores, math.ceil(min(needed, site.syncer_cores))))
    outer_s = alone_s / fragments / threads
    trip_s += outer_s - step_s / fragments
    if beyond(trip_s) and outer_s > trip_s / 2:
        warnings.append(
            f"{outer_s:.1f} s of it is the outer step on {threads} cores (--syncer-cores): use more cores, or {CHEAPER}"
        )
    _, first, first_s = tried[0]
    why = {
        "sync_interval": f"the shortest at which {busier}, the busier direction, take at most {LINK_SHARE:.0%} of the "
        f"link: {load(interval):.0%}; the paper uses 24, and longer intervals cost quality",
        "fragments": f"the {'maximum; the' if beyond(trip_s) else 'fewest whose'} round trip ({trip_s:.1f} s) "
        f"{'takes longer than' if beyond(trip_s) else 'is hidden by'} {overlap_steps} steps ({hidden_s:.1f} s); "
        f"at most {most}",
    }
    if codec != "auto":
        why["codec"] = f"as requested: {CODECS[codec]:.3g} bytes per element"
    elif chosen != first:
        why["codec"] = (
            f"{CODECS[chosen]:.3g} bytes per element: with {first} a round trip would take {first_s:.1f} s, and "
            f"rounds would be {in_force(interval, overlap_steps, first_s / site.step_time)} steps"
        )
    elif beyond(first_s):
        why["codec"] = (
            "the paper's main setting; fewer bits would not shorten a round trip by a step, because globals are "
            f"{global_codec}"
        )
    else:
        why["codec"] = (
            "the paper's main setting, and the link is fast enough for it; in the paper, 4 bits cost quality in vision"
        )
    if alone_s:
        why["threads"] = (
            f"OPENBLAS_NUM_THREADS of each syncer: a fragment's outer step takes {alone_s / fragments:.1f} s on one "
            f"core at {CORE_FLOPS / 1e9:g} GFLOP/s, and {outer_s:.1f} s on this many; a round trip may take "
            f"{hidden_s:.1f} s"
        )
    return Pace(interval, fragments, chosen, global_codec, threads, outer_s, trip_s, why, warnings, fits)


def in_force(interval: int, overlap_steps: int, trip_steps: float) -> int:
    """Return the interval that a run stretches to if a round trip takes `trip_steps`; adoption takes one step more."""
    return lengthened(interval, interval, overlap_steps, 1 + trip_steps)


def round_trip_s(site: Site, learners: int, fragments: int, wire: float, pulled: float, outer_s: float) -> float:
    """Return the seconds of a fragment's round trip: upload, merge of all learners, outer step, and pull.

    wire, pulled: bytes per element of a delta and of a global.
    """
    elements = site.params / fragments
    merge_s = learners * elements * wire / site.merge_rate / site.syncer_cores
    transfer_s = 8 * elements * (wire + pulled) / site.link
    return 2 * site.latency + transfer_s + merge_s + outer_s + site.sync_time


class Party(NamedTuple):
    """The needs of each of `machines` machines of one kind."""

    name: str
    machines: int
    cores: float
    memory_bytes: float
    bytes_per_s: float
    """In and out together."""
    training_bytes: float = 0.0
    """For a learner, in addition to `memory_bytes`: parameters, gradients and AdamW's moments, without activations."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a run with this many learners."""

    learners: int
    sync_interval: int
    fragments: int
    codec: Codec
    global_codec: str
    outer: OuterName
    width: float
    """The model's width, as given or the usual one."""
    layers: float
    threads: int
    """Threads of a syncer's matrix products (OPENBLAS_NUM_THREADS)."""
    syncers: int
    redis_nodes: int
    round_s: float
    interval_in_force: int
    """The interval that a run stretches to because of its round trips."""
    merged_share: float
    """Share of the training that is merged. The rest is trained during round trips, and overwritten."""
    up_bytes: float
    """Sent by a learner in a round."""
    down_bytes: float
    link: float
    """A learner's link, bit/s each way."""
    link_load: float
    """Load of the link's busier direction."""
    round_trip_s: float
    outer_s: float
    """The outer step's part of the round trip."""
    syncer_cores: float
    """All syncers together, merging and stepping without a pause."""
    syncer_memory_bytes: float
    """Memory of each syncer after one of the others has died."""
    checkpoint_bytes: float
    redis_memory_bytes: float
    redis_bytes_per_s: float
    parties: tuple[Party, ...]
    settings: dict[str, str | int | float]
    """For a settings file of all parties."""
    why: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> str:
        """Return a human-readable summary."""
        up, down = (as_rate(one / self.round_s) for one in (self.up_bytes, self.down_bytes))
        busy = f"{self.link_load:.0%} busy{'' if self.link_load <= LINK_SHARE else ' (too slow)'}"
        from_h = "" if self.interval_in_force == self.sync_interval else f"{self.sync_interval} to "
        return (
            f"computed for {self.layers:.0f} layers of width {self.width:.0f} (set yours: --layers, --width)\n"
            f"a round: {self.sync_interval} steps, {self.round_s:.3g} s, in which a learner sends "
            f"{as_bytes(self.up_bytes)} and fetches {as_bytes(self.down_bytes)}\n"
            f"a learner's link: {up} up and {down} down of {written(self.link, 'TGMk')}bit/s, {busy}; a "
            f"fragment's round trip: {self.round_trip_s:.1f} s, {self.outer_s:.1f} s of it the outer step\n"
            f"with such round trips the run makes rounds of {from_h}{self.interval_in_force} steps, and merges "
            f"{self.merged_share:.0%} of what is trained; the syncer is assumed next to Redis, or to have a faster "
            "link\n"
            f"all syncers together: {self.syncer_cores:.2f} cores merging, each with at most "
            f"{as_bytes(self.syncer_memory_bytes)}; Redis: {as_bytes(self.redis_memory_bytes)}, "
            f"{as_rate(self.redis_bytes_per_s)}; a checkpoint: {as_bytes(self.checkpoint_bytes)}"
        )


def needs_of(
    site: Site,
    pace: Pace,
    learners: int,
    overlap_steps: int,
    outer: OuterName,
    ranks: int = 1,
    precision: Precision = "fp32",
) -> Needs:
    """Return memory, traffic and cores of a run at this pace. The other arguments must be those given to `pace_of`.

    Args:
        site: the model, and the machines and links.
        pace: returned by `pace_of`.
        learners: most learners in a merge.
        overlap_steps: tau.
        outer: the outer optimizer.
        ranks: ranks of each learner, which share its parameters, gradients and moments (FSDP2).
        precision: of the learners' training.
    """
    wire, shown = CODECS[pace.codec], GLOBALS[pace.global_codec]
    width, layers = shape_of(site)
    round_s = pace.interval * site.step_time
    up_bytes_per_s, down_bytes_per_s = (b * site.params / round_s for b in (wire, shown.pulled))
    # Each global is written once and pulled by every learner; each delta is written once and read once.
    syncer_traffic = learners * up_bytes_per_s + site.params * (shown.pulled + shown.rest + shown.momentum) / round_s
    traffic = learners * (up_bytes_per_s + down_bytes_per_s) + syncer_traffic
    redis_memory = redis_bytes(site.params, learners, pace.codec)
    by_traffic = math.ceil(traffic / REDIS_BYTES_PER_S / LINK_SHARE)
    by_memory = math.ceil(redis_memory / REDIS_MEMORY_BYTES / LINK_SHARE)
    whole = syncer_bytes(site.params, learners, pace.codec, outer)
    outer_cores = outer_operations(site, outer) / round_s / CORE_FLOPS
    cores = learners * up_bytes_per_s / site.merge_rate + outer_cores
    most, room = pace.fragments + 1, SYNCER_MEMORY_BYTES * LINK_SHARE  # with more, more than one would be a standby

    def memory_of(count: int) -> float:
        return syncer_bytes(site.params, learners, pace.codec, outer, syncer_share(pace.fragments, count))

    syncers = {
        "memory": next((count for count in range(2, most) if memory_of(count) <= room), most),  # one of them may die
        "network": math.ceil(syncer_traffic / SYNCER_BYTES_PER_S / LINK_SHARE),
        "cores": math.ceil(cores / site.syncer_cores / LINK_SHARE),
    }
    warnings = list(pace.warnings)
    if syncers["cores"] > max(2, syncers["memory"], syncers["network"]) and outer_cores > cores / 2:
        said = any(CHEAPER in warning for warning in warnings)
        cheaper = "" if said else f"; fewer are enough with {CHEAPER}"
        warnings.append(f"the outer step keeps {outer_cores:.0f} cores busy all the time{cheaper}")
    count, nodes = min(most, max(2, *syncers.values())), max(1, by_traffic, by_memory)
    memory = memory_of(count)
    if max(syncers.values()) > most or memory > room:
        warnings.append(
            f"{pace.fragments} fragments allow at most {most} syncers, which are too few: each needs "
            f"{as_bytes(memory)} of {as_bytes(room)}; use more fragments or larger machines"
        )
    if ranks > pace.fragments:
        warnings.append(
            f"{ranks - pace.fragments} of {ranks} ranks do not serve a fragment, since there are only "
            f"{pace.fragments}: use more fragments to spread the bytes"
        )
    holds = redis_holds(learners)
    why = {
        "redis_nodes": f"{as_bytes(traffic)}/s need {by_traffic}, at {as_bytes(REDIS_BYTES_PER_S)}/s and "
        f"{LINK_SHARE:.0%} each; {as_bytes(redis_memory)} ({holds}) need {by_memory}",
        "syncers": "at least two, so that one can die; "
        + ", ".join(f"{name} needs {count}" for name, count in syncers.items())
        + f" ({as_bytes(whole)} for values, momenta and all windows at once, {as_bytes(syncer_traffic)}/s, "
        f"{cores:.2f} cores)",
    }
    served = busiest_share(pace.fragments, ranks)
    trip_steps = pace.trip_s / site.step_time
    longer = in_force(pace.interval, overlap_steps, trip_steps)
    return Needs(
        learners=learners,
        sync_interval=pace.interval,
        fragments=pace.fragments,
        codec=pace.codec,
        global_codec=pace.global_codec,
        outer=outer,
        width=width,
        layers=layers,
        threads=pace.threads,
        syncers=count,
        redis_nodes=nodes,
        round_s=round_s,
        interval_in_force=longer,
        merged_share=longer / (longer + 1 + trip_steps),
        up_bytes=wire * site.params,
        down_bytes=shown.pulled * site.params,
        link=site.link,
        link_load=max(up_bytes_per_s, down_bytes_per_s) * 8 / site.link,
        round_trip_s=pace.trip_s,
        outer_s=pace.outer_s,
        syncer_cores=cores,
        syncer_memory_bytes=memory,
        checkpoint_bytes=CHECKPOINT_BYTES * site.params,
        redis_memory_bytes=redis_memory,
        redis_bytes_per_s=traffic,
        parties=(
            Party(
                "learner" if ranks == 1 else "rank",
                learners * ranks,
                served * LEARNER_S * site.params / round_s,
                learner_bytes(site.params, pace.fragments, pace.codec, ranks),
                served * (up_bytes_per_s + down_bytes_per_s),
                TRAINING_BYTES[precision] * site.params / ranks,
            ),
            Party("syncer", count, max(cores / count, pace.threads), memory, syncer_traffic / count),
            Party("Redis node", nodes, 1, redis_memory / nodes, traffic / nodes),
        ),
        settings={
            **{"fragments": pace.fragments, "sync_interval": pace.interval, "overlap_steps": overlap_steps},
            **{"codec": pace.codec, "global_codec": pace.global_codec, "grace_gamma": USUAL["grace_gamma"]},
            **{"outer": outer, **{name: USUAL[name] for name in OUTER_SETTINGS}},
            **(NESTEROV if outer == "nesterov" else {}),
        },
        why=pace.why | why,
        warnings=warnings,
    )


# Fields of a plan that are choices, each explained in `why`, with their display names.
CHOSEN = {
    **{"learners": "M", "sync_interval": "H", "fragments": "P", "codec": "codec"},
    "global_codec": "globals",
    **{"threads": "threads", "syncers": "syncers", "redis_nodes": "Redis nodes"},
}
