"""The failure simulator: time lines, accounts, and the formulas that they must meet."""

from math import gamma

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.pipeline.errors import UsageError
from diloco.pipeline.units import YEAR_S, parse_count, parse_rate, parse_span
from diloco_studies.goodput import renewal
from diloco_studies.goodput.constants import DAY_S, Constants
from diloco_studies.goodput.fleet import METHODS, jobs, simulate, together
from diloco_studies.goodput.job import Stops, Timeline, overlap, run_elastic, run_rigid
from diloco_studies.goodput.strikes import Strikes, _unit_mean, draw, quantiles, repair_cdf, repairs

PLAIN = Constants(gather=10, down=20, up=20, restart=100, repair="constant", repair_mean=50, slice_chips=1)


def rng(seed=0):
    return np.random.default_rng(seed)


def strikes(*at_s, away_s=50.0, slices=1.0):
    at = np.array(at_s, dtype=float)
    return Strikes(at, np.full(at.size, away_s), np.full(at.size, slices))


# --- one job ------------------------------------------------------------------------------------------------


def test_an_elastic_job_pauses_to_shrink_and_to_grow():
    """Struck at 100: trains on until 110, pauses until 130; the slice is back at 150: pauses from 160 to 180."""
    job = run_elastic(PLAIN, strikes(100), 4.0, 1000.0)
    assert job.timeline.stops.began_s.tolist() == [110, 160]
    assert job.timeline.stops.ended_s.tolist() == [130, 180]
    away = (10 + 30) / 4 / 1000  # one of four slices, while the others trained
    assert job.lost == pytest.approx({"detection": 0, "down": 0.02, "up": 0.02, "away": away})
    assert job.useful == pytest.approx(0.96 - away)


def test_what_happens_before_a_pause_is_over_is_dealt_with_by_it():
    """The second and third interruption, and the return of the first slice, cost no pause of their own."""
    job = run_elastic(PLAIN.model_copy(update={"repair_mean": 25.0}), strikes(100, 105, 125, away_s=25.0), 4.0, 1000.0)
    assert job.timeline.stops.began_s.tolist() == [110, 160]  # the slice struck at 125 is back at 150


def test_a_failure_may_hang_the_job_until_it_is_detected():
    """Struck at 100: from 110 nothing trains for 7 s, then the pause; a return is no surprise."""
    job = run_elastic(PLAIN.model_copy(update={"detect": 7.0}), strikes(100), 4.0, 1000.0)
    assert list(zip(job.timeline.stops.began_s, job.timeline.stops.ended_s, strict=True)) == [(110, 137), (160, 180)]
    assert job.lost["detection"] == pytest.approx(0.007)
    rigid = run_rigid(PLAIN.model_copy(update={"detect": 70.0}), strikes(100), 4.0, 1000.0)
    assert rigid.timeline.stops.ended_s.tolist() == [280]  # found at 180, after the slice is back
    assert rigid.lost["detection"] == pytest.approx(0.07)


def test_a_job_without_elasticity_waits_for_the_last_slice_and_restarts():
    """Struck at 100 and 105, back at 150 and 155: from 110 until 255 nothing trains."""
    job = run_rigid(PLAIN, strikes(100, 105), 4.0, 1000.0)
    assert (job.timeline.stops.began_s.tolist(), job.timeline.stops.ended_s.tolist()) == ([110], [255])
    assert job.lost["repair"] == pytest.approx(0.045)
    assert job.lost["restart"] == pytest.approx(0.1)
    assert job.lost["away"] == pytest.approx((10 + 5) / 4 / 1000)


def test_work_since_the_last_checkpoint_is_done_again():
    """Trained for 300 s before the pause: two checkpoints of 100 s + 20 s, and 60 s lost."""
    given_ = PLAIN.model_copy(update={"checkpoint_every": 100.0, "checkpoint_write": 20.0})
    job = run_rigid(given_, strikes(290, slices=0.0), 4.0, 450.0)
    assert job.lost["checkpoint"] == pytest.approx(40 / 450)
    assert job.lost["rework"] == pytest.approx(60 / 450)


def test_a_job_whose_slices_are_all_away_stands_still():
    """A region's outage of a learner that lies in it."""
    job = run_elastic(PLAIN, strikes(100, away_s=500.0, slices=4.0), 4.0, 1000.0)
    assert job.timeline.stops.began_s.tolist() == [100]
    assert job.timeline.stops.ended_s.tolist() == [630]  # back at 600, gathered, and grown
    assert job.useful == pytest.approx(0.47)


def test_the_time_line_is_cut_at_the_end():
    """A pause that is not over counts as far as it was seen."""
    job = run_elastic(PLAIN, strikes(100), 4.0, 120.0)
    assert job.timeline.stops.total_s == 10
    assert job.useful + sum(job.lost.values()) == pytest.approx(1)


