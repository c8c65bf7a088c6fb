"""Show a run's status: as a live view on a terminal, otherwise as a plain line every ten seconds.

`render` and `plain_line` are pure functions of the status dict (`pipeline.view.status_reader`).
"""

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

import typer
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from diloco.pipeline.pacing import OuterStep
from diloco.pipeline.units import count, counted, duration
from diloco.pipeline.view.goodput import cost
from diloco.pipeline.view.merged_share import RECENT_S, MergedShare
from diloco.pipeline.view.status import (
    EvaluationStatus,
    FragmentStatus,
    LearnerStatus,
    Status,
    TokensLost,
    present,
    speed,
)

PLAIN_EVERY_S = 10.0
# Most learners, and most fragments, that are shown: more rows would not fit on a screen.
MAX_ROWS = 16
# Minimum width of the progress bar next to its figures, in cells; if it would be narrower, they go below it.
MIN_BAR = 10

_STATE_STYLES = {"idle": "dim", "collecting": "yellow", "grace": "cyan", "uploading": "blue", "merging": "green"}


def compact_versions(versions: list[int]) -> str:
    """Format adopted versions in few characters: '13', '12-13'; '-' before the first."""
    if not versions or max(versions) < 0:
        return "-"
    low, high = max(0, min(versions)), max(versions)
    return str(high) if low == high else f"{low}-{high}"


def merged_share(shares: MergedShare) -> str:
    """Format the share of trained tokens: '82% (3% pending, 84% in the last 5:00)', or '-' without any."""
    if shares["since_start"] is None or shares["pending"] is None:
        return "-"
    more = [f"{shares['pending']:.0%} pending"] if shares["pending"] >= 0.005 else []
    if shares["recent"] is not None and not shares["recent_is_all"]:
        more.append(f"{shares['recent']:.0%} in the last {duration(shares['recent_s'])}")
    return f"{shares['since_start']:.0%}" + (f" ({', '.join(more)})" if more else "")


def goodput_words(goodput: Mapping[str, Any] | None) -> str:
    """Format goodput of a status or report: '93.1% (95.0% in the last 5:00), badput 4.0% away, 2.9% rejoining'."""
    if goodput is None or (share := goodput["since_start"]["goodput"]) is None:
        return "-"
    lately = goodput["recent"]["goodput"]
    recent = "" if lately is None else f" ({lately:.1%} in the last {duration(RECENT_S)})"
    causes = sorted(goodput["since_start"]["badput"].items(), key=lambda item: -item[1])
    badput = ", ".join(f"{one:.1%} {cause}" for cause, one in causes if one >= 0.0005)
    return f"{share:.1%}{recent}{', badput ' * bool(badput)}{badput}"


def cost_words(goodput: Mapping[str, Any] | None, price: float) -> str:
    """Format the cost of a run: '12.60, 3.21 per million merged tokens; badput 1.10, of which failures 0.80'."""
    if (found := cost(goodput, price)) is None:
        return "not known"
    merged = found["per_million_merged_tokens"]
    each = "" if merged is None else f", {_money(merged)} per million merged tokens"
    badput, failures = _money(sum(found["badput"].values())), _money(found["failures"])
    return f"{_money(found['total'])}{each}; badput {badput}, of which failures {failures}"


def _money(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.2g}"


def time_left(status: Status) -> float | None:
    """Return the seconds to the budget at the live learners' current speed; None if none trains."""
    at = speed(status["learners"])
    left = (1 - status["progress"]) * status["budget_tokens"]
    return left / at if at > 0 else None


def trained(status: Status) -> str:
    """Format progress: '1.2M of 2.5M tokens'. The budget is not known before the first learner has set it."""
    if not status["budget_tokens"]:
        return f"{count(status['tokens'])} tokens, budget not known yet" if status["tokens"] else "no tokens yet"
    return f"{count(status['tokens'])} of {count(status['budget_tokens'])} tokens"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _condition(learner: LearnerStatus) -> Text:
    if learner["left"]:
        return Text("left", "dim")
    return Text("live", "green") if learner["live"] else Text(f"silent for {learner['age_s']:.0f} s", "red")


