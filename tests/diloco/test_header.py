"""What a test run says of the Redis that it uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_REDIS = "tests/pipeline/test_bus_contract.py::test_renewing_a_lease_prolongs_it"


def header(test: str, **environ: str) -> list[str]:
    """Lines on Redis of a test run of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=ROOT, env=kept | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("redis: ")]


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"DOCKER_HOST": "unix:///nowhere.sock"}, "(no container: DockerException: "),
        ({"DILOCO_TEST_NO_DOCKER": "1"}, "(no container, since DILOCO_TEST_NO_DOCKER is set)"),
    ],
)
def test_a_test_run_names_its_redis_and_why_it_is_no_container(environ, why):
    """With its version; nothing is fallen back to in silence."""
    (line,) = header(NEEDS_REDIS, **environ)
    assert "redis-server, version " in line or "valkey-server, version " in line
    assert why in line


def test_a_test_run_that_needs_no_redis_starts_none():
    """Nor names one."""
    assert header("tests/diloco/test_display.py::test_numbers_are_short") == []
