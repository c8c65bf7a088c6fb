"""Tables of the failure simulator: which cells are run, and what is shown of them."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import MAX_MEMBERS
from diloco.pipeline.units import YEAR_S, Span
from diloco_studies.goodput import calibrate as fitting
from diloco_studies.goodput import figures
from diloco_studies.goodput.commands.options import Files, Pictured, Sample, numbers, one_whole, whole
from diloco_studies.goodput.commands.runs import rows as run_rows
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.table import Cell, cells

LINKS = {
    "mean_participants": "in",
    "overwritten": "lost",
    "outer_steps_per_hour": "outer/h",
    "mean_sync_s": "sync s",
    "longest_gap_s": "gap s",
}
"""What is shown of the syncer's work, and its heading."""
DECIDED = {
    "mean_participants": "learners a merge",
    "mean_staleness": "staleness",
    "mean_grace_s": "grace s",
    "overwritten": "share overwritten",
    "outer_steps_per_hour": "outer steps an hour",
}
"""The same, in the table of decoupled runs."""
METHODS = {"data-parallel": "data-parallel", "elastic": "data-parallel, elastic", "diloco": "DiLoCo (waits)"}


def table(constants: Constants, chips: str, learners: str, sample: Sample, files: Pictured) -> None:
    """`diloco simulate table`."""
    sizes, counts = _asked(whole(chips, "chips"), learners, files)
    console = Console()
    rows = run_rows([(constants, cell) for cell in cells(sizes, counts)], sample)
    shown = _grid(f"goodput / uptime, %: {_said(sample)} (in brackets: the paper's)", [f"{n:,} chips" for n in sizes])
    for name, mine in _by_name(rows).items():
        texts = []
        for r in sorted(mine, key=lambda r: int(r["chips"])):
            known = "" if r["paper"] is None else f" ({100 * r['paper']:.0f})"
            texts.append(f"{100 * r['goodput']:.1f} / {100 * r['uptime']:.1f}{known}")
        shown.add_row(name, *texts)
    console.print(shown)
    did = _grid(" / ".join(DECIDED.values()), [f"{n:,} chips" for n in sizes])
    for name, mine in _by_name([row for row in rows if row["method"] == "decoupled"]).items():
        ordered = sorted(mine, key=lambda r: int(r["chips"]))
        did.add_row(name, *(" / ".join(_number(r, key, 3) for key in DECIDED) for r in ordered))
    console.print(did)
    files.write(rows, _about(constants, sample))
    files.draw(rows, f"A chip is interrupted once in {constants.mtbi / YEAR_S:g} y")


def mtbi(constants: Constants, chips: str, learners: str, times: str, sample: Sample, files: Pictured) -> None:
    """`diloco simulate mtbi`."""
    (size,), counts = _asked([one_whole(chips, "chips")], learners, files)
    spans, console = numbers(times, Span, "times"), Console()
    kinds = [Cell("data-parallel", 1, size), *(Cell("decoupled", count, size) for count in counts)]
    wanted = [(constants.model_copy(update={"mtbi": span}), cell) for cell in kinds for span in spans]
    rows = run_rows(wanted, sample)
    for row, (world, _) in zip(rows, wanted, strict=True):
        row["mtbi_s"], row["paper"] = world.mtbi, None
    shown = _grid(f"goodput % (uptime %, longest stall s) of {size:,} chips: {_said(sample)}", times.split(","))
    for name, mine in _by_name(rows).items():
        texts = [f"{100 * r['goodput']:.1f} ({100 * r['uptime']:.1f}, {r['longest_stall_s']:.0f})" for r in mine]
        shown.add_row(name, *texts)
    console.print(shown)
    files.write(rows, _about(constants, sample))
    files.draw(rows, f"{size:,} chips", "mtbi_s")


def calibrate(constants: Constants, held_out: str, sample: Sample, files: Files) -> None:
    """`diloco simulate calibrate`."""
    files.check()
    wanted = whole(held_out, "held-out")
    if not set(wanted) <= set(figures.CHIPS):
        raise UsageError(
            f"--held-out {held_out}: give columns of the paper's table, out of {', '.join(map(str, figures.CHIPS))}"
        )
    console, rows, fits = Console(), list[dict[str, Any]](), dict[str, dict[str, float]]()
    for column in wanted:
        fitted, mine = _fitted(constants, column, sample, console)
        rows += mine
        fits[str(column)] = {name: getattr(fitted, name) for name in (*fitting.FREE, "up")}
    if len(wanted) > 1:
        shown = _residuals([row for row in rows if row["held_out"]], sample, "each column by a fit to the others")
        console.print(shown)
    files.write(rows, {"fitted": fits, **_about(constants, sample)})


