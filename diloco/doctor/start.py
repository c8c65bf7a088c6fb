"""The cheap part, which `diloco run` and `diloco syncer` do at their start: nothing is measured, nothing is refused.

A party that is started again must serve, also beside a full disk: what is wrong here is said once, as a warning.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from diloco.doctor import checks, measure
from diloco.doctor.facts import Folder
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.server import room
from diloco.pipeline.files.address import is_address
from diloco.pipeline.findings import Finding
from diloco.pipeline.party_memory import CHECKPOINT_BYTES
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.settings import Settings, SyncerSettings, SyncSettings
from diloco.syncer.checkpoints.manifest import KEPT
from diloco.workers.trainer.models.sizes import SIZES


def _wrong(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def checkpoints_bytes(params: float, saved_bytes: float = 0.0) -> float:
    """What will be added: those that are kept, and one that is being made, without what the run has saved already."""
    return max(CHECKPOINT_BYTES * params, CHECKPOINT_BYTES * (KEPT + 1) * params - saved_bytes)


def look_at_folders(settings: Settings, names: Iterable[str]) -> Iterator[Folder]:
    """Those of these settings that name a folder or another place."""
    for name in names:
        if (place := getattr(settings, name)) is not None:
            yield measure.look_at_folder(name.replace("_", "-"), place)


def wrong_for_syncer(settings: SyncerSettings) -> list[Finding]:
    """What a syncer of this machine should be told of, before it knows its run.

    A store of objects is not asked: the syncer tries it itself, and does not wait for it.
    """
    store = settings.checkpoint_dir is not None and is_address(settings.checkpoint_dir)
    names = ["tape_dir", "record_deltas"] if store else ["checkpoint_dir", "tape_dir", "record_deltas"]
    return _wrong(map(checks.folder, look_at_folders(settings, names)))


def wrong_for_run(
    settings: SyncSettings, model: str, out: Path, learners: int, processes: int, threads: int, info: BusInfo
) -> list[Finding]:
    """What whoever starts a run on this machine should be told of.

    Args:
        settings: the run's.
        model: a size of the built-in model; of others the size is not known yet.
        out: the output folder.
        learners: of the run.
        processes: that train on this machine's CPU: learners, or their ranks.
        threads: of each; of one each nothing is said, since nobody could start them with fewer.
        info: of its Redis.
    """
    params = float(SIZES[model].parameters()) if model in SIZES else 0.0
    return _wrong(
        [
            *([checks.threads(usable_cores(), processes, threads, "as set")] if threads > 1 else ()),
            checks.folder(measure.look_at_folder("out", out), checkpoints_bytes(params)),
            room(info.maxmemory_bytes, params, settings.sync_spec(), learners),
        ]
    )
