"""Promises of the launcher about the ends of a run, on the bus in memory and without processes."""

import asyncio
import shlex
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from diloco.launcher.folder import Folder
from diloco.launcher.launch import ChildDied, Children
from diloco.launcher.locate import is_live
from diloco.launcher.run import Launcher
from diloco.options import RunProcess
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable, DilocoError
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.payload.codec import encode
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import samples


async def test_a_run_stopped_between_its_spec_and_its_first_version_leaves_nothing(tmp_path: Path) -> None:
    """There is no report to write, hence no complaint about a missing checkpoint."""
    bus = MemoryBus("run", LoopClock())
    nothing: Any = None
    launcher = Launcher(RunProcess(), Folder(tmp_path), "", bus, nothing, nothing, {})
    assert await launcher.gather(1.0, None) is None
    await bus.propose_spec(encode(samples.spec()))
    await bus.write_state(samples.run_state())
    assert await launcher.gather(1.0, None) is None


@dataclass
class FakeChild:
    """A process that a test ends as it likes."""

    name: str
    arguments: list[str]
    status: int | None = None
    reported: bool = False
    expected_end: bool = False
    under_way: bool = False
    restarted: bool = False
    pid: int = 1
    log: str = "the log"
    stops_s: float = 0.0
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.status is None

    def send(self, number: signal.Signals) -> None:
        """It takes `stops_s` to end in order."""
        assert number is signal.SIGTERM
        asyncio.get_running_loop().call_later(self.stops_s, setattr, self, "status", 0)

    def kill_group(self) -> None:
        self.status = -9

    def ending(self) -> str:
        return f"ended with status {self.status}"

    def describe_end(self) -> str:
        return f"{self.name} {self.ending()}"


@dataclass
class FakeChildren:
    started: dict[str, FakeChild] = field(default_factory=dict)

    def start(self, name: str, arguments: list[str], environ: dict[str, str]) -> None:
        self.started[name] = FakeChild(name, list(arguments), environ=environ)

    def __getitem__(self, name: str) -> FakeChild:
        return self.started[name]

    def named(self, prefix: str) -> list[FakeChild]:
        return [child for name, child in self.started.items() if name.startswith(prefix)]

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.started.items()}


@dataclass
class FakeScreen:
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


def launched(tmp_path: Path, **settings: Any) -> tuple[Launcher, FakeChildren, FakeScreen, MemoryBus]:
    bus, children, screen = MemoryBus("run", LoopClock()), FakeChildren(), FakeScreen()
    launcher = Launcher(RunProcess(**settings), Folder(tmp_path), "", bus, children, screen, {})  # type: ignore[arg-type]
    launcher.start()
    return launcher, children, screen, bus


def flag(child: FakeChild, name: str) -> str:
    return child.arguments[child.arguments.index(name) + 1]


async def test_each_syncer_has_a_name_and_a_port_of_its_own(tmp_path: Path) -> None:
    """A single one keeps its plain name; they share the folders, and all are told to resume."""
    _, one, *_ = launched(tmp_path, http_port=8080)
    assert [(c.name, flag(c, "--syncer-id"), flag(c, "--http-port")) for c in one.named("syncer")] == [
        ("syncer", "syncer", "8080")
    ]
    _, many, *_ = launched(tmp_path, syncers=3, http_port=8080, resume=tmp_path)
    found = [
        (c.name, flag(c, "--syncer-id"), flag(c, "--http-port"), flag(c, "--resume")) for c in many.named("syncer")
    ]
    assert found == [(f"syncer-{i}", f"syncer-{i}", str(8080 + i), str(tmp_path)) for i in range(3)]
    assert len({flag(c, "--tape-dir") for c in many.named("syncer")}) == 1
    _, free, *_ = launched(tmp_path, syncers=2)
    assert [flag(c, "--http-port") for c in free.named("syncer")] == ["0", "0"]


