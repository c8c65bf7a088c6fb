"""Draw the picture of a run: global validation loss against tokens and against time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_EVENT_COLOURS = {"learner_killed": "#c0392b", "learner_started": "#27803b", "learner_died": "#c0392b"}


def draw(
    evaluations: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], title: str, ledger: str, path: Path
) -> None:
    """Write a PNG with two panels.

    Args:
        evaluations: in order; each has `tokens`, `elapsed_s` and `loss`.
        events: drawn as vertical lines; each has `name`, `who`, `tokens` and `elapsed_s`.
        title: text above both panels.
        ledger: text below them, which says where the tokens went.
        path: file to write.
    """
    figure = Figure(figsize=(11, 4.4), dpi=130, layout="constrained")
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    _panel(by_tokens, [point["tokens"] / 1e6 for point in evaluations], evaluations, "trained tokens (millions)")
    _panel(by_time, [point["elapsed_s"] for point in evaluations], evaluations, "time since the first step (s)")
    by_tokens.set_ylabel("global validation loss (nats per token)")
    for event in events:
        for axes, x in ((by_tokens, event["tokens"] / 1e6), (by_time, event["elapsed_s"])):
            _mark(axes, x, event)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(ledger, fontsize=8, color="#444444")
    figure.savefig(path)


def _panel(axes: Axes, x: list[float], evaluations: Sequence[dict[str, Any]], label: str) -> None:
    axes.plot(x, [point["loss"] for point in evaluations], color="#1f5f99", marker="o", markersize=3, linewidth=1.4)
    if evaluations:
        last = evaluations[-1]["loss"]
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
