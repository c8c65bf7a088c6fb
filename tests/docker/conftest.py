"""A project for each test, and nothing left of it."""

import os
from collections.abc import Iterator

import pytest

from tests.docker.project import Project, why_no_engine

TOKENS = 800_000


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    if reason := why_no_engine():
        pytest.skip(reason)
    for name in list(os.environ):
        if name.startswith(("DILOCO_", "REDIS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SYNCER_PORT", "0")
    monkeypatch.setenv("DILOCO_PACE", "500ms")  # so that learners do not fight for cores: 2,048 tokens/s each
    monkeypatch.setenv("DILOCO_SYNC_INTERVAL", "12")
    monkeypatch.setenv("DILOCO_TOKENS", str(TOKENS))
    project = Project()
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "30")
    assert project.leftovers() == {"containers": [], "volumes": [], "networks": []}
