"""A newcomer's first run: a small model is taken as it is, and joining says a word."""

import json
from typing import Any

import pytest
import structlog
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco.pipeline.errors import SpecMismatch
from diloco.pipeline.settings import LearnerProcess, SyncSettings, load
from diloco.workers.learner import Learner
from diloco.workers.parameters import described
from diloco.workers.spec_proposal import fitting
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import reports, until


def small() -> nn.Module:
    """Four tensors, one of them empty: three can make a fragment."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
    return model


def learner_of(url: str, run: str, **more: Any) -> Learner:
    model = small()
    return Learner(model, torch.optim.AdamW(model.parameters()), run=run, redis_url=url, **more)


def test_a_number_of_fragments_that_nobody_asked_for_fits_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By flag, variable or argument it was asked for, and stays."""
    wide = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    assert fitting(SyncSettings(), described(small())).fragments == 3
    assert fitting(load(LearnerProcess, {"quorum": 2}), described(small())).fragments == 3
    assert fitting(SyncSettings(), described(wide)).fragments == 8
    assert fitting(SyncSettings(fragments=8), described(small())).fragments == 8
    monkeypatch.setenv("DILOCO_FRAGMENTS", "5")
    assert fitting(load(SyncSettings), described(small())).fragments == 5


@pytest.mark.redis
def test_learners_and_a_syncer_that_say_nothing_agree_on_a_small_model(redis_server: str) -> None:
    """The first learner settles it, and says so; one that comes later follows, whatever else it was told."""
    with a_syncer(redis_server, "small"), capture_logs() as log, learner_of(redis_server, "small") as first:
        assert first.spec.sync.fragments == 3
        (said,) = [one for one in log if one["event"] == "fragments_reduced"]
        assert (said["log_level"], said["fragments"]) == ("info", 3)
        assert "3 trained tensors" in said["detail"]
        first.step(1)
        until(lambda: len(reports(redis_server, "small")) == 1)
        for sync in (None, SyncSettings()):
            with capture_logs() as log, learner_of(redis_server, "small", sync=sync) as later:
                assert later.spec == first.spec
            (said,) = [one for one in log if one["event"] == "learner_joined"]
            assert said["log_level"] == "info"
            assert (said["run"], said["learner"], said["fragments"]) == ("small", later.id, 3)
            assert said["learners_live"] == 2
            assert "version" in said


@pytest.mark.redis
def test_another_model_is_told_how_it_differs_from_the_runs(redis_server: str) -> None:
    """By its tensors, even where it has fewer of them than the run has fragments."""
    with a_syncer(redis_server, "other"), learner_of(redis_server, "other"):
        other = nn.Linear(3, 3)
        late = Learner(other, torch.optim.AdamW(other.parameters()), run="other", redis_url=redis_server)
        with pytest.raises(SpecMismatch, match="choose a different run name") as refused, late:
            pass
    assert "tensor weight: here [3, 3]" in str(refused.value)
    assert "tensor 0.weight: here absent, the run has [4, 4]" in str(refused.value)


@pytest.mark.redis
@pytest.mark.parametrize(("level", "shown"), [(None, True), ("warning", False)])
def test_joining_is_one_line_on_standard_error(
    redis_server: str,
    level: str | None,
    shown: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a program that has set up no log of its own; DILOCO_LOG_LEVEL says how much."""
    if level:
        monkeypatch.setenv("DILOCO_LOG_LEVEL", level)
    structlog.reset_defaults()
    try:
        with a_syncer(redis_server, f"line-{level}"), learner_of(redis_server, f"line-{level}") as learner:
            identity = learner.id
    finally:
        structlog.reset_defaults()
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines() if "learner_joined" in line]
    assert [(line["learner"], line["run"]) for line in lines] == [(identity, f"line-{level}")] * shown
    assert "learner_joined" not in captured.out
