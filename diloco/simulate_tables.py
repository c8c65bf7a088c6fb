"""Tables of the failure simulator: runs, what is shown of them, and the files they are written to."""

import csv
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from chaos.goodput import calibrate as fitting
from chaos.goodput import figures
from chaos.goodput.constants import Constants
from chaos.goodput.table import Cell, cells
from chaos.goodput.units import YEAR_S, Amount, Span
from pipeline.errors import UsageError

from .simulate_runs import rows as run_rows

LINKS = {
    "mean_participants": "in",
    "overwritten": "lost",
    "outer_steps_per_hour": "outer/h",
    "mean_sync_s": "sync s",
    "longest_gap_s": "gap s",
}
"""What is shown of the syncer's work, and its heading."""
METHODS = {"data-parallel": "data-parallel", "elastic": "data-parallel, elastic", "diloco": "DiLoCo (waits)"}


def numbers(text: str, kind: Any, name: str) -> list[float]:
    """A list as it is written on the command line.

    Raises:
        UsageError: naming the option and what it takes.
    """
    try:
        return [float(TypeAdapter(kind).validate_python(part)) for part in text.split(",")]
    except ValidationError as error:
        raise UsageError(f"--{name} {text}: numbers with commas, above 0, such as 150k,1.2M or 0.5y") from error


def whole(text: str, name: str) -> list[int]:
    """The same, of whole numbers."""
    found = numbers(text, Amount, name)
    if any(value != int(value) for value in found):
        raise UsageError(f"--{name} {text}: whole numbers with commas")
    return sorted({int(value) for value in found})


def pictures() -> ModuleType:
    """The module that draws.

    Raises:
        UsageError: matplotlib is missing.
    """
    try:
        return importlib.import_module("diloco.simulate_plot")
    except ModuleNotFoundError as error:
        raise UsageError("--plot needs matplotlib: pip install 'decoupled-diloco[run]'") from error


def check_files(*files: Path | None) -> None:
    """Before anything is computed: whether its files can be written.

    Raises:
        UsageError: a folder is not there.
    """
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"{file}: there is no folder {file.parent}")


def table(
    constants: Constants,
    chips: str,
    learners: str,
    seeds: int,
    days: float,
    json_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    jobs: int,
    cache: bool,
) -> None:
    """`diloco simulate table`."""
    console = Console()
    check_files(json_file, csv_file, plot)
    drawing = pictures() if plot else None
    sizes, counts = whole(chips, "chips"), whole(learners, "learners")
    _check(sizes, counts)
    wanted = [(constants, cell) for cell in cells(sizes, counts)]
    rows = run_rows(wanted, seeds=seeds, days=days, jobs=jobs, cache=cache, console=console)
    _show(console, rows, sizes, f"goodput / uptime, %: {days:g} days, {seeds} seeds (in brackets: the paper's)")
    write(rows, {"constants": constants.model_dump(mode="json"), "days": days, "seeds": seeds}, json_file, csv_file)
    if drawing:
        drawing.table(rows, f"Mean time between interruptions of a chip: {constants.mtbi / YEAR_S:g} years", plot)


def mtbi(
    constants: Constants,
    chips: str,
    learners: str,
    times: str,
    seeds: int,
    days: float,
    json_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    jobs: int,
    cache: bool,
) -> None:
    """`diloco simulate mtbi`."""
    console = Console()
    check_files(json_file, csv_file, plot)
    drawing = pictures() if plot else None
    (size, *more), counts, spans = whole(chips, "chips"), whole(learners, "learners"), numbers(times, Span, "times")
    if more or min(spans) <= 0:
        raise UsageError("one number of --chips, and --times above 0")
    _check([size], counts)
    worlds = [(span, constants.model_copy(update={"mtbi": span})) for span in spans]
    kinds = [Cell("data-parallel", 1, size), *(Cell("decoupled", count, size) for count in counts)]
    wanted = [(world, cell) for cell in kinds for _, world in worlds]
    rows = run_rows(wanted, seeds=seeds, days=days, jobs=jobs, cache=cache, console=console)
    for row, (world, _) in zip(rows, wanted, strict=True):
        row["mtbi_s"], row["paper"] = world.mtbi, None
    shown = Table(title=f"goodput % (uptime %, longest stall s) of {size:,} chips: {days:g} days, {seeds} seeds")
    shown.add_column("")
    for span in times.split(","):
        shown.add_column(span, justify="right")
    for cell in kinds:
        mine = [row for row in rows if (row["method"], row["learners"]) == cell[:2]]
        texts = [f"{100 * r['goodput']:.1f} ({100 * r['uptime']:.1f}, {r['longest_stall_s']:.0f})" for r in mine]
        shown.add_row(name_of(cell.method, cell.learners), *texts)
    console.print(shown)
    write(rows, {"constants": constants.model_dump(mode="json"), "days": days, "seeds": seeds}, json_file, csv_file)
    if drawing:
        series = {}
        for cell in kinds:
            mine = [row for row in rows if (row["method"], row["learners"]) == cell[:2]]
            x, y = [r["mtbi_s"] / 86400 for r in mine], [100 * r["goodput"] for r in mine]
            series[name_of(cell.method, cell.learners)] = (x, y)
        labels = "mean time between interruptions of a chip (days)", "goodput (%)"
        drawing.lines(series, labels, f"Goodput of {size:,} chips", plot, ("log", "linear"))


