"""`deploy/sky.yaml`, read by SkyPilot itself. It is not among what tests install: its pins are not ours.

python3 -m venv /tmp/sky && /tmp/sky/bin/pip install skypilot
DILOCO_TEST_SKY=/tmp/sky/bin/python pytest tests/deploy/test_sky.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import SyncSettings
from tests.docker.test_compose_files import KNOWN

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/sky.yaml"
READ = """
import json, sys
import sky
from sky.utils import accelerator_registry
accelerator_registry.canonicalize_accelerator_name = lambda name, cloud: name  # looks it up on the Internet
config = sky.utils.yaml_utils.read_yaml(sys.argv[1])
task = sky.Task.from_yaml_config(config, secrets_overrides=[("DILOCO_REDIS_URL", "rediss://learner:x@h:6380")])
task.validate()
(resources,) = task.resources
print(json.dumps([resources.use_spot, resources.job_recovery, task.run, task.setup, sorted(task.envs)]))
"""


def test_skypilot_takes_it(tmp_path: Path) -> None:
    """Spot machines; recovery also from the status of a learner that was asked to end; and nothing but settings."""
    python = os.environ.get("DILOCO_TEST_SKY", sys.executable)
    environ = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    looked = subprocess.run([python, "-c", "import sky"], env=environ, capture_output=True, check=False)
    if looked.returncode:
        pytest.skip("no SkyPilot: DILOCO_TEST_SKY names a Python that has it")
    done = subprocess.run(
        [python, "-c", READ, str(FILE)], env=environ, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    spot, recovery, run, setup, envs = json.loads(done.stdout.splitlines()[-1])
    assert spot is True
    assert recovery["recover_on_exit_codes"] == [AGAIN_STATUS]
    assert recovery["strategy"] == "EAGER_NEXT_REGION"
    assert "diloco learner" in run
    assert "constraints.txt" in setup
    assert {"LEARNER", "DILOCO_RUN"} <= set(envs)


def test_the_pages_users_and_syncers_are_of_the_run_that_its_learners_join() -> None:
    """By name; and a syncer says nothing of what learners settle, but what they say too: it would end at the other."""
    page = (ROOT / "docs/howto/spot-regions.md").read_text()
    envs = yaml.safe_load(FILE.read_text())["envs"]
    assert set(re.findall(r"--run (\S+)", page)) == {envs["DILOCO_RUN"]}
    (syncer,) = re.findall(r"^diloco syncer (.*)", page, re.MULTILINE)
    given = {flag.replace("-", "_"): value for flag, value in re.findall(r"--(\S+) (\S+)", syncer)}
    agreed = {name: given[name] for name in SyncSettings.model_fields.keys() & given.keys() - {"tokens"}}
    assert {name: envs.get(f"DILOCO_{name.upper()}") for name in agreed} == agreed  # its budget it may settle
    loops = re.findall(r"export DILOCO_REDIS_URL.*\n.*for n in.*\n.*sky jobs launch.*\n.*done", page)
    commented = "\n".join(line.removeprefix("#   ") for line in FILE.read_text().splitlines())
    assert [loop.replace("PASSWORD", "<password>") in commented for loop in loops] == [True]


def test_its_variables_are_settings_and_its_command_is_one() -> None:
    """Also where there is no SkyPilot."""
    told = yaml.safe_load(FILE.read_text())
    variables = set(re.findall(r"DILOCO_[A-Z_]+", FILE.read_text()))
    assert variables <= KNOWN
    assert told["secrets"] == {"DILOCO_REDIS_URL": None}
    assert told["resources"]["job_recovery"]["recover_on_exit_codes"] == [AGAIN_STATUS]


def test_no_secret_that_the_documents_have_one_make_is_sent_or_committed(tmp_path: Path) -> None:
    """Nor what git leaves out otherwise: SkyPilot reads .skyignore in place of .gitignore. What git has, it sends."""
    sent, committed = (
        [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        for name in (".skyignore", ".gitignore")
    )
    assert set(committed) <= set(sent)
    assert not [line for line in sent if "!" in line or " " in line], "SkyPilot knows no more than patterns"
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    secrets = set(re.findall(r"[\w.-]+\.(?:env|acl|key)\b|(?:redis|sentinel)\.conf", pages))
    assert {"secrets.env", "users.acl", "run.env", "redis.key", "redis.conf"} < secrets
    for name in [*secrets, ".env"]:
        (tmp_path / name).touch()
    for line in sent:
        for found in tmp_path.glob(f"**/{line}" if not line.startswith("/") else line[1:]):
            found.unlink(missing_ok=True)
    assert list(tmp_path.iterdir()) == []
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("what is sent is told by git")
    command = [git, "ls-files", "--cached", "--ignored", "--exclude-from=.skyignore"]
    kept = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert kept.stdout == b""
