"""The machine under a measurement: what it is, what memory it has left, what a process on it uses."""

import mmap
import os
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from diloco.pipeline.errors import UsageError
from diloco.pipeline.process.cores import usable_cores
from diloco_studies.bench.figures import Spread

GB = 1e9
_SCHEDULED = 2  # linux/posix-timers.h: CPUCLOCK_SCHED
_RESET_PEAK = "5"  # man 5 proc_pid_clear_refs


def describe(redis: str) -> dict[str, Any]:
    """What stands beside every figure. `redis`: version of the server, or why there is none."""

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {
        "cpu": _cpu(),
        "cores": usable_cores(),
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
            f"{what} needs about {needed / GB:.1f} GB of memory, but {free / GB:.1f} GB are free here: use smaller "
            "--params or fewer --learners, or close other programs"
        )


# --- its state, beside which figures of the code are read ---------------------------------------------------

MAX_TAKEN = 0.1
"""Share of all cores that others may take in rounds before it is said."""
DEAR_PAGE_US = 4.0
"""A page of fresh memory that costs more CPU time than this says that the kernel, or the host of a virtual machine, has
to get it from somewhere. The fault and clearing 4 KiB take a half to two."""
DRIFT = 2.0
"""The most over the least of what should stay the same, from which on it is said."""
_TOUCHED = 32 * 2**20


def fresh_page_us() -> float:
    """CPU time in microseconds that a page of memory costs which is touched for the first time."""
    pages = _TOUCHED // mmap.PAGESIZE
    with mmap.mmap(-1, _TOUCHED) as memory:
        first_bytes = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        began = time.thread_time()
        first_bytes.fill(1)
        took = time.thread_time() - began
        del first_bytes  # or the map would not close
    return took / pages * 1e6


class Taken:
    """What others take of all cores while these processes work. Linux."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = [*pids, os.getpid()]
        self._began = self._now()

    def shares(self) -> dict[str, float]:
        """Of the time since this was made: what other processes had, and what the host of a virtual machine kept."""
        busy, stolen, total, own = (b - a for a, b in zip(self._began, self._now(), strict=True))
        ticks = os.sysconf("SC_CLK_TCK")
        return {
            "others_share": max(0.0, busy - own * ticks) / max(1.0, total),
            "steal_share": stolen / max(1.0, total),
        }

    def _now(self) -> tuple[float, float, float, float]:
        """Ticks of all cores that were busy, that were stolen, that there were; and seconds of these processes."""
        fields = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle, waiting, stolen = fields[3], fields[4], fields[7]
        return sum(fields) - idle - waiting - stolen, stolen, sum(fields), sum(cpu_s(pid) for pid in self._pids)


def unusual(found: Mapping[str, Spread]) -> list[str]:
    """What in the machine's own figures says that it, and not the code, makes the others what they are."""
    said = []
    for name, who in (("others_share", "other processes"), ("steal_share", "the host of this machine")):
        if name in found and (share := found[name]["median"]) > MAX_TAKEN:
            said.append(f"{who} took {share:.0%} of its cores")
    if "fresh_page_us" in found and (price := found["fresh_page_us"]["max"]) > DEAR_PAGE_US:
        said.append(f"a page of fresh memory cost up to {price:.2g} us")
    for name, what in (("memory_gb_s", "copies of memory"), ("floor_in_gb_s", "a C client into Redis")):
        if name in found and (one := found[name])["max"] > DRIFT * one["min"]:
            said.append(f"{what} went at {one['min']:.2g} to {one['max']:.2g} GB/s")
    return said


# --- processes ----------------------------------------------------------------------------------------------


def page_faults(pid: int) -> int:
    """Pages that a process has touched for the first time, none of them read from a disk. Linux."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def wake_ups(pid: int) -> int:
    """How often the threads of a process that live have waited for something so far. Linux."""
    found = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # it has ended meanwhile
            lines = status.read_text().splitlines()
            found += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


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
