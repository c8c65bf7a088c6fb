"""Figures: several measurements as median, least and most; what is shown of them, and the files they go to."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from diloco.pipeline.files.strict_json import dumps

Spread = dict[str, float]
"""median, min, max and how many measurements (n)."""


def spread(values: Iterable[float]) -> Spread:
    """Of at least one measurement."""
    found = list(values)
    return {"median": median(found), "min": min(found), "max": max(found), "n": len(found)}


def progress(console: Console) -> Progress:
    """A progress bar that goes when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def shown(one: Spread, digits: int = 3) -> str:
    """Median, and least to most."""
    return "{} ({} - {})".format(*(f"{one[name]:.{digits}g}" for name in ("median", "min", "max")))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is of names."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def show_machine(console: Console, machine: Mapping[str, Any]) -> None:
    """One line."""
    console.print("[dim]" + ", ".join(f"{name} {value}" for name, value in machine.items()) + "[/dim]", highlight=False)


def write_json(file: Path | None, report: Mapping[str, Any]) -> None:
    """The whole report, if a file was asked for."""
    if file is not None:
        file.write_text(dumps(report, indent=1) + "\n")
