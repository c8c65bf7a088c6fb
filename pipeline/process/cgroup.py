"""What a container may take of its machine's memory and cores: the limits of its control group, of either version."""

import math
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")


class Limits(NamedTuple):
    """inf: none is set, or none can be read."""

    memory_bytes: float
    cores: float


def limits(root: Path = ROOT) -> Limits:
    """Those at the top of a tree, which is where a container sees its own."""
    (memory,) = _numbers(root / "memory.max") or _numbers(root / "memory/memory.limit_in_bytes") or [math.inf]
    quota, period = (
        _numbers(root / "cpu.max")
        or _numbers(root / "cpu/cpu.cfs_quota_us") + _numbers(root / "cpu/cpu.cfs_period_us")
        or (math.inf, 1.0)
    )
    return Limits(memory, quota / period if quota > 0 else math.inf)  # -1 is version 1's word for none


def _numbers(file: Path) -> list[float]:
    try:
        return [math.inf if word == "max" else float(word) for word in file.read_text().split()]
    except OSError:
        return []
