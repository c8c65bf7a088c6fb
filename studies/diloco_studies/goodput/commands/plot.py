"""Pictures of the failure simulator's tables."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.pipeline.units import YEAR_S
from diloco_studies.pictures import save

matplotlib.use("Agg")  # no display needed, and none opened


COLOURS = {"data-parallel": "#c0392b", "elastic": "#e08e0b", "diloco": "#7f8c8d", "decoupled": "#1f5f99"}
MARKERS = "osD^vP*"


def _chips(count: float) -> str:
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}k"


def _years(span_s: float) -> str:
    return f"{span_s / YEAR_S:.3g}"


ACROSS: dict[str, tuple[str, Callable[[float], str]]] = {
    "chips": ("chips", _chips),
    "mtbi_s": ("mean time between interruptions of a chip (years)", _years),
}
"""Column of the rows -> the horizontal axis' name, and how its values are written."""


def _tidy(axes: Axes, ylabel: str, across: str, values: Sequence[float]) -> None:
    name, written = ACROSS[across]
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [written(value) for value in values])
    axes.set_xlabel(name)
    axes.set_ylabel(ylabel)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str, across: str) -> None:
    """Goodput, uptime and longest stall against a column of `ACROSS`; a line a method and M, the paper's as rings."""
    figure = Figure(figsize=(12.0, 5.6), dpi=130, layout="constrained")
    panels = figure.subplot_mosaic([["goodput", "uptime"], ["goodput", "stall"]], width_ratios=[1.5, 1])
    axes = panels["goodput"]
    counts = sorted({row["learners"] for row in rows if row["method"] == "decoupled"})
    names = list(dict.fromkeys((row["method"], row["learners"]) for row in rows if row["method"] != "diloco"))
    if ("elastic", 1) in names and ("decoupled", 1) in names:
        names.remove(("decoupled", 1))  # the same line
    for method, learners in names:
        mine = sorted((r for r in rows if (r["method"], r["learners"]) == (method, learners)), key=lambda r: r[across])
        decoupled = method == "decoupled"
        style: dict[str, Any] = {
            "color": COLOURS[method],
            "alpha": 0.35 + 0.65 * (counts.index(learners) + 1) / len(counts) if decoupled else 1.0,
            "marker": MARKERS[counts.index(learners) % len(MARKERS)] if decoupled else "s",
            "markersize": 4,
            "linewidth": 1.4,
        }
        label = f"decoupled, M={learners}" if decoupled else f"data-parallel{', elastic' * (method == 'elastic')}"
        x = [r[across] for r in mine]
        errors = [100 * r["goodput_stderr"] for r in mine]
        axes.errorbar(x, [100 * r["goodput"] for r in mine], errors, label=label, **style)
        errors = [100 * r["uptime_stderr"] for r in mine]
        panels["uptime"].errorbar(x, [100 * r["uptime"] for r in mine], errors, **style)
        panels["stall"].plot(x, [r["longest_stall_s"] for r in mine], **style)
        known = [(r[across], 100 * r["paper"]) for r in mine if r.get("paper") is not None]
        ring: dict[str, Any] = {
            "markerfacecolor": "none",
            "markeredgecolor": COLOURS[method],
            "markersize": 11,
            "alpha": 0.8,
        }
        axes.plot([at for at, _ in known], [value for _, value in known], "o", linestyle="none", **ring)
    if any(r.get("paper") is not None for r in rows):
        axes.plot([], [], "o", markersize=11, markerfacecolor="none", markeredgecolor="#444444", label="the paper's")
    values = sorted({row[across] for row in rows})
    _tidy(axes, "goodput (% of the chips' time)", across, values)
    _tidy(panels["uptime"], "uptime (%)", across, values)
    _tidy(panels["stall"], "longest stall of all (s)", across, values)
    panels["stall"].set_yscale("symlog", linthresh=1)
    panels["stall"].set_ylim(bottom=0)
    axes.set_ylim(0, 101)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    save(figure, path)
