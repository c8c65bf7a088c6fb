"""`diloco tape --replay`: repeat the merges of a recorded run, compare them, and print the result."""

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.tape import Committed, TapeRecord
from diloco.pipeline.process.cores import one_blas_thread
from diloco.pipeline.settings import BusSettings
from diloco.pipeline.units import as_bytes
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.replay.recording import list_recording
from diloco.syncer.replay.replay import Replayed, replay
from diloco.tape import archive_of, read_archive, records_of


def check(settings: BusSettings, recording: Path, folder: Path | None, as_json: bool) -> int:
    """Replay `recording`, print the result, and return the exit status: 1 if anything differs.

    Args:
        settings: name the run and its Redis, for a tape that is in no folder.
        recording: folder of --record-deltas.
        folder: folder of the tape; by default the one that holds the recording.
        as_json: print one JSON object instead of text.

    Raises:
        UsageError: there is no recording or no tape, or the run's checkpoint is damaged.
        BadMessage: the tape or the recording's spec is damaged.
    """
    one_blas_thread()  # a live run on this machine needs the other cores
    # Read before the tape, to which a live run adds merges meanwhile: so the tape has every merge that is listed here.
    saved, before = _saved(folder, recording.absolute().parent), list_recording(recording)
    commits = [record for record in _tape(settings, recording, folder) if isinstance(record, Committed)]
    columns = TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TextColumn("merges"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(bool(commit.contributions) for commit in commits))
        outcome = replay(recording, commits, lambda merges: bar.advance(task, merges), saved, before)
    if outcome.merges == 0:
        raise UsageError("the tape has no merges, so there is nothing to replay")
    typer.echo(_as_json(outcome) if as_json else _as_text(outcome))
    return 1 if outcome.differences else 0


def _tape(settings: BusSettings, recording: Path, folder: Path | None) -> list[TapeRecord]:
    """Return the archived tape of `folder` or of the folder around the recording, else the tape that `locate` finds."""
    if folder is None and settings.redis_url is None and any((recording.absolute().parent / "tape").glob("*.msgpack")):
        folder = recording.absolute().parent
    if folder is not None and (archive := archive_of(folder)) is not None:
        return read_archive(archive)
    return records_of(settings, folder)


def _saved(*folders: Path | None) -> list[tuple[int, int, bytes]]:
    """Return (fragment, version, digest) of the newest checkpoint in the first folder that has one, or nothing."""
    for folder in folders:
        if folder is not None and any((folder / "checkpoints").glob("**/latest")):
            fragments = load_checkpoint(folder / "checkpoints").fragments
            return [(p, fragment.version, fragment.digest) for p, fragment in enumerate(fragments)]
    return []


def _as_text(outcome: Replayed) -> str:
    lines = [f"differs: {difference}" for difference in outcome.differences]
    made = f"{outcome.repeated} of {outcome.merges} merges of {outcome.fragments} fragments recomputed"
    read = f"from {as_bytes(outcome.read_bytes)}"
    reductions = f"the largest relative difference of a reduction is {outcome.largest:.2g}"
    unused = f"; {outcome.unused} recorded merges are not on the tape" if outcome.unused else ""
    if lines:
        return "\n".join([*lines, f"{len(lines)} differences; {made} {read}; {reductions}{unused}"])
    return f"all equal: {made} {read}, bit for bit; {reductions}{unused}"


def _as_json(outcome: Replayed) -> str:
    return dumps(
        {
            "merges": outcome.merges,
            "made_again": outcome.repeated,
            "fragments": outcome.fragments,
            "read_bytes": outcome.read_bytes,
            "largest_relative_difference": outcome.largest,
            "not_on_tape": outcome.unused,
            "differences": [difference._asdict() for difference in outcome.differences],
        }
    )
