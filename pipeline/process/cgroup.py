"""Limits of memory and cores that control groups of either version set for this process.

A group is also bound by the groups around it, whatever its own files say, so the lowest limit on the way up counts.
Groups above a container's root are not visible inside it; the container's own limits are at the root of its tree.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class Limits(NamedTuple):
    """The cgroup's limits; inf where none is set or none can be read."""

    memory_bytes: float
    cores: float


def limits(root: Path = ROOT, own: Path = OWN) -> Limits:
    """Return the lowest limits of this process's groups.

    Args:
        root: where the cgroup trees are mounted.
        own: file that lists this process's groups, one per line: number, controllers ("" in version 2), path.
    """
    memory, cores = [math.inf], [math.inf]
    for group in _groups(root, own):
        memory += _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
        quota = _numbers(group / "cpu.max")
        quota = quota or _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] > 0:  # version 1 writes -1 for no limit
            cores.append(quota[0] / quota[1])
    return Limits(min(memory), min(cores))


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of all groups around them; some may not exist."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {controller: Path(path) for _, controllers, path in lines for controller in controllers.split(",")}
    for tree, controller in ((root, ""), (root / "memory", "memory"), (root / "cpu", "cpu")):
        path = paths.get(controller, Path("/"))
        yield from (tree / one.relative_to("/") for one in (path, *path.parents) if ".." not in one.parts)


def _numbers(file: Path) -> list[float]:
    try:
        return [math.inf if word == "max" else float(word) for word in file.read_text().split()]
    except OSError:
        return []
