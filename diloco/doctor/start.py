"""The cheap part, which `diloco run` and `diloco syncer` do at their start: nothing is measured, nothing is refused.

A party that is started again must serve, also beside a full disk: what is wrong here is said once, as a warning.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from diloco.doctor import checks, measure
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.server import room
from diloco.pipeline.files.address import is_address
from diloco.pipeline.findings import Finding
from diloco.pipeline.needs import CHECKPOINT_BYTES
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.settings import Settings, SyncerSettings, SyncSettings
from diloco.syncer.checkpoints.manifest import KEPT
from diloco.workers.trainer.models.sizes import SIZES


def _wrong(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def checkpoints_bytes(params: float) -> float:
    """Of those that are kept, and of one that is being made."""
    return CHECKPOINT_BYTES * (KEPT + 1) * params


def of_folders(settings: Settings, needed_bytes: Mapping[str, float]) -> Iterator[Finding]:
    """Those of these settings that name a folder; stores of objects say at their first use what is wrong."""
    for name, needed in needed_bytes.items():
        place = getattr(settings, name)
        if place is not None and not is_address(str(place)):
            yield checks.folder(measure.look_at_folder(name.replace("_", "-"), Path(place), needed))


def wrong_for_syncer(settings: SyncerSettings) -> list[Finding]:
    """What a syncer of this machine should be told of, before it knows its run."""
    return _wrong(of_folders(settings, {"checkpoint_dir": 0.0, "tape_dir": 0.0, "record_deltas": 0.0}))


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
        threads: of each.
        info: of its Redis.
    """
    params = float(SIZES[model].parameters()) if model in SIZES else 0.0
    return _wrong(
        [
            checks.threads(usable_cores(), processes, threads, "as set"),
            checks.folder(measure.look_at_folder("out", out, checkpoints_bytes(params))),
            room(info.maxmemory_bytes, params, settings.sync_spec(), learners),
        ]
    )
