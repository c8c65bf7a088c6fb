"""The report of the data-parallel baseline under strikes; keys of `report` where they mean the same. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.pipeline.units import duration
from diloco_studies.strikes.rates import StepTimes, Struck, gaps, goodput, longest
from diloco_studies.strikes.report import LATE_S, counted, counts, goodput_line, seconds, timeline
from diloco_studies.strikes.schedule import Manner

Report = dict[str, Any]

Steps = Mapping[str, Sequence[tuple[str, Sequence[tuple[int, float]]]]]
"""Learner -> (life, (step, Unix time of its end) in order); a step that was made again is there again."""


@dataclass(frozen=True, slots=True)
class ElasticFacts:
    """What the report is made of."""

    settings: Mapping[str, Any]
    seed: int
    plan: Mapping[str, str]
    """Flag -> what was asked for."""
    learners: int
    step_tokens: int
    """Of one rank."""
    checkpoint_every_s: float
    began_s: float
    """Unix time when all ranks trained."""
    ended_s: float
    """Unix time when they were told to stop, or had spent the budget."""
    steps: Steps
    result: Mapping[str, Any] | None
    """`global_val_loss`, `steps`, `tokens` of the final model, and `restarts`."""
    agent_ending: str = ""
    """How the agent ended, if not in order."""
    left_running: Sequence[str] = ()
    strikes: Sequence[Struck] = ()
    missed: int = 0
    late_s: float = 0.0
    stopped: bool = False

    def step_times(self) -> dict[str, list[tuple[str, list[float]]]]:
        """As for `studies.strikes.rates`."""
        return {name: [(life, [at for _, at in steps]) for life, steps in lives] for name, lives in self.steps.items()}


def firsts(steps: Steps) -> dict[int, float]:
    """Step -> Unix time at which all ranks had made it for the first time: what comes later again is no progress."""
    done: dict[int, list[float]] = {}
    for lives in steps.values():
        mine: dict[int, float] = {}
        for _, made in lives:
            for step, at in made:
                mine.setdefault(step, at)
        for step, at in mine.items():
            done.setdefault(step, []).append(at)
    return {step: max(times) for step, times in done.items() if len(times) == len(steps)}


def build_elastic(facts: ElasticFacts) -> Report:
    """The report; what `violations` holds decides the verdict."""
    violations = [{"promise": promise, "detail": detail} for promise, detail in _violations(facts)]
    wall_s = max(0.0, facts.ended_s - facts.began_s)
    during: StepTimes = {
        name: [(life, [at for at in times if facts.began_s <= at <= facts.ended_s]) for life, times in lives]
        for name, lives in facts.step_times().items()
    }
    made = sum(len(steps) for lives in facts.steps.values() for _, steps in lives)
    merged = 0 if facts.result is None else int(facts.result["tokens"])
    trained = max(merged, made * facts.step_tokens)
    progress = [at for at in firsts(facts.steps).values() if facts.began_s <= at <= facts.ended_s]
    useful = len(progress) * facts.learners * facts.step_tokens
    share = goodput(during, facts.learners, wall_s, trained, merged)
    return {
        "method": "data-parallel",
        "verdict": "fail" if violations else "pass",
        "kills": counts(facts.strikes, Manner.KILL),
        "strikes": {manner.value: counts(facts.strikes, manner) for manner in Manner},
        "strikes_missed": facts.missed,
        "violations": violations,
        "restarts": None if facts.result is None else facts.result["restarts"],
        "checkpoint_every_s": facts.checkpoint_every_s,
        "longest_standstill_s": longest(gaps(progress, facts.began_s, facts.ended_s)),
        "useful": {"tokens": useful, "per_s": useful / wall_s if wall_s else 0.0},
        "goodput": {"share": share.share, "trained_share": share.trained, "merged_share": share.merged},
        "ledger": {
            "tokens": trained,
            "merged": merged,
            "repeated": trained - merged,
            "line": f"{trained} trained = {merged} in the final parameters + {trained - merged} made again",
        },
        "global_val_loss": None if facts.result is None else facts.result["global_val_loss"],
        "wall_s": wall_s,
        "stopped": facts.stopped,
        "seed": facts.seed,
        "plan": dict(facts.plan),
        "strikes_late_s": facts.late_s,
        "warnings": [f"strikes were undone up to {facts.late_s:.1f} s late: this machine was busy with something else"]
        if facts.late_s > LATE_S
        else [],
        "settings": dict(facts.settings),
        "timeline": timeline(facts.strikes, facts.began_s),
    }


def _violations(facts: ElasticFacts) -> Iterator[tuple[str, str]]:
    if facts.agent_ending:
        yield "the ranks end in order", facts.agent_ending
    for process in facts.left_running:
        yield "no process is left over", process
    if facts.result is None:
        yield "the run comes to its end", "the ranks left no result"
        return
    for name, lives in facts.steps.items():
        made = Counter(step for _, steps in lives for step, _ in steps)
        missing = [step for step in range(1, int(facts.result["steps"]) + 1) if not made[step]]
        if len(missing) > len(lives):  # a kill may cut off the line of the step under way
            yield "every step of the final model was made", f"{name} never made {len(missing)} of them"


# --- for people --------------------------------------------------------------------------------------------


def summary(report: Report) -> str:
    """Lines for the terminal."""
    strikes = "; ".join(f"{manner}: {counted(by)}" for manner, by in report["strikes"].items() if any(by.values()))
    useful, loss = report["useful"], report["global_val_loss"]
    return "\n".join(
        [
            f"data-parallel, struck for {duration(report['wall_s'])}: {strikes or 'no strike'}",
            f"{report['strikes_missed']} planned strikes found nobody to hit",
            f"all ranks began again {report['restarts']} times, at checkpoints made every "
            f"{report['checkpoint_every_s']:g} s",
            f"{useful['per_s']:.0f} useful tokens/s; longest time without a new step "
            f"{seconds(report['longest_standstill_s'])}",
            f"tokens: {report['ledger']['line']}; final loss {'-' if loss is None else f'{loss:.4f}'}",
            goodput_line(report),
            *(f"warning: {warning}" for warning in report["warnings"]),
            *(f"VIOLATION: {one['promise']}: {one['detail']}" for one in report["violations"]),
            f"verdict: {report['verdict'].upper()}",
        ]
    )


def markdown(report: Report, command: str, picture: str) -> str:
    """The report for people."""
    text = [f"# Chaos: {report['verdict'].upper()}", f"`{command}`", f"![timeline]({picture})"]
    text += [f"- {line}" for line in summary(report).splitlines()[:-1]]
    return "\n\n".join(text[:3]) + "\n\n" + "\n".join(text[3:]) + "\n"
