"""What several `diloco simulate` commands are asked for: seeds, processes, files; and numbers as people write them."""

import csv
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import TypeAdapter, ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.files.writable import check_files
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.units import Amount


def _file(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="FILE", help=text)


@dataclass(frozen=True)
class Sample:
    """How much is simulated, and by whom."""

    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell, for the error bars")]
    days: Annotated[float, typer.Option(min=0.01, max=36_525, help="Simulated days of each seed")]
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core")] = 0

    @property
    def processes(self) -> int:
        """How many to use."""
        return self.jobs or usable_cores()


@dataclass(frozen=True)
class Files:
    """Where the numbers go, beside the screen."""

    json_file: Annotated[Path | None, _file("--json", "Also write the table as JSON")] = None
    csv_file: Annotated[Path | None, _file("--csv", "Also write the table as CSV")] = None

    def check(self) -> None:
        """Before anything is computed: whether all can be written.

        Raises:
            UsageError: naming the file that cannot.
        """
        check_files(*(getattr(self, field.name) for field in fields(self)))

    def write(self, rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
        """The rows; `about` is in the JSON only. Of nested values CSV has a column each."""
        if self.json_file:
            self.json_file.write_text(dumps({**about, "rows": rows}, indent=1) + "\n")
        if self.csv_file:
            flat = [_flat(row) for row in rows]
            names = list(dict.fromkeys(name for row in flat for name in row))
            with self.csv_file.open("w", newline="") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(flat)


@dataclass(frozen=True)
class Pictured(Files):
    """And where the picture goes."""

    plot: Annotated[Path | None, _file("--plot", "Also draw it, as PNG")] = None

    def draw(self, rows: Sequence[dict[str, Any]], title: str, across: str = "chips") -> None:
        """As `plot.draw`, if a picture is asked for."""
        if self.plot:
            importlib.import_module("diloco_studies.goodput.commands.plot").draw(self.plot, rows, title, across)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    nested = {
        f"{name}: {key}": one for name, value in row.items() if isinstance(value, dict) for key, one in value.items()
    }
    return {name: value for name, value in row.items() if not isinstance(value, dict)} | nested


def shares(**groups: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parameters of a command that are several options each: a dataclass's fields, whose instance has the defaults."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function).parameters.values() if p.name not in groups]
        options = []
        for group in groups.values():
            hints = get_type_hints(type(group), include_extras=True)
            options += [
                inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, f.name), annotation=hints[f.name]
                )
                for f in fields(group)
            ]

        def command(*args: Any, **given: Any) -> None:
            made = {
                name: type(group)(**{field.name: given.pop(field.name) for field in fields(group)})
                for name, group in groups.items()
            }
            function(*args, **given, **made)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
        return command

    return decorate


def numbers(text: str, kind: Any, name: str) -> list[float]:
    """A list as it is written on the command line; `kind` is a type of `pipeline.units`.

    Raises:
        UsageError: naming the option and what it takes.
    """
    try:
        found = [float(TypeAdapter(kind).validate_python(part)) for part in text.split(",")]
    except ValidationError as error:
        raise UsageError(
            f"--{name} {text}: give positive numbers separated by commas, such as 150k,1.2M or 0.5y"
        ) from error
    if min(found) <= 0:
        raise UsageError(f"--{name} {text}: give a positive number")
    return found


def one(text: str, kind: Any, name: str) -> float:
    """A single number.

    Raises:
        UsageError: naming the option and what it takes.
    """
    found = numbers(text, kind, name)
    if len(found) > 1:
        raise UsageError(f"--{name} {text}: give one number")
    return found[0]


def whole(text: str, name: str) -> list[int]:
    """Counts, in order.

    Raises:
        UsageError: naming the option and what it takes.
    """
    found = numbers(text, Amount, name)
    if any(value != int(value) for value in found):
        raise UsageError(f"--{name} {text}: give whole numbers separated by commas")
    return sorted({int(value) for value in found})


def one_whole(text: str, name: str) -> int:
    """A single count.

    Raises:
        UsageError: naming the option and what it takes.
    """
    found = one(text, Amount, name)
    if found != int(found):
        raise UsageError(f"--{name} {text}: give one whole number, such as 1200 or 150k")
    return int(found)
