"""The lab and the real pipeline, processes and Redis, end with the same loss but for what seeds make of it."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median, stdev

import pytest
import tomli_w

from diloco.studies.quality.engine import train
from diloco.studies.quality.settings import LabRun

pytestmark = [pytest.mark.slow, pytest.mark.redis]


@pytest.mark.timeout(300)
def test_a_real_run_ends_where_the_lab_does(tmp_path: Path) -> None:
    """The same settings, text and held-out slice; the real steps are padded, so that a sync hides behind as few."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(8000)))
    told = {"learners": 2, "fragments": 4, "sync_interval": 10, "batch": 4, "seq_len": 32, "eval_tokens": 2048}
    steps = 120
    ends = [
        train(LabRun(**told, data=str(text), steps=steps, seed=seed, evaluations=1), "cpu")["final"]["value"]
        for seed in range(3)
    ]
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(told))
    budget = ["--tokens", str(2 * steps * 4 * 32), "--pace", "60ms", "--threads", "1"]
    report = tmp_path / "report.json"
    where = ["--data", str(text), "--out", str(tmp_path / "out"), "--json-report", str(report)]
    subprocess.run(
        [sys.executable, "-m", "diloco", "run", "--config", str(config), *budget, *where], check=True, timeout=240
    )
    real = json.loads(report.read_text())["global_val_loss"]
    assert abs(real - median(ends)) < 3 * stdev(ends) + 0.1, f"real {real}, the lab {ends}"