async def test_the_death_of_one_of_several_syncers_is_a_warning_and_that_of_the_last_one_the_end(
    tmp_path: Path,
) -> None:
    launcher, children, screen, bus = launched(tmp_path, syncers=2)
    await bus.write_state(samples.run_state())
    status: dict[str, Any] = {"phase": "running", "syncers": []}
    await launcher._check_syncers(status)
    assert screen.notes == []
    children.started["syncer-0"].status = -9
    for _ in range(2):
        await launcher._check_syncers(status)
    assert screen.notes == ["warning: syncer-0 ended with status -9; its log: the log"]
    assert [event.who for _, event in await bus.read_events() if event.name == "syncer_died"] == ["syncer-0"]
    children.started["syncer-1"].status = 1
    with pytest.raises(ChildDied, match="syncer-1 ended with status 1"):
        await launcher._check_syncers(status)


async def test_a_learner_that_died_is_told_with_the_command_that_starts_it_again(tmp_path: Path) -> None:
    """As it was started: under its name, with its settings and its state."""
    launcher, children, screen, _ = launched(tmp_path)
    child = children["learner-1"]
    child.status, child.under_way = -9, True
    status: Any = {"phase": "running", "syncers": [], "learners": []}
    await launcher._check(status)
    died, again = screen.notes
    assert died == "warning: learner-1 ended with status -9; its log: the log"
    assert f"learner --run run {shlex.join(launcher.own['learner-1'].options)}" in again


