"""How far the learners of lab runs agreed, and who was at odds: what a result keeps of it. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import mean, median_low
from typing import Any

from diloco.pipeline.messages.tape import Committed
from diloco.syncer.standing import Standings

EARLY, LATE = 6, 12
"""Versions of a fragment."""


def agreement_of(commits: Sequence[Committed]) -> dict[str, Any]:
    """Of a run's merges, in their order.

    usual_cosine: the lower median of each merge's cosines, its mean up to version 6 and after version 12 (0: there was
    none). cosines: learner -> mean of its cosine as a share of the usual one; least_share: the least of any. standing:
    learner -> its lowest one. at_odds: learner -> share of merges after which it was; first_at_odds: learner -> after
    how many merges it first was. clipped: contributions of a factor below 1.
    """
    merges = [one for one in commits if one.contributions]
    shares: dict[str, list[float]] = defaultdict(list)
    usual: list[tuple[int, float]] = []
    standings, lowest = Standings(), dict[str, float]()
    for one in merges:
        found = {c.learner: c.cosine for c in one.contributions if c.cosine is not None}
        if found:
            usual.append((one.version, median_low(found.values())))
            standings.observe({c.learner: c.cosine for c in one.contributions})
            lowest |= {who: min(lowest.get(who, 1.0), standings.of(who)) for who in found}
        if found and usual[-1][1] > 0:
            for learner, cosine in found.items():
                shares[learner].append(cosine / usual[-1][1])
    times = Counter(learner for one in merges for learner in one.at_odds)
    first = {learner: next(n for n, one in enumerate(merges, 1) if learner in one.at_odds) for learner in times}
    early, late = [c for v, c in usual if v <= EARLY], [c for v, c in usual if v > LATE]
    return {
        "usual_cosine": [mean(early or [0.0]), mean(late or [0.0])] if usual else [],
        "least_share": min((min(values) for values in shares.values()), default=None),
        "standing": dict(sorted(lowest.items())),
        "cosines": {learner: mean(values) for learner, values in sorted(shares.items())},
        "at_odds": {learner: count / len(merges) for learner, count in sorted(times.items())},
        "first_at_odds": first,
        "clipped": sum(c.factor < 1 for one in merges for c in one.contributions),
    }
