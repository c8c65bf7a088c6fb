"""What a user gets by default still learns as docs/results/quality.md says."""

from pathlib import Path
from statistics import median

import pytest
import torch

from diloco_studies.quality.engine import train
from diloco_studies.quality.experiment import read_experiment
from diloco_studies.quality.results.summary import RunName, decode

QUALITY = Path(__file__).parents[2] / "docs/quality"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_defaults_learn_within_2_percent_of_what_is_recorded():
    """Five minutes: 0.2M parameters, M = 4, 400 steps, three seeds. Other processors round sums otherwise, and other
    releases of Python have another standard library to learn: some tenths of a percent in the median."""
    experiment = read_experiment(QUALITY / "defaults.toml")
    [row] = [row for row in experiment.rows if row.label == "decoupled"]
    recorded = decode((QUALITY / "results.csv").read_text())
    expected = median(recorded[RunName(experiment.name, row.label, run.seed)].value for run in row.runs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each run of `diloco lab` has; two are slower at such a size
    try:
        losses = [train(run, "cpu")["final"]["value"] for run in row.runs]
    finally:
        torch.set_num_threads(threads)
    assert median(losses) == pytest.approx(expected, rel=0.02), losses
