"""Tables of an experiment's results: rows of runs that differ in their seeds only. Pure: results in, text out."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import Any

from pipeline.strict_json import number

from .settings import Experiment, LabRun, Row

Result = dict[str, Any]


@dataclass(slots=True)
class Line:
    """One row of the table."""

    row: Row
    results: list[Result]
    """Of those of its runs that were done."""
    values: list[float] = field(init=False)
    """Final measures."""

    def __post_init__(self) -> None:
        self.values = [number(result["final"]["value"]) for result in self.results]

    @property
    def label(self) -> str:
        """Name of the row."""
        return self.row.label

    @property
    def done(self) -> bool:
        """At least one of its runs was done."""
        return bool(self.results)

    @property
    def mid(self) -> float:
        """Median over the seeds."""
        return median(self.values)

    def mean_of(self, name: str) -> float | None:
        """Mean over the seeds of something else that results hold."""
        found = [result[name] for result in self.results if name in result]
        return mean(found) if found else None


@dataclass(slots=True)
class Table:
    """An experiment with what is known of it."""

    experiment: Experiment
    lines: list[Line]

    @property
    def measure(self) -> str:
        """What the values are."""
        return next((line.results[0]["measure"] for line in self.lines if line.done), "value")

    @property
    def higher_is_better(self) -> bool:
        """Direction of the measure."""
        return next((bool(line.results[0]["higher_is_better"]) for line in self.lines if line.done), False)

    def best(self) -> list[Line]:
        """Of the rows that differ in `best_of` only, the best one by its median."""
        chosen: dict[tuple[Any, ...], Line] = {}
        for line in self.lines:
            others = {n: v for n, v in line.row.swept.items() if n not in self.experiment.best_of}
            key = (line.row.variant, repr(others))
            held = chosen.get(key)
            if held is None or (line.done and (not held.done or self._better(line.mid, held.mid))):
                chosen[key] = line
        return list(chosen.values())

    def reference(self, line: Line) -> Line | None:
        """The reference's best row that a line is compared with: where it can, one with the line's learners."""
        of_it = [other for other in self.best() if other.row.variant == self.experiment.reference and other.done]
        same = [other for other in of_it if _shape(other) == _shape(line)]
        best = None
        for other in same or of_it:
            if best is None or self._better(other.mid, best.mid):
                best = other
        return best

    def _better(self, a: float, b: float) -> bool:
        return a > b if self.higher_is_better else a < b


def _shape(line: Line) -> tuple[object, ...]:
    run: LabRun = line.row.runs[0]
    return run.task, run.model, run.learners, run.steps, run.batch, run.fail_every_s is None


def table_of(experiment: Experiment, results: Iterable[tuple[LabRun, Result | None]]) -> Table:
    """An experiment with results by run; None: not done."""
    held = {run: result for run, result in results if result is not None}
    lines = [Line(row, [held[run] for run in row.runs if run in held]) for row in experiment.rows]
    return Table(experiment, lines)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds; 0 for a single one."""
    return stdev(values) if len(values) > 1 else 0.0


def markdown(table: Table) -> str:
    """Tables as Markdown: all rows, and each row's best of what the experiment names."""
    experiment, parts = table.experiment, []
    parts.append(f"### {experiment.name}\n\n{experiment.question}\n")
    if experiment.best_of:
        parts.append(f"Best {', '.join(experiment.best_of)} of each:\n\n{_rows(table, table.best())}\n\nAll:\n")
    parts.append(_rows(table, table.lines))
    return "\n".join(parts) + "\n"


def _rows(table: Table, lines: Sequence[Line]) -> str:
    versus = f" against {table.experiment.reference} |" if table.experiment.reference else ""
    head = f"| run | {table.measure}: median | +- | seeds |{versus} tokens merged | goodput | virtual h |"
    rule = "|---" * (head.count("|") - 1) + "|"
    return "\n".join([head, rule, *(_row(table, line) for line in lines)])


def _row(table: Table, line: Line) -> str:
    reference = table.reference(line)
    if not line.done:
        cells = [line.label, "not run", "", f"0 of {len(line.row.runs)}"]
        cells += [""] if table.experiment.reference else []
        return f"| {' | '.join([*cells, '', '', ''])} |"
    cells = [line.label, f"{line.mid:.4f}", f"{spread(line.values):.4f}"]
    cells.append(
        f"{len(line.values)}" + ("" if len(line.values) == len(line.row.runs) else f" of {len(line.row.runs)}")
    )
    if table.experiment.reference:
        cells.append("" if reference is None else f"{100 * (line.mid / reference.mid - 1):+.2f} %")
    merged = line.mean_of("merged_share")
    cells.append("" if merged is None else f"{100 * merged:.1f} %")
    cells.append(f"{100 * (line.mean_of('goodput') or math.nan):.1f} %")
    cells.append(f"{(line.mean_of('virtual_s') or 0) / 3600:.2f}")
    return f"| {' | '.join(cells)} |"


def as_json(table: Table) -> dict[str, Any]:
    """The same, and the curves, in JSON types."""
    best = {id(line) for line in table.best()}
    return {
        "experiment": table.experiment.name,
        "question": table.experiment.question,
        "measure": table.measure,
        "higher_is_better": table.higher_is_better,
        "rows": [
            {
                "variant": line.row.variant,
                "swept": line.row.swept,
                "label": line.label,
                "best": id(line) in best,
                "runs": len(line.row.runs),
                "median": line.mid if line.done else None,
                "spread": spread(line.values) if line.done else None,
                "results": line.results,
            }
            for line in table.lines
        ],
    }
