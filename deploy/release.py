"""`make release`: a wheel and a source distribution of a tagged commit, tried as their users will.

The tag `v0.1.0` has to be on the commit that is checked out, and nothing may be changed. The version of pyproject.toml,
the tag, the heading of CHANGELOG.md and the tags of our images have to be the same. What is built is the commit's
content, not this folder's. Both distributions are checked, installed into environments of their own, and train a little
there. It uploads nothing: the last lines say how.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = re.compile(r"image: diloco-(?:syncer|learner)\b:?(\S*)|newName: \S*/diloco-\w+, newTag: \"?([^\"}]*)")
"""Where a file names an image of ours, and its tag."""
NAMED = ("compose.yaml", "deploy/kubernetes/cpu/kustomization.yaml", "deploy/kubernetes/gpu/kustomization.yaml")
RUN = ("--learners", "2", "--tokens", "20000", "--model", "nano", "--seq-len", "32", "--batch", "2")


class Refused(Exception):
    """Something that is to be set right before; says what."""


def ran(*command: object, cwd: Path = ROOT, environ: Mapping[str, str] | None = None) -> str:
    """Standard output of a command.

    Raises:
        Refused: it ended with another status than 0.
    """
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environ, text=True, stdout=subprocess.PIPE, stderr=None, check=False
    )
    if done.returncode:
        raise Refused(f"{' '.join(map(str, command))} ended with status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def checked_version() -> str:
    """The version that the tag, pyproject.toml, the changelog and all names of images agree on.

    Raises:
        Refused: they do not, or something is changed.
    """
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tag = f"v{version}"
    if changed := ran("git", "status", "--porcelain").strip():
        raise Refused(f"the tree is not clean: commit these, or move them away\n{changed}")
    found = re.search(r"^## \[(\d[^\]]*)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if found is None or found[1] != version:
        heading = "none" if found is None else found[1]
        raise Refused(f"CHANGELOG.md has {heading} as its newest version, pyproject.toml has {version}")
    if not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", found[2]):
        raise Refused(f"CHANGELOG.md, [{version}]: put the date of the tag behind it, as ` - 2027-01-31`")
    for name in NAMED:
        tags = [one[0] or one[1] for one in IMAGE.findall((ROOT / name).read_text())]
        if not tags or set(tags) != {version}:
            raise Refused(f"{name} has images with the tags {tags}: all are to be {version}")
    if tag not in ran("git", "tag", "--points-at", "HEAD").split():
        raise Refused(f"the commit has no tag {tag}: git tag -a {tag} -m 'diloco {version}'")
    return version


def build(tag: str, out: Path) -> tuple[Path, Path]:
    """Wheel and source distribution of a tag; the wheel is built from the source distribution."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ran("git", "archive", "--output", folder / "tree.tar", tag)
        with tarfile.open(folder / "tree.tar") as tree:
            tree.extractall(folder / "tree", filter="tar")
        ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder / "tree")
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    ran(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    return wheel, source


def names(distribution: Path) -> Iterator[str]:
    """Files of a distribution, without the folder that holds those of a source distribution.

    Raises:
        Refused: something in it is a link: the folders that links stand for have to be in there themselves.
    """
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            yield from wheel.namelist()
        return
    with tarfile.open(distribution) as source:
        for member in source:
            if member.issym() or member.islnk():
                raise Refused(f"{distribution.name} has a link, {member.name}")
            if member.isfile():
                yield member.name.partition("/")[2]


def check_content(wheel: Path, source: Path) -> None:
    """Whether both have what they must, and nothing else.

    Raises:
        Refused: one has not.
    """
    has = {one: set(names(one)) for one in (wheel, source)}
    tops = {name.partition("/")[0] for name in has[wheel] if ".dist-info/" not in name}
    if tops != {"diloco"}:
        raise Refused(f"{wheel.name} would install {sorted(tops)}: only diloco is ours")
    if lost := {name for name in has[wheel] if name.startswith("diloco/")} - has[source]:
        raise Refused(f"{source.name} lacks {sorted(lost)[:5]}")
    for distribution, files in has.items():
        if tests := sorted(name for name in files if re.search(r"(^|/)(tests/|test_)", name)):
            raise Refused(f"{distribution.name} has tests: {tests[:5]}")
        for needed in (r"(.*/)?LICENSE", r"diloco/pipeline/bus/redis/lua/commit\.lua", r"diloco/syncer/owner\.py"):
            if not any(re.fullmatch(needed, name) for name in files):
                raise Refused(f"{distribution.name} has no {needed}")


def try_out(distribution: Path, version: str, folder: Path, offline: bool) -> None:
    """Install a distribution into an environment of its own, and train with it.

    Args:
        distribution: wheel or source distribution.
        version: what it has to say that it is.
        folder: an empty one.
        offline: the libraries of this environment are used.

    Raises:
        Refused: it does not do what it should.
    """
    ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DILOCO_"))}
    install = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet")
    if offline:
        purelib = ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder, environ=kept)
        libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        # Paths in a .pth file are searched, their own .pth files are not: what is installed here stays out.
        (Path(purelib.strip()) / "libraries.pth").write_text("\n".join(libraries) + "\n")
        ran(*install, "--no-deps", "--no-build-isolation", distribution, cwd=folder, environ=kept)
    else:
        arguments = os.environ.get("PIP_ARGS", "").split()
        ran(*install, *arguments, "-c", ROOT / "constraints.txt", f"{distribution}[run]", cwd=folder, environ=kept)
    diloco = folder / "bin" / "diloco"
    where = ran(python, "-c", "import diloco; print(diloco.__file__)", cwd=folder, environ=kept)
    if not where.startswith(str(folder)):
        raise Refused(f"what is tried is {where.strip()}, not {distribution.name}")
    told = ran(diloco, "--version", cwd=folder, environ=kept).strip()
    if not told.startswith(f"diloco {version}, wire format "):
        raise Refused(f"{distribution.name} says that it is {told}")
    ran(diloco, "doctor", cwd=folder, environ=kept)
    ran(diloco, "run", *RUN, "--out", "out", cwd=folder, environ=kept)
    if not (folder / "out" / "report.json").is_file():
        raise Refused(f"{distribution.name}: `diloco run` has left no report")
    print(f"{distribution.name}: {told}; installed, looked at by `diloco doctor`, trained with", flush=True)


def main() -> None:
    """Check, build, try; says what is left to do."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both distributions")
    parser.add_argument("--offline", action="store_true", help="try them with the libraries of this environment")
    given = parser.parse_args()
    out = given.out.resolve()
    try:
        version = checked_version()
        if there := sorted(out.glob("diloco-*")):
            raise Refused(f"{out} has {there[0].name} already: move it away")
        distributions = build(f"v{version}", out)
        check_content(*distributions)
        for distribution in distributions:
            with tempfile.TemporaryDirectory() as folder:
                try_out(distribution, version, Path(folder).resolve(), given.offline)
    except Refused as refused:
        sys.exit(f"not released: {refused}")
    print(f"{out} has the release. What is left:")
    print(f"  git push origin v{version}")
    print(f"  python -m twine upload {' '.join(str(one) for one in distributions)}")
    for target in ("syncer", "learner"):
        print(f"  docker build -f deploy/Dockerfile --target {target} -t diloco-{target}:{version} .")


if __name__ == "__main__":
    main()
