"""`diloco chaos`: a real run on this machine under planned strikes, audited.

If asked, beside it stands the same run undisturbed. The run itself is `run`'s.
"""

import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.launcher.finish import tell_page
from diloco.launcher.folder import Folder, choose
from diloco.launcher.launch import places_of
from diloco.launcher.option_checks import check
from diloco.launcher.report import build
from diloco.options import (
    CHOSEN_BY_LAUNCHER,
    OF_DEMO,
    OF_ONE_LEARNER,
    takes,
    with_preset,
)
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.process import logs
from diloco.pipeline.process.output import survive_closed_pipes
from diloco.pipeline.process.signals import ignore_hangup
from diloco.pipeline.units import parse_span
from diloco_studies.strikes import bounds as chaos_bounds
from diloco_studies.strikes import report as chaos_report
from diloco_studies.strikes import run as chaos_run
from diloco_studies.strikes.monkey import REDIS
from diloco_studies.strikes.rates import StepTimes, Struck
from diloco_studies.strikes.schedule import Manner, Party, Redis, Rule, draw, parse
from diloco_studies.strikes.settings import NOT_OF_CHAOS, ChaosProcess
from diloco_studies.strikes.telling import one_error

Report = dict[str, Any]

MAX_TOKENS_PER_S = 200_000
"""More than this machine trains, so that time ends the run; the budget is this for each second."""
LONGER = 4.0
"""The undisturbed run may take so many times as long as the struck one."""
REPORT_FILE, TEXT_FILE, PICTURE_FILE, UNDISTURBED = "chaos.json", "chaos.md", "timeline.png", "undisturbed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A struck run: its report, and what its picture shows."""

    report: Report
    steps: StepTimes
    strikes: Sequence[Struck]
    merges: Sequence[tuple[float, int]]
    span: tuple[float, float]


def plan_of(settings: ChaosProcess) -> list[Rule]:
    """The rules of all flags.

    Raises:
        UsageError: one cannot be read.
    """
    asked = {manner: getattr(settings, manner.value) for manner in Manner}
    rules = [rule for manner, text in asked.items() for rule in parse(manner, text, Redis(settings.redis))]
    if settings.lose_tail and not any(one.manner is Manner.KILL and one.party is Party.REDIS for one in rules):
        raise UsageError("--lose-tail needs --kill redis:EVERY: only a killed Redis loses its last second")
    return rules


def prepared(settings: ChaosProcess, for_: str) -> tuple[ChaosProcess, float]:
    """Settings with what a struck run needs, and how long it is struck.

    Raises:
        UsageError: settings that do not fit.
    """
    for_s = parse_span(for_)
    try:
        for_s = float(for_s)
    except ValueError:
        raise UsageError(f"--for {for_!r}: use a duration, for instance 60s or 5m") from None
    if not 1 <= for_s < float("inf"):
        raise UsageError(f"--for {for_!r}: use at least 1s")
    if sys.platform != "linux":
        raise UsageError("`diloco chaos` needs Linux: it forks processes and finds them in /proc")
    update: dict[str, Any] = {"tokens": settings.tokens or round(for_s * MAX_TOKENS_PER_S), "log_losses": True}
    settings = with_preset(settings)
    if settings.redis != "one" and "kill" not in settings.model_fields_set:
        update["kill"] = f"learner:3s,syncer:7s,{Party.PRIMARY}:20s"
    return settings.model_copy(update=update), for_s


# --- the run, and the same undisturbed ---------------------------------------------------------------------


def strike(
    settings: ChaosProcess, folder: Folder, for_s: float, rules: list[Rule], until: int | None = None
) -> Outcome:
    """Strike a run for a time, or until so many tokens are merged; `folder.report` is for `diloco status`."""
    facts, evidence = asyncio.run(chaos_run.run(settings, folder, for_s, draw(rules, for_s, settings.seed), until))
    folder.report.write_text(dumps(build(facts.outcome), indent=1) + "\n")
    merges = [
        (one.unix_s, one.fragment) for one in evidence.records if isinstance(one, Committed) and one.contributions
    ]
    report = chaos_report.build_chaos(facts, evidence)
    return Outcome(report, facts.steps, evidence.strikes, merges, (facts.began_s, facts.ended_s))


def calm(settings: ChaosProcess, report: Mapping[str, Any]) -> ChaosProcess:
    """Settings of the same run undisturbed.

    Learning rates follow trained tokens / budget. Undisturbed, a run trains fewer tokens for the same merged ones, so
    its budget is smaller by what the strikes cost (died, rejected): both end at the same point of their schedule.
    """
    assert settings.tokens is not None  # noqa: S101  # on prepared settings
    ledger = report["ledger"]
    update: dict[str, Any] = {"kill": "none", "pause": "none", "cut": "none", "hang": "none", "lose_tail": False}
    update["partition"] = "none"
    if ledger["tokens"]:
        kept = (ledger["merged"] + ledger["overwritten"]) / ledger["tokens"]
        update["tokens"] = max(1, round(settings.tokens * kept))
    return settings.model_copy(update=update)


