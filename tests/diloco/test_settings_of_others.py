"""What a command does with settings that are another's: it obeys, refuses or ignores them, and says so."""

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from diloco import cli, commands
from diloco.options import CHOSEN_BY_LAUNCHER, RunProcess
from diloco.pipeline.errors import UsageError
from diloco.pipeline.process import logs
from diloco.pipeline.settings import SyncerProcess, SyncSettings, load
from diloco_studies.strikes.settings import NOT_OF_CHAOS

URL = "redis://localhost:1"


@pytest.fixture(autouse=True)
def _no_logs(monkeypatch, own_environment):
    monkeypatch.setattr(logs, "configure", lambda level: None)


@pytest.fixture
def started(monkeypatch) -> list[Any]:
    """Settings with which something was started; it is a stand-in that ends at once."""
    seen: list[Any] = []

    def start(settings: Any, *_: Any) -> int:
        seen.append(settings)
        return 0

    party = SimpleNamespace(train=start, main=start, evaluate_run=start)
    monkeypatch.setattr(commands, "load_extra", lambda module, command: party)
    monkeypatch.setattr(importlib.import_module("diloco.launcher.run"), "main", start)
    strikes = importlib.import_module("diloco_studies.strikes.command")
    monkeypatch.setattr(strikes, "main", start)
    return seen


