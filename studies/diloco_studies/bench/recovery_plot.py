"""The picture of `studies.bench.recovery`: a restarted learner's training loss, and the run's held-out loss."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco_studies.pictures import save

COLOURS = {"checkpoint": "#1f5f99", "peer": "#27803b", "fresh": "#c77d0a", "fresh, no ramp": "#c0392b"}
SHOWN_BEFORE, SHOWN_AFTER = 40, 100
SHOWN_FROM = 0.6
"""Share of the tokens before the kill from which the held-out loss is shown."""
SMOOTHED = 5
"""Steps in the running mean."""


class Curves(Protocol):
    """What is drawn of a run."""

    @property
    def way(self) -> str: ...  # noqa: D102
    @property
    def before(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def after(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def other(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def evaluations(self) -> Sequence[tuple[int, float]]: ...  # noqa: D102
    @property
    def killed_tokens(self) -> int: ...  # noqa: D102
    @property
    def restarted_tokens(self) -> int: ...  # noqa: D102


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Mean over runs at each step, as far as all of them go."""
    return [fmean(values) for values in zip(*curves, strict=False)]


def smooth(values: Sequence[float], width: int = SMOOTHED) -> list[float]:
    """Mean over the last `width` steps; over fewer at the beginning."""
    return [fmean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


def draw(trials: Sequence[Curves], path: Path) -> None:
    """Write a PNG with two panels; several runs of a way are averaged."""
    figure = Figure(figsize=(12, 4.8), dpi=130, layout="constrained")
    steps, tokens = figure.subplots(1, 2)
    runs = {way: [trial for trial in trials if trial.way == way] for way in COLOURS}
    runs = {way: mine for way, mine in runs.items() if mine}
    _draw_steps(steps, trials, runs)
    _draw_tokens(tokens, trials, runs)
    for axes in (steps, tokens):
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def _draw_steps(axes: Axes, trials: Sequence[Curves], runs: dict[str, list[Curves]]) -> None:
    other = smooth(mean_curve([trial.other for trial in trials]))[:SHOWN_AFTER]
    axes.plot(range(1, len(other) + 1), other, color="#999999", linewidth=1.2, label="the other learner, never killed")
    for way, mine in runs.items():
        ends = [trial.before[-SHOWN_BEFORE - SMOOTHED :] for trial in mine]
        length = min(map(len, ends))
        before = smooth(mean_curve([end[-length:] for end in ends]))[-SHOWN_BEFORE:]
        after = smooth(mean_curve([trial.after for trial in mine]))[:SHOWN_AFTER]
        axes.plot(range(1 - len(before), 1), before, color=COLOURS[way], linewidth=1.2, alpha=0.6)
        axes.plot(range(1, len(after) + 1), after, color=COLOURS[way], linewidth=1.6, label=way)
    axes.axvline(0.5, color="#666666", linestyle="--", linewidth=1)
    axes.text(
        0.5,
        0.02,
        " killed | started again ",
        transform=axes.get_xaxis_transform(),
        ha="center",
        fontsize=8,
        color="#444444",
    )
    axes.set_xlabel("inner steps of the killed learner, from its restart on")
    axes.set_ylabel(f"training loss (nats per token, mean of {SMOOTHED} steps)")
    axes.set_title("training loss of the killed learner", fontsize=11)
    axes.legend(fontsize=8, title="its moments after the restart", title_fontsize=8)


def _draw_tokens(axes: Axes, trials: Sequence[Curves], runs: dict[str, list[Curves]]) -> None:
    for way, mine in runs.items():
        for number, trial in enumerate(mine):
            shown = [(at / 1e6, loss) for at, loss in trial.evaluations if at >= SHOWN_FROM * trial.killed_tokens]
            x, y = zip(*shown, strict=True)
            label = way if not number else None
            axes.plot(x, y, color=COLOURS[way], marker="o", markersize=2, linewidth=0.9, alpha=0.8, label=label)
    for name, values in (
        ("killed", [trial.killed_tokens for trial in trials]),
        ("started again", [trial.restarted_tokens for trial in trials]),
    ):
        at = fmean(values) / 1e6
        axes.axvline(at, color="#666666", linestyle="--", linewidth=1)
        axes.text(
            at,
            0.98,
            f" {name}",
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="top",
            fontsize=8,
            color="#444444",
        )
    axes.set_xlabel("trained tokens of the run (millions)")
    axes.set_ylabel("held-out loss (nats per token)")
    axes.set_title("global parameters of the run, one line a run", fontsize=11)
    axes.legend(fontsize=8)