def add_undisturbed(outcome: Outcome, settings: ChaosProcess, folder: Folder, for_s: float) -> None:
    """Make the same run without strikes until as much is merged, and put what it came to into the report."""
    report = outcome.report
    if report["stopped"] or not report["ledger"]["merged"]:
        report["warnings"].append("the run was stopped, or merged nothing, so it was not repeated undisturbed")
        return
    typer.echo("\nThe same run undisturbed, until it has merged the same number of tokens")
    beside = Folder(folder.path / UNDISTURBED)
    found = strike(calm(settings, report), beside, LONGER * for_s, [], report["ledger"]["merged"]).report
    names = ("global_val_loss", "useful", "goodput", "ledger", "wall_s", "stopped", "verdict")
    report["undisturbed"] = {name: found[name] for name in names} | {"tokens_budget": found["settings"]["tokens"]}
    report["violations"] += [one | {"promise": f"undisturbed: {one['promise']}"} for one in found["violations"]]
    report["verdict"] = "fail" if report["violations"] else "pass"
    merged = found["ledger"]["merged"]
    if merged < 0.98 * report["ledger"]["merged"]:
        report["warnings"].append(
            f"the undisturbed run merged {merged} tokens, fewer than the struck one, so their losses cannot be compared"
        )


# --- what it leaves ----------------------------------------------------------------------------------------


def conclude(outcome: Outcome, folder: Folder, json_file: Path | None) -> None:
    """Write and print what a struck run leaves."""
    from diloco_studies.strikes.plot import draw

    report = outcome.report
    names = sorted(outcome.steps, key=lambda name: (len(name), name))
    lanes = [*names, *sorted({one.name for one in outcome.strikes if one.party is Party.SYNCER})]
    servers = sorted({one.name for one in outcome.strikes if one.party in (Party.PRIMARY, Party.SENTINEL)})
    picture = folder.path / PICTURE_FILE
    draw(
        outcome.steps,
        outcome.strikes,
        outcome.merges,
        [*lanes, *(servers or [REDIS])],
        outcome.span,
        f"A run under strikes (method {report['method']}, seed {report['seed']}): {report['verdict']}",
        chaos_report.goodput_line(report),
        picture,
    )
    command = shlex.join(["diloco", *sys.argv[1:]])
    (folder.path / TEXT_FILE).write_text(chaos_report.markdown(report, command, PICTURE_FILE))
    for path in (folder.path / REPORT_FILE, json_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dumps(report, indent=1) + "\n")
    typer.echo("\n" + chaos_report.summary(report))
    typer.echo(f"picture    {picture}\nreport     {folder.path / TEXT_FILE}")
    tell_page(folder.path)


def main(settings: ChaosProcess, for_: str, json_file: Path | None, undisturbed: bool) -> int:
    """Entry point of `diloco chaos`: the exit status, 1 if a promise was broken.

    Raises:
        DilocoError: what went wrong, in words; nothing is left running.
    """
    logs.configure("warning")
    settings, for_s = prepared(settings, for_)
    rules = plan_of(settings)
    if settings.quorum > settings.learners:
        raise UsageError(
            f"quorum={settings.quorum}: with learners={settings.learners} there would never be a merge; use more "
            "--learners or a smaller --quorum"
        )
    check(settings)
    if any(place.ranks > 1 for place in places_of(settings)) and any(one.manner is Manner.PAUSE for one in rules):
        raise UsageError(
            f"--pause with --devices {settings.devices}: pausing one process does not pause a learner with several "
            "ranks; use --kill, --cut or --hang"
        )
    folder = choose(settings)
    survive_closed_pipes(folder.launcher_log)
    with one_error(folder.logs):
        outcome = strike(settings, folder, for_s, rules)
        if undisturbed:
            add_undisturbed(outcome, settings, folder, for_s)
    report = outcome.report
    report["bounds"] = chaos_bounds.bounds_of(report)
    ignore_hangup()
    conclude(outcome, folder, json_file)
    return 1 if report["violations"] else 0


ChaosFor = Annotated[str, typer.Option("--for", metavar="DURATION", help="Duration of the strikes")]
ChaosJson = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the report to this file")]
Undisturbed = Annotated[
    bool,
    typer.Option(
        "--undisturbed",
        help="Afterwards repeat the run without strikes until it has merged the same number of tokens, and report "
        "the final losses and tokens/s of both. Choose --tokens that the run reaches within --for, so that the "
        "learning-rate schedule ends",
    ),
]


@takes(ChaosProcess, omit=CHOSEN_BY_LAUNCHER | NOT_OF_CHAOS, moved=OF_DEMO | OF_ONE_LEARNER)
def command(
    settings: ChaosProcess,
    for_: ChaosFor = "60s",
    json_file: ChaosJson = None,
    undisturbed: Undisturbed = False,
) -> None:
    """Strike a real run on this machine, then audit it. Linux only.

    Learners, syncers and Redis are killed, paused and cut off while they work.
    The outcome is audited: versions rise by one, nothing is merged twice,
    every token and data shard is accounted for, nothing grows without bound.
    Ends with a verdict, a report and a picture in the output folder, and with
    exit status 1 if a promise was broken. Ctrl-C ends the strikes, not the audit.

    Example: diloco chaos --kill learner:3s,syncer:7s,redis:20s --for 120s --seed 1
    """
    raise typer.Exit(main(settings, for_, json_file, undisturbed))
