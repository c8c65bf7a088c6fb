"""Interruptions of a job's chips: when, how many slices, for how long. Pure: numpy and a given generator.

Poisson processes in wall time: one chip takes its slice with it, a rack its slices, a region all it has.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco_studies.goodput.constants import DAY_S, Constants
from diloco_studies.goodput.traces import Floats, read_trace

_CHECKED_POINTS = 20_000
MAX_TIMES = 3_000_000
"""Of one job and seed: they take a gigabyte."""


@dataclass(frozen=True, slots=True)
class Strikes:
    """In order of time. All arrays (strikes,)."""

    at_s: Floats
    away_s: Floats
    """How long the struck slices stay away."""
    slices: Floats
    """How many are struck."""

    @classmethod
    def merged(cls, parts: "list[Strikes]") -> "Strikes":
        """All of them, in order."""
        parts = [part for part in parts if part.at_s.size] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        at_s = np.concatenate([part.at_s for part in parts])
        order = np.argsort(at_s, kind="stable")
        away_s = np.concatenate([part.away_s for part in parts])
        slices = np.concatenate([part.slices for part in parts])
        return cls(at_s[order], away_s[order], slices[order])


def times_of(rate_per_s: float, duration_s: float, rng: np.random.Generator) -> Floats:
    """Sorted times of a Poisson process.

    Raises:
        UsageError: there would be too many.
    """
    if rate_per_s * duration_s > MAX_TIMES:
        raise UsageError(
            f"{rate_per_s * duration_s:.2g} interruptions in {duration_s / DAY_S:g} days are more than a seed can "
            f"have ({MAX_TIMES:,}): use fewer days or chips, or a longer mean time between interruptions"
        )
    times: Floats = rng.uniform(0.0, duration_s, rng.poisson(rate_per_s * duration_s))
    times.sort()
    return times


def repairs(constants: Constants, count: int, rng: np.random.Generator) -> Floats:
    """Times until struck slices are back, s, (count,)."""
    if constants.repair == "constant":
        return np.full(count, constants.repair_mean)
    if constants.repair == "trace":
        return rng.choice(_trace(constants.repair_trace), count)
    return quantiles(constants, rng.random(count))


def quantiles(constants: Constants, shares: Floats) -> Floats:
    """Exponentiated Weibull: F(t) = (1 - exp(-(t/scale)^shape))^power, scaled to its mean."""
    k, power = constants.repair_shape, constants.repair_power
    scale = constants.repair_mean / _unit_mean(k, power)
    return np.asarray(scale * _unit_quantile(shares, k, power))


def repair_cdf(constants: Constants, t_s: Floats) -> Floats:
    """Probability that a slice is back after `t_s`."""
    if constants.repair == "constant":
        return (t_s >= constants.repair_mean).astype(np.float64)
    if constants.repair == "trace":
        seen = np.sort(_trace(constants.repair_trace))
        return np.searchsorted(seen, t_s, "right") / seen.size
    k, power = constants.repair_shape, constants.repair_power
    scale = constants.repair_mean / _unit_mean(k, power)
    return np.asarray((-np.expm1(-((t_s / scale) ** k))) ** power)


def _unit_quantile(shares: Floats, shape: float, power: float) -> Floats:
    return np.asarray((-np.log1p(-(shares ** (1.0 / power)))) ** (1.0 / shape))


@lru_cache
def _unit_mean(shape: float, power: float) -> float:
    """Mean at scale 1: the integral of 1 - F, over points that are dense near 0."""
    far = float(_unit_quantile(np.array([1.0 - 1e-12]), shape, power)[0])
    t = far * np.linspace(0.0, 1.0, _CHECKED_POINTS) ** 4
    return float(np.trapezoid(1.0 - (-np.expm1(-(t**shape))) ** power, t))


def _trace(path: Path | None) -> Floats:
    if path is None:
        raise UsageError("--repair trace needs --repair-trace FILE, with one repair time in seconds per line")
    return read_trace(path, 1)[:, 0]


def draw(constants: Constants, chips: int, duration_s: float, rng: np.random.Generator) -> Strikes:
    """Interruptions of a job of `chips`, but for its region's."""
    at_s = times_of(chips / constants.mtbi, duration_s, rng)
    parts = [Strikes(at_s, repairs(constants, at_s.size, rng), np.ones(at_s.size))]
    if constants.rack_mtbi:
        at_s = times_of(chips / constants.rack_chips / constants.rack_mtbi, duration_s, rng)
        slices = math.ceil(constants.rack_chips / constants.slice_chips)
        parts.append(Strikes(at_s, repairs(constants, at_s.size, rng), np.full(at_s.size, float(slices))))
    return Strikes.merged(parts)


def draw_regions(constants: Constants, duration_s: float, rng: np.random.Generator) -> list[Floats]:
    """Times at which each region goes down."""
    if not constants.region_mtbi:
        return [np.empty(0)] * constants.regions
    return [times_of(1.0 / constants.region_mtbi, duration_s, rng) for _ in range(constants.regions)]


def of_region(constants: Constants, at_s: Floats, slices: float) -> Strikes:
    """Its outages as strikes on a job that has `slices` there."""
    return Strikes(at_s, np.full(at_s.size, constants.region_repair), np.full(at_s.size, slices))
