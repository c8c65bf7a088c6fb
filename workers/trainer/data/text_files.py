"""Finds the files that may be text: in a folder, and in Python's own standard library."""

import os
import sysconfig
from pathlib import Path

# Bytes at a file's start that are read to detect a binary file.
PROBE_BYTES = 8192

_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def visible_files(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted by path, except hidden ones and those in hidden folders."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(name[0] == "." for name in path.relative_to(folder).parts)
    ]


def stdlib_root() -> Path:
    """Return the folder of Python's own source text."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """Return the files of Python's own source text, without its test suites."""
    found: list[Path] = []
    for folder, below, names in os.walk(stdlib_root()):
        below[:] = set(below) - _STDLIB_SKIPPED  # site-packages may hold very many files
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)
