"""When a live run is struck, and how: from `--kill learner:3s,syncer:7s/2s` and a seed to a list of strikes. Pure.

The times between two strikes of a kind are drawn from an exponential distribution, so that strikes of all kinds may
coincide. Each kind has a chance of its own: adding one leaves the others' times as they were.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from diloco.pipeline.errors import UsageError
from diloco.pipeline.units import parse_duration

LEAST_EVERY_S = 0.2
NOTHING = ("", "none")


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


class Party(StrEnum):
    """Whom a strike can hit."""

    LEARNER = "learner"
    SYNCER = "syncer"
    REDIS = "redis"


LENGTHS_S = {Manner.KILL: 1.0, Manner.PAUSE: 3.0, Manner.CUT: 2.0, Manner.HANG: 2.0}
"""How long a strike lasts if nothing else is said."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of strike: how often on average, and for how long."""

    manner: Manner
    party: Party
    every_s: float
    length_s: float


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

    def victim(self, candidates: Sequence[str]) -> str:
        """The one of `candidates` (at least one) that is hit."""
        return candidates[min(len(candidates) - 1, int(self.choice * len(candidates)))]


def parse(manner: Manner, text: str) -> list[Rule]:
    """Rules from `PARTY:EVERY[/LENGTH]`, several separated by commas; "none" or nothing: no rule.

    Raises:
        UsageError: naming the part that cannot be read, and what is allowed.
    """
    flag = f"--{manner.value}"
    rules: list[Rule] = []
    for part in [] if text.strip() in NOTHING else text.split(","):
        party, colon, times = part.strip().partition(":")
        if party not in list(Party) or not colon:
            raise UsageError(
                f"{flag} {part.strip()!r}: give PARTY:EVERY or PARTY:EVERY/LENGTH with a party of "
                f"{', '.join(Party)}, for instance {flag} learner:10s/2s"
            )
        every, slash, length = times.partition("/")
        every_s = _duration(flag, part, every)
        length_s = _duration(flag, part, length) if slash else LENGTHS_S[manner]
        if every_s < LEAST_EVERY_S:
            raise UsageError(f"{flag} {part.strip()!r}: every {every} is too often; at least {LEAST_EVERY_S:g}s")
        if any(rule.party == party for rule in rules):
            raise UsageError(f"{flag} names {party} twice: give each party once")
        rules.append(Rule(manner, Party(party), every_s, length_s))
    return rules


def _duration(flag: str, part: str, text: str) -> float:
    value = parse_duration(text)
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{flag} {part.strip()!r}: {text!r} is no length of time; for instance 500ms, 3s or 2m")
    return seconds


def draw(rules: Iterable[Rule], for_s: float, seed: int) -> list[Strike]:
    """All strikes of a run, in order of time; each is over by `for_s`."""
    strikes = []
    for rule in rules:
        chance = random.Random(f"{seed}/{rule.manner}/{rule.party}")
        at_s = chance.expovariate(1 / rule.every_s)
        while at_s < for_s:
            length_s = min(rule.length_s, for_s - at_s)
            strikes.append(Strike(at_s, rule.manner, rule.party, length_s, chance.random()))
            at_s += chance.expovariate(1 / rule.every_s)
    return sorted(strikes, key=lambda strike: strike.at_s)
