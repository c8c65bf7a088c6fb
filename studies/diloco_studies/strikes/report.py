"""The report of a struck run, from its evidence. Pure; `chaos.json` and `--json` hold it as it is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from diloco.launcher.report import Outcome, build, ledger_line
from diloco.pipeline.messages.fragment import Committed, Rewound
from diloco.pipeline.units import duration
from diloco.pipeline.view.ledger import surviving
from diloco_studies.strikes import bounds as chaos_bounds
from diloco_studies.strikes import footprint
from diloco_studies.strikes.audit import Evidence, audit
from diloco_studies.strikes.growth import bounds, peaks
from diloco_studies.strikes.rates import (
    Gap,
    Rate,
    StepTimes,
    Struck,
    as_rates,
    gaps,
    goodput,
    longest,
    longest_by_kind,
    outages,
    rates_around,
)
from diloco_studies.strikes.schedule import BUS, Manner, Party

Report = dict[str, Any]

LATE_S = 3.0
"""A machine on which a strike is undone so much later than planned is too busy to measure times on."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the report is made of besides the evidence."""

    outcome: Outcome
    seed: int
    plan: Mapping[str, str]
    """Flag -> what was asked for."""
    began_s: float
    """Unix time when all learners trained."""
    ended_s: float
    """Unix time when the drain began."""
    steps: StepTimes
    learners: int
    lease_s: float
    sync_interval: int
    missed: int = 0
    """Planned strikes for which there was no victim."""
    late_s: float = 0.0
    """How much longer than planned a strike has lasted at most."""
    stopped: bool = False
    """By the user, before its time."""


def build_chaos(facts: Facts, evidence: Evidence) -> Report:
    """The report; what `violations` holds decides the verdict."""
    violations = [{"promise": one.promise, "detail": one.detail} for one in audit(evidence)]
    run = build(facts.outcome)
    history, _ = surviving(evidence.records, evidence.ledger_inputs.heads)
    merges = [commit for commit in history if commit.contributions]
    inside = [commit for commit in merges if facts.began_s <= commit.unix_s <= facts.ended_s]
    all_gaps = gaps((commit.unix_s for commit in merges), facts.began_s, facts.ended_s)
    by_fragment = [
        gap
        for fragment in evidence.layout.fragments
        for gap in gaps((c.unix_s for c in merges if c.fragment == fragment.id), facts.began_s, facts.ended_s)
    ]
    wall_s = max(0.0, facts.ended_s - facts.began_s)
    during = {
        learner: [(name, [at for at in times if facts.began_s <= at <= facts.ended_s]) for name, times in lives]
        for learner, lives in facts.steps.items()
    }
    elements = {fragment.id: fragment.elements for fragment in evidence.layout.fragments}
    token_elements = sum(part.tokens * elements[one.fragment] for one in inside for part in one.contributions)
    merged = token_elements / evidence.layout.elements
    share = goodput(during, facts.learners, wall_s, run["tokens"], run["merged_tokens"])
    report = {
        "method": facts.outcome.settings["method"],
        "verdict": "fail" if violations else "pass",
        "kills": counts(evidence.strikes, Manner.KILL),
        "strikes": {manner.value: counts(evidence.strikes, manner) for manner in Manner},
        "strikes_missed": facts.missed,
        "violations": violations,
        "commits": len(inside),
        "commits_lost_with_redis": sum(
            isinstance(one, Committed) and bool(one.contributions) for one in evidence.records
        )
        - len(merges),
        "rewinds": sum(isinstance(one, Rewound) for one in evidence.records),
        "longest_commit_gap_s": longest(all_gaps),
        "longest_fragment_gap_s": longest(by_fragment),
        "gaps_by_strike": {
            "any_fragment": longest_by_kind(all_gaps, evidence.strikes),
            "same_fragment": longest_by_kind(by_fragment, evidence.strikes),
        },
        "yardsticks": _yardsticks(facts, inside, during),
        "step_rates": _step_rates(during, evidence.strikes),
        "failovers": _failovers(facts, evidence, all_gaps),
        "blocked_share": _blocked(evidence),
        "keys": _keys(evidence),
        "processes": footprint.rows(evidence.lives),
        "useful": {"tokens": round(merged), "per_s": merged / wall_s if wall_s else 0.0},
        "goodput": {"share": share.share, "trained_share": share.trained, "merged_share": share.merged},
        "ledger": {
            "tokens": run["tokens"],
            "merged": run["merged_tokens"],
            **run["tokens_lost"],
            "line": ledger_line(run),
        },
        "global_val_loss": run["global_val_loss"],
        "wall_s": wall_s,
        "stopped": facts.stopped,
        "seed": facts.seed,
        "plan": dict(facts.plan),
        "strikes_late_s": facts.late_s,
        "warnings": [*run["warnings"], *_busy(facts)],
        "settings": run["settings"],
        "timeline": timeline(evidence.strikes, facts.began_s),
    }
    return report | {"bounds": chaos_bounds.bounds_of(report)}


