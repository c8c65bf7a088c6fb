"""Which files are text: of a folder, and of Python's own standard library."""

import os
import sysconfig
from pathlib import Path

PROBE_BYTES = 8192
"""Looked at to tell a binary file."""

_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def visible_files(folder: Path) -> list[Path]:
    """All files below a folder in the order of their paths; hidden ones and those in hidden folders are left out."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(name[0] == "." for name in path.relative_to(folder).parts)
    ]


def stdlib_root() -> Path:
    """Folder of Python's own source text."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """Python's own source text, without its test suites."""
    found: list[Path] = []
    for folder, below, names in os.walk(stdlib_root()):
        below[:] = set(below) - _STDLIB_SKIPPED  # site-packages may hold very many files
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)
