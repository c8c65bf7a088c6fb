"""`diloco bench compare`: the command, its options and its tables."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.writable import check_files
from diloco.pipeline.units import parse_count
from diloco_studies.bench.beside.environments import default_folder
from diloco_studies.bench.figures import show_machine, shown, table, write_json
from diloco_studies.bench.machine import describe

COLUMNS = {
    "publish_to_adopted_s": ("last publish to adopted, s", 1.0),
    "trainer_blocked_s": ("trainer stands still, ms", 1e3),
    "server_cpu_s_per_gb": ("server, CPU s per GB of deltas", 1.0),
    "cpu_s_per_learner": ("all, CPU s a learner", 1.0),
    "largest_process_mb": ("largest process, GB", 1e-3),
    "all_processes_mb": ("all processes, GB", 1e-3),
}
"""Heading and factor of each figure in the tables."""


def sizes(text: str) -> list[tuple[int, int]]:
    """Parameters and fragments of `100e6,100e6/8`."""
    found = []
    for part in text.split(","):
        params, _, fragments = part.partition("/")
        try:
            one = int(str(parse_count(params))), int(fragments or "1")
        except ValueError:
            one = (0, 0)
        if one[0] < 65_536 or not 1 <= one[1] <= 64:
            raise UsageError(
                f"--sizes {text}: give parameters (65536 or more), or parameters/fragments, e.g. 10e6,100e6/8"
            )
        found.append(one)
    return found


def main(
    sizes_text: Annotated[
        str,
        typer.Option(
            "--sizes", metavar="N,N/P,...", help="Parameters; with /P, one of P fragments is synchronised at a time"
        ),
    ] = "10e6,100e6,100e6/8",
    momentum: Annotated[float, typer.Option(min=0.0, max=0.999, help="Outer Nesterov momentum of all systems")] = 0.9,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each system in each pass")] = 3,
    passes: Annotated[int, typer.Option(min=1, help="Number of passes over all systems")] = 2,
    environments: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the environments (default: in your cache folder)")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything as JSON")
    ] = None,
) -> None:
    """The same work with gradientmail, torchft and hivemind, each in its own environment, in the same run.

    Two learners on this machine, fp32, systems in turn. If a system is missing, the output shows how to create its
    environment.
    """
    console = Console()
    check_files(json_file)
    asked = sizes(sizes_text)
    measuring = importlib.import_module("diloco_studies.bench.beside.compare")
    given = measuring.Comparison(tuple(measuring.Size(*one) for one in asked), momentum, rounds, passes)
    folder = (environments or default_folder()).expanduser().absolute()
    starts, missing = measuring.systems(given, folder)
    outcome = measuring.measure(given, starts, missing, console)
    report = outcome.report()
    for size, systems in report["sizes"].items():
        title = f"{size}: {rounds * passes} rounds, median (least - most)"
        headings = ("", "times ours", *(heading for heading, _ in COLUMNS.values()))
        console.print(table(title, headings, rows(systems, measuring.OURS)))
    notes(console, report)
    machine = describe(report["systems"].get(measuring.OURS, {}).get("versions", {}).get("redis", "not used"))
    show_machine(console, machine)
    write_json(json_file, {"benchmark": "compare", "settings": asdict(given), "machine": machine, **report})


def rows(systems: Mapping[str, Mapping[str, Any]], ours: str) -> Iterator[list[str]]:
    """Of one size's table; those that are not available are named below it."""
    base = systems.get(ours, {}).get("publish_to_adopted_s")
    for name, figures in systems.items():
        if "not_available" in figures:
            yield [name, "not available"]
            continue
        times = f"{figures['publish_to_adopted_s']['median'] / base['median']:.2g}" if base else "-"
        cells = []
        for key, (_, factor) in COLUMNS.items():
            found = figures.get(key)
            cells.append("-" if found is None else shown({which: value * factor for which, value in found.items()}))
        yield [name, times, *cells]


def notes(console: Console, report: Mapping[str, Any]) -> None:
    """Versions and settings of each system, and why others are not there, each reason once."""
    for name, hello in report["systems"].items():
        if hello:
            versions = ", ".join(f"{package} {version}" for package, version in hello.get("versions", {}).items())
            console.print(f"{name} ({versions}): {hello.get('settings', '')}", highlight=False, markup=False)
    reasons: dict[tuple[str, str], list[str]] = {}
    for size, systems in report["sizes"].items():
        for name, figures in systems.items():
            if "not_available" in figures:
                reasons.setdefault((name, figures["not_available"]), []).append(size)
    for (name, why), where in reasons.items():
        console.print(f"{name} at {', '.join(where)}: not available: {why}", highlight=False, markup=False)
