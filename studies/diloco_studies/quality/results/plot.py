"""Pictures: an experiment's curves with seeds as bands and the final measure of each row; distances by size."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.models.sizes import SIZES
from diloco_studies.pictures import save
from diloco_studies.quality.results.report import Distance, Line, Table
from diloco_studies.quality.settings import LabRun

matplotlib.rcParams["text.parse_math"] = False  # a dollar in a name is one

DODGE = 0.04
"""Between two variants of one size, or one's bars would hide the other's."""

MAX_CURVES = 12
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
        _curves(row[0], table, done[:MAX_CURVES], "tokens", "trained tokens (millions)", 1e6)
        _curves(row[1], table, done[:MAX_CURVES], "virtual_s", "virtual time (h)", 3600.0)
        _bars(row[2], done)
        row[0].set_ylabel(table.measure)
        row[0].legend(fontsize=7)
        row[0].set_title(table.experiment.name, fontsize=10, loc="left")
        if any(len(line.summaries) > 1 for line in done):
            row[0].set_title("lines: medians of the seeds; bands: all of them", fontsize=7, loc="right")
    save(figure, path)


def _curves(axes: Axes, table: Table, lines: Sequence[Line], x: str, label: str, unit: float) -> None:
    ends = []
    for i, line in enumerate(lines):
        colour = f"C{i % 10}"
        curves = [one.curve for one in line.summaries.values()]
        length = min(map(len, curves))  # the same marks for all seeds, but perhaps the last
        at = np.mean([[getattr(mark, x) for mark in curve[:length]] for curve in curves], axis=0) / unit
        values = np.array([[mark.value for mark in curve[:length]] for curve in curves])
        axes.plot(at, np.median(values, axis=0), color=colour, linewidth=1.3, label=_shown(line.label))
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


def _shown(label: str) -> str:
    """Of a row, for a legend, which leaves out what begins with an underscore."""
    return f"\N{ZERO WIDTH SPACE}{label}" if label.startswith("_") else label


def _bars(axes: Axes, lines: Sequence[Line]) -> None:
    at = list(range(len(lines)))[::-1]
    for i, line in enumerate(lines):
        colour = f"C{i % 10}" if i < MAX_CURVES else "grey"  # as its curve
        axes.errorbar(line.mid, at[i], xerr=line.spread, color=colour, fmt="o", markersize=4, capsize=3)
    axes.set_yticks(at, [line.label for line in lines], fontsize=7)
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel("final: median, and standard deviation over seeds")
    axes.grid(True, axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


Place = tuple[float, Distance]
"""Millions of parameters, and how far a row of that size ends from its reference."""


def draw_sizes(tables: Sequence[Table], path: Path) -> None:
    """Write a picture: how far rows end from their references, by the number of parameters.

    Drawn are variants that several sizes have. A line joins those of one frame: data, learners, fragments, steps.

    Raises:
        UsageError: there are none, or they are measured by different references.
    """
    series = _by_variant(tables)
    if len({(table.measure, table.experiment.reference) for table in tables}) > 1:
        raise UsageError("--sizes needs experiments with the same reference and measure")
    if not series:
        raise UsageError(
            "--sizes needs rows with the same name at two or more sizes, each with a reference that was run"
        )
    figure = Figure(figsize=(10, 5.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    markers = dict(zip(dict.fromkeys(told for frames in series.values() for told in frames), cycle("osD^vP*")))
    for number, frames in enumerate(series.values()):
        for told, places in frames.items():
            at, distances = zip(*sorted(places, key=lambda place: place[0]), strict=True)
            of_seeds = [
                np.std(list(one.by_seed.values()), ddof=1) if len(one.by_seed) > 1 else math.nan for one in distances
            ]
            axes.errorbar(
                np.array(at) * (1 + DODGE * number),
                [one.of_medians for one in distances],
                yerr=of_seeds,
                color=f"C{number}",
                marker=markers[told],
                markersize=4,
                capsize=3,
                linewidth=1.0,
            )
    axes.axhline(0.0, color="black", linewidth=0.8)
    sizes = sorted({at for frames in series.values() for places in frames.values() for at, _ in places})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{float(f'{at:.2g}'):g}" for at in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("parameters (millions)")
    axes.set_ylabel(f"% more {tables[0].measure.partition(',')[0]}", fontsize=8)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    names = [tables[0].experiment.reference, *series]
    colours = ["black", *(f"C{number}" for number in range(len(series)))]
    lines = [Line2D([], [], color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    shapes = [Line2D([], [], color="grey", linestyle="", marker=markers[told], label=told) for told in markers]
    axes.legend(handles=lines, loc="upper left", fontsize=7)
    figure.legend(handles=shapes, loc="outside lower center", ncols=2, fontsize=7)
    save(figure, path)


def _by_variant(tables: Sequence[Table]) -> dict[str, dict[str, list[Place]]]:
    """Variant -> frame -> places, of variants that several sizes have."""
    found: dict[str, dict[str, list[Place]]] = {}
    for table in tables:
        for line in table.best():
            distance, run = table.distance(line), line.row.runs[0]
            if run.task != "text" or run.experts is not None:
                raise UsageError(f"--sizes draws only dense text models, but {table.experiment.name} has others")
            if distance is not None and line.row.variant != table.experiment.reference and run.model in SIZES:
                place = SIZES[run.model].parameters() / 1e6, distance
                found.setdefault(line.row.variant, {}).setdefault(_frame(run), []).append(place)
    return {
        variant: frames
        for variant, frames in found.items()
        if len({place[0] for places in frames.values() for place in places}) > 1
    }


def _frame(run: LabRun) -> str:
    tokens = f"{run.steps} steps of {run.batch * run.seq_len / 1024:g}k tokens of {run.data}"
    return f"M = {run.members}, P = {run.fragments}, {tokens}"
