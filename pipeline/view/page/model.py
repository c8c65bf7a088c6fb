"""The page's model: the data about a run that a browser gets, as one snapshot and patches to it. Pure.

`see` takes one poll of the run; `snapshot` and `patch` return the result, JSON-able and of bounded size. Names and
reasons in it are text from other parties: the page shows them as text, never as HTML.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.messages.fragment import Committed, Rejected, TapeRecord, WindowChanged
from diloco.pipeline.messages.run import REDIS_CHANGED, Evaluation, Event, Phase
from diloco.pipeline.view.goodput import Seconds
from diloco.pipeline.view.loss_curves import LossCurve
from diloco.pipeline.view.page import past
from diloco.pipeline.view.page.join_command import RedisRoute
from diloco.pipeline.view.page.lanes import LearnerBits, LearnerLife, Shown, WindowLife, draw_record
from diloco.pipeline.view.page.syncer_lives import Mark, SyncerLives
from diloco.pipeline.view.page.timeline import Timeline
from diloco.pipeline.view.page.verdict import RunFacts, Verdict, make_verdict, verdict
from diloco.pipeline.view.status import LearnerStatus, Status, present, speed

# Bucket length in seconds: of the last minutes, always; of the whole run, at first.
FINE_S, COARSE_S = 0.5, 0.25
# The most learners, and the most fragments, with a lane. Sums include all.
MAX_LANES = 512
MAX_MARKS = 400
MAX_LOSSES = 2000
# A learner that was heard from this shortly before the end of a finished run has not gone silent.
ENDING_S = 10.0
# If a run claims to have begun earlier, only this much of it is drawn.
OLDEST_S = 400 * 86400.0
# Events that are marked on the page, with their labels.
NAMES = {
    "learner_joined": "joined",
    "learner_started": "started again",
    "learner_left": "left",
    "learner_killed": "killed",
    "learner_died": "died",
    "learner_broken": "has lost a rank",
    "syncer_died": "died",
    "evaluator_died": "died",
    REDIS_CHANGED: "failed over or was restarted",
}
# Events after which a learner falls silent, so that its silence is not marked as well.
ENDS = ("learner_killed", "learner_died")

Model = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Poll:
    """The result of one poll of a run: its current state, and what is new since the last poll."""

    now_s: float
    """Unix time."""
    status: Status
    started_over: bool = False
    """Another server is there, which lacks some of what was read before: this poll has everything from the start."""
    info: BusInfo | None = None
    nearly_full: bool = False
    """Redis' memory is nearly full, by `server.fill_of_run`."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """Each fragment's share of the model."""
    heads: Sequence[tuple[int, int, bytes]] = ()
    """(fragment, version, digest)"""
    began_s: float | None = None
    """When the run's first learner began, from the run's state."""
    began_tokens: int = 0
    """Tokens trained before that, by the run that this one resumed."""
    origin_s: float | None = None
    """The same for the run that this one resumed, if any, whose sums it continues."""
    records: Sequence[TapeRecord] = ()
    """Tape records since the last poll; each fragment's are in order."""
    events: Sequence[Event] = ()
    evaluations: Sequence[Evaluation] = ()
    curves: Mapping[str, LossCurve] = field(default_factory=dict)
    """Training losses, by 'learner/incarnation'."""


