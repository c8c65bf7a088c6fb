"""`diloco tape`: read a run's event tape, the archive in its output folder or the live one on Redis, and replay it."""

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgpack
import structlog
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diloco.launcher.display import say
from diloco.launcher.locate import is_live, locate
from diloco.options import AsJson, ViewSettings, takes
from diloco.pipeline.bus.ports import START, Bus
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BadMessage, UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.fragment import Committed, Rejected, Rewound, TapeRecord
from diloco.pipeline.messages.run import moment
from diloco.pipeline.messages.wire import Message
from diloco.pipeline.payload.codec import decode_tape
from diloco.pipeline.process.cores import one_blas_thread
from diloco.pipeline.units import as_bytes
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.replay.recording import list_recording
from diloco.syncer.replay.replay import Replayed, replay
from diloco.workers.exchange.redis_access import read_run

# Name of a field that each record has once, so that its count in the rest of a file is the number of records there.
_KIND: bytes = msgpack.packb("kind")
_OTHERS = "; move it away to read the other files: another syncer's file may hold the same records"

TapeFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        help="Output folder of `diloco run`, finished or not, or a syncer's --tape-dir (default: the newest in runs/)",
    ),
]
Recording = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="RECORDING",
        help="Recompute every merge from this folder of --record-deltas and compare; exit status 1 if any differs. "
        "The tape is read from the parent folder of RECORDING, or from DIR: an output folder or a --tape-dir",
    ),
]


def read_archive(folder: Path) -> list[TapeRecord]:
    """Return the records of an archived tape (`*.msgpack`, one file per fragment group and writer), each record once.

    Records are ordered by time, but those of one group always keep the order of their tape, because the clocks of
    several syncers may differ. A record cut short at the end of a file is left out: its writer was killed while writing
    it. A warning is logged if the folder has records of several runs, such as one that started from scratch on an empty
    Redis.

    Raises:
        BadMessage: a record is damaged.
    """
    tapes = [list(_records(file)) for file in sorted(folder.glob("*.msgpack"))]
    # Each syncer archives the tape that it finds at its start and all that follows, so the earliest file has the most.
    found = _in_order(sorted(filter(None, tapes), key=lambda tape: tape[0].unix_s))
    began = {record.began_unix_s for record in found if isinstance(record, Committed) and record.began_unix_s}
    if len(began) > 1:
        detail = (
            "several runs of the same name used this folder: give each its own --tape-dir to keep their records apart"
        )
        structlog.get_logger().warning("tape_of_several_runs", began=list(map(moment, sorted(began))), detail=detail)
    return found


def _in_order(tapes: Iterable[Sequence[TapeRecord]]) -> list[TapeRecord]:
    """Return each record once, by time, keeping the order within each tape: clocks differ, and may be set back."""
    found: dict[TapeRecord, float] = {}
    for tape in tapes:
        now_s = -math.inf
        for record in tape:
            now_s = max(now_s, found.setdefault(record, max(now_s, record.unix_s)))
    return sorted(found, key=found.__getitem__)


def _records(file: Path) -> Iterator[TapeRecord]:
    data = file.read_bytes()
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), max_bin_len=Message.max_bytes)
    unpacker.feed(data)
    start = 0
    while True:
        try:
            unpacker.skip()
        except msgpack.OutOfData:
            if (
                data.count(_KIND, start) > 1
            ):  # more records follow, so this is damage and not the cut of a killed writer
                raise BadMessage(f"{file}: the record at byte {start} is damaged{_OTHERS}") from None
            return
        except (ValueError, msgpack.UnpackException) as error:
            raise BadMessage(f"{file}: not msgpack at byte {start}: {error}{_OTHERS}") from error
        try:
            yield decode_tape(data[start : unpacker.tell()])
        except BadMessage as error:
            raise BadMessage(f"{file}: the record at byte {start} is damaged: {error}{_OTHERS}") from error
        start = unpacker.tell()


async def read_live(bus: Bus) -> list[TapeRecord]:
    """Return the records that are on the bus now, in the order of `read_archive`."""
    if (spec := await read_run(bus)) is None:
        return []
    cursors = dict.fromkeys(range(spec.sync.groups), START)
    tapes: dict[int, list[TapeRecord]] = {}
    while entries := await bus.read_tape(cursors):
        for entry in entries:
            cursors[entry.group] = entry.entry_id
            tapes.setdefault(entry.group, []).append(entry.record)
    return _in_order(tapes.values())


async def read_whole(bus: Bus, archive: Path | None) -> list[TapeRecord]:
    """Return the records of an archive, followed by those that are only on the bus; see `read_archive` for errors."""
    records = [] if archive is None else read_archive(archive)
    known = set(records)
    return records + [record for record in await read_live(bus) if record not in known]


def as_json(record: TapeRecord) -> str:
    """Return a record as one line of JSON, with digests in hex."""
    fields = record.model_dump()
    hexed = {name: value.hex() for name, value in fields.items() if isinstance(value, bytes)}
    return dumps(fields | hexed)