def _fitted(
    constants: Constants, held_out: int, sample: Sample, console: Console
) -> tuple[Constants, list[dict[str, Any]]]:
    """Constants fitted to all columns but one, and all cells by them."""
    seen = " and ".join(f"{chips:,}" for chips in figures.CHIPS if chips != held_out)
    console.print(f"fitting {', '.join(fitting.FREE)} to the columns of {seen} chips, in run time (1/goodput)")
    fitted = fitting.calibrate(constants, sample.days, told=console.print, held_out=held_out)
    rows = run_rows([(fitted, Cell(f.method, f.learners, f.chips)) for f in figures.TABLE], sample)
    for row in rows:
        row["held_out"] = row["chips"] == held_out
    console.print(_residuals(rows, sample, "seeds that the fit has not drawn"))
    found = ", ".join(f"{name} {getattr(fitted, name):.2f} s" for name in (*fitting.FREE, "up"))
    worst = {
        unseen: max(abs(row["goodput"] - row["paper"]) for row in rows if row["held_out"] is unseen)
        for unseen in (False, True)
    }
    console.print(
        f"constants: {found}; worst cell {100 * worst[True]:.1f} points off where it was held out, "
        f"{100 * worst[False]:.1f} where it was fitted"
    )
    return fitted, rows


def _residuals(rows: Sequence[dict[str, Any]], sample: Sample, what: str) -> Table:
    """Simulated less published, columns that a fit has not seen marked."""
    unseen = {row["chips"]: row["held_out"] for row in rows}
    names = [f"{chips:,}" + " (held out)" * unseen[chips] for chips in sorted(unseen)]
    shown = _grid(f"simulated - paper, percentage points: {_said(sample)}; {what}", names)
    for name, mine in _by_name(rows).items():
        texts = [f"{100 * (r['goodput'] - r['paper']):+.1f}" for r in sorted(mine, key=lambda r: int(r["chips"]))]
        shown.add_row(name, *texts)
    return shown


def link(constants: Constants, chips: str, learners: str, sample: Sample, files: Files) -> None:
    """`diloco simulate link`."""
    if constants.link_trace is None:
        raise UsageError(
            "pass --link-trace FILE with lines of `second bits_per_second latency_s`; see examples/link-trace.txt"
        )
    (size,), counts = _asked([one_whole(chips, "chips")], learners, files)
    console = Console()
    steady = constants.model_copy(update={"link_trace": None})
    kinds = [Cell(method, count, size) for method in ("diloco", "decoupled") for count in counts]
    wanted = [(world, cell) for cell in kinds for world in (steady, constants)]
    rows = run_rows(wanted, sample)
    title = f"{size:,} chips; a steady link of {constants.link / 1e9:g} Gbit/s, and {constants.link_trace}"
    shown = _grid(title, ["link", "goodput %", *LINKS.values()])
    for row, (world, cell) in zip(rows, wanted, strict=True):
        row["link"] = "steady" if world is steady else "trace"
        texts = [_number(row, name, 4) for name in LINKS]
        shown.add_row(name_of(cell.method, cell.learners), row["link"], f"{100 * row['goodput']:.1f}", *texts)
    console.print(shown)
    files.write(rows, _about(constants, sample))


def name_of(method: str, learners: int) -> str:
    """A row's name."""
    if method == "decoupled":
        return f"decoupled, M={learners}"
    return METHODS[method] + (f", M={learners}" if method == "diloco" else "")


def _asked(sizes: list[int], learners: str, files: Files) -> tuple[list[int], list[int]]:
    """Chips and numbers of learners, after all checks that come before the work.

    Raises:
        UsageError: what is asked for cannot be done.
    """
    files.check()
    counts = whole(learners, "learners")
    if max(counts) > min(sizes):
        raise UsageError(
            f"{min(sizes):,} chips are too few for {max(counts)} learners: use more --chips or fewer --learners"
        )
    if max(counts) > MAX_MEMBERS:
        raise UsageError(f"--learners {max(counts)}: a merge has at most {MAX_MEMBERS:,} learners")
    return sizes, counts


def _about(constants: Constants, sample: Sample) -> dict[str, Any]:
    return {"constants": constants.model_dump(mode="json"), "days": sample.days, "seeds": sample.seeds}


def _said(sample: Sample) -> str:
    return f"{sample.days:g} days, {sample.seeds} seeds"


def _grid(title: str, columns: Sequence[str]) -> Table:
    shown = Table(title=title)
    shown.add_column("")
    for name in columns:
        shown.add_column(name, justify="right")
    return shown


def _number(row: dict[str, Any], key: str, digits: int) -> str:
    return "-" if row.get(key) is None else f"{row[key]:.{digits}g}"


def _by_name(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(name_of(row["method"], row["learners"]), []).append(row)
    return found