class PageModel:
    """One run as the page shows it."""

    def __init__(self, run: str, route: RedisRoute | None = None) -> None:
        """Create an empty model; `route` says how parties reach the run's Redis."""
        self._run, self._route = run, route or RedisRoute()
        self._times: tuple[Timeline, Timeline] | None = None
        """Timelines of the last minutes and of the whole run."""
        self._shown, self._lives = Shown(MAX_LANES), dict[str, LearnerLife]()
        self._windows: dict[int, WindowLife] = {}
        self._syncers = SyncerLives()
        self._outer: dict[str, float] = {}
        """Smoothed values of the outer steps, as drawn last."""
        self._marks: deque[Model] = deque(maxlen=MAX_MARKS)
        self._losses: list[tuple[float, int, float]] = []
        self._began: dict[str, float] = {}
        """When each curve begins, as first seen: later reports differ by their delays."""
        self._refused: Counter[str] = Counter()
        """Since the last merge."""
        self._still_s: float | None = None
        """Time since when nothing was merged although learners train."""
        self._outer_steps = 0
        self._began_s: float | None = None
        self._origin_s: float | None = None
        """When the run began: 0:00 on the page."""
        self._ended_s: dict[str, float] = {}
        self._drawn_s = 0.0
        """Time up to which the run is drawn."""
        self._status: Status | None = None
        self.over = False
        """The run was finished at the last poll."""
        self._notes: list[str] = []
        self._now: Model = {}
        """The state after the last patch."""
        self._new_marks: list[Model] = []
        self._losses_anew, self._new_losses = False, list[tuple[float, int, float]]()
        self._next: Model = self._head(make_verdict("note", "Nothing is known about the run yet."), 0.0)

    # --- looking ------------------------------------------------------------------------------------------

    def see(self, poll: Poll) -> None:
        """Take a poll."""
        over = poll.status["phase"] == Phase.FINISHED
        if over and self.over and not (poll.records or poll.events or poll.evaluations):
            return  # a finished run no longer changes
        self.over = over
        if over:
            poll = _at_its_end(poll, self._drawn_s)
        now_s, status = poll.now_s, poll.status
        self._drawn_s = now_s
        if self._times is None:
            self._begin(poll)
        assert self._times is not None  # noqa: S101  # `_begin` has set it
        for record in poll.records:
            draw_record(self._times, record, self._shown, now_s)
            if isinstance(record, Committed) and record.contributions:
                self._draw_outer_step(record, len(status["fragments"]), now_s)
            if isinstance(record, WindowChanged) and self._shown.fragment(record.fragment):
                window = self._windows.setdefault(record.fragment, WindowLife())
                window.opened = record.version, min(record.unix_s, now_s)
        if poll.began_s is not None:
            if poll.began_s != self._began_s and (poll.origin_s or poll.began_s) < poll.began_s:
                self._mark(
                    Mark(min(poll.began_s, now_s), "was resumed", "the run", status["reason"].partition("resumed ")[2])
                )
            elif self._status is not None and poll.origin_s == poll.began_s:  # it has begun since the last poll
                for one in self._times:
                    one.put("merges", poll.began_s, 0.0)
            self._began_s, self._origin_s = poll.began_s, min(poll.began_s, now_s)
        self._count(poll)
        for event in poll.events:
            if event.name in NAMES:
                self._mark(Mark(min(event.unix_s, now_s), NAMES[event.name], event.who, event.detail))
                if event.name in ENDS and len(self._ended_s) < MAX_LANES:
                    self._ended_s[event.who] = event.unix_s if self._status is None else now_s
                elif event.name == "syncer_died":
                    self._syncers.died(event.who)
        for mark in self._syncers.see(status, poll.records, now_s):
            self._mark(mark)
        self._take_losses(poll.evaluations, now_s)
        learners = self._draw_learners(status, now_s)
        for fragment in status["fragments"]:
            if self._shown.fragment(fragment["id"]):
                self._windows.setdefault(fragment["id"], WindowLife()).draw(self._times, fragment, now_s)
        info = poll.info
        # While fragments are restored from a checkpoint, its merges and tokens appear one by one: that is not growth.
        begun = poll.began_s is not None and len(status["fragments"]) >= len(poll.shares)
        sums = _sums(status) if begun else {}
        for name, value in {**sums, **_of_server(info)}.items():
            for one in self._times:
                one.put(name, now_s, value)
        self._status = status
        full = info.fullest[0] / info.fullest[1] if info is not None and poll.nearly_full else None
        unmerged_s = 0.0 if self._still_s is None else now_s - self._still_s
        facts = RunFacts(unmerged_s=unmerged_s, refused=self._refused, redis_share=full, route=self._route)
        self._next = self._head(verdict(status, facts), now_s) | {
            "totals": _totals(status, info),
            "learners": learners,
            "fragments": _fragments(status, now_s),
            "curves": self._with_first_begin(poll.curves),
            "syncers": [
                {"id": one["id"], "leads": one["leads"], "fragments": len(one["fragments"])}
                for one in status["syncers"][:MAX_LANES]
            ],
        }

    def away(self, now_s: float, since_s: float, error: str, spoilt: bool = False, remedy: str = "") -> None:
        """Note that the bus could not be read; ignored if the run is over. Arguments are as in `RunFacts`."""
        if self.over:
            return
        facts = RunFacts(away_s=max(0.0, now_s - since_s), away=error, spoilt=spoilt, remedy=remedy)
        self._next = self._next | self._head(verdict(self._status, facts), now_s)

    def failed(self, now_s: float, error: str) -> None:
        """Note that a bug prevented a poll from being shown."""
        self._next = self._next | self._head(verdict(None, RunFacts(failed=error)), now_s)

    def _begin(self, poll: Poll) -> None:
        """Draw what happened before the first poll."""
        now_s, status = poll.now_s, poll.status
        firsts = [one.unix_s for one in (*poll.records, *poll.events, *poll.evaluations)]
        firsts += [now_s - one["age_s"] - one.get("wall_s", 0.0) for one in status["learners"]]
        firsts += [poll.began_s] if poll.began_s else []
        began_s = max(now_s - OLDEST_S, min(firsts, default=now_s))
        began_s = min(began_s, now_s)
        self._times = Timeline(began_s, FINE_S, sliding=True), Timeline(began_s, COARSE_S, sliding=False)
        if status["learners"] or poll.records:
            self._notes = past.notes(poll.records, status, began_s, now_s)
        if poll.shares:
            sums = {name: value or 0.0 for name, value in _sums(status).items()}
            past.put_sums(self._times, past.grown(poll.records, poll.heads, poll.shares), sums, now_s)
            past.put_trained(self._times, status, now_s)
        newest = {one["incarnation"] for one in present(status["learners"])}
        for learner in sorted(status["learners"], key=lambda one: -one["age_s"]):
            if learner["incarnation"] not in newest and self._shown.learner(learner["id"]):
                self._lives.setdefault(learner["id"], LearnerLife()).begin(self._times, learner, now_s)

    def _count(self, poll: Poll) -> None:
        """Track since when nothing was merged although learners train, and what was refused meanwhile."""
        steps = poll.status["outer_steps"]
        trains = any(one["live"] and one["step"] for one in poll.status["learners"])
        for record in poll.records:
            if isinstance(record, Rejected):
                self._refused[record.reason.value] += 1
            elif isinstance(record, Committed) and record.contributions:
                self._refused.clear()
        if self._still_s is None:
            merged = (one.unix_s for one in poll.records if isinstance(one, Committed))
            self._still_s = min(poll.now_s, max(merged, default=poll.began_s or poll.now_s))
        elif steps != self._outer_steps or not trains:
            self._still_s = poll.now_s
        self._outer_steps = steps

    def _draw_learners(self, status: Status, now_s: float) -> Model:
        """Draw the learners' lanes, and return their rows by name."""
        assert self._times is not None  # noqa: S101  # `_begin` has set it
        lives = Counter(one["id"] for one in status["learners"])
        over = status["phase"] == Phase.FINISHED
        end_s = now_s if self._began_s is None else self._began_s + status["elapsed_s"]
        heads = {one["id"]: one["version"] for one in status["fragments"]}
        members = {name for one in status["fragments"] for name in one["window"]["members"]}
        rows: Model = {}
        time = status["goodput"]["learners"]
        for learner in present(status["learners"]):
            name = learner["id"]
            if not self._shown.learner(name):
                continue
            behind = sum(version < heads.get(p, version) for p, version in enumerate(learner["versions"]))
            life = self._lives.setdefault(name, LearnerLife())
            heard_s = now_s - learner["age_s"]
            ended = over and heard_s > end_s - ENDING_S
            does = life.draw(self._times, learner, name in members, behind, now_s, ended)
            gaps, life.gaps = life.gaps, []
            if not (learner["live"] or learner["left"] or ended):
                gaps.append(heard_s)
            for gap_s in gaps:
                if self._ended_s.get(name, -math.inf) < gap_s:  # no event has said that it ended
                    self._mark(Mark(gap_s, "went silent", name))
            if gaps:
                self._ended_s[name] = now_s
            rows[name] = _learner(learner, does, behind, lives[name], now_s, time.get(name, {}))
        return rows

    def _draw_outer_step(self, merge: Committed, fragments: int, now_s: float) -> None:
        """Draw effective rate and cosines of a merge, smoothed over about one merge of each fragment."""
        assert self._times is not None  # noqa: S101  # `_begin` has set it
        cosines = [part.cosine for part in merge.contributions if part.cosine is not None]
        values = {"outer_rate": merge.outer_rate, "rho": merge.rho, "cosine": fmean(cosines) if cosines else None}
        for name, value in values.items():
            if value is not None:
                before = self._outer.get(name, value)
                self._outer[name] = before + (value - before) / max(1, fragments)
                for one in self._times:
                    one.put(name, min(merge.unix_s, now_s), self._outer[name])

    def _mark(self, mark: Mark) -> None:
        found = {"at_s": round(mark.at_s, 2), "what": mark.what, "who": mark.who[:64], "detail": mark.detail[:200]}
        self._marks.append(found)
        self._new_marks.append(found)

    def _take_losses(self, evaluations: Sequence[Evaluation], now_s: float) -> None:
        for one in evaluations:
            if math.isfinite(one.loss):
                point = (round(min(one.unix_s, now_s), 2), one.tokens, one.loss)
                self._losses.append(point)
                self._new_losses.append(point)
        if len(self._losses) > MAX_LOSSES:
            self._losses = self._losses[-1::-2][::-1]
            self._losses_anew = True

    def _with_first_begin(self, curves: Mapping[str, LossCurve]) -> dict[str, LossCurve]:
        self._began = {name: self._began.get(name, one["begin_s"]) for name, one in curves.items()}
        return {name: one | {"begin_s": self._began[name]} for name, one in curves.items()}

    # --- telling ------------------------------------------------------------------------------------------

    def _head(self, sentence: Verdict, now_s: float) -> Model:
        return {
            "run": self._run,
            "now_s": round(now_s, 3),
            "origin_s": self._origin_s,
            "sentence": sentence,
            "notes": self._notes,
        }

    def snapshot(self) -> Model:
        """Return everything as of the last patch; before the first one there are no rows or totals."""
        fine, coarse = self._times or (None, None)
        return self._now | {
            "marks": list(self._marks),
            "losses": self._losses,
            "fine": None if fine is None else fine.whole(),
            "coarse": None if coarse is None else coarse.whole(),
        }

    def patch(self) -> Model:
        """Return what changed since the last patch. Rows are by name, with changed fields only; null: a row is gone."""
        before, now = self._now, self._next
        found: Model = {"now_s": now["now_s"]}
        for name, value in now.items():
            if name in ("learners", "fragments", "curves"):
                differs = _changed_curves if name == "curves" else _changed
                if changed := differs(before.get(name, {}), value):
                    found[name] = changed
            elif before.get(name) != value:
                found[name] = value
        if self._new_marks:
            found["marks"] = self._new_marks
        if self._losses_anew:
            found["losses_anew"] = self._losses
        elif self._new_losses:
            found["losses"] = self._new_losses
        if self._times is not None:
            found["fine"], found["coarse"] = (one.patch() for one in self._times)
        self._now, self._new_marks, self._losses_anew, self._new_losses = now, [], False, []
        return found