async def test_syncers_elsewhere_and_a_finished_run_need_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that joined from elsewhere goes on alone; and who has finished the run may be gone."""
    launcher, children, screen, bus = launched(tmp_path)
    await bus.write_state(samples.run_state())
    children.started["syncer"].status = -9
    await launcher._check_syncers({"phase": "running", "syncers": [{"id": "syncer"}, {"id": "elsewhere"}]})
    assert len(screen.notes) == 1
    nobody: dict[str, Any] = {"phase": "running", "syncers": [{"id": "syncer"}]}
    await launcher._check_syncers(nobody)  # cut off for a moment
    monkeypatch.setattr("diloco.launcher.run.SILENT_BUS_S", -1.0)
    with pytest.raises(ChildDied, match="syncer ended"):
        await launcher._check_syncers(nobody)
    children.started["syncer"].reported = False
    await bus.write_state(samples.run_state(phase=Phase.FINISHED))
    await launcher._check_syncers({"phase": "running", "syncers": []})
    await launcher._check_syncers({"phase": "finished", "syncers": []})
    assert len(screen.notes) == 1


@pytest.mark.parametrize(("name", "limit"), [("syncer", "shutdown_s"), ("learner-0", "leave_s")])
@pytest.mark.parametrize(("more_s", "status"), [(-1.0, 0), (60.0, -9)])
@in_virtual_time
async def test_who_is_told_to_stop_has_its_own_time_for_it(
    tmp_path: Path, name: str, limit: str, more_s: float, status: int
) -> None:
    """A syncer that needs nearly all of its shutdown_s to commit and save is not killed in it; who needs more is."""
    launcher, children, *_ = launched(tmp_path, **{limit: 100.0})
    for child in children.started.values():
        child.status = 0
    children[name].status, children[name].stops_s = None, 100.0 + more_s
    await launcher.wind_down()
    assert children[name].status == status


async def test_what_came_back_is_told_once_in_a_line(tmp_path: Path) -> None:
    """For each life of a learner, once it trains; nothing of those that begin with the run."""
    launcher, _, screen, _ = launched(tmp_path)
    for moments in ("start", "fresh", "checkpoint", "peer"):
        life = {"id": "learner-0", "incarnation": moments, "moments": moments}
        for _ in range(2):
            launcher._tell_moments(life)  # type: ignore[arg-type]
    assert screen.notes == [
        "learner-0 starts with fresh moments and a learning-rate ramp",
        "learner-0 continues with its saved moments",
        "learner-0 starts with the moments of another learner",
    ]


@in_virtual_time
async def test_whoever_is_waited_for_at_the_end_is_named(tmp_path: Path) -> None:
    """One line each time, and none for those that are gone: the last half minute of a run is not silent."""
    launcher, children, screen, _ = launched(tmp_path, learners=2)
    children["learner-0"].status = 0
    ends = {"learner-1": 1.0, "evaluator": 2.0, "syncer": 3.0}
    for name, end_s in ends.items():
        asyncio.get_running_loop().call_later(end_s, setattr, children[name], "status", 0)
    await launcher.wind_down()
    assert screen.notes == [
        "waiting for learner-1 to publish, save and leave",
        "waiting for evaluator to measure the last global loss",
        "waiting for syncer to save the last checkpoint",
    ]


async def test_a_run_whose_folder_is_moved_or_deleted_says_so_and_goes_on_to_a_clear_end(tmp_path: Path) -> None:
    """Logs have a place again at once, the run is found there, and what is started again its settings; no report is
    made of the half that is left, which is said at once."""
    folder = tmp_path / "out"
    folder.mkdir()
    launcher, _, screen, _ = launched(folder)
    launcher._check_folder()
    assert screen.notes == []
    for spoil in (lambda: folder.rename(tmp_path / "elsewhere"), lambda: shutil.rmtree(folder)):
        spoil()
        screen.notes.clear()
        for _ in range(2):
            launcher._check_folder()
        assert len(screen.notes) == 1
        assert f"the output folder {folder} was moved or deleted" in screen.notes[0]
        assert "There will be no report" in screen.notes[0]
        assert (folder / "logs").is_dir()
        assert (folder / "settings.toml").is_file()
        assert is_live(folder)
    with pytest.raises(DilocoError, match=f"{folder} was moved or deleted .* no report"):
        await launcher.gather(1.0, None)


async def test_ctrl_c_is_not_lost_if_redis_is_away_at_that_moment(tmp_path: Path) -> None:
    """It is asked for again until the bus has it, and said to the user once."""
    launcher, _, screen, bus = launched(tmp_path)
    await bus.write_state(samples.run_state())
    for away in ("read_state", "write_state"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bus, away, AsyncMock(side_effect=BusUnavailable("away")))
            with pytest.raises(BusUnavailable):
                await launcher._ask_to_drain(begun=True)
        assert not launcher.stopped
    assert screen.notes == []
    assert not await launcher._ask_to_drain(begun=True)
    assert launcher.stopped
    assert len(screen.notes) == 1
    state = await bus.read_state()
    assert state is not None
    assert state.phase is Phase.DRAINING


async def test_what_the_launcher_ends_itself_is_no_warning(tmp_path: Path) -> None:
    """SIGTERM before the first step: nothing is there to be saved, so all are killed at once, and nobody wonders."""
    launcher, children, screen, _ = launched(tmp_path)
    with Children(tmp_path / "logs", kind=lambda name, *_: children.started[name]) as real:  # type: ignore[arg-type,return-value]
        for name in children.started:
            real.start(name, (), {})
        real.kill()
    assert [child.status for child in children.started.values()] == [-9] * len(children.started)
    await launcher.wind_down()
    assert screen.notes == []


async def test_a_syncer_that_is_killed_by_another_is_a_warning(tmp_path: Path) -> None:
    launcher, children, screen, _ = launched(tmp_path)
    for child in children.started.values():
        child.status = 0
    children["syncer"].status = -9
    await launcher.wind_down()
    assert screen.notes == ["warning: syncer ended with status -9; its log: the log"]


@in_virtual_time
async def test_a_syncer_that_the_launcher_has_to_kill_is_warned_of_once(tmp_path: Path) -> None:
    launcher, children, screen, _ = launched(tmp_path)
    for child in children.started.values():
        child.status = 0
    children["syncer"].status, children["syncer"].stops_s = None, 10_000.0
    await launcher.wind_down()
    assert screen.notes[-1] == "warning: syncer did not end after SIGTERM: sending SIGKILL"
