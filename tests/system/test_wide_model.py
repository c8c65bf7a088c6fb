"""A model whose matrices are so wide that the default outer step may cost more than its rounds can hide."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import EmbeddedRedis
from tests import HANGING_S

pytestmark = [pytest.mark.redis, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LEARNER = """
import time
import torch
from torch import nn
from diloco import Learner, SyncSettings

model = nn.ParameterList(nn.Parameter(0.02 * torch.randn(2048, 2048)) for _ in range(4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with Learner(model, optimizer, run="wide", sync=SyncSettings(fragments=4, tokens="1B")) as learner:
    while not learner.finished:
        began = time.monotonic()
        for tensor in model:
            tensor.grad = 0.01 * tensor.detach()
        optimizer.step()
        time.sleep(max(0.0, 0.25 - (time.monotonic() - began)))  # as a GPU would compute meanwhile
        learner.step(tokens=1000)
"""
WARNED_WITHIN_S = 60.0
RAMP_S, MEASURED_S = 100.0, 60.0
"""Without a warning, or told to wait: until H is 24, and how long the merged share is looked at."""
LEAST_MERGED = 0.7


def test_the_default_outer_step_fits_or_is_said_not_to(tmp_path: Path) -> None:
    """Four matrices of 2048 x 2048, two learners, steps of 0.25 s: 70 % is merged, or it is said what to set.

    In the log and in the status, within a minute of the first step. Who is told to wait until H is 24 has 70 % then.
    """
    with EmbeddedRedis(dies_with_us=True) as redis:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DILOCO_REDIS_URL": redis.url}

        def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            with (tmp_path / name).open("wb") as log:
                return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=log)

        def status() -> dict[str, Any]:
            asked = [sys.executable, "-m", "diloco", "status", "--run", "wide", "--json"]
            done = subprocess.run(asked, env=environment, text=True, timeout=HANGING_S, capture_output=True)
            if "no run 'wide' on this Redis" in done.stderr:  # nobody has announced anything yet
                return {"tokens": 0, "warnings": []}
            assert done.returncode == 0, done.stderr
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        def until(holds: Callable[[dict[str, Any]], object], within_s: float) -> dict[str, Any]:
            end = time.monotonic() + within_s
            while not holds(found := status()) and time.monotonic() < end:
                time.sleep(1.0)
            return found

        def warning(found: dict[str, Any]) -> str:
            return next((text for text in found["warnings"] if "has room for" in text), "")

        syncer = start("syncer", "-m", "diloco", "syncer", "--run", "wide", "--http-port", "0")
        parties = [syncer, *(start(f"learner-{i}", "-c", LEARNER) for i in range(2))]
        try:
            assert until(lambda found: found["tokens"], 120)["tokens"], "no learner has begun"
            warned = until(warning, WARNED_WITHIN_S)
            if fits := "wait until the interval" in warning(warned) or not warning(warned):
                before = until(lambda found: False, RAMP_S)
                after = until(lambda found: False, MEASURED_S)
        finally:
            for party in parties:
                party.kill()
                party.wait()
    if fits:
        merged, trained = (after[name] - before[name] for name in ("merged_tokens", "tokens"))
        assert merged / trained >= LEAST_MERGED, after
    if not (text := warning(warned)):
        return
    for word in ("outer step", *(() if fits else ("OPENBLAS_NUM_THREADS", "--outer nesterov", "held-out loss"))):
        assert word in text
    assert warned["outer_step"]["outer_s"] > 0
    assert '"merges_slow"' in (tmp_path / "syncer").read_text()