def as_text(record: TapeRecord, start_unix_s: float) -> str:
    """Return a record as one readable line, with its time since the first record."""
    head = f"{record.unix_s - start_unix_s:9.2f} s  fragment {record.fragment:<3} "
    match record:
        case Committed():
            parts = ", ".join(
                f"{c.learner} {c.tokens} tokens in {c.steps} steps ({c.weight:.2f}"
                f"{'' if c.cosine is None else f', cosine {c.cosine:.2f}'}{', rebased' if c.rebased else ''}"
                f"{f', cut to {c.factor:.2f} of its length' if c.factor < 1 else ''})"
                for c in record.contributions
            )
            times = f"quorum {record.quorum_s:.2f} grace {record.grace_s:.2f} upload {record.upload_s:.2f} s"
            rate, rho = (f"{one:.2f}" if one is not None else "-" for one in (record.outer_rate, record.rho))
            step = "-" if record.step_norm is None else f"{record.step_norm:.3g}"
            outer = f"delta {record.norm:.3g} step {step} rate {rate} rho {rho}"
            what = f"{parts or record.reason}; {times}; {outer}; {record.reason}"
            return f"{head}merged to version {record.version}: {what}"
        case Rejected():
            what = f"a delta of {record.learner or 'unknown'} on version {record.base_version}"
            lost = f"{record.lost_tokens} tokens of this fragment lost"
            return f"{head}rejected {what}: {record.reason}, {lost}; {record.detail}"
        case Rewound():
            return f"{head}rewound from version {record.was_version} to {record.version}"
    return f"{head}window on version {record.version}, attempt {record.attempt}: {record.reason}"


async def _with_redis(url: str, run: str, archive: Path | None) -> list[TapeRecord]:
    async with open_bus(url, run) as bus:
        return await read_whole(bus, archive)


def archive_of(folder: Path) -> Path | None:
    """Return the folder of the tape's files: `tape` in an output folder, or a --tape-dir itself; None without any."""
    return next((place for place in (folder / "tape", folder) if any(place.glob("*.msgpack"))), None)


def records_of(settings: ViewSettings, folder: Path | None) -> list[TapeRecord]:
    """Return the tape in `folder`, a --tape-dir or a run's output folder, or else of the run that `locate` finds.

    The tape of a live run is its archive, followed by the records that are only on the bus yet.

    Raises:
        UsageError: there is no such run, or nothing was recorded.
    """
    if folder is not None and not is_live(folder):
        archive = archive_of(folder)
        if archive is None:
            raise UsageError(
                f"{folder} does not hold a tape (*.msgpack): give an output folder of `diloco run`, or a syncer's "
                "--tape-dir"
            )
        if found := read_archive(archive):
            return found
        raise UsageError(f"{archive}: the tape is empty")
    place = locate(settings, folder)
    tape = None if place.folder is None else place.folder / "tape"
    records: list[TapeRecord] = []
    if place.redis_url is not None:
        records = asyncio.run(_with_redis(place.redis_url, place.run, tape))
    elif tape is not None:
        records = read_archive(tape)
    if not records:
        raise UsageError(f"{place}: the tape is empty")
    return records


@takes(ViewSettings)
def command(
    settings: ViewSettings, folder: TapeFolder = None, json_lines: AsJson = False, recording: Recording = None
) -> None:
    """Print a run's event tape: merges with their contributions, refusals with their reasons, windows.

    With --replay, repeat all its merges from the deltas that --record-deltas kept, and compare.
    """
    if recording is not None:
        raise typer.Exit(check_replay(settings, recording, folder, json_lines))
    records = records_of(settings, folder)
    if json_lines:
        for record in records:
            typer.echo(as_json(record))
    else:
        say("\n".join(as_text(record, records[0].unix_s) for record in records))


# --- replay ---------------------------------------------------------------------------------------------


def check_replay(settings: ViewSettings, recording: Path, folder: Path | None, json_object: bool) -> int:
    """Replay `recording`, print the result, and return the exit status: 1 if anything differs.

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
    typer.echo(_outcome_as_json(outcome) if json_object else _outcome_as_text(outcome))
    return 1 if outcome.differences else 0


def _tape(settings: ViewSettings, recording: Path, folder: Path | None) -> list[TapeRecord]:
    """Return the archived tape of `folder` or of the folder around the recording, else the tape that `locate` finds."""
    if (
        folder is None
        and "run" not in settings.model_fields_set
        and any((recording.absolute().parent / "tape").glob("*.msgpack"))
    ):
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


def _outcome_as_text(outcome: Replayed) -> str:
    lines = [f"differs: {difference}" for difference in outcome.differences]
    made = f"{outcome.repeated} of {outcome.merges} merges of {outcome.fragments} fragments recomputed"
    read = f"from {as_bytes(outcome.read_bytes)}"
    reductions = f"the largest relative difference of a reduction is {outcome.largest:.2g}"
    unused = f"; {outcome.unused} recorded merges are not on the tape" if outcome.unused else ""
    if lines:
        return "\n".join([*lines, f"{len(lines)} differences; {made} {read}; {reductions}{unused}"])
    return f"all equal: {made} {read}, bit for bit; {reductions}{unused}"


def _outcome_as_json(outcome: Replayed) -> str:
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
