"""Each sentence that the page may begin with: what is so, why, and what to do."""

from collections.abc import Sequence
from typing import Any

import pytest

from diloco.pipeline.messages.fragment import Head, RefusalReason, WindowView
from diloco.pipeline.messages.run import Evaluation, Phase, RunState, SeenReport
from diloco.pipeline.view.page.join_command import LearnerLaunch, RedisRoute
from diloco.pipeline.view.page.verdict import REMEDIES, RunFacts, Verdict, patience_s, verdict
from diloco.pipeline.view.status import Status, build_status
from tests import samples

NOW_S = 1100.0
SYNCER = "diloco syncer --run my-run --checkpoint-dir FOLDER"
BUILT_IN = {"model": "tiny", "data_fingerprint": "0123"}
"""Of the spec of a run of the built-in trainer."""


def window(state: str, reason: str = "because", **given: Any) -> WindowView:
    fields = {"attempt": 0, "members": ("l0",), "expected": 2, "deadline_unix_s": None}
    return WindowView(state=state, reason=reason, **{**fields, **given})


def status(
    reports: Sequence[SeenReport] = (),
    state: RunState | None = None,
    heads: Sequence[Head | None] | None = None,
    syncers: Sequence[str] = ("syncer",),
    evaluation: Evaluation | None = None,
    spec: Any = None,
    **sync: Any,
) -> Status:
    """A run of two fragments that has merged 40 times each, unless told otherwise."""
    if heads is None:
        heads = [samples.head(p, version=40, merged_tokens=800, interval=4) for p in range(2)]
    return build_status(
        "my-run",
        spec if spec is not None else samples.spec(**sync).model_copy(update={"trainer": BUILT_IN}),
        state or samples.run_state(),
        reports,
        heads,
        evaluation,
        [],
        NOW_S,
        5.0,
        {f"{n:08x}": name for n, name in enumerate(syncers)},
        ["00000000"] * len(heads),
    )


TWO = (samples.seen("l0"), samples.seen("l1"))


def asked(said: Verdict) -> tuple[str, str]:
    return said["do"], said["command"]


def test_a_redis_that_does_not_answer() -> None:
    """Whatever was so before: nobody can know now. A hiccup is not worth a word."""
    said = verdict(status(TWO), RunFacts(away_s=12.0, away="BusUnavailable: refused"))
    assert said["level"] == "bad"
    assert said["text"] == (
        "Redis has not answered for 12 s (BusUnavailable: refused): learners continue to train, but nothing is merged."
    )
    assert "Check that Redis is running" in said["do"]
    assert verdict(status(TWO), RunFacts(away_s=1.0, away="x"))["level"] == "well"


def test_a_redis_that_answers_what_nobody_can_read() -> None:
    """It is there, so nobody is sent to look after it."""
    said = verdict(status(TWO), RunFacts(away_s=1.0, away="BadMessage: spec: ...", spoilt=True))
    assert said["level"] == "bad"
    assert said["text"].startswith("The run's data on Redis cannot be read (BadMessage: spec")
    assert said["do"].startswith("Find out who writes it")
    told = verdict(
        None, RunFacts(away_s=1.0, away="OtherFormat: ...", spoilt=True, remedy="take a build that reads it")
    )
    assert told["do"] == "Take a build that reads it."


def test_nothing_was_read_yet() -> None:
    assert verdict(None, RunFacts())["text"] == "Nothing is known about the run yet."
    assert verdict(None, RunFacts(away="BusUnavailable: refused"))["level"] == "bad"


@pytest.mark.parametrize(("syncers", "where"), [(("s",), "and a syncer is waiting"), ((), "and there is no syncer")])
def test_a_run_that_nobody_has_joined(syncers: Sequence[str], where: str) -> None:
    found = build_status("my-run", None, None, [], [], None, [], NOW_S, 5.0, dict.fromkeys(syncers, "s"))
    said = verdict(found, RunFacts())
    assert said["text"] == f"The run has not started: no learner has joined, {where}."
    assert asked(said) == ("Start one:", "diloco learner --run my-run")


def test_learners_that_wait_for_a_syncer() -> None:
    seen = samples.seen("l0", tokens=0, step=0, versions=())
    found = build_status("my-run", samples.spec(), None, [seen], [None, None], None, [], NOW_S, 5.0, {})
    said = verdict(found, RunFacts())
    assert said["text"] == "1 learner is waiting for a syncer: nothing can be merged without one."
    assert asked(said) == ("Start one (FOLDER has the run's checkpoints):", SYNCER)
    begins = build_status("my-run", samples.spec(), None, [seen], [None, None], None, [], NOW_S, 5.0, {"0": "s"})
    assert (
        verdict(begins, RunFacts())["text"]
        == "The run is starting: its first learner is uploading the initial parameters."
    )


