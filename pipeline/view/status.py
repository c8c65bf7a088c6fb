"""A run's status (`Status`, JSON-able) for `diloco status`, the HTTP endpoint, the display and the report. Pure.

`status_reader` reads the input from the bus. Tokens = merged + overwritten + rejected + died + pending, over the whole
model. Whether something that was published and not merged was lost cannot be told without the tape, which only the
report reads (`pipeline.view.ledger`): it is "pending" as long as the run continues, and "died" once it is finished.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NotRequired, TypedDict

from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.liveness import is_live, quorum_missed
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import Evaluation, Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.messages.wire import MAX_TOKENS
from diloco.pipeline.pacing import OuterStep, Pace, long_rounds, outer_budget, slow_merges
from diloco.pipeline.ramps import interval_in_force
from diloco.pipeline.view import trouble
from diloco.pipeline.view.goodput import Goodput, goodput
from diloco.pipeline.view.ledger import in_whole_tokens
from diloco.pipeline.view.merged_share import MergedShare, shares

NO_FACTS = trouble.EventFacts()
# Fields of a learner's report that its status repeats.
REPORTED = (
    *("incarnation", "left", "step", "tokens", "tokens_per_s", "loss", "step_s", "step_s_median", "pull_s"),
    *("blocked_s", "wall_s", "host", "device", "ranks", "moments"),
)


class LearnerStatus(TypedDict):
    """The last report of one incarnation of a learner."""

    id: str
    incarnation: str
    live: bool
    left: bool
    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    step_s: float
    versions: list[int]
    age_s: float
    """Seconds since the report, by the server's clock."""
    # A rank of a data-parallel baseline does not report the following.
    step_s_median: NotRequired[float]
    pull_s: NotRequired[float]
    """Seconds from the first sight of a head until the fragment's global was pulled."""
    blocked_s: NotRequired[float]
    wall_s: NotRequired[float]
    host: NotRequired[str]
    device: NotRequired[str]
    ranks: NotRequired[int]
    """Processes that train as this learner."""
    moments: NotRequired[str]
    """Where its optimizer moments came from, as in `Learner.recovered`; "" if it has not said."""


class WindowStatus(TypedDict):
    """A fragment's window, as its owner last published it."""

    state: str
    attempt: int
    members: list[str]
    expected: int
    quorum: int
    reason: str
    suspected: list[str]
    """Learners that the window does not wait for, because their last deltas were refused, late, or missing."""
    deadline_in_s: float | None
    merge_s: float
    outer_s: float


class FragmentStatus(TypedDict):
    """A fragment's head."""

    id: int
    version: int
    interval: int
    """Inner steps between two syncs of learners that train on this version: planned, or stretched by long round trips.
    """
    asked_interval: int
    """H, the interval that the settings ask for, in inner steps; 0 if unknown."""
    digest: str
    """Hex."""
    merged_deltas: int
    merged_tokens: int
    rejected_tokens: int
    refused: dict[str, int]
    """Refused deltas by reason."""
    averaged: bool
    """Its tensors are average-only."""
    window: WindowStatus


class SyncerStatus(TypedDict):
    """A syncer that is present."""

    id: str
    leads: bool
    """It owns fragment 0."""
    fragments: list[int]


class EvaluationStatus(TypedDict):
    """The newest held-out loss."""

    loss: float
    tokens: int
    elapsed_s: float
    final: bool


class TokensLost(TypedDict):
    """Tokens of the whole model that are not merged, by cause."""

    overwritten: int
    rejected: int
    died: int
    pending: int


class Status(TypedDict):
    """A run's status. Users read these names at `/status` and from `diloco status --json`."""

    run: str
    own_loop: bool
    """Its learners are the user's own programs: no command of this project starts one."""
    phase: str
    """A value of `Phase`, or "waiting"."""
    reason: str
    tokens: int
    budget_tokens: int
    progress: float
    merged_tokens: int
    merged_share: MergedShare
    goodput: Goodput
    outer_steps: int
    tokens_lost: TokensLost
    refused: dict[str, int]
    """Refused deltas by reason."""
    elapsed_s: float
    """The run's time since its first parameters were on the bus. If the run is ending or has ended, the time stops at
    the last report of a learner that trained. The report, the page and the display use the same definition."""
    learners: list[LearnerStatus]
    syncers: list[SyncerStatus]
    fragments: list[FragmentStatus]
    evaluation: EvaluationStatus | None
    outer_step: OuterStep | None
    """None if not known yet."""
    warnings: list[str]