def test_where_several_stop_at_once():
    """Union and intersection of spans; those that touch are one."""
    a = Stops(np.array([0.0, 10.0]), np.array([5.0, 20.0]))
    b = Stops(np.array([5.0, 15.0]), np.array([7.0, 30.0]))
    either, both = overlap([a, b], 1), overlap([a, b], 2)
    assert (either.began_s.tolist(), either.ended_s.tolist()) == ([0, 10], [7, 30])
    assert (both.began_s.tolist(), both.ended_s.tolist()) == ([15], [20])


def test_training_time_stands_still_in_a_stop():
    """And goes on after it."""
    line = Timeline(Stops(np.array([10.0]), np.array([15.0])), 30.0)
    assert line.trained(np.array([5.0, 12.0, 20.0, 30.0])).tolist() == [5, 10, 15, 25]


# --- formulas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chips", [50_000, 400_000, 1_600_000])
def test_the_simulation_meets_the_renewal_formula_without_elasticity(chips):
    """Constant, and exponentiated Weibull repairs; 60 days."""
    for constants in (PLAIN, Constants()):
        made = [
            run_rigid(constants, draw(constants, chips, 60 * DAY_S, rng(s)), chips / 64, 60 * DAY_S) for s in range(3)
        ]
        shares = [job.timeline.total_s / job.timeline.duration_s for job in made]
        assert np.mean(shares) == pytest.approx(renewal.rigid(constants, chips), abs=0.006)


@pytest.mark.parametrize("chips", [50_000, 400_000, 1_600_000])
def test_the_simulation_meets_the_renewal_formula_of_elastic_jobs(chips):
    """Repairs that vary by far more than a pause, so that returns are independent of interruptions."""
    constants = PLAIN.model_copy(update={"repair": "weibull", "repair_mean": 5000.0, "repair_shape": 1.0})
    made = [run_elastic(constants, draw(constants, chips, 60 * DAY_S, rng(s)), 1e9, 60 * DAY_S) for s in range(3)]
    shares = [job.timeline.total_s / job.timeline.duration_s for job in made]
    assert np.mean(shares) == pytest.approx(renewal.elastic(constants, chips), abs=0.006)


def test_the_formula_refuses_what_it_does_not_cover():
    """Pauses of two lengths."""
    with pytest.raises(ValueError, match="one length"):
        renewal.elastic(Constants(down=5, up=6), 1000)


@given(
    chips=st.integers(30_000, 400_000),
    factor=st.integers(2, 6),
    method=st.sampled_from(["data-parallel", "elastic", "decoupled"]),
    constants=st.builds(
        Constants,
        mtbi=st.floats(YEAR_S / 4, 4 * YEAR_S),
        repair=st.sampled_from(["weibull", "constant"]),
        repair_mean=st.floats(1, 500),
        gather=st.floats(0, 30),
        detect=st.floats(0, 20),
        down=st.floats(1, 60),
        up=st.floats(1, 60),
        restart=st.floats(0, 300),
        rack_mtbi=st.sampled_from([0, YEAR_S]),
    ),
)
@settings(max_examples=25, derandomize=True)
def test_in_any_world_fewer_chips_and_more_learners_do_no_harm(chips, factor, method, constants):
    """Beyond the error of four seeds of two days: chips N against N x factor, and learners M against M x factor."""

    def cell(chips, learners):
        runs = [
            together(jobs(constants, chips, learners, 2, rng(s), rigid=method == "data-parallel"))[0] for s in range(4)
        ]
        return np.mean(runs), np.std(runs, ddof=1) / 2

    learners = 2 if method == "decoupled" else 1
    few, e1 = cell(chips, learners)
    many, e2 = cell(chips * factor, learners)
    assert many <= few + 4 * (e1 + e2) + 1e-3
    if method == "decoupled":
        split, e3 = cell(chips, learners * factor)
        assert split >= few - 4 * (e1 + e3) - 1e-3


