"""Trainers of others with two ranks, over gloo: they are one learner, beside a plain one."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("transformers")  # the other trainers come with it

from diloco.pipeline.bus.embedded import free_port
from diloco.pipeline.bus.redis_streams import connect
from tests.parties import ROOT
from tests.ranks.party import Party
from tests.trainers.rank_scripts import STEP_TOKENS

pytestmark = [pytest.mark.trainers, pytest.mark.redis]
SCRIPT = ROOT / "tests/trainers/rank_scripts.py"
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2", "--master-port"),
    "accelerate": (
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"),
    ),
}
PLAIN = ("transformers", "trl", "accelerate", "lightning")
SHARDED = ("transformers_fsdp", "accelerate_fsdp", "lightning_fsdp")


async def tokens_of(url: str, learner: str) -> list[int]:
    """What a learner's reports say that it has trained."""
    bus = await connect(url, "ranks")
    try:
        return [seen.report.tokens for seen in await bus.read_reports() if seen.report.learner == learner]
    finally:
        await bus.close()


def two_ranks(folder: Path, kind: str, launcher: str) -> tuple[int, str, str]:
    """Steps and the model's digest of a trainer in a whole run beside a plain learner, and whether it was sharded."""
    with Party(folder, sync_interval=8, fragments=4) as party:
        command = "-m", *LAUNCHERS[launcher], free_port(), SCRIPT, kind, "them", folder
        launched = party.start("them.log", {"ACCELERATE_USE_CPU": "true"}, *command)
        plain = party.start("plain.log", {}, SCRIPT, "plain", "plain", folder)
        assert party.ended(launched, plain) == [0, 0], party.shown()
        first, second = party.said("them", "ended")
        _, steps, digest, sharded = first.split()
        assert first == second, "after the same step, with the same model"
        assert digest == party.said("plain", "ended")[0].split()[2], "all end with the run's model"
        assert asyncio.run(tokens_of(party.url, "them")) == [2 * STEP_TOKENS * int(steps)], "each rank's count once"
        return int(steps), digest, sharded


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", PLAIN)
def test_the_ranks_of_a_trainer_are_one_learner(tmp_path: Path, kind: str, launcher: str) -> None:
    """In DDP: they end after the same step with the run's model, and their tokens are counted once."""
    steps, _, sharded = two_ranks(tmp_path, kind, launcher)
    assert (steps > 10, sharded) == (True, "False")


@pytest.mark.parametrize("kind", SHARDED)
def test_sharded_ranks_of_a_trainer_are_one_learner(tmp_path: Path, kind: str) -> None:
    """The same in FSDP2."""
    steps, _, sharded = two_ranks(tmp_path, kind, "torchrun")
    assert (steps > 10, sharded) == (True, "True")
