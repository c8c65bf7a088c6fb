"""A disk that is full ends nothing: it is said, what was there stays, and all goes on by itself. On a tiny tmpfs."""

import asyncio
import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import structlog

from diloco import cli
from diloco.export import export
from diloco.launcher.finish import SAVE_AGAIN_S, conclude, save_again
from diloco.launcher.folder import Folder
from diloco.launcher.page import left_in
from diloco.launcher.report import build
from diloco.launcher.run import Launcher
from diloco.options import RunProcess
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import DilocoError, PeerError, UsageError
from diloco.pipeline.files.replacing import replace as replace_file
from diloco.pipeline.files.replacing import write_named
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.settings import HttpSettings
from diloco.pipeline.view.page.join_command import RedisRoute
from diloco.tape import read_archive
from diloco.workers.moments.state_folder import StateFolder
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import HANGING_S, samples
from tests.diloco.test_observers import SANE, outcome
from tests.diloco.test_run import FakeChild, FakeChildren, FakeScreen
from tests.syncer.test_checkpoint import file_of, folder_of, save
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec


@contextmanager
def disk_of(tmp_path: Path, size: str) -> Iterator[Path]:
    """A file system of that size."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system asks for root")
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["/bin/mount", "-t", "tmpfs", "-o", f"size={size}", "test", str(folder)]
    mounted = subprocess.run(options, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    yield folder
    subprocess.run(["/bin/umount", "-l", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    with disk_of(tmp_path, "1m") as folder:
        yield folder


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1024)):
                pass
        except OSError:
            pass


def names_in(disk: Path) -> list[str]:
    return [path.name for path in disk.iterdir()]


def empty(disk: Path) -> None:
    (disk / "filler").unlink()


@pytest.fixture
def told() -> Iterator[list[dict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def count(told: list[dict], event: str) -> int:
    return sum(line["event"] == event for line in told)


async def begun(**settings: Any) -> tuple[VirtualRun, list[VirtualLearner]]:
    """A run of two learners, at version 3, whose syncer was told so."""
    world = VirtualRun(sync_spec(tokens=10**9), **settings)
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(3)
    return world, learners


@in_virtual_time
async def test_checkpoints_that_find_no_room_are_said_and_tried_again_while_merging_goes_on(disk: Path, told) -> None:
    """The one before stays, the status shows it, and the next one that finds room ends the warning."""
    world, learners = await begun(checkpoint_dir=disk / "checkpoints", checkpoint_every=5.0)
    await asyncio.sleep(6.0)
    before = folder_of(disk / "checkpoints")
    fill(disk)
    versions = await world.versions()
    await asyncio.sleep(21.0)
    assert count(told, "checkpoint_failed") >= 4
    assert any("could not be saved" in warning for warning in (await world.service.status())["warnings"])
    assert all(now > was + 20 for now, was in zip(await world.versions(), versions, strict=True))
    assert folder_of(disk / "checkpoints") == before
    empty(disk)
    await asyncio.sleep(6.0)
    assert folder_of(disk / "checkpoints") != before
    assert (await world.service.status())["warnings"] == []
    assert len(list((disk / "checkpoints").iterdir())) <= 4, "nothing half is left"
    await world.stop_syncer()
    assert world.service.in_order
    await end(*learners)


@in_virtual_time
async def test_a_syncer_that_stops_with_a_full_disk_says_that_its_last_checkpoint_is_missing(disk: Path, told) -> None:
    """It ends, with an error."""
    world, learners = await begun(checkpoint_dir=disk / "checkpoints")
    fill(disk)
    await world.stop_syncer()
    assert not world.service.in_order
    assert count(told, "checkpoint_failed") == 1
    await end(*learners)


@in_virtual_time
async def test_the_archive_of_a_full_disk_has_every_record_once_there_is_room(disk: Path, told) -> None:
    """No record is lost, none is there twice, and none is cut in two."""
    world, learners = await begun(tape_dir=disk / "tape")
    fill(disk)
    await asyncio.sleep(60.0)  # more than the file's last page has room for
    assert count(told, "tape_not_archived") >= 1
    assert any("cannot be archived" in warning for warning in (await world.service.status())["warnings"])
    empty(disk)
    await asyncio.sleep(3.0)
    assert (await world.service.status())["warnings"] == []
    await end(*learners)
    await asyncio.sleep(2.0)
    tape = await world.tape()
    (file,) = (disk / "tape").iterdir()
    data = file.read_bytes()
    assert data[: len(b"".join(map(encode, tape)))] == b"".join(map(encode, tape))
    assert any(isinstance(record, Committed) for record in tape)


@in_virtual_time
async def test_an_archive_that_is_deleted_is_written_again_from_what_the_tape_has(tmp_path: Path, told) -> None:
    """Or moved, or put back as it was; while the run goes on, or as it ends. It is said."""
    world, learners = await begun(tape_dir=tmp_path / "tape")

    def put_back(folder: Path) -> None:
        shutil.copytree(folder, tmp_path / "earlier")
        shutil.rmtree(folder)
        (tmp_path / "earlier").rename(folder)

    for times, remove in enumerate((shutil.rmtree, lambda folder: folder.rename(tmp_path / "moved"), put_back), 1):
        await world.until_version(3 * times)
        remove(tmp_path / "tape")
        await world.until_version(3 * times + 3)
        await asyncio.sleep(3.0)
        assert count(told, "tape_archive_gone") == times
        assert read_archive(tmp_path / "tape")[:50] == (await world.tape())[:50]
    await end(*learners)
    await asyncio.sleep(2.0)
    shutil.rmtree(tmp_path / "tape")
    await world.stop_syncer()
    assert world.service.in_order
    tape = await world.tape()
    assert read_archive(tmp_path / "tape") == tape
    assert any(isinstance(record, Committed) for record in tape)


@in_virtual_time
async def test_a_recording_with_gaps_is_shown_and_merging_goes_on(disk: Path, told) -> None:
    """Log and status say where it has the last gap."""
    world, learners = await begun(record_deltas=disk / "deltas")
    fill(disk)
    await world.until_version(9)
    assert count(told, "recording_failed") == 1
    assert any("the recording has gaps" in warning for warning in (await world.service.status())["warnings"])
    await end(*learners)


def test_losses_of_a_learner_whose_disk_was_full_are_whole_lines(disk: Path) -> None:
    """What found no room is missing, and nothing is glued together."""
    folder = StateFolder(disk / "state", layout_of(samples.spec().tensors))
    folder.append_losses(lambda: ["first"])
    while folder.busy:
        pass
    fill(disk)
    folder.append_losses(lambda: ["x" * 10_000])
    while folder.busy:
        pass
    empty(disk)
    folder.append_losses(lambda: ["last"])
    folder.close(10.0)
    assert (disk / "state" / "losses.jsonl").read_text() == "first\nlast\n"


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    """And nothing is left of what was written before the damage was met."""
    (path,) = save(tmp_path / "run")
    file_of(path, 1).unlink()
    with pytest.raises(UsageError, match=r"fragment-0001-.*\.safetensors is missing"):
        export(tmp_path / "run", tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_an_export_to_a_full_disk_is_refused_in_words(disk: Path, tmp_path: Path) -> None:
    """No traceback, and no half file."""
    save(tmp_path / "run")
    fill(disk)
    with pytest.raises(UsageError, match="cannot write"):
        export(tmp_path / "run", disk / "model.safetensors")
    assert names_in(disk) == ["filler"]


async def test_a_page_that_a_full_disk_cannot_take_is_said(disk: Path) -> None:
    """It only shows the run, whose end goes on. No half file is left."""
    fill(disk)
    said: list[str] = []
    async with left_in(disk, MemoryBus("run", LoopClock()), HttpSettings(), said.append, RedisRoute()):
        pass
    assert said[-1] == f"the page failed: [Errno 28] No space left on device: '{disk}/page.json'"
    assert names_in(disk) == ["filler"]


def test_the_summary_of_a_run_is_printed_also_if_nothing_can_be_written(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the folder."""
    fill(disk)
    ended = replace(outcome([samples.report()], SANE), layout=layout_of(samples.spec().tensors))
    with pytest.raises(DilocoError, match=re.escape(f"left no checkpoint (disk full: 0B free in {disk}, ")):
        conclude(ended, RunProcess(), Folder(disk))
    printed = capsys.readouterr().out
    assert "global validation loss 2.5" in printed
    assert f"warning: the report cannot be written to {disk}/report.json (No space left on device)" in printed
    assert names_in(disk) == ["filler"]


