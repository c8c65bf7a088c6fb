"""sentinel.yaml and cluster.yaml of deploy/compose for real: a primary is killed for good, and the run ends well."""

import json
import time
from pathlib import Path

import pytest

from tests import HANGING_S
from tests.docker.project import ROOT, Project, docker, merging, step

TOKENS = 400_000

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "compose").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_file_goes_over_the_one_in_the_root(path: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path in them is from the root. The one that opens a port asks for what has no default."""
    for name in ("BIND", *(f"{user}_PASSWORD" for user in ("SYNCER", "LEARNER", "EVALUATOR", "VIEWER", "OPERATOR"))):
        monkeypatch.setenv(f"REDIS_{name}", "10.0.0.1")
    project.files.append(str(path.relative_to(ROOT)))
    services = json.loads(project.compose("config", "--format", "json"))["services"]
    volumes = [one for service in services.values() for one in service.get("volumes", ())]
    mounted = [Path(one["source"]) for one in volumes if one["type"] == "bind"]
    assert mounted
    assert all(file.is_file() and file.parent == ROOT / "deploy" for file in mounted)
    assert {service["build"]["context"] for service in services.values() if "build" in service} == {str(ROOT)}


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_a_run_goes_on_to_its_end_after_the_container_of_a_primary_was_killed_for_good(
    kind: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody starts it again, and no party of the run ends or is started anew for it."""
    project.files.append(f"deploy/compose/{kind}.yaml")
    monkeypatch.setenv("DILOCO_TOKENS", str(TOKENS))
    step("build")
    project.compose("build", timeout_s=1200)
    step("up with two learners, then three")
    project.scale(2)
    project.scale(3)
    three = project.learner_ids()
    assert len(three) == 3
    status = project.until(merging(8, three), "three learners merge")

    step("kill the primary's container")
    assert (
        project.compose(
            "exec", "redis", "redis-cli", "--no-auth-warning", "--user", "health", "--pass", "any", "ping"
        ).strip()
        == "PONG"
    )
    docker("kill", "--signal", "KILL", project.compose("ps", "--quiet", "redis").strip())
    at = time.monotonic()
    status = project.until(merging(status["outer_steps"] + 4, three), "versions go on without it")
    step(f"four versions on {time.monotonic() - at:.0f} s later")
    assert status["phase"] == "running", "the budget was too small for this machine to see all of this"
    assert "redis" not in project.running()

    step("wait for the end")
    project.until_ended(learners=3)

    step("start the dead one again: it is a replica")
    project.compose("start", "redis")
    deadline = time.monotonic() + HANGING_S
    while "role:slave" not in _replication(project):
        assert time.monotonic() < deadline, project.logs()
        time.sleep(1)


def _replication(project: Project) -> str:
    """What the server says of it; nothing while it does not answer yet."""
    ask = "REDISCLI_AUTH=$REDIS_SYNCER_PASSWORD redis-cli --user syncer --no-auth-warning info replication || true"
    return project.compose("exec", "redis", "sh", "-c", ask)