def _at_its_end(poll: Poll, drawn_s: float) -> Poll:
    """Return a poll of a finished run as if taken at its end, so that time is drawn up to there.

    The end is the latest time known of the run, and not before `drawn_s`.
    """
    if poll.began_s is None:
        return poll
    told = [one.unix_s for one in (*poll.records, *poll.events, *poll.evaluations)]
    end_s = min(poll.now_s, max(poll.began_s + poll.status["elapsed_s"], drawn_s, *told))
    learners = [one.copy() for one in poll.status["learners"]]
    for one in learners:
        one["age_s"] = max(0.0, one["age_s"] - (poll.now_s - end_s))
    status = poll.status.copy()
    status["learners"] = learners
    return replace(poll, now_s=end_s, status=status)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Model:
    found: Model = {name: None for name in before if name not in now}
    for name, row in now.items():
        old = before.get(name)
        if old is None:
            found[name] = row
        elif old != row:
            found[name] = {field: value for field, value in row.items() if old[field] != value}
    return found


def _changed_curves(before: Mapping[str, LossCurve], now: Mapping[str, LossCurve]) -> Model:
    """Return what changed: whole curves, or only the buckets from the last one that was told on ("from")."""
    found: Model = {name: None for name in before if name not in now}
    for name, curve in now.items():
        old = before.get(name)
        if old is None or old["every_s"] != curve["every_s"] or not old["losses"]:
            found[name] = curve
        elif old["losses"] != curve["losses"]:
            last = len(old["losses"]) - 1
            found[name] = {"from": last, "losses": curve["losses"][last:]}
    return found


