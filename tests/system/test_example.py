"""The examples as a user would run them: two learners beside a syncer."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis
from tests import HANGING_S
from tests.parties import ROOT, environment

pytestmark = pytest.mark.redis

EXAMPLE = ROOT / "examples" / "own_model.py"
UNTRAINED_LOSS = 4.16
"""ln 64: nothing known of 64 symbols."""


def test_the_example_is_short() -> None:
    """Wrapping one's own model takes under 40 lines, the model included."""
    assert len(EXAMPLE.read_text().splitlines()) < 40


def run_of(example: Path, run: str, tokens: int, folder: Path) -> list[tuple[str, str]]:
    """What two processes of an example and a syncer have said, which end by themselves at the budget."""
    with EmbeddedRedis(dies_with_us=True) as redis:
        env = environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
        env |= {"DILOCO_REDIS_URL": redis.url, "DILOCO_TOKENS": str(tokens)}

        def start(*arguments: str) -> subprocess.Popen[str]:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen([sys.executable, *arguments], env=env, cwd=folder, **pipes)

        parties = list[subprocess.Popen[str]]()
        try:
            parties += [start(str(example)) for _ in range(2)]
            parties.append(start("-m", "diloco", "syncer", "--run", run, "--http-port", "0"))
            ends = [party.communicate(timeout=HANGING_S) for party in reversed(parties)][::-1]
        finally:
            for party in parties:
                party.kill()
                party.wait()
        assert [party.returncode for party in parties] == [0, 0, 0], ends
        assert "fragment_merged" in ends[2][1]
        return ends[:2]


def test_a_model_that_is_not_ours_learns_with_two_learners(tmp_path: Path) -> None:
    """Both have learned when the run is over; how much depends on how many merges a busy machine had time for."""
    for out, err in run_of(EXAMPLE, "own-model", 200_000, tmp_path):
        found = re.search(r"last loss ([0-9.]+)", out)
        assert found
        assert float(found[1]) < UNTRAINED_LOSS - 0.25
        assert "debug" not in out + err, "a library must not chatter in somebody else's program"


@pytest.mark.slow
def test_a_mixture_of_experts_learns_with_two_learners(tmp_path: Path) -> None:
    """Both end with the run's model, so with the same loss, far beyond what is known of 256 bytes before training."""
    (one, _), (other, _) = run_of(ROOT / "examples" / "experts.py", "experts", 120_000, tmp_path)
    assert one == other
    assert float(one.removeprefix("loss of the run's model ")) < math.log(256) - 2.0


@pytest.mark.slow
def test_a_vision_transformer_learns_with_two_learners(tmp_path: Path) -> None:
    """Both end with the run's model, so with the same accuracy, and it is far above one in ten."""
    pytest.importorskip("sklearn")
    (one, _), (other, _) = run_of(ROOT / "examples" / "images.py", "images", 120_000, tmp_path)
    assert one == other
    assert float(one.removeprefix("held-out accuracy ")) > 0.6


@pytest.mark.trainers
def test_a_model_of_transformers_ends_in_a_folder_that_loads(tmp_path: Path) -> None:
    """Each learner's folder has the run's weights, which are not the first ones, bit for bit."""
    from transformers import AutoModelForCausalLM

    run_of(ROOT / "examples" / "hf_model.py", "hf-model", 100_000, tmp_path)
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in tmp_path.glob("hf-model-*"))
    assert one.keys() == other.keys()
    assert all(bool((one[name] == other[name]).all()) for name in one)
    assert bool((one["model.norm.weight"] != 1.0).any())
