import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from typer.main import get_command

import diloco
from diloco import cli, commands
from diloco.launcher.folder import choose
from diloco.launcher.option_checks import check
from diloco.options import RunProcess
from diloco.pipeline.errors import BusUnavailable, NotPermitted, SpecMismatch, UsageError
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.process import logs
from diloco.pipeline.settings import LearnerProcess, SyncerProcess, is_expert
from diloco_studies.virtual.virtual_time import run_virtual
from tests.parties import python
from tests.syncer.test_replay import record_run
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

COMMANDS = [name for name, entry in cli.COMMANDS.items() if entry.about and name != "bench"]
"""Of benchmarks some are made of torch."""
URL = "redis://localhost:1"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "configure", lambda level: None)
    monkeypatch.delenv("DILOCO_REDIS_URL", raising=False)


@pytest.fixture
def started(monkeypatch):
    """Settings with which a party was started; the party itself is a stand-in that ends at once."""
    seen = []

    def start(settings):
        seen.append(settings)
        return 0

    party = SimpleNamespace(train=start, main=start, evaluate_run=start)
    monkeypatch.setattr(commands, "load_extra", lambda module, command: party)
    return seen


def test_help_and_the_syncer_need_no_torch():
    """Every command explains itself where torch and matplotlib are missing."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None\n"
        "from diloco.cli import main; sys.exit(any([main([command, '--help']) for command in sys.argv[1:]]))"
    )
    done = python("-W", "error", "-c", program, *COMMANDS)
    assert done.returncode == 0, done.stderr
    assert [command for command in COMMANDS if f"Usage: diloco {command}" not in done.stdout] == []


def test_version_and_plain_call(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("diloco ")
    cli.main([])
    assert "learner" in capsys.readouterr().out


def test_the_version_is_the_installed_ones(monkeypatch):
    """A source tree that is not installed has none, which is no error for a program that lists versions."""
    assert diloco.__version__ == metadata.version("diloco")
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
    assert diloco.__version__ == "0+unknown"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal_with_no_word_or_sentence_cut(command, columns, capsys, monkeypatch):
    """Paths and addresses are whole, every line of a paragraph is filled, and no limit is a number of 16 digits."""
    monkeypatch.setenv("COLUMNS", str(columns))
    cli.main([command, "--help"] if command else ["--help"])
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    assert re.findall(r"[\w,:]\.\.\.$", shown, re.MULTILINE) == []
    assert re.findall(r"[0-9]{16,}", shown) == []
    assert [line for line in shown.splitlines() if len(line) > columns] == []
    paragraphs = [part.splitlines() for part in shown.split("\n\n")]
    for one in (lines for lines in paragraphs if all(re.match("  [^ -]", line) for line in lines)):
        for line, following in pairwise(one):
            assert len(line) + 1 + len(following.split()[0]) > min(columns, 100) - 2, line


def test_checkpoints_that_would_die_with_the_syncer_are_refused(started, capsys):
    """The memory of a process is a store for tests alone."""
    assert cli.main(["syncer", "--redis-url", URL, "--checkpoint-dir", "memory://x"]) == 2
    assert "memory://x would be lost with the syncer: use a folder" in capsys.readouterr().err
    assert started == []


def test_flags_reach_the_settings_with_units(started):
    assert cli.main(["learner", "--redis-url", URL, "--seq-len", "64", "--pace", "200ms", "--codec", "fp32"]) == 0
    [settings] = started
    assert isinstance(settings, LearnerProcess)
    assert (settings.seq_len, settings.pace, settings.codec, settings.run) == (64, 0.2, "fp32", "run")
    assert {"seq_len", "pace", "codec"} <= settings.model_fields_set
    assert "batch" not in settings.model_fields_set


def test_a_flag_beats_the_environment_which_beats_the_file(started, monkeypatch, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("quorum = 2\nfragments = 4\nsync_interval = 10\nlearners = 3\n")
    monkeypatch.setenv("DILOCO_FRAGMENTS", "5")
    monkeypatch.setenv("DILOCO_SYNC_INTERVAL", "11")
    assert cli.main(["syncer", "--redis-url", URL, "--config", str(config), "--sync-interval", "12"]) == 0
    [settings] = started
    assert isinstance(settings, SyncerProcess)
    assert (settings.quorum, settings.fragments, settings.sync_interval) == (2, 5, 12)


@pytest.mark.parametrize("command", ["learner", "syncer", "evaluator"])
def test_a_party_without_redis_is_told_how_to_name_one(command, capsys):
    assert cli.main([command]) == 2
    message = capsys.readouterr().err
    assert "--redis-url" in message
    assert "DILOCO_REDIS_URL" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["learner", "--clip", "2"], "DILOCO_CLIP, or clip in a file for --config"),
        (["syncer", "--drain-s", "9s"], "DILOCO_DRAIN_S, or drain_s in a file for --config"),
        (["run", "--grace-gamma=0.5"], "DILOCO_GRACE_GAMMA"),
        (["run", "--log-losses"], "DILOCO_LOG_LOSSES"),
        (["demo", "--device", "cpu"], "--devices"),
        (["run", "--no-log-losses"], "DILOCO_LOG_LOSSES"),
        (["run", "--kill-learner", "1"], "`diloco demo`"),
    ],
)
def test_a_flag_that_is_gone_says_where_its_setting_is(arguments, instead, capsys):
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: this command does not have {arguments[1].partition('=')[0]}: ")
    assert instead in said


def test_the_flags_of_a_run_fit_on_a_page():
    """About forty; the rest is for experts."""
    options = {one.name for one in get_command(cli.load_command("run")).params}
    assert 30 < len(options) <= 40
    assert not [name for name in RunProcess.model_fields if is_expert(RunProcess, name) and name in options]


def test_a_sample_of_no_checkpoint_is_refused_before_torch_is_imported():
    """Which takes seconds, and gigabytes where it is missing."""
    code = (
        "import sys; sys.modules['torch'] = None; from diloco.cli import main; sys.exit(main(['sample', '/nonexist']))"
    )
    done = python("-c", code)
    assert (done.returncode, "no such checkpoint or folder: /nonexist" in done.stderr) == (2, True)


def test_the_list_of_commands_imports_none_of_them():
    """It stays quick."""
    code = "import sys; from diloco.cli import main; main([]); print(*sys.modules)"
    done = python("-c", code)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "diloco.cli" in loaded
    assert not loaded & {"torch", "numpy", "redis", "matplotlib", "diloco_studies", "diloco.workers", "diloco.options"}


def test_where_no_studies_are_installed_their_commands_are_not_listed_and_say_how_to_get_them():
    """The product is whole without them."""
    code = (
        "import sys; sys.modules['diloco_studies'] = None\n"
        "from diloco.cli import main; main([]); sys.exit(main(['lab', 'run', 'x.toml']))"
    )
    done = python("-c", code)
    listed = {line.split()[0] for line in done.stdout.splitlines() if len(line.split()) > 2}
    assert {"run", "acl"} <= listed
    assert not listed & {"chaos", "simulate", "lab", "bench"}
    assert (done.returncode, done.stderr) == (
        2,
        "error: `diloco lab` is part of the studies; in a checkout, install them: "
        f"{sys.executable} -m pip install -c constraints.txt -e studies\n",
    )


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    arguments = ["learner", "--redis-url", URL]
    code = f"import sys; sys.modules['torch'] = None; from diloco.cli import main; sys.exit(main({arguments}))"
    done = python("-c", code)
    assert done.returncode == 2
    assert "pip install 'diloco[learner]'" in done.stderr


@pytest.mark.parametrize(
    ("error", "shown", "status"),
    [
        (SpecMismatch("fragments: here 8, the run has 4"), "fragments: here 8, the run has 4", 2),
        (NotPermitted("no", "ask", "NOPERM"), "no; ask (NOPERM)", 2),
        (BusUnavailable("no route"), "no route", 1),
        (
            OSError(28, "No space left on device"),
            "OSError: [Errno 28] No space left on device; free some space on the disks that this command writes to",
            1,
        ),
        (OSError(28, "No space left on device", "/m/f"), "OSError: [Errno 28] No space left on device: '/m/f'", 1),
        (PermissionError(1, "Operation not permitted"), "[Errno 1] Operation not permitted", 2),
    ],
)
def test_a_failure_is_one_message_without_a_traceback(error, shown, status, monkeypatch, capsys):
    """What a person has to mend before another try helps is 2."""

    def fail(settings):
        raise error

    monkeypatch.setattr(commands, "load_extra", lambda module, command: SimpleNamespace(train=fail))
    assert cli.main(["learner", "--redis-url", URL]) == status
    assert capsys.readouterr().err == f"error: {shown}\n"


def test_a_redis_password_is_never_printed(monkeypatch, capsys):
    monkeypatch.setenv("DILOCO_REDIS_URL", "redis://:hunter2@localhost:1")
    cli.main(["learner", "--help"])
    cli.main(["learner", "--tokens", "many"])
    cli.main(["learner", "--redis-url", "redis://:hunter2@localhost:1", "--run", "not a name"])
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err


def test_replay_prints_what_differs_and_exits_with_1(tmp_path, capsys, monkeypatch):
    """The tape is found around the recording; the same as text and as JSON."""
    run = tmp_path / "run"
    commits = record_run(run / "deltas")
    (run / "tape").mkdir()
    (run / "tape" / "0.msgpack").write_bytes(b"".join(map(encode, commits)))
    capsys.readouterr()
    assert cli.main(["tape", "--replay", str(run / "deltas")]) == 0
    merges = sum(bool(commit.contributions) for commit in commits)
    assert capsys.readouterr().out.startswith(f"all equal: {merges} of {merges} merges of 2 fragments recomputed")
    shutil.move(run / "tape", tmp_path / "elsewhere")
    lost = next(iter((run / "deltas" / "1").glob("2-*.merge")))
    lost.unlink()
    assert cli.main(["tape", "--replay", str(run / "deltas"), str(tmp_path / "elsewhere")]) == 1
    out = capsys.readouterr().out
    assert "differs: fragment 1 version 2: no recording of the merge to digest" in out
    assert cli.main(["tape", "--json", "--replay", str(run / "deltas"), str(tmp_path / "elsewhere")]) == 1
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert [(d["fragment"], d["version"]) for d in differences] == [(1, 2), (1, 3)]
    assert cli.main(["tape", "--replay", str(run / "deltas")]) == 2
    assert "no run in ./runs" in capsys.readouterr().err


def test_a_tape_is_read_from_wherever_a_syncer_archived_it(tmp_path, capsys):
    """A folder of --tape-dir; one with `tape` in it; the output folder of a run that was killed. Else it is told."""
    commits = []

    async def main():
        world = VirtualRun(sync_spec(tokens=2000))
        world.start_syncer(tape_dir=tmp_path / "kept" / "tape")
        await world.finish(VirtualLearner("l", world).start())
        commits.extend(record for record in await world.tape() if isinstance(record, Committed))

    run_virtual(main())
    (tmp_path / "killed").mkdir()
    shutil.copytree(tmp_path / "kept" / "tape", tmp_path / "killed" / "tape")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "killed" / "run.json").write_text(json.dumps({"pids": {"launcher": gone.pid}}))
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for folder in ("kept/tape", "kept", "killed"):
        assert cli.main(["tape", str(tmp_path / folder), "--json"]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [one["version"] for one in shown if one["kind"] == "committed"] == [one.version for one in commits]
    for folder in ("empty", "nowhere"):
        assert cli.main(["tape", str(tmp_path / folder)]) == 2
        said = capsys.readouterr().err
        assert folder in said
        assert "--tape-dir" in said


def test_replay_finds_that_a_tape_has_not_all_that_the_checkpoint_has(tmp_path, capsys):
    """Tape and recording lost their last merge, as on a full disk; the checkpoint of the output folder has it."""
    run, commits = tmp_path / "run", []

    async def main():
        world = VirtualRun(sync_spec(tokens=2000), record_deltas=run / "deltas", checkpoint_dir=run / "checkpoints")
        world.start_syncer()
        await world.finish(VirtualLearner("l", world).start())
        commits.extend(record for record in await world.tape() if isinstance(record, Committed))

    run_virtual(main())
    (run / "tape").mkdir()
    (run / "tape" / "0.msgpack").write_bytes(b"".join(map(encode, commits)))
    assert cli.main(["tape", "--replay", str(run / "deltas")]) == 0
    last = commits.pop()
    (run / "tape" / "0.msgpack").write_bytes(b"".join(map(encode, commits)))
    next((run / "deltas" / str(last.fragment)).glob(f"{last.version}-*.merge")).unlink()
    for more in ([], [str(run)], [str(run / "tape")]):
        capsys.readouterr()
        assert cli.main(["tape", "--replay", str(run / "deltas"), *more]) == 1
        said = capsys.readouterr().out
        assert f"fragment {last.fragment} version {last.version}: the checkpoint has it, with digest" in said


def test_the_folder_of_a_recording(tmp_path):
    """A bare name is one in the output folder; nothing that is there is written to."""
    asked = {"out": tmp_path / "out", "learners": 2}
    folder = choose(RunProcess(record_deltas=Path("deltas"), **asked))
    assert folder.recording(Path("deltas")) == tmp_path / "out" / "deltas"
    assert folder.recording(tmp_path / "else") == tmp_path / "else"
    folders = ["checkpoints", "logs", "tape", "learners"]
    files = ["settings.toml", "run.json", ".run.json", "report.json", "loss.png", "sample.txt"]
    for name in (*map(Path, folders + files), tmp_path / "out", tmp_path / "out" / "learners" / "deltas"):
        with pytest.raises(UsageError, match="the run uses this one itself"):
            choose(RunProcess(record_deltas=name, **asked))
    choose(RunProcess(record_deltas=tmp_path / "out" / "mine" / "logs", **asked))
    (tmp_path / "else").mkdir()
    choose(RunProcess(record_deltas=tmp_path / "else", **asked))
    (tmp_path / "else" / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        choose(RunProcess(record_deltas=tmp_path / "else", **asked))
    with pytest.raises(UsageError, match="cannot be written"):
        choose(RunProcess(record_deltas=tmp_path / "else" / "file", **asked))
    with pytest.raises(UsageError, match="needs a different --method"):
        check(RunProcess(record_deltas=Path("deltas"), method="data-parallel", **asked))
