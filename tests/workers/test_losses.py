"""Promises about the losses that a learner is told with its steps: each is its step's, and no report waits for one."""

import json
import math
import time
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.pipeline.messages.run import MAX_CURVE
from diloco.workers.copies.losses import Losses, loss_copy
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import learner_of, reports


class Late:
    """As of a step that a device has queued: to read it too early would be to wait."""

    def __init__(self, value: float) -> None:
        self.value, self.there = value, False

    def ready(self) -> bool:
        return self.there

    def number(self) -> float:
        assert self.there, "a report waits for the device"
        return self.value


class Lost(Late):
    """An array that was donated, or of a device that has failed."""

    def ready(self) -> bool:
        raise RuntimeError("deleted")


def test_a_report_shows_the_newest_loss_that_is_there_and_waits_for_none() -> None:
    """Also when no step comes any more; and what was shown needs no memory."""
    losses, first, second, third = Losses(), Late(1.0), Late(2.0), Late(3.0)
    assert losses.shown() is None
    for loss in (first, second, third):
        losses.add(loss, 0.0)
        assert losses.shown() is None
    first.there = second.there = True
    assert losses.shown() == 2.0
    losses.add(Late(4.0), 0.0)
    assert losses.shown() == 2.0
    third.there = True
    assert losses.shown() == 3.0
    told = [loss_copy(float(number)) for number in range(5, 9)]
    for loss in losses._under_way:
        loss.there = True  # type: ignore[attr-defined]
    for one in told:
        losses.add(one, 0.0)
    assert losses.shown() == 8.0
    assert not losses._under_way


def test_where_a_loss_is_lost_the_one_before_is_shown_and_later_ones_are() -> None:
    """The exchange goes on: what has failed is the loop's to tell."""
    losses = Losses()
    losses.add(loss_copy(1.0), 0.0)
    losses.add(late := Late(2.0), 0.0)
    losses.add(Lost(3.0), 0.0)
    assert losses.shown() == 1.0
    late.there = True
    assert losses.shown() == 2.0
    losses.add(loss_copy(4.0), 0.0)
    assert losses.shown() == 4.0


def test_a_curve_has_the_mean_of_each_bucket_and_is_bounded() -> None:
    """However long the run: buckets grow."""
    losses = Losses()
    for at_s, loss in ((0.0, 4.0), (0.1, 2.0), (0.6, 1.0)):
        losses.add(loss_copy(loss), at_s)
    every_s, curve = losses.curve()
    assert every_s == 0.25
    np.testing.assert_array_equal(np.frombuffer(b64decode(curve), "<f4"), [3.0, math.nan, 1.0])
    for second in range(1, 40_000):
        losses.add(loss_copy(2.0), float(second))
    every_s, curve = losses.curve()
    means = np.frombuffer(b64decode(curve), "<f4")
    assert MAX_CURVE / 2 <= len(means) <= MAX_CURVE
    assert len(means) * every_s == pytest.approx(40_000, rel=0.02)
    assert means[0] == pytest.approx(2.0, abs=0.1)
    np.testing.assert_array_equal(means[1:], 2.0)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e300])
def test_a_loss_that_is_no_number_is_in_no_mean(odd: float) -> None:
    """Neither in its bucket's nor, when buckets grow, in the next: one overflow must not hide a run's losses."""
    losses = Losses()
    for at_s, loss in ((0.0, 4.0), (0.1, odd), (0.2, 2.0), (0.3, odd), (0.6, odd), (0.7, 3.0), (0.8, odd)):
        losses.add(loss_copy(loss), at_s)
    np.testing.assert_array_equal(np.frombuffer(b64decode(losses.curve()[1]), "<f4"), [3.0, math.nan, 3.0, math.nan])
    losses.add(loss_copy(1.0), 0.25 * MAX_CURVE)
    every_s, curve = losses.curve()
    assert every_s == 0.5
    np.testing.assert_array_equal(np.frombuffer(b64decode(curve), "<f4")[[0, 1, -1]], [3.0, 3.0, 1.0])


@pytest.mark.redis
def test_a_loop_may_write_over_the_loss_that_it_has_told(redis_server: str, tmp_path: Path) -> None:
    """Reports and `losses.jsonl` have it as it was at its step."""
    shared = torch.zeros(1)
    with a_syncer(redis_server, "written-over"):
        more = {"state_dir": str(tmp_path), "log_losses": True}
        with learner_of(redis_server, "written-over", **more) as learner:
            for number in range(1, 5):
                learner.step(1, loss=shared.fill_(number))
                shared.fill_(-1.0)
            assert learner.joined.training.losses.shown() == 4.0
        assert [seen.report.loss for seen in reports(redis_server, "written-over")] == [4.0]
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(number, float(number)) for number in range(1, 5)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_neither_a_step_nor_a_report_waits_for_a_cuda_loss() -> None:
    """It is that of its step, though the loop writes over it, and comes by itself."""
    losses, loss = Losses(), torch.zeros((), device="cuda")
    losses.add(loss_copy(loss), 0.0)  # what is loaded and allocated once
    torch.cuda.synchronize()
    assert losses.shown() == 0.0
    began = time.monotonic()
    torch.cuda._sleep(10**10)  # cycles: some seconds
    loss.fill_(2.5)
    losses.add(loss_copy(loss), 0.0)
    loss.fill_(-1.0)
    assert losses.shown() == 0.0
    assert time.monotonic() - began < 1.0
    torch.cuda.synchronize()
    assert losses.shown() == 2.5
