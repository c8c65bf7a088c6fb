"""One sentence on the state of a run and, if nothing is merged, the reason and a remedy. Pure.

Causes are checked in order, worse ones first, and ones that make later checks meaningless; the first that applies is
stated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypedDict

from diloco.pipeline.messages.run import Phase
from diloco.pipeline.units import count, counted, duration
from diloco.pipeline.view.page.join_command import RedisRoute
from diloco.pipeline.view.status import FragmentStatus, LearnerStatus, Status, is_missed, present

# Shorter silences of a server are not mentioned.
AWAY_S = 3.0
MIN_PATIENCE_S = 10.0
# If nothing was merged for this many rounds, something is wrong.
ROUNDS = 3
MAX_NAMED = 3
# Prefix of the warning of `pacing.slow_merges`.
SLOW = "merges are too slow"

# Remedies for refused deltas, by reason.
REMEDIES: Mapping[str, str] = {
    "non_finite": "their losses are NaN or infinite: lower the learning rate, or restart these learners",
    "merge_not_finite": "merging them would overflow: lower the outer learning rate",
    "absurd_norm": "their deltas are far from all others: check their data and learning rate",
    "too_stale": "they are more than a round behind the others: give them less work per step, or use a larger H",
    "wrong_layout": "their model differs from the run's: start them with the run's",
    "bad_payload": "their uploads arrive damaged or incomplete: check the network between them and Redis",
    "upload_timeout": "their uploads do not arrive in time: check their link to Redis",
    "bad_message": "they run a different build: start them with this one",
    "flood": "they send far more deltas than they train: start them with this build",
}


class Verdict(TypedDict):
    """The state of the run."""

    level: str
    """"well", "note", "bad", or "over"."""
    text: str
    do: str
    """The remedy; "" if none is needed."""
    command: str
    """A command to copy that does it; "" if there is none."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about the run that are not in its status."""

    away_s: float = 0.0
    """Seconds for which Redis has not answered."""
    away: str = ""
    """The error in place of an answer."""
    spoilt: bool = False
    """Redis answered, but its data cannot be read."""
    remedy: str = ""
    """The remedy for that, if known."""
    failed: str = ""
    """The error that prevented the page from being made."""
    unmerged_s: float = 0.0
    """Seconds since the last merge, or since the first step if there was none."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Deltas refused since then, by reason."""
    redis_share: float | None = None
    """Used share of Redis' memory, if it is nearly full."""
    route: RedisRoute = field(default_factory=RedisRoute)
    """How parties reach the run's Redis."""


def patience_s(status: Status) -> float:
    """Return how long a run may go without a merge: some rounds of the median learner at the longest interval."""
    steps = [one["step_s"] for one in status["learners"] if one["live"] and one["step_s"]]
    interval = max((one["interval"] for one in status["fragments"]), default=0)
    return max(MIN_PATIENCE_S, ROUNDS * interval * median(steps) if steps else 0.0)


def verdict(status: Status | None, facts: RunFacts) -> Verdict:
    """Return the sentence.

    status: the last one that could be read; None if there is none yet.
    """
    if facts.failed:
        return _bad(
            f"This page could not be created ({facts.failed}), so it does not know the state of the run.",
            "The page's server retries from time to time. Its log has the details for a bug report.",
        )
    if facts.spoilt and facts.away:
        do = (
            facts.remedy
            or "find out who writes it: a party with a different build, or one that does not belong to the run"
        )
        return _bad(
            f"The run's data on Redis cannot be read ({facts.away}), so its state is not known.",
            f"{do[0].upper()}{do[1:]}.",
        )
    if facts.away_s > AWAY_S or (status is None and facts.away):
        return _bad(
            f"Redis has not answered for {_time(facts.away_s)} ({facts.away}): learners continue to train, but "
            "nothing is merged.",
            "Check that Redis is running and can be reached from here; syncers and learners reconnect on their own.",
        )
    if status is None:
        return make_verdict("note", "Nothing is known about the run yet.")
    return _of_run(status, facts)


