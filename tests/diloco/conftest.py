"""What tests of the command line share."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an empty folder, without a setting of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("DILOCO_"):
            monkeypatch.delenv(name)
