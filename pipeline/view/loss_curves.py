"""The training losses of learners over time, from their reports (`LearnerReport.curve`). Pure.

A report carries its incarnation's whole curve, so nobody has to have read the earlier ones. Those of dead incarnations
stay on the bus with their last reports. A peer may claim anything: what is not a plausible loss, or lies in the future
or before the run, is left out.
"""

from base64 import b64decode
from collections.abc import Collection, Sequence
from itertools import islice
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.run import SeenReport
from diloco.pipeline.messages.wire import MAX_LOSS
from diloco.pipeline.units import counted

# The most incarnations whose curves are kept: the ones heard from last.
MAX_CURVES = 512
# Clocks of different machines may differ by this.
CLOCKS_S = 5.0
BARS = "▁▂▃▄▅▆▇█"


class LossCurve(TypedDict):
    """The losses of one incarnation of a learner."""

    learner: str
    begin_s: float
    """Unix time of the first bucket; in a report, seconds since the run began."""
    every_s: float
    losses: list[float | None]
    """Mean of each bucket; None where no step ended, the loss is not plausible, or the run had not begun."""


def loss_curves(reports: Sequence[SeenReport], now_s: float, began_s: float) -> dict[str, LossCurve]:
    """Return the curves by 'learner/incarnation'; `began_s`: Unix time when the run began."""
    first_s = began_s - CLOCKS_S
    found: dict[str, LossCurve] = {}
    kept: list[npt.NDArray[np.float32]] = []
    for seen in sorted(reports, key=lambda one: one.age_s)[:MAX_CURVES]:
        report, begin_s = seen.report, now_s - seen.age_s - seen.report.wall_s
        try:
            losses = np.frombuffer(b64decode(report.curve), "<f4")
        except ValueError:
            continue
        if len(losses) and 0 < report.curve_s <= now_s - first_s:
            losses = losses[: int(min(len(losses), report.wall_s / report.curve_s + 1))]
            early = begin_s + np.arange(len(losses)) * report.curve_s < first_s
            kept.append(np.where(early, np.float32(np.nan), losses))
            found[f"{report.learner}/{report.incarnation}"] = LossCurve(
                learner=report.learner, begin_s=round(begin_s, 2), every_s=report.curve_s, losses=[]
            )
    shown = iter(_shown(np.concatenate([np.zeros(0), *kept])))
    for curve, losses in zip(found.values(), kept, strict=True):
        curve["losses"] = list(islice(shown, len(losses)))
    return found


def _shown(losses: npt.NDArray[np.float64]) -> list[float | None]:
    """Round losses to five digits, in one go: there are thousands at each poll."""
    sizes = np.abs(losses)
    plausible = sizes <= MAX_LOSS  # False for NaN
    digits = 5 - np.ceil(np.log10(np.where(plausible & (sizes > 0), sizes, 1.0)))
    scale = 10.0 ** np.minimum(digits, 300)
    rounded = np.round(np.where(plausible, losses, 0.0) * scale) / scale
    return [loss if there else None for loss, there in zip(rounded.tolist(), plausible.tolist(), strict=True)]


def smoothed(losses: Sequence[float | None]) -> list[float | None]:
    """Return each loss's mean with its neighbours, fewer at the beginning, where it falls fast; as in `loss.js`."""
    most = min(8, len(losses) // 16)
    found: list[float | None] = []
    for n, loss in enumerate(losses):
        reach = min(most, n)
        near = [one for one in losses[n - reach : n + reach + 1] if one is not None]
        found.append(None if loss is None else sum(near) / len(near))
    return found


def mean_over_time(curves: Collection[LossCurve], points: int) -> list[float | None]:
    """Return the mean loss of all curves in each of so many equal parts of their time; a bucket counts at its begin."""
    there = [
        (one["begin_s"] + one["every_s"] * n, loss)
        for one in curves
        for n, loss in enumerate(one["losses"])
        if loss is not None
    ]
    begin_s, end_s = (pick((at_s for at_s, _ in there), default=0.0) for pick in (min, max))
    parts: list[list[float]] = [[] for _ in range(points)]
    for at_s, loss in there:
        parts[min(points - 1, int((at_s - begin_s) / max(end_s - begin_s, 1e-9) * points))].append(loss)
    return [sum(part) / len(part) if part else None for part in parts]


def curve_line(curves: Collection[LossCurve], points: int = 32) -> str:
    """Return the learners' mean loss over time in one line of text; "" if no learner has told a loss."""
    means = mean_over_time(curves, points)
    there = [one for one in means if one is not None]
    if not there:
        return ""
    low, high = min(there), max(there)
    step = (high - low) / (len(BARS) - 1) or 1.0
    bars = "".join(" " if one is None else BARS[round((one - low) / step)] for one in means)
    learners = len({one["learner"] for one in curves})
    whose = "its" if learners == 1 else "their"
    return f"training loss of {counted(learners, 'learner')} {there[0]:.4g} {bars} {there[-1]:.4g}, on {whose} own data"
