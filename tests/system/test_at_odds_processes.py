"""A learner that trains the wrong way, among four that do not, as processes on a real Redis."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.tape import Committed, RefusalReason, Rejected
from diloco.pipeline.payload.codec import decode
from diloco.pipeline.view.ledger import accounts, problems
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.pipeline.view.status import Status
from diloco.pipeline.view.status_reader import read_status
from diloco.tape import read_archive

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ROUNDS = 8
"""Versions of its fragments within which it is to be known; random deltas take longer (`docs/results/poison.md`)."""
LEARNER = """
import sys
import time
import torch
from torch import nn
from diloco import Learner
from diloco.pipeline.settings import SyncSettings

name, sign, leave_out = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sync = SyncSettings(
    tokens=1_000_000, quorum=3, fragments=3, sync_interval=6, delta_clip=2.0, leave_out=leave_out == "yes"
)
learner = Learner(model, optimizer, run="odds", learner_id=name, sync=sync).open()
generator = torch.Generator().manual_seed(hash(name) % 2**31)
while not learner.finished:
    x = torch.randint(16, (32, 16), generator=generator)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), (3 * x + 1).flatten() % 16)
    (float(sign) * loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    learner.step(tokens=x.numel())
    time.sleep(0.02)
learner.close()
sys.exit(not learner.left_in_order)
"""


@contextmanager
def run_of_five(folder: Path, url: str, leave_out: bool) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A syncer and five learners, the last of which descends the other way."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DILOCO_REDIS_URL": url}
    started: list[subprocess.Popen[bytes]] = []

    def start(log: str, *arguments: object) -> None:
        with (folder / log).open("ab") as output:
            command = [sys.executable, *map(str, arguments)]
            started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    try:
        recorded = ["--record-deltas", folder / "deltas", "--tape-dir", folder / "tape"]
        start("syncer.log", "-m", "diloco", "syncer", "--run", "odds", "--http-port", 0, *recorded)
        for name in ("a", "b", "c", "d", "bad"):
            start(f"{name}.log", "-c", LEARNER, name, -1 if name == "bad" else 1, "yes" if leave_out else "no")
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


async def status_of(url: str) -> Status:
    bus = await connect(url, "odds")
    try:
        return await read_status(bus, LoopClock())
    finally:
        await bus.close()


@pytest.mark.parametrize("leave_out", [False, True])
def test_a_learner_that_trains_the_wrong_way_is_shown_and_left_out_where_asked(tmp_path: Path, leave_out: bool) -> None:
    """Within some versions, by name; the honest four never are. The ledger closes, and the run is replayed exactly."""
    seen: list[set[str]] = []
    with EmbeddedRedis(dies_with_us=True) as redis, run_of_five(tmp_path, redis.url, leave_out) as processes:
        deadline = time.monotonic() + 500
        while any(process.poll() is None for process in processes[1:]):
            assert time.monotonic() < deadline, {file.name: file.read_text() for file in tmp_path.glob("*.log")}
            try:
                status = asyncio.run(status_of(redis.url))
            except BusUnavailable:  # a busy machine: look again
                continue
            seen.append({name for fragment in status["fragments"] for name in fragment["window"]["at_odds"]})
            if seen[-1] and status["phase"] != "finished":
                assert any("at odds" in warning and "bad" in warning for warning in status["warnings"])
            time.sleep(0.3)
        assert [process.wait(60) for process in processes] == [0] * 6
        spec, inputs = asyncio.run(_ledger(redis.url))
    assert set().union(*seen) == {"bad"}
    tape = read_archive(tmp_path / "tape")
    merges = [record for record in tape if isinstance(record, Committed) and record.contributions]
    assert min(record.version for record in merges if record.at_odds) <= ROUNDS
    assert {name for record in merges for name in record.at_odds} == {"bad"}
    late = [record for record in merges if record.version > ROUNDS + 3]
    assert len(late) > 6
    assert any(part.learner == "bad" for record in late for part in record.contributions) is not leave_out
    refused = {r.learner for r in tape if isinstance(r, Rejected) and r.reason is RefusalReason.AT_ODDS}
    assert refused == ({"bad"} if leave_out else set())
    assert problems(accounts(tape, inputs, layout_of(spec.tensors))) == []
    command = [sys.executable, "-m", "diloco", "tape", tmp_path / "tape", "--replay", tmp_path / "deltas"]
    replayed = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


async def _ledger(url: str) -> tuple[Spec, Any]:
    bus = await connect(url, "odds")
    try:
        spec = decode(Spec, await bus.read_spec() or b"")
        return spec, await read_ledger_inputs(bus, spec.sync.fragments, 5.0)
    finally:
        await bus.close()
