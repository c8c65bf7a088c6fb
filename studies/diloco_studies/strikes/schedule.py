"""When a live run is struck, and how: from `--kill learner:3s,syncer:7s/2s` and a seed to a list of strikes. Pure.

The times between two strikes of a kind are drawn from an exponential distribution, so that strikes of all kinds may
coincide. Each kind has a chance of its own: adding one leaves the others' times as they were.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from diloco.pipeline.errors import UsageError
from diloco.pipeline.units import parse_span

MIN_EVERY_S = 0.2
NOTHING = ("", "none")
NEVER = "never"
"""Written for LENGTH: who is killed stays dead."""


class Manner(StrEnum):
    """What is done to the victim."""

    KILL = "kill"
    """SIGKILL, and started again when the strike is over."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT when the strike is over."""
    CUT = "cut"
    """Its connections to Redis are reset, and none is made until the strike is over."""
    HANG = "hang"
    """Its connections to Redis stay, but no byte moves until the strike is over."""
    PARTITION = "partition"
    """It is cut off from all but a part of the others, which is cut off with it."""


class Party(StrEnum):
    """Whom a strike can hit."""

    LEARNER = "learner"
    SYNCER = "syncer"
    REDIS = "redis"
    """The only one."""
    PRIMARY = "redis-primary"
    """A Redis that another one takes over from (`servers`)."""
    SENTINEL = "sentinel"


BUS = (Party.REDIS, Party.PRIMARY)
"""A strike on one of them is one on the bus."""


class Redis(StrEnum):
    """What a struck run has for a Redis."""

    ONE = "one"
    SENTINEL = "sentinel"
    """A primary with two replicas, and three sentinels."""
    CLUSTER = "cluster"
    """Three primaries with a replica each."""


LENGTHS_S = {Manner.KILL: 1.0, Manner.PAUSE: 3.0, Manner.CUT: 2.0, Manner.HANG: 2.0, Manner.PARTITION: 8.0}
"""How long a strike lasts if nothing else is said."""
DEAD_S = 6.0
"""The same of a killed `redis-primary`: longer than another one takes to take over."""
_CHILDREN = (Party.LEARNER, Party.SYNCER)
PARTIES: dict[Redis, dict[Manner, tuple[Party, ...]]] = {
    Redis.ONE: {**dict.fromkeys(Manner, (*_CHILDREN, Party.REDIS)), Manner.PARTITION: ()},
    Redis.SENTINEL: {
        Manner.KILL: (*_CHILDREN, Party.PRIMARY, Party.SENTINEL),
        Manner.PAUSE: (*_CHILDREN, Party.PRIMARY),
        Manner.PARTITION: (Party.PRIMARY,),
    },
    Redis.CLUSTER: {
        Manner.KILL: (*_CHILDREN, Party.PRIMARY),
        Manner.PAUSE: (*_CHILDREN, Party.PRIMARY),
        Manner.PARTITION: (Party.PRIMARY,),
    },
}
"""Whom each manner can hit, by what the run has for a Redis."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of strike: how often on average, and for how long."""

    manner: Manner
    party: Party
    every_s: float
    length_s: float
    """Infinite: who is killed stays dead."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike to come."""

    at_s: float
    """Since the first strike was possible."""
    manner: Manner
    party: Party
    length_s: float
    choice: float
    """In 0..1: which of those that can be hit."""

    @property
    def for_good(self) -> bool:
        """Who is killed stays dead."""
        return math.isinf(self.length_s)

    def victim(self, candidates: Sequence[str]) -> str:
        """The one of `candidates` (at least one) that is hit."""
        return candidates[min(len(candidates) - 1, int(self.choice * len(candidates)))]


def parse(manner: Manner, text: str, redis: Redis = Redis.ONE) -> list[Rule]:
    """Rules from `PARTY:EVERY[/LENGTH]`, several separated by commas; "none" or nothing: no rule.

    Raises:
        UsageError: naming the part that cannot be read, and what is allowed.
    """
    flag = f"--{manner.value}"
    allowed = PARTIES[redis].get(manner, ())
    rules: list[Rule] = []
    for part in [] if text.strip() in NOTHING else text.split(","):
        if not allowed:
            others = [kind.value for kind in Redis if PARTIES[kind].get(manner)]
            raise UsageError(f"{flag} {part.strip()!r} needs --redis {' or '.join(others)}, not {redis.value}")
        party, colon, times = part.strip().partition(":")
        if party not in allowed or not colon:
            raise UsageError(
                f"{flag} {part.strip()!r}: with --redis {redis.value}, give PARTY:EVERY or PARTY:EVERY/LENGTH with a "
                f"party of {', '.join(allowed)}, for instance {flag} {allowed[0]}:10s/2s"
            )
        every, slash, length = times.partition("/")
        every_s = _duration(flag, part, every)
        length_s = DEAD_S if (manner, party) == (Manner.KILL, Party.PRIMARY) else LENGTHS_S[manner]
        if slash and length.strip() == NEVER and manner is Manner.KILL and party not in (*_CHILDREN, Party.REDIS):
            length_s = math.inf
        elif slash:
            length_s = _duration(flag, part, length)
        if every_s < MIN_EVERY_S:
            raise UsageError(f"{flag} {part.strip()!r}: every {every} is too often; use at least {MIN_EVERY_S:g}s")
        if any(rule.party == party for rule in rules):
            raise UsageError(f"{flag} names {party} twice: give each party once")
        rules.append(Rule(manner, Party(party), every_s, length_s))
    return rules


def _duration(flag: str, part: str, text: str) -> float:
    value = parse_span(text)
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{flag} {part.strip()!r}: {text!r} is not a duration; use for instance 500ms, 3s or 2m")
    return seconds


def draw(rules: Iterable[Rule], for_s: float, seed: int) -> list[Strike]:
    """All strikes of a run, in order of time; each is over by `for_s`."""
    strikes = []
    for rule in rules:
        chance = random.Random(f"{seed}/{rule.manner}/{rule.party}")
        at_s = chance.expovariate(1 / rule.every_s)
        while at_s < for_s:
            length_s = rule.length_s if math.isinf(rule.length_s) else min(rule.length_s, for_s - at_s)
            strikes.append(Strike(at_s, rule.manner, rule.party, length_s, chance.random()))
            at_s += chance.expovariate(1 / rule.every_s)
    return sorted(strikes, key=lambda strike: strike.at_s)
