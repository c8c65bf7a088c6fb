"""Environments of the programs that `bench compare` runs beside ours: a folder each, made with venv and pip.

Nothing of theirs is imported or unpickled here; their Python runs the drivers in `bench/peers` as processes of its own.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DRIVERS = Path(__file__).resolve().parent / "peers"
INSTALL_S, MAKE_S, LOOK_S = 1800.0, 300.0, 60.0
TORCH = "2.13.0+cpu" if sys.platform == "linux" else "2.13.0"
"""On Linux the plain one brings gigabytes of CUDA with it."""


class Unavailable(Exception):
    """A program that cannot be measured here, and why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A program, what pip must install for it, and which Python it wants at least."""

    name: str
    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    drivers: Path = DRIVERS
    """Holds NAME.py, and NAME.txt with the versions that pip is kept to, but torch's."""

    @property
    def driver(self) -> Path:
        """What its Python runs."""
        return self.drivers / f"{self.name}.py"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("gradientmail", ("gradientmail", f"torch=={TORCH}"), (3, 12)),
        Peer("torchft", ("torchft", f"torch=={TORCH}")),
        Peer("hivemind", ("hivemind", f"torch=={TORCH}")),
    )
}


def default_folder() -> Path:
    """Where environments are unless the user says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco" / "peers"


def version_wanted(peer: Peer) -> str:
    """Of the program itself."""
    lines = (peer.drivers / f"{peer.name}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{peer.name}=="))


def python_of(peer: Peer, folder: Path, python312: str | None, install: bool) -> Path:
    """The Python of a peer's environment in `folder`, which is made first if `install` says so.

    One that is there with the right version of the program is taken as it is, however it was made.

    Raises:
        Unavailable: there is none, or it cannot be made.
    """
    place, wanted = folder / peer.name, version_wanted(peer)
    python = place / "bin" / "python"
    if python.is_file() and installed(python, peer.name) == wanted:
        return python
    if not install:
        raise Unavailable(f"no environment with {peer.name} {wanted} in {place}: --install makes it")
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        try:
            _output([_interpreter(peer, python312), "-m", "venv", str(place)], MAKE_S, "venv")
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)  # half of one would be in the way of the next attempt
            raise
    if not python.is_file():
        raise Unavailable(f"{place} is there, and is no environment: remove it, or give another --environments")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-input", "--quiet"]
    try:
        _output([*pip, "-c", str(peer.drivers / f"{peer.name}.txt"), *peer.requirements], INSTALL_S, "pip")
    except Unavailable as error:
        if f"torch=={TORCH}" not in str(error):
            raise
        raise Unavailable(
            f"{error} (point pip at an index with CPU builds of torch for this Python, "
            f"or make {place} yourself with {peer.name}=={wanted} and any torch)"
        ) from error
    if installed(python, peer.name) != wanted:
        raise Unavailable(f"pip did not install {peer.name} {wanted} into {place}")
    return python


def installed(python: Path, package: str) -> str:
    """Version of a package in an environment; empty where there is none."""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    try:
        return _output([str(python), "-P", "-c", code, package], LOOK_S, "python").strip()
    except Unavailable:
        return ""


def _interpreter(peer: Peer, given: str | None) -> str:
    """A Python that is new enough: this one, the given one, or one from PATH."""
    if given is None and sys.version_info >= peer.python:
        return sys.executable
    least = ".".join(map(str, peer.python))
    found = shutil.which(given or f"python{least}")
    if found is None:
        where = f"{given} is not a program" if given else f"python{least} is not on PATH"
        raise Unavailable(f"{peer.name} wants Python {least}, and {where}: give --python312 PATH")
    said = _output([found, "-c", "import sys; print(*sys.version_info[:2])"], LOOK_S, found).split()
    if tuple(map(int, said)) < peer.python:
        raise Unavailable(f"{peer.name} wants Python {least}, and {found} is {'.'.join(said)}: give --python312 PATH")
    return found


def _output(arguments: Sequence[str], limit_s: float, what: str) -> str:
    """Output of a program, which is ended with all that it started when it takes too long or we are told to stop."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        start_new_session=True,
    ) as process:
        try:
            out, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what} took longer than {limit_s:g} s") from None
        finally:
            end_group(process.pid)
    if process.returncode:
        lines = [line for line in (said or out).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        errors = [re.sub(r" \(from versions: [^)]*\)", "", line) for line in errors]
        raise Unavailable(f"{what}: {' '.join(errors)[-400:] or f'exit status {process.returncode}'}")
    return out


def end_group(group: int) -> None:
    """Kill all that is left of a process group of ours."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
