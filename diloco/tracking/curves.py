"""Turn what was read from a run into the points of its curves. Does no input or output.

The x axis is trained tokens for losses, and the round for merges; a round is a version that every fragment has
reached. Redis and the tape have them from the run's start. The current values (rates, fates of tokens, learners) are
drawn at the trained tokens of the poll that read them, and are not known for the time before the first poll.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from diloco.pipeline.messages.fragment import Committed, Rejected
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.page.last_poll import Reading
from diloco.pipeline.view.page.model import Poll

# Prefix of the curves whose x axis is the round; all others have trained tokens.
ROUND = "merges/"


class Point(NamedTuple):
    """One point of a curve."""

    tag: str
    step: int
    """Place on the x axis: trained tokens of the run, or a round."""
    value: float
    unix_s: float


def now(reading: Reading, poll: Poll) -> list[Point]:
    """Return the current values at a poll: tokens by fate, rates, each live learner, bytes of Redis.

    There are none before the first step. `poll` must be the last one that `reading` has seen.
    """
    status = poll.status
    learners = [one for one in reading.learners() if one["live"]]
    values: dict[str, float | None] = {
        "run/merged_share": status["merged_share"]["since_start"],
        "run/merged_share_recent": status["merged_share"]["recent"],
        "run/tokens_per_s": sum(one["tokens_per_s"] for one in learners),
        "run/learners": len(learners),
        "tokens/merged": status["merged_tokens"],
        "tokens/overwritten": status["tokens_lost"]["overwritten"],
        "tokens/rejected": status["tokens_lost"]["rejected"],
        "tokens/died": status["tokens_lost"]["died"],
        "tokens/pending": status["tokens_lost"]["pending"],
    }
    for one in learners:
        values[f"steps_per_s/{one['id']}"] = 1 / one["step_s"] if one["step_s"] else None
        values[f"staleness/{one['id']}"] = reading.behind(one)
    if poll.info is not None:
        values["redis/received_bytes"] = poll.info.received_bytes
        values["redis/sent_bytes"] = poll.info.sent_bytes
        values["redis/used_bytes"] = poll.info.used_bytes
    if not status["tokens"]:
        return []
    return [Point(tag, status["tokens"], value, poll.now_s) for tag, value in values.items() if value is not None]


class Losses:
    """Returns points of the learners' losses as their buckets end: the same curves as on the page."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}
        """By learner: Unix time and tokens of the last point."""
        self._at: tuple[float, int] | None = None
        """(Unix time, trained tokens) of the last poll."""

    def see(self, poll: Poll) -> list[Point]:
        """Return the points that are new at a poll, at most one for each number of tokens.

        Tokens between two polls are on a straight line; before the first one, on a line from where this part of the run
        began.
        """
        end_s, tokens, over = poll.now_s, poll.status["tokens"], poll.status["phase"] == Phase.FINISHED
        begin_s, before = self._at or (poll.began_s or end_s, poll.began_tokens)
        found = []
        for curve in sorted(poll.curves.values(), key=lambda one: one["begin_s"]):
            learner = curve["learner"]
            for n, loss in enumerate(curve["losses"]):
                at_s = curve["begin_s"] + (n + 1) * curve["every_s"]
                at_s = min(at_s, end_s) if over else at_s
                share = min(1.0, max(0.0, (at_s - begin_s) / max(end_s - begin_s, 1e-9)))
                step = round(before + share * (tokens - before))
                told_s, told = self._told.get(learner, (-math.inf, -1))
                if loss is not None and told_s < at_s <= end_s and told < step:  # later buckets are not full yet
                    found.append(Point(f"loss/{learner}", step, loss, at_s))
                    self._told[learner] = at_s, step
        self._at = end_s, tokens
        return found


class Rounds:
    """Collects merges from the tape, and returns points for each round."""

    def __init__(self) -> None:
        self._merges: dict[int, dict[int, Committed]] = defaultdict(dict)
        """Merges by version and fragment. If a version was merged again after Redis lost it, the later merge counts."""
        self._rejected: dict[int, float] = defaultdict(float)
        """Rejected tokens, times their fragment's share of the model, by the version that they were meant for."""
        self._told, self._told_s = 0, 0.0

    def see(self, poll: Poll) -> list[Point]:
        """Return points of the rounds that are complete. A round stays incomplete if the tape has dropped a merge."""
        if poll.started_over:
            self._merges.clear()
            self._rejected.clear()
        for one in poll.records:
            if one.version + isinstance(one, Rejected) <= self._told:
                continue  # made again after Redis lost its newest state: this round is written already
            if isinstance(one, Committed) and one.contributions:
                self._merges[one.version][one.fragment] = one
            elif isinstance(one, Rejected):
                self._rejected[one.version + 1] += one.lost_tokens * poll.shares.get(one.fragment, 0)
        found: list[Point] = []
        for version in sorted(self._merges):
            if poll.shares and self._merges[version].keys() >= poll.shares.keys():
                found += self._tell(version, poll.shares)
        return found

    def _tell(self, version: int, shares: Mapping[int, float]) -> list[Point]:
        merges = self._merges[version].values()
        at_s, parts = max(one.unix_s for one in merges), [part for one in merges for part in one.contributions]
        merged = sum(part.tokens * shares[one.fragment] for one in merges for part in one.contributions)
        values = {
            "learners": len(parts) / len(merges),
            "staleness": sum(max(0, version - 1 - part.base_version) for part in parts) / len(parts),
            "merged_tokens": merged,
            "rejected_tokens": self._rejected[version],
            "norm": sum(one.norm**2 for one in merges) ** 0.5,
            "merge_s": sum(one.merge_s for one in merges) / len(merges),
        }
        if len(steps := [one.step_norm for one in merges if one.step_norm is not None]) == len(merges):
            values["step_norm"] = sum(step**2 for step in steps) ** 0.5
        if rhos := [one.rho for one in merges if one.rho is not None]:
            values["rho"] = sum(rhos) / len(rhos)
        if self._told == version - 1 and at_s > self._told_s > 0:
            values["per_s"] = len(merges) / (at_s - self._told_s)
        self._told, self._told_s = version, at_s
        for past in (self._merges, self._rejected):
            for old in [one for one in past if one <= version]:
                del past[old]
        return [Point(ROUND + name, version, value, at_s) for name, value in values.items()]
