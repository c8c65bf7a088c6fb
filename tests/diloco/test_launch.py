"""What the launcher does around a run: folders, settings for children, finding a run, child processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from diloco import cli
from diloco.export import export
from diloco.launcher import finish, launch, option_checks
from diloco.launcher.display import render
from diloco.launcher.folder import Folder, choose, own_checkpoint, plain, resume, to_toml
from diloco.launcher.launch import Children, environment, threads_for
from diloco.launcher.locate import Place, locate, without_secrets
from diloco.launcher.option_checks import check, check_demo
from diloco.launcher.report import build
from diloco.options import (
    DemoProcess,
    RunProcess,
    method_notes,
    with_preset,
)
from diloco.pipeline.errors import BusUnavailable, UsageError
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.wire import printable
from diloco.pipeline.methods import METHODS
from diloco.pipeline.process import logs
from diloco.pipeline.settings import BusSettings, EvaluatorProcess, LearnerProcess, SyncerProcess, SyncSettings, load
from diloco.pipeline.view.page.join_command import LearnerLaunch
from diloco.pipeline.view.status import build_status
from diloco.status import _RunInfo
from diloco_studies.quality.settings import PRESETS as LAB_PRESETS
from diloco_studies.virtual.virtual_time import run_virtual
from tests import samples
from tests.diloco.test_report import outcome
from tests.parties import ROOT, is_running, wait_for
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, sync_spec
from tests.workers.test_device_encoding import a_syncer


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, own_environment):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(logs, "configure", lambda level: None)  # it would outlive the test, and its stderr


def prepare(settings: RunProcess) -> Folder:
    folder = choose(settings)
    folder.make(settings)
    return folder


# --- the output folder ---------------------------------------------------------------------------------


def test_a_folder_in_use_is_never_overwritten_unasked(tmp_path):
    used = tmp_path / "out"
    used.mkdir()
    (used / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="something other than a run"):
            prepare(RunProcess(out=used, overwrite=overwrite))
    (used / "settings.toml").touch()
    with pytest.raises(UsageError, match=r"not empty.*--overwrite"):
        prepare(RunProcess(out=used))
    assert (used / "thesis.txt").exists()


def left_early(path: Path) -> Folder:
    """As Ctrl-C before the first step leaves it."""
    folder = prepare(RunProcess(out=path))
    folder.logs.mkdir()
    folder.checkpoints.mkdir()
    (folder.logs / "syncer.log").write_text("waiting_for_spec")
    folder.write_run(None, RunProcess(), {})
    (folder.path / "page.json").write_text("{}")
    ended(folder)
    return folder


def ended(folder: Folder) -> None:
    told = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps(told | {"pids": {}}))


def test_a_folder_of_a_run_that_came_to_nothing_is_used_again(tmp_path):
    """The same command does it: nobody has to clear away settings and logs."""
    folder = left_early(tmp_path / "out")
    prepare(RunProcess(out=folder.path))
    assert {path.name for path in folder.path.iterdir()} == {"settings.toml", "run.json"}


@pytest.mark.parametrize("kept", ["report.json", "notes.txt", "checkpoints/r/latest"])
def test_a_folder_with_anything_else_in_it_is_not(tmp_path, kept):
    """Whatever the run has saved, or people have put there."""
    folder = left_early(tmp_path / "out")
    (folder.path / kept).parent.mkdir(parents=True, exist_ok=True)
    (folder.path / kept).write_text("{}")
    with pytest.raises(UsageError, match=r"not empty.*--overwrite"):
        prepare(RunProcess(out=folder.path))
    assert (folder.path / kept).exists()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_beside_what_it_left(tmp_path):
    folder = left_early(tmp_path / "out")
    for kept in ("tape/0.msgpack", "learners/learner-0/state.json"):
        (folder.path / kept).parent.mkdir(parents=True)
        (folder.path / kept).write_text("{}")
    for part in (1, 2):
        prepare(RunProcess(out=folder.path))
        ended(folder)
        assert not folder.tape.exists()
        assert (folder.path / f"tape-{part}/0.msgpack").exists()
        assert (folder.path / f"learners-{part}/learner-0/state.json").exists()
        for kept in ("tape", "learners"):
            shutil.copytree(folder.path / f"{kept}-1", folder.path / kept)


def saved_run(folder: Folder) -> None:
    """With a checkpoint, as a run that was killed has left it."""

    async def train() -> None:
        world = VirtualRun(sync_spec(tokens=10**6), checkpoint_dir=folder.checkpoints)
        world.start_syncer()
        learner = VirtualLearner("l0", world).start()
        await world.until_version(3)
        await world.stop_syncer()
        await learner.kill()

    run_virtual(train())
    (folder.tape).mkdir()
    (folder.tape / "0-aa.msgpack").write_bytes(b"")
    folder.report.write_text("{}")


def test_the_same_command_again_goes_on_in_the_folder_of_a_run_that_was_stopped_or_killed(tmp_path):
    """With its tape and moments; what its part before has reported is kept beside it."""
    folder = left_early(tmp_path / "out")
    saved_run(folder)
    given = RunProcess(out=folder.path, run=RUN)
    saved = own_checkpoint(given)
    assert saved is not None
    settings, origin = resume(given.model_copy(update={"resume": str(saved.folder)}))
    assert origin is not None
    assert origin.tokens > 0
    assert settings.tokens == 10**6
    assert choose(settings).path == folder.path
    folder.make(settings)
    names = {path.name for path in folder.path.iterdir()}
    assert {"report-1.json", "page-1.json", "tape", "checkpoints", "logs", "settings.toml"} <= names
    assert "report.json" not in names
    assert own_checkpoint(given.model_copy(update={"run": "another"})) is None
    anew = RunProcess(out=folder.path, run=RUN, overwrite=True)
    assert own_checkpoint(anew) is None
    ended(folder)
    folder.make(anew)
    assert {path.name for path in folder.path.iterdir()} == {"settings.toml", "run.json"}


def test_a_run_that_is_alive_does_not_go_on_twice(tmp_path):
    folder = left_early(tmp_path / "out")
    saved_run(folder)
    folder.report.unlink()
    folder.write_run(None, RunProcess(), {"launcher": os.getpid()})
    with pytest.raises(UsageError, match="is alive"):
        own_checkpoint(RunProcess(out=folder.path, run=RUN))


def test_a_run_that_has_just_begun_keeps_its_folder(tmp_path):
    """It holds no more than that either."""
    folder = left_early(tmp_path / "out")
    folder.write_run(None, RunProcess(), {})
    with pytest.raises(UsageError, match="is alive"):
        prepare(RunProcess(out=folder.path))


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path):
    """Both were let into it while it was not there yet: the second one deletes nothing of the first."""
    settings = RunProcess(out=tmp_path / "out")
    first, second = choose(settings), choose(settings)
    first.make(settings)
    first.logs.mkdir()
    with pytest.raises(UsageError, match="is alive"):
        second.make(settings)
    assert first.logs.is_dir()


def test_a_run_that_is_alive_is_never_overwritten(tmp_path):
    """Even when asked; once its report is there, or its processes are gone, it may be."""
    folder = prepare(RunProcess(out=tmp_path / "out"))
    folder.write_run(None, RunProcess(), {})
    again = RunProcess(out=folder.path, overwrite=True)
    with pytest.raises(UsageError, match=f"alive .launcher is process {os.getpid()}"):
        choose(again)
    folder.report.write_text("{}")
    choose(again)
    folder.report.unlink()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (folder.path / "run.json").write_text(json.dumps({"pids": {"launcher": gone.pid}}))
    choose(again)


def test_a_refused_start_changes_nothing_on_disk(tmp_path, capsys):
    """Neither by a report that could not be written, nor by a Redis that is not there, nor by an earlier run."""
    folder = prepare(RunProcess(out=tmp_path / "used"))
    (folder.path / "report.json").write_text("{}")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    nowhere = ["--redis-url", "unix:///nowhere.sock"]
    for arguments, named in (
        (["--out", "new", "--json-report", str(tmp_path)], "is a folder"),
        (["--out", "new", "--json-report", "file/report.json"], "--json-report"),
        (["--out", "used", "--overwrite", "--json-report", str(tmp_path)], "is a folder"),
        (["--out", "file"], "--out"),
        (["--out", "file/new"], "--out"),
        (["--out", "new", *nowhere], "nowhere.sock"),
        (["--out", "used", "--overwrite", *nowhere], "nowhere.sock"),
    ):
        assert cli.main(["run", *arguments]) != 0
        assert named in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before, arguments


def test_the_report_may_go_to_a_folder_that_is_still_to_be_made(tmp_path):
    choose(RunProcess(out=tmp_path / "out", json_report=tmp_path / "new" / "folder" / "report.json"))
    assert list(tmp_path.iterdir()) == []


def test_without_out_the_folder_is_named_by_the_time():
    assert prepare(RunProcess()).path.parent == Path("runs")


def test_the_shared_settings_file_suits_every_party(tmp_path):
    """All parties read the same file and find in it what the launcher was told."""
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(RunProcess(seq_len=64, eval_every="7s", lease_s=3.0, pace="50ms")))
    known = frozenset(RunProcess.model_fields)
    learner = load(LearnerProcess, {}, path, known)
    assert (learner.seq_len, learner.pace) == (64, 0.05)
    assert load(SyncerProcess, {}, path, known).lease_s == 3.0
    evaluator = load(EvaluatorProcess, {}, path, known)
    assert (evaluator.eval_every, evaluator.threads) == (7.0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip", float("inf")), ("lr", 1e-30), ("seed", 2**63 - 1), ("compile", True)]
    + [("data", text) for text in ("a\nb", "tab\tbell\x07\x1b\x7f", "'''", '"""', "C:\\new\\u0041", "日本 \u2028 é")],
)
def test_whatever_a_setting_is_the_settings_file_can_be_read(tmp_path, name, value):
    """Every child gets exactly what the launcher was told."""
    folder = Folder(tmp_path)
    folder.write_settings(RunProcess(**{name: value}))
    read = load(LearnerProcess, {}, folder.settings, frozenset(RunProcess.model_fields))
    assert getattr(read, name) == value