class Fitting:
    """A table that is made narrower until it fits: by less padding and folded cells, then by fewer columns."""

    def __init__(
        self, columns: Mapping[str, Sequence[str | Text]], left: Collection[str], spare: Sequence[str]
    ) -> None:
        """Take the cells, and say how the table may be made narrower.

        Args:
            columns: cells by heading; those of the headings in `_FOLDED` may be folded.
            left: headings of the columns that are flush left.
            spare: headings of the columns that may be left out, in this order.
        """
        self._columns, self._left, self._spare = columns, left, spare

    def _table(self, narrow: bool, without: Collection[str] = ()) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=narrow)
        names = [name for name in self._columns if name not in without]
        for name in names:
            table.add_column(
                name,
                justify="left" if name in self._left else "right",
                no_wrap=name not in _FOLDED,
                overflow="fold" if name in _FOLDED else "ellipsis",
                max_width=_FOLDED.get(name) if narrow else None,
            )
        for row in zip(*(self._columns[name] for name in names), strict=True):
            table.add_row(*row)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table(narrow=False)
        unbounded = options.update(max_width=10_000)
        for kept in range(len(self._spare) + 1):
            if console.measure(table, options=unbounded).maximum <= options.max_width:
                break
            table = self._table(narrow=True, without=self._spare[:kept])
        yield table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(narrow=False))


# Columns whose cells may take several lines -> their width in a narrow table.
_FOLDED = {"learner": 20, "state": 8}


def _learner_table(status: Status) -> Fitting:
    rows: list[tuple[str | Text, ...]] = []
    learners = present(status["learners"])
    for learner in learners[:MAX_ROWS]:
        rows.append(
            (
                Text(learner["id"]),
                str(learner.get("ranks", 1)),
                str(learner["step"]),
                count(learner["tokens_per_s"]) if learner["live"] else "-",
                _loss(learner["loss"]),
                compact_versions(learner["versions"]),
                _condition(learner),
            )
        )
    if len(learners) > MAX_ROWS:
        rows.append((Text(f"... {len(learners) - MAX_ROWS} more", "dim"), "", "", "", "", "", ""))
    names = ("learner", "ranks", "inner step", "tokens/s", "loss", "versions", "state")
    columns = {name: [row[number] for row in rows] for number, name in enumerate(names)}
    if all(learner.get("ranks", 1) == 1 for learner in learners):
        del columns["ranks"]
    spare = [name for name in ("inner step", "tokens/s", "loss", "ranks") if name in columns]
    return Fitting(columns, left=("learner", "state"), spare=spare)


def _interval(fragment: FragmentStatus) -> str:
    """Format the sync interval: '24'; if it is longer than asked for, '72 (asked: 24)'."""
    interval, asked = fragment["interval"], fragment["asked_interval"]
    return f"{interval} (asked: {asked})" if 0 < asked < interval else str(interval)


def _fragment_table(status: Status) -> Fitting:
    rows: list[tuple[str | Text, ...]] = []
    fragments = status["fragments"]
    for fragment in fragments[:MAX_ROWS]:
        window = fragment["window"]
        left = window["deadline_in_s"]
        rows.append(
            (
                str(fragment["id"]),
                str(fragment["version"]),
                _interval(fragment),
                Text(window["state"], _STATE_STYLES.get(window["state"], "")),
                f"{len(window['members'])} / {window['quorum']}",
                str(window["expected"]),
                "" if left is None or window["state"] != "grace" else f"{max(0.0, left):.1f} s",
            )
        )
    if len(fragments) > MAX_ROWS:
        rows.append(("", "", "", Text(f"... {len(fragments) - MAX_ROWS} more", "dim"), "", "", ""))
    names = ("fragment", "version", "interval", "window", "in / K", "expected", "grace left")
    columns = {name: [row[number] for row in rows] for number, name in enumerate(names)}
    return Fitting(columns, left=("window",), spare=("interval", "expected", "grace left", "in / K"))


def _syncers(status: Status) -> str:
    """Format the number of syncers and the leader: '3, a leads'."""
    lead = next((one["id"] for one in status["syncers"] if one["leads"]), None)
    return f"{len(status['syncers'])}, {escape(lead) if lead else 'nobody'} leads"


def refusals(by_reason: dict[str, int]) -> str:
    """Format refused deltas by reason: '12 deltas (8 non_finite, 4 absurd_norm)'."""
    total = sum(by_reason.values())
    ordered = sorted(by_reason.items(), key=lambda item: (-item[1], item[0]))
    return f"{counted(total, 'delta')} ({', '.join(f'{n} {reason}' for reason, n in ordered)})"


def _outer_step(found: OuterStep) -> str:
    """Format the time of an outer step: '2.6 s, 130% of its room'."""
    return f"{found['outer_s']:.2g} s, {found['share']:.0%} of its budget"


def _lost(gone: TokensLost) -> str:
    """Format lost tokens by cause: '21.0k overwritten, 0 rejected, 3000 died'. They will never be merged."""
    parts = (("overwritten", gone["overwritten"]), ("rejected", gone["rejected"]), ("died", gone["died"]))
    return ", ".join(f"{count(tokens)} {cause}" for cause, tokens in parts)