@dataclass
class Syncer(FakeChild):
    """One that has ended, and runs on and on if it is started again."""

    starts: int = 0

    def restart(self) -> None:
        assert not self.alive
        self.starts, self.status = self.starts + 1, None


async def ended_on(disk: Path, full: bool) -> VirtualRun:
    """A run of which the disk has the last state, unless it was full."""
    world, learners = await begun(checkpoint_dir=disk / "checkpoints", checkpoint_every=5.0)
    await asyncio.sleep(11.0)
    if full:
        fill(disk)
    await world.until_version(2 + min(await world.versions()))
    await end(*learners)
    await world.stop_syncer()
    return world


@pytest.mark.parametrize(("full", "statuses"), [(False, [-9, 0]), (False, [1]), (True, [-9, 0]), (True, [1])])
@in_virtual_time
async def test_a_last_state_is_waited_for_if_the_disk_lacks_it_however_the_syncers_ended(
    full: bool, statuses: Sequence[int], disk: Path
) -> None:
    """One syncer may have saved what another could not, or only the tape was not archived."""
    world = await ended_on(disk, full)
    if not full:
        fill(disk)
    said: list[str] = []
    syncers = [Syncer("syncer", [], status) for status in statuses]
    began = asyncio.get_running_loop().time()
    await save_again(world.bus, Folder(disk), syncers, said.append)  # type: ignore[arg-type]
    waited_s = asyncio.get_running_loop().time() - began
    assert (len(said), round(waited_s)) == ((1, SAVE_AGAIN_S) if full else (0, 0))
    assert all(syncer.starts == 0 for syncer in syncers)


