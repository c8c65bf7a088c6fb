"""Runs of the lab, small ones: deterministic, exact in their budget, and the production protocol underneath."""

import math

import pytest

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer import trainer
from diloco_studies.quality import learner
from diloco_studies.quality.curve import Stopped
from diloco_studies.quality.engine import train
from diloco_studies.quality.settings import PRESETS, LabRun

pytestmark = pytest.mark.usefixtures("one_thread")


def small(text, method="decoupled", **told):
    given = {
        "data": str(text),
        "batch": 2,
        "seq_len": 16,
        "steps": 24,
        "learners": 2,
        "fragments": 2,
        "sync_interval": 6,
        "evaluations": 3,
        "eval_tokens": 256,
    }
    return LabRun(**{**given, **PRESETS[method], "method": method, **told})


def test_one_seed_gives_one_curve(text):
    """To the last bit, with failures and jitter; another seed gives another."""
    run = small(text, fail_every_s=12.0, fail_down_s=5.0, jitter=0.3, outer_momentum=0.5, steps=16)
    first, second = train(run, "cpu"), train(run, "cpu")
    assert first["failures"] >= 1
    assert first["digest"] == second["digest"]
    assert first["points"] == second["points"]
    assert train(run.model_copy(update={"seed": 1}), "cpu")["digest"] != first["digest"]


@pytest.mark.parametrize("method", ["data-parallel", "single", "diloco", "streaming", "decoupled"])
def test_every_method_learns_on_exactly_its_budget(text, method):
    """Equal tokens are equal, and the loss falls."""
    result = train(small(text, method), "cpu")
    learners = 1 if method == "single" else 2
    assert result["tokens"] == 24 * 2 * 16 * learners
    assert result["steps"] == 24 * (1 if method == "data-parallel" else learners)
    values = [point["measures"]["value"] for point in result["points"]]
    assert len(values) == 3
    assert values[-1] < values[0] < math.log(256) + 0.2
    assert result["final"]["value"] == values[-1]


def test_the_books_close_without_failures(text):
    """What was trained is merged or overwritten; nothing is refused."""
    result = train(small(text), "cpu")
    assert result["merged_share"] + result["overwritten_share"] == pytest.approx(1.0)
    assert result["rejected_share"] == 0
    assert result["contributions_a_merge"] == 2
    assert result["points"][-1]["merged_tokens"] == pytest.approx(result["merged_share"] * result["tokens"])


def test_learners_that_wait_lose_nothing(text):
    """DiLoCo: no step is made between a publication and its merge, so none is overwritten."""
    result = train(small(text, "diloco"), "cpu")
    assert result["overwritten_share"] == 0
    assert result["merged_share"] == pytest.approx(1.0)


def test_one_learner_that_merges_alone_is_that_learner(text):
    """M = 1, lr 1, no momentum, float32, nothing in flight: the global is the learner, so its curve is "single"'s."""
    alone = {"learners": 1, "fragments": 1, "codec": "fp32", "latency_s": 0.0, "lr": 1e-3}
    alone |= {"outer_lr": 1.0, "outer_momentum": 0.0}
    ours, single = (train(small(text, method, **alone), "cpu") for method in ("diloco", "single"))
    assert ours["final"]["value"] == pytest.approx(single["final"]["value"], abs=0.03)


def test_quick_learners_do_not_wait_for_slow_ones(text):
    """All of the time is used at mixed speeds; data-parallel loses the quick one's, half the time of half of them."""
    mixed = train(small(text, slowdown=1.0), "cpu")
    assert mixed["goodput"] > 0.93
    assert train(small(text, "data-parallel", slowdown=1.0), "cpu")["goodput"] == pytest.approx(0.75)


def test_a_learner_that_fails_comes_back(text):
    """The others go on, nothing is merged twice, and the budget is met."""
    run = small(text, steps=30, learners=3, fail_every_s=15.0, fail_down_s=4.0)
    result = train(run, "cpu")
    assert result["failures"] >= 2
    assert result["tokens"] == run.budget_examples * 16
    assert result["merged_share"] + result["overwritten_share"] <= 1.0
    assert result["goodput"] < 1.0
    assert result["final"]["value"] < 4.0


def test_a_late_learner_trains_too(text):
    """It joins a run under way; fewer steps are left for it."""
    result = train(small(text, late_join_s=12.0), "cpu")
    assert result["tokens"] == 24 * 2 * 16 * 2
    assert 29 < result["virtual_s"] < 32  # 12 steps alone, 18 together


