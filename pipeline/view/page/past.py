"""The history of a run before the page's first poll, from tape, reports and evaluations. Pure.

merged, rejected, merges   exact from the tape, as far back as it goes; earlier ones are added to the sums at its start
trained                    from reports: a straight line from an incarnation's first step to its last report
loss                       from evaluations
overwritten, died, pending only the current sums are known, so they are drawn from the first poll on
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from diloco.pipeline.messages.fragment import Committed, Rejected, TapeRecord
from diloco.pipeline.view.ledger import surviving
from diloco.pipeline.view.page.timeline import Timeline
from diloco.pipeline.view.status import Status

# (Unix time, increase) pairs.
Steps = list[tuple[float, float]]


def grown(
    records: Sequence[TapeRecord], heads: Iterable[tuple[int, int, bytes]], share: Mapping[int, float]
) -> Mapping[str, Steps]:
    """Return the increases by each record in tokens of the whole model, for merged, rejected, and merges.

    records: each fragment's in order. share: each fragment's share of the model.
    """
    merged: Steps = []
    merges: Steps = []
    for one in surviving(records, heads)[0]:
        if one.version and one.base_digest is not None:
            merges.append((one.unix_s, 1))
            merged.append((one.unix_s, sum(part.tokens for part in one.contributions) * share.get(one.fragment, 0)))
    rejected = [
        (one.unix_s, one.lost_tokens * share.get(one.fragment, 0)) for one in records if isinstance(one, Rejected)
    ]
    return {"merged": sorted(merged), "merges": sorted(merges), "rejected": sorted(rejected)}


def put_sums(times: Sequence[Timeline], grew: Mapping[str, Steps], now: Mapping[str, float], now_s: float) -> None:
    """Draw sums over time such that they end at their current values."""
    for name, steps in grew.items():
        total = now[name] - sum(by for _, by in steps)
        for one in times if steps else ():  # a bucket before the first, whose own sum is that at its end
            one.put(name, min(steps[0][0], now_s) - one.step_s, max(0, total))
        for at, by in steps:
            total += by
            _put(times, name, min(at, now_s), max(0, total))


def put_trained(times: Sequence[Timeline], status: Status, now_s: float) -> None:
    """Draw trained tokens over time: each incarnation's are a line from its first step to its last report."""
    slopes: dict[float, float] = defaultdict(float)
    end = 0.0
    for learner in status["learners"]:
        heard_s = min(now_s, now_s - learner["age_s"])
        began_s = heard_s - learner.get("wall_s", 0.0)
        if learner["tokens"] and heard_s > began_s:
            slopes[began_s] += learner["tokens"] / (heard_s - began_s)
            slopes[heard_s] -= learner["tokens"] / (heard_s - began_s)
            end += learner["tokens"]
    for one in times:
        total, slope, before_s = status["tokens"] - end, 0.0, min(slopes, default=now_s)
        bends = sorted(slopes.items())
        # Slide first. Otherwise buckets are drawn only to slide out again, which takes a second for each week that a
        # learner says it ran.
        one.reach(now_s)
        at_s = max(before_s, one.begins_s)
        while at_s < now_s:
            while bends and bends[0][0] <= at_s:
                bend_s, change = bends.pop(0)
                total += slope * (bend_s - before_s)
                before_s, slope = bend_s, slope + change
            one.put("tokens", at_s, max(0.0, total + slope * (at_s - before_s)))
            at_s += one.step_s


def _put(times: Sequence[Timeline], name: str, unix_s: float, value: float) -> None:
    for one in times:
        one.put(name, unix_s, value)


def notes(records: Sequence[TapeRecord], status: Status, began_s: float, now_s: float) -> list[str]:
    """Return readable notes about parts of the history that are not available."""
    found = []
    merged = [one for one in records if isinstance(one, Committed) and one.contributions]
    if status["outer_steps"] > len(merged):
        found.append(
            f"The tape on Redis has the last {len(merged)} of {status['outer_steps']} merges. Earlier merges count in "
            "the totals, but are not drawn: Redis keeps 10,000 entries for each fragment group with --tape-dir, and "
            "those of the last ten minutes without it."
        )
    if began_s < now_s - 5 and status["tokens"]:
        found.append(
            "Overwritten, died and pending tokens, bytes and Redis memory are known only from when this page's "
            "server began to poll. Before that, the trained tokens of each learner process are drawn as a straight "
            "line."
        )
    return found