@in_virtual_time
async def test_a_state_that_was_lost_on_a_disk_with_space_is_not_waited_for(disk: Path) -> None:
    world = await ended_on(disk, full=True)
    empty(disk)
    said: list[str] = []
    await save_again(world.bus, Folder(disk), [Syncer("syncer", [], 1)], said.append)  # type: ignore[list-item]
    assert said == []


@in_virtual_time
async def test_a_syncer_that_saves_slowly_is_let_run_alone_and_does_not_outlive_the_time_limit(disk: Path) -> None:
    world = await ended_on(disk, full=True)
    syncers = [Syncer("syncer-0", [], 1), Syncer("syncer-1", [], 1)]
    saving = asyncio.create_task(save_again(world.bus, Folder(disk), syncers, print))  # type: ignore[arg-type]
    await asyncio.sleep(10.0)
    empty(disk)
    await asyncio.sleep(SAVE_AGAIN_S - 20.0)
    assert [syncer.starts for syncer in syncers] == [1, 0]
    assert syncers[0].alive
    await saving
    assert [syncer.status for syncer in syncers] == [-9, 1]
    assert syncers[0].starts == 1


@in_virtual_time
async def test_a_report_counts_what_a_full_disk_kept_from_the_tapes_archive(disk: Path) -> None:
    """Each record once: those that the archive has are on the bus too."""
    world, learners = await begun(tape_dir=disk / "out" / "tape")
    await asyncio.sleep(3.0)
    fill(disk)
    await asyncio.sleep(60.0)
    await end(*learners)
    await world.stop_syncer()
    tape = await world.tape()
    assert 0 < len(read_archive(disk / "out" / "tape")) < len(tape)
    launcher = Launcher(RunProcess(), Folder(disk / "out"), "", world.bus, FakeChildren(), FakeScreen(), {})  # type: ignore[arg-type]
    found = await launcher.gather(1.0, None)
    assert found is not None
    assert found.records == tape
    assert not any("ledger" in warning for warning in build(found)["warnings"])
    world.bus.read_tape = AsyncMock(side_effect=PeerError("no tape there"))  # type: ignore[method-assign]
    found = await launcher.gather(1.0, None)
    assert found is not None
    assert found.records == read_archive(disk / "out" / "tape")
    assert found.warnings == ["the report has only the tape's archive: no tape there"]


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "freed"), [(False, True), (True, True), (False, False), (True, False)])
def test_a_run_whose_disk_fills_up_saves_its_last_state_once_there_is_space(
    stopped: bool, freed: bool, tmp_path: Path, popen: Callable[..., Any]
) -> None:
    """Its own Redis stays until then, or until Ctrl-C, after which the summary is printed all the same.

    So it is if Ctrl-C had ended the run.
    """
    with disk_of(tmp_path, "4m") as disk:
        text = disk / "text.txt"
        text.write_text("some words to be read by a small model. " * 5000)
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 120_000))
        small = [
            "--learners",
            "1",
            "--model",
            "nano",
            "--tokens",
            str(10**8 if stopped else 20_000),
            "--batch",
            "2",
            "--data",
            str(text),
        ]
        command = [sys.executable, "-m", "diloco", "run", "--out", str(disk / "out"), *small]
        run = popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed = ""
        while "not saved yet (disk full: " not in printed:
            line = run.stdout.readline()
            assert line, printed
            printed += line
            if stopped and re.search("outer steps [1-9]", line):
                run.send_signal(signal.SIGINT)
                stopped = False
        if freed:
            empty(disk)
        else:
            run.send_signal(signal.SIGINT)
        printed += run.communicate(timeout=HANGING_S)[0]
        assert run.returncode == (0 if freed else 1), printed
        assert "merged share" in printed
        assert "unaccounted" not in printed
        assert "ledger does not close" not in printed
        assert ("left no checkpoint (disk full: " in printed) != freed


