"""Learners that are attached to their optimizers, as processes: one is killed and comes back, every token counts."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import decode
from diloco.pipeline.view.ledger import accounts, problems
from diloco.pipeline.view.ledger_inputs import LedgerInputs, read_ledger_inputs
from diloco.tape import read_archive
from tests import HANGING_S

pytestmark = [pytest.mark.redis, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LEARNER = """
import sys
import time
import torch
from torch import nn
from diloco import Learner

name, kind, result = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
matrices = [p for p in model[1:].parameters() if p.dim() == 2]
others = [p for p in model.parameters() if not any(p is m for m in matrices)]
if kind == "pair":
    optimizers = [torch.optim.Muon(matrices, lr=5e-3), torch.optim.AdamW(others, lr=3e-3)]
else:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, fused=kind == "fused")]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
learner = Learner(model, optimizers[-1], run="attached", learner_id=name, tokens="1.2M").open()
schedules = [learner.progress_schedule(one, shape="constant") for one in optimizers]
learner.attach(tokens=lambda: tokens, optimizers=optimizers)
generator = torch.Generator().manual_seed(len(name))
made = skipped = 0
while not learner.finished:
    tokens = 0
    for _ in range(4):
        x = torch.randint(16, (8, 16), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), (3 * x + 1).flatten() % 16)
        scaler.scale(loss / 4 * (float("inf") if made % 7 == 3 else 1.0)).backward()
        tokens += x.numel()
    scale = scaler.get_scale()
    for one in optimizers:
        scaler.unscale_(one)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(one)
    scaler.update()
    skipped += scaler.get_scale() < scale
    made += 1
    time.sleep(0.02)
    for schedule in schedules:
        schedule.step()
    for one in optimizers:
        one.zero_grad()
    if made % 10 == 0:
        print(f"step {learner.joined.training.rounds.steps} of {made}", flush=True)
steps, counted = learner.joined.training.rounds.steps, learner.joined.training.rounds.tokens
learner.close()
learner.load_globals()
with torch.no_grad():
    x = torch.arange(16)
    loss = nn.functional.cross_entropy(model(x), (3 * x + 1) % 16)
torch.save(model.state_dict(), result)
print(f"end {made} {skipped} {steps} {counted} {loss.item():.4f}", flush=True)
sys.exit(not learner.left_in_order)
"""


async def ledger(url: str) -> tuple[Spec, LedgerInputs]:
    bus = await connect(url, "attached")
    try:
        spec = decode(Spec, await bus.read_spec() or b"")
        return spec, await read_ledger_inputs(bus, spec.sync.fragments, 5.0)
    finally:
        await bus.close()


def test_a_killed_learner_that_comes_back_leaves_no_token_unaccounted(tmp_path: Path) -> None:
    """Three kinds of optimizers, all with accumulation, clipping, bf16 and a scaler that skips steps; one is killed.

    What each counted is what it trained: skipped steps are not. All end with the same global model, which has learned.
    """
    with EmbeddedRedis(dies_with_us=True) as redis:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DILOCO_REDIS_URL": redis.url}
        environment |= {"DILOCO_SYNC_INTERVAL": "6", "DILOCO_FRAGMENTS": "3"}
        started: list[subprocess.Popen[bytes]] = []

        def start(log: str, *arguments: object) -> subprocess.Popen[bytes]:
            with (tmp_path / log).open("ab") as output:
                command = [sys.executable, *map(str, arguments)]
                started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            return started[-1]

        def learner(name: str, kind: str) -> subprocess.Popen[bytes]:
            return start(f"{name}.log", "-c", LEARNER, name, kind, tmp_path / f"{name}.pt")

        def said(name: str, what: str) -> list[list[str]]:
            lines = (tmp_path / f"{name}.log").read_text().splitlines()
            return [line.split() for line in lines if line.startswith(what)]

        def until(true: Callable[[], Any]) -> None:
            deadline = time.monotonic() + HANGING_S
            while not true():
                assert time.monotonic() < deadline, {file.name: file.read_text() for file in tmp_path.glob("*.log")}
                time.sleep(0.05)

        try:
            tape = ["--tape-dir", tmp_path / "tape", "--http-port", 0]
            syncer = start("syncer.log", "-m", "diloco", "syncer", "--run", "attached", *tape)
            kinds = {"a": "plain", "bb": "pair", "ccc": "fused"}
            learners = {name: learner(name, kind) for name, kind in kinds.items()}
            until(lambda: len(said("bb", "step")) >= 2)
            learners["bb"].kill()
            learners["bb"].wait()
            learners["bb"] = learner("bb", "pair")
            assert [one.wait(HANGING_S) for one in (*learners.values(), syncer)] == [0, 0, 0, 0]
        finally:
            for process in started:
                process.kill()
                process.wait()
        spec, inputs = asyncio.run(ledger(redis.url))
    parts = accounts(read_archive(tmp_path / "tape"), inputs, layout_of(spec.tensors))
    assert problems(parts) == []
    assert [part.unaccounted for part in parts] == [0] * 4
    assert [part.learner for part in parts if not part.left] == ["bb"]
    told = {name: [float(word) for word in said(name, "end")[0][1:]] for name in kinds}
    for name, (made, skipped, steps, tokens, loss) in told.items():
        (part,) = [part for part in parts if part.learner == name and part.left]
        assert part.tokens == tokens == 512 * steps
        assert skipped > 0
        assert steps == made - skipped
        assert loss < 1.0, "the global model has hardly learned"
    first, *rest = (torch.load(tmp_path / f"{name}.pt") for name in kinds)
    for other in rest:
        assert all(torch.equal(first[name], other[name]) for name in first), "all have the finished run's model"
