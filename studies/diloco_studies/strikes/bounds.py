"""What a struck run is held against besides its promises: measured beside its bound, and whether it holds. Pure.

These are matters of time on a machine that may be shared, so they decide no verdict. Gaps are those in which no strike
of another kind was under way: where two overlap, neither is the cause of the gap alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Report = dict[str, Any]

STEP_RATE_KEPT = 0.97
"""Of a paced learner's step rate, while syncers or Redis are away."""
BLOCKED_SHARE = 0.01
"""Of a learner's time, inside the library; of runs without --pace."""
LOSS_RATIO = 1.02
"""Final loss over that of the same run undisturbed, at equal merged tokens."""


def bounds_of(report: Mapping[str, Any]) -> list[Report]:
    """Rows of what, measured, bound, unit, holds (None: not measured) and note."""
    return [*_gaps(report), *(_rates(report) if report["settings"].get("pace") else _blocked(report)), *_loss(report)]


def _row(
    what: str, unit: str, measured: float | None, bound: float | None, least: bool = False, note: str = ""
) -> Report:
    holds = None
    if measured is not None and bound is not None:
        holds = measured >= bound if least else measured <= bound
    return {
        "what": what,
        "unit": unit,
        "measured": measured,
        "bound": bound,
        "at": "least" if least else "most",
        "holds": holds,
        "note": note,
    }


def _gaps(report: Mapping[str, Any]) -> Iterator[Report]:
    gaps, yard = report["gaps_by_strike"]["any_fragment"], report["yardsticks"]
    for kind, bound, of in (
        ("kill learner", yard["after_a_learner_s"], "2 rounds of H steps"),
        ("kill syncer", yard["after_a_syncer_s"], "2 lease times and a window"),
    ):
        if kind not in gaps:
            continue
        alone_s, longest_s = gaps[kind]["alone_s"], gaps[kind]["longest_s"]
        note = f"at most {of}"
        if kind == "kill syncer" and report["settings"]["syncers"] == 1:
            away_s = _longest_strike_s(report, "syncer")
            bound = None if bound is None else bound + away_s
            note += f", and the {away_s:.1f} s for which the only syncer was away"
        if longest_s is not None and longest_s != alone_s:
            note += f"; {longest_s:.1f} s where strikes of other kinds were under way too"
        yield _row(f"longest time without a commit after `{kind}`", "s", alone_s, bound, note=note)


def _rates(report: Mapping[str, Any]) -> Iterator[Report]:
    for party, rates in report["step_rates"].items():
        if rates["outages"]:
            longest_s = _longest_strike_s(report, party)
            note = f"over all learners; {rates['outages']} outages, the longest strike {longest_s:.1f} s"
            what = f"step rate of paced learners during outages of {party} / before"
            yield _row(what, "", rates["ratio"], STEP_RATE_KEPT, least=True, note=note)


def _longest_strike_s(report: Mapping[str, Any], party: str) -> float:
    strikes = report["timeline"]["strikes"]
    return max((one["length_s"] for one in strikes if one["kind"].endswith(f" {party}")), default=0.0)


def _blocked(report: Mapping[str, Any]) -> Iterator[Report]:
    what = "share of its time that a learner's training waited for the library"
    yield _row(what, "%", 100 * report["blocked_share"], 100 * BLOCKED_SHARE, note="the worst learner, all its lives")


def _loss(report: Mapping[str, Any]) -> Iterator[Report]:
    other = report.get("undisturbed")
    if other is None:
        return
    losses = report["global_val_loss"], other["global_val_loss"]
    ratio = None if None in losses or not losses[1] else losses[0] / losses[1]
    note = f"{_loss_of(report)}; undisturbed {_loss_of(other)}"
    yield _row("final loss / that of the same run undisturbed", "", ratio, LOSS_RATIO, note=note)


def _loss_of(report: Mapping[str, Any]) -> str:
    loss = report["global_val_loss"]
    return f"{'-' if loss is None else f'{loss:.4f}'} at {report['ledger']['merged']} merged tokens"


# --- for people --------------------------------------------------------------------------------------------


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if unit == "s" else f"{value:.2f} %" if unit == "%" else f"{value:.3f}"


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a bound, for the terminal."""
    words = {
        True: "holds",
        False: "outside the usual bound, which is information and not part of the verdict",
        None: "not measured",
    }
    return [
        f"{row['what']}: {_shown(row['measured'], row['unit'])}, at {row['at']} {_shown(row['bound'], row['unit'])}: "
        f"{words[row['holds']]} ({row['note']})"
        for row in rows
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table in Markdown."""
    words = {True: "yes", False: "**no**", None: "not measured"}
    return [
        "| measured | value | at | bound | holds | |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['what']} | {_shown(row['measured'], row['unit'])} | {row['at']} | "
            f"{_shown(row['bound'], row['unit'])} | {words[row['holds']]} | {row['note']} |"
            for row in rows
        ),
    ]
