"""The picture of `bench compare`: a column for each size, a row for each figure, a bar for each system.

Of several runs, one a size, from their files:
`python -m diloco_studies.bench.beside.compare_plot 10M.json 100M.json picture.png`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco_studies.pictures import save

COLOURS = ("#1f5f99", "#7f8c8d", "#c0392b", "#e08e0b", "#2e8b57", "#6c4f9c")
ROWS = {
    "publish_to_adopted_s": ("last publish to adopted by all, s", 1.0),
    "trainer_blocked_s": ("the trainer stands still, s", 1.0),
    "all_processes_mb": ("memory of all processes, GB", 1e-3),
}
"""Label and factor of each figure that is drawn."""


def draw(sizes: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Medians with whiskers from least to most, by size, system and figure; a system that is not there has a dash."""
    names = list(dict.fromkeys(name for systems in sizes.values() for name in systems))
    figure = Figure(figsize=(4.4 * len(sizes), 8.4), dpi=130, layout="constrained")
    grid = figure.subplots(len(ROWS), len(sizes), squeeze=False)
    figure.suptitle("Two learners on one machine", fontsize=11)
    for row, key in zip(grid, ROWS, strict=True):
        for one, (size, systems) in zip(row, sizes.items(), strict=True):
            _panel(one, names, systems, key)
            if key == next(iter(ROWS)):
                one.set_title(size, fontsize=10)
            if one is row[0]:
                one.set_ylabel(ROWS[key][0], fontsize=9)
    save(figure, path)


def _panel(axes: Axes, names: list[str], systems: Mapping[str, Mapping[str, Any]], key: str) -> None:
    factor = ROWS[key][1]
    for at, name in enumerate(names):
        found = systems.get(name, {}).get(key)
        if found is None:
            axes.annotate("-", (at, 0), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=10)
            continue
        middle, low, high = (found[which] * factor for which in ("median", "min", "max"))
        axes.bar(at, middle, color=COLOURS[at % len(COLOURS)])
        axes.errorbar(at, middle, yerr=[[middle - low], [high - middle]], color="black", capsize=3)
        axes.annotate(f"{middle:.2g}", (at, high), ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.15)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=7)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(True, axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw what runs have written."""
    *reports, picture = map(Path, sys.argv[1:])
    sizes: dict[str, Any] = {}
    for report in reports:
        sizes |= json.loads(report.read_text())["sizes"]
    draw(sizes, picture)


if __name__ == "__main__":
    main()