@given(
    chips=st.integers(100, 400_000),
    learners=st.sampled_from([1, 2, 5]),
    rigid=st.booleans(),
    constants=st.builds(
        Constants,
        mtbi=st.floats(YEAR_S / 20, 4 * YEAR_S),
        slice_chips=st.sampled_from([1, 64, 4096]),
        repair=st.sampled_from(["weibull", "constant"]),
        repair_mean=st.floats(1, 20_000),
        gather=st.floats(0, 100),
        detect=st.floats(0, 100),
        down=st.floats(0, 100),
        up=st.floats(0, 100),
        restart=st.floats(0, 1000),
        checkpoint_every=st.sampled_from([0, 50, 1800]),
        checkpoint_write=st.floats(0, 20),
        rack_mtbi=st.sampled_from([0, YEAR_S / 4]),
        region_mtbi=st.sampled_from([0, 2 * DAY_S]),
    ),
)
@settings(max_examples=60)
def test_goodput_and_lost_time_by_cause_add_up_to_one(chips, learners, rigid, constants):
    """Whatever the world is like; no share is negative, and stops are in order."""
    made = jobs(constants, chips, learners, 2, rng(), rigid=rigid)
    useful, lost, idle = together(made)
    assert useful + sum(lost.values()) == pytest.approx(1, abs=1e-9)
    assert min(useful, *lost.values()) >= -1e-9
    for stops in (idle, *(job.timeline.stops for job in made)):
        assert (stops.ended_s >= stops.began_s).all()
        assert (stops.began_s[1:] >= stops.ended_s[:-1]).all()


# --- chance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "power"), [(0.8, 2.0), (1.0, 1.0), (2.0, 0.5)])
def test_repair_times_have_the_mean_and_distribution_that_was_asked_for(shape, power):
    """Exponentiated Weibull; (1, 1) is the exponential distribution."""
    constants = Constants(repair_mean=40, repair_shape=shape, repair_power=power)
    drawn = repairs(constants, 200_000, rng())
    assert drawn.mean() == pytest.approx(40, rel=0.02)
    shares = np.array([0.1, 0.5, 0.99])
    assert repair_cdf(constants, quantiles(constants, shares)) == pytest.approx(shares)
    if (shape, power) == (1.0, 1.0):
        assert np.median(drawn) == pytest.approx(40 * np.log(2), rel=0.02)


def test_repair_times_whose_mean_cannot_be_found_are_refused():
    """With the heaviest tail that is taken, the mean by which times are scaled is the Weibull's own."""
    assert _unit_mean(0.1, 1.0) == pytest.approx(gamma(11), rel=1e-3)
    for out_of_reach in ({"repair_shape": 0.05}, {"repair_power": 1e6}):
        with pytest.raises(UsageError, match=f"Constants: {next(iter(out_of_reach))}="):
            Constants(**out_of_reach)


def test_repair_times_come_from_a_trace(tmp_path):
    """One a line; anything else is refused with the file's name."""
    path = tmp_path / "repairs.txt"
    path.write_text("10\n20\n30\n")
    drawn = repairs(Constants(repair="trace", repair_trace=path), 1000, rng())
    assert set(drawn.tolist()) == {10, 20, 30}
    bad = tmp_path / "bad.txt"
    bad.write_text("10\n-1\n")
    with pytest.raises(UsageError, match=r"bad\.txt, line 2"):
        repairs(Constants(repair="trace", repair_trace=bad), 1, rng())
    with pytest.raises(UsageError, match="--repair-trace FILE"):
        repairs(Constants(repair="trace"), 1, rng())


def test_interruptions_come_at_the_rate_of_their_chips():
    """Chips and racks add up; a rack takes all its slices."""
    constants = Constants(rack_mtbi=YEAR_S / 10, rack_chips=256)
    drawn = draw(constants, 100_000, 365.25 * DAY_S, rng())
    racks = drawn.slices == 4
    assert racks.sum() == pytest.approx(100_000 / 256 * 10, rel=0.1)
    assert (~racks).sum() == pytest.approx(100_000, rel=0.02)
    assert (np.diff(drawn.at_s) >= 0).all()


def test_a_regions_outage_stops_its_learners_and_no_others():
    """With as many learners as regions one stands still at a time, and uptime stays what it was."""
    constants = Constants(mtbi=1e12, region_mtbi=3 * DAY_S, region_repair=7200, regions=2)
    made = jobs(constants, 10_000, 2, 60, rng())
    useful, lost, idle = together(made)
    expected = 7200 / (3 * DAY_S)
    assert 1 - useful == pytest.approx(expected, rel=0.5)
    assert lost["away"] + lost["up"] + lost["down"] == pytest.approx(1 - useful)
    assert idle.total_s < 0.2 * 7200 * 40


# --- runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_run(method):
    """And another one another run; shares add up for every method."""
    one, same, other = (simulate(Constants(), method, 200_000, 2, 2, seed) for seed in (1, 1, 2))
    assert (one.goodput, one.lost, one.windows) == (same.goodput, same.lost, same.windows)
    assert one.goodput != other.goodput
    assert one.goodput + sum(one.lost.values()) == pytest.approx(1)


SMALL = Constants(step_time=1, params=1e9, link=1e11)


