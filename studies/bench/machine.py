"""The machine under a measurement: what it is, what memory it has left, what a process on it uses."""

import os
import platform
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from diloco.pipeline.errors import UsageError

GB = 1e9
_SCHEDULED = 2  # linux/posix-timers.h: CPUCLOCK_SCHED
_RESET_PEAK = "5"  # man 5 proc_pid_clear_refs


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(redis: str) -> dict[str, Any]:
    """What stands beside every figure. `redis`: version of the server, or why there is none."""

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {
        "cpu": _cpu(),
        "cores": cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": installed("torch"),
        "numpy": installed("numpy"),
        "redis": redis,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def need_memory(needed: float, what: str) -> None:
    """Before anything is started: whether it will fit.

    Raises:
        UsageError: it will not; how much it needs.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
    if free is not None and free < needed:
        raise UsageError(
            f"{what} needs about {needed / GB:.1f} GB of memory, and {free / GB:.1f} GB are free here: "
            "give a smaller --params, fewer --learners, or close something"
        )


def cpu_s(pid: int) -> float:
    """CPU time of a process, all its threads. Linux."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)


def family(pid: int) -> list[int]:
    """A process and all its descendants. Linux."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def peak_mb(pid: int) -> float:
    """Largest resident set of a process since `reset_peak`, in MB. Linux."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


def peaks_mb(pids: Iterable[int]) -> tuple[float, float]:
    """The largest of some processes, and all together, since `reset_peak`, in MB. Linux.

    Pages that several of them share (libraries, what was there before a fork) count once in the sum: what is shared
    now is taken off each peak as /proc says it.
    """
    largest = together = 0.0
    for pid in pids:
        peak, rollup = peak_mb(pid), Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        size = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in rollup[1:] if line.endswith("kB")}
        largest, together = max(largest, peak), together + peak - (size["Rss"] - size["Pss"])
    return largest, together


def reset_peak(pid: int) -> None:
    """Begin to look for the largest resident set anew. Linux."""
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