def test_heads_that_redis_has_lost() -> None:
    said = verdict(status(TWO, heads=[samples.head(0), None]), RunFacts())
    assert said["level"] == "bad"
    assert said["text"].startswith("Nothing is merged: the heads of fragments 1 are not on the bus")


def test_no_syncer() -> None:
    said = verdict(status(TWO, syncers=()), RunFacts())
    assert said["text"] == "Nothing is merged, since the run has no syncer; 2 learners are training."
    assert asked(said) == ("Start one (FOLDER has the run's checkpoints):", SYNCER)


def test_a_run_that_nobody_is_at_work_on() -> None:
    said = verdict(status((), syncers=()), RunFacts())
    assert said["text"] == "The run is idle: it has neither a syncer nor a learner."
    assert asked(said) == ("Start a syncer, then learners (FOLDER has the run's checkpoints):", SYNCER)


def test_a_run_that_comes_to_its_end() -> None:
    said = verdict(status(TWO, samples.run_state(phase=Phase.DRAINING, reason="budget spent")), RunFacts())
    assert said["text"] == "The run is ending (budget spent): the last deltas are being merged."


def test_a_finished_run() -> None:
    """It says what came of it, whoever is silent by now."""
    evaluation = samples.evaluation(loss=1.5, tokens=2000, final=True)
    state = samples.run_state(phase=Phase.FINISHED, tokens=2000, budget_tokens=2000, started_unix_s=1000.0)
    said = verdict(status([samples.seen("l0", age_s=40.0)], state, evaluation=evaluation), RunFacts(away_s=0))
    assert said == {
        "level": "over",
        "text": "The run is finished: 2000 tokens in 1:00, 40% of them merged; global loss 1.5000.",
        "do": "",
        "command": "",
    }


@pytest.mark.parametrize(
    ("reason", "budget", "how"),
    [
        ("stopped by the user", 5000, "was stopped at 40% of its budget (by the user)"),
        ("requested by `diloco finish`", 2001, "was stopped at 99% of its budget (requested by `diloco finish`)"),
        ("", 5000, "was stopped at 40% of its budget"),
        ("stopped by the user", 2000, "is finished"),
        ("the token budget is reached", 2000, "is finished"),
    ],
)
def test_a_run_that_was_stopped_before_its_budget(reason: str, budget: int, how: str) -> None:
    """By whom, and how far it was. One that reached it all the same is finished."""
    state = samples.run_state(
        phase=Phase.FINISHED, tokens=2000, budget_tokens=budget, started_unix_s=1000.0, reason=reason
    )
    said = verdict(status([samples.seen("l0", left=True)], state), RunFacts())
    assert said["text"].startswith(f"The run {how}: 2000 tokens in ")
    assert said["level"] == "over"


def test_nobody_is_left() -> None:
    said = verdict(status([samples.seen("l0", age_s=75.0)]), RunFacts())
    assert said["text"] == "There are no learners, so nothing is trained: l0 (silent for 1:15)."
    assert asked(said) == ("Start it again:", "diloco learner --run my-run --learner-id l0")
    said = verdict(status([samples.seen("l0", left=True)]), RunFacts())
    assert "all have left" in said["text"]
    assert asked(said) == ("Start one:", "diloco learner --run my-run")


def test_learners_in_loops_of_the_user_s_own_are_programs_of_the_user_s_own() -> None:
    """No command of ours starts one again, unless the launcher on this machine did; the syncer is ours all the same."""
    own = samples.spec()
    said = verdict(status([samples.seen("l0", age_s=75.0)], spec=own), RunFacts())
    assert asked(said) == (
        "Start it again: your own program, in run 'my-run', with DILOCO_LEARNER_ID=l0 (or learner_id='l0').",
        "",
    )
    said = verdict(status([samples.seen("l0", left=True)], spec=own), RunFacts())
    assert asked(said) == ("Start one: your own program, in run 'my-run'.", "")
    route = RedisRoute(own={"l0": LearnerLaunch(("--learner-id", "l0", "--threads", "3"))})
    said = verdict(status([samples.seen("l0", age_s=75.0)], spec=own), RunFacts(route=route))
    assert said["command"] == "diloco learner --run my-run --learner-id l0 --threads 3"
    assert verdict(status(TWO, syncers=(), spec=own), RunFacts())["command"] == SYNCER


