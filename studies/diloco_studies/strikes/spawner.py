"""Starts a run's processes cheaply: one process has imported torch and all else, and forks each of them. Linux only.

    launcher ──orders──▶ spawner ──fork──▶ go-between ──fork──▶ learner, syncer or evaluator

The go-between ends at once, so that its child becomes the launcher's (its nearest subreaper), which waits for it
and kills it as if it had started it itself. A fork copies one thread only and shares no CUDA context, so the spawner
must have neither other threads nor have touched a device: it imports, reads the text and computes nothing, and refuses
to fork otherwise. Each fork gets its own environment, process group, log and random state.
"""

import ctypes
import importlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from diloco.launcher.launch import Child
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process.signals import LAUNCHER_PID, die_with_launcher
from diloco_studies.strikes.failing.network import enter

PRELOADED = (
    "torch._dynamo",
    "diloco.workers.trainer.trainer",
    "diloco.workers.trainer.evaluator_process",
    "diloco.syncer.serving.service",
    "diloco.commands",
)
"""Modules that the forked processes use; torch loads `_dynamo` for the first optimizer."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PROGRAM = "diloco"
"""What is forked, unless told otherwise."""
READY = b"ready"
MAX_ORDER_BYTES = 2**17
START_S = 120.0
"""Time for the spawner to import everything."""
ADOPTED_S = 10.0


# --- in the launcher -------------------------------------------------------------------------------------


class Forked:
    """A process that the spawner has forked, and that is ours to wait for."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self) -> int:
        """Wait for its end."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self._pid, sig)


class Spawner:
    """The spawner process; leaving the block ends it. What it has forked lives on."""

    def __init__(self, environ: Mapping[str, str], log: Path, text: str, preloaded: Sequence[str] = PRELOADED) -> None:
        """environ: read by libraries as they load (threads); text: `data` of the run, read once if it can be shared."""
        self._environ, self._log, self._text, self._preloaded = dict(environ), log, text, preloaded
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Spawner":
        if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise DilocoError(
                "this needs Linux, where processes that the spawner forks become children of this process"
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_S)
        with self._log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "diloco_studies.strikes.spawner",
                    str(theirs.fileno()),
                    self._text,
                    *self._preloaded,
                ],
                # BLAS starts its threads when it is loaded; with any, nothing could be forked.
                env=self._environ | {"OPENBLAS_NUM_THREADS": "1", LAUNCHER_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._orders = ours
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        if self._orders is not None:
            self._orders.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def wait_until_ready(self) -> None:
        """Until everything is imported.

        Raises:
            DilocoError: it ended; its last lines.
        """
        assert self._orders is not None  # noqa: S101  # inside the block
        if self._orders.recv(64) != READY:
            raise self._died()

    def fork(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        network: str = "",
        program: str = PROGRAM,
    ) -> Forked:
        """Start `python -m PROGRAM ARGUMENTS`; its output goes to the end of `log`.

        network: path of the network namespace that it is to be in; "": this one's.

        Raises:
            DilocoError: the spawner has ended; its last lines.
        """
        assert self._orders is not None  # noqa: S101  # inside the block
        order = {"arguments": list(arguments), "environ": dict(environ), "log": str(log.resolve())}
        order |= {"network": network, "program": program}
        try:
            self._orders.send(dumps(order).encode())
            answer = self._orders.recv(64)
        except OSError as error:
            raise self._died() from error
        if not answer:
            raise self._died()
        return Forked(int(answer))

    def child(
        self,
        name: str,
        arguments: Iterable[str],
        environ: Mapping[str, str],
        log: Path,
        machines: Mapping[str, str] = MappingProxyType({}),
        program: str = PROGRAM,
    ) -> Child:
        """A child of `launch.Children` that is forked here, and again at each restart.

        machines: by name, the network namespace that a child is to be in.
        """
        spawner, network = self, machines.get(name, "")

        class ForkedChild(Child):
            def _start(self) -> Any:  # a `Forked`, which does what `Child` asks of a Popen
                return spawner.fork(self.arguments, self.environ, self.log, network, program)

        return ForkedChild(name, arguments, environ, log)

    def _died(self) -> DilocoError:
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        return DilocoError(f"the process that starts the others has ended. Last lines of {self._log}:\n{last}")


# --- in the spawner --------------------------------------------------------------------------------------


def preload(text: str, modules: Iterable[str]) -> None:
    """Import what the forked processes need, and read what they share; compute nothing.

    Raises:
        RuntimeError: something has started a thread or touched a device: what is forked from here would hang.
    """
    for module in modules:
        importlib.import_module(module)
    if text == "stdlib":
        importlib.import_module("diloco.workers.trainer.data.text").open_text(text)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1 or importlib.import_module("torch").cuda.is_initialized():
        raise RuntimeError(f"cannot fork: {threads} threads, or a device in use")


def serve(orders: socket.socket) -> None:
    """Fork what is ordered until the launcher closes its end."""
    while order := orders.recv(MAX_ORDER_BYTES):
        orders.send(b"%d" % _fork(json.loads(order), orders))


def _fork(order: dict[str, Any], orders: socket.socket) -> int:
    """Process id of a new process that is not our child."""
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # before the launcher knows of it: it kills by the group
            for descriptor in (told, tell, orders.fileno()):
                os.close(descriptor)
            _become(**order)
        os.write(tell, b"%d" % pid)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as answer:
        pid = int(answer.read())
    os.waitpid(between, 0)
    return pid


def _become(arguments: list[str], environ: dict[str, str], log: str, network: str, program: str) -> NoReturn:
    """Be a process of the run, as `python -m PROGRAM ARGUMENTS` would be."""
    status = 1
    try:
        if network:
            enter(network)
        nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(environ)
        random.seed()
        deadline = time.monotonic() + ADOPTED_S
        while os.getppid() != int(environ[LAUNCHER_PID]) and time.monotonic() < deadline:
            time.sleep(0.001)  # the go-between is about to end
        die_with_launcher()
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__")
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:  # whatever it is: this process must not go on as the spawner
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(arguments: Sequence[str]) -> None:
    """The spawner process: ARGUMENTS are the descriptor of its orders, the run's text, and modules to load."""
    die_with_launcher()
    orders = socket.socket(fileno=int(arguments[0]))
    preload(arguments[1], arguments[2:])
    orders.send(READY)
    serve(orders)


if __name__ == "__main__":
    main(sys.argv[1:])
