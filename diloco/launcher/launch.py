"""Child processes of the launcher: started in sessions of their own, logged, and never left behind.

Each child leads its own process group, so that Ctrl-C on the terminal reaches only the launcher, which then ends the
run in order. No child outlives the launcher: `Children` kills every group when its block is left, by an error too, and
if the launcher itself is killed, the kernel kills the children (`signals.die_with_launcher`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from diloco.launcher.devices import VISIBLE, Place, assign, names
from diloco.options import RunProcess
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.process.signals import LAUNCHER_PID
from diloco.pipeline.sources import ENV_PREFIX
from diloco.workers.checks.gpus import count_gpus
from diloco.workers.checks.sets import check_set

TAIL_LINES = 20

# Folder that holds this program's packages: a source tree, or the folder of installed packages.
PROGRAM = Path(__file__).resolve().parents[2]


class ChildDied(DilocoError):
    """A process that the run needs has died; the message holds its last log lines."""


def threads_for(processes: int, asked: int | None) -> int:
    """Return the torch threads of each learner or rank: by default one per core in all, so that none stalls another."""
    return asked or max(1, usable_cores() // processes)


def places_of(settings: RunProcess) -> list[Place]:
    """Return where each learner of a run trains, on the GPUs that this process sees.

    Raises:
        UsageError: the devices are refused by `assign` or `check_set`, or are sets of devices for the data-parallel
            baseline, whose learners are ranks themselves.
    """
    places = assign(settings.devices, settings.learners, names(count_gpus(), os.environ.get(VISIBLE)))
    if settings.method == "data-parallel" and any(place.ranks > 1 for place in places):
        raise UsageError(
            f"devices={settings.devices!r}: the data-parallel baseline has one process per device: pass as many "
            "--learners as devices, or use a different --method for a set of devices per learner"
        )
    for ranks in {place.ranks for place in places}:
        check_set(ranks, settings.batch, settings.sharding, settings.compile)
    return places


def environment(threads: int, redis_url: str | None) -> dict[str, str]:
    """Return the environment of a child.

    The launcher has read all `DILOCO_*` variables and passes its settings on in a file. The variables would override
    the file, so they are left out, except for the Redis URL, which may have a password and is only in the environment.
    """
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    kept |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", LAUNCHER_PID: str(os.getpid())}
    if redis_url is not None:
        kept[f"{ENV_PREFIX}REDIS_URL"] = redis_url
    if str(PROGRAM) != sysconfig.get_path("purelib"):  # a child finds installed packages on its own
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROGRAM), kept.get("PYTHONPATH"))))
    return kept


class Child:
    """One process, with its name, its log file and its state."""

    def __init__(self, name: str, arguments: Iterable[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.environ = dict(environ)
        self.log = log
        self.under_way = False
        """True once it has made a step or an evaluation; from then on its death is not a failed start."""
        self.reported = False
        """True once its end was reported to the user."""
        self.expected_end = False
        """True if the launcher ended it on purpose."""
        self.restarted = False
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                # -P: a file in the current folder must not shadow a module of this program.
                [sys.executable, "-P", "-m", "diloco", *self.arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Start an ended process again; it appends to the same log."""
        self.under_way = self.reported = self.expected_end = False
        self.restarted = True
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Return whether it runs."""
        return self.status is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process only, not to its children."""
        self._process.send_signal(number)

    def kill_group(self) -> None:
        """Send SIGKILL to its process group, and reap it."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def ending(self) -> str:
        """Return how it ended, in words."""
        code = self.status
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of its log."""
        try:
            with self.log.open(errors="replace") as log:
                return "".join(deque(log, maxlen=lines)).rstrip()
        except OSError as error:  # the log was deleted
            return f"({error.strerror})"

    def describe_end(self) -> str:
        """Return how it ended, with its last log lines."""
        return f"{self.name} {self.ending()}. Last lines of {self.log}:\n{self.tail()}"


class Children:
    """All processes of a run. Use as a context manager: its end kills those that still run."""

    def __init__(
        self, logs: Path, kind: Callable[[str, Iterable[str], Mapping[str, str], Path], Child] = Child
    ) -> None:
        """`kind` makes a child from a name, arguments, environment and log file, and so starts it."""
        self._logs, self._kind = logs, kind
        self._by_name: dict[str, Child] = {}

    def __enter__(self) -> "Children":
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, name: str, arguments: Iterable[str], environ: Mapping[str, str]) -> Child:
        """Start `python -m diloco ARGUMENTS`; its output goes to <logs>/<name>.log."""
        child = self._kind(name, arguments, environ, self._logs / f"{name}.log")
        self._by_name[name] = child
        return child

    def __getitem__(self, name: str) -> Child:
        return self._by_name[name]

    def named(self, prefix: str) -> list[Child]:
        """Return the children whose names start with a prefix."""
        return [child for name, child in self._by_name.items() if name.startswith(prefix)]

    def pids(self) -> dict[str, int]:
        """Return the process id of each child by name."""
        return {name: child.pid for name, child in self._by_name.items()}

    def terminate(self) -> None:
        """Send SIGTERM to all that run."""
        for child in self._by_name.values():
            if child.alive:
                child.send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all process groups."""
        for child in self._by_name.values():
            child.expected_end = child.expected_end or child.alive
            child.kill_group()
