"""A compose project of compose.yaml under a name of its own."""

import json
import os
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import HANGING_S

ROOT = Path(__file__).parents[2]
PARTIES = {"syncer", "learner", "evaluator"}
"""Services that end with the run."""


def docker(*args: str, timeout_s: float = 120) -> str:
    """Run `docker`; its output, or a failure with what it said."""
    program = shutil.which("docker") or "docker"
    done = subprocess.run([program, *args], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(args)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def why_no_engine() -> str | None:
    if shutil.which("docker") is None:
        return "no docker command"
    for args in (["info"], ["compose", "version"]):
        try:
            docker(*args, timeout_s=20)
        except (AssertionError, subprocess.TimeoutExpired):
            return f"`docker {' '.join(args)}` fails: no Docker Engine with Compose runs here"
    return None


class Project:
    """One compose project under a name of its own, with the syncer's HTTP side on a free port."""

    def __init__(self) -> None:
        self.name = f"diloco-test-{secrets.token_hex(4)}"
        self.files = ["compose.yaml"]

    def compose(self, *args: str, timeout_s: float = 180) -> str:
        files = [part for file in self.files for part in ("-f", file)]
        own = "--env-file", os.devnull  # not the user's `.env`
        return docker("compose", *own, "-p", self.name, *files, *args, timeout_s=timeout_s)

    def scale(self, learners: int) -> None:
        """What a person types on a live run."""
        self.compose("up", "-d", "--scale", f"learner={learners}")

    def containers(self) -> list[dict[str, Any]]:
        listed = self.compose("ps", "--all", "--format", "json").strip()
        return [json.loads(line) for line in listed.splitlines()]

    def learner_ids(self) -> set[str]:
        """Host names of the running learner containers: the learners' ids."""
        ids = self.compose("ps", "--quiet", "--status", "running", "learner").split()
        return {long_id[:12] for long_id in ids}

    def status(self) -> dict[str, Any]:
        address = self.compose("port", "syncer", "8080").strip()
        with urllib.request.urlopen(f"http://{address}/status", timeout=10) as answer:
            return json.load(answer)

    def until(self, true: Callable[[dict[str, Any]], bool], what: str, limit_s: float = HANGING_S) -> dict[str, Any]:
        """The first status for which `true` holds."""
        status: dict[str, Any] = {}
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                status = self.status()
                if true(status):
                    return status
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass  # the syncer is not up yet, or its bus is not
            time.sleep(1)
        pytest.fail(f"not within {limit_s:.0f} s: {what}\n{json.dumps(status)[:3000]}\n{self.logs()}")

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "30")

    def until_ended(self, learners: int, limit_s: float = 900) -> None:
        """All parties have ended well, of themselves, and none on its way: nobody was started anew."""
        deadline = time.monotonic() + limit_s
        while any(at["State"] != "exited" for at in self.containers() if at["Service"] in PARTIES):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(2)
        ended = [(at["Service"], at["ExitCode"]) for at in self.containers() if at["Service"] in PARTIES]
        assert sorted(ended) == [("evaluator", 0), *[("learner", 0)] * learners, ("syncer", 0)], self.logs()
        assert self.restarts() == {0}, f"a party ended on its way and was started anew\n{self.logs()}"

    def running(self) -> set[str]:
        """Services with a container that runs."""
        return set(self.compose("ps", "--status", "running", "--services").split())

    def restarts(self) -> set[int]:
        """How often containers were started anew because their process had ended with an error."""
        ids = self.compose("ps", "--all", "--quiet").split()
        return {int(count) for count in docker("inspect", "--format", "{{.RestartCount}}", *ids).split()}

    def leftovers(self) -> dict[str, list[str]]:
        label = f"label=com.docker.compose.project={self.name}"
        return {
            "containers": docker("ps", "--all", "--quiet", "--filter", label).split(),
            "volumes": docker("volume", "ls", "--quiet", "--filter", label).split(),
            "networks": docker("network", "ls", "--quiet", "--filter", label).split(),
        }


def live(status: dict[str, Any]) -> set[str]:
    return {learner["id"] for learner in status.get("learners", []) if learner["live"]}


def merging(outer_steps: int, learners: set[str]) -> Callable[[dict[str, Any]], bool]:
    """The outer steps have gone past a count, and these learners are live and on a merged version."""
    return lambda status: (
        status.get("outer_steps", 0) > outer_steps
        and live(status) >= learners
        and all(max(at["versions"]) > 0 for at in status["learners"] if at["live"] and at["id"] in learners)
    )


def step(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)  # `make test-docker` shows it: this takes minutes