def way(name: str, value: str, by: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Flags with which a setting comes from a variable, of any case, or from a file."""
    if by == "file":
        (folder / "some.toml").write_text(f'{name} = "{value}"\n')
        return ["--config", str(folder / "some.toml")]
    monkeypatch.setenv(f"DILOCO_{name.upper()}" if by == "variable" else f"diloco_{name}", value)
    return []


@pytest.fixture(params=["variable", "lower", "file"])
def given(request, monkeypatch, tmp_path):
    return lambda name, value: way(name, value, request.param, monkeypatch, tmp_path)


@pytest.mark.parametrize("command", ["learner", "syncer"])
def test_a_method_that_needs_no_syncer_is_no_partys(command, given, started, capsys):
    assert cli.main([command, "--redis-url", URL, *given("method", "data-parallel")]) == 2
    assert "method='data-parallel'" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("command", ["learner", "syncer"])
def test_a_method_may_be_said_to_a_party(command, given, started):
    assert cli.main([command, "--redis-url", URL, *given("method", "paper")]) == 0
    assert len(started) == 1


@pytest.mark.parametrize("command", ["run", "chaos"])
@pytest.mark.parametrize(("name", "value"), [("kill_learner", "1"), ("kill_at", "0.3"), ("restart_at", "0.7")])
def test_what_became_a_setting_of_the_demonstration_is_refused_elsewhere(command, name, value, given, started, capsys):
    assert cli.main([command, *given(name, value)]) == 2
    said = capsys.readouterr().err
    assert name in said.lower()
    assert "`diloco demo`" in said
    assert started == []


@pytest.mark.parametrize("command", ["run", "demo", "chaos"])
def test_the_device_of_one_learner_is_no_setting_of_a_run(command, given, started, capsys):
    """It is refused, and where those of all learners are said is told; "auto", which is so anyway, may be said."""
    assert cli.main([command, *given("device", "cuda:1")]) == 2
    said = capsys.readouterr().err
    assert "device" in said.lower()
    assert "--devices" in said
    assert started == []
    assert cli.main([command, *given("device", "auto")]) == 0


@pytest.mark.parametrize("name", sorted(NOT_OF_CHAOS | CHOSEN_BY_LAUNCHER))
def test_chaos_ignores_what_it_chooses_itself_with_a_word(name, given, started, capsys):
    """Wherever it was given, and whatever it was."""
    assert cli.main(["chaos", *given(name, "7")]) == 0
    assert re.search(f"warning: .*{name}.* is ignored", capsys.readouterr().err, re.IGNORECASE)
    assert getattr(started[0], name) == RunProcess.model_fields[name].default
    assert name not in started[0].model_fields_set


@pytest.mark.parametrize("command", ["run", "demo"])
def test_what_the_launcher_chooses_for_each_process_is_ignored_with_a_word(command, given, started, capsys):
    assert cli.main([command, *given("checkpoint_dir", "mine")]) == 0
    assert "is ignored" in capsys.readouterr().err
    assert started[0].checkpoint_dir is None


def test_what_is_nobody_elses_is_obeyed_without_a_word(given, started, capsys):
    assert cli.main(["chaos", *given("quorum", "3")]) == 0
    assert started[0].quorum == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "flags", "said"),
    [
        (SyncerProcess, {"http_token": None}, "DILOCO_HTTP_TOKEN or the settings file"),
        (RunProcess, {}, "DILOCO_LEARNER_ID or the settings file"),
        (SyncSettings, {"grace_gamma": 2.0}, "DILOCO_GRACE_GAMMA or the settings file"),
        (SyncSettings, {"quorum": 0}, "--quorum or DILOCO_QUORUM or the settings file"),
    ],
)
def test_a_complaint_names_only_flags_that_there_are(kind, flags, said, monkeypatch):
    """Neither of secrets, nor of experts' settings, nor of what this command has no flag for."""
    monkeypatch.setenv("DILOCO_HTTP_TOKEN", "short")
    monkeypatch.setenv("DILOCO_LEARNER_ID", "a b")
    with pytest.raises(UsageError) as error:
        load(kind, flags)
    named = [line for line in str(error.value).splitlines() if f"set it with {said}" in line]
    assert len(named) == 1, str(error.value)


def literals() -> Iterator[tuple[str, str]]:
    """(place, flag) of all flags in text that the product shows."""
    root = Path(__file__).parents[2]
    for folder in ("diloco", "pipeline", "syncer", "workers"):
        for path in (root / folder).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", path.read_text()):
                    yield str(path.relative_to(root)), flag


def test_every_flag_that_a_message_names_is_a_flag():
    """Of some command, of torchrun, which the baseline and ranks are started with, or of Redis' own client."""
    torchrun = {"--standalone", "--max-restarts", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"}
    client = {"--cluster", "--cluster-slave", "--user", "--pass", "--tls", "--cacert", "--cert", "--key"}
    known = {"--help", "--version", "--no"} | torchrun | client
    for name in cli.COMMANDS:
        top: Any = get_command(cli.load_command(name))
        for command in (top, *getattr(top, "commands", {}).values()):
            for parameter in command.params:
                known |= {*parameter.opts, *parameter.secondary_opts}
    found = list(literals())
    assert len(found) > 50
    assert [one for one in found if one[1] not in known] == []


def suggestions(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(list(arguments)) == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_typo_is_answered_with_flags_and_commands_that_there_are(capsys):
    """None that is gone, for experts only, or for other commands to call."""
    for wrong in ("--kil-learner", "--restart-a", "--clipp", "--grace-gama", "--log-loses"):
        said = suggestions(capsys, "run", wrong, "2")
        assert wrong in said
        assert not re.search("--(kill-learner|restart-at|clip|grace-gamma|log-losses)(?![a-z])", said), said
    assert "--quorum" in suggestions(capsys, "run", "--quorm", "2")
    said = suggestions(capsys, "ranc")
    assert "rank" not in said
    assert "run" in suggestions(capsys, "ran")


def test_a_settings_file_may_have_been_saved_with_a_mark_of_its_encoding(tmp_path):
    """As Windows' editors do."""
    (tmp_path / "some.toml").write_bytes(b"\xef\xbb\xbfquorum = 3\n")
    assert load(SyncSettings, config=tmp_path / "some.toml").quorum == 3


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--temperature", text] for text in ("inf", "nan", "-1", "1e-320", "1e300")),
        *(["--seed", text] for text in ("-1", str(2**63), str(10**30))),
        ["--prompt", "a\udcff"],
    ],
)
def test_what_no_text_can_be_drawn_with_is_refused_by_its_name(arguments, capsys):
    """Before a checkpoint is looked for."""
    assert cli.main(["sample", "nowhere", *arguments]) == 2
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert "nowhere" not in said


def test_export_names_the_folder_that_it_makes_and_takes_only_a_files_place(tmp_path, capsys, monkeypatch):
    """As for a run's output and its report, a folder may be one that is still to be made; a slip in its name shows."""
    export = importlib.import_module("diloco.export")
    tensor = export.Tensor("F32", (2,), 8, lambda: bytes(8))
    found = export.Globals({"w": tensor}, "of a test", {}, {}, "nowhere")
    monkeypatch.setattr(export, "make_of_globals", lambda place, make: make(found))
    export.export(tmp_path, tmp_path / "new" / "model.safetensors")
    assert f"{tmp_path / 'new'}: created this folder\n" in capsys.readouterr().out
    export.export(tmp_path, tmp_path / "new" / "other.safetensors")
    assert "created this folder" not in capsys.readouterr().out
    (tmp_path / "new" / "to").symlink_to("other.safetensors")
    before = (tmp_path / "new" / "other.safetensors").stat().st_ino
    export.export(tmp_path, tmp_path / "new" / "to", overwrite=True)
    assert (tmp_path / "new" / "to").is_symlink()
    assert (tmp_path / "new" / "other.safetensors").stat().st_ino != before
    os.mkfifo(tmp_path / "new" / "pipe")
    for out in (tmp_path / "new" / "pipe", tmp_path / "new", tmp_path / "new" / "."):
        with pytest.raises(UsageError, match="is not a file: give a file name"):
            export.export(tmp_path, out, overwrite=True)