@pytest.mark.parametrize("method", ["decoupled", "data-parallel"])
def test_scavengers_shorten_a_run_of_the_same_budget(text, method):
    """Two learners and two more from 4.5 s for 8 s: 40 learner-steps in 15 s at most, not 20."""
    told = {"scavengers": 2, "scavenge_from_s": 4.5, "scavenge_s": 8.0, "resize_s": 0.25}
    run = small(text, method, steps=20, **told)
    result = train(run, "cpu")
    assert result["tokens"] == run.budget_examples * 16 == 20 * 2 * 2 * 16
    assert 12.5 < result["virtual_s"] <= 15
    assert result["goodput"] <= 1.0


def test_shards_are_as_long_as_the_trainer_s():
    """The lab does not import the trainer, whose changes would make its results those of another code."""
    assert learner.STEPS_PER_SHARD == trainer.STEPS_PER_SHARD


@pytest.mark.slow
@pytest.mark.parametrize("adopt", ["blend", "carry"])
def test_other_ways_to_adopt_change_the_run(text, adopt):
    """Blend and carry are not overwrite by another name."""
    usual, other = (train(small(text, adopt=how), "cpu") for how in ("overwrite", adopt))
    assert usual["digest"] != other["digest"]
    assert other["final"]["value"] < 4.0


@pytest.mark.parametrize("method", ["decoupled", "data-parallel"])
def test_a_run_stops_when_told_to(text, method):
    """Within a step, and with one error, not a group of them."""
    heard = []
    with pytest.raises(Stopped):
        train(small(text, method), "cpu", lambda share, last: heard.append(share) or share < 0.5)
    assert 0.5 <= heard[-1] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [
        {"latency_s": 5.0, "fail_every_s": 5.0},  # nobody has joined before it fails
        {"wait": True, "quorum": "all", "late_join_s": 1e9},
        {"latency_s": 1e7},
        {"method": "data-parallel", "fail_every_s": 20.0, "resize_s": 1e300},
    ],
)
def test_a_run_that_comes_to_no_end_is_given_up(text, told):
    """In virtual time, whatever it waits for; it says how far it came."""
    with pytest.raises(UsageError, match=r"gave up after \S+ virtual seconds, 100 times what its steps take, at \d+%"):
        train(small(text, **told), "cpu")


def test_steps_may_be_shorter_than_a_look_at_the_run(text):
    """All are done before the syncer has said that the run has begun."""
    assert train(small(text, step_s=1e-3, latency_s=0.0, steps=4), "cpu")["tokens"] == 4 * 2 * 2 * 16


def test_data_parallel_ends_its_last_step_at_its_budget(text):
    """Though more learners are there than the rest of it has examples for."""
    run = small(text, "data-parallel", scavengers=20, steps=24)
    assert train(run, "cpu")["tokens"] == run.budget_examples * 16


@pytest.mark.slow
def test_guard_rails_are_the_production_ones(text):
    """The interval grows from one step on, so there are more merges; the warm-up changes what they do."""
    usual, grown = (train(small(text, **told), "cpu") for told in ({}, {"first_interval": 1}))
    assert grown["merges"] > usual["merges"]
    fast = {"outer_lr": 0.7, "outer_momentum": 0.9}
    warm, cold = (train(small(text, **fast, **told), "cpu") for told in ({"outer_warmup": 3}, {}))
    assert warm["digest"] != cold["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [
        *({"outer": "nesterov"}, {"beta2": 0.5}, {"eps": 1e-3}),
    ],
)
def test_what_is_tried_out_changes_a_run(text, told):
    """A setting that did nothing would be reported as one that makes no difference."""
    common = {"steps": 9, "sync_interval": 3, "outer_momentum": 0.5, "outer_warmup": 1, "first_interval": 0}
    usual, other = (train(small(text, **common, **more), "cpu") for more in ({}, told))
    assert usual["digest"] != other["digest"]
    assert other["final"]["value"] < 5.0


@pytest.mark.parametrize("method", ["data-parallel", "single"])
def test_inner_settings_are_every_method_s(text, method):
    """Else a comparison would not be at equal settings."""
    runs = [train(small(text, method, steps=4, **told), "cpu") for told in ({}, {"beta2": 0.5}, {"eps": 1e-3})]
    assert len({run["digest"] for run in runs}) == 3
