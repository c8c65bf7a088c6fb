"""Saves that are cancelled, that lose their folder, and removals that fail; readers whose checkpoint is dropped."""

import asyncio
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.numpy
from structlog.testing import capture_logs

from diloco.export import export
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.sums import SUMS_FILE
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.manifest import STATE_FILE
from diloco.syncer.checkpoints.places import Folder, place_of
from diloco.syncer.checkpoints.saving import finish_checkpoint, run_folder
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.checkpointing import Checkpoints
from diloco_studies.virtual.virtual_time import in_virtual_time, inline, run_virtual
from tests import samples
from tests.saving import save_checkpoint
from tests.syncer.test_checkpoint import THETA, folder_of, save, trained

NAME, OTHER = "checkpoint-7-0123abcd", "checkpoint-8-0123abcd"
OWN = run_folder("r", samples.run_state())


class SlowBus:
    """Each call takes a second."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **given: Any) -> Any:
            await asyncio.sleep(1.0)
            return await getattr(self._bus, name)(*args, **given)

        return call


class Threads:
    """Work of a thread is done some time after it was begun, also when nobody waits for it any more."""

    def __init__(self) -> None:
        self.takes_s = 3.0

    async def offload(self, work: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result = work(*args)
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        loop.call_later(self.takes_s, run)
        return await done


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_a_save_that_is_cancelled_at_any_await_names_whole_checkpoints_only(tmp_path: Path, times: int) -> None:
    """What its thread still writes is waited for, by whoever is cancelled again too."""

    async def cancelled_after(place: Path, seconds: float) -> bool:
        bus: Any = SlowBus(await trained(samples.spec()))
        threads = Threads()
        saving = asyncio.create_task(save_checkpoint(bus, samples.spec(), place_of(place), threads.offload))
        for _ in range(times):
            await asyncio.sleep(seconds)
            threads.takes_s = seconds = 0.25  # what is begun later may be done before
            saving.cancel()
        await asyncio.sleep(60.0)
        assert saving.done()
        return saving.cancelled()

    kinds = set()
    for n in range(100):
        place = tmp_path / str(n)
        save(place, times=3)
        before = (place / "latest").read_text().split()
        cancelled = run_virtual(cancelled_after(place, n + 0.5))
        for name in (after := (place / "latest").read_text().split()):
            load_checkpoint(place / name)
        there = {path.name for path in place.iterdir()}
        assert {"latest", *after} <= there <= {"latest", *after, *before}
        kinds.add((cancelled, after == before))
        if not cancelled:
            break
    assert kinds == {(True, True), (True, False), (False, False)}
    assert n > 10


def test_a_removal_that_fails_is_logged_and_costs_the_new_checkpoint_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that breaks off leaves nothing that could be taken for whole."""
    oldest, *_ = save(tmp_path, times=3)

    def refused(path: Path) -> None:
        raise PermissionError(f"not permitted: {path}")

    with monkeypatch.context() as patched, capture_logs() as log:
        patched.setattr(shutil, "rmtree", refused)
        (newest,) = save(tmp_path)
    assert folder_of(tmp_path) == newest
    assert [line["path"] for line in log if line["event"] == "checkpoint_not_removed"] == [str(oldest)]
    assert oldest.is_dir()
    with pytest.raises(UsageError):
        load_checkpoint(oldest)


def test_a_lead_whose_folder_was_collected_meanwhile_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for so long that another one took its folder for a leftover."""
    (before,) = save(tmp_path)
    write = Folder.write

    def collected(self: Folder, name: str, parts: Any) -> None:
        if name == STATE_FILE:
            shutil.rmtree(self.path)
        write(self, name, parts)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", collected)
        with pytest.raises(OSError, match=r"SHA256SUMS disappeared while the checkpoint was being saved"):
            save(tmp_path)
    assert folder_of(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"latest", before.name}


def test_a_name_in_latest_of_which_nothing_is_left_is_not_kept(tmp_path: Path) -> None:
    """It takes nobody's place: a person may have removed what was there."""
    first, second, third = save(tmp_path, times=3)
    (second / STATE_FILE).unlink()
    shutil.rmtree(third)
    (newest,) = save(tmp_path)
    assert (tmp_path / "latest").read_text().split() == [newest.name, first.name]


