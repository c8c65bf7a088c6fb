"""Cells of `diloco bench lines`: what a line carries, what the run asks of it, and what the planner says comes. Pure.

A run's own planner (`pipeline.needs`) says how many bytes a round asks of each party. A line carries a share of that,
the same in each direction: of the busier one, as the planner's `--link`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.pipeline.needs import GLOBALS, Pace, needs_of, round_trip_s
from diloco.pipeline.outer_cost import CORE_FLOPS
from diloco.pipeline.redis_memory import CODECS
from diloco.pipeline.settings import SyncSettings, defaults
from diloco.pipeline.site import Site, outer_operations

USUAL = defaults(SyncSettings)
LEARNERS = 2
FRAGMENTS: int = USUAL["fragments"]
INTERVAL: int = USUAL["sync_interval"]
OVERLAP_STEPS: int = USUAL["overlap_steps"]
MEASURE = ("bf16", "fp32")
"""Codecs of deltas and globals of which a line of rate 1 carries a round in a round."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A run on lines."""

    rate: float
    """Of a line, in what a round with bf16 deltas and fp32 globals asks of its party's busier direction."""
    codec: str = USUAL["codec"]
    global_codec: str = USUAL["global_codec"]
    latency_ms: float = 50.0
    """There and back."""
    jitter_ms: float = 0.0
    loss: float = 0.0
    """Share of the packets, in each direction."""
    congestion: str = "cubic"
    """Which way of TCP's to meet losses."""

    @property
    def name(self) -> str:
        """Which tells it from all others."""
        return ",".join(f"{value:g}" if isinstance(value, float) else value for value in asdict(self).values())


USUAL_CELL = Cell(1.0)


def cells() -> Iterator[Cell]:
    """The most telling first."""
    for rate in (1.0, 0.5, 0.25, 2.0):
        yield replace(USUAL_CELL, rate=rate)
    half = replace(USUAL_CELL, rate=0.5)
    for codec in ("fp32", "int8", "int4"):
        yield replace(half, codec=codec)
    for global_codec in ("fp32", "int8"):
        yield replace(half, global_codec=global_codec)
    for codec in ("int8", "int4"):
        yield replace(half, codec=codec, global_codec="int8")
    yield replace(USUAL_CELL, latency_ms=0.0)
    yield replace(USUAL_CELL, latency_ms=200.0)
    yield replace(USUAL_CELL, loss=0.01)
    yield replace(USUAL_CELL, loss=0.01, congestion="bbr")
    yield replace(USUAL_CELL, jitter_ms=20.0)
    yield replace(USUAL_CELL, rate=0.05)
    for rate in (0.25, 1.0, 2.0):
        yield replace(USUAL_CELL, rate=rate, codec="int8", global_codec="int8")


def asked(params: float, codec: str, global_codec: str, round_s: float) -> dict[str, tuple[float, float]]:
    """Party -> bytes a second up to Redis and down from it, as the planner counts them.

    An evaluator looks once a round, at what the syncer has written: a bf16 global with its rest.
    """
    wire, shown = CODECS[codec], GLOBALS[global_codec]
    up, down = wire * params / round_s, shown.pulled * params / round_s
    rest = shown.rest if global_codec == "bf16" else 0.0
    parties = {f"learner-{number}": (up, down) for number in range(LEARNERS)}
    written = (shown.pulled + shown.rest + shown.momentum) * params / round_s
    return parties | {"syncer": (written, LEARNERS * up), "evaluator": (0.0, down + rest * params / round_s)}


def line_rates(cell: Cell, params: float, round_s: float) -> dict[str, float]:
    """Party -> bytes a second that its line carries, each way."""
    parties = asked(params, *MEASURE, round_s)
    return {party: cell.rate * max(both) for party, both in parties.items()}


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the planner says of a cell."""

    load: float
    """Of the learners' busier direction."""
    trip_s: float
    """A fragment's round trip."""
    interval: float
    """In force."""
    merged_share: float
    bytes_a_token: float


def forecast(cell: Cell, params: float, step_s: float, step_tokens: int, width: int, layers: int) -> Forecast:
    """As `diloco plan` reckons, with a syncer of one core; its line adds what it takes to write a fragment's version.

    width, layers: of the model.
    """
    rates = line_rates(cell, params, INTERVAL * step_s)
    shown = GLOBALS[cell.global_codec]
    written_s = (shown.pulled + shown.rest + shown.momentum) * params / FRAGMENTS / rates["syncer"]
    site = Site(
        params=params,
        width=width,
        layers=layers,
        step_time=step_s,
        link=8 * rates["learner-0"],
        latency=cell.latency_ms / 2000,
        syncer_cores=1,
        sync_time=written_s,
    )
    outer_s = outer_operations(site, USUAL["outer"]) / CORE_FLOPS / FRAGMENTS
    trip_s = round_trip_s(site, LEARNERS, FRAGMENTS, CODECS[cell.codec], shown.pulled, outer_s)
    pace = Pace(INTERVAL, FRAGMENTS, cell.codec, cell.global_codec, 1, outer_s, trip_s, {}, [])
    needs = needs_of(site, pace, LEARNERS, OVERLAP_STEPS, USUAL["outer"])
    between = needs.interval_in_force + 1 + trip_s / step_s
    load = needs.link_load * INTERVAL / between
    return Forecast(
        load,
        trip_s,
        needs.interval_in_force,
        needs.merged_share,
        (needs.up_bytes + needs.down_bytes) / between / step_tokens,
    )


def row(cell: Cell, predicted: Forecast, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Of the table of results."""
    return {**asdict(cell), **{f"planned_{name}": one for name, one in asdict(predicted).items()}, **measured}
