"""Promises to those who used an earlier release: its files are read, and its parties understood.

A release's folder has what it wrote (`tests/releases/kept.py`). This one's has too, from before it is tagged.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco import replay
from diloco.pipeline.bus.redis import calls
from diloco.pipeline.errors import BadMessage, UsageError
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.messages.wire import FORMAT, OLDEST
from diloco.pipeline.settings import BusSettings
from diloco.status import show
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.replay import recording
from diloco.tape import read_archive
from tests.releases import kept, next_release
from tests.workers.test_recovery import Party

RELEASES = kept.releases()


def dated(folder: Path) -> bool:
    """Whether the changelog says when it was released."""
    found = re.search(rf"^## \[{re.escape(folder.name)}\] - \d", (kept.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return found is not None


@pytest.fixture(params=RELEASES, ids=lambda folder: str(folder.name))
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a release wrote: readers may lock what they read."""
    return Path(shutil.copytree(request.param, tmp_path / "release"))


def test_there_is_what_this_release_writes() -> None:
    assert kept.VERSION in [folder.name for folder in RELEASES]


def test_its_checkpoint_is_read(release: Path) -> None:
    checkpoint = load_checkpoint(str(release / "run" / "checkpoints"))
    assert [len(checkpoint.fragment(p)[0]) for p in range(2)] == [8, 10]
    assert all(fragment.version > 3 for fragment in checkpoint.fragments)
    assert OLDEST <= checkpoint.spec.format <= FORMAT


