"""compose.yaml for real: build, bring up, add learners, kill one, add again, end, tear down. `make test-docker`."""

import json
import time
from pathlib import Path

import pytest

from tests.docker.conftest import TOKENS
from tests.docker.project import Project, docker, live, merging, step

WASTE_TOKENS = 400_000
MIN_SHARE = 0.6
"""Of what was trained and is not pending. With BLAS threads that fight with the learners it was 0.2."""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


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
    project.until_ended(learners=5)
    assert project.running() == {"redis"}

    step("look at the checkpoint")
    project.compose("cp", "syncer:/checkpoints/run", str(tmp_path / "run"))
    (latest,) = (tmp_path / "run").glob("*/latest")
    newest = latest.parent / latest.read_text().splitlines()[0]
    saved = json.loads((newest / "state.json").read_text())
    assert saved["run"]["phase"] == "finished"
    assert saved["run"]["tokens"] >= TOKENS
    assert sum(fragment["version"] for fragment in saved["fragments"]) >= status["outer_steps"]
    assert all((newest / fragment["file"]).stat().st_size > 0 for fragment in saved["fragments"])


def test_after_the_loss_of_all_but_the_checkpoints_the_same_command_goes_on(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_CHECKPOINT_EVERY", "5s")
    step("build")
    project.compose("build", timeout_s=1200)
    step("up with two learners")
    project.scale(2)
    merged = project.until(merging(16, project.learner_ids()), "two learners merge")["outer_steps"]
    saved = ("exec", "syncer", "sh", "-c", "cat /checkpoints/run/*/latest || true")
    while not project.compose(*saved):
        time.sleep(1)
    step("kill all, and lose what Redis had")
    project.compose("kill")
    project.compose("rm", "--force")
    docker("volume", "rm", f"{project.name}_redis")
    step("up again")
    project.scale(2)
    project.until(merging(merged, project.learner_ids()), "they merge more than had been merged")
    assert "checkpoint_restored" in project.compose("logs", "syncer")


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
    assert share >= MIN_SHARE, f"{trained} tokens trained, {status['merged_tokens']} merged: {lost}\n{project.logs()}"
    assert status["merged_share"]["since_start"] == pytest.approx(status["merged_tokens"] / trained)
