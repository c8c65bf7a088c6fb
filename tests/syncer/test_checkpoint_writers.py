"""Writers of checkpoints that are killed, or several in one folder: what is named is whole, and no more stays."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.checkpoints import saving
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.manifest import STATE_FILE, Leftovers, found_fragments
from diloco.syncer.checkpoints.places import Folder, place_of
from diloco.syncer.checkpoints.saving import begin_checkpoint, checkpoint_name, finish_checkpoint
from diloco.syncer.serving import checkpointing
from diloco.syncer.times import TIMES
from diloco_studies.virtual.virtual_time import in_virtual_time, inline, run_virtual
from tests import samples
from tests.syncer.test_checkpoint import folder_of, save, trained
from tests.syncer.test_several_syncers import ENDLESS, LEASE_S, P, Syncer, learners_of, sharing, until
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

LEFT = "checkpoint-7-deadbeef"
KILLED = """
import sys
from pathlib import Path
from diloco.syncer.checkpoints.places import Folder
from tests.syncer.test_checkpoint import save

whole = Folder.write

def write(self, name, parts):
    def begun():
        for part in parts:
            yield part[:7]
            print(name, flush=True)
            sys.stdin.read()
    whole(self, name, begun() if name.startswith(sys.argv[2]) else parts)

Folder.write = write
save(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("point", ["fragment-0000", "fragment-0001", "SHA256SUMS", "state.json", "latest"])
def test_a_syncer_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path, point: str) -> None:
    """SIGKILL in the midst of each kind of file: nothing half is named, and what is left goes as others are saved."""
    (before,) = save(tmp_path)
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), point], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline().startswith(point)
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
    finally:
        writer.kill()
        writer.communicate()
    assert folder_of(tmp_path) == before
    (left,) = [folder for folder in tmp_path.glob("checkpoint-*") if folder != before]
    assert (left / STATE_FILE).exists() == (point == "latest")
    names = save_with(tmp_path, Leftovers(), times=3)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", *names}


def save_with(directory: Path, leftovers: Leftovers, times: int) -> list[str]:
    """As one syncer saves in the course of time: it remembers what it has seen there."""

    async def main() -> list[str]:
        spec, place = samples.spec(), place_of(directory)
        bus = await trained(spec)
        names = [checkpoint_name(7, secrets.token_hex) for _ in range(times)]
        for name in names:
            await begin_checkpoint(place, name, leftovers, inline)
            await finish_checkpoint(bus, spec, place, name, range(2), inline)
        return names

    return run_virtual(main())


def test_what_another_one_is_writing_is_no_leftover(tmp_path: Path) -> None:
    """It grows from look to look."""
    leftovers, folder = Leftovers(), tmp_path / LEFT
    folder.mkdir(parents=True)
    for n in range(4):
        (folder / f"fragment-000{n}-1-0123456789abcdef.safetensors").write_bytes(b"")
        save_with(tmp_path, leftovers, times=1)
        assert len(list(folder.iterdir())) == n + 1
    save_with(tmp_path, leftovers, times=1)
    assert not folder.exists()


@pytest.mark.parametrize(
    "name", ["checkpoint-500", "checkpoint-best", LEFT, ".writing-notes", "checkpoint-7-deadbeef0"]
)
def test_what_others_keep_beside_checkpoints_stays(tmp_path: Path, name: str) -> None:
    """As transformers' Trainer names its own; and a folder named as ours, once somebody has put something into it."""
    (tmp_path / name).mkdir()
    for file in ("model.safetensors", "trainer_state.json", "SHA256SUMS"):
        (tmp_path / name / file).write_bytes(b"theirs")
    old = time.time() - 2 * TIMES.abandoned_s
    os.utime(tmp_path / name, (old, old))
    save_with(tmp_path, Leftovers(), times=4)
    assert len(list((tmp_path / name).iterdir())) == 3


def left_behind(directory: Path, age_s: float) -> Path:
    """What a writer leaves that was killed so long ago."""
    folder = directory / LEFT
    folder.mkdir()
    (folder / "fragment-0000-1-0123456789abcdef.safetensors").write_bytes(b"x" * 100)
    then = time.time() - age_s
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))
    return folder


def test_what_was_left_long_ago_goes_at_the_first_look(tmp_path: Path) -> None:
    """A process may save but once. It is said which folder goes."""
    left = left_behind(tmp_path, age_s=TIMES.abandoned_s / 2)
    save(tmp_path)
    assert left.exists()
    then = time.time() - TIMES.abandoned_s - 60
    os.utime(left, (then, then))
    (file,) = left.iterdir()
    save(tmp_path)
    assert left.exists(), "a file of it is newer"
    os.utime(file, (then, then))
    with capture_logs() as log:
        save(tmp_path)
    assert not left.exists()
    assert [line["path"] for line in log if line["event"] == "leftover_removed"] == [str(left)]