def timeline(strikes: Sequence[Struck], began_s: float) -> Report:
    """Every strike, in order."""
    return {
        "began_unix_s": began_s,
        "strikes": [
            {
                "kind": one.kind,
                "name": one.name,
                "at_s": one.began_s - began_s,
                "length_s": one.ended_s - one.began_s,
                "detail": one.detail,
            }
            for one in sorted(strikes, key=lambda one: one.began_s)
        ],
    }


def _busy(facts: Facts) -> list[str]:
    if facts.late_s <= LATE_S:
        return []
    return [
        f"strikes were undone up to {facts.late_s:.1f} s late: this machine was busy with something else, so gaps and "
        f"rates say little about the run"
    ]


def counts(strikes: Sequence[Struck], manner: Manner) -> dict[str, int]:
    """Strikes of a manner by party."""
    counted = Counter(one.party for one in strikes if one.manner is manner)
    return {party.value: counted[party] for party in Party}


def _yardsticks(facts: Facts, merges: Sequence[Committed], steps: StepTimes) -> dict[str, float | None]:
    """What gaps are held against: two rounds after a learner's kill, two leases and a window after a syncer's."""
    lengths = [b - a for lives in steps.values() for _, at in lives for a, b in pairwise(at)]
    round_s = facts.sync_interval * median(lengths) if lengths else None
    window_s = median(c.quorum_s + c.grace_s + c.upload_s + c.merge_s for c in merges) if merges else None
    return {
        "round_s": round_s,
        "window_s": window_s,
        "after_a_learner_s": None if round_s is None else 2 * round_s,
        "after_a_syncer_s": None if window_s is None else 2 * facts.lease_s + window_s,
    }


def _step_rates(steps: StepTimes, strikes: Sequence[Struck]) -> dict[str, Any]:
    """Inner steps per second around outages of the syncers and of Redis, over all learners and for each."""
    found: dict[str, Any] = {}
    for party, struck in ((Party.SYNCER, (Party.SYNCER,)), (Party.REDIS, BUS)):
        times = outages(strikes, struck)
        by_learner = rates_around(steps, times)
        found[party.value] = {
            "outages": len(times),
            "outage_s": sum(one.length_s for one in times),
            **as_rates(by_learner),
            "learners": {learner: _shown(mine) for learner, mine in by_learner.items()},
        }
    return found


def _failovers(facts: Facts, evidence: Evidence, found: Sequence[Gap]) -> list[Report]:
    """Strikes on a primary that others take over from: how long until all keys had one, and how long without a merge.

    Where two strikes fall into one gap, both are told its length.
    """
    return [
        {
            "kind": one.kind,
            "name": one.name,
            "at_s": one.began_s - facts.began_s,
            "taken_over_s": one.ended_s - one.began_s,
            "detail": one.detail,
            "without_merges_s": longest(gap for gap in found if gap.began_s <= one.began_s < gap.ended_s),
        }
        for one in sorted(evidence.strikes, key=lambda one: one.began_s)
        if one.party is Party.PRIMARY
    ]


def _shown(rates: Mapping[str, Rate]) -> dict[str, float | None]:
    return {span: rate.per_s for span, rate in rates.items()}


