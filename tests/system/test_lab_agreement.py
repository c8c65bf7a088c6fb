"""The lab and the real pipeline, processes and Redis, end with the same loss but for what seeds make of it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import tomli_w

from diloco_studies.quality.engine import train
from diloco_studies.quality.settings import LabRun
from tests import HANGING_S

pytestmark = [pytest.mark.slow, pytest.mark.redis]

SETTINGS = {"learners": 2, "fragments": 4, "sync_interval": 10, "batch": 4, "seq_len": 32, "eval_tokens": 2048}
STEPS = 120
TOKENS = SETTINGS["learners"] * STEPS * SETTINGS["batch"] * SETTINGS["seq_len"]


def in_the_lab(text: Path, seeds: range, **other: Any) -> list[float]:
    """Held-out losses."""
    runs = (LabRun(**SETTINGS, **other, data=str(text), steps=STEPS, seed=seed, evaluations=1) for seed in seeds)
    return [train(run, "cpu")["final"]["value"] for run in runs]


def in_real_time(text: Path, folder: Path, seed: int) -> float:
    """The same of a `diloco run`, whose steps are padded, so that a sync hides behind as few."""
    config, report = folder / "run.toml", folder / f"{seed}.json"
    config.write_text(tomli_w.dumps({**SETTINGS, "data": str(text), "seed": seed, "tokens": TOKENS}))
    given = ["--config", str(config), "--pace", "60ms", "--threads", "1", "--out", str(folder / str(seed))]
    subprocess.run(
        [sys.executable, "-m", "diloco", "run", *given, "--json-report", str(report)], check=True, timeout=HANGING_S
    )
    return float(json.loads(report.read_text())["global_val_loss"])


@pytest.mark.timeout(1800)
def test_real_runs_end_where_the_labs_do(tmp_path: Path) -> None:
    """By three standard errors of the difference of their means; another outer step is told apart by as much."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(8000)))
    lab, other = in_the_lab(text, range(5)), in_the_lab(text, range(3), outer="nesterov")
    real = [in_real_time(text, tmp_path, seed) for seed in range(3)]
    allowed = 3 * stdev(lab) * math.sqrt(1 / len(lab) + 1 / len(real))
    assert abs(mean(real) - mean(lab)) < allowed, f"real {real}, the lab {lab}"
    assert abs(mean(other) - mean(lab)) > allowed, f"cannot fail: {other} is no other than {lab}"
