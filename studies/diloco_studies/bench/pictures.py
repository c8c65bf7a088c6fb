"""Pictures of the benchmarks: bars with whiskers from least to most."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco_studies.bench.figures import Spread

COLOURS = ("#1f5f99", "#7f8c8d", "#c0392b", "#e08e0b", "#2e8b57", "#6c4f9c")


def bars(panels: Mapping[str, Mapping[str, Spread]], title: str, path: Path) -> None:
    """One panel for each unit, one bar for each figure."""
    figure = Figure(figsize=(4.2 * len(panels), 4.4), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for one, (unit, values) in zip(axes, panels.items(), strict=True):
        for at, value in enumerate(values.values()):
            low, high = value["median"] - value["min"], value["max"] - value["median"]
            one.bar(at, value["median"], color=COLOURS[at % len(COLOURS)])
            one.errorbar(at, value["median"], yerr=[[low], [high]], color="black", capsize=3)
            one.annotate(f"{value['median']:.3g}", (at, value["median"]), ha="center", va="bottom", fontsize=8)
        one.set_xticks(range(len(values)), list(values), rotation=30, ha="right", fontsize=8)
        one.set_ylabel(unit)
        one.grid(True, axis="y", alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
