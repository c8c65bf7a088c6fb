"""Build the report of a run from what was gathered at its end. Pure. It is the content of `report.json`."""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from diloco.launcher.display import cost_words, goodput_words, merged_share, trained
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.fragment import Committed, Rejected, TapeRecord
from diloco.pipeline.messages.run import Evaluation, Event, LearnerReport, Phase
from diloco.pipeline.pacing import long_rounds
from diloco.pipeline.units import count, counted, duration
from diloco.pipeline.view.goodput import Division, Goodput, Seconds, divide
from diloco.pipeline.view.ledger import (
    CAUSES,
    Account,
    Totals,
    accounts,
    not_merged_by_fragment,
    problems,
    surviving,
    totals,
)
from diloco.pipeline.view.ledger_inputs import LedgerInputs
from diloco.pipeline.view.loss_curves import LossCurve, curve_line
from diloco.pipeline.view.merged_share import MergedShare, shares
from diloco.pipeline.view.status import Status, is_missed, present

Report = dict[str, Any]

# The terms of the ledger that are shown even if they are 0.
NAMED = ("merged", "overwritten", "rejected", "died", "pending")


@dataclass(slots=True)
class Origin:
    """The checkpoint and the totals with which a resumed run began."""

    checkpoint: str
    tokens: int
    merged_tokens: int
    overwritten: int = 0
    rejected: int = 0


@dataclass(slots=True)
class Kill:
    """The kill of `diloco demo`."""

    learner: str
    incarnation: str
    killed_at: float
    """Share of the budget at which it was killed."""
    killed_unix_s: float
    restarted_at: float | None = None
    restarted_unix_s: float | None = None
    rates: dict[str, Any] = field(default_factory=dict)
    """Result of `demo.measure`."""


@dataclass(slots=True)
class Outcome:
    """All data from which the report is made."""

    settings: dict[str, Any]
    stopped: bool
    """True if the user ended the run before its budget."""
    wall_s: float
    """Time from the start of the first process until the run was finished: starting them is a cost of the method."""
    elapsed_s: float
    """Time of the run, as in `Status.elapsed_s`."""
    outer_steps: int
    started_unix_s: float
    """Unix time of the first step."""
    layout: Layout | None = None
    """Layout of the fragments; None for the data-parallel baseline."""
    asked_interval: int = 0
    """The sync interval H that was asked for, in inner steps."""
    records: Sequence[TapeRecord] = ()
    ledger_inputs: LedgerInputs = field(default_factory=LedgerInputs)
    evaluations: Sequence[Evaluation] = ()
    events: Sequence[Event] = ()
    progress: Sequence[tuple[float, int]] = ()
    """(Unix time, trained tokens), in order."""
    curves: Collection[LossCurve] = ()
    """The learners' losses, in Unix time."""
    merged_share: MergedShare | None = None
    """Of the status, which knows how many tokens were settled some minutes ago."""
    goodput: Goodput | None = None
    """Of the status, which knows the learners' time."""
    origin: Origin | None = None
    kill: Kill | None = None
    checkpoint: str | None = None
    warnings: list[str] = field(default_factory=list)


