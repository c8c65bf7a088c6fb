"""The plan of strikes: read from flags, drawn from a seed."""

import itertools
import math

import pytest

from diloco.pipeline.errors import UsageError
from diloco_studies.strikes.schedule import DEAD_S, LENGTHS_S, Manner, Party, Redis, Rule, Strike, draw, parse


def test_flags_become_rules_with_lengths_of_their_own_or_the_usual_one() -> None:
    assert parse(Manner.KILL, "learner:3s, syncer:500ms/250ms,redis:1m/10s") == [
        Rule(Manner.KILL, Party.LEARNER, 3.0, LENGTHS_S[Manner.KILL]),
        Rule(Manner.KILL, Party.SYNCER, 0.5, 0.25),
        Rule(Manner.KILL, Party.REDIS, 60.0, 10.0),
    ]
    assert parse(Manner.PAUSE, "learner:20")[0].length_s == LENGTHS_S[Manner.PAUSE]


@pytest.mark.parametrize("text", ["", " ", "none"])
def test_nothing_is_a_plan_too(text: str) -> None:
    assert parse(Manner.CUT, text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker:3s", "learner, syncer, redis"),
        ("learner", "PARTY:EVERY"),
        ("learner:soon", "'soon' is not a duration"),
        ("learner:3s/-1s", "'-1s' is not a duration"),
        ("learner:nan", "'nan' is not a duration"),
        ("learner:10ms", "too often"),
        ("learner:3s,learner:4s", "names learner twice"),
        ("learner:3s,", "PARTY:EVERY"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        parse(Manner.KILL, text)
    assert "--kill" in str(refused.value)


def test_the_same_seed_draws_the_same_strikes_and_another_one_others() -> None:
    rules = parse(Manner.KILL, "learner:3s,redis:20s")
    assert draw(rules, 120, 7) == draw(rules, 120, 7)
    assert draw(rules, 120, 7) != draw(rules, 120, 8)


def test_another_kind_of_strike_leaves_the_others_where_they_were() -> None:
    alone = draw(parse(Manner.KILL, "learner:3s"), 60, 1)
    both = draw([*parse(Manner.PAUSE, "learner:5s"), *parse(Manner.KILL, "syncer:2s,learner:3s")], 60, 1)
    assert [s for s in both if (s.manner, s.party) == (Manner.KILL, Party.LEARNER)] == alone


def test_strikes_come_in_order_as_often_as_asked_and_are_over_in_time() -> None:
    strikes = draw(parse(Manner.KILL, "learner:3s/4s"), 3000, 0)
    assert 900 < len(strikes) < 1100
    assert all(early.at_s <= late.at_s for early, late in itertools.pairwise(strikes))
    assert all(strike.at_s + strike.length_s <= 3000 for strike in strikes)
    assert any(strike.length_s == 4 for strike in strikes)


def test_every_candidate_can_be_hit_and_nobody_else() -> None:
    names = ["a", "b", "c"]
    hit = {Strike(0, Manner.KILL, Party.LEARNER, 1, choice).victim(names) for choice in (0.0, 0.34, 0.67, 0.999, 1.0)}
    assert hit == set(names)


# --- servers that fail over ------------------------------------------------------------------------------


def test_a_killed_primary_is_dead_for_longer_than_a_failover_takes_or_for_good() -> None:
    assert parse(Manner.KILL, "redis-primary:20s,sentinel:9s/never", Redis.SENTINEL) == [
        Rule(Manner.KILL, Party.PRIMARY, 20.0, DEAD_S),
        Rule(Manner.KILL, Party.SENTINEL, 9.0, math.inf),
    ]
    strikes = draw(parse(Manner.KILL, "redis-primary:5s/never", Redis.CLUSTER), 60, 1)
    assert strikes
    assert all(strike.for_good for strike in strikes)


@pytest.mark.parametrize(
    ("manner", "text", "redis", "said"),
    [
        (Manner.KILL, "redis-primary:9s", Redis.ONE, "with --redis one, give PARTY"),
        (Manner.KILL, "redis:9s", Redis.SENTINEL, "party of learner, syncer, redis-primary, sentinel"),
        (Manner.KILL, "sentinel:9s", Redis.CLUSTER, "party of learner, syncer, redis-primary,"),
        (Manner.KILL, "learner:9s/never", Redis.CLUSTER, "'never' is not a duration"),
        (Manner.PAUSE, "redis-primary:9s/never", Redis.SENTINEL, "'never' is not a duration"),
        (Manner.CUT, "learner:9s", Redis.SENTINEL, "needs --redis one, not sentinel"),
        (Manner.PARTITION, "redis:9s", Redis.ONE, "needs --redis sentinel or cluster, not one"),
        (Manner.PARTITION, "learner:9s", Redis.SENTINEL, "party of redis-primary"),
    ],
)
def test_whom_a_strike_can_hit_depends_on_what_the_run_has_for_a_redis(
    manner: Manner, text: str, redis: Redis, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        parse(manner, text, redis)