def _keys(evidence: Evidence) -> dict[str, dict[str, int | None]]:
    """The most that was on the bus of each kind of key, and the most that may be."""
    limits = {} if evidence.scale is None else bounds(evidence.scale)
    found: dict[str, dict[str, int | None]] = {}
    for name, kind in peaks(evidence.key_usage).items():
        most_keys, most_entries = limits.get(name, (None, None))
        found[name] = {"keys": kind.keys, "entries": kind.entries, "bytes": kind.bytes}
        found[name] |= {"most_keys": most_keys, "most_entries": most_entries}
    return found


def _blocked(evidence: Evidence) -> float:
    """Share of the learners' time in which training waited inside the library; the worst learner's."""
    times: dict[str, tuple[float, float]] = {}
    for report in evidence.ledger_inputs.reports:
        blocked_s, wall_s = times.get(report.learner, (0.0, 0.0))
        times[report.learner] = blocked_s + report.blocked_s, wall_s + report.wall_s
    return max((blocked_s / wall_s for blocked_s, wall_s in times.values() if wall_s), default=0.0)


# --- for people --------------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """For people."""
    return "-" if value is None else f"{value:.1f} s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def counted(by_party: Mapping[str, int]) -> str:
    """'40 learner, 17 syncer, 6 redis'."""
    return ", ".join(f"{number} {party}" for party, number in by_party.items() if number) or "none"


def goodput_line(report: Report) -> str:
    """Where the learners' time went, in one line."""
    share = report["goodput"]
    return (
        f"goodput {share['share']:.0%}: learners trained {share['trained_share']:.0%} of the time, "
        f"{share['merged_share']:.0%} of what they trained was merged"
    )


def summary(report: Report) -> str:
    """The last lines on the terminal."""
    strikes = "; ".join(f"{manner}: {counted(by)}" for manner, by in report["strikes"].items() if any(by.values()))
    rates = report["step_rates"]
    lines = [
        f"struck for {duration(report['wall_s'])}: {strikes or 'no strike'}",
        f"{report['commits']} commits, longest gap {report['longest_commit_gap_s']:.1f} s, of one fragment "
        f"{report['longest_fragment_gap_s']:.1f} s",
        *(
            f"steps/s around {rates[party]['outages']} outages of {what}: {_rate(rates[party]['before'])} before, "
            f"{_rate(rates[party]['during'])} during, {_rate(rates[party]['after'])} after"
            for party, what in (("syncer", "a syncer"), ("redis", "Redis"))
            if rates[party]["outages"]
        ),
        *(
            f"{one['kind']} at {one['at_s']:.1f} s ({one['name']}): taken over after {one['taken_over_s']:.1f} s, "
            f"{one['without_merges_s']:.1f} s without a commit"
            for one in report["failovers"]
        ),
        f"training waited for the library {report['blocked_share']:.2%} of the time",
        *chaos_bounds.lines(report["bounds"]),
        f"tokens: {report['ledger']['line']}",
        goodput_line(report),
        *(f"warning: {warning}" for warning in report["warnings"]),
        *(f"VIOLATION: {one['promise']}: {one['detail']}" for one in report["violations"]),
        f"verdict: {report['verdict'].upper()}" + ("" if report["violations"] else ", every promise was kept"),
    ]
    return "\n".join(lines)


def _failover_lines(report: Report) -> list[str]:
    if not report["failovers"]:
        return []
    return [
        "## Failovers",
        "",
        "From the strike until all keys had a primary again, and the time without a commit in which it fell.",
        "",
        "| at | strike | primary | taken over | without a commit | by |",
        "|---|---|---|---|---|---|",
        *(
            f"| {seconds(one['at_s'])} | {one['kind']} | {one['name']} | {seconds(one['taken_over_s'])} | "
            f"{seconds(one['without_merges_s'])} | {one['detail']} |"
            for one in report["failovers"]
        ),
        "",
        f"{report['rewinds']} rewinds of a fragment.",
        "",
    ]


