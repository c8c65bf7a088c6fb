"""A run's output folder: choose it, make it, guard it against overwriting, and write the launcher's files.

settings.toml     what the run was started with (no secrets); every child reads it
run.json          while it is live: where its Redis and its page are, and the pids
logs/<name>.log   one per process; launcher.log has what the launcher prints after its terminal or pipe is gone
checkpoints/      syncer/checkpoints/manifest.py
tape/             the event tape's archive
learners/<name>/  what each learner saves for its own restart (workers/moments/state_folder.py)
<name>/           all merged deltas, with --record-deltas <name>
report.json  loss.png  sample.txt   at the end
"""

import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w
from pydantic import SecretStr

from diloco.launcher.locate import REPORT_FILE, RUN_FILE, RUNS, RunFile, is_running, without_secrets
from diloco.launcher.page import MODEL_FILE, PAGE_FILE
from diloco.launcher.report import Origin
from diloco.options import CHOSEN_BY_LAUNCHER, RunProcess
from diloco.pipeline.agreement import agree
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.address import is_address
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.files.writable import denied, error_text, try_folder
from diloco.pipeline.methods import RunMethod, matching_method
from diloco.pipeline.settings import NO_FLAG, PARTIES, SyncSettings, TrainerSettings
from diloco.pipeline.tls import OPTIONS
from diloco.pipeline.view.ledger import in_whole_tokens
from diloco.pipeline.view.page.join_command import LearnerLaunch
from diloco.syncer.checkpoints.loading import (
    Checkpoint,
    find_checkpoint,
    known_elements,
    load_checkpoint,
    newest_of_run,
)
from diloco.syncer.checkpoints.places import Folder as OnDisk
from diloco.syncer.checkpoints.places import place_of
from diloco.workers.trainer.models.hf_config import is_same_model

SETTINGS_FILE = "settings.toml"
PICTURE_FILE = "loss.png"
SAMPLE_FILE = "sample.txt"

# The children of a launcher that was killed end by themselves within this time.
ORPHANS_S = 20.0
_BY_CHILD = {"threads", "device", "resume", "overwrite", "record_deltas", "redis_url"}
# Settings that are not in the file: they differ from child to child, are part of the URL in a child's environment, or,
# like the method, are only a preset for other settings that are in the file.
GIVEN_BY_FLAG = CHOSEN_BY_LAUNCHER | NO_FLAG | {*_BY_CHILD, *OPTIONS, "method"}


