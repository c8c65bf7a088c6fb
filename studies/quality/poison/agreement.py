"""How far the learners of lab runs agreed, and who was at odds: what a result keeps of it. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import mean, median_low
from typing import Any

from diloco.pipeline.messages.tape import Committed


def agreement_of(commits: Sequence[Committed]) -> dict[str, Any]:
    """Of a run's merges, in their order.

    usual_cosine: the lower median of each merge's cosines, its mean over the first and the last quarter of them.
    cosines: learner -> mean of its cosine as a share of the usual one. at_odds: learner -> share of merges after which
    it was; first_at_odds: learner -> after how many merges it first was. clipped: contributions of a factor below 1.
    """
    merges = [one for one in commits if one.contributions]
    shares: dict[str, list[float]] = defaultdict(list)
    usual: list[float] = []
    for one in merges:
        found = {c.learner: c.cosine for c in one.contributions if c.cosine is not None}
        if found:
            usual.append(median_low(found.values()))
        if found and usual[-1] > 0:
            for learner, cosine in found.items():
                shares[learner].append(cosine / usual[-1])
    times = Counter(learner for one in merges for learner in one.at_odds)
    first = {learner: next(n for n, one in enumerate(merges, 1) if learner in one.at_odds) for learner in times}
    quarter = max(1, len(usual) // 4)
    return {
        "usual_cosine": [mean(usual[:quarter]), mean(usual[-quarter:])] if usual else [],
        "cosines": {learner: mean(values) for learner, values in sorted(shares.items())},
        "at_odds": {learner: count / len(merges) for learner, count in sorted(times.items())},
        "first_at_odds": first,
        "clipped": sum(c.factor < 1 for one in merges for c in one.contributions),
    }
