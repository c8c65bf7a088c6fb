"""A disk that hangs, as one behind a network whose server is away, holds no merge up for long. In virtual time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.messages.fragment import Committed
from diloco.syncer.replay.archive import TapeArchive
from diloco.syncer.replay.disk import Disk
from diloco.syncer.replay.recording import Recorder, list_recording
from diloco.syncer.replay.replay import replay
from diloco.syncer.serving.service import SyncerService
from diloco.syncer.times import TIMES
from diloco.tape import read_archive
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

FRAGMENTS = 4


class Hanging:
    """An `offload` by which what writes a recording or an archive may hang; the rest does not."""

    def __init__(self, service: SyncerService) -> None:
        """service: has not begun yet."""
        self.answers = asyncio.Event()
        self.answers.set()
        self.held = 0
        """Threads that wait for the disk now."""
        service._offload = self._offload

    async def _offload(self, work: Any, *args: Any) -> Any:
        if isinstance(getattr(work, "__self__", None), TapeArchive | Recorder):
            self.held += 1
            try:
                await self.answers.wait()
            finally:
                self.held -= 1
        return work(*args)


def learners(world: VirtualRun) -> list[VirtualLearner]:
    """That take seconds for a round."""
    return [VirtualLearner(f"l{i}", world, 1.0, f"{i:016x}").start() for i in range(2)]


async def warnings(service: SyncerService) -> list[str]:
    status: Any = await service.status()
    return list(status["warnings"])


@in_virtual_time
async def test_merges_go_on_without_their_recordings_and_are_recorded_again_once_the_disk_answers(
    tmp_path: Path,
) -> None:
    """One thread waits for the disk, however many fragments there are; what would wait for it is missing, and told."""
    world = VirtualRun(sync_spec(fragments=FRAGMENTS, tokens=10**9), record_deltas=tmp_path)
    service = world.start_syncer()
    disk, party = Hanging(service), learners(world)
    await world.until_version(3)
    disk.answers.clear()
    await world.until_version(max(await world.versions()) + 1, TIMES.disk_s + 10)
    await world.until_version(max(await world.versions()) + 5, 30)  # nobody waits for it again
    assert disk.held == 1
    assert any("the recording has gaps" in one and "still not answering" in one for one in await warnings(service))
    disk.answers.set()
    await world.until_version(max(await world.versions()) + 3)
    await end(*party)
    commits = [record for record in await world.tape() if isinstance(record, Committed)]
    recorded = {int(path.name.partition("-")[0]) for path in list_recording(tmp_path) if path.suffix == ".merge"}
    newest = min(await world.versions())
    assert {1, 2, newest} <= recorded, "before, and again"
    missing = replay(tmp_path, commits, lambda merges: None).differences
    assert missing
    assert all("no recording" in one.what or "not recomputed" in one.what for one in missing), "nothing is wrong"


@in_virtual_time
async def test_a_tape_that_cannot_be_archived_for_now_is_told_and_archived_later(tmp_path: Path) -> None:
    """Merges go on as if nothing were; the archive has each record in the end."""
    world = VirtualRun(sync_spec(tokens=10**9), tape_dir=tmp_path)
    service = world.start_syncer()
    disk, party = Hanging(service), learners(world)
    await world.until_version(3)
    disk.answers.clear()
    await world.until_version(max(await world.versions()) + 5, 30)
    await asyncio.sleep(TIMES.disk_s - 20)
    assert disk.held == 1
    assert any("cannot be archived" in one and "still not answering" in one for one in await warnings(service))
    disk.answers.set()
    await asyncio.sleep(5.0)
    assert await warnings(service) == []
    await end(*party)
    await asyncio.sleep(2.0)
    assert read_archive(tmp_path) == await world.tape()


@in_virtual_time
async def test_a_syncer_that_is_told_to_stop_ends_though_its_archives_disk_hangs(tmp_path: Path) -> None:
    world = VirtualRun(sync_spec(tokens=10**9), tape_dir=tmp_path)
    service = world.start_syncer()
    disk, party = Hanging(service), learners(world)
    await world.until_version(3)
    disk.answers.clear()
    await asyncio.sleep(5.0)
    world.stop.set()
    async with asyncio.timeout(TIMES.disk_s):
        await world.syncer
    assert not service.in_order, "and says that something is missing"
    assert await world.bus.read_leases(range(2)) == [None, None]
    await end(*party)


@in_virtual_time
async def test_work_for_a_disk_that_hangs_is_let_go_of_but_for_the_piece_that_has_begun() -> None:
    """That one ends, whoever has given it up; what it raises then is nobody's. The next piece has its turn after it."""
    answers, done = asyncio.Event(), list[str]()

    async def offload(work: Any, *args: Any) -> Any:
        await answers.wait()
        return work(*args)

    def fails(name: str) -> None:
        done.append(name)
        raise OSError(5, "Input/output error")

    disk = Disk(offload)
    tries = [asyncio.create_task(disk.do(work, name)) for work, name in ((fails, "begun"), (done.append, "waits"))]
    await asyncio.wait(tries)
    assert asyncio.get_running_loop().time() == TIMES.disk_s
    for one in tries:
        with pytest.raises(TimeoutError, match="did not answer"):
            one.result()
    with pytest.raises(TimeoutError, match="is still not answering"):
        await disk.do(done.append, "refused")
    assert asyncio.get_running_loop().time() == TIMES.disk_s
    answers.set()
    await asyncio.sleep(0.1)
    assert done == ["begun"]
    with pytest.raises(OSError, match="Input/output"):
        await disk.do(fails, "fails")
    await disk.do(done.append, "last")
    assert done == ["begun", "fails", "last"]