def test_a_quorum_that_cannot_be_met() -> None:
    """It names who is missing; where nobody has died, how many to start."""
    seen = [samples.seen("l0"), *(samples.seen(f"l{n}", age_s=20.0) for n in range(1, 6))]
    said = verdict(status(seen, quorum=3), RunFacts())
    assert said["level"] == "bad"
    assert said["text"] == (
        "Nothing can be merged: a merge needs 3 learners, but 1 is live; missing: "
        "l1 (silent for 20 s), l2 (silent for 20 s), l3 (silent for 20 s) and 2 more."
    )
    again = "Start them again, each under its own name:"
    assert asked(said) == (again, "diloco learner --run my-run --learner-id l1")
    said = verdict(status(seen[:1], quorum=3), RunFacts())
    assert asked(said) == ("Start 2 more:", "diloco learner --run my-run")


STUCK = RunFacts(unmerged_s=90.0)


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_deltas_that_are_refused(reason: RefusalReason) -> None:
    """The reason that is most frequent, and what to do about it, in words that do not break off."""
    said = verdict(status(TWO), RunFacts(unmerged_s=90.0, refused={reason.value: 7, "other": 2}))
    assert said["text"] == f"Nothing has been merged for 1:30: deltas are refused, 7 of them as {reason.value}."
    remedy = REMEDIES.get(reason.value, "see `diloco tape` for the reasons")
    assert said["do"] == f"{remedy[:1].upper()}{remedy[1:]}."


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("merging", "the syncer is merging"),
        ("uploading", "the syncer is waiting for uploads"),
        ("grace", "a grace window is open"),
        ("collecting", "windows are waiting for more deltas"),
    ],
)
def test_a_window_that_does_not_come_to_its_end(state: str, why: str) -> None:
    """The window's own reason is said, with what to look at."""
    heads = [samples.head(0), samples.head(1, window=window(state, "1 of 2, waits for l1"))]
    said = verdict(status(TWO, heads=heads), STUCK)
    assert said["text"] == f"Nothing has been merged for 1:30: {why} (fragment 1: 1 of 2, waits for l1)."
    assert said["do"]


def test_no_delta_comes() -> None:
    said = verdict(status(TWO), STUCK)
    assert said["text"] == "Nothing has been merged for 1:30: no delta arrives, although 2 learners are training."
    still = [samples.seen("l0", step=0)]
    assert "no learner has taken a step yet" in verdict(status(still), STUCK)["text"]


def test_patience_is_some_rounds_of_the_usual_learner() -> None:
    """A round of minutes is no reason to worry after ten seconds."""
    slow = status([samples.seen("l0", step_s=20.0)], heads=[samples.head(p, version=40, interval=24) for p in range(2)])
    assert patience_s(slow) == 3 * 24 * 20.0
    assert verdict(slow, RunFacts(unmerged_s=600.0))["level"] == "well"
    assert patience_s(status(TWO)) == 10.0
    assert verdict(status(TWO), RunFacts(unmerged_s=11.0))["level"] == "bad"


def test_a_redis_that_is_nearly_full() -> None:
    said = verdict(status(TWO), RunFacts(redis_share=0.93))
    assert said["text"] == "Redis is 93% full: once it is completely full, nothing can be published or merged."
    assert "maxmemory" in said["do"]
    assert verdict(status(TWO), RunFacts())["level"] == "well"


def test_merges_that_do_not_keep_up() -> None:
    """The warning of `pacing.slow_merges` is the sentence."""
    heads = [samples.head(p, version=40, interval=4, window=window("idle", merge_s=60.0)) for p in range(2)]
    said = verdict(status(TWO, heads=heads), RunFacts())
    assert said["level"] == "note"
    assert said["text"].startswith("Merges are too slow for the learners' rounds (2 of 2 fragments")


def test_a_run_that_goes_on_without_a_learner() -> None:
    """Who is silent is named, and that nobody waits for it; whoever left in order is not missed."""
    seen = [*TWO, samples.seen("l2", age_s=12.0), samples.seen("l3", age_s=50.0, left=True)]
    said = verdict(status(seen), RunFacts())
    assert said["level"] == "note"
    assert said["text"].startswith(
        "The run continues without l2 (silent for 12 s), and no one is waiting: 2 learners train at"
    )
    assert asked(said) == ("Start it again:", "diloco learner --run my-run --learner-id l2")
    said = verdict(status([*seen, samples.seen("l4", age_s=12.0)]), RunFacts())
    assert asked(said) == ("Start them again, each under its own name:", "diloco learner --run my-run --learner-id l2")


