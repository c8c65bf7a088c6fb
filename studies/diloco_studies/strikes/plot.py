"""The timeline of a struck run: learners, syncers and Redis as lanes, strikes marked, merges as ticks."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from diloco_studies.strikes.rates import StepTimes, Struck
from diloco_studies.strikes.schedule import Manner

STRIKES = {
    Manner.KILL: "#c0392b",
    Manner.PAUSE: "#e08e0b",
    Manner.CUT: "#7d3c98",
    Manner.HANG: "#2471a3",
    Manner.PARTITION: "#145a32",
}
TRAINING, MERGE = "#9cc5a1", "#1f3b4d"
LANE_IN = 0.42
BAR = 0.56
SILENT_S = 1.5
"""Steps further apart than this are not drawn as one stretch of training."""


def stretches(steps_s: Sequence[float]) -> list[tuple[float, float]]:
    """Times of training, as (begin, length), from the ends of its steps."""
    found: list[tuple[float, float]] = []
    for at in steps_s:
        if found and at - (found[-1][0] + found[-1][1]) <= SILENT_S:
            found[-1] = (found[-1][0], at - found[-1][0])
        else:
            found.append((at, 0.0))
    return found


def draw(
    steps: StepTimes,
    strikes: Sequence[Struck],
    merges: Sequence[tuple[float, int]],
    lanes: Sequence[str],
    span: tuple[float, float],
    title: str,
    footer: str,
    path: Path,
) -> None:
    """Write a PNG.

    Args:
        steps: of the learners, Unix times.
        strikes: as they took place.
        merges: (Unix time, fragment) of each commit that holds.
        lanes: names from top to bottom; a learner's has its training. Below them the merges, if any.
        span: Unix times of the first and last moment to show.
        title: above.
        footer: below, in small.
        path: file to write.
    """
    began_s, ended_s = span
    fragments = max((fragment for _, fragment in merges), default=0) + 1
    figure = Figure(figsize=(12, 1.5 + LANE_IN * (len(lanes) + 1.6)), dpi=130, layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        for _, times_s in steps.get(lane, ()):
            bars = [(at - began_s, length) for at, length in stretches(times_s)]
            axes.broken_barh(bars, (row - BAR / 2, BAR), facecolors=TRAINING)
        for strike in (one for one in strikes if one.name == lane):
            colour = STRIKES[strike.manner]
            length = max(strike.ended_s - strike.began_s, (ended_s - began_s) / 1000)
            axes.broken_barh([(strike.began_s - began_s, length)], (row - BAR / 2, BAR), facecolors=colour, alpha=0.85)
            axes.plot([strike.began_s - began_s], [row - BAR / 2], marker="v", markersize=4, color=colour)
    low = len(lanes) - 0.4
    for fragment in range(fragments if merges else 0):
        at = [when - began_s for when, which in merges if which == fragment]
        height = low + 0.15 + 1.1 * (fragment + 0.5) / fragments
        axes.plot(at, [height] * len(at), linestyle="", marker="|", markersize=5, markeredgewidth=0.9, color=MERGE)
    ticks = list(zip([*range(len(lanes)), low + 0.7], [*lanes, f"merges ({fragments} fragments)"], strict=True))
    shown_ticks = ticks if merges else ticks[:-1]
    axes.set_yticks([at for at, _ in shown_ticks], [name for _, name in shown_ticks], fontsize=8)
    axes.set_ylim(low + (1.4 if merges else 0.1), -0.7)
    axes.set_xlim(0, ended_s - began_s)
    axes.set_xlabel("time since all learners trained (s)")
    axes.grid(True, axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    shown = {strike.manner for strike in strikes}
    marks: list[Patch | Line2D] = [
        Patch(color=TRAINING, label="training"),
        *(Patch(color=STRIKES[m], label=m) for m in Manner if m in shown),
    ]
    if merges:
        marks.append(Line2D([], [], linestyle="", marker="|", color=MERGE, label="merge"))
    axes.legend(
        handles=marks, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(marks), fontsize=8, frameon=False
    )
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(footer, fontsize=8, color="#444444")
    figure.savefig(path)