def _undisturbed(report: Report) -> list[str]:
    other = report.get("undisturbed")
    if other is None:
        return []
    rows = [
        ("final global validation loss", *(_loss(one["global_val_loss"]) for one in (report, other))),
        ("merged tokens", *(str(one["ledger"]["merged"]) for one in (report, other))),
        ("trained tokens", *(str(one["ledger"]["tokens"]) for one in (report, other))),
        ("merged tokens per second", *(f"{one['useful']['per_s']:.0f}" for one in (report, other))),
    ]
    return [
        "## The same run undisturbed",
        "",
        "| | struck | undisturbed |",
        "|---|---|---|",
        *(f"| {name} | {mine} | {its} |" for name, mine, its in rows),
        "",
    ]


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def markdown(report: Report, command: str, picture: str) -> str:
    """The report for people."""
    rates, yard = report["step_rates"], report["yardsticks"]
    lines = [
        f"# Chaos: {report['verdict'].upper()}",
        "",
        f"`{command}`",
        "",
        f"![timeline]({picture})",
        "",
        "## Broken promises",
        "",
        *([f"- **{one['promise']}**: {one['detail']}" for one in report["violations"]] or ["None."]),
        "",
        "## Strikes",
        "",
        f"| | {' | '.join(Party)} |",
        f"|---|{'---|' * len(Party)}",
        *(
            f"| {manner} | {' | '.join(str(number) for number in by.values())} |"
            for manner, by in report["strikes"].items()
        ),
        "",
        f"{report['strikes_missed']} planned strikes found nobody to hit. "
        f"{report['commits_lost_with_redis']} commits were lost with Redis and are not counted.",
        "",
        "## Progress",
        "",
        f"- {report['commits']} commits in {seconds(report['wall_s'])}; final global validation loss "
        f"{_rate(report['global_val_loss'])}",
        f"- longest time without a commit {seconds(report['longest_commit_gap_s'])}, of one fragment "
        f"{seconds(report['longest_fragment_gap_s'])}",
        f"- {goodput_line(report)}",
        f"- training waited for the library {report['blocked_share']:.2%} of the time (the worst learner)",
        f"- tokens: {report['ledger']['line']}",
        "",
        "## Held against bounds",
        "",
        "Matters of time on this machine, so they decide no verdict.",
        "",
        *chaos_bounds.table(report["bounds"]),
        "",
        *_undisturbed(report),
        "## Gaps",
        "",
        "Longest time without a commit in which such a strike began; *alone*: no strike of another kind was under way.",
        f"A round of H steps takes {seconds(yard['round_s'])}, a window {seconds(yard['window_s'])}.",
        "",
        "| strike | any fragment | alone | same fragment | alone |",
        "|---|---|---|---|---|",
        *(
            f"| {kind} | "
            + " | ".join(seconds(gap[name]) for gap in (one, same) for name in ("longest_s", "alone_s"))
            + " |"
            for kind, one in report["gaps_by_strike"]["any_fragment"].items()
            for same in [report["gaps_by_strike"]["same_fragment"][kind]]
        ),
        "",
        *_failover_lines(report),
        "## Inner steps per second of a learner around outages",
        "",
        "| outages of | number | together | before | during | after | during / before |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {party} | {one['outages']} | {seconds(one['outage_s'])} | {_rate(one['before'])} | "
            f"{_rate(one['during'])} | {_rate(one['after'])} | {_rate(one['ratio'])} |"
            for party, one in rates.items()
        ),
        "",
        *footprint.lines(report["processes"]),
        "## On the bus",
        "",
        "The most at any one time, once a second; in brackets the bound.",
        "",
        "| keys of the kind | keys | entries | KiB |",
        "|---|---|---|---|",
        *(
            f"| {name} | {one['keys']} ({one['most_keys']}) | {one['entries']} ({one['most_entries']}) | "
            f"{one['bytes'] / 1024:.0f} |"
            for name, one in report["keys"].items()
        ),
        "",
        *([f"- warning: {warning}" for warning in report["warnings"]]),
    ]
    return "\n".join(lines).rstrip() + "\n"
