"""Pictures of an experiment: its curves with seeds as bands, and the final measure of each row."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.studies.pictures import save
from diloco.studies.quality.report import Line, Table

MOST_CURVES = 12
"""Rows drawn as curves at most, best ones first; all are in the bars."""


def draw(tables: Sequence[Table], path: Path) -> None:
    """Write a picture: for each experiment its curves by tokens and by virtual time, and a bar a row."""
    shown = [table for table in tables if any(line.done for line in table.lines)]
    figure = Figure(figsize=(15, 4.6 * max(1, len(shown))), dpi=120, layout="constrained")
    grid = figure.subplots(max(1, len(shown)), 3, squeeze=False)
    for row, table in zip(grid, shown, strict=False):
        done = [line for line in table.best() if line.done]
        sign = -1 if table.higher_is_better else 1
        done.sort(key=lambda line: sign * line.mid if math.isfinite(line.mid) else math.inf)
        _curves(row[0], table, done[:MOST_CURVES], "tokens", "trained tokens (millions)", 1e6)
        _curves(row[1], table, done[:MOST_CURVES], "virtual_s", "virtual time (h)", 3600.0)
        _bars(row[2], done)
        row[0].set_ylabel(table.measure)
        row[0].legend(fontsize=7)
        row[0].set_title(table.experiment.name, fontsize=10, loc="left")
    save(figure, path)


def _curves(axes: Axes, table: Table, lines: Sequence[Line], x: str, label: str, unit: float) -> None:
    ends = []
    for i, line in enumerate(lines):
        colour = f"C{i % 10}"
        curves = [one.curve for one in line.summaries.values()]
        length = min(map(len, curves))  # the same marks for all seeds, but perhaps the last
        at = np.mean([[getattr(mark, x) for mark in curve[:length]] for curve in curves], axis=0) / unit
        values = np.array([[mark.value for mark in curve[:length]] for curve in curves])
        axes.plot(at, values.mean(axis=0), color=colour, linewidth=1.3, label=line.label)
        if len(curves) > 1:
            axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        late = values[:, length // 3 :]
        ends += late[np.isfinite(late)].tolist()
    if ends:  # what came first would make the rest a line
        margin = 0.08 * (max(ends) - min(ends)) + 1e-9
        axes.set_ylim(min(ends) - margin, max(ends) + margin)
    axes.set_xlabel(label)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, lines: Sequence[Line]) -> None:
    at = list(range(len(lines)))[::-1]
    axes.errorbar(
        [line.mid for line in lines], at, xerr=[line.spread for line in lines], fmt="o", markersize=4, capsize=3
    )
    axes.set_yticks(at, [line.label for line in lines], fontsize=7)
    axes.set_xlabel("final: median, and standard deviation over seeds")
    axes.grid(True, axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
