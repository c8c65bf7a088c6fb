"""`examples/own_model.py` as a user would run it: a model that is not ours, beside a syncer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model.py"
UNTRAINED_LOSS = 4.16
"""ln 64: nothing known of 64 symbols."""


def test_the_example_is_short() -> None:
    """Wrapping one's own model takes under 40 lines, the model included."""
    assert len(EXAMPLE.read_text().splitlines()) < 40


def test_a_model_that_is_not_ours_learns_with_two_learners() -> None:
    """Two processes of the example and a syncer end by themselves at the budget, and both have learned."""
    with EmbeddedRedis(dies_with_us=True) as redis:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment |= {"DILOCO_REDIS_URL": redis.url, "DILOCO_TOKENS": "400000"}

        def start(*arguments: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        syncer = start("-m", "diloco", "syncer", "--run", "own-model", "--http-port", "0")
        learners = [start(str(EXAMPLE)) for _ in range(2)]
        parties = [*learners, syncer]
        try:
            ends = [party.communicate(timeout=100) for party in reversed(parties)][::-1]  # the syncer has most to say
        finally:
            for party in parties:
                party.kill()
        assert [party.returncode for party in parties] == [0, 0, 0], ends
        for out, err in ends[:2]:
            found = re.search(r"last loss ([0-9.]+)", out)
            assert found
            assert float(found[1]) < UNTRAINED_LOSS - 1.0
            assert "debug" not in out + err, "a library must not chatter in somebody else's program"
        assert "fragment_merged" in ends[2][1]