def _of_run(status: Status, facts: RunFacts) -> Verdict:
    learners = present(status["learners"])
    phase = status["phase"]
    live = [one for one in learners if one["live"]]
    if phase == Phase.FINISHED:
        return _finished(status)
    if not status["fragments"] and not status["tokens"]:
        return _not_begun(status, facts, learners)
    if phase == "waiting" and not (live or status["syncers"]):
        return _bad(
            "The run is idle: it has neither a syncer nor a learner.",
            *_start(status, facts, "syncer", "Start a syncer, then learners"),
        )
    if phase == "waiting":
        return _bad(f"Nothing is merged: {status['reason']}.", "")
    if not status["syncers"]:
        return _bad(
            f"Nothing is merged, since the run has no syncer; {_learners(len(live), 'is training', 'are training')}.",
            *_start(status, facts, "syncer"),
        )
    if phase in (Phase.DRAINING, Phase.CLOSING):
        return make_verdict("note", f"The run is ending ({status['reason']}): the last deltas are being merged.")
    if not live:
        return _bad(
            f"There are no learners, so nothing is trained: {_silent(learners) or 'all have left'}.",
            *_again(status, facts, learners),
        )
    quorum = max((one["window"]["quorum"] for one in status["fragments"]), default=1)
    if quorum > len(live):
        silent = _silent(learners)
        return _bad(
            f"Nothing can be merged: a merge needs {counted(quorum, 'learner')}, but {len(live)} {_is(len(live))} "
            f"live{f'; missing: {silent}' if silent else ''}.",
            *_again(status, facts, learners, f"Start {quorum - len(live)} more"),
        )
    if facts.unmerged_s > patience_s(status):
        return _nothing_merges(status, facts, live)
    return _merging(status, facts, learners, live)


def _not_begun(status: Status, facts: RunFacts, learners: Sequence[LearnerStatus]) -> Verdict:
    if not learners:
        here = "and a syncer is waiting" if status["syncers"] else "and there is no syncer"
        return make_verdict("note", f"The run has not started: no learner has joined, {here}.", *_start(status, facts))
    if not status["syncers"]:
        return _bad(
            f"{_learners(len(learners), 'is waiting', 'are waiting')} for a syncer: nothing can be merged without one.",
            *_start(status, facts, "syncer"),
        )
    return make_verdict("note", "The run is starting: its first learner is uploading the initial parameters.")


def _finished(status: Status) -> Verdict:
    share, loss = status["merged_share"]["since_start"], status["evaluation"]
    more = f", {share:.0%} of them merged" if share is not None else ""
    more += f"; global loss {loss['loss']:.4f}" if loss is not None else ""
    how = "is finished"
    if status["budget_tokens"] and status["progress"] < 1:
        why = status["reason"].removeprefix("stopped ")
        how = f"was stopped at {int(100 * status['progress'])}% of its budget{f' ({why})' if why else ''}"
    text = f"The run {how}: {count(status['tokens'])} tokens in {_time(status['elapsed_s'])}{more}."
    return make_verdict("over", text)


def _nothing_merges(status: Status, facts: RunFacts, live: Sequence[LearnerStatus]) -> Verdict:
    """Find the reason if learners train, a quorum and a syncer are present, and still nothing is merged."""
    since = f"Nothing has been merged for {_time(facts.unmerged_s)}"
    if facts.refused:
        reason, times = max(facts.refused.items(), key=lambda item: (item[1], item[0]))
        remedy = REMEDIES.get(reason, "see `diloco tape` for the reasons")
        return _bad(
            f"{since}: deltas are refused, {times} of them as {reason}.",
            f"{remedy[:1].upper()}{remedy[1:]}.",
        )
    still = [one["id"] for one in live if not one["step"]]
    if len(still) == len(live):
        return _bad(
            f"{since}: no learner has taken a step yet.", "Check their logs: they are waiting for data or devices."
        )
    by_state: dict[str, list[FragmentStatus]] = {}
    for fragment in status["fragments"]:
        by_state.setdefault(fragment["window"]["state"], []).append(fragment)
    for state, why, do in (
        ("merging", "the syncer is merging", "Check its log, and whether its machine is busy (doc: watch.md)."),
        ("uploading", "the syncer is waiting for uploads", "Check the links between these learners and Redis."),
        ("grace", "a grace window is open", "Check the syncer's log: a grace window lasts at most a few steps."),
        ("collecting", "windows are waiting for more deltas", "Check the logs of the learners that are not in them."),
    ):
        if there := by_state.get(state):
            fragment = there[0]
            text = f"{since}: {why} (fragment {fragment['id']}: {fragment['window']['reason']})."
            return _bad(text, do)
    return _bad(
        f"{since}: no delta arrives, although {_learners(len(live), 'is training', 'are training')}.",
        "Check the learners' logs: their links to Redis may be down or too slow.",
    )