def test_no_secret_reaches_a_file(tmp_path):
    told = RunProcess(redis_url="redis://me:hunter2@host:1/0", redis_password="hunter3")  # noqa: S106  # made up
    folder = Folder(tmp_path)
    folder.write_settings(told)
    folder.write_run("unix:///tmp/s?password=hunter4", told, {})
    written = "".join(file.read_text() for file in tmp_path.iterdir() if file.is_file()) + json.dumps(plain(told))
    for secret in ("hunter2", "hunter3", "hunter4"):
        assert secret not in written


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379", "redis://host:6379"),
        ("redis://:pw@host:6379/1", "redis://:***@host:6379/1"),
        ("rediss://me:p@w@host", "rediss://me:***@host"),
        ("unix:///tmp/r.sock?password=pw&db=1", "unix:///tmp/r.sock?password=***&db=1"),
    ],
)
def test_urls_are_shown_without_their_secrets(url, shown):
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"redis_url": "redis://h", "redis_port": 1}, "--redis-port"),
        ({"quorum": 5}, "quorum=5.*learners=4"),
        ({"redis_url": "redis://h", "method": "data-parallel"}, "--redis-url"),
        ({"checkpoint_every": 5.0, "method": "data-parallel"}, "--checkpoint-every"),
        ({"redis_port": 1, "method": "data-parallel"}, "--redis-port"),
        ({"syncers": 2, "method": "data-parallel"}, "--syncers"),
        ({"state_every": 5.0, "method": "data-parallel"}, "DILOCO_STATE_EVERY"),
        ({"drain_s": 9.0, "method": "data-parallel"}, "DILOCO_DRAIN_S"),
        ({"syncers": 3, "http_port": 65534}, "http_port=65534.*the last would be above 65535"),
        ({"quorum": 2, "outer": "nesterov", "lease_s": 9.0, "method": "data-parallel"}, "--quorum; --outer; --lease-s"),
        ({"outer_lr": 0.5, "method": "data-parallel"}, "--outer-lr needs a different --method"),
        ({"grace_gamma": 0.5, "method": "data-parallel"}, "DILOCO_GRACE_GAMMA"),
        ({"http_port": 8080, "method": "data-parallel"}, "--http-port"),
        ({"outer_momentum": 0.0}, "outer=halley needs an outer momentum above 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, named):
    with pytest.raises(UsageError, match=named):
        check(RunProcess(**settings))


def test_the_baseline_takes_what_it_uses_and_what_is_as_usual():
    used = {"tokens": 5, "lr": 1e-3, "threads": 2, "compile": True, "eval_every": 1.0, "run": "mine", "pace": 0.1}
    check(RunProcess(method="data-parallel", quorum=1, lease_s=5.0, **used))


def test_a_remedy_is_one_that_helps():
    """The quorum of a resumed run stays."""
    with pytest.raises(UsageError, match=r"pass more --learners or a smaller --quorum or --redis-port"):
        check(RunProcess(quorum=5))
    with pytest.raises(UsageError, match=r"pass more --learners or --redis-port"):
        check(RunProcess(quorum=5, resume=Path("somewhere")))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kill_learner": 4}, "use a number from 0 to 3"),
        ({"kill_learner": 1, "kill_at": 0.7}, "restart_at=0.6"),
        ({"method": "data-parallel"}, "method"),
        ({"kill_learner": 0, "learners": 1}, "--learners 2 or more"),
    ],
)
def test_a_demonstration_that_cannot_be_is_refused(settings, named):
    check_demo(DemoProcess())
    with pytest.raises(UsageError, match=named):
        check_demo(DemoProcess(**settings))


