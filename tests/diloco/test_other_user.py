"""Promises about folders that another user has made: who may not use them, and what to do, before anything begins."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

NOBODY = 65534
ROOT = os.geteuid() == 0
NO_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"] if ROOT else []
"""A root who may not touch what is others'."""
NOWHERE = "redis://127.0.0.1:1"
LEARNER = f"import torch; from diloco import Learner; Learner(torch.nn.Linear(2, 2), redis_url='{NOWHERE}', state_dir="

pytestmark = pytest.mark.skipif(ROOT and shutil.which("setpriv") is None, reason="root needs setpriv to be refused")


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, as a user with no rights but its own."""
    command = [*NO_RIGHTS, sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def theirs(tmp_path: Path) -> Callable[[Path, int], Path]:
    """Makes a path another user's where root runs the tests, else takes away this one's rights."""

    def give(path: Path, mode: int) -> Path:
        path.chmod(mode if ROOT else mode & 0o555)
        if ROOT:
            os.chown(path, NOBODY, -1)
        return path

    return give


def told(path: Path, there: Path, said: str) -> bool:
    """Whether it is said who has no permission to use a path, since what is there is another user's, and what to do."""
    return (
        f"({os.geteuid()}) has no permission to use {path}: {there} is " in said
        and (f"chown -R {os.geteuid()} {there}" if ROOT else f"chmod u+rwX {there}") in said
        and said.rstrip().endswith("or choose another location")
    )


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run --learners 1 --model nano", "--out"),
        ("run --learners 1 --model nano --out {}", "--json-report"),
        (f"syncer --redis-url {NOWHERE}", "--checkpoint-dir"),
        (f"syncer --redis-url {NOWHERE}", "--tape-dir"),
        ("learner", "state_dir"),
    ],
)
def test_a_folder_that_another_user_has_made_is_refused_at_the_start(
    command: str, option: str, tmp_path: Path, theirs: Callable[[Path, int], Path]
) -> None:
    """One line says whose it is, who may not use it and what to do; nothing is waited for, and nothing is left."""
    folder = tmp_path / "made"
    folder.mkdir()
    new = theirs(folder, 0o755) / "new"
    if command == "learner":
        done = started("-c", f"{LEARNER}'{new}')")
        said = done.stderr.splitlines()[-1]
    else:
        done = started("-m", "diloco", *command.format(tmp_path / "out").split(), option, str(new))
        (said,) = done.stderr.splitlines()
        assert done.returncode == 2
    assert told(folder if option == "--json-report" else new, folder, said)
    assert [*tmp_path.rglob("*")] == [folder]


def test_a_file_of_another_user_in_a_folder_of_ones_own_is_refused_too(
    tmp_path: Path, theirs: Callable[[Path, int], Path]
) -> None:
    """A run that root went on with once has left logs of root's."""
    logs = tmp_path / "out" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "out" / "settings.toml").touch()
    file = logs / "learner-2.log"
    file.touch()
    theirs(file, 0o644)
    done = started("-m", "diloco", "run", "--learners", "1", "--model", "nano", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert told(file, file, done.stderr)
    lock = tmp_path / ".lock"
    lock.touch()
    theirs(lock, 0o644)
    assert told(lock, lock, started("-c", f"{LEARNER}'{tmp_path}')").stderr)


@pytest.mark.parametrize("inner", ["", "logs"])
def test_ones_own_files_in_a_folder_of_another_user_are_refused_too(
    inner: str, tmp_path: Path, theirs: Callable[[Path, int], Path]
) -> None:
    """Nothing could be put in their place, nor beside them."""
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    for file in (out / "settings.toml", out / "logs" / "learner-0.log"):
        file.touch()
    theirs(out / inner, 0o755)
    done = started("-m", "diloco", "run", "--learners", "1", "--model", "nano", "--out", str(out))
    assert done.returncode == 2
    assert told(out / inner, out / inner, done.stderr)


@pytest.mark.parametrize("command", ["run --learners 1 --model nano --out", "sample", "run --learners 1 --resume"])
def test_a_run_whose_files_this_user_cannot_read_is_refused(
    command: str, tmp_path: Path, theirs: Callable[[Path, int], Path]
) -> None:
    """Such as those of a umask of 077."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "settings.toml").touch()
    theirs(folder, 0o700 if ROOT else 0)
    done = started("-m", "diloco", *command.split(), str(folder))
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert f" has no permission to use {folder}" in said
    assert f": {folder} is d" in said


def test_ones_own_file_that_a_user_names_in_a_folder_of_another_user_is_written(
    tmp_path: Path, theirs: Callable[[Path, int], Path]
) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    report = folder / "plan.json"
    report.touch()
    theirs(folder, 0o755)
    done = started("-m", "diloco", "plan", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert report.read_text().endswith("}\n")
    assert [*folder.iterdir()] == [report]
