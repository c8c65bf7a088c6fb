"""A learner of several ranks under torchrun, which starts them again."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import free_port
from tests.ranks.party import RANK, Party, children_of

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]


def torchrun(party: Party, ranks: int) -> subprocess.Popen[bytes]:
    """Start learner "them" with a state folder."""
    told = (
        "--nproc-per-node",
        ranks,
        "--max-restarts",
        5,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{free_port()}",
    )
    extra = {"TEST_STATE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return party.start("them.log", extra, "-m", "torch.distributed.run", *told, RANK, "fsdp", "them", party.folder)


def pid_of(agent: subprocess.Popen[bytes], rank: int) -> int:
    """The process of one of its ranks."""
    told = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children_of(agent)}
    return next(pid for pid, variables in told.items() if f"RANK={rank}".encode() in variables)


def life(party: Party, number: int) -> tuple[str, int, int]:
    """Of the lives of "them" this one, once it has trained: source of its moments, ranks, earlier steps."""
    party.until(lambda: len(party.said("them", "ranks_recovered")) > number)
    told: Any = json.loads(party.said("them", "ranks_recovered")[number])
    party.until(lambda: party.said("them", "joined "))
    stepped = len(party.said("them", "step "))
    party.until(lambda: len(party.said("them", "step ")) > stepped + 3 * told["ranks"])
    return told["source"], told["ranks"], int(party.said("them", "joined ")[-1].split()[2])


def stop(party: Party, agent: subprocess.Popen[bytes]) -> None:
    """As whoever runs a cluster does."""
    agent.terminate()
    party.ended(agent)


def test_torchrun_brings_a_learner_back_with_its_moments(tmp_path: Path) -> None:
    """After a rank is killed; with fewer ranks, and with more. Without its folder it begins fresh, and says so."""
    with Party(tmp_path, sync_interval=8, fragments=4, tokens=10**9) as party:
        party.learner("plain", "solo")
        party.until(lambda: party.said("solo-0", "step "))
        agent = torchrun(party, 3)
        source, ranks, _ = life(party, 0)
        assert (source, ranks) != ("checkpoint", 3)
        os.kill(pid_of(agent, 1), signal.SIGKILL)
        source, ranks, steps = life(party, 1)
        assert (source, ranks) == ("checkpoint", 3)
        assert agent.poll() is None
        for number, now in (2, 2), (3, 3):
            stop(party, agent)
            before, agent = steps, torchrun(party, now)
            source, ranks, steps = life(party, number)
            assert (source, ranks) == ("checkpoint", now)
            assert steps > before
        assert party.said("them", "state_resharded")
        stop(party, agent)
        shutil.rmtree(tmp_path / "state-them")
        agent = torchrun(party, 3)
        assert life(party, 4) == ("fresh", 3, 0)
