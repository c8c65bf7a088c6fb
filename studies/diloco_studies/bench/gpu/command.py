"""`diloco bench gpu`: what needs a GPU, one piece after another."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.pipeline.errors import UsageError
from diloco.pipeline.units import parse_span
from diloco.workers.checks.gpus import count_gpus
from diloco_studies.bench.gpu.pieces import Piece, plan, said, summary, to_do
from diloco_studies.bench.gpu.running import LIMIT_S, SUMMARY_FILE, Result, device_name, do_all, read_results


def _seconds(text: str) -> float:
    return float(parse_span(text))


MEASURED, REHEARSED = Path("runs/gpu"), Path("runs/gpu-rehearsal")


def main(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help=f"Folder of results (default {MEASURED}, rehearsed {REHEARSED})"),
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run the same pieces at a small size on the CPU")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PIECE", help="Run this piece, even if it is done; repeat the option for more pieces"),
    ] = None,
    for_s: Annotated[
        float | None,
        typer.Option("--for", metavar="DURATION", parser=_seconds, help="Stop within this time, e.g. 9m"),
    ] = None,
) -> None:
    """All that needs a GPU, in pieces of at most nine minutes: experiments, a kill, speed, encoding, tests, ranks.

    Each piece's result is saved at once. After any interruption, the same command continues with the piece that was
    in progress; experiments keep each run. A piece that fails or takes too long is reported with the reason and its
    figures so far, and the next call does the rest. The exit status is 0 once all pieces have succeeded, except those
    that need something else; otherwise 1.

    Example: diloco bench gpu --out runs/gpu --for 9m
    """
    pieces, folder = plan(rehearse, 1 if rehearse else count_gpus()), out or (REHEARSED if rehearse else MEASURED)
    names = [piece.name for piece in pieces]
    if strange := [name for name in only or () if name not in names]:
        raise UsageError(f"--only {strange[0]}: use one of {', '.join(names)}")
    results = read_results(folder, pieces, rehearse)
    for piece in pieces:
        if piece.waits_for:
            typer.echo(f"{piece.name}: skipped, because it needs {piece.waits_for}")
    doing = [one for one in pieces if one.name in only and not one.waits_for] if only else to_do(pieces, results)
    device = "cpu" if rehearse else device_name() if doing else ""
    folder.mkdir(parents=True, exist_ok=True)
    typer.echo(
        f"{len(pieces)} pieces, {len(doing)} to do, at most {LIMIT_S / 60:.0f} minutes each; results in {folder}"
    )
    results = do_all(pieces, doing, folder, device, results, _hear, for_s)
    typer.echo("\n" + summary(pieces, results, rehearse) + f"\nAlso in {folder / SUMMARY_FILE}.")
    raise typer.Exit(1 if to_do(pieces, results) else 0)


def _hear(piece: Piece, result: Result | None) -> None:
    if result is None:
        typer.echo(f"{piece.name}: {piece.about} ...")
    else:
        typer.echo(f"{piece.name}: {said(result)} ({result['seconds']:.0f} s)")