def _learner(seen: SeenReport, live_s: float) -> LearnerStatus:
    return {
        "id": seen.report.learner,
        "live": is_live(seen, live_s),
        "versions": list(seen.report.versions),
        "age_s": seen.age_s,
        **{name: getattr(seen.report, name) for name in REPORTED},  # type: ignore[typeddict-item]
    }


def is_missed(learner: LearnerStatus) -> bool:
    """Return whether a learner is silent without having left."""
    return not (learner["live"] or learner["left"])


def present(learners: list[LearnerStatus]) -> list[LearnerStatus]:
    """Return one entry per learner, its newest incarnation (the one heard from last), sorted by name."""
    newest: dict[str, LearnerStatus] = {}
    for learner in learners:
        before = newest.get(learner["id"])
        if before is None or learner["age_s"] < before["age_s"]:
            newest[learner["id"]] = learner
    return [newest[name] for name in sorted(newest, key=lambda name: (len(name), name))]


def speed(learners: list[LearnerStatus]) -> float:
    """Return the tokens per second of all live learners. Only a learner's current incarnation counts."""
    return sum(one["tokens_per_s"] for one in present(learners) if one["live"])


def _fragment(head: Head, sync: SyncSpec | None, layout: Layout | None, now_unix_s: float) -> FragmentStatus:
    window, p = head.window, head.fragment
    deadline = window.deadline_unix_s
    return {
        "id": head.fragment,
        "version": head.version,
        "interval": head.interval if sync is None else interval_in_force(sync, head.version, head.interval),
        "asked_interval": 0 if sync is None else sync.sync_interval,
        "digest": head.digest.hex(),
        "merged_deltas": head.merged_deltas,
        "merged_tokens": head.merged_tokens,
        "rejected_tokens": head.rejected_tokens,
        "refused": dict(head.refused),
        "averaged": layout is not None and p < len(layout.fragments) and layout.fragments[p].averaged,
        "window": {
            "state": window.state,
            "attempt": window.attempt,
            "members": list(window.members),
            "expected": window.expected,
            "quorum": 0 if sync is None else sync.quorum,
            "reason": window.reason,
            "suspected": list(window.suspected),
            "deadline_in_s": None if deadline is None else deadline - now_unix_s,
            "merge_s": window.merge_s,
            "outer_s": window.outer_s,
        },
    }


def token_totals(
    layout: Layout | None,
    state: RunState | None,
    reports: Sequence[SeenReport],
    heads: Sequence[Head],
    live_s: float,
    away: Collection[int] = (),
) -> tuple[int, int, TokensLost]:
    """Return (trained, merged, lost by cause) in tokens of the whole model: fragments count by their share of it.

    away: fragments whose heads cannot be read; then merged is at least what the lead last wrote to the state.
    """
    reports = [seen for seen in reports if seen.counts_in(state)]
    base, written = (0, 0) if state is None else (state.base_tokens, state.tokens)
    earlier = (0, 0) if state is None else (state.base_overwritten, state.base_rejected)
    tokens = min(MAX_TOKENS, max(written, base + sum(seen.report.tokens for seen in reports)))
    merged = overwritten = rejected = unpublished = earlier_lost = 0
    if layout is not None:
        elements = [fragment.elements for fragment in layout.fragments]
        total = layout.elements
        noted = state.samples[-1][2] if away and state is not None and state.samples else 0
        known = (
            max(noted * total, sum(head.merged_tokens * elements[head.fragment] for head in heads)),
            earlier[0] + sum(seen.report.overwritten for seen in reports),
            earlier[1] + sum(head.rejected_tokens * elements[head.fragment] for head in heads),
        )
        merged, overwritten, rejected = in_whole_tokens(known, total, tokens)
        dead = [seen.report for seen in reports if not (seen.report.left or is_live(seen, live_s))]
        unpublished = sum(max(0, one.tokens * total - one.overwritten - one.published) for one in dead) // total
        earlier_lost = sum(earlier) // total
    # Tokens trained before the checkpoint of a resumed run, and not merged in it, can no longer arrive.
    before = 0 if state is None else max(0, base - state.base_merged - earlier_lost)
    rest = max(0, tokens - merged - overwritten - rejected)
    finished = state is not None and state.phase is Phase.FINISHED
    died = rest if finished else min(rest, unpublished + before)
    return tokens, merged, TokensLost(overwritten=overwritten, rejected=rejected, died=died, pending=rest - died)


