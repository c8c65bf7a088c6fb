"""Processes of one run beside a Redis, each with its log, and waiting for what they do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from diloco.pipeline.bus.embedded import EmbeddedRedis
from tests import HANGING_S

ROOT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings, and with this tree to import from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    return kept | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "studies")))} | more


def python(*command: object, **environ: str) -> "subprocess.CompletedProcess[str]":
    """A Python process to its end, and what it said. environ: beside an environment without settings."""
    run = [sys.executable, *map(str, command)]
    env = environment(**environ)
    return subprocess.run(run, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGING_S)


def is_running(pid: int) -> bool:
    try:  # a process that has ended stays there if this one adopts orphans, as `strikes.spawner` has it do
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], Any], shown: Callable[[], object] = str) -> Any:
    """What it returns, once that is true. shown: for a wait in vain."""
    until = time.monotonic() + HANGING_S
    while not (found := condition()):
        assert time.monotonic() < until, f"it did not happen in time\n{shown()}"
        time.sleep(0.1)
    return found


def ends_of_logs(folder: Path) -> str:
    """For a test that fails."""
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs)


class Parties:
    """A Redis, and whoever is started beside it; all end with the block. Their output is in `folder`/NAME.log."""

    def __init__(self, folder: Path, **settings: object) -> None:
        """settings: of all of them, as `run="name"`."""
        self.folder = folder
        self._redis = EmbeddedRedis(dies_with_us=True)
        self._settings = {f"DILOCO_{name.upper()}": str(value) for name, value in settings.items()}
        self._started: list[subprocess.Popen[bytes]] = []
        self._lead: list[subprocess.Popen[bytes]] = []
        """Those with a session of their own: what they have started ends with them."""

    def __enter__(self) -> Self:
        self.url = self._redis.__enter__().url
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            if process in self._lead:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self._redis.__exit__(None, None, None)

    def start(self, name: str, *command: object, **how: Any) -> "subprocess.Popen[bytes]":
        """A Python process. how: as of `Popen`; an `env` is added to the others' environment."""
        env = environment(DILOCO_REDIS_URL=self.url, OMP_NUM_THREADS="1", **self._settings) | how.pop("env", {})
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, *map(str, command)], env=env, stdout=log, stderr=log, **how)
        self._started.append(process)
        if how.get("start_new_session"):
            self._lead.append(process)
        return process

    def diloco(self, name: str, *arguments: object, **how: Any) -> "subprocess.Popen[bytes]":
        """`diloco ARGUMENTS`."""
        return self.start(name, "-m", "diloco", *arguments, **how)

    def syncer(self, *arguments: object, name: str = "syncer", **how: Any) -> "subprocess.Popen[bytes]":
        """One whose HTTP side is on a free port."""
        return self.diloco(name, "syncer", "--http-port", 0, *arguments, **how)

    def said(self, name: str) -> str:
        """All that a process has written; nothing before it is started."""
        file = self.folder / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has logged."""
        lines = self.said(name).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def shown(self) -> str:
        """The ends of all logs, for a test that fails."""
        return ends_of_logs(self.folder)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for something."""
        return wait_for(condition, shown=self.shown)

    def ends(self, *processes: "subprocess.Popen[bytes]") -> list[int]:
        """Wait for the ends of all; their statuses."""
        self.until(lambda: all(process.poll() is not None for process in processes))
        return [process.returncode for process in processes]
