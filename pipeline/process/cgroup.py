"""What a process may take of its machine's memory and cores: the limits of its control groups, of either version.

A group has no more than the groups around it, whatever its own files say: the lowest limit on the way up rules. What
lies above a container's own tree is not to be seen in it, and its own limits are those of the tree's top.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class Limits(NamedTuple):
    """inf: none is set, or none can be read."""

    memory_bytes: float
    cores: float


def limits(root: Path = ROOT, own: Path = OWN) -> Limits:
    """The lowest of this process's groups.

    Args:
        root: where the trees are.
        own: which groups this process is in, a line each: number, controllers ("" of version 2), path.
    """
    memory, cores = [math.inf], [math.inf]
    for group in _groups(root, own):
        memory += _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
        quota = _numbers(group / "cpu.max")
        quota = quota or _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] > 0:  # -1 is version 1's word for none
            cores.append(quota[0] / quota[1])
    return Limits(min(memory), min(cores))


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's groups and of all around them, there or not."""
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
