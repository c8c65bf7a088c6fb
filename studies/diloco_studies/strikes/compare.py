"""Two struck runs side by side: decoupled and data-parallel, or any two reports of `diloco chaos`. Pure.

Goodput here is what the strikes leave of a method's own speed: tokens a second that come to be in the final parameters,
over those of the same run undisturbed (`--undisturbed`). What is made again, overwritten or lost counts for nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diloco_studies.strikes.report import counted, seconds

Report = dict[str, Any]

ALIKE = ("learners", "model", "data", "seq_len", "batch", "accumulate", "lr", "pace", "threads")
"""Settings in which runs that are compared should not differ."""


def column(report: Mapping[str, Any]) -> Report:
    """What is compared of one run."""
    other = report.get("undisturbed")
    alone = None if other is None else other["useful"]["per_s"]
    return {
        "method": report["method"],
        "strikes": {manner: dict(by) for manner, by in report["strikes"].items() if any(by.values())},
        "strikes_missed": report["strikes_missed"],
        "useful_tokens_per_s": report["useful"]["per_s"],
        "undisturbed_tokens_per_s": alone,
        "goodput": report["useful"]["per_s"] / alone if alone else None,
        "kept_share": report["goodput"]["merged_share"],
        "longest_standstill_s": report["longest_standstill_s"],
        "global_val_loss": report["global_val_loss"],
        "undisturbed_val_loss": None if other is None else other["global_val_loss"],
        "useful_tokens": report["ledger"]["merged"],
        "wall_s": report["wall_s"],
        "verdict": report["verdict"],
    }


def compare(reports: Sequence[Mapping[str, Any]]) -> Report:
    """Columns, and in what the runs differ that should be alike."""
    one, two = reports
    differences = [
        f"{name}: {one['settings'].get(name)} and {two['settings'].get(name)}"
        for name in ALIKE
        if one["settings"].get(name) != two["settings"].get(name)
    ]
    if one["seed"] != two["seed"]:
        differences.append(f"seed: {one['seed']} and {two['seed']}")
    plans = [{flag: text for flag, text in report["plan"].items() if text not in ("", "none")} for report in reports]
    if plans[0] != plans[1]:
        differences.append(f"strikes: {plans[0]} and {plans[1]}")
    return {"columns": [column(report) for report in reports], "differences": differences}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _rows(columns: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, list[str]]]:
    found = list(columns)
    yield "strikes", ["; ".join(f"{how} {counted(by)}" for how, by in c["strikes"].items()) or "none" for c in found]
    yield "planned strikes that found nobody to hit", [str(c["strikes_missed"]) for c in found]
    yield "useful tokens/s, undisturbed", [_number(c["undisturbed_tokens_per_s"]) for c in found]
    yield "useful tokens/s, struck", [_number(c["useful_tokens_per_s"]) for c in found]
    yield "goodput: struck / undisturbed", [_share(c["goodput"]) for c in found]
    yield "of the trained tokens in the final parameters", [_share(c["kept_share"]) for c in found]
    yield "longest time without progress", [seconds(c["longest_standstill_s"]) for c in found]
    yield "useful tokens in all", [_number(c["useful_tokens"]) for c in found]
    yield "final loss", [_loss(c["global_val_loss"]) for c in found]
    yield "final loss, undisturbed, at equal useful tokens", [_loss(c["undisturbed_val_loss"]) for c in found]
    yield "verdict", [c["verdict"] for c in found]


def table(comparison: Mapping[str, Any]) -> list[str]:
    """Lines of a table in Markdown."""
    columns = comparison["columns"]
    return [
        "| | " + " | ".join(column["method"] for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(f"| {name} | " + " | ".join(values) + " |" for name, values in _rows(columns)),
        *(
            ["", "The runs differ in more than their method: " + "; ".join(comparison["differences"]) + "."]
            if comparison["differences"]
            else []
        ),
    ]
