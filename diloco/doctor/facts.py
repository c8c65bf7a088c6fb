"""Types of what was measured on a machine, its Redis and a run: the arguments of `checks`. Pure."""

import math
from dataclasses import dataclass
from pathlib import Path

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.outer_cost import Speed


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as a process on it finds it."""

    python: str
    packages: dict[str, str]
    """Versions of the installed packages that this program needs, with torch if it is installed."""
    missing: tuple[str, ...]
    """Packages that every process needs and that are not installed."""
    cores: int
    """Cores that the machine, or the CPU quota of its container, gives to processes."""
    memory_bytes: float
    """Memory of the machine, or of its container if that has less; 0: not known."""
    processes: int
    """Number of learners that will train on its CPU at a time."""
    threads: int
    """Torch threads of each such learner."""
    threads_from: str
    """Where the number of threads comes from, in words: a setting, a variable, or the default."""
    blas_threads: int
    """Threads of a syncer's matrix products."""
    speed: Speed
    """Speed of a syncer's matrix products."""
    merge_bytes_per_s: float
    """Bytes of deltas that one core merges per second."""


@dataclass(frozen=True, slots=True)
class Link:
    """The network between this machine and its Redis, as measured by calls like those of a run."""

    round_trip_s: float
    up_bytes_per_s: float | None = None
    """Rate of writing a payload; None: it was not tried."""
    down_bytes_per_s: float | None = None
    """Rate of reading the same payload."""
    bytes: int = 0
    """Size of that payload; 0: none was tried."""
    problem: str = ""
    """Why no payload could be written. Empty if one was, or if this user has no right to write any."""
    remedy: str = ""
    """What to do about the problem."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that is under way, or the planned run."""

    name: str
    sync: SyncSpec
    params: float
    learners: int
    """Number of learners for the computations, at least one."""
    step_s: float | None
    """Time of an inner step; None: not known."""
    operations: tuple[float, ...]
    """Floating-point operations of the outer step of each fragment (`outer_cost`)."""
    live: int | None = None
    """Number of live learners; None: the run is only planned."""
    finished: bool = False
    folder: str = ""
    """Name of the run's folder among the checkpoints; "": it has not begun."""
    saves: bool = False
    """True if the run's syncers have begun a checkpoint."""
    merge_s: float = 0.0
    """Median time of a merge over the run's fragments; 0: not known yet, or the run is only planned."""
    stretched: float = 1.0
    """Median ratio of a fragment's current interval to the planned one; long round trips make it more than 1."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder or store of objects that a party on this machine will write to."""

    setting: str
    path: Path | str
    """A path on disk, or the address in a store of objects as text."""
    problem: str = ""
    """Why nothing can be written there; "": writing was tried, and works."""
    free_bytes: float = math.inf
    """Free bytes on the disk; inf: not known, as for a store of objects."""
    there: bool = True
    """False if the folder does not exist yet, and will be made."""