def test_a_damaged_file_of_a_fragment_is_an_error_of_this_save(tmp_path: Path) -> None:
    """It is named, and the next save is a new one."""
    (before,) = save(tmp_path)
    (saved,) = before.glob("fragment-0000-*.json")

    async def main() -> None:
        folder = tmp_path / NAME
        folder.mkdir()
        (folder / saved.name).write_text(saved.read_text()[:-9])
        spec = samples.spec()
        await finish_checkpoint(await trained(spec), spec, place_of(tmp_path), NAME, range(2), inline)

    with pytest.raises(OSError, match=f"{NAME}/{saved.name} is damaged"):
        run_virtual(main())
    assert folder_of(tmp_path) == before


# --- helpers -----------------------------------------------------------------------------------------


def checkpoints_of(bus: Any, place: Path) -> Checkpoints:
    """Of a syncer of both fragments."""
    spec, parts = samples.spec(), SimpleNamespace(fragments=range(2))
    context: Any = SimpleNamespace(bus=bus, agreed=SimpleNamespace(spec=spec), offload=inline, layout=parts)
    context.clock, context.metrics = bus.clock, Metrics()
    context.nonce, context.random_hex = "cd" * 8, secrets.token_hex
    return Checkpoints(context, str(place), 5.0, lambda: [0, 1])


@in_virtual_time
async def test_a_helper_tells_that_it_gets_on(tmp_path: Path) -> None:
    """One that is told to stop while it helps with the last checkpoint has as much time again for each fragment."""
    checkpoints = checkpoints_of(await trained(samples.spec()), tmp_path)
    for name in ("", NAME):
        checkpoints.see(samples.run_state(checkpoint=name))
    await checkpoints._help([0])
    assert not checkpoints.fragment_saved.is_set(), "it is in another place"
    place_of(tmp_path / OWN).below(NAME).write(SUMS_FILE, [b""])
    await checkpoints._help([0])
    assert checkpoints.fragment_saved.is_set()


@pytest.mark.parametrize("leads", [True, False])
@in_virtual_time
async def test_who_stops_names_its_checkpoint_unless_another_one_leads(tmp_path: Path, leads: bool) -> None:
    """The run's state is the lead's to write: samples of its own would be lost. It is saved all the same."""
    bus = await trained(samples.spec())
    await bus.release_lease(0, "ab" * 8)
    if not leads:
        assert await bus.acquire_lease(0, "ef" * 8, 60.0)
    checkpoints = checkpoints_of(bus, tmp_path)
    await checkpoints.save_stopped([0])
    state = await bus.read_state()
    assert state.checkpoint == (folder_of(tmp_path).name if leads else "")
    assert await bus.acquire_lease(0, "ef" * 8, 60.0), "it is given back"


def help_with(place: Path, monkeypatch: pytest.MonkeyPatch, *seen: str | None) -> list[str]:
    """The files that a syncer of both fragments writes, which sees the run's state name these one after the other.

    None: the run has no state. The lead has begun them in the same place.
    """
    for name in filter(None, seen):
        place_of(place / OWN).below(name).write(SUMS_FILE, [b""])
    written: list[str] = []
    write = Folder.write

    def noted(self: Folder, name: str, parts: Any) -> None:
        written.append(f"{self.path.relative_to(place / OWN)}/{name}")
        write(self, name, parts)

    async def main() -> None:
        spec = samples.spec()
        checkpoints = checkpoints_of(await trained(spec), place)
        helping = asyncio.create_task(checkpoints.help())
        for name in seen:
            checkpoints.see(None if name is None else samples.run_state(checkpoint=name))
            await asyncio.sleep(1.0)
        helping.cancel()
        await asyncio.gather(helping, return_exceptions=True)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", noted)
        run_virtual(main())
    return [file for file in written if file.endswith(".json")]


