"""compose.yaml for real: build, bring up, add learners, kill one, add again, end, tear down. `make test-docker`."""

import json
import os
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOKENS = 800_000
WASTE_TOKENS = 400_000
LEAST_SHARE = 0.6
"""Of what was trained and is not pending. With BLAS threads that fight with the learners it was 0.2."""
PARTIES = {"syncer", "learner", "evaluator"}

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


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

    def compose(self, *args: str, timeout_s: float = 180) -> str:
        return docker("compose", "-p", self.name, *args, timeout_s=timeout_s)

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

    def until(self, true: Callable[[dict[str, Any]], bool], what: str, limit_s: float = 120) -> dict[str, Any]:
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


def test_learners_come_and_go_in_a_run_of_containers(project: Project, tmp_path: Path) -> None:
    """Learners are added to a live run and killed in it, versions go on, and at its budget all but Redis end well."""
    step("build")
    project.compose("build", timeout_s=1200)

    step("up with two learners")
    project.scale(2)
    first = project.learner_ids()
    assert len(first) == 2
    status = project.until(merging(8, first), "two learners merge")
    assert project.compose("exec", "syncer", "id", "-u").strip() != "0"
    assert project.compose("exec", "learner", "id", "-u").strip() != "0"
    spec = "import importlib.util as u; print(u.find_spec('torch'))"
    assert project.compose("exec", "syncer", "python", "-c", spec).strip() == "None"

    step("scale to four")
    project.scale(4)
    four = project.learner_ids()
    assert len(four) == 4
    assert first < four, "scaling must leave running learners alone"
    status = project.until(merging(status["outer_steps"], four), "the added learners take part")

    step("kill one")
    victim = min(first)
    docker("kill", "--signal", "KILL", victim)
    status = project.until(lambda seen: victim not in live(seen), "the killed learner is no longer live")
    assert project.learner_ids() == four - {victim}
    status = project.until(merging(status["outer_steps"] + 16, four - {victim}), "versions go on without it")

    step("scale to five")
    project.scale(5)
    five = project.learner_ids()
    assert len(five) == 5
    assert four - {victim} < five
    status = project.until(merging(status["outer_steps"], five), "the added learners take part")
    assert status["phase"] == "running", "the budget was too small for this machine to see all of this"

    step("wait for the end")
    deadline = time.monotonic() + 900
    while any(at["State"] != "exited" for at in project.containers() if at["Service"] in PARTIES):
        assert time.monotonic() < deadline, project.logs()
        time.sleep(2)
    ended = [(at["Service"], at["ExitCode"]) for at in project.containers() if at["Service"] in PARTIES]
    assert sorted(ended) == [("evaluator", 0), *[("learner", 0)] * 5, ("syncer", 0)], project.logs()
    assert project.compose("ps", "--status", "running", "--services").split() == ["redis"]
    assert project.restarts() == {0}, f"a party ended on its way and was started anew\n{project.logs()}"

    step("look at the checkpoint")
    project.compose("cp", "syncer:/checkpoints/run", str(tmp_path / "run"))
    (latest,) = (tmp_path / "run").glob("*/latest")
    newest = latest.parent / latest.read_text().splitlines()[0]
    saved = json.loads((newest / "state.json").read_text())
    assert saved["run"]["phase"] == "finished"
    assert saved["run"]["tokens"] >= TOKENS
    assert sum(fragment["version"] for fragment in saved["fragments"]) >= status["outer_steps"]
    assert all((newest / fragment["file"]).stat().st_size > 0 for fragment in saved["fragments"])


@pytest.fixture
def hard_at_work(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Learners that take all the cores that they get, and a syncer that multiplies matrices from its first merge on."""
    monkeypatch.delenv("DILOCO_PACE")
    monkeypatch.setenv("DILOCO_FIRST_INTERVAL", "0")
    monkeypatch.setenv("DILOCO_OUTER_WARMUP", "0")
    return project


def test_most_of_what_four_learners_train_is_merged(hard_at_work: Project) -> None:
    """On cores that the learners want too the syncer keeps up. A share, not a time; what is pending does not count."""
    project = hard_at_work
    step("build")
    project.compose("build", timeout_s=1200)
    step("up with four learners, as fast as they can")
    project.scale(4)
    status = project.until(lambda seen: seen.get("tokens", 0) >= WASTE_TOKENS, "eight rounds", limit_s=600)
    trained, lost = status["tokens"], status["tokens_lost"]
    share = status["merged_tokens"] / (trained - lost["pending"])
    step(f"{share:.0%} of {trained} tokens merged: {lost}")
    assert share >= LEAST_SHARE, f"{trained} tokens trained, {status['merged_tokens']} merged: {lost}\n{project.logs()}"
    assert status["merged_share"]["since_start"] == pytest.approx(status["merged_tokens"] / trained)