def calibrate(constants: Constants, seeds: int, days: float, json_file: Path | None, jobs: int) -> None:
    """`diloco simulate calibrate`."""
    console = Console()
    check_files(json_file)
    console.print(
        f"fitting {', '.join(fitting.FREE)} to the columns of {' and '.join(f'{n:,}' for n in figures.CALIBRATED_ON)} "
        "chips, in run time (1/goodput)"
    )
    fitted = fitting.calibrate(constants, days, told=console.print)
    sizes = sorted({figure.chips for figure in figures.TABLE})
    wanted = [(fitted, Cell(f.method, f.learners, f.chips)) for f in figures.TABLE]
    rows = run_rows(wanted, seeds=seeds, days=days, jobs=jobs, cache=False, console=console)
    shown = Table(title=f"simulated - paper, percentage points: {days:g} days, {seeds} other seeds")
    shown.add_column("")
    for size in sizes:
        shown.add_column(f"{size:,}" + " (not fitted)" * (size not in figures.CALIBRATED_ON), justify="right")
    for method, learners in dict.fromkeys((f.method, f.learners) for f in figures.TABLE):
        mine = [row for row in rows if (row["method"], row["learners"]) == (method, learners)]
        texts = [f"{100 * (r['goodput'] - r['paper']):+.1f}" for r in sorted(mine, key=lambda r: r["chips"])]
        shown.add_row(name_of(method, learners), *texts)
    console.print(shown)
    values = {name: getattr(fitted, name) for name in (*fitting.FREE, "up")}
    worst = max(abs(row["goodput"] - row["paper"]) for row in rows)
    console.print(f"constants: {', '.join(f'{k} {v:.2f} s' for k, v in values.items())}; worst cell {100 * worst:.1f}")
    write(rows, {"fitted": values, "constants": fitted.model_dump(mode="json")}, json_file, None)


def link(
    constants: Constants,
    chips: str,
    learners: str,
    seeds: int,
    days: float,
    json_file: Path | None,
    plot: Path | None,
    jobs: int,
    cache: bool,
) -> None:
    """`diloco simulate link`."""
    console = Console()
    check_files(json_file, plot)
    drawing = pictures() if plot else None
    if constants.link_trace is None:
        raise UsageError("--link-trace FILE: lines of `second bits_per_second latency_s`; see examples/link-trace.txt")
    (size, *more), counts = whole(chips, "chips"), whole(learners, "learners")
    if more:
        raise UsageError("one number of --chips")
    _check([size], counts)
    steady = constants.model_copy(update={"link_trace": None})
    kinds = [Cell(method, count, size) for method in ("diloco", "decoupled") for count in counts]
    wanted = [(world, cell) for cell in kinds for world in (steady, constants)]
    rows = run_rows(wanted, seeds=seeds, days=days, jobs=jobs, cache=cache, console=console)
    shown = Table(title=f"{size:,} chips; a steady link of {constants.link / 1e9:g} Gbit/s, and {constants.link_trace}")
    for name in ("", "link", "goodput %", *LINKS.values()):
        shown.add_column(name)
    for row, (world, cell) in zip(rows, wanted, strict=True):
        row["link"] = "steady" if world is steady else "trace"
        texts = [f"{row[name]:.4g}" if name in row else "" for name in LINKS]
        shown.add_row(name_of(cell.method, cell.learners), row["link"], f"{100 * row['goodput']:.1f}", *texts)
    console.print(shown)
    write(rows, {"constants": constants.model_dump(mode="json"), "days": days, "seeds": seeds}, json_file, None)
    if drawing:
        series = {
            kind: {name_of(r["method"], r["learners"]): r["goodput"] for r in rows if r["link"] == kind}
            for kind in ("steady", "trace")
        }
        drawing.bars(series, ("", "goodput"), f"{size:,} chips, links between regions", plot)


def name_of(method: str, learners: int) -> str:
    """A row's name."""
    if method == "decoupled":
        return f"decoupled, M={learners}"
    return METHODS[method] + (f", M={learners}" if method == "diloco" else "")


def write(rows: Sequence[dict[str, Any]], about: dict[str, Any], json_file: Path | None, csv_file: Path | None) -> None:
    """The rows as files."""
    if json_file:
        json_file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if csv_file:
        flat = [
            {k: v for k, v in row.items() if k != "lost"}
            | {f"lost: {cause}": share for cause, share in row.get("lost", {}).items()}
            for row in rows
        ]
        names = list(dict.fromkeys(name for row in flat for name in row))
        with csv_file.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(flat)


def _check(sizes: Sequence[int], counts: Sequence[int]) -> None:
    if max(counts) > min(sizes):
        raise UsageError(f"{min(sizes):,} chips are too few for {max(counts)} learners")
    if max(counts) > 512:
        raise UsageError(f"--learners {max(counts)}: a window holds 512 learners at most")


def _show(console: Console, rows: Sequence[dict[str, Any]], sizes: Sequence[int], title: str) -> None:
    shown = Table(title=title)
    shown.add_column("")
    for size in sizes:
        shown.add_column(f"{size:,} chips", justify="right")
    for method, learners in dict.fromkeys((row["method"], row["learners"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["learners"]) == (method, learners)]
        texts = []
        for r in sorted(mine, key=lambda r: int(r["chips"])):
            known = "" if r["paper"] is None else f" ({100 * r['paper']:.0f})"
            texts.append(f"{100 * r['goodput']:.1f} / {100 * r['uptime']:.1f}{known}")
        shown.add_row(name_of(method, learners), *texts)
    console.print(shown)