def test_the_papers_method_is_the_papers():
    """RDA with the mean on embeddings, Nesterov, no warm-up, no ramp; P = 24 if the model has so many tensors."""
    paper = with_preset(RunProcess(method="paper", model="small"))
    assert (paper.fragments, paper.sync_interval, paper.overlap_steps, paper.quorum) == (24, 24, 2, 1)
    assert (paper.merge, paper.outer, paper.outer_warmup, paper.first_interval) == ("rda", "nesterov", 0, 0)
    assert (paper.codec, paper.weights, paper.grace_gamma) == ("bf16", "tokens", RunProcess().grace_gamma)
    (note,) = method_notes(paper)
    assert "not published: outer rate and momentum" in note
    small = with_preset(RunProcess(method="paper", model="tiny"))
    assert small.fragments == 11
    assert "P = 11 instead of 24" in method_notes(small)[1]
    assert method_notes(RunProcess()) == []


def test_a_method_sets_what_was_not_given():
    """DiLoCo: the whole model at once, all learners in each merge; what was asked for stays."""
    diloco = with_preset(RunProcess(method="diloco", learners=3))
    assert (diloco.fragments, diloco.quorum, diloco.grace_gamma, diloco.overlap_steps) == (1, 3, 0.0, 0)
    assert "quorum = 3\n" in to_toml(diloco)
    asked = with_preset(RunProcess(method="streaming", learners=3, quorum=2, fragments=8))
    assert (asked.fragments, asked.quorum, asked.grace_gamma) == (8, 2, 0.0)
    assert (asked.outer_lr, asked.outer_momentum, asked.outer_warmup, asked.first_interval) == (0.4, 0.9, 0, 0)
    assert with_preset(RunProcess()) == RunProcess()


