"""Tables of an experiment's summaries: rows of runs that differ in their seeds only. Pure: summaries in, text out."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, stdev

from diloco_studies.quality.experiment import Experiment, Row
from diloco_studies.quality.results.summary import RunName, RunSummary
from diloco_studies.quality.settings import LabRun


@dataclass(slots=True)
class Line:
    """One row of the table."""

    row: Row
    summaries: dict[int, RunSummary]
    """By seed, of those of its runs that were done."""

    @property
    def label(self) -> str:
        """Name of the row."""
        return self.row.label

    @property
    def done(self) -> bool:
        """At least one of its runs was done."""
        return bool(self.summaries)

    @property
    def values(self) -> list[float]:
        """Final measures."""
        return [one.value for one in self.summaries.values()]

    @property
    def seeds(self) -> list[int]:
        """Of its runs, done or not; the lowest first."""
        return sorted(run.seed for run in self.row.runs)

    @property
    def mid(self) -> float:
        """Median over the seeds; not a number where one has diverged."""
        return median(self.values) if all(map(math.isfinite, self.values)) else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds; 0 for a single one, not a number where one has diverged."""
        if not all(map(math.isfinite, self.values)):
            return math.nan
        return stdev(self.values) if len(self.summaries) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a row ends from its reference, in percent of that: over the seeds that both have, or all if there are
    none."""

    of_medians: float
    by_seed: dict[int, float]


@dataclass(slots=True)
class Table:
    """An experiment with what is known of it."""

    experiment: Experiment
    lines: list[Line]
    missing: str = "not run"
    """What to say of a row without a summary."""

    @property
    def measure(self) -> str:
        """What the values are; of several tasks, all of it."""
        return "; ".join(dict.fromkeys(one.measure for _, one in self.named())) or "value"

    @property
    def higher_is_better(self) -> bool:
        """Direction of the measure."""
        return next((one.higher_is_better for _, one in self.named()), False)

    def named(self) -> Iterator[tuple[RunName, RunSummary]]:
        """All summaries, in the order of the rows."""
        for line in self.lines:
            for seed, one in line.summaries.items():
                yield RunName(self.experiment.name, line.label, seed), one

    def best(self) -> list[Line]:
        """Of the rows that differ in `best_of` only, the best one by its median; one that diverged only among such."""
        chosen: dict[tuple[str, str], Line] = {}
        for line in self.lines:
            others = {n: v for n, v in line.row.swept.items() if n not in self.experiment.best_of}
            key = (line.row.variant, repr(others))
            held = chosen.get(key)
            if held is None or (line.done and (not held.done or self._better(line.mid, held.mid))):
                chosen[key] = line
        return list(chosen.values())

    def reference(self, line: Line) -> Line | None:
        """The reference's best row that a line is compared with: one that has not diverged; where it can, one with the
        line's learners."""
        of_it = [
            other
            for other in self.best()
            if other.row.variant == self.experiment.reference and other.done and math.isfinite(other.mid)
        ]
        same = [other for other in of_it if _shape(other) == _shape(line)]
        best = None
        for other in same or of_it:
            if best is None or self._better(other.mid, best.mid):
                best = other
        return best

    def distance(self, line: Line) -> Distance | None:
        """From the reference; None: there is none, or one of the two has diverged, or the reference ended at 0."""
        other = self.reference(line)
        if other is None or not line.done or not math.isfinite(line.mid):
            return None
        both = [seed for seed in line.seeds if seed in line.summaries and seed in other.summaries]
        ours, theirs = ([one.summaries[seed].value for seed in both] or one.values for one in (line, other))
        if not all(theirs) or not median(theirs):
            return None
        by_seed = dict(zip(both, map(_percent, ours, theirs), strict=False))  # {} where they share none
        return Distance(_percent(median(ours), median(theirs)), by_seed)

    def _better(self, a: float, b: float) -> bool:
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.isfinite(a)
        return a > b if self.higher_is_better else a < b


def _shape(line: Line) -> tuple[object, ...]:
    run: LabRun = line.row.runs[0]
    return run.task, run.model, run.learners, run.steps, run.batch, run.fail_every_s is None


def table_of(
    experiment: Experiment, find: Callable[[Row, LabRun], RunSummary | None], missing: str = "not run"
) -> Table:
    """An experiment with what `find` knows of its runs; None: nothing. missing: what that means."""
    lines = []
    for row in experiment.rows:
        found = ((run.seed, find(row, run)) for run in row.runs)
        lines.append(Line(row, {seed: one for seed, one in found if one is not None}))
    return Table(experiment, lines, missing)


