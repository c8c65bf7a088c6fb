"""The monitoring profile of compose.yaml for real: a learner is killed, and Prometheus' rule fires."""

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docker.project import Project, docker, live, merging, step

PARTIES = ("redis", "syncer", "learner", "prometheus")
"""Grafana is in no registry that is reached from everywhere, and nothing is asked of it here."""
STAND_IN = "diloco-test-prometheus"
FIRES_S = 300.0
"""Two minutes of the rule's own, and the intervals of scrapes and evaluations."""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


def image_of(service: str) -> str:
    """That compose.yaml names."""
    return str(
        json.loads(docker("compose", "--profile", "*", "config", "--format", "json"))["services"][service]["image"]
    )


@pytest.fixture
def prometheus(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project with Prometheus on a free port; its image is made of this machine's own where none can be pulled."""
    monkeypatch.setenv("PROMETHEUS_PORT", "0")
    monkeypatch.setenv("DILOCO_QUORUM", "2")
    monkeypatch.setenv("DILOCO_TOKENS", "1B")
    image = image_of("prometheus")
    try:
        docker("image", "inspect", image)
    except AssertionError:
        try:
            docker("pull", image, timeout_s=60)
        except (AssertionError, subprocess.TimeoutExpired):
            if (binary := shutil.which("prometheus")) is None:
                pytest.skip(f"no {image}, and no Prometheus on this machine to make one of")
            shutil.copy(binary, tmp_path)
            lines = (
                "FROM python:3.11-slim",
                "COPY prometheus /bin/prometheus",
                "RUN mkdir /prometheus && chown 65534 /prometheus",
            )
            (tmp_path / "Dockerfile").write_text("\n".join([*lines, "USER 65534", ""]))
            docker("build", "-t", STAND_IN, str(tmp_path), timeout_s=300)
            override = {"services": {"prometheus": {"image": STAND_IN}}}
            (tmp_path / "stand-in.json").write_text(json.dumps(override))
            monkeypatch.setenv("COMPOSE_FILE", os.pathsep.join(["compose.yaml", str(tmp_path / "stand-in.json")]))
    return project


class Alerts:
    """Of the project's Prometheus."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def states(self) -> dict[str, str]:
        """Alert -> pending or firing."""
        address = self._project.compose("port", "prometheus", "9090").strip()
        with urllib.request.urlopen(f"http://{address}/api/v1/alerts", timeout=10) as answer:
            told: dict[str, Any] = json.load(answer)
        return {alert["labels"]["alertname"]: alert["state"] for alert in told["data"]["alerts"]}

    def until(self, true: Callable[[dict[str, str]], bool], what: str) -> None:
        deadline = time.monotonic() + FIRES_S
        while not true(seen := self.states()):
            assert time.monotonic() < deadline, f"{what}: {seen}\n{self._project.logs()}"
            time.sleep(2)


def test_the_alert_of_a_run_below_its_quorum_fires(prometheus: Project) -> None:
    """With a learner more it is over."""
    project = prometheus
    step("build")
    project.compose("build", timeout_s=1200)
    step("up with two learners and Prometheus")
    project.compose("up", "-d", "--scale", "learner=2", *PARTIES)
    both = project.learner_ids()
    project.until(merging(8, both), "two learners merge")
    alerts = Alerts(project)
    alerts.until(lambda seen: not seen, "no alert of a run that is well")

    step("kill one")
    victim = min(both)
    docker("kill", "--signal", "KILL", victim)
    project.until(lambda seen: victim not in live(seen), "the killed learner is no longer live")
    began = time.monotonic()
    alerts.until(lambda seen: seen.get("DilocoQuorumUnreachable") == "firing", "the quorum cannot be reached")
    step(f"fired {time.monotonic() - began:.0f} s later")

    step("another one comes")
    project.scale(2)
    project.until(lambda seen: len(live(seen)) >= 2, "two are live")
    alerts.until(lambda seen: "DilocoQuorumUnreachable" not in seen, "the alert is over")