@pytest.mark.parametrize(
    ("method", "change", "figure", "least", "most"),
    [  # a constant, and what it does to a figure of a run, as a factor
        ("elastic", {"slice_chips": 640}, "away", 8, 12),
        ("elastic", {"mtbi": YEAR_S / 2}, "away", 1.8, 2.2),
        ("decoupled", {"step_time": 2.0}, "outer_steps_per_hour", 0.45, 0.55),
        ("decoupled", {"sync_interval": 48}, "outer_steps_per_hour", 0.48, 0.6),
        ("decoupled", {"fragments": 12}, "outer_steps_per_hour", 0.45, 0.55),
        ("decoupled", {"quorum": 4}, "longest_gap_s", 1.1, 9),
        ("decoupled", {"overlap_steps": 0}, "mean_grace_s", 0, 0.05),
        ("decoupled", {"grace_gamma": 0.0}, "mean_grace_s", 0, 0.05),
        ("decoupled", {"step_jitter": 0.3}, "mean_grace_s", 1.05, 9),
        ("decoupled", {"older_learners": 0.25, "older_slowdown": 0.5}, "mean_grace_s", 1.05, 9),
        ("decoupled", {"liveness": 1.0}, "mean_grace_s", 0.2, 0.99),
        ("decoupled", {"sync_time": 5.0}, "mean_sync_s", 20, 2000),
        ("decoupled", {"link": 1e9}, "mean_sync_s", 20, 200),
        ("decoupled", {"wire_bits": 32}, "mean_sync_s", 1.01, 2.5),
        ("decoupled", {"params": 1e11}, "mean_sync_s", 20, 200),
        ("decoupled", {"merge_rate": 1e6}, "mean_sync_s", 20, 2000),
        ("decoupled", {"syncer_cores": 1}, "mean_sync_s", 1.01, 99),
        ("decoupled", {"outer": "halley"}, "mean_sync_s", 2, 200),
        ("decoupled", {"latency": 2.0}, "outer_steps_per_hour", 0.1, 0.3),  # intervals are stretched
        ("diloco", {"diloco_interval": 1000}, "outer_steps_per_hour", 0.45, 0.55),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_every_constant_of_a_run_does_what_it_says(method, change, figure, least, most):
    """Against the same run without it."""

    def of(constants):
        run = simulate(constants, method, 200_000, 4, 0.25, 0)
        return {**run.lost, **run.windows}[figure]

    assert least <= of(SMALL.model_copy(update=change)) / of(SMALL) <= most


@pytest.mark.parametrize("change", [{"width": 4096}, {"layers": 6}])
def test_a_wider_model_takes_longer_for_its_outer_step(change):
    """Of as many parameters: products of matrices grow with the width, and fewer layers are wider ones."""
    world = SMALL.model_copy(update={"outer": "halley"})
    usual, wide = (
        simulate(one, "decoupled", 200_000, 4, 0.25, 0).windows["mean_sync_s"]
        for one in (world, world.model_copy(update=change))
    )
    assert 1.5 < wide / usual < 3


def test_globals_in_fewer_bits_are_pulled_sooner():
    """Where the link is slow: less is overwritten, and intervals are stretched less."""
    whole, half = (
        simulate(SMALL.model_copy(update={"link": 1e9, "global_bits": bits}), "decoupled", 200_000, 4, 0.25, 0).windows
        for bits in (32, 16)
    )
    assert half["overwritten"] < 0.95 * whole["overwritten"]
    assert half["outer_steps_per_hour"] > 1.2 * whole["outer_steps_per_hour"]


def test_a_learner_needs_a_chip():
    """Refused with the numbers."""
    with pytest.raises(UsageError, match="3 chips are too few for 4 learners"):
        jobs(Constants(), 3, 4, 1, rng())


# --- units --------------------------------------------------------------------------------------------------


def test_numbers_as_people_write_them():
    """Spans, counts and rates."""
    assert [parse_span(v) for v in ("0.5y", "3s", "200ms", "2d", "7", 4)] == [YEAR_S / 2, 3, 0.2, 2 * DAY_S, 7, 4]
    assert [parse_count(v) for v in ("70B", "10e9", "150k", "1.5M")] == [70e9, 10e9, 150e3, 1.5e6]
    assert [parse_rate(v) for v in ("5Gbps", "800Mbit/s", "1e9")] == [5e9, 8e8, 1e9]
    assert parse_span("soon") == "soon"


def test_constants_are_checked_and_not_taken_from_the_environment(monkeypatch):
    """Settings of a real run must not change the table."""
    monkeypatch.setenv("DILOCO_QUORUM", "7")
    assert Constants().quorum == 1
    with pytest.raises(UsageError, match="Constants: mtbi="):
        Constants(mtbi="0s")
    for name, info in Constants.model_fields.items():
        words = ("Paper", "alibrated", "Assumed", "arXiv", "Measured", "own", "drawn", "lines")
        assert any(word in str(info.description) for word in words), f"{name} says not where it comes from"