def test_a_helper_saves_what_nobody_has_saved_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it; the rest, where the lead has come to some of them; nothing, where the checkpoint is whole."""
    first, second = help_with(tmp_path, monkeypatch, "", NAME)
    for file in tmp_path.glob(f"*/{NAME}/fragment-0000-*"):
        file.unlink()
    assert (first[:35], second[:35]) == (f"{NAME}/fragment-0000", f"{NAME}/fragment-0001")
    assert help_with(tmp_path, monkeypatch, "", NAME) == [first]
    for file in tmp_path.glob(f"*/{NAME}/fragment-*"):
        file.unlink()
    (tmp_path / OWN / NAME / STATE_FILE).write_text("{}")
    assert help_with(tmp_path, monkeypatch, "", NAME) == []


@pytest.mark.parametrize(
    ("seen", "helped"),
    [
        ([NAME, NAME], set()),
        ([None, NAME], {NAME}),
        ([NAME, "", OTHER], {OTHER}),
        ([NAME, "", NAME], set()),
        ([NAME, None], set()),
    ],
)
def test_a_helper_saves_in_what_began_since_its_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str | None], helped: set[str]
) -> None:
    """A state that was lost, and names nothing, begins none; nor does the same name once it is back."""
    assert {file.partition("/")[0] for file in help_with(tmp_path, monkeypatch, *seen)} == helped


@pytest.mark.parametrize(
    "name",
    ["../elsewhere", "checkpoint-7", "/checkpoint-7-0123abcd", f"{NAME}/x", f"{NAME}\n", "checkpoint-7-0123ABCD"],
)
def test_a_state_that_names_another_folder_is_refused(name: str) -> None:
    """Syncers write where it says."""
    with pytest.raises(ValueError, match="checkpoint"):
        samples.run_state(checkpoint=name)


# --- readers -----------------------------------------------------------------------------------------


def drop_at_each_read(monkeypatch: pytest.MonkeyPatch, place: Path, kind: str, times: int) -> None:
    """Four are saved after each of so many reads of such a file, so that what it was of is dropped."""
    read, left = Folder.read, [times]

    def dropped_then(self: Folder, name: str) -> bytes:
        data = read(self, name)
        if name.startswith(kind) and left[0]:
            left[0] -= 1
            with monkeypatch.context() as patched:
                patched.setattr(Folder, "read", read)
                save(place, times=4)
        return data

    monkeypatch.setattr(Folder, "read", dropped_then)


@pytest.mark.parametrize("kind", ["latest", "state.json", "SHA256SUMS", "fragment-0000"])
def test_who_checks_a_checkpoint_that_is_dropped_meanwhile_has_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`--resume` and `replay`: a run that goes on drops old ones."""
    save(tmp_path)
    with monkeypatch.context() as patched:
        drop_at_each_read(patched, tmp_path, kind, times=2)
        found = load_checkpoint(tmp_path)
    assert found.folder_name == (tmp_path / "latest").read_text().split()[0]
    found.check()


@pytest.mark.parametrize("kind", ["latest", "state.json", "SHA256SUMS", "fragment-0000", "fragment-0001"])
def test_an_export_of_a_checkpoint_that_is_dropped_meanwhile_is_of_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """All of it, whatever was read before."""
    save(tmp_path)
    with monkeypatch.context() as patched:
        drop_at_each_read(patched, tmp_path, kind, times=2)
        export(tmp_path, tmp_path / "model.safetensors")
    assert safetensors.numpy.load_file(tmp_path / "model.safetensors")["a"].tobytes() == THETA[0].tobytes()


def test_a_reader_that_is_slower_than_the_run_drops_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which file is missing, and what it has tried."""
    save(tmp_path)
    drop_at_each_read(monkeypatch, tmp_path, "fragment-0000", times=1000)
    with pytest.raises(UsageError, match="is missing"), capture_logs() as log:
        load_checkpoint(tmp_path)
    assert [line["event"] for line in log] == ["checkpoint_dropped_meanwhile"] * 3


def test_what_is_damaged_and_there_is_not_passed_over(tmp_path: Path) -> None:
    """An older or a newer one is a person's choice."""
    _, newest = save(tmp_path, times=2)
    (damaged,) = newest.glob("fragment-0000-*.safetensors")
    damaged.unlink()
    with pytest.raises(UsageError, match=f"{newest.name}/{damaged.name} is missing"), capture_logs() as log:
        load_checkpoint(tmp_path)
    assert log == []