def _merging(
    status: Status, facts: RunFacts, learners: Sequence[LearnerStatus], live: Sequence[LearnerStatus]
) -> Verdict:
    """Return that the run is well, or a note on something that needs attention."""
    if facts.redis_share is not None:
        return make_verdict(
            "note",
            f"Redis is {facts.redis_share:.0%} full: once it is completely full, nothing can be published or merged.",
            "Raise its maxmemory; `diloco plan` shows what the run needs.",
        )
    if slow := next((one for one in status["warnings"] if one.startswith(SLOW)), ""):
        return make_verdict("note", f"{slow[:1].upper()}{slow[1:]}.")
    speed = sum(one["tokens_per_s"] for one in live)
    at = f"{_learners(len(live))} at {count(speed)} tokens/s"
    if not status["outer_steps"]:
        return make_verdict("well", f"The run has started well: {at}; the first deltas are on their way.")
    share = status["merged_share"]["recent"] or status["merged_share"]["since_start"]
    merged = f", of which {share:.0%} are merged" if share is not None else ""
    rest = ""
    if status["budget_tokens"] and speed:
        left_s = (1 - status["progress"]) * status["budget_tokens"] / speed
        rest = f"; {status['progress']:.0%} of the budget is done, about {_time(left_s)} are left"
    if silent := _silent(learners):
        text = f"The run continues without {silent}, and no one is waiting: {at}{merged}{rest}."
        return make_verdict("note", text, *_again(status, facts, learners))
    return make_verdict("well", f"The run is well: {at}{merged}{rest}.")


# --- words ---------------------------------------------------------------------------------------------


def make_verdict(level: str, text: str, do: str = "", command: str = "") -> Verdict:
    """Return a verdict."""
    return Verdict(level=level, text=text, do=do, command=command)


def _bad(text: str, do: str, command: str = "") -> Verdict:
    return make_verdict("bad", text, do, command)


def _start(
    status: Status, facts: RunFacts, party: str = "learner", what: str = "Start one", again: str = ""
) -> tuple[str, str]:
    """Return a remedy and the command for it; no command for learners that are the user's own programs."""
    program, command = facts.route.start(party, status["run"], again, status["own_loop"])
    where = facts.route.from_where(again) + (" (FOLDER has the run's checkpoints)" if party == "syncer" else "")
    return f"{what}: {program}." if program else f"{what}{where}:", command


def _again(
    status: Status, facts: RunFacts, learners: Sequence[LearnerStatus], otherwise: str = "Start one"
) -> tuple[str, str]:
    """Return `_start` for the first silent learner, or with `otherwise` as the remedy if there is none."""
    gone = [one["id"] for one in learners if is_missed(one)]
    if not gone:
        return _start(status, facts, what=otherwise)
    what = "Start it again" if len(gone) == 1 else "Start them again, each under its own name"
    return _start(status, facts, what=what, again=gone[0])


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _learners(count: int, one: str = "trains", more: str = "train") -> str:
    return f"{counted(count, 'learner')} {one if count == 1 else more}"


def _silent(learners: Sequence[LearnerStatus]) -> str:
    """Return for example 'learner-1 (silent for 0:12) and 2 more'."""
    gone = [f"{one['id']} (silent for {_time(one['age_s'])})" for one in learners if is_missed(one)]
    named = ", ".join(gone[:MAX_NAMED])
    return named if len(gone) <= MAX_NAMED else f"{named} and {len(gone) - MAX_NAMED} more"


def _time(seconds: float) -> str:
    """Format seconds as '12 s', '2:03', '1:02:03'."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)