def test_what_was_left_does_not_keep_a_full_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes before the next one is written: also while no save succeeds, each of which would need its room."""
    left, leftovers, write = left_behind(tmp_path, age_s=0.0), Leftovers(), Folder.write

    def full(self: Folder, name: str, parts: Any) -> None:
        if left.exists() and name.endswith(".safetensors"):
            raise OSError("no space left on device")
        write(self, name, parts)

    monkeypatch.setattr(Folder, "write", full)
    with pytest.raises(OSError, match="no space"):
        save_with(tmp_path, leftovers, times=1)
    save_with(tmp_path, leftovers, times=1)
    assert not left.exists()
    left_behind(tmp_path, age_s=2 * TIMES.abandoned_s)
    save(tmp_path)
    assert not left.exists()


def test_what_cannot_be_removed_takes_no_new_checkpoint_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest one stays for now, and goes with a later one."""
    leftovers = Leftovers()
    first, *_ = save_with(tmp_path, leftovers, times=3)
    with monkeypatch.context() as patched:

        def refused(self: Folder, name: str) -> None:
            raise OSError("not permitted")

        patched.setattr(Folder, "remove", refused)
        (newest,) = save(tmp_path)
    assert folder_of(tmp_path) == newest
    assert (tmp_path / first).exists()
    save_with(tmp_path, leftovers, times=2)
    assert not (tmp_path / first).exists()


def test_an_answer_that_is_lost_takes_no_named_checkpoint_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has written `latest`, and the writer has not heard of it: what is named there is whole."""
    save(tmp_path)
    write = Folder.write

    def unanswered(self: Folder, name: str, parts: Any) -> None:
        write(self, name, parts)
        if name == "latest":
            raise OSError("the store is not answering")

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", unanswered)
        with pytest.raises(OSError, match="answer"):
            save(tmp_path)
    name = (tmp_path / "latest").read_text().splitlines()[0]
    assert folder_of(tmp_path).name == name


def test_two_that_save_to_one_folder_at_once_leave_whole_checkpoints(tmp_path: Path) -> None:
    """Two runs by mistake, or a lead that was paused: `latest` names a whole one whenever it is looked at."""
    with ThreadPoolExecutor() as pool:
        saving_ = [pool.submit(save, tmp_path, 20) for _ in range(2)]
        while not all(one.done() for one in saving_):
            if (tmp_path / "latest").exists():
                name, before = (tmp_path / "latest").read_text().splitlines()[0], ""
                while name != before and not (tmp_path / name / STATE_FILE).exists():  # dropped since it was read?
                    name, before = (tmp_path / "latest").read_text().splitlines()[0], name
                assert name != before
        for one in saving_:
            one.result()
    load_checkpoint(tmp_path)


class Slowly:
    """Saves a fragment a second, and tells whose bus it was read from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: list[tuple[str, int, Any]] = []
        self._save = saving.save_fragment
        for module in (saving, checkpointing):
            monkeypatch.setattr(module, "save_fragment", self.save)

    async def save(self, bus: Any, spec: Any, folder: Any, fragment: int, offload: Any) -> None:
        await asyncio.sleep(1.0)
        await self._save(bus, spec, folder, fragment, offload)
        self.by.append((str(folder), fragment, bus))


@in_virtual_time
async def test_each_syncer_saves_the_fragments_that_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, and the lead writes the manifest: in half of the time that it would take alone.

    What the lead saves for others is at most what they are at when it comes there.
    """
    slowly = Slowly(monkeypatch)
    _, syncers, learners = await sharing("abc", checkpoint_dir=tmp_path, checkpoint_every=20.0)
    held = {p: s.bus for s in syncers for p in s.held}
    took = await until(lambda: any(tmp_path.glob("*/latest")), 30.0)
    assert all((p, bus) in {(p, bus) for _, p, bus in slowly.by} for p, bus in held.items())
    assert len(slowly.by) <= P + 2
    assert took < 20.0 + P / 2 + 0.5
    assert load_checkpoint(tmp_path).state.tokens > 0
    await end(*learners, *syncers)


@in_virtual_time
async def test_fragments_of_a_syncer_that_dies_meanwhile_are_saved_by_the_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is whole all the same."""
    slowly = Slowly(monkeypatch)
    _, syncers, learners = await sharing("abc", checkpoint_dir=tmp_path, checkpoint_every=20.0)
    (lead,) = [s for s in syncers if 0 in s.held]
    dead = next(s for s in syncers if s is not lead)
    lost = set(dead.held)
    await until(lambda: bool(slowly.by), 30.0)
    await dead.kill()
    await until(lambda: any(tmp_path.glob("*/latest")), 20.0)
    load_checkpoint(tmp_path)
    assert {p for _, p, bus in slowly.by if bus is lead.bus} & lost
    await end(*learners, *(one for one in syncers if one is not dead))