class Folder:
    """An output folder: its paths, and the files that the launcher writes in it."""

    def __init__(self, path: Path) -> None:
        """Name the paths; nothing is read or made."""
        self.path = path
        self.settings = path / SETTINGS_FILE  # the settings that the children read
        self.logs = path / "logs"
        self.launcher_log = self.logs / "launcher.log"  # what the launcher prints after its terminal or pipe is gone
        self.checkpoints = path / "checkpoints"
        self.tape = path / "tape"
        self.learners = path / "learners"  # the state that each learner saves for its own restart
        self.report = path / REPORT_FILE

    def recording(self, asked: Path) -> Path:
        """Return the folder of --record-deltas: a bare name means a folder in this one."""
        return self.path / asked if len(asked.parts) == 1 else asked

    def identity(self) -> tuple[int, int] | None:
        """Return (device, inode), which the folder keeps if it is moved; None if there is no folder."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def make(self, settings: RunProcess, url: str | None = None) -> None:
        """Make the folder with settings and run.json; other contents, if `choose` has accepted them, are deleted.

        A run that continues in its own folder keeps its checkpoints, tape, logs and moments; the results of its earlier
        part are kept under other names.

        Raises:
            UsageError: the folder cannot be made, or another run has begun in it meanwhile.
        """
        _check_ended(self.path)
        try:
            if (saved := goes_on(settings, self.path)) or _has_no_checkpoint(self.path, settings):
                self._keep_results(saved)
            elif (settings.overwrite and self.path.exists()) or _never_stepped(self.path):
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_settings(settings)
            self.write_run(url, settings, {})
            elsewhere = settings.resume is not None and not goes_on(settings, self.path)
            if elsewhere and settings.resume is not None and not is_address(settings.resume):
                self._take_moments(output_of(Path(settings.resume)).learners)
        except OSError as error:
            raise UsageError(f"cannot make the output folder {self.path}: {error_text(error)}") from error

    def _keep_results(self, saved: bool) -> None:
        """Rename report.json to report-1.json and so on; if no checkpoint was saved, the tape and learners too."""
        there = [self.path / name for name in (REPORT_FILE, PICTURE_FILE, SAMPLE_FILE, PAGE_FILE, MODEL_FILE)]
        there += [] if saved else [self.tape, self.learners]
        part = 1
        while any(file.with_stem(f"{file.stem}-{part}").exists() for file in there):
            part += 1
        for file in there:
            if file.exists():
                file.replace(file.with_stem(f"{file.stem}-{part}"))

    def _take_moments(self, earlier: Path) -> None:
        """Give learners the state that those of the resumed run have saved, if it lies next to its checkpoints."""
        if earlier.is_dir():
            ignored = shutil.ignore_patterns("losses.jsonl", ".*")
            shutil.copytree(earlier, self.learners, ignore=ignored, copy_function=_link)

    def write_settings(self, settings: RunProcess) -> None:
        """Write the file that the children read."""
        self.settings.write_text(to_toml(settings), "utf-8")

    def write_run(
        self,
        url: str | None,
        settings: RunProcess,
        pids: dict[str, int],
        page: str | None = None,
        own: Mapping[str, LearnerLaunch] = MappingProxyType({}),
    ) -> None:
        """Write run.json, which says where the live run is.

        Args:
            url: URL of its Redis; secrets in it are not written.
            settings: settings of the run.
            pids: process ids by name.
            page: address of its page, which has no token in it.
            own: by learner: how it was started.
        """
        fields = {
            "redis_url": None if url is None else without_secrets(url),
            "run": settings.run,
            "method": settings.method,
            "budget_tokens": settings.tokens,
            "page": page,
            "own": {name: asdict(one) for name, one in own.items()},
            "pids": {"launcher": os.getpid(), **pids},
        }
        self._put_run(fields)

    def mark_closing(self) -> None:
        """Note in run.json that the report is being written, for commands that find no Redis from now on."""
        self._add_to_run(closing=True, page=None)

    def mark_ended(self, how: str) -> None:
        """Note in run.json how the run has ended without a report."""
        self._add_to_run(ended=how)

    def _add_to_run(self, **more: Any) -> None:
        with suppress(OSError, UsageError):  # the folder was moved or deleted, so no command will read the file here
            self._put_run(read_object(self.path / RUN_FILE) | more)

    def _put_run(self, fields: dict[str, Any]) -> None:
        temporary = self.path / f".{RUN_FILE}"  # replaced in one step, since other commands may read it at any time
        temporary.write_text(dumps(fields, indent=1) + "\n")
        temporary.replace(self.path / RUN_FILE)


def _link(file: str, target: str) -> None:
    """Make a hard link, which is safe since these files are only ever replaced; copy to another disk."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)


def output_of(checkpoint: Path) -> Folder:
    """Return OUT for a checkpoint at OUT/checkpoints/RUN/CHECKPOINT; it need not be an output folder."""
    return Folder(checkpoint.parent.parent.parent)


