"""Looks at what the processes of a run take, again and again: `footprint` judges it. asyncio, Linux only."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from diloco_studies.strikes.footprint import JUDGED_S, Life, Sample

SAMPLE_S = 5.0


def take(pid: int) -> Sample | None:
    """What a process takes now, of memory what no file backs; None: it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        told = dict(line.split(":", 1) for line in (folder / "status").read_text(errors="replace").splitlines())
        descriptors, threads = (sum(1 for _ in (folder / name).iterdir()) for name in ("fd", "task"))
    except OSError:
        return None
    if "RssAnon" not in told:  # it is dead, and nobody has waited for it yet
        return None
    return {"MB": int(told["RssAnon"].split()[0]) / 1e3, "descriptors": descriptors, "threads": threads}


class Footprints:
    """Follows all processes of a run."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        """pids: who lives now, by name."""
        self._pids = pids
        self._lives: dict[tuple[str, int], list[tuple[float, Sample]]] = {}

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            now_s = asyncio.get_running_loop().time()
            for name, pid in self._pids().items():
                if (sample := take(pid)) is not None:
                    self._lives.setdefault((name, pid), []).append((now_s, sample))
            await asyncio.sleep(SAMPLE_S)

    def judged(self) -> list[Life]:
        """Those that lived for long enough."""
        lives = [Life(name, samples) for (name, _), samples in self._lives.items()]
        return [life for life in lives if life.length_s >= JUDGED_S]