def test_its_tape_and_its_recording_are_read_and_replayed_bit_for_bit(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merges = [one for one in read_archive(release / "run" / "tape") if isinstance(one, Committed)]
    assert sum(bool(one.contributions) for one in merges) >= 10
    assert replay.check(BusSettings(), release / "run" / "deltas", None, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["made_again"] == told["merges"] >= 10


def test_its_report_is_shown(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(BusSettings(), release / "run", as_json=False)
    tokens = json.loads((release / "run" / "report.json").read_text())["tokens"]
    assert f"finished: decoupled, 1 learner, {tokens} tokens" in capsys.readouterr().out


def test_a_learners_state_of_it_is_gone_on_from(release: Path) -> None:
    assert Party(release / "learner").join() == "checkpoint"


def changed(file: Path, **fields: Any) -> None:
    told = json.loads(file.read_text())
    told |= fields
    file.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": 4}, "format 4 is not 1, 2 or 3, which this build reads: a later release may have it"),
        ({"a_new_one": 1}, "a_new_one is unknown to this build: a later release may have written it"),
    ],
)
def test_a_checkpoint_of_a_later_release_is_refused_with_the_version(
    release: Path, fields: dict[str, Any], said: str
) -> None:
    (state,) = release.glob("run/checkpoints/*/checkpoint-*/state.json")
    changed(state, **fields)
    with pytest.raises(UsageError, match=said):
        load_checkpoint(str(release / "run" / "checkpoints"))


def test_a_checkpoint_of_a_run_of_a_later_format_is_refused_with_both(release: Path) -> None:
    (state,) = release.glob("run/checkpoints/*/checkpoint-*/state.json")
    spec = json.loads(state.read_text())["spec"]
    changed(state, spec=spec | {"format": FORMAT + 1})
    with pytest.raises(UsageError, match=f"spec.format: wire format {FORMAT + 1}, this build speaks {FORMAT}"):
        load_checkpoint(str(release / "run" / "checkpoints"))


def test_a_recording_of_a_later_format_is_refused_with_both(release: Path) -> None:
    file = release / "run" / "deltas" / recording.SPEC_FILE
    file.write_bytes(file.read_bytes().replace(b"\xa6format\x01", b"\xa6format\x02", 1))
    with pytest.raises(BadMessage, match="Spec has wire format 2, this build speaks 1"):
        replay.check(BusSettings(), release / "run" / "deltas", None, as_json=True)


def test_a_learners_state_of_a_later_release_is_not_taken_for_another(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with other moments, and says why."""
    changed(release / "learner" / "state.json", format=3)
    assert Party(release / "learner").join() != "checkpoint"
    assert "format 3 is not 1 or 2, which this build reads" in capsys.readouterr().out


# --- the wire -----------------------------------------------------------------------------------------


def test_a_wire_format_stays_as_it_was_released() -> None:
    """From the day that the changelog has; until then its folder is written anew by `python -m tests.releases`."""
    assert "\n".join(filter(None, (kept.check_frozen(folder) for folder in RELEASES if dated(folder)))) == ""


def test_syncers_load_the_scripts_of_the_release_before() -> None:
    """Its learners may not load them themselves."""
    spoken = [folder for folder in RELEASES if dated(folder) and kept.format_of(folder) >= OLDEST]
    assert {folder.name: kept.lost_scripts(folder) for folder in spoken} == {folder.name: [] for folder in spoken}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next release, with what its tests need."""
    tree = next_release.make(tmp_path_factory.mktemp("next") / "release")
    shutil.copytree(kept.ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__", "[0-9]*.*.*"))
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(kept.ROOT / name, tree / name)
    folder = tree / "tests" / "releases" / kept.VERSION
    folder.mkdir()
    kept.write_frozen(folder)
    return tree


def checked(tree: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m tests.releases --check` there, or a few lines."""
    command = ["-c", code] if code else ["-m", "tests.releases", "--check"]
    environ = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environ, capture_output=True, text=True, check=False
    )


def test_the_next_release_has_this_ones_format_and_its_scripts(tree: Path) -> None:
    done = checked(tree)
    assert done.returncode == 0, done.stderr
    (tree / "pipeline/bus/redis/lua/earlier" / f"{next_release.CHANGED}.lua").rename(tree / "away.lua")
    assert f"no syncer loads its {next_release.CHANGED} any more" in checked(tree).stderr
    (tree / "away.lua").rename(tree / "pipeline/bus/redis/lua/earlier" / f"{next_release.CHANGED}.lua")


def test_a_setting_of_the_next_release_is_refused_in_a_run_of_this_ones_format(tree: Path) -> None:
    """Only where it was given on purpose, and asks for something else than the run has."""
    code = f"""
from diloco.pipeline.agreement import check_format
from diloco.pipeline.errors import SpecMismatch
from diloco.pipeline.settings import LearnerProcess, load
from tests.samples import spec

old = spec().model_copy(update={{"format": {next_release.NEXT - 1}}})
for given in ({{}}, {{"{next_release.MARK}": 0}}, {{"{next_release.MARK}": 3}}):
    try:
        check_format(load(LearnerProcess, given), old)
        print("taken")
    except SpecMismatch as error:
        print(error)
"""
    done = checked(tree, code)
    assert done.stdout.splitlines() == [
        "taken",
        "taken",
        f"{next_release.MARK} needs wire format {next_release.NEXT}, and the run has {next_release.NEXT - 1}, "
        "which it keeps: begin another run with it",
    ], done.stderr


def test_a_field_that_is_not_declared_since_its_format_is_told(tree: Path) -> None:
    file = tree / "pipeline/messages/delta.py"
    text = file.read_text()
    file.write_text(text.replace(f", Since({next_release.NEXT})", ""))
    done = checked(tree)
    file.write_text(text)
    assert done.returncode == 1
    assert "what is new needs `Since`" in done.stderr
    assert "DeltaHeader" in done.stderr
    assert next_release.MARK in done.stderr


def test_the_patch_of_the_next_release_says_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "pipeline/messages/wire.py"
    monkeypatch.setitem(next_release.CHANGES, name, ((r"^FORMAT = nothing$", ""),))
    with pytest.raises(next_release.PatchFailed, match=f"{name}.* is there 0 times"):
        next_release.make(tmp_path / "release")


def test_scripts_have_one_text(tree: Path) -> None:
    """What is kept of an earlier script is all of it, prelude too: its digest is its name."""
    kept_text = (tree / "pipeline/bus/redis/lua/earlier" / f"{next_release.CHANGED}.lua").read_text()
    assert kept_text == calls.script(next_release.CHANGED).text