def test_nesterov_brings_its_own_momentum_and_warm_up() -> None:
    def chosen(**given: Any) -> tuple[float, float, int]:
        sync = SyncSettings(**given).with_method(learners=3)
        return sync.outer_lr, sync.outer_momentum, sync.outer_warmup

    assert chosen() == (1.0, 0.7, 6)
    assert chosen(outer="nesterov") == (1.0, 0.5, 24)
    assert chosen(outer="nesterov", outer_momentum=0.7) == (1.0, 0.7, 24)
    assert chosen(method="paper") == chosen(method="paper", outer="nesterov") == (0.7, 0.9, 0)
    assert chosen(method="paper", outer="halley") == (0.7, 0.9, 0)
    once = SyncSettings(outer="nesterov").with_method()
    assert once.model_fields_set == {"outer"}, "a party that was given only the optimizer asks for nothing else"
    assert once.with_method() == once


def test_methods_mean_in_a_run_what_they_mean_in_the_lab():
    """But for what only the lab can do: wait, and mix."""
    for name, method in METHODS.items():
        assert method.settings == {n: v for n, v in LAB_PRESETS[name].items() if n not in ("wait", "adopt")}


@pytest.mark.parametrize("settings", [{"quorum": 5, "redis_port": 1}, {"quorum": 5, "redis_url": "redis://h"}])
def test_a_quorum_that_others_can_make_up_is_allowed(settings):
    check(RunProcess(**settings))