def say(text: str | Text, console: Console | None = None) -> None:
    """Print text, by default to stdout; a terminal gets its lines broken between words, and a pipe whole lines."""
    console = console or Console(highlight=False, markup=False)
    if console.is_terminal:
        console.print(text)
    else:
        typer.echo(text, file=console.file)


def _measured(evaluation: EvaluationStatus) -> str:
    return f"{_loss(evaluation['loss'])} at {count(evaluation['tokens'])} tokens"


def _summary(status: Status) -> Columns:
    evaluation = status["evaluation"]
    facts = [
        ("outer steps", str(status["outer_steps"])),
        ("merged", f"{count(status['merged_tokens'])} tokens, {merged_share(status['merged_share'])}"),
        ("lost", _lost(status["tokens_lost"])),
        ("goodput", goodput_words(status["goodput"])),
        ("global validation loss", _measured(evaluation) if evaluation else "- (no evaluator yet)"),
    ]
    if status["outer_step"] is not None:
        facts.append(("outer step", _outer_step(status["outer_step"])))
    if len(status["syncers"]) > 1:
        facts.append(("syncers", _syncers(status)))
    return Columns([Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in facts], padding=(0, 3))


class _Progress:
    """The progress bar with its figures next to it, or below it on a narrow screen."""

    def __init__(self, status: Status) -> None:
        self._bar = ProgressBar(total=1.0, completed=min(1.0, status["progress"]))
        self._figures = Text(
            f"{trained(status)}, {duration(status['elapsed_s'])} elapsed, {duration(time_left(status))} left"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._figures.cell_len + MIN_BAR > options.max_width:
            yield self._bar
            yield Segment.line()
            yield self._figures
            return
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(self._bar, self._figures)
        yield grid


def render(status: Status) -> RenderableType:
    """Render the whole run for one screen."""
    title = f"{escape(status['run'])}: {status['phase']}"
    if status["reason"] and status["phase"] != "running":
        title += f" ({escape(status['reason'])})"
    tables: list[RenderableType] = [_learner_table(status)]
    if status["fragments"]:
        learners = Padding(_learner_table(status), (0, 0, 1, 0))
        tables = [Columns([learners, _fragment_table(status)], padding=(0, 3))]
    warnings = [Text(f"warning: {warning}", "yellow") for warning in status["warnings"]]
    if status["refused"]:
        warnings.insert(0, Text(f"refused {refusals(status['refused'])}", "yellow"))
    # A screen that is too small loses what comes last.
    parts = [_Progress(status), *warnings, _summary(status), Text(""), *tables]
    return Panel(Group(*parts), title=title, title_align="left", border_style="blue")


def plain_line(status: Status) -> str:
    """Format the whole run as one line."""
    live = [learner for learner in present(status["learners"]) if learner["live"]]
    losses = [learner["loss"] for learner in live if learner["loss"] is not None]
    evaluation = status["evaluation"]
    parts = [
        f"{status['phase']} {100 * min(1.0, status['progress']):.0f}%",
        trained(status),
        f"{counted(len(live), 'learner')} live at {count(speed(status['learners']))} tokens/s",
        f"loss {_loss(sum(losses) / len(losses) if losses else None)}",
        f"global validation loss {_measured(evaluation) if evaluation else _loss(None)}",
        f"outer steps {status['outer_steps']}",
        f"merged {merged_share(status['merged_share'])}",
        *([f"refused {refusals(status['refused'])}"] if status["refused"] else []),
        *([f"outer step {_outer_step(status['outer_step'])}"] if status["outer_step"] is not None else []),
        *([f"syncers {_syncers(status)}"] if len(status["syncers"]) > 1 else []),
        f"{duration(status['elapsed_s'])} elapsed",
        f"{duration(time_left(status))} left",
    ]
    return " | ".join(parts) + "".join(f" | warning: {warning}" for warning in status["warnings"])


class Screen:
    """Shows a live run. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty(), highlight=False)
        self._live: Live | None = None
        self._next_line_s = 0.0

    def __enter__(self) -> "Screen":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Status) -> None:
        """Show the current status; without a terminal, print a line every ten seconds."""
        if (
            self._live is not None and self._console.is_terminal
        ):  # not once the terminal was closed: then stdout goes to a log file
            self._live.update(render(status), refresh=True)
        elif (now := time.monotonic()) >= self._next_line_s:
            self.note(plain_line(status))
            self._next_line_s = now + PLAIN_EVERY_S

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(Text(text))
        self._console.file.flush()