def test_files_that_a_user_named_are_written_whole_or_not_at_all(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the file; what was there stays."""
    passwords, report = disk / "passwords", disk / "plan.json"
    report.write_text("earlier")
    fill(disk)
    assert cli.main(["plan", "--json", str(report)]) == 1
    assert f"No space left on device: '{report}'" in capsys.readouterr().err
    assert report.read_text() == "earlier"
    assert cli.main(["acl", "--passwords", str(passwords)]) == 2
    assert f"cannot write the passwords to {passwords}: No space left on device" in capsys.readouterr().err
    assert sorted(names_in(disk)) == ["filler", "plan.json"]


def test_a_file_that_a_user_named_is_written_through_links_and_to_pipes(tmp_path: Path) -> None:
    """`--json /dev/stdout` must not replace that name."""
    (tmp_path / "link").symlink_to("file")
    write_named(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_named(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    assert (tmp_path / "pipe").is_fifo()
    os.close(reader)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EXDEV, errno.EROFS])
def test_a_file_that_a_user_named_and_that_cannot_be_replaced_is_written_in_place(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a single file that is mounted into a container."""

    def refuse(path: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(path), None, str(target))

    file = tmp_path / "file"
    file.write_text("a longer text")
    monkeypatch.setattr(Path, "replace", refuse)
    write_named(file, "text")
    assert file.read_text() == "text"
    assert names_in(tmp_path) == ["file"]


def test_a_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    old.chmod(0o640)
    before = os.umask(0o077)
    try:
        for file in (old, new):
            write_named(file, "text")
            assert file.read_text() == "text"
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.stat().st_mode) for file in (old, new)] == [0o640, 0o600]


def test_an_error_names_the_file_that_cannot_be_written_and_not_a_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as refused:
        replace_file(tmp_path / "missing" / "file", [b"text"])
    assert refused.value.filename == str(tmp_path / "missing" / "file")