def choose(settings: RunProcess) -> Folder:
    """Return the output folder after checking it; nothing is made or deleted yet.

    Raises:
        UsageError: it is in use and `overwrite` was not given, is not the folder of a run, or its run is alive; or it,
            the report or the recording could not be written.
    """
    path = settings.out or RUNS / time.strftime("%Y%m%d-%H%M%S")
    if path.is_dir() and any(path.iterdir()):
        kept = goes_on(settings, path) or _has_no_checkpoint(path, settings)
        if not (path / SETTINGS_FILE).is_file():
            raise UsageError(
                f"output folder {path} holds something other than a run, which even --overwrite does not delete: "
                "choose a different --out"
            )
        if not (settings.overwrite or _never_stepped(path) or kept):
            raise UsageError(
                f"output folder {path} is not empty, and does not have a run's checkpoint to continue from: choose a "
                "different --out, or pass --overwrite to empty it"
            )
        if settings.overwrite and settings.resume is not None and _checkpoint_is_in(settings.resume, path):
            raise UsageError(
                f"the checkpoint to resume is in {path}, and --overwrite would delete it: choose a different --out"
            )
        _check_ended(path)
    folder = Folder(path)
    try:
        try_folder(path, SETTINGS_FILE)
        try_folder(folder.logs, *(one.name for one in folder.logs.glob("*.log")))
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error_text(error)}") from error
    if settings.json_report is not None:
        if settings.json_report.is_dir():
            raise UsageError(f"--json-report {settings.json_report} is a folder: give a file name")
        _check_writable(settings.json_report, "--json-report")
    if settings.record_deltas is not None:
        _check_recording(folder, folder.recording(settings.record_deltas))
    return folder


def _never_stepped(path: Path) -> bool:
    """Return whether the folder has only settings and logs, of a run that ended before its first step."""
    if not (path / SETTINGS_FILE).is_file():
        return False
    left = {SETTINGS_FILE, RUN_FILE, f".{RUN_FILE}", MODEL_FILE}
    return all(one.is_dir() or one.name in left or one.is_relative_to(Folder(path).logs) for one in path.rglob("*"))


def _has_no_checkpoint(path: Path, settings: RunProcess) -> bool:
    """Return whether a run was killed here before its first checkpoint, so that it must start from scratch."""
    folder = Folder(path)
    ours = {SETTINGS_FILE, RUN_FILE, f".{RUN_FILE}", MODEL_FILE, "logs", "checkpoints", "tape", "learners"}
    if settings.overwrite or _never_stepped(path) or not folder.settings.is_file():
        return False
    names = {re.sub(r"-[0-9]+$", "", one.stem) + one.suffix for one in path.iterdir()}
    return names <= ours and not any(folder.checkpoints.rglob("latest"))


def goes_on(settings: RunProcess, path: Path) -> bool:
    """Return whether the resumed run is this folder's, and so continues in it."""
    return (
        not settings.overwrite
        and settings.resume is not None
        and path.is_dir()
        and _checkpoint_is_in(settings.resume, path)
    )


def own_checkpoint(settings: RunProcess) -> Checkpoint | None:
    """Return the newest checkpoint in --out, from which a repeated command continues; None if there is none.

    Raises:
        UsageError: the run in --out is alive, or its checkpoint is damaged.
    """
    if settings.out is None or settings.overwrite or not (settings.out / SETTINGS_FILE).is_file():
        return None
    saved = newest_of_run(place_of(Folder(settings.out).checkpoints), settings.run)
    if saved is not None:
        _check_ended(settings.out)
    return saved


def _checkpoint_is_in(resumed: str, path: Path) -> bool:
    found = find_checkpoint(resumed)
    return isinstance(found, OnDisk) and found.path.resolve().is_relative_to(path.resolve())


def _check_recording(folder: Folder, recording: Path) -> None:
    inside = recording.resolve().is_relative_to(folder.path.resolve())  # empty, or about to be emptied
    if inside:
        files = (SETTINGS_FILE, RUN_FILE, f".{RUN_FILE}", REPORT_FILE, PICTURE_FILE, SAMPLE_FILE)
        own = {folder.logs.name, folder.checkpoints.name, folder.tape.name, folder.learners.name, *files}
        below = recording.resolve().relative_to(folder.path.resolve()).parts
        if not below or below[0] in own:
            raise UsageError(
                f"--record-deltas {recording}: choose a different name, since the run uses this one itself"
            )
    if not inside and recording.is_dir() and any(recording.iterdir()):
        raise UsageError(f"--record-deltas {recording} is not empty: choose another folder")
    _check_writable(recording / SETTINGS_FILE, "--record-deltas")


