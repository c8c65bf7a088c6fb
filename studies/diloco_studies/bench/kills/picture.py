"""The picture of `diloco bench kills`: held-out loss by wall time; below it who was away, when nobody trained."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco_studies.bench.kills.curves import Result
from diloco_studies.bench.kills.plan import Plan
from diloco_studies.pictures import save

LOOKS = {
    "decoupled": ("#0072b2", "-", "decoupled (this)"),
    "elastic": ("#e69f00", "-", "data-parallel, elastic"),
    "data-parallel": ("#cc79a7", "-", "data-parallel, fixed size"),
    "undisturbed": ("#777777", "--", "data-parallel, nobody killed"),
}
"""Colours that the colour-blind tell apart (Okabe and Ito)."""
AWAY = "#444444"
HIGHEST = 2.7
"""Losses above it are of the first seconds."""


def draw(results: Mapping[str, Result], plan: Plan, path: Path) -> None:
    """Write a PNG, 1600 pixels wide."""
    figure = Figure(figsize=(10, 5.8), dpi=160, layout="constrained")
    loss, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
    most = max(results.values(), key=lambda one: (len(one["kills"]), one["ended_s"]))
    _draw_loss(loss, results, plan)
    _draw_lanes(lanes, results, most["kills"], plan)
    for axes in (loss, lanes):
        axes.set_xlim(0, 1.02 * max(one["curve"][-1][0] for one in results.values()))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="x", alpha=0.25)
        for kill in most["kills"]:
            axes.axvline(kill["at_s"], color=AWAY, linewidth=0.8, linestyle=":", zorder=0)
    killed = f"One of {plan.machines} machines is killed every {plan.every_s:g} s, and is away for {plan.away_s:g} s"
    figure.suptitle(killed, fontsize=15)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def _draw_loss(axes: Axes, results: Mapping[str, Result], plan: Plan) -> None:
    losses = (loss for one in results.values() for _, _, loss in one["curve"])
    lowest = min(filter(isfinite, losses), default=0.0)
    for name, one in results.items():
        colour, style, label = LOOKS[name]
        curve = [(at, loss) for at, _, loss in one["curve"] if at >= 0]
        axes.plot(*zip(*curve, strict=True), color=colour, linestyle=style, linewidth=2.2, label=label)
        if one["finished"]:
            at, last = curve[-1]
            axes.plot([at], [last], color=colour, marker="o", markersize=10, markeredgecolor="white", clip_on=False)
    ended = f"its {plan.tokens / 1e6:g}M tokens are trained"
    axes.plot([], [], color=AWAY, marker="o", markersize=8, linestyle="", label=ended)
    axes.set_ylim(lowest - 0.08, HIGHEST)
    axes.set_ylabel("held-out loss (nats per byte)", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.grid(True, axis="y", alpha=0.25)
    axes.legend(fontsize=13, loc="upper right", framealpha=1.0, edgecolor="white")


def _draw_lanes(axes: Axes, results: Mapping[str, Result], kills: Sequence[Mapping[str, Any]], plan: Plan) -> None:
    """Who was away, and below that when nobody trained."""
    lanes = ["machine away"]
    for kill in kills:
        axes.broken_barh([(kill["at_s"], plan.away_s)], (-0.4, 0.8), facecolors=AWAY)
        number, middle = kill["machine"].rpartition("-")[2], kill["at_s"] + plan.away_s / 2
        axes.text(middle, 0.02, number, color="white", fontsize=10, ha="center", va="center", clip_on=True)
    for name, one in results.items():
        if name == "undisturbed":
            continue
        bars = [(gap["at_s"], gap["length_s"]) for gap in one["interruptions"]]
        axes.broken_barh(bars, (len(lanes) - 0.4, 0.8), facecolors=LOOKS[name][0])
        if not bars:
            axes.text(plan.every_s, len(lanes), " never", color=LOOKS[name][0], fontsize=11, va="center", clip_on=True)
        axes.axhline(len(lanes) - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
        lanes.append(f"nobody trains: {'fixed' if name == 'data-parallel' else name}")
    axes.set_yticks(range(len(lanes)), lanes, fontsize=11)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.tick_params(labelsize=11)
    axes.set_xlabel("wall time since all machines trained (s)", fontsize=13)