@pytest.mark.parametrize("resume", [None, "runs/earlier"])
def test_data_that_is_not_there_is_said_before_anything_is_started(resume):
    """Of a resumed run it is the checkpoint's, which the user did not type: the error says so."""
    with pytest.raises(UsageError, match=r"data='nothere': no such file or folder here") as refused:
        check(RunProcess(data="nothere", resume=resume))
    assert ("pass --data if the data has moved" in str(refused.value)) is (resume is not None)


def test_a_data_set_of_a_hub_needs_its_library_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(option_checks, "find_spec", lambda name: name)
    check(RunProcess(data="hf:some/set"))
    monkeypatch.setattr(option_checks, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"data='hf:some/set' needs datasets.*'diloco\[data\]'"):
        check(RunProcess(data="hf:some/set"))


def test_a_restart_at_the_very_end_is_refused():
    """The run would be over before it."""
    with pytest.raises(UsageError, match=r"restart_at.*less than 1"):
        load(DemoProcess, {"kill_learner": "0", "restart_at": "1"})


# --- finding a run -------------------------------------------------------------------------------------


def write_run(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True)
    fields = {"redis_url": "unix:///tmp/x", "run": "r", "pids": {"launcher": os.getpid()}} | changes
    (folder / "run.json").write_text(json.dumps(fields))


def test_without_a_folder_the_redis_url_counts_and_then_the_newest_run():
    assert locate(BusSettings(redis_url="redis://h", run="x"), None).redis_url == "redis://h"
    with pytest.raises(UsageError, match="no run in"):
        locate(BusSettings(), None)
    write_run(Path("runs/a"), run="a")
    write_run(Path("runs/b"), run="b")
    os.utime("runs/a", (0, 0))
    assert locate(BusSettings(), None).run == "b"
    assert locate(BusSettings(run="a"), None).run == "a", "a name that was given counts"
    with pytest.raises(UsageError, match="no run 'c' in"):
        locate(BusSettings(run="c"), None)


