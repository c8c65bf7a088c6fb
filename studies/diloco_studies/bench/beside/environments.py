"""Environments of the programs that `bench compare` runs beside ours: a folder each, which its user has made.

Nothing of theirs is imported or unpickled here; their Python runs the drivers in `bench/peers` as processes of its own.
"""

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

DRIVERS = Path(__file__).resolve().parent / "peers"


class Unavailable(Exception):
    """A program that cannot be measured here, and why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A program."""

    name: str
    drivers: Path = DRIVERS

    @property
    def driver(self) -> Path:
        """What its Python runs."""
        return self.drivers / f"{self.name}.py"

    @property
    def versions(self) -> Path:
        """To which pip is to be kept, but torch's."""
        return self.drivers / f"{self.name}.txt"


PEERS = {name: Peer(name) for name in ("gradientmail", "torchft", "hivemind")}


def default_folder() -> Path:
    """Where environments are unless the user says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco" / "peers"


def version_wanted(peer: Peer) -> str:
    """Of the program itself."""
    lines = peer.versions.read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{peer.name}=="))


def python_of(peer: Peer, folder: Path) -> Path:
    """The Python of a peer's environment in `folder`, however that was made.

    Raises:
        Unavailable: there is none with the right version; how to make it.
    """
    place, wanted = folder / peer.name, version_wanted(peer)
    python = place / "bin" / "python"
    code = "import sys; from importlib.metadata import version; sys.exit(version(sys.argv[1]) != sys.argv[2])"
    told = [str(python), "-P", "-c", code, peer.name, wanted]
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if not python.is_file() or subprocess.run(told, env=environ, capture_output=True, check=False).returncode:
        raise Unavailable(
            f"there is no environment with {peer.name} {wanted}; create it: python3.12 -m venv {place} && {python} -m "
            f"pip install -c {peer.versions} {peer.name} torch"
        )
    return python


def end_group(group: int) -> None:
    """Kill all that is left of a process group of ours."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