def _in_this_part(
    state: RunState | None, layout: Layout | None, tokens: int, merged: int, lost: TokensLost
) -> tuple[int, int, dict[str, int]]:
    """Return what `token_totals` returns, without earlier parts of the run, and without what is pending."""
    causes, earlier = ("overwritten", "rejected", "died"), [0, 0, 0]
    if state is not None and layout is not None:
        earlier = [base // layout.elements for base in (state.base_overwritten, state.base_rejected)]
        earlier.append(state.base_tokens - state.base_merged - sum(earlier))
        tokens, merged = tokens - state.base_tokens, merged - state.base_merged
    now = {one: max(0, lost[one] - gone) for one, gone in zip(causes, earlier, strict=True)}  # type: ignore[literal-required]
    return max(tokens, sum(now.values())), max(0, merged), now


def _elapsed_s(state: RunState | None, reports: Sequence[SeenReport], now_unix_s: float) -> float:
    """Return the run's time as defined by `Status.elapsed_s`."""
    if state is None:
        return 0.0
    if state.phase is Phase.RUNNING:
        end_s = now_unix_s
    elif trained := [now_unix_s - seen.age_s for seen in reports if seen.report.step]:
        end_s = max(trained)
    else:  # a finished run that was put back has no reports of its training, but samples every 15 s
        last = max((tokens for _, tokens, _ in state.samples), default=0)
        end_s = min((unix_s for unix_s, tokens, _ in state.samples if tokens == last), default=now_unix_s)
    return max(0.0, end_s - state.started_unix_s)


def _syncers(syncers: Mapping[str, str], holders: Sequence[str | None]) -> list[SyncerStatus]:
    """Return which syncer owns which fragments; the owner of fragment 0 leads."""
    return [
        {
            "id": name,
            "leads": holders[:1] == [nonce],
            "fragments": [p for p, holder in enumerate(holders) if holder == nonce],
        }
        for nonce, name in sorted(syncers.items(), key=lambda item: (item[1], item[0]))
    ]


def build_status(
    run: str,
    spec: Spec | None,
    state: RunState | None,
    reports: Sequence[SeenReport],
    heads: Sequence[Head | None],
    evaluation: Evaluation | None,
    bus_warnings: Sequence[str],
    now_unix_s: float,
    live_s: float = BUS_TIMES.live_s,
    syncers: Mapping[str, str] | None = None,
    holders: Sequence[str | None] = (),
    told: trouble.EventFacts = NO_FACTS,
    takes_writes: bool = True,
    away: Collection[int] = (),
) -> Status:
    """Build the status from its parts.

    `syncers`: nonce -> name of those present; `holders`: by fragment, the nonce that holds its lease; `told`: what
    events say about learners; `away`: fragments whose heads could not be read. Before a spec and a state exist, the
    phase is "waiting", and the status has the same fields.
    """
    present = [head for head in heads if head is not None]
    layout = layout_of(spec.tensors) if spec is not None else None
    tokens, merged, lost = token_totals(layout, state, reports, present, live_s, away)
    budget = state.budget_tokens if state is not None else spec.sync.tokens if spec is not None else 0
    quorum = spec.sync.quorum if spec is not None else 0
    here = [seen for seen in reports if is_live(seen, live_s)]
    names_here = {seen.report.learner for seen in here}
    live = len(names_here)
    warnings = list(bus_warnings)
    gone, unreachable = trouble.gone(spec, state, heads, tokens, away), trouble.unreachable(away)
    warnings += [one for one in (gone, unreachable) if one]
    awaited = trouble.awaited(spec, state, syncers, live, takes_writes)
    if takes_writes and (state is None or state.phase is Phase.RUNNING) and (short := quorum_missed(quorum, live)):
        warnings.insert(0, short)
    goes_on = state is None or state.phase is not Phase.FINISHED
    if goes_on and takes_writes and syncers is not None and not syncers and present:
        warnings.append(
            "the run has no syncer, so nothing is merged: start one again with its command, --checkpoint-dir included"
        )
    strayed = trouble.stray_leases(syncers, holders) if goes_on else ""
    warnings += [strayed] if strayed else []
    if state is not None and state.set_aside and goes_on:
        warnings.append(
            f"{state.set_aside} tokens do not count towards the budget: their learners' deltas are not finite"
        )
    warnings += [state.problem] if state is not None and state.problem else []
    warnings += [one for one in (trouble.without_scripts(told.scriptless), trouble.changed(told, now_unix_s)) if one]
    suspected = sorted(names_here & {learner for head in present for learner in head.window.suspected})
    if suspected and goes_on:
        why = "their last deltas were refused, late or missing"
        warnings.append(f"merges do not wait for {', '.join(suspected)}, because {why}")
    outer = None
    if spec is not None and (state is None or state.phase is Phase.RUNNING) and (syncers is None or syncers):
        paces = [Pace(head.fragment, head.version, head.window.merge_s, head.window.outer_s) for head in present]
        steps = [seen.report.step_s for seen in here]
        slow, outer = slow_merges(spec.sync, paces, steps, len(syncers or {})), outer_budget(spec.sync, paces, steps)
        rounds = [interval_in_force(spec.sync, head.version, head.interval) for head in present]
        long = long_rounds(spec.sync.sync_interval, rounds)
        warnings += [str(one) for one in (slow, long) if one]
        warnings += trouble.crowded(here)
    elapsed_s = _elapsed_s(state, reports, now_unix_s)
    # Reports may be newer than the state, so they count for progress, unless the lead excludes some of their tokens.
    counted = state.counted_tokens if state is not None and state.set_aside else tokens
    samples, began = (state.samples, state.started_unix_s) if state is not None else ((), now_unix_s)
    end_s = began + elapsed_s
    merged_share = shares(samples, end_s, tokens, merged, lost["pending"])
    own = _in_this_part(state, layout, tokens, merged, lost)
    lately = None if merged_share["recent_is_all"] else merged_share["recent"]
    refused: Counter[str] = Counter()
    for head in present:
        refused.update(head.refused)
    return {
        "run": run,
        "own_loop": spec is not None and "data_fingerprint" not in spec.trainer,
        "phase": "waiting"
        if state is None or awaited or (gone and state.phase is Phase.RUNNING)
        else state.phase.value,
        "reason": gone or awaited or ("" if state is None else state.reason),
        "tokens": tokens,
        "budget_tokens": budget,
        "progress": min(1.0, counted / budget) if budget else 0.0,
        "merged_tokens": merged,
        "merged_share": merged_share,
        "goodput": goodput(reports, state, own, lately, (end_s, now_unix_s, live_s)),
        "outer_steps": sum(head.version for head in present),
        "tokens_lost": lost,
        "refused": dict(sorted(refused.items())),
        "elapsed_s": elapsed_s,
        "learners": [_learner(seen, live_s) for seen in reports],
        "syncers": _syncers(syncers or {}, holders),
        "fragments": [_fragment(head, None if spec is None else spec.sync, layout, now_unix_s) for head in present],
        "evaluation": None
        if evaluation is None
        else EvaluationStatus(
            loss=evaluation.loss, tokens=evaluation.tokens, elapsed_s=evaluation.elapsed_s, final=evaluation.final
        ),
        "outer_step": outer,
        "warnings": warnings,
    }
