"""A resumed run is of the method that it was begun with, and says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from diloco import cli
from diloco.launcher import run
from diloco.launcher.folder import plain, resume
from diloco.options import RunProcess, with_preset
from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.files.sums import write_sums
from diloco.pipeline.methods import METHODS, matching_method
from diloco.workers.trainer.models.hf_config import read_hf
from diloco_studies.virtual.virtual_time import run_virtual
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec


def saved(folder: Path, method: str | None, model: str | None = None, **sync: Any) -> Path:
    """Output folder of a run with these settings, with or without the launcher's word on its method."""

    async def main() -> None:
        world = VirtualRun(sync_spec(tokens=2000, **sync), checkpoint_dir=folder / "checkpoints")
        world.spec = world.spec.model_copy(update={"trainer": {} if model is None else {"model": model}})
        world.start_syncer()
        await world.finish(VirtualLearner("l", world).start())

    run_virtual(main())
    if method is not None:
        (folder / "run.json").write_text(json.dumps({"method": method, "pids": {}}))
    return folder


def resumed(folder: Path, **given: Any) -> RunProcess:
    settings, origin = resume(RunProcess(resume=folder, tokens=10**6, **given))
    assert origin is not None
    return settings


@pytest.mark.parametrize("method", ["decoupled", "paper", "streaming", "diloco"])
def test_a_resumed_run_is_of_the_method_that_its_folder_names(tmp_path, method):
    """Also where some of the method's settings had been set otherwise; the report shows it."""
    folder = saved(tmp_path / "out", method, outer_lr=0.3)
    settings = with_preset(resumed(folder))
    assert settings.method == plain(settings)["method"] == method
    assert settings.outer_lr == 0.3
    assert resumed(folder, method=method).method == method


def test_a_model_of_transformers_is_resumed_from_another_folder_and_by_no_other_run(tmp_path):
    """Refused once, before any learner is started: of another config, and where the run is of a built-in size."""
    config = {"model_type": "llama", "hidden_size": 32}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    given = f"hf:{folder}"
    out = saved(tmp_path / "own", "decoupled", read_hf(given).agreed)
    assert resumed(out, model=given).model == given
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(SpecMismatch, match="hidden_size: here 64, the run has 32"):
        resumed(out, model=given)
    with pytest.raises(SpecMismatch, match=f"model: here '{given}', the run has 'tiny'"):
        resumed(saved(tmp_path / "tiny", "decoupled", "tiny"), model=given)


def test_the_command_refuses_another_method_and_does_not_begin(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.logs, "configure", lambda level: None)  # it would outlive the test
    folder = saved(tmp_path / "out", "streaming")
    capsys.readouterr()
    assert cli.main(["run", "--resume", str(folder), "--method", "paper", "--tokens", "1M"]) == 2
    said = capsys.readouterr().err
    differing = [line for line in said.splitlines() if line.startswith("  ")]
    assert differing == ["  method: here 'paper', the run has 'streaming'"], "no setting that nobody gave is named"
    assert not (tmp_path / "runs").exists()


def test_of_a_checkpoint_alone_the_settings_tell_the_method(tmp_path):
    """A syncer that no launcher started names none; nor does a checkpoint that was moved."""
    folder = saved(tmp_path / "out", None, **METHODS["paper"].settings)
    assert resumed(folder).method == "paper"
    moved = tmp_path / "elsewhere"
    shutil.move(next((folder / "checkpoints").glob("*/checkpoint-*")), moved)
    assert resumed(moved).method == "paper"
    assert resumed(saved(tmp_path / "other", None)).method == "decoupled"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "data-parallel"])
def test_each_method_is_known_again_by_its_settings(method):
    for model, tensors in (("tiny", 11), ("base", 41)):
        settings = with_preset(RunProcess(method=method, model=model, learners=3))
        assert matching_method(settings.model_dump(), tensors) == method


def test_a_resumed_run_with_fewer_learners_than_its_quorum_is_refused(tmp_path, monkeypatch):
    """It is the quorum of the checkpoint that counts."""
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "out", "diloco")
    state = next((folder / "checkpoints").glob("*/*/state.json"))
    changed = json.loads(state.read_text())
    changed["spec"]["sync"]["quorum"] = 3
    state.write_text(json.dumps(changed))
    write_sums(state.parent)
    monkeypatch.setattr(run.logs, "configure", lambda level: None)  # it would outlive the test
    with pytest.raises(UsageError, match="quorum=3"):
        run.main(RunProcess(resume=folder, learners=2, tokens=10**6))
