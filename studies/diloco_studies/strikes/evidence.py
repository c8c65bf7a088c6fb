"""What a struck run has left outside its bus: the learners' logs and step times, and processes that still run."""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from diloco.pipeline.process.signals import LAUNCHER_PID
from diloco_studies.strikes.audit import ShardNote

SHARD_EVENTS = {"shard_claimed": False, "shard_read": True}
LOSSES_FILE = "losses.jsonl"


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a file, one a line. SIGKILL may have cut one; the next one stands behind it then."""
    with file.open(errors="replace") as lines:
        for line in lines:
            for text in (line, line[max(0, line.find('{"', 1)) :]):
                try:
                    found = json.loads(text)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    yield found
                break


def read_shard_notes(logs: Path) -> list[ShardNote]:
    """What the learners' logs say about shards, by time."""
    notes = [
        ShardNote(
            unix_s=datetime.fromisoformat(line["timestamp"]).timestamp(),
            consumer=line["consumer"],
            epoch=line["epoch"],
            index=line["shard"],
            read=SHARD_EVENTS[line["event"]],
        )
        for file in sorted(logs.glob("learner-*.log"))
        for line in _lines(file)
        if line.get("event") in SHARD_EVENTS
    ]
    return sorted(notes, key=lambda note: note.unix_s)


def read_shards_per_epoch(logs: Path) -> int:
    """How many shards an epoch has, as who queued one said; 0 if nobody did."""
    lines = (line for file in logs.glob("learner-*.log") for line in _lines(file))
    return max((line["shards"] for line in lines if line.get("event") == "epoch_queued"), default=0)


def read_steps(learners: Path) -> dict[str, list[tuple[str, list[tuple[int, float]]]]]:
    """Learner -> (incarnation, (step, Unix time of its end) in order), from its own records.

    A killed one's last steps, those of the last second at most, are missing.
    """
    found: dict[str, list[tuple[str, list[tuple[int, float]]]]] = {}
    for folder in sorted(learners.iterdir()) if learners.is_dir() else ():
        by_incarnation: dict[str, list[tuple[int, float]]] = {}
        files = [folder / LOSSES_FILE, *sorted(folder.glob(f"rank-0-of-*/{LOSSES_FILE}"))]
        for line in (line for file in files if file.is_file() for line in _lines(file)):
            by_incarnation.setdefault(line["incarnation"], []).append((line["step"], line["unix_s"]))
        found[folder.name] = list(by_incarnation.items())
    return found


def read_step_times(learners: Path) -> dict[str, list[tuple[str, list[float]]]]:
    """The same without the steps' numbers."""
    return {
        name: [(incarnation, [at for _, at in steps]) for incarnation, steps in lives]
        for name, lives in read_steps(learners).items()
    }


def left_running(launcher: int, expected: set[int | None]) -> list[str]:
    """Processes, as text, that were started under a launcher and still run, but for the expected ones. Linux only."""
    mark = f"{LAUNCHER_PID}={launcher}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid == os.getpid() or pid in expected:
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"process {pid}: {command}")
        except OSError:
            continue  # it has ended, or is not ours to look at
    return sorted(found)
