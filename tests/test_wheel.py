"""What `pip install diloco` puts into somebody's environment: one name, and a program that runs."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
TAKEN = "workers", "pipeline", "bench", "syncer", "studies", "tests"
"""Names that a training repository may have for packages of its own."""


def ran(*command: object, cwd: Path, **environ: str) -> str:
    """Standard output of a command that ends well, started without this process's paths."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DILOCO_"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**kept, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of this tree: building leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ".")
    source = tmp_path_factory.mktemp("source") / "tree"
    left = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "site")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left)
    ran(sys.executable, *build, cwd=source)
    (made,) = folder.glob("diloco-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and of what is installed here the other libraries only."""
    place = tmp_path_factory.mktemp("environment")
    ran(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    python = place / "bin" / "python"
    packages = Path(ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    # Paths in a .pth file are searched, their own .pth files are not read: this tree's editable installation stays out.
    libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    ran(sys.executable, *install, cwd=place)
    return python


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A training repository with packages whose names are ours inside."""
    for name in TAKEN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the repository has its own {name}')\n")
    return tmp_path


def names(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as file:
        yield from file.namelist()


def test_the_wheel_has_one_name(wheel: Path) -> None:
    """Nothing else can be shadowed, or shadow something."""
    assert {name.split("/")[0] for name in names(wheel) if ".dist-info/" not in name} == {"diloco"}


def test_the_wheel_has_every_file(wheel: Path) -> None:
    """All of the sources and scripts, the page's files with the licence of what is not ours; no test, no study."""
    tops = "diloco", "pipeline", "syncer", "workers"
    here = {
        str(path.relative_to(ROOT)) if top == "diloco" else f"diloco/{path.relative_to(ROOT)}"
        for top in tops
        for end in ("*.py", "*.lua", "*.txt", "static/*.*", "static/uplot/*")
        for path in (ROOT / top).rglob(end)
    }
    assert here == {name for name in names(wheel) if name.startswith("diloco/") and not name.endswith("py.typed")}


def test_it_imports_beside_a_repository_with_the_same_names(python: Path, repository: Path) -> None:
    """The first import of README, and no other package of that name is touched."""
    code = "import sys; from diloco import Learner, SyncSettings, errors; print(Learner, 'workers' in sys.modules)"
    assert ran(python, "-c", code, cwd=repository).strip() == "<class 'diloco.workers.learner.Learner'> False"


@pytest.mark.slow
def test_a_run_beside_a_repository_with_the_same_names(python: Path, repository: Path) -> None:
    """`diloco run` with its processes, from that folder."""
    small = ("--learners", "2", "--tokens", "20000", "--model", "tiny", "--seq-len", "32", "--batch", "2")
    out = repository / "out"
    ran(python.parent / "diloco", "run", *small, "--out", out, cwd=repository)
    assert (out / "report.json").is_file()
