"""What tables and pictures need of a run, and the CSV that keeps it beside a page. Pure: text in, text out.

A line of the CSV is named by its experiment, its row of the report and its seed. Raw results stay in their folder.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import number
from diloco.pipeline.wrong_values import format_problem

COLUMNS = (
    *("experiment", "run", "seed", "settings", "measure", "better", "value"),
    *("merged_share", "overwritten_share", "bytes_a_token", "syncer_s", "goodput", "virtual_s", "curve"),
)
BETTER = {"more": True, "less": False}
Number = Annotated[float, Field(strict=True)]
"""A number in JSON, and no word for one."""
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MAX_TOKENS = 2**63
MAX_MARKS = 15
"""Of a curve, in the CSV."""


class Mark(NamedTuple):
    """A point of a curve."""

    tokens: Annotated[int, Field(strict=True)]
    """Trained by all learners until then."""
    virtual_s: Finite
    value: Number
    exact: Finite | None = None
    """Share of the held-out answers that are exactly right, where the task has answers."""


class RunName(NamedTuple):
    """Whose summary it is."""

    experiment: str
    run: str
    """Label of the row."""
    seed: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run, in short."""

    settings: str
    """Digest of all that the run was told: a file that says something else now does not have this result. Of a run that
    no file can ask for any more, `commit` and the last commit that can make it."""
    measure: str
    """What the values are, with their unit."""
    higher_is_better: bool
    value: Number
    """At the end."""
    merged_share: Finite | None
    """Of the trained tokens; None where there is no protocol, as for the next one."""
    overwritten_share: Finite | None
    bytes_a_token: Finite | None
    """Of deltas and globals, to and from all learners, for each trained token; None where there is no protocol, or in
    results of earlier code, as the next one is."""
    syncer_s: Finite | None
    """Processor time of merges and outer steps, with encoding and digests."""
    goodput: Finite
    virtual_s: Finite
    curve: Annotated[tuple[Mark, ...], Field(min_length=1)]

    @property
    def exact(self) -> float | None:
        """As of the last mark."""
        return self.curve[-1].exact


_CHECKED = TypeAdapter(RunSummary)


def summary_of(result: Mapping[str, Any], settings: str) -> RunSummary:
    """Of a raw result, as `Recorder.result` has it. settings: digest of what its run was told.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError: it is none.
    """
    summary = {
        "settings": settings,
        "measure": result["measure"],
        "higher_is_better": result["higher_is_better"],
        "value": number(result["final"]["value"]),
        "merged_share": result.get("merged_share"),
        "overwritten_share": result.get("overwritten_share"),
        "bytes_a_token": result["learner_bytes"] / result["tokens"] if "learner_bytes" in result else None,
        "syncer_s": result.get("syncer_s"),
        "goodput": result["goodput"],
        "virtual_s": result["virtual_s"],
        "curve": tuple(
            Mark(p["tokens"], p["virtual_s"], number(p["measures"]["value"]), p["measures"].get("exact"))
            for p in result["points"]
        ),
    }
    try:
        return _CHECKED.validate_python(summary)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {format_problem(problem)}") from error


def encode(summaries: Mapping[RunName, RunSummary]) -> str:
    """A CSV, experiments in the order of their names; eight digits of what tables show, five of a thinned curve."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, one in sorted(summaries.items(), key=lambda item: item[0].experiment):
        better = "more" if one.higher_is_better else "less"
        shares = (one.merged_share, one.overwritten_share, one.bytes_a_token, one.syncer_s)
        curve = ";".join(map(_cell, _thinned(one.curve)))
        cells = ["" if share is None else f"{share:.4g}" for share in shares]
        ends = (f"{one.value:.8g}", *cells, f"{one.goodput:.4g}", f"{one.virtual_s:.6g}")
        writer.writerow((*name, one.settings, one.measure, better, *ends, curve))
    return text.getvalue()


def decode(text: str) -> dict[RunName, RunSummary]:
    """What `encode` wrote.

    Raises:
        UsageError: other columns, or a line that is none; says which.
    """
    lines = csv.reader(io.StringIO(text))
    summaries = dict[RunName, RunSummary]()
    try:
        if (found := tuple(next(lines, ()))) != COLUMNS:
            raise UsageError(f"the columns are {', '.join(found)}, but a table of summaries has {', '.join(COLUMNS)}")
        for line in lines:
            if len(line) != len(COLUMNS):
                raise UsageError(f"line {lines.line_num} has {len(line)} cells, but there are {len(COLUMNS)} columns")
            name, one = _summary(line)
            if name in summaries:
                run = f"{name.experiment}'s {name.run!r}, seed {name.seed}"
                raise UsageError(f"line {lines.line_num} repeats the run of an earlier line: {run}")
            summaries[name] = one
    except (csv.Error, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"line {lines.line_num} is not a summary: {error}") from error
    return summaries


def _summary(line: Sequence[str]) -> tuple[RunName, RunSummary]:
    cells = dict(zip(COLUMNS, line, strict=True))
    if cells["better"] not in BETTER:
        raise ValueError(f"{cells['better']!r} is neither {' nor '.join(BETTER)}")
    return RunName(cells["experiment"], cells["run"], int(cells["seed"])), RunSummary(
        settings=cells["settings"],
        measure=cells["measure"],
        higher_is_better=BETTER[cells["better"]],
        value=float(cells["value"]),
        merged_share=_known(cells["merged_share"]),
        overwritten_share=_known(cells["overwritten_share"]),
        bytes_a_token=_known(cells["bytes_a_token"]),
        syncer_s=_known(cells["syncer_s"]),
        goodput=_number(cells["goodput"]),
        virtual_s=_number(cells["virtual_s"]),
        curve=tuple(_mark(*point.split(" ")) for point in cells["curve"].split(";")),
    )


def _thinned(curve: Sequence[Mark]) -> Sequence[Mark]:
    """Every n-th mark, counted from the last one."""
    every = -(-len(curve) // MAX_MARKS)
    return curve[(len(curve) - 1) % every :: every]


def _known(cell: str) -> float | None:
    return _number(cell) if cell else None


def _cell(mark: Mark) -> str:
    exact = "" if mark.exact is None else f" {mark.exact:.5g}"
    return f"{mark.tokens} {mark.virtual_s:.5g} {mark.value:.5g}{exact}"


def _mark(tokens: str, virtual_s: str, value: str, exact: str | None = None) -> Mark:
    if int(tokens) > MAX_TOKENS:
        raise ValueError(f"tokens of {len(tokens)} digits")
    return Mark(int(tokens), _number(virtual_s), float(value), None if exact is None else _number(exact))


def _number(cell: str) -> float:
    number = float(cell)
    if not math.isfinite(number):
        raise ValueError(f"{cell} is not a finite number")
    return number
