"""The processes of one other program within a measurement, and the lines in which we speak with them.

What a driver says is JSON, a line each, of bounded size and within a bounded time; `bench/peers` has the protocol.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process import signals
from diloco_studies.bench.beside.environments import Unavailable, end_group
from diloco_studies.bench.machine import cpu_s, family, peaks_mb, reset_peak

JOIN_S, ANSWER_S, LEAVE_S = 120.0, 120.0, 5.0
LOOK_S = 0.5
"""How often it is looked whether a silent driver still runs."""
LINE_BYTES = 2**16


class Driver:
    """One process, in a group of its own, that ends with us."""

    def __init__(self, name: str, python: Path, driver: Path, given: Mapping[str, Any], folder: Path) -> None:
        self.name, self._log, self._rest = name, folder / f"{name}.log", b""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DILOCO_"))}
        # One thread each, as our own processes have; two took longer for each of them on two cores. Loopback only.
        kept |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ending = [sys.executable, "-P", signals.__file__, str(os.getpid())]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*ending, str(python), "-P", str(driver), dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=kept,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, and that of its group."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None  # noqa: S101  # a pipe
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def hear(self, limit_s: float, what: str) -> dict[str, Any]:
        """The next line.

        Raises:
            Unavailable: it has ended, says nothing in time, or says something else than an answer.
        """
        assert self._process.stdout is not None  # noqa: S101  # a pipe
        until, source = time.monotonic() + limit_s, self._process.stdout.fileno()
        with selectors.DefaultSelector() as waiting:
            waiting.register(source, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                over = self._process.poll() is not None  # its children may still hold the pipe
                left = until - time.monotonic()
                if not waiting.select(0.0 if over else min(LOOK_S, max(0.0, left))):
                    if over:
                        raise self._died()
                    if left <= 0:
                        raise Unavailable(f"{self.name} did not answer `{what}` within {limit_s:g} s")
                    continue
                piece = os.read(source, LINE_BYTES)
                if not piece:
                    raise self._died()
                self._rest += piece
                if len(self._rest) > LINE_BYTES:
                    raise Unavailable(f"{self.name} answered `{what}` with more than {LINE_BYTES} bytes")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Unavailable(f"{self.name} answered `{what}` with something other than a JSON object: {line[:100]!r}")
        return answer

    def _died(self) -> Unavailable:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return Unavailable(
            f"{self.name} has ended ({self._process.wait()}): {(lines or ['it printed nothing'])[-1][:400]}"
        )

    def leave(self) -> None:
        """Tell it that there is nothing more to do."""
        assert self._process.stdin is not None  # noqa: S101  # a pipe
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return

    def end(self, until: float) -> None:
        """Wait for it to leave by itself; then kill what is left of it and its children."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(self.pid)
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


class Crew:
    """All processes of one program, joined, for the time of a `with` block."""

    def __init__(
        self, name: str, python: Path, driver: Path, given: Mapping[str, Any], processes: int, delta_bytes: float
    ) -> None:
        self._name, self._python, self._driver, self._given = name, python, driver, given
        self._processes, self._delta_bytes = processes, delta_bytes
        self._drivers: list[Driver] = []
        self._stack = ExitStack()
        self.hello: dict[str, Any] = {}
        self.turns = len(given["fragments"])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco_peer_")))
            stack.callback(self._end)
            given = dict(self._given) | {"address": None}
            for number in range(self._processes):
                name = f"{self._name}-{number}" if self._processes > 1 else self._name
                self._drivers.append(Driver(name, self._python, self._driver, given | {"number": number}, folder))
                if not number:  # the others may have to know where it is
                    self.hello = self._drivers[0].hear(JOIN_S, "hello")
                    given["address"] = self.hello.get("address")
            for driver in self._drivers[1:]:
                driver.hear(JOIN_S, "hello")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        for driver in self._drivers:
            driver.leave()
        until = time.monotonic() + LEAVE_S
        for driver in self._drivers:
            driver.end(until)

    def all(self, command: str) -> list[dict[str, Any]]:
        """Tell all the same, and hear them all."""
        for driver in self._drivers:
            driver.say(command)
        return [driver.hear(ANSWER_S, command) for driver in self._drivers]

    def warm_up(self) -> None:
        """One round that does not count."""
        self.all("prepare")
        self.all("round")

    def round(self) -> dict[str, float]:
        """One round's figures.

        Raises:
            Unavailable: it failed; the learners have not come to the same values.
        """
        self.all("prepare")
        time.sleep(0.5)
        pids = [pid for driver in self._drivers for pid in family(driver.pid)]
        for pid in pids:
            reset_peak(pid)
        before = sum(map(cpu_s, pids))
        said = self.all("round")
        used = sum(map(cpu_s, pids)) - before
        largest, together = peaks_mb(pids)
        checked = self.all("check")
        try:
            alike([length for one in checked for length in one["lengths"]])
            found = figures(said, used, self._given["learners"], self._delta_bytes)
        except (KeyError, TypeError) as error:
            raise Unavailable(f"{self._name} answered with something other than figures: {error!r}") from error
        return found | {"largest_process_mb": largest, "all_processes_mb": together}


def figures(said: Sequence[Mapping[str, float]], used: float, learners: int, delta_bytes: float) -> dict[str, float]:
    """Of the answers to `round`; `used`: CPU seconds of all processes."""
    found = {
        "publish_to_adopted_s": max(one["adopted"] for one in said) - max(one["began"] for one in said),
        "cpu_s_per_learner": used / learners,
    }
    if all("blocked_s" in one for one in said):
        found["trainer_blocked_s"] = max(one["blocked_s"] for one in said)
    if all("server_cpu_s" in one for one in said):
        found["server_cpu_s_per_gb"] = sum(one["server_cpu_s"] for one in said) / (delta_bytes / 1e9)
    return found


def alike(lengths: Sequence[float]) -> None:
    """Whether all learners hold the same after a round: else nothing was synchronised.

    Raises:
        Unavailable: they do not.
    """
    if not lengths or max(lengths) - min(lengths) > 1e-6 * max(lengths):
        raise Unavailable(f"its learners differ after a round: lengths {', '.join(f'{one:.9g}' for one in lengths)}")