@pytest.mark.slow
@in_virtual_time
async def test_syncers_with_a_folder_each_have_whole_checkpoints_where_the_lead_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others save nothing in vain."""
    Slowly(monkeypatch)
    world = VirtualRun(sync_spec(fragments=P, tokens=ENDLESS), checkpoint_every=20.0)
    syncers = [Syncer(world, name, checkpoint_dir=tmp_path / name) for name in "ab"]
    learners = learners_of(world)
    await until(lambda: [len(s.held) for s in syncers] == [3, 3], 2 * LEASE_S)
    lead, other = ("a", "b") if 0 in syncers[0].held else ("b", "a")
    await asyncio.sleep(150.0)
    checkpoint = load_checkpoint(tmp_path / lead)
    assert len(found_fragments(checkpoint.folder.names())) == P
    assert not (tmp_path / other).exists()
    await end(*learners, *syncers)


@pytest.mark.parametrize(("each_s", "in_time"), [(0.6, True), (1.5, False)])
@in_virtual_time
async def test_a_syncer_that_is_told_to_stop_saves_as_long_as_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_s: float, in_time: bool
) -> None:
    """A large model takes longer than `shutdown_s`, a second here, but no fragment of it does. One that does ends it:
    the log says so, and nothing is named that is not whole.
    """
    write = saving.save_fragment

    async def slowly(*args: Any) -> None:
        await asyncio.sleep(each_s)
        await write(*args)

    monkeypatch.setattr(saving, "save_fragment", slowly)
    world = VirtualRun(sync_spec(fragments=8, tokens=10**9))
    service = world.start_syncer(checkpoint_dir=str(tmp_path), checkpoint_every=0.0, shutdown_s=1.0)
    learner = VirtualLearner("l0", world).start()
    await world.until_version(1)
    await learner.kill()
    await world.stop_syncer()
    assert service.in_order == in_time
    assert any(tmp_path.glob("*/latest")) == in_time  # noqa: ASYNC240  # virtual time
    if in_time:
        assert len(load_checkpoint(str(tmp_path)).fragments) == 8


@in_virtual_time
async def test_a_save_goes_on_where_the_bus_has_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read is not answered in each time that a save takes, the last fragment's: what is saved stays."""
    pull, pulls = saving.pull_state, 0

    async def flaky(*args: Any) -> Any:
        nonlocal pulls
        pulls += 1
        if pulls % 4 == 0:
            raise BusUnavailable("no answer")
        return await pull(*args)

    monkeypatch.setattr(saving, "pull_state", flaky)
    world = VirtualRun(sync_spec(tokens=10**9, fragments=4), checkpoint_dir=tmp_path, checkpoint_every=20.0)
    service = world.start_syncer()
    learner = VirtualLearner("l", world, step_s=1.0).start()
    await until(lambda: any(tmp_path.glob("*/latest")), 30.0)
    assert pulls == 5
    assert service.serving.problems == []
    await learner.kill()
    load_checkpoint(tmp_path)


@in_virtual_time
async def test_a_save_that_the_bus_breaks_off_is_told_and_tried_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not first when the next one is due, ten minutes later; and the status says it until one is saved."""
    pull, away = saving.pull_state, True

    async def outage(*args: Any) -> Any:
        if away:
            raise BusUnavailable("no answer")
        return await pull(*args)

    monkeypatch.setattr(saving, "pull_state", outage)
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path, checkpoint_every=600.0)
    service, began_s = world.start_syncer(), world.clock.unix()
    learner = VirtualLearner("l", world, step_s=30.0).start()

    def saved_s() -> float:
        (found,) = [one for one in service.metrics.registry.collect() if "checkpoint" in one.name]
        return found.samples[0].value - began_s

    with capture_logs() as logs:
        await asyncio.sleep(660.0)
    assert saved_s() < 60.0, "its start: nothing is saved"
    assert [line["error"] for line in logs if line["event"] == "checkpoint_failed"] == ["no answer"]
    (warning,) = (await read_status(world.bus, world.clock))["warnings"]
    assert "could not be saved" in warning
    assert "no answer" in warning
    away = False
    await until(lambda: any(tmp_path.glob("*/latest")), 62.0)
    await asyncio.sleep(1.0)
    assert (await read_status(world.bus, world.clock))["warnings"] == []
    assert 660.0 < saved_s() < 723.0
    await learner.kill()
    load_checkpoint(tmp_path)


@in_virtual_time
async def test_a_run_in_which_nothing_happens_is_saved_once(tmp_path: Path) -> None:
    """Else the same state takes the place of all the checkpoints before it."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path, checkpoint_every=5.0)
    world.start_syncer()
    learner = VirtualLearner("l", world).start()
    await world.until_version(3)
    await learner.kill()
    await asyncio.sleep(60.0)
    before = place_of(tmp_path).names()
    await asyncio.sleep(60.0)
    assert place_of(tmp_path).names() == before
    load_checkpoint(tmp_path)
