"""`python -m tests.world`: run simulated worlds; replay and shrink one that failed."""

import asyncio
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.process.cores import usable_cores
from tests import quiet
from tests.world.campaign import Summary, campaign, code_digest, done_before
from tests.world.plan import Kind, plan
from tests.world.shrink import shrink
from tests.world.twin import record, replay
from tests.world.world import Result, run_seed

app = typer.Typer(add_completion=False, help="Deterministic simulation of whole runs under faults, in virtual time.")
console = Console(soft_wrap=True)

REPLAY = "python -m tests.world seed {seed}"


@app.command("seeds")
def run_seeds(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds")] = 10_000,
    first: Annotated[int, typer.Option(min=0, help="The first seed")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes")] = usable_cores(),
    folder: Annotated[Path, typer.Option(help="Where results are kept, so that the next call goes on")] = Path(".dst"),
    failovers: Annotated[
        bool, typer.Option("--failovers", help="Only worlds in which another server takes over")
    ] = False,
) -> None:
    """Run many seeds over all cores. Interrupted, it goes on where it was; changed code begins anew."""
    file = folder / f"{code_digest()[:16]}.jsonl"
    able = (seed for seed in count(first) if not failovers or plan(seed).fails_over)
    wanted = dict.fromkeys(islice(able, seeds))
    summary, known = Summary(), set[int]()
    for line in done_before(file):
        if line["seed"] in wanted and line["seed"] not in known:
            known.add(line["seed"])
            summary.add(line)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("seeds", total=seeds, completed=len(known))
            for line in campaign([seed for seed in wanted if seed not in known], jobs, file):
                summary.add(line)
                progress.advance(bar)
                if line["violation"]:
                    progress.console.print(f"seed {line['seed']}: {line['violation']}", style="red")
                    progress.console.print(f"  replay and shrink it: {REPLAY.format(seed=line['seed'])} --shrink")
    except KeyboardInterrupt:
        console.print(f"stopped after {summary.seeds} of {seeds} seeds; repeat the command to continue")
        raise typer.Exit(130) from None
    show(summary, jobs, file)
    raise typer.Exit(1 if summary.violations else 0)


def show(summary: Summary, jobs: int, file: Path) -> None:
    """Print what was run, what struck, and what broke."""
    table = Table("fault", "times", box=None)
    for kind in Kind:
        table.add_row(kind.value, f"{summary.fired[kind.value]:,}")
    console.print(table)
    table = Table("killed at", "times", box=None)
    for point, times in sorted(summary.crashed.items()):
        table.add_row(point, f"{times:,}")
    console.print(table)
    rate = summary.merges / summary.seconds if summary.seconds else 0.0
    each_s = summary.seconds / max(1, summary.seeds)
    console.print(
        f"{summary.seeds:,} seeds of {each_s:.2f} s, {summary.merges:,} merges, {summary.virtual_s:,.0f} virtual s; "
        f"{rate:,.0f} merges/s a core, {jobs} at a time; results in {file}"
    )
    for seed, violation in sorted(summary.violations.items()):
        console.print(f"FAILED seed {seed}: {violation}\n  {REPLAY.format(seed=seed)} --shrink", style="red")


@app.command("seed")
def run_one_seed(
    seed: Annotated[int, typer.Argument(min=0, help="Which world")],
    only: Annotated[str, typer.Option(help="Ids of the only faults to try, separated by commas")] = "",
    make_small: Annotated[bool, typer.Option("--shrink", help="Leave out the faults that do not matter")] = False,
    last: Annotated[int, typer.Option(min=0, help="Events to print")] = 60,
) -> None:
    """Replay one seed alone and print its last events."""
    quiet()
    result: Result
    if make_small:
        result = shrink(seed, lambda left, runs: console.print(f"{left} faults left after {runs} worlds"))
        console.print(f"the faults that matter: {REPLAY.format(seed=seed)} --only {','.join(sorted(result.struck))}")
    else:
        result = run_seed(seed, only=frozenset(only.split(",")) if only else None, traced=True)
    for line in result.trace[-last:] if last else ():
        console.print(line, markup=False, highlight=False)
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(result.fired.items()))
    console.print(
        f"seed {seed}: {result.merges} merges in {result.virtual_s:.1f} virtual s, digest {result.digest}\n"
        f"faults: {faults or 'none'}"
    )
    if result.violation is not None:
        console.print(f"BROKEN: {result.violation}", style="red", markup=False)
        raise typer.Exit(1)


@app.command("twin")
def run_twin(
    first: Annotated[int, typer.Argument(metavar="SEED", min=0, help="Which world")],
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds, from this one on")] = 1,
) -> None:
    """Repeat what a world did to the bus in memory on a Redis of its own, which must answer and hold the same."""
    quiet()
    different = 0
    with EmbeddedRedis(dies_with_us=True) as server:
        for seed in range(first, first + seeds):
            recorded = record(seed)
            with asyncio.Runner(loop_factory=fast_loop) as runner:
                difference = runner.run(replay(recorded, server.url))
            different += difference is not None
            if difference is not None:
                console.print(str(difference), style="red", markup=False, highlight=False)
            else:
                console.print(f"seed {seed}: {len(recorded.events):,} events, the same on Redis")
    raise typer.Exit(1 if different else 0)


def main() -> None:
    """Entry point."""
    app(prog_name="python -m tests.world")


if __name__ == "__main__":
    main()
