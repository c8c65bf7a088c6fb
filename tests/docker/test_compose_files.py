"""What can be said about the compose files without an engine."""

import re
from pathlib import Path

import pytest

from pipeline.settings import (
    EvaluatorProcess,
    LearnerProcess,
    LearnerSettings,
    SyncerProcess,
    SyncerSettings,
    SyncSettings,
    TrainerSettings,
)

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("compose*.yaml"))
KNOWN = {
    f"DILOCO_{name.upper()}" for kind in (SyncerProcess, LearnerProcess, EvaluatorProcess) for name in kind.model_fields
}


def variables(path: Path) -> set[str]:
    return set(re.findall(r"DILOCO_[A-Z_]+", path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_is_a_setting(path):
    """A setting that is renamed or removed is noticed here, not by a container that ignores its variable."""
    assert variables(path) <= KNOWN


def test_every_setting_of_the_run_can_be_given():
    """A run in containers can be given each setting that its parties must agree on; groups are for Redis Cluster."""
    agreed = {f"DILOCO_{name.upper()}" for kind in (SyncSettings, TrainerSettings) for name in kind.model_fields}
    assert agreed - variables(ROOT / "compose.yaml") == {"DILOCO_GROUPS"}


def test_containers_are_stopped_later_than_their_processes_give_up():
    """`docker compose stop` leaves a syncer the time to checkpoint and a learner the time to publish."""
    grace_s = {
        int(seconds) for seconds in re.findall(r"stop_grace_period: (\d+)s", (ROOT / "compose.yaml").read_text())
    }
    shutdown_s = SyncerSettings.model_fields["shutdown_s"].default
    leave_s = LearnerSettings.model_fields["leave_s"].default
    assert min(grace_s) > max(shutdown_s, leave_s)


def test_builds_need_nothing_that_an_old_builder_lacks():
    """The Dockerfile is one for the classic builder too: no frontend line, no mounts, no heredocs."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert not re.search(r"^#\s*syntax\s*=|--mount|<<", text, re.MULTILINE | re.IGNORECASE)
