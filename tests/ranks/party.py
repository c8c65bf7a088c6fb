"""A run whose learners have several ranks, as processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from diloco.pipeline.bus.embedded import EmbeddedRedis, free_port
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.messages.run import Event, LearnerReport
from tests.parties import ends_of_logs, environment, wait_for

RANK = Path(__file__).with_name("rank.py")


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes that it has started, and that live."""
    if process.poll() is not None:
        return []
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


class Party:
    """A Redis, a syncer and learners, ended with the block. Their output is in files of `folder`."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self.redis = folder, EmbeddedRedis(appendonly=True, dies_with_us=True)
        self._settings = {f"DILOCO_{name.upper()}": str(value) for name, value in settings.items()}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.redis.__enter__()
        self.url = self.redis.url
        self.start("syncer.log", {"DILOCO_HTTP_PORT": "0"}, "-m", "diloco", "syncer", "--run", "ranks")
        return self

    def __exit__(self, *_: object) -> None:
        orphans = [child for process in self._started for child in children_of(process)]  # as torchrun's, once killed
        for process in self._started:
            process.kill()
            process.wait()
        for child in orphans:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.redis.__exit__(None, None, None)

    def start(self, log: str, extra: dict[str, str], *command: object) -> subprocess.Popen[bytes]:
        env = environment(OMP_NUM_THREADS="1", DILOCO_REDIS_URL=self.url, **self._settings) | extra
        with (self.folder / log).open("ab") as output:
            started = subprocess.Popen([sys.executable, *map(str, command)], env=env, stdout=output, stderr=output)
        self._started.append(started)
        return started

    def learner(self, kind: str, name: str, ranks: int = 1, **extra: str) -> list[subprocess.Popen[bytes]]:
        """Start all ranks of one; what rank r says is in NAME-r.log."""
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            self.start(f"{name}-{rank}.log", group | {"RANK": str(rank)} | extra, RANK, kind, name, self.folder)
            for rank in range(ranks)
        ]

    def said(self, log: str, what: str) -> list[str]:
        """Connections that begin with a word; those of the log have it as their event."""
        path, event = self.folder / f"{log}.log", f'"event": "{what}"'
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(what) or event in line]

    def reports(self) -> list[LearnerReport]:
        """What the learners have last reported."""

        async def read() -> list[LearnerReport]:
            bus = await connect(self.url, "ranks")
            try:
                return [seen.report for seen in await bus.read_reports()]
            finally:
                await bus.close()

        return asyncio.run(read())

    def events(self) -> list[Event]:
        """What the bus says has happened."""

        async def read() -> list[Event]:
            bus = await connect(self.url, "ranks")
            try:
                return [event for _, event in await bus.read_events()]
            finally:
                await bus.close()

        return asyncio.run(read())

    def until(self, true: Callable[[], Any]) -> None:
        wait_for(true, self.shown)

    def ended(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        """Their statuses, once all have ended."""
        self.until(lambda: all(process.poll() is not None for process in processes))
        return [process.returncode for process in processes]

    def shown(self) -> str:
        """The ends of all logs, for a test that failed."""
        return ends_of_logs(self.folder)