def _notable(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the shares that are not nearly 0, greatest first, to a tenth of a percent."""
    return {name: round(share, 3) for name, share in sorted(shares.items(), key=lambda one: -one[1]) if share >= 0.0005}


def _learner(
    learner: LearnerStatus, does: LearnerBits, behind: int, lives: int, now_s: float, seconds: Seconds
) -> Model:
    total_s = sum(seconds.values())
    state = "left" if learner["left"] else "live" if learner["live"] else "dead"
    return {
        "state": "silent" if state == "live" and does & LearnerBits.GONE else state,
        "does": int(
            does & (LearnerBits.TRAINING | LearnerBits.PUBLISHING | LearnerBits.ADOPTING | LearnerBits.WAITING)
        ),
        "step": learner["step"],
        "tokens": learner["tokens"],
        "tokens_per_s": round(learner["tokens_per_s"]),
        "step_s": float(f"{learner['step_s']:.3g}"),
        "loss": learner["loss"],
        "heard_s": round(now_s - learner["age_s"], 1),
        "time": _notable({name: s / total_s for name, s in seconds.items()}) if total_s else {},
        "behind": behind,
        "version": max(learner["versions"], default=-1),
        "lives": lives,
        "host": learner.get("host", "")[:64],
        "device": learner.get("device", "")[:64],
    }


def _fragments(status: Status, now_s: float) -> Model:
    owners = {p: one["id"] for one in status["syncers"] for p in one["fragments"]}
    rows: Model = {}
    for fragment in status["fragments"][:MAX_LANES]:
        window = fragment["window"]
        left_s = window["deadline_in_s"]
        rows[str(fragment["id"])] = {
            "version": fragment["version"],
            "state": window["state"],
            "members": len(window["members"]),
            "quorum": window["quorum"],
            "expected": window["expected"],
            "until_s": None if left_s is None else round(now_s + left_s, 1),
            "reason": window["reason"],
            "attempt": window["attempt"],
            "interval": fragment["interval"],
            "asked_interval": fragment["asked_interval"],
            "merge_s": float(f"{window['merge_s']:.3g}"),
            "outer_s": float(f"{window['outer_s']:.3g}"),
            "refused": sum(fragment["refused"].values()),
            "suspected": len(window["suspected"]),
            "averaged": fragment["averaged"],
            "owner": owners.get(fragment["id"], ""),
        }
    return rows


def _sums(status: Status) -> dict[str, float | None]:
    """Return the numbers that are drawn over time."""
    return {
        "tokens": status["tokens"],
        "merged": status["merged_tokens"],
        **status["tokens_lost"],  # type: ignore[dict-item]  # a TypedDict of ints
        "merges": status["outer_steps"],
        "speed": speed(status["learners"]),
    }


def _of_server(info: BusInfo | None) -> dict[str, float | None]:
    if info is None:
        return {}
    return {"redis": info.used_bytes, "received": info.received_bytes, "sent": info.sent_bytes}


def _totals(status: Status, info: BusInfo | None) -> Model:
    names = ("phase", "reason", "tokens", "budget_tokens", "progress", "merged_tokens", "merged_share", "outer_steps")
    more = ("own_loop", "tokens_lost", "refused", "evaluation", "outer_step")
    server = None
    if info is not None:
        server = {"used": info.used_bytes, "most": info.maxmemory_bytes, "version": info.version}
    return {
        **{name: status[name] for name in (*names, *more)},  # type: ignore[literal-required]  # keys of `Status`
        "goodput": {name: status["goodput"][name]["goodput"] for name in ("since_start", "recent")},
        "badput": _notable(status["goodput"]["since_start"]["badput"]),
        "elapsed_s": round(status["elapsed_s"], 1),
        "learners": len(present(status["learners"])),
        "fragments": len(status["fragments"]),
        "warnings": [text[:500] for text in status["warnings"][:20]],
        "redis": server,
    }
