"""What was measured of a machine, its Redis and a run: the arguments of `checks`. Pure."""

import math
from dataclasses import dataclass
from pathlib import Path

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.outer_cost import Speed


@dataclass(frozen=True, slots=True)
class Machine:
    """This one, as its processes would find it."""

    python: str
    packages: dict[str, str]
    """Versions of what is installed of what this program needs, torch too if it is there."""
    missing: tuple[str, ...]
    """What every process needs and is not installed."""
    cores: int
    """Those that its container has time for."""
    memory_bytes: float
    """Its container's, where that has less; 0: not told."""
    processes: int
    """Learners that are to train on its CPU at a time."""
    threads: int
    """Of torch, in each of them."""
    threads_from: str
    """Who has said so: a setting, a variable, or nobody."""
    blas_threads: int
    """Of a syncer's products of matrices."""
    speed: Speed
    """Of these."""
    merge_bytes_per_s: float
    """Deltas that a core of it merges."""


@dataclass(frozen=True, slots=True)
class Link:
    """The line between this machine and its Redis, as the calls of a run find it."""

    round_trip_s: float
    up_bytes_per_s: float | None = None
    """Of a payload written; None: it could not be tried."""
    down_bytes_per_s: float | None = None
    """Of the same read again."""
    bytes: int = 0
    """Of that payload."""
    problem: str = ""
    """Why no payload was written; "": if none was, this user is not to write any."""
    remedy: str = ""
    """What to do about that."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that is under way, or the one that is planned."""

    name: str
    sync: SyncSpec
    params: float
    learners: int
    """To reckon with: one at least."""
    step_s: float | None
    """Inner step of its learners; None: not known."""
    operations: tuple[float, ...]
    """Of the outer step of each fragment (`outer_cost`)."""
    live: int | None = None
    """Learners that are; None: the run is planned."""
    finished: bool = False
    folder: str = ""
    """Name of its own folder of checkpoints; "": it has not begun."""
    saves: bool = False
    """Its syncers have begun a checkpoint."""
    merge_s: float = 0.0
    """What a merge takes in it, of the usual fragment; 0: not known yet, or the run is planned."""
    stretched: float = 1.0
    """How many times as long as planned the intervals are by now, since merges take their time."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, or another place, that a party of this machine is to write to."""

    setting: str
    path: Path | str
    """An address in a store of objects is text."""
    problem: str = ""
    """Why nothing can be written there; "": it was tried."""
    free_bytes: float = math.inf
    """inf: nobody says, as of a store."""
    there: bool = True
    """False: it will be made."""