def _check_ended(path: Path) -> None:
    """Refuse the folder of a run that has a live process; orphans get `ORPHANS_S` to end."""
    if (path / REPORT_FILE).is_file() or not (path / RUN_FILE).is_file():
        return
    pids = RunFile.read(path).pids
    until = time.monotonic() + ORPHANS_S
    while alive := [name for name, pid in pids.items() if is_running(pid)]:
        if "launcher" in alive or time.monotonic() > until:
            told = ", ".join(f"{name} is process {pids[name]}" for name in alive)
            raise UsageError(f"the run in {path} is alive ({told}): stop it first, or choose a different --out")
        time.sleep(0.1)


def _check_writable(path: Path, flag: str) -> None:
    """Refuse a path that cannot be made or written, without making it there."""
    try:
        if not path.exists():
            try_folder(path.parent)
        elif not os.access(path, os.W_OK):
            raise denied(path)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error_text(error)}") from error


def resume(settings: RunProcess) -> tuple[RunProcess, Origin | None]:
    """Complete the settings from the checkpoint to resume, and return them with the totals that the run begins with.

    Settings that were not given, the method included, get the values of the checkpoint's run. So this must come before
    the method's preset, after which given and preset values cannot be told apart.

    Raises:
        UsageError: there is no sound checkpoint, or its budget is used up.
        SpecMismatch: a given setting contradicts the checkpoint's run.
    """
    if settings.resume is None:
        return settings, None
    checkpoint = load_checkpoint(settings.resume)
    trained = checkpoint.state.tokens
    told = settings.model_fields_set
    method = method_of(checkpoint)
    settings = agree(settings, {"method": method}, SyncSettings)
    sync = checkpoint.spec.sync.model_dump() | ({"tokens": settings.tokens} if "tokens" in told else {})
    moved = "model" in told and is_same_model(settings.model, checkpoint.spec.trainer.get("model"))
    kept = ({"data", "model"} if moved else {"data"}) & told
    trainer = {name: value for name, value in checkpoint.spec.trainer.items() if name not in kept}
    settings = agree(agree(settings, sync, SyncSettings), trainer, TrainerSettings)
    own = settings.out is not None and goes_on(settings, settings.out)
    if settings.tokens <= checkpoint.state.counted_tokens and not own:
        raise UsageError(
            f"the checkpoint {checkpoint.folder} is at {trained} tokens, but the budget is {settings.tokens}: pass a "
            "larger --tokens, which includes the earlier part"
        )
    known = in_whole_tokens(known_elements(checkpoint), checkpoint.layout.elements, trained)
    origin = Origin(str(checkpoint.folder), trained, *known)
    return settings.model_copy(update={"resume": str(checkpoint.folder)}), origin


def method_of(checkpoint: Checkpoint) -> RunMethod:
    """Return the method of a checkpoint's run: that in its output folder, else the method that its settings match."""
    folder = output_of(checkpoint.folder.path).path if isinstance(checkpoint.folder, OnDisk) else None
    recorded = RunFile.read(folder).method if folder and (folder / RUN_FILE).is_file() else None
    return recorded or matching_method(
        checkpoint.spec.sync.model_dump(), len({t.name for t in checkpoint.spec.tensors})
    )


def plain(settings: RunProcess) -> dict[str, Any]:
    """Return all settings as values that JSON can hold, without secrets."""
    values: dict[str, Any] = {}
    for name, value in settings:
        if isinstance(value, SecretStr):
            value = without_secrets(value.get_secret_value()) if name == "redis_url" else "***"
        values[name] = str(value) if isinstance(value, Path) else value
    return values


def to_toml(settings: RunProcess) -> str:
    """Return the settings that all children share, as flat TOML; those that are None are left out."""
    names = [name for name in RunProcess.model_fields if name in PARTIES - GIVEN_BY_FLAG]
    values = plain(settings)
    return tomli_w.dumps({name: values[name] for name in names if values[name] is not None})
