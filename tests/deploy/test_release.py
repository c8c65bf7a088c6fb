"""`make release` in a clone of its own: what it refuses, and what it makes of a tag."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TAG = f"v{VERSION}"
HEADING = re.compile(rf"^## \[{re.escape(VERSION)}\].*$", re.MULTILINE)


LOOKED_AT = ("pyproject.toml", "CHANGELOG.md", "LICENSE", "compose.yaml", "deploy")
"""What is looked at before anything is built."""


@pytest.fixture(params=[LOOKED_AT], ids=["some"])
def clone(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What is in this tree, or some of it, as one commit of a repository of its own, ready for its tag."""
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / ".gitignore").write_text("__pycache__/\n")
    for name in request.param:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, clone / name)
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(HEADING.sub(f"## [{VERSION}] - 2027-01-31", changelog.read_text(), count=1))
    git(clone, "init", "--quiet", "--initial-branch", "main")
    commit(clone)
    return clone


def git(clone: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *who, *arguments], cwd=clone, check=True, capture_output=True)  # noqa: S607


def commit(clone: Path) -> None:
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "a release")


def release(clone: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/release.py", "--offline", "--out", str(clone.parent / "dist")]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)


def rewritten(clone: Path, name: str, old: str, new: str) -> None:
    text = (clone / name).read_text()
    assert old in text
    (clone / name).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("CHANGELOG.md", " - 2027-01-31", " - YYYY-MM-DD", "put the date of the tag behind it"),
        (
            "CHANGELOG.md",
            f"## [{VERSION}]",
            "## [9.0.0]",
            "CHANGELOG.md has 9.0.0 as its newest version",
        ),
        ("compose.yaml", f"diloco-learner:{VERSION}", "diloco-learner:9.0.0", "compose.yaml has images with the tags"),
        ("compose.yaml", f"diloco-learner:{VERSION}", "diloco-learner", "compose.yaml has images with the tags"),
        ("deploy/kubernetes/gpu/kustomization.yaml", f'"{VERSION}"', '"9.0.0"', "kustomization.yaml has images with"),
        ("LICENSE", "", "", f"the commit has no tag {TAG}: git tag -a {TAG}"),
    ],
)
def test_what_does_not_go_together_is_refused(clone: Path, name: str, old: str, new: str, said: str) -> None:
    rewritten(clone, name, old, new)
    git(clone, "commit", "--quiet", "--all", "--allow-empty", "--message", "another one")
    done = release(clone)
    assert done.returncode == 1
    assert done.stderr.startswith("not released: ")
    assert said in done.stderr


def test_a_tree_with_changes_is_refused(clone: Path) -> None:
    git(clone, "tag", TAG)
    (clone / "left").write_text("behind")
    assert "the tree is not clean: commit these, or move them away\n?? left" in release(clone).stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "clone",
    [[*LOOKED_AT, "README.md", "MANIFEST.in", "pipeline", "syncer", "workers", "diloco", "tests"]],
    indirect=True,
    ids=["whole"],
)
def test_a_tag_becomes_two_distributions_that_are_installed_and_train(clone: Path) -> None:
    """Each in an environment of its own; the folders that are links here are folders there."""
    for module in ("build", "twine"):
        pytest.importorskip(module)
    git(clone, "tag", TAG)
    done = release(clone)
    assert done.returncode == 0, done.stdout + done.stderr
    dist = clone.parent / "dist"
    wheel, source = f"diloco-{VERSION}-py3-none-any.whl", f"diloco-{VERSION}.tar.gz"
    assert {path.name for path in dist.iterdir()} == {wheel, source}
    for name in (wheel, source):
        assert f"{name}: diloco {VERSION}, wire format 1; installed" in done.stdout
    for said in (f"git push origin {TAG}", "twine upload", f"-t diloco-syncer:{VERSION} ."):
        assert said in done.stdout
    with tarfile.open(dist / source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "diloco/pipeline/bus/redis/lua/commit.lua"} <= names
    assert not any(name.startswith(("tests", "pipeline")) for name in names)
    assert "already: move it away" in release(clone).stderr


def test_images_have_the_version() -> None:
    files = [
        yaml.safe_load((ROOT / name).read_text())
        for name in ("compose.yaml", "deploy/compose/gpu.yaml", "deploy/compose/lan.yaml")
    ]
    images = [one.get("image", "") for file in files for one in file["services"].values()]
    ours = {image for image in images if image.startswith("diloco-")}
    assert ours == {f"diloco-syncer:{VERSION}", f"diloco-learner:{VERSION}"}


def test_the_workflow_runs_what_must_hold_on_every_python_that_is_promised() -> None:
    """Its text only: no host has run it yet, and it says so."""
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    workflow: dict[Any, Any] = yaml.safe_load(text)
    assert "Nobody has run this file yet" in text
    (job,) = workflow["jobs"].values()
    versions = job["strategy"]["matrix"]["python"]
    assert all(isinstance(one, str) for one in versions)  # 3.10 would be a number, and 3.1
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert least == f">={versions[0]}"
    assert any(step.get("run") == ".ci/run" for step in job["steps"])
