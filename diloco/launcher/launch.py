"""Child processes of the launcher: started in sessions of their own, logged, and never left behind.

Each child leads its own process group, so that Ctrl-C on the terminal reaches the launcher alone, which then ends
the run in order. No child outlives the launcher: `Children` kills every group when its block is left, however it
is left; and should the launcher itself be killed, the kernel kills the children (`signals.die_with_launcher`).
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
from typing import Protocol

from diloco.launcher.devices import VISIBLE, Place, assign, names
from diloco.options import RunProcess
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.process.signals import LAUNCHER_PID
from diloco.pipeline.sources import ENV_PREFIX
from diloco.workers.checks.gpus import count_gpus
from diloco.workers.checks.sets import check_set

TAIL_LINES = 20

PROGRAM = Path(__file__).resolve().parents[2]
"""Folder that holds this program's packages: a source tree, or where packages are installed."""


class ChildDied(DilocoError):
    """A process that the run needs has died; the message holds its last log lines."""


def threads_for(processes: int, asked: int | None) -> int:
    """Torch threads of each learner, or rank of one: all together use the cores once, or else they stall each other."""
    return asked or max(1, usable_cores() // processes)


def places_of(settings: RunProcess) -> list[Place]:
    """Where each learner of a run trains, on the GPUs that this process sees.

    Raises:
        UsageError: as `assign` and `check_set`, or sets of devices for a method whose learners are ranks themselves.
    """
    places = assign(settings.devices, settings.learners, names(count_gpus(), os.environ.get(VISIBLE)))
    if settings.method == "data-parallel" and any(place.ranks > 1 for place in places):
        raise UsageError(
            f"devices={settings.devices!r}: a set of devices for one learner needs another --method: the data-parallel "
            "baseline has one process for each; give as many --learners as devices"
        )
    for ranks in {place.ranks for place in places}:
        check_set(ranks, settings.batch, settings.sharding, settings.compile)
    return places


def environment(threads: int, redis_url: str | None) -> dict[str, str]:
    """Environment of a child.

    The launcher has read all `DILOCO_*` variables already and hands its settings on in a file, which the
    variables would override: so they stay behind, but for the Redis URL, whose place is the environment.
    """
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    kept |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", LAUNCHER_PID: str(os.getpid())}
    if redis_url is not None:
        kept[f"{ENV_PREFIX}REDIS_URL"] = redis_url
    if str(PROGRAM) != sysconfig.get_path("purelib"):  # what is installed, a child finds by itself
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROGRAM), kept.get("PYTHONPATH"))))
    return kept


class Process(Protocol):
    """What a `Child` needs of its process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        ...

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        ...


class Child:
    """One process: its name, its log file, and how it is."""

    def __init__(self, name: str, arguments: Iterable[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.environ = dict(environ)
        self.log = log
        self.under_way = False
        """It did what it was started for at least once; from then on its death is no failed start."""
        self.reported = False
        """Its end was told to the user."""
        self.expected_end = False
        """The launcher ended it on purpose."""
        self.restarted = False
        self._process: Process = self._start()

    def _start(self) -> Process:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                # -P: a file of the user's in the current folder must not stand in for a module of ours.
                [sys.executable, "-P", "-m", "diloco", *self.arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Start it again, once it is gone; its log goes on."""
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
        """It runs."""
        return self.status is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL to everything in its process group, and reap it."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.status
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log."""
        try:
            with self.log.open(errors="replace") as log:
                return "".join(deque(log, maxlen=lines)).rstrip()
        except OSError as error:  # it was deleted
            return f"({error.strerror})"

    def obituary(self) -> str:
        """How it ended, with its last log lines."""
        return f"{self.name} {self.ending()}. Last lines of {self.log}:\n{self.tail()}"


class Children:
    """All processes of a run; leaving the block kills those that are left."""

    def __init__(
        self, logs: Path, kind: Callable[[str, Iterable[str], Mapping[str, str], Path], Child] = Child
    ) -> None:
        """`kind`: makes, and so starts, a child of these arguments."""
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
        """Children whose name starts so."""
        return [child for name, child in self._by_name.items() if name.startswith(prefix)]

    def pids(self) -> dict[str, int]:
        """Process id of each child."""
        return {name: child.pid for name, child in self._by_name.items()}

    def terminate(self) -> None:
        """SIGTERM to all that run."""
        for child in self._by_name.values():
            if child.alive:
                child.send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all groups at once."""
        for child in self._by_name.values():
            child.expected_end = child.expected_end or child.alive
            child.kill_group()
