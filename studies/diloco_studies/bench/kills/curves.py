"""What a method's run came to, from what it left: its curve by wall time, its interruptions, its tokens. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from diloco.pipeline.files.strict_json import number
from diloco_studies.bench.kills.plan import Plan
from diloco_studies.strikes.rates import Struck

Result = dict[str, Any]

STANDSTILL = 2.5
"""So many times the pace without a step anywhere is an interruption."""
LATE = 1.1
"""A step that takes so many times the pace did not keep it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a method's run leaves. Times are Unix seconds."""

    evaluations: Sequence[tuple[float, int, float]]
    """Time, trained tokens, held-out loss of the global parameters; in order."""
    steps: Mapping[str, Sequence[float]]
    """Machine -> ends of its steps, of all its lives in order."""
    strikes: Sequence[Struck]
    tokens: Mapping[str, int]
    """`trained`; `final`: that came to be in the final parameters; `lost`: that did not."""
    finished: bool
    """The budget was spent in time."""
    broken: Sequence[str] = ()
    """Promises of the decoupled run that the audit found broken."""
    restarted: int = 0
    """torchrun's agents that ended by themselves."""


def result_of(run: Run, plan: Plan) -> Result:
    """What is kept of a run. Times are seconds since all machines had made a step, tokens of all machines."""
    zero_s = max(times[0] for times in run.steps.values())
    every = sorted(at for times in run.steps.values() for at in times)
    ended_s = every[-1] - zero_s
    lengths = [late - early for times in run.steps.values() for early, late in pairwise(times)]
    usual = [length for length in lengths if length < STANDSTILL * plan.pace_s]  # a longer one is an interruption
    return {
        "curve": [[round(at - zero_s, 1), tokens, round(loss, 4)] for at, tokens, loss in run.evaluations],
        "trained": [[round(at - zero_s, 1), tokens] for at, tokens in _trained(every, plan.step_tokens)],
        "kills": [
            {
                "machine": one.name,
                "at_s": round(one.began_s - zero_s, 1),
                "started_s": round(one.ended_s - zero_s, 1),
                "trains_s": _rounded(next((at for at in run.steps[one.name] if at > one.ended_s), None), zero_s),
            }
            for one in sorted(run.strikes, key=lambda one: one.began_s)
        ],
        "interruptions": [
            {"at_s": round(early - zero_s, 1), "length_s": round(late - early, 1)}
            for early, late in pairwise(every)
            if late - early > STANDSTILL * plan.pace_s and early >= zero_s
        ],
        "tokens": dict(run.tokens),
        "finished": run.finished,
        "ended_s": round(ended_s, 1),
        "step_s": round(fmean(usual), 3) if usual else None,
        "late_share": round(sum(length > LATE * plan.pace_s for length in usual) / max(1, len(usual)), 3),
        "broken": list(run.broken),
        "restarted": run.restarted,
    }


def _rounded(at: float | None, zero_s: float) -> float | None:
    return None if at is None else round(at - zero_s, 1)


def _trained(steps_s: Sequence[float], step_tokens: int, every_s: float = 1.0) -> Iterable[tuple[float, int]]:
    """Time and trained tokens until then, about once a second; and at the end."""
    said_s = float("-inf")
    for count, at in enumerate(steps_s, 1):
        if at - said_s >= every_s or count == len(steps_s):
            said_s = at
            yield at, count * step_tokens


WRITTEN = frozenset(
    {"curve", "trained", "kills", "interruptions", "tokens", "finished", "ended_s", "step_s", "late_share", "broken"}
)
"""What a table and a picture need of a result."""


def read(result: Result, plan: Plan) -> Result:
    """A result that was written, with losses that are no numbers as such.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: no table can be made of it.
    """
    if lacking := WRITTEN - result.keys():
        raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    if not result["curve"]:
        raise ValueError("no loss was measured in it")
    result = result | {"curve": [[at, tokens, number(loss)] for at, tokens, loss in result["curve"]]}
    rows({"": result}, plan)
    return result


# --- side by side ------------------------------------------------------------------------------------------


def loss_at(result: Result, at_s: float) -> float:
    """Held-out loss of what was there at that time."""
    known = [loss for when, _, loss in result["curve"] if when <= at_s]
    return float(known[-1] if known else result["curve"][0][2])


def trained_at(result: Result, at_s: float) -> int:
    """Tokens trained until then."""
    return max((tokens for when, tokens in result["trained"] if when <= at_s), default=0)


def equal_time(results: Mapping[str, Result]) -> float:
    """When the first of the killed methods has spent its budget, or else the first one has ended."""
    killed = [one for one in results.values() if one["kills"]] or list(results.values())
    return float(min((one["ended_s"] for one in killed if one["finished"]), default=min(o["ended_s"] for o in killed)))


def _kill_lengths(result: Result) -> list[float]:
    return [one["trains_s"] - one["at_s"] for one in result["kills"] if one["trains_s"] is not None]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} s ({min(values):.1f} - {max(values):.1f})" if values else "-"


def _interruptions(result: Result) -> str:
    lengths = [one["length_s"] for one in result["interruptions"]]
    return f"{len(lengths)}: {_spread(lengths)}, {sum(lengths):.0f} s in all" if lengths else "none"


def _share(part: float, whole: float) -> str:
    return f"{part:,.0f} ({part / whole:.1%})" if whole else "-"


def _step(result: Result) -> str:
    """Its mean length; of a run in which each was an interruption there is none."""
    return "-" if result["step_s"] is None else f"{1000 * result['step_s']:.0f} ms"


def rows(results: Mapping[str, Result], plan: Plan) -> list[tuple[str, list[str]]]:
    """Name and a value for each method."""
    at_s = equal_time(results)
    lines: list[tuple[str, Callable[[Result], str]]] = [
        (f"held-out loss after {at_s:.0f} s", lambda one: f"{loss_at(one, at_s):.3f}"),
        (f"tokens trained in {at_s:.0f} s", lambda one: _share(trained_at(one, at_s), plan.tokens)),
        ("the budget was spent after", lambda one: f"{one['ended_s']:.0f} s" if one["finished"] else "not in time"),
        ("final held-out loss", lambda one: f"{one['curve'][-1][2]:.3f}"),
        ("kills", lambda one: str(len(one["kills"]))),
        ("nobody trained (median, least - most)", _interruptions),
        ("from a kill until that machine trains again", lambda one: _spread(_kill_lengths(one))),
        ("trained in all", lambda one: f"{one['tokens']['trained']:,}"),
        ("in the final parameters", lambda one: _share(one["tokens"]["final"], one["tokens"]["trained"])),
        ("lost", lambda one: _share(one["tokens"]["lost"], one["tokens"]["trained"])),
        ("a step, mean", _step),
        (f"steps more than {LATE - 1:.0%} longer than the pace", lambda one: f"{one['late_share']:.1%}"),
    ]
    return [(name, [value(one) for one in results.values()]) for name, value in lines]


def markdown(results: Mapping[str, Result], plan: Plan) -> str:
    """The table of a results page."""
    head = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    return "\n".join([*head, *(f"| {name} | " + " | ".join(values) + " |" for name, values in rows(results, plan))])
