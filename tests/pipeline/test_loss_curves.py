"""Promises about the learners' loss curves: what a page shows of them, whatever peers have put into their reports."""

import math
from base64 import b64encode

import numpy as np
import pytest

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.run import MAX_CURVE
from diloco.pipeline.view.loss_curves import MAX_CURVES, curve_line, loss_curves, mean_over_time
from diloco.pipeline.view.page.model import PageModel, Poll
from diloco.pipeline.view.status import build_status
from tests import samples

NOW_S, BEGAN_S = 2000.0, 1000.0


def packed(*losses: float) -> str:
    with np.errstate(over="ignore"):
        return b64encode(np.array(losses, "<f4").tobytes()).decode()


def test_a_curve_begins_with_its_incarnation_and_has_what_is_plausible() -> None:
    """By the server's clock, at five digits; NaN, infinity and what lies in the future are no losses."""
    told = packed(3.1234567, math.nan, 1e300, -1e30, 1e-6, 2.0, 9.0, 9.0)
    seen = samples.seen("l0", age_s=2.0, wall_s=10.0, curve_s=2.0, curve=told)
    assert loss_curves([seen], NOW_S, BEGAN_S) == {
        "l0/00000000": {
            "learner": "l0",
            "begin_s": NOW_S - 12.0,
            "every_s": 2.0,
            "losses": [3.1235, None, None, None, 1e-6, 2.0],
        }
    }


@pytest.mark.parametrize(("curve_s", "curve"), [(0.0, packed(1.0)), (1.0, ""), (1.0, "abc"), (1.0, "abcd"), (1.0, "ü")])
def test_a_report_without_a_curve_has_none(curve_s: float, curve: str) -> None:
    """A learner that is told no losses, an older build, or one that writes nonsense."""
    assert loss_curves([samples.seen(curve_s=curve_s, curve=curve)], NOW_S, BEGAN_S) == {}


def test_what_is_kept_of_a_crowd_is_bounded() -> None:
    """The incarnations heard from last, and all of it is JSON, whatever their numbers."""
    evil = packed(*[1e38, math.nan, math.inf, -math.inf] * (MAX_CURVE // 4))
    reports = [
        samples.seen("l0", age_s=float(n), incarnation=f"{n:08x}", curve_s=5e-324, curve=evil, wall_s=1e11)
        for n in range(2 * MAX_CURVES)
    ]
    found = loss_curves(reports, NOW_S, BEGAN_S)
    assert len(found) == MAX_CURVES
    assert "l0/00000000" in found
    assert f"l0/{2 * MAX_CURVES - 1:08x}" not in found
    dumps(found)
    assert curve_line(found.values()) == ""


def test_a_follower_gets_the_buckets_that_are_new() -> None:
    """A patch repeats a curve from its last bucket on, whose mean may have changed, and whole when its buckets grow."""
    model = PageModel("run")

    def see(now_s: float, every_s: float, *losses: float) -> object:
        reports = [samples.seen("l0", age_s=0.1, wall_s=now_s - 1900.0, curve_s=every_s, curve=packed(*losses))]
        status = build_status("run", samples.spec(), samples.run_state(), reports, [], None, [], now_s)
        model.see(Poll(now_s=now_s, status=status, curves=loss_curves(reports, now_s, BEGAN_S)))
        return model.patch().get("curves")

    first = see(2000.0, 1.0, 5.0, 4.0)
    assert first == {"l0/00000000": {"learner": "l0", "begin_s": 1899.9, "every_s": 1.0, "losses": [5.0, 4.0]}}
    assert see(2001.3, 1.0, 5.0, 3.5, 3.0) == {"l0/00000000": {"from": 1, "losses": [3.5, 3.0]}}
    assert see(2002.0, 1.0, 5.0, 3.5, 3.0) is None
    doubled = see(2003.0, 2.0, 4.25, 3.0)
    assert doubled == {"l0/00000000": {"learner": "l0", "begin_s": 1899.9, "every_s": 2.0, "losses": [4.25, 3.0]}}
    assert model.snapshot()["curves"] == doubled


def test_a_line_of_text_draws_the_mean_of_all_learners() -> None:
    """By time: a learner that joined late counts from then on."""
    reports = [
        samples.seen("l0", age_s=0.0, wall_s=8.0, curve_s=2.0, curve=packed(4.0, 3.0, 2.0, 1.0)),
        samples.seen("l1", age_s=0.0, wall_s=4.0, curve_s=2.0, curve=packed(4.0, 3.0)),
    ]
    curves = loss_curves(reports, NOW_S, BEGAN_S)
    assert mean_over_time(list(curves.values()), 4) == [4.0, 3.0, 3.0, 2.0]
    assert curve_line(curves.values(), 4) == "training loss of 2 learners 4 █▅▅▁ 2, on their own data"
    one = loss_curves(reports[1:], NOW_S, BEGAN_S)
    assert curve_line(one.values(), 2) == "training loss of 1 learner 4 █▁ 3, on its own data"


def test_each_curve_has_its_own_losses() -> None:
    reports = [
        samples.seen(f"l{n}", age_s=9.0 - n, curve_s=1.0, curve=packed(*[float(n)] * (n + 1)), wall_s=8.0)
        for n in range(8)
    ]
    found = loss_curves(reports, NOW_S, BEGAN_S)
    assert [one["losses"] for one in found.values()] == [[float(n)] * (n + 1) for n in reversed(range(8))]


@pytest.mark.parametrize(("wall_s", "curve_s"), [(1e11, 1e9), (1e11, 900.0), (90_000.0, 900.0), (1200.0, 125.0)])
def test_what_a_learner_claims_of_other_times_moves_nobody_elses_losses(wall_s: float, curve_s: float) -> None:
    """A run's losses are from its beginning on: the honest ones keep their places in the line."""
    honest = samples.seen("l0", age_s=0.0, wall_s=1000.0, curve_s=125.0, curve=packed(8, 7, 6, 5, 4, 3, 2, 1))
    evil = samples.seen("l1", age_s=0.0, wall_s=wall_s, curve_s=curve_s, curve=packed(*[4.0] * MAX_CURVE))
    means = mean_over_time(loss_curves([honest, evil], NOW_S, BEGAN_S).values(), 8)
    assert None not in means
    assert means[0] is not None
    assert means[0] > 5.0
    assert means[-1] is not None
    assert means[-1] < 3.0


def test_the_first_losses_of_a_run_are_kept_though_clocks_differ() -> None:
    first = samples.seen("l0", age_s=0.0, wall_s=1002.0, curve_s=8.0, curve=packed(5.0, 4.0))
    (curve,) = loss_curves([first], NOW_S, BEGAN_S).values()
    assert curve["losses"] == [5.0, 4.0]
