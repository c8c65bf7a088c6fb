"""Draw the picture of a run: the losses of the global model and of learners, against tokens and against time."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.pipeline.files.replacing import replace
from diloco.pipeline.view.loss_curves import smoothed

# Of learners, as on the page.
_COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b3589a", "#a87800", "#3aa0d8", "#6a51a3", "#7f8a96")
_EVENT_COLOURS = {"learner_killed": "#c0392b", "learner_started": "#27803b", "learner_died": "#c0392b"}


def draw(report: Mapping[str, Any], events: Sequence[dict[str, Any]], title: str, ledger: str, path: Path) -> None:
    """Write a PNG with two panels.

    Args:
        report: its `evaluations` are a thick line, and its `curves` a thin one for each incarnation of a learner.
        events: drawn as vertical lines; each has `name`, `who`, `tokens` and `elapsed_s`.
        title: text above both panels.
        ledger: text below them, which says where the tokens went.
        path: file to write.
    """
    figure = Figure(figsize=(11, 4.4), dpi=130, layout="constrained")
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    evaluations, curves = report["evaluations"], report["curves"]
    names = list(dict.fromkeys(curve["learner"] for curve in curves))
    for curve in curves:
        losses = [math.nan if loss is None else loss for loss in smoothed(curve["losses"])]
        times = [curve["begin_s"] + curve["every_s"] * (n + 1) for n in range(len(losses))]
        colour, name = _COLOURS[names.index(curve["learner"]) % len(_COLOURS)], curve["learner"]
        label = name if name not in by_time.get_legend_handles_labels()[1] and len(names) <= len(_COLOURS) else None
        for axes, x in ((by_tokens, [tokens / 1e6 for tokens in curve["tokens"]]), (by_time, times)):
            axes.plot(x, losses, color=colour, linewidth=0.9, alpha=0.8, label=label)
    _panel(by_tokens, [point["tokens"] / 1e6 for point in evaluations], evaluations, "trained tokens (millions)")
    _panel(by_time, [point["elapsed_s"] for point in evaluations], evaluations, "time since the first step (s)")
    by_tokens.set_ylabel("loss (nats per token)")
    if by_time.get_legend_handles_labels()[1]:
        by_time.legend(fontsize=8, frameon=False)
    for event in events:
        for axes, x in ((by_tokens, event["tokens"] / 1e6), (by_time, event["elapsed_s"])):
            _mark(axes, x, event)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(ledger, fontsize=8, color="#444444")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    replace(path, [drawn.getbuffer()])


def _panel(axes: Axes, x: list[float], evaluations: Sequence[dict[str, Any]], label: str) -> None:
    losses = [point["loss"] for point in evaluations]
    if evaluations:
        axes.plot(x, losses, color="#16191d", marker="o", markersize=3, linewidth=2, label="global, held out")
        last = losses[-1]
        axes.annotate(f"{last:.3f}", (x[-1], last), textcoords="offset points", xytext=(-4, 8), ha="right", fontsize=9)
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Axes, x: float, event: dict[str, Any]) -> None:
    colour = _EVENT_COLOURS.get(event["name"], "#666666")
    axes.axvline(x, color=colour, linestyle="--", linewidth=1)
    what = event["name"].removeprefix("learner_")
    axes.text(
        x,
        0.98,
        f" {event['who']} {what}",
        transform=axes.get_xaxis_transform(),
        rotation=90,
        ha="right",
        va="top",
        fontsize=8,
        color=colour,
        in_layout=False,
    )