@pytest.mark.parametrize(
    ("left", "wrong"),
    [
        ({"method": "data-parallel", "redis_url": None}, "budget_tokens: missing"),
        ({"method": "data-parallel", "redis_url": None, "budget_tokens": 0}, "budget_tokens: too small"),
        ({"run": "a b"}, "run: cannot be a name"),
        ({"pids": {"the learner": 1}}, "pids: the learner: cannot be a name"),
        ({"pids": {"launcher": "x"}}, "pids: launcher: not a whole number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_run_file_is_refused_by_name_with_what_to_do(left, wrong, tmp_path, capsys):
    """What is missing or cannot be so; no traceback."""
    write_run(tmp_path / "out", **left)
    assert cli.main(["status", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'out' / 'run.json'} is damaged: {wrong}" in said
    assert "if that run is over, delete the file" in said


@pytest.mark.parametrize("command", [["finish"], ["watch"]])
def test_a_live_run_without_a_redis_is_not_said_to_be_over(command, tmp_path, capsys):
    """The data-parallel baseline has none."""
    write_run(tmp_path / "out", method="data-parallel", redis_url=None, budget_tokens=5)
    assert cli.main([*command, str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "runs without a Redis" in said
    assert f"diloco status {tmp_path / 'out'}" in said


def test_the_page_of_a_run_is_found_where_its_terminal_is_closed(tmp_path, capsys):
    """run.json has the address, which has no token; nothing is left of it once the run is over."""
    folder = Folder(tmp_path)
    told = RunProcess(http_token="hunter4-hunter4")  # noqa: S106  # made up
    folder.write_run("unix:///tmp/x", told, {}, "http://127.0.0.1:5/")
    assert locate(BusSettings(), tmp_path).page == "http://127.0.0.1:5/"
    assert "hunter4" not in (tmp_path / "run.json").read_text()
    folder.mark_closing()
    place = locate(BusSettings(), tmp_path)
    assert (place.redis_url, place.page, place.closing) == (None, None, True)


def test_a_run_that_closes_has_no_outage(tmp_path, capsys, monkeypatch):
    """Its own Redis is gone, and the report not there yet: status says so, where it will be, or why not."""
    folder = Folder(tmp_path)
    folder.write_run(f"unix://{tmp_path}/none.sock", RunProcess(), {})
    assert cli.main(["status", str(tmp_path)]) == 1
    assert "Redis" in capsys.readouterr().err
    folder.mark_closing()
    assert cli.main(["status", str(tmp_path)]) == 0
    assert f"is closing: its report will be {tmp_path / 'report.json'}" in capsys.readouterr().out
    assert cli.main(["status", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["phase"], found["report"]) == ("closing", str(tmp_path / "report.json"))
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "is being written; try again soon" in capsys.readouterr().err
    folder.mark_ended("stopped before its first step")
    monkeypatch.setattr("diloco.launcher.locate.is_live", lambda folder: False)
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "was stopped before its first step; its logs are in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "trainer", "said"),
    [
        (
            {"l1": LearnerLaunch(("--learner-id", "l1", "--threads", "3"), {"GPU": "1"})},
            {},
            "--learner-id l1 --threads 3",
        ),
        ({}, {"data_fingerprint": "0123"}, "learner --run my-run --learner-id l1"),
        ({}, {}, "your own program, in run 'my-run', with DILOCO_LEARNER_ID=l1"),
    ],
)
def test_status_says_how_a_dead_learner_is_started_again(own, trainer, said):
    """One of `diloco run` as that did it. Nobody is asked for who left, or as the run ends."""
    l0, l1 = samples.seen("l0"), samples.seen("l1", age_s=60.0)
    left, heads = samples.seen("l2", age_s=9.0, left=True), [samples.head(p) for p in range(2)]
    for seen, phase, missed in (
        ([l0, l1, left], Phase.RUNNING, "l1"),
        ([l0, left], Phase.RUNNING, None),
        ([l0, l1], Phase.DRAINING, None),
    ):
        state = samples.run_state(phase=phase)
        spec = samples.spec().model_copy(update={"trainer": trainer})
        found = build_status("my-run", spec, state, seen, heads, None, [], 2000.0)
        place = Place("my-run", "redis://:secret@h:1", None, own=own)
        last = str(list(_RunInfo(place, found).as_text(None))[-1])
        assert (said in last and last.startswith("restart    ")) if missed else "restart" not in last
        assert "secret" not in last


@pytest.mark.redis
def test_a_redis_that_goes_while_status_asks_goes_with_its_run(tmp_path, redis_server, capsys, monkeypatch):
    """Status has found a live run; what it meets then is the end of it."""
    folder = Folder(tmp_path)
    own = {"learner-1": LearnerLaunch(("--learner-id", "learner-1"), {"CUDA_VISIBLE_DEVICES": "1"}, "/data")}
    folder.write_run(redis_server, RunProcess(), {}, "http://127.0.0.1:5/", own)
    assert locate(BusSettings(), tmp_path).own == own
    assert cli.main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "page       http://127.0.0.1:5/"
    assert cli.main(["status", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == "http://127.0.0.1:5/"

    async def closes(*_: Any, **__: Any) -> None:
        folder.mark_closing()
        raise BusUnavailable("gone")

    monkeypatch.setattr("diloco.status._read", closes)
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "is closing" in capsys.readouterr().out


def test_a_run_whose_launcher_is_gone_is_called_so(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_run(tmp_path / "out", pids={"launcher": gone.pid})
    with pytest.raises(UsageError, match="ended without a report"):
        locate(BusSettings(), tmp_path / "out")
    with pytest.raises(UsageError, match="not an output folder"):
        locate(BusSettings(), tmp_path)


def test_the_password_of_a_live_run_comes_from_the_environment(tmp_path):
    write_run(tmp_path / "out", redis_url="redis://:***@h")
    with pytest.raises(UsageError, match="DILOCO_REDIS_URL"):
        locate(BusSettings(), tmp_path / "out")
    assert locate(BusSettings(redis_url="redis://:pw@h"), tmp_path / "out").redis_url == "redis://:pw@h"


@pytest.mark.redis
def test_a_run_that_is_not_there_is_told_from_one_that_waits(tmp_path, redis_server, capsys):
    """A syncer that waits for its first learner says that it is here; of any other name nothing is on this Redis."""
    name = f"waits-{tmp_path.name}"
    assert cli.main(["status", "--redis-url", redis_server, "--run", name]) == 1
    assert f"this Redis has no run '{name}': nothing of it has started yet, or check --run" in capsys.readouterr().err
    ask = ["status", "--json", "--redis-url", redis_server, "--run", name]
    with a_syncer(redis_server, name):
        wait_for(lambda: cli.main(ask) == 0)
        status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status["phase"], status["reason"]) == ("waiting", "waiting for the first learner")


def test_status_and_tape_of_a_finished_run_need_no_redis(tmp_path, capsys):
    report = json.loads(json.dumps(build(outcome())))
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "report.json").write_text(json.dumps(report))
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert cli.main(["status"]) == 0
    assert "2.5000" in capsys.readouterr().out
    tape = tmp_path / "runs" / "x" / "tape"
    tape.mkdir()
    (tape / "0.msgpack").touch()
    for folder in ((), (str(tape),)):
        assert cli.main(["tape", *folder]) == 2
        assert "tape is empty" in capsys.readouterr().err


# --- children ----------------------------------------------------------------------------------------------


def test_children_get_no_setting_but_redis_from_the_environment(monkeypatch):
    """The settings file decides: a variable would override what the launcher was told by a flag."""
    monkeypatch.setenv("DILOCO_TOKENS", "5")
    monkeypatch.setenv("diloco_quorum", "3")  # settings are read in any case
    found = environment(3, "redis://h")
    assert not {"DILOCO_TOKENS", "diloco_quorum"} & set(found)
    assert found["DILOCO_REDIS_URL"] == "redis://h"
    assert (found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"]) == ("3", "passive")


@pytest.mark.parametrize("path", [str(ROOT), None])
def test_a_file_in_the_current_folder_does_not_stand_in_for_a_module(tmp_path, monkeypatch, path):
    """A user's own pipeline.py is left alone, whether the program is found through PYTHONPATH or not."""
    monkeypatch.delenv("PYTHONPATH") if path is None else monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "pipeline.py").write_text("raise SystemExit('the wrong pipeline')\n")
    with Children(tmp_path / "logs") as children:
        child = children.start("learner-0", ["--version"], environment(1, None))
        wait_for(lambda: not child.alive)
        assert child.status == 0, child.tail()


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(launch, "usable_cores", lambda: 8)
    assert [threads_for(n, None) for n in (1, 3, 4, 16)] == [8, 2, 2, 1]
    assert threads_for(4, 5) == 5


def test_a_child_that_fails_leaves_its_last_lines(tmp_path):
    with Children(tmp_path / "logs") as children:
        child = children.start("learner-0", ["learner", "--tokens", "many"], environment(1, None))
        wait_for(lambda: not child.alive)
        assert child.status == 2
        assert "learner-0 ended with status 2" in child.describe_end()
        assert "tokens='many'" in child.describe_end()


def test_leaving_the_block_kills_every_child_however_it_is_left(tmp_path):
    children = Children(tmp_path / "logs")

    def crash() -> None:
        with children:
            # waits for ever for a Redis that is not there
            child = children.start("syncer", ["syncer", "--http-port", "0"], environment(1, "unix:///nowhere.sock"))
            wait_for(lambda: "bus_unavailable" in child.tail())
            assert os.getpgid(child.pid) == child.pid  # a terminal's Ctrl-C does not reach it
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    child = children["syncer"]
    assert not is_running(child.pid)
    assert child.ending() == "was killed by SIGKILL"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_child_does_not_outlive_a_launcher_that_is_killed(tmp_path):
    program = f"""
import sys, time
from pathlib import Path
from diloco.launcher.launch import Children, environment
with Children(Path({str(tmp_path)!r})) as children:
    child = children.start("syncer", ["syncer", "--http-port", "0"], environment(1, "unix:///nowhere.sock"))
    while "bus_unavailable" not in child.tail():
        time.sleep(0.02)
    print(child.pid, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert is_running(pid)
        launcher.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(pid))


# --- export --------------------------------------------------------------------------------------------------


def test_export_of_a_baseline_checkpoint_never_overwrites_unasked(tmp_path, capsys):
    folder = tmp_path / "out" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    safetensors.numpy.save_file({"w": np.arange(4.0, dtype=np.float32)}, folder / "globals.safetensors")
    target = tmp_path / "model.safetensors"
    export(tmp_path / "out", target)
    assert safetensors.numpy.load_file(target)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(UsageError, match="exists"):
        export(tmp_path / "out", target)
    export(tmp_path / "out", target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_whose_checkpoint_it_is_shows_in_it_and_not_in_its_name(tmp_path, capsys):
    """The baseline's goes by any name; one that says it is a run's is checked as such, even in `checkpoint`."""
    tensors = {"w": np.arange(4.0, dtype=np.float32)}
    for name, state in (("renamed", {"format": 1, "spec": {}}), ("checkpoint", {"fragments": []})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(json.dumps(state))
        safetensors.numpy.save_file(tensors, tmp_path / name / "globals.safetensors")
    export(tmp_path / "renamed", tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"state\.json: format"):
        export(tmp_path / "checkpoint", tmp_path / "other.safetensors")
    (tmp_path / "renamed" / "globals.safetensors").write_bytes(b"damaged")
    assert cli.main(["export", "renamed", "other.safetensors"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: renamed/globals.safetensors cannot be read as a safetensors file: "
    )


def test_a_report_that_cannot_be_written_names_its_file(tmp_path):
    """A folder here; a disk that is full says no path of its own."""
    assert finish._write({}, tmp_path / "report.json") == []
    (problem,) = finish._write({}, tmp_path)
    assert problem.startswith(f"the report cannot be written to {tmp_path} (")


def test_generated_text_cannot_command_the_terminal():
    assert printable("a\x1b[2Jb\n\tc\x07", finish.LINES) == "a?[2Jb\n\tc?"


def test_the_status_of_a_baseline_run_comes_from_its_progress_file(tmp_path):
    from diloco.launcher.baseline import baseline_status

    out = tmp_path / "out"
    write_run(out, redis_url=None, budget_tokens=200)
    assert baseline_status(out)["phase"] == "waiting"
    row = {"id": "learner-0", "step": 5, "tokens": 50, "tokens_per_s": 10.0, "loss": 3.0, "step_s": 0.1}
    lines = [
        {"tokens": 50, "elapsed_s": 5.0, "loss": 3.0, "val_loss": 3.5, "learners": [row]},
        {"tokens": 100, "elapsed_s": 9.0, "loss": 2.0, "val_loss": None, "learners": [row | {"step": 9}]},
    ]
    (out / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    found = baseline_status(out)
    assert (found["progress"], found["evaluation"]["loss"], found["learners"][0]["step"]) == (0.5, 3.5, 9)
    render(found)
