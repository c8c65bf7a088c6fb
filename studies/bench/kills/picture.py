"""The picture of `diloco bench kills`: held-out loss by wall time, a line a method, and below it who was killed when."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.studies.bench.kills.curves import Result
from diloco.studies.bench.kills.plan import Plan
from diloco.studies.pictures import save

LOOKS = {
    "decoupled": ("#0072b2", "-", "decoupled (this)"),
    "elastic": ("#e69f00", "-", "data-parallel, elastic"),
    "data-parallel": ("#cc79a7", "-", "data-parallel, fixed size"),
    "undisturbed": ("#777777", "--", "data-parallel, nobody killed"),
}
"""Colours that the colour-blind tell apart (Okabe and Ito)."""
AWAY = "#444444"
HIGHEST = 3.2
"""Losses above it are of the first seconds, where all methods are alike."""


def draw(results: Mapping[str, Result], plan: Plan, path: Path) -> None:
    """Write a PNG, 1600 pixels wide."""
    figure = Figure(figsize=(10, 5.4), dpi=160, layout="constrained")
    loss, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 1))
    _draw_loss(loss, results)
    _draw_lanes(lanes, results, plan)
    loss.set_xlim(0, 1.02 * max(one["curve"][-1][0] for one in results.values()))
    for axes in (loss, lanes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"The same kills for {plan.machines} machines: a SIGKILL every {plan.every_s:g} s", fontsize=15)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def _draw_loss(axes: Axes, results: Mapping[str, Result]) -> None:
    lowest = min(loss for one in results.values() for _, _, loss in one["curve"])
    for name, one in results.items():
        colour, style, label = LOOKS[name]
        curve = [(at, loss) for at, _, loss in one["curve"] if at >= 0]
        axes.plot(*zip(*curve, strict=True), color=colour, linestyle=style, linewidth=2.2, label=label)
        if one["finished"]:
            at, last = curve[-1]
            axes.plot([at], [last], color=colour, marker="o", markersize=9, markeredgecolor="white", clip_on=False)
    axes.plot([], [], color=AWAY, marker="o", markersize=8, linestyle="", label="all tokens of the budget trained")
    axes.set_ylim(lowest - 0.06, HIGHEST)
    axes.set_ylabel("held-out loss (nats per byte)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=12, loc="upper right", frameon=False)


def _draw_lanes(axes: Axes, results: Mapping[str, Result], plan: Plan) -> None:
    """Who was away, and below that when nobody trained."""
    longest = max(results.values(), key=lambda one: (len(one["kills"]), one["ended_s"]))
    for kill in longest["kills"]:
        row = int(kill["machine"].rpartition("-")[2])
        axes.broken_barh([(kill["at_s"], plan.away_s)], (row - 0.32, 0.64), facecolors=AWAY)
    names = [f"machine {number} away" for number in range(plan.machines)]
    for name, one in results.items():
        if name == "undisturbed":
            continue
        bars = [(gap["at_s"], gap["length_s"]) for gap in one["interruptions"]]
        axes.broken_barh(bars, (len(names) - 0.32, 0.64), facecolors=LOOKS[name][0])
        names.append(f"{name}: nobody trains")
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(labelsize=10)
    axes.grid(True, axis="x", alpha=0.25)
    axes.set_xlabel("wall time since all machines trained (s)", fontsize=12)
