"""The program of docs/howto/ray.md: two Ray actors with a learner each, of which one is killed."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="`pip install ray`, 240 MB, is not part of `make test-trainers`")

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import decode
from diloco.pipeline.view.ledger import accounts, problems
from diloco.pipeline.view.ledger_inputs import LedgerInputs, read_ledger_inputs
from diloco.tape import read_archive
from tests.parties import ROOT, Parties

pytestmark = [pytest.mark.trainers, pytest.mark.redis]


async def trained(url: str) -> list[int]:
    """Tokens of each life of learner a."""
    async with open_bus(url, "my-run") as bus:
        return [seen.report.tokens for seen in await bus.read_reports() if seen.report.learner == "a"]


async def left(url: str) -> tuple[Spec, LedgerInputs]:
    async with open_bus(url, "my-run") as bus:
        spec = decode(Spec, await bus.read_spec() or b"")
        return spec, await read_ledger_inputs(bus, spec.sync.fragments, 5.0)


def test_a_killed_actor_comes_back_and_the_ledger_closes(tmp_path: Path) -> None:
    """Ray starts it again and calls `train` again. Each learner's tokens are in the ledger, the dead one's too."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/howto/ray.md").read_text(), re.M | re.S)
    (tmp_path / "learners.py").write_text(program)
    with Parties(tmp_path) as here:
        syncer = here.syncer("--run", "my-run", "--tokens", "1G", "--tape-dir", tmp_path / "tape")
        alone = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        driver = here.start("ray", tmp_path / "learners.py", cwd=tmp_path, env=alone)

        def lives() -> int:
            return sum(tokens > 0 for tokens in asyncio.run(trained(here.url)))

        here.until(lambda: lives() == 1 and "b has joined" in here.said("ray"))
        (pid,) = re.findall(r"Trainer pid=(\d+)\).* a has joined", here.said("ray"))
        os.kill(int(pid), signal.SIGKILL)
        here.until(lambda: lives() == 2)
        assert here.ends(here.diloco("finish", "finish", "--run", "my-run"), syncer, driver) == [0, 0, 0]
        spec, inputs = asyncio.run(left(here.url))
    assert "finished: a b" in here.said("ray")
    parts = accounts(read_archive(tmp_path / "tape"), inputs, layout_of(spec.tensors))
    assert problems(parts) == []
    assert [part.unaccounted for part in parts] == [0] * 3
    assert sorted((part.learner, part.left) for part in parts) == [("a", False), ("a", True), ("b", True)]
    assert all(part.tokens > 0 for part in parts)
