"""`diloco bench lines`: training runs behind slow lines, cell by cell, into a table that a later call goes on with."""

import csv
import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.writable import check_files
from diloco_studies.bench.figures import show_machine, table
from diloco_studies.bench.machine import describe
from diloco_studies.bench.slow.line_cells import Cell, cells

SHOWN = {
    "utilisation": "utilisation",
    "merged_share": "merged",
    "planned_merged_share": "(planned)",
    "steps_a_merge": "steps a merge",
    "planned_interval": "(planned)",
    "bytes_a_token": "bytes a token",
    "planned_bytes_a_token": "(planned)",
    "held_out_loss": "loss",
}


def read(path: Path) -> list[dict[str, str]]:
    """Rows of earlier calls."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All of them, whole or not at all."""
    names = list(dict.fromkeys(name for one in rows for name in one))
    beside = path.with_suffix(".part")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(path)


def _named(row: Mapping[str, str]) -> str:
    return Cell(
        float(row["rate"]),
        row["codec"],
        row["global_codec"],
        float(row["latency_ms"]),
        float(row["jitter_ms"]),
        float(row["loss"]),
        row["congestion"],
    ).name


def main(
    csv_file: Annotated[
        Path, typer.Option("--csv", metavar="FILE", help="Table of results; cells that it has are not made again")
    ] = Path("lines.csv"),
    within: Annotated[
        float, typer.Option("--within", min=1.0, help="Begin no cell later than after so many minutes")
    ] = 60.0,
    for_s: Annotated[
        float, typer.Option("--for", min=5.0, max=600.0, help="Seconds of a cell that are measured")
    ] = 120.0,
    settle_s: Annotated[
        float, typer.Option("--settle", min=1.0, max=600.0, help="Seconds before, on the cell's lines")
    ] = 180.0,
    only: Annotated[
        str, typer.Option(metavar="CELL;...", help="These: rate,codec,globals,latency ms,jitter ms,loss,congestion")
    ] = "",
) -> None:
    """Train on slow lines: utilisation, bytes a token, merged share and held-out loss, beside the planner's word.

    Each party (two learners, a syncer, an evaluator) is in a network namespace, behind a line of its own with a rate,
    a latency, jitter and losses of packets. Linux, as root. Cells that the table has are not made again.

    Example: diloco bench lines --csv docs/results/lines.csv --within 7
    """
    check_files(csv_file)
    wanted = [_cell(text) for text in only.split(";")] if only else list(cells())
    runs = importlib.import_module("diloco_studies.bench.slow.line_runs")
    runs.need_lines()
    console, began, rows = Console(), time.monotonic(), read(csv_file)
    done = {_named(row) for row in rows}
    for cell in wanted:
        if cell.name in done:
            continue
        if time.monotonic() - began > 60 * within:
            left = sum(one.name not in done for one in wanted)
            console.print(f"{left} cells are left: call it again", highlight=False)
            break
        console.print(f"{time.strftime('%H:%M:%S')} {cell.name}", highlight=False)
        rows.append(runs.measure(cell, runs.Times(settle_s, for_s)))
        done.add(cell.name)
        write(csv_file, rows)
    shown = ((_named(row), *(_short(row.get(name, "")) for name in SHOWN)) for row in rows)
    console.print(table("Runs on slow lines", ("cell", *SHOWN.values()), shown), soft_wrap=True)
    show_machine(console, describe("embedded"))


def _short(value: Any) -> str:
    try:
        return f"{float(value):.3g}"
    except ValueError:
        return str(value)


def _cell(text: str) -> Cell:
    try:
        rate, codec, global_codec, latency, jitter, loss, congestion = text.split(",")
        return Cell(float(rate), codec, global_codec, float(latency), float(jitter), float(loss), congestion)
    except ValueError:
        raise UsageError(f"--only {text}: seven values with commas, such as 0.5,bf16,fp32,50,0,0,cubic") from None