def test_who_is_started_again_is_started_as_it_was() -> None:
    """With its settings, state and device, by the program that is there."""
    options = ("--config", "/runs/a run/settings.toml", "--learner-id", "l2", "--threads", "1")
    own = {"l2": LearnerLaunch(options, {"CUDA_VISIBLE_DEVICES": "3"})}
    route = RedisRoute("redis://h:1", program="/opt/diloco", own=own)
    said = verdict(status([*TWO, samples.seen("l2", age_s=12.0)]), RunFacts(route=route))
    assert said["command"] == (
        "CUDA_VISIBLE_DEVICES=3 /opt/diloco learner --run my-run --redis-url redis://h:1 "
        "--config '/runs/a run/settings.toml' --learner-id l2 --threads 1"
    )
    assert said["do"] == "Start it again on this page's machine:"
    own = {"l2": LearnerLaunch(options, folder="/home/an a")}
    said = verdict(status([*TWO, samples.seen("l2", age_s=12.0)]), RunFacts(route=RedisRoute("redis://h:1", own=own)))
    assert said["command"].startswith("cd '/home/an a' && diloco learner --run my-run ")


def test_who_can_be_started_from_everywhere_is_started_by_what_everybody_has() -> None:
    """The path of a program is of one machine."""
    route = RedisRoute("redis://h:1", program="/opt/diloco")
    said = verdict(status([*TWO, samples.seen("l2", age_s=12.0)]), RunFacts(route=route))
    assert asked(said) == ("Start it again:", "diloco learner --run my-run --redis-url redis://h:1 --learner-id l2")


def test_a_run_that_is_well() -> None:
    said = verdict(status(TWO, samples.run_state(tokens=2500)), RunFacts(unmerged_s=3.0, refused={"too_stale": 1}))
    assert said == {
        "level": "well",
        "text": "The run is well: 2 learners train at 200 tokens/s, of which 32% are merged; "
        "25% of the budget is done, about 38 s are left.",
        "do": "",
        "command": "",
    }
    new = status(TWO, heads=[samples.head(p) for p in range(2)])
    assert verdict(new, RunFacts())["text"] == (
        "The run has started well: 2 learners train at 200 tokens/s; the first deltas are on their way."
    )


FAR = "diloco learner --run my-run --redis-url redis://10.0.0.5:6379"


@pytest.mark.parametrize(
    ("url", "where", "command"),
    [
        ("redis://10.0.0.5:6379", "", FAR),
        ("redis://10.0.0.5", "", FAR),
        ("redis://10.0.0.5:7000/2", "", "diloco learner --run my-run --redis-url redis://10.0.0.5:7000/2"),
        ("redis://[fd00::5]:6379", "", "diloco learner --run my-run --redis-url 'redis://[fd00::5]:6379'"),
        (
            "redis://127.0.0.1:6379",
            " on this page's machine",
            "diloco learner --run my-run --redis-url redis://127.0.0.1:6379",
        ),
        (
            "unix:///tmp/a folder/redis.sock",
            " on this page's machine, as its user (other machines can join only a run that was started with "
            "--redis-port or --redis-url)",
            "diloco learner --run my-run --redis-url 'unix:///tmp/a folder/redis.sock'",
        ),
        (
            "redis://:hunter2@10.0.0.5:6379",
            ", with the password filled in",
            "DILOCO_REDIS_URL=redis://:PASSWORD@10.0.0.5:6379 diloco learner --run my-run",
        ),
        (
            "rediss://syncer:hunter2@db.example:6380/0?ssl_ca_certs=/home/me/hunter2.pem",
            ", with user and password filled in, and your FILE",
            "DILOCO_REDIS_URL=rediss://USER:PASSWORD@db.example:6380/0 DILOCO_REDIS_CA=FILE diloco learner "
            "--run my-run",
        ),
        (
            "redis://:<password>@<this machine>:6379",
            ", with the password filled in, with this page's machine for HOST",
            "DILOCO_REDIS_URL=redis://:PASSWORD@HOST:6379 diloco learner --run my-run",
        ),
        (
            "redis://10.0.0.5:6379?password=hunter2",
            ", with the password filled in",
            "DILOCO_REDIS_URL=redis://:PASSWORD@10.0.0.5:6379 diloco learner --run my-run",
        ),
        ("redis://10.0.0.5:port", "", "diloco learner --run my-run"),
    ],
)
def test_the_command_reaches_the_redis_of_the_run(url: str, where: str, command: str) -> None:
    """By its address, as the page's server knows it. A password is named and never shown."""
    said = verdict(status([samples.seen("l0", left=True)]), RunFacts(route=RedisRoute.of(url)))
    assert asked(said) == (f"Start one{where}:", command)
    assert "hunter2" not in str(said)
