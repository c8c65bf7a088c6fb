"""The cheap checks, which `diloco run` and `diloco syncer` make at their start without measuring anything.

They refuse nothing: a party that is restarted must serve even if the disk is full. Each finding is a warning at start.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from diloco.doctor import checks, measure
from diloco.doctor.facts import Folder
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.server import room
from diloco.pipeline.files.address import is_address
from diloco.pipeline.findings import Finding, warning
from diloco.pipeline.party_memory import CHECKPOINT_BYTES
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.settings import Settings, SyncerSettings, SyncSettings
from diloco.syncer.checkpoints.manifest import KEPT
from diloco.workers.trainer.models.sizes import SIZES


def _wrong(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def checkpoints_bytes(params: float, saved_bytes: float = 0.0) -> float:
    """Return the bytes still to be added: those of `KEPT` checkpoints and one being made, less `saved_bytes`."""
    return max(CHECKPOINT_BYTES * params, CHECKPOINT_BYTES * (KEPT + 1) * params - saved_bytes)


def look_at_folders(settings: Settings, names: Iterable[str]) -> Iterator[Folder]:
    """Try the places that are given by the settings of these names."""
    for name in names:
        if (place := getattr(settings, name)) is not None:
            yield measure.look_at_folder(name.replace("_", "-"), place)


def wrong_for_syncer(settings: SyncerSettings) -> list[Finding]:
    """Return the problems of a syncer on this machine that can be found before it knows its run.

    A store of objects is not tried here: the syncer tries it itself, in the background.
    """
    store = settings.checkpoint_dir is not None and is_address(settings.checkpoint_dir)
    names = ["tape_dir", "record_deltas"] if store else ["checkpoint_dir", "tape_dir", "record_deltas"]
    found = _wrong(map(checks.folder, look_at_folders(settings, names)))
    if settings.checkpoint_dir is None:
        remedy = "pass --checkpoint-dir; without it the run ends with its Redis, and diloco export has nothing to read"
        found.append(warning("checkpoints", "this syncer saves no checkpoints", remedy))
    return found


def wrong_for_run(
    settings: SyncSettings, model: str, out: Path, learners: int, processes: int, threads: int, info: BusInfo
) -> list[Finding]:
    """Return the problems of a run that is started on this machine.

    Args:
        settings: settings of the run.
        model: a size of the built-in model; the size of any other model is not known yet.
        out: the output folder.
        learners: number of learners of the run.
        processes: number of processes that train on this machine's CPU: learners, or their ranks.
        threads: threads of each process; one each is not checked, since there could not be fewer.
        info: what the run's Redis says about itself.
    """
    params = float(SIZES[model].parameters()) if model in SIZES else 0.0
    return _wrong(
        [
            *([checks.threads(usable_cores(), processes, threads, "as set")] if threads > 1 else ()),
            checks.folder(measure.look_at_folder("out", out), checkpoints_bytes(params)),
            room(info.maxmemory_bytes, params, settings.sync_spec(), learners),
        ]
    )