def markdown(table: Table) -> str:
    """Tables as Markdown: all rows, and each row's best of what the experiment names."""
    experiment, parts = table.experiment, []
    parts.append(f"### {experiment.name}\n\n{experiment.question}\n")
    if experiment.best_of and table.best() != table.lines:
        parts.append(f"Best {', '.join(experiment.best_of)} of each:\n\n{_rows(table, table.best())}\n\nAll:\n")
    parts.append(_rows(table, table.lines))
    parts += [f"\n{said}" for said in _no_difference(table)]
    return "\n".join(parts) + "\n"


def _no_difference(table: Table) -> Iterator[str]:
    """Of rows whose measures are the same all along, in all seeds: not of the same value by chance."""
    alike: dict[object, list[str]] = {}
    for line in table.lines:
        if line.done and math.isfinite(line.mid):
            measures = {
                seed: (one.measure, one.value, *(mark.value for mark in one.curve))
                for seed, one in line.summaries.items()
            }
            alike.setdefault(tuple(sorted(measures.items())), []).append(repr(line.label))
    for *labels, last in alike.values():
        if labels:
            yield (
                f"rows {', '.join(labels)} and {last} ended with the same values to the last digit: "
                "their settings made no difference"
            )


def _rows(table: Table, lines: Sequence[Line]) -> str:
    columns = _columns(table, lines)
    rows = [list(columns), *(_cells(table, line, columns) for line in lines)]
    head, *rest = [f"| {' | '.join(map(_escaped, cells))} |" for cells in rows]
    return "\n".join([head, "|---" * len(columns) + "|", *rest])


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|")


Columns = dict[str, Callable[[Line], str]]
"""By its head, what a column says of a row of which a run was done."""


def _columns(table: Table, lines: Sequence[Line]) -> Columns:
    columns: Columns = {
        "run": lambda line: line.label,
        f"{table.measure}: median": lambda line: f"{line.mid:.4f}",
        "+-": lambda line: f"{line.spread:.4f}" if len(line.summaries) > 1 else "",
    }
    if any(len(line.summaries) > 1 for line in lines):
        columns["by seed"] = _by_seed
    columns["seeds"] = _seeds
    if table.experiment.reference:
        columns[f"against {table.experiment.reference}"] = partial(_against, table)
    if any(one.exact is not None for _, one in table.named()):
        columns["exact"] = _exact
    return columns | {
        "tokens merged": _merged,
        "bytes a token": lambda line: _median(one.bytes_a_token for one in line.summaries.values()),
        "syncer s": lambda line: _median(one.syncer_s for one in line.summaries.values()),
        "goodput": lambda line: f"{100 * median(one.goodput for one in line.summaries.values()):.1f} %",
        "virtual h": lambda line: f"{median(one.virtual_s for one in line.summaries.values()) / 3600:.2f}",
    }


def _cells(table: Table, line: Line, columns: Columns) -> list[str]:
    if line.done:
        return [tell(line) for tell in columns.values()]
    return [line.label, table.missing, *(_seeds(line) if head == "seeds" else "" for head in list(columns)[2:])]


def _by_seed(line: Line) -> str:
    """Final values; '-' of a seed that was not done."""
    if len(line.seeds) == 1:
        return ""
    return ", ".join(f"{line.summaries[seed].value:#.4g}" if seed in line.summaries else "-" for seed in line.seeds)


def _seeds(line: Line) -> str:
    done, of = len(line.summaries), len(line.row.runs)
    return f"{done}" if done == of and line.done else f"{done} of {of}"


def _against(table: Table, line: Line) -> str:
    """Of the medians; of a row of several seeds besides of each seed, '-' of those that the reference has not."""
    found = table.distance(line)
    if found is None:
        return ""
    of_medians = f"{found.of_medians:+.2f} %"
    if not found.by_seed:
        return f"{of_medians} (other seeds)"
    if table.reference(line) is line or len(line.summaries) == 1:
        return of_medians
    pairs = (f"{found.by_seed[seed]:+.2f}" if seed in found.by_seed else "-" for seed in line.seeds)
    return f"{of_medians} ({', '.join(pairs)})"


def _percent(value: float, of: float) -> float:
    return 100 * (value / of - 1)


def _exact(line: Line) -> str:
    exact = [one.exact for one in line.summaries.values() if one.exact is not None]
    return f"{100 * median(exact):.1f} %" if exact else ""


def _merged(line: Line) -> str:
    merged = [one.merged_share for one in line.summaries.values() if one.merged_share is not None]
    return f"{100 * median(merged):.1f} %" if merged else ""


def _median(counted: Iterable[float | None]) -> str:
    known = [one for one in counted if one is not None]
    return f"{median(known):.3g}" if known else ""
