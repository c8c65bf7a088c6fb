"""What tests of the studies share."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text that a model learns quickly."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(4000)))
    return path