def learner_rows(reports: Sequence[LearnerReport], unmissed: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one row per learner, for all its incarnations together; rates are over the time since its first step.

    unmissed: learners that have not died, although they did not report that they leave.
    """
    rows = []
    for learner in sorted({report.learner for report in reports}, key=lambda name: (len(name), name)):
        mine = [report for report in reports if report.learner == learner]
        wall_s = sum(report.wall_s for report in mine)
        tokens = sum(report.tokens for report in mine)
        longest, last = max(mine, key=lambda report: report.step), max(mine, key=lambda report: report.generation)
        rows.append(
            {
                "id": learner,
                "steps": sum(report.step for report in mine),
                "tokens": tokens,
                "tokens_per_s": tokens / wall_s if wall_s else 0.0,
                "step_s_median": longest.step_s_median,
                "blocked_s": sum(report.blocked_s for report in mine),
                "wall_s": wall_s,
                "incarnations": len(mine),
                "left": last.left,
                "died": learner not in unmissed and not last.left,
                "device": longest.device,
                "ranks": longest.ranks,
            }
        )
    return rows


def tokens_at(progress: Sequence[tuple[float, int]], unix_s: float) -> int:
    """Interpolate the trained tokens at a moment."""
    if not progress:
        return 0
    at = bisect_left(progress, unix_s, key=lambda point: point[0])
    if at == 0 or at == len(progress):
        return progress[min(at, len(progress) - 1)][1]
    (t0, n0), (t1, n1) = progress[at - 1], progress[at]
    return round(n0 + (n1 - n0) * (unix_s - t0) / (t1 - t0))


def _events(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "name": event.name,
            "who": event.who,
            "detail": event.detail,
            "elapsed_s": max(0.0, event.unix_s - outcome.started_unix_s),
            "tokens": tokens_at(outcome.progress, event.unix_s),
        }
        for event in outcome.events
    ]


def _curves(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the learners' losses by the run's time, with the tokens that the run had trained by each bucket's end."""
    found: list[dict[str, Any]] = []
    for one in outcome.curves:
        begin_s, every_s = one["begin_s"], one["every_s"]
        tokens = [tokens_at(outcome.progress, begin_s + every_s * (n + 1)) for n in range(len(one["losses"]))]
        found.append({**one, "begin_s": begin_s - outcome.started_unix_s, "tokens": tokens})
    return found


def _rejected_of_others(kill: Kill, records: Sequence[TapeRecord], layout: Layout) -> dict[str, int]:
    """Return the tokens of the other learners that were rejected before the kill, until the restart, and after it."""
    elements = {fragment.id: fragment.elements for fragment in layout.fragments}
    spans = {"before": 0, "while": 0, "after": 0}
    back = kill.restarted_unix_s or math.inf
    for record in records:
        if isinstance(record, Rejected) and record.learner != kill.learner:
            now = record.unix_s
            span = "before" if now < kill.killed_unix_s else "while" if now < back else "after"
            spans[span] += record.lost_tokens * elements[record.fragment]
    return {span: round(lost / layout.elements) for span, lost in spans.items()}


def _demo(
    kill: Kill, parts: Sequence[Account], sums: Totals, records: Sequence[TapeRecord], layout: Layout
) -> dict[str, Any]:
    """Return what the kill cost the other learners and the run. sums: totals of all accounts in `parts`."""
    mine = [part for part in parts if (part.learner, part.incarnation) == (kill.learner, kill.incarnation)]
    others = totals((part for part in parts if part.learner != kill.learner), layout)
    section = {
        "learner": kill.learner,
        "killed_at": kill.killed_at,
        "restarted_at": kill.restarted_at,
        **kill.rates,
        "others_lost": {"died": others.lost["died"], "unaccounted": others.lost["unaccounted"]},
        "others_rejected": _rejected_of_others(kill, records, layout),
    }
    if mine:
        cost, rest = totals(mine, layout), totals((part for part in parts if part not in mine), layout)
        died = max(
            0, sums.lost["died"] - rest.lost["died"]
        )  # a difference, since separately rounded numbers need not add up
        section["run_lost"] = {
            "trained_tokens": cost.tokens,
            "merged_tokens": cost.merged,
            **{cause: cost.lost[cause] for cause in ("overwritten", "rejected", "died", "pending")},
            "died": died,
            "not_merged_tokens_by_fragment": not_merged_by_fragment(mine[0], layout),
        }
    return section


def _shares(outcome: Outcome, sums: Totals, base: Origin | None) -> MergedShare:
    """Return the merged shares: of the whole run by the tape, of its last minutes by the status."""
    trained, merged = sums.tokens + (base.tokens if base else 0), sums.merged + (base.merged_tokens if base else 0)
    whole = shares((), 0.0, trained, merged, sums.lost["pending"])
    if outcome.merged_share is not None:
        whole |= outcome.merged_share | {"since_start": whole["since_start"], "pending": whole["pending"]}
    return whole


def _goodput(found: Goodput | None, parts: Sequence[Account], layout: Layout | None) -> dict[str, Any] | None:
    """Return the goodput of the run and of each learner, by the fates of their tokens according to the tape."""
    if found is None or layout is None:
        return None

    def division(seconds: Seconds, parts: Sequence[Account]) -> Division:
        sums = totals(parts, layout)
        refused = min(sums.lost["rejected"], sum(part.rejected - part.late for part in parts) // layout.elements)
        lost = {"overwritten": sums.lost["overwritten"], "late": sums.lost["rejected"] - refused}
        lost |= {"refused": refused, "died": sums.lost["died"]}
        return divide(seconds, max(0, sums.tokens - sum(lost.values())), lost)

    return {
        "since_start": division(found["since_start"]["seconds"], parts),
        "recent": found["recent"],
        "learners": {
            name: division(seconds, [part for part in parts if part.learner == name])
            for name, seconds in found["learners"].items()
        },
        "merged_tokens": totals(parts, layout).merged,
    }


def _final_loss(evaluations: Sequence[Evaluation], warnings: list[str]) -> float | None:
    final = next((one for one in reversed(evaluations) if one.final), None)
    if final is not None:
        return final.loss
    if not evaluations:
        return None
    warnings.append("there was no final evaluation: global_val_loss is the last one before it")
    return evaluations[-1].loss


def build(outcome: Outcome) -> Report:
    """Return the report.

    `tokens` and `merged_tokens` include the earlier part of a resumed run. `tokens_lost` and `token_elements` are for
    this part only, and `resumed_from` has what the earlier part had not merged. To the token:
    tokens = merged_tokens + all of tokens_lost + resumed_from.not_merged_tokens.
    """
    warnings = list(outcome.warnings)
    if outcome.layout is not None:
        parts = accounts(outcome.records, outcome.ledger_inputs, outcome.layout)
        sums = totals(parts, outcome.layout)
        if surviving(outcome.records, outcome.ledger_inputs.heads)[1]:
            warnings.append("the bus came back in an earlier state: merges that it lost are not counted as merged")
    else:  # in the baseline every gradient is in the mean of its step, so no token is lost
        parts = []
        trained = sum(report.tokens for report in outcome.ledger_inputs.reports)
        sums = Totals(trained, trained, dict.fromkeys(CAUSES, 0))
    intervals = [one.interval for one in outcome.records if isinstance(one, Committed) and one.interval]
    usual = median(intervals) if intervals else None
    long = long_rounds(outcome.asked_interval, [math.ceil(usual)]) if usual else None
    warnings += [long] if long else []
    warnings += [f"the ledger does not close, which is a bug: {problem}" for problem in problems(parts)]
    base = outcome.origin
    loss = _final_loss(outcome.evaluations, warnings)
    return {
        "run": outcome.settings["run"],
        "method": outcome.settings["method"],
        "seed": outcome.settings["seed"],
        "stopped": outcome.stopped,
        "global_val_loss": loss,
        "tokens": sums.tokens + (base.tokens if base else 0),
        "merged_tokens": sums.merged + (base.merged_tokens if base else 0),
        "merged_share": _shares(outcome, sums, base),
        "tokens_lost": sums.lost,
        "goodput": _goodput(outcome.goodput, parts, outcome.layout),
        "token_elements": sums.elements,
        "wall_s": outcome.wall_s,
        "elapsed_s": outcome.elapsed_s,
        "outer_steps": outcome.outer_steps,
        "interval": {"asked": outcome.asked_interval, "median": usual, "longest": max(intervals, default=None)},
        "learners": learner_rows(outcome.ledger_inputs.reports, outcome.ledger_inputs.here),
        "evaluations": [
            {"tokens": one.tokens, "elapsed_s": one.elapsed_s, "loss": one.loss, "final": one.final}
            for one in outcome.evaluations
        ],
        "curves": _curves(outcome),
        "events": _events(outcome),
        "demo": _demo(outcome.kill, parts, sums, outcome.records, outcome.layout)
        if outcome.kill and outcome.layout
        else None,
        "resumed_from": None
        if base is None
        else {
            "checkpoint": base.checkpoint,
            "tokens": base.tokens,
            "merged_tokens": base.merged_tokens,
            "not_merged_tokens": base.tokens - base.merged_tokens,
            "tokens_lost": {
                "overwritten": base.overwritten,
                "rejected": base.rejected,
                "died": base.tokens - base.merged_tokens - base.overwritten - base.rejected,
            },
        },
        "checkpoint": outcome.checkpoint,
        "warnings": warnings,
        "settings": outcome.settings,
    }


def _ratio(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} times the earlier rate"


def _demo_lines(demo: dict[str, Any]) -> list[str]:
    rejected, died = demo["others_rejected"], demo["others_lost"]["died"]
    lines = [
        f"{demo['learner']} was killed at {demo['killed_at']:.0%} of the budget. The others' step rate: "
        f"{_ratio(demo['ratio_while'])} while it was away, {_ratio(demo['ratio_after'])} after its restart.",
        f"Rejected tokens of the others: {rejected['before']} before, {rejected['while']} while it was away, "
        f"{rejected['after']} after; {f'{died} tokens of others died' if died else 'none of them died'}.",
    ]
    if lost := demo.get("run_lost"):
        lines.append(
            f"With it the run lost {lost['died']} of its {lost['trained_tokens']} tokens, which were not merged yet."
        )
    return lines


def ledger_line(report: Report) -> str:
    """Say in one line where the tokens went, to the token: the terms in `NAMED`, and others that are not 0."""
    terms = {"merged": report["merged_tokens"], **report["tokens_lost"]}
    if earlier := report.get("resumed_from"):
        terms["not merged before the checkpoint"] = earlier["tokens"] - earlier["merged_tokens"]
    shown = (f"{tokens} {name}" for name, tokens in terms.items() if tokens or name in NAMED)
    return f"{report['tokens']} trained = " + " + ".join(shown)


def _loss(loss: float | None, at_tokens: int | None, curves: Collection[LossCurve], nats: bool = True) -> list[str]:
    """Return the lines about the global loss, in nats per token unless an own loop measured it, and the learners'.

    at_tokens: trained tokens when it was measured; None if it was not.
    """
    line = "the global validation loss is not known, because no evaluator has measured it"
    if at_tokens is not None:
        value = f"{'not a number' if loss is None else f'{loss:.4f}'}{' nats per token' * nats}"
        line = f"global validation loss {value}, measured at {count(at_tokens)} tokens"
    return [line, *filter(None, [curve_line(curves)])]


def _learners(rows: Sequence[Mapping[str, Any]], died: int, started: int | None = None) -> str:
    """Describe: '4 learners of 2 ranks', '3 learners of 1 to 2 ranks', '3 learners (2 started here, 1 joined)'.

    Args:
        rows: rows of all learners that took part.
        died: how many of them died: '4 learners, 1 of them died'.
        started: how many the launcher started; None: not known.
    """
    least, most = (choose((row.get("ranks", 1) for row in rows), default=1) for choose in (min, max))
    ranks = "" if most == 1 else f" of {most} ranks" if least == most else f" of {least} to {most} ranks"
    joined = 0 if started is None else max(0, len(rows) - started)
    whence = f" ({started} started here, {joined} joined)" if joined else ""
    return f"{counted(len(rows), 'learner')}{ranks}{whence}{f', {died} of them died' if died else ''}"


def summary_so_far(status: Status, curves: Collection[LossCurve] = (), price: float | None = None) -> str:
    """Return the lines of `summary` for a run of which only its Redis is read; `curves`: the learners' losses."""
    learners = present(status["learners"])
    blocked = max((one["blocked_s"] / one["wall_s"] for one in learners if one.get("wall_s")), default=0.0)
    evaluation, gone = status["evaluation"], status["tokens_lost"]
    died = sum(map(is_missed, learners))
    why = "" if status["phase"] in (Phase.RUNNING, Phase.FINISHED) else f" ({status['reason']})"
    account = {"tokens": status["tokens"], "merged_tokens": status["merged_tokens"], "tokens_lost": gone}
    lines = [
        f"{status['phase']}{why}: run {status['run']!r}, {_learners(learners, died)}, {trained(status)} in "
        f"{duration(status['elapsed_s'])}, {counted(status['outer_steps'], 'outer step')}",
        *_loss(evaluation and evaluation["loss"], evaluation and evaluation["tokens"], curves, not status["own_loop"]),
        f"tokens: {ledger_line(account)}",
        f"merged share {merged_share(status['merged_share'])}",
        *_goodput_lines(status["goodput"], price),
        f"training blocked for at most {blocked:.2%} of the time",
    ]
    return "\n".join(lines + [f"warning: {warning}" for warning in status["warnings"]])


def read_report(file: Path) -> Report:
    """Read the report of a run.

    Raises:
        UsageError: the file does not exist, is damaged, or is not a report.
    """
    report: Report = read_object(file)
    try:
        summary(report, price=1.0)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{file} is not a report of `diloco run`, or is damaged ({type(error).__name__}: {error})"
        ) from error
    return report


def _goodput_lines(goodput: Mapping[str, Any] | None, price: float | None) -> list[str]:
    cost = [] if price is None else [f"cost {cost_words(goodput, price)}"]
    return [f"goodput {goodput_words(goodput)}", *cost]


def summary(report: Report, price: float | None = None) -> str:
    """Return the summary of a report in a few lines; price: of an hour of one learner."""
    loss, measured = report["global_val_loss"], report["evaluations"]
    blocked = max((row["blocked_s"] / row["wall_s"] for row in report["learners"] if row["wall_s"]), default=0.0)
    died = sum(row["died"] for row in report["learners"])
    learners = _learners(report["learners"], died, report["settings"]["learners"])
    lines = [
        f"{'stopped' if report['stopped'] else 'finished'}: {report['method']}, {learners}, "
        f"{count(report['tokens'])} tokens in {duration(report['elapsed_s'])}, "
        f"{counted(report['outer_steps'], 'outer step')}",
        *_loss(loss, measured[-1]["tokens"] if measured else None, report.get("curves", ())),
        f"tokens: {ledger_line(report)}",
        f"merged share {merged_share(report['merged_share'])}",
        *_goodput_lines(report.get("goodput"), price),
        f"training blocked for at most {blocked:.2%} of the time",
    ]
    lines += _demo_lines(report["demo"]) if report["demo"] else []
    lines += [f"checkpoint {report['checkpoint']}"] if report["checkpoint"] else []
    return "\n".join(lines + [f"warning: {warning}" for warning in report["warnings"]])
