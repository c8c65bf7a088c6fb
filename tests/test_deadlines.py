"""The page of deadlines has all of them: what the code waits for, keeps or repeats."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.options import ChaosProcess, DemoProcess, RunProcess
from diloco.pipeline.settings import EvaluatorProcess, LearnerProcess, Settings, SyncerProcess
from diloco.pipeline.units import parse_duration
from docs import deadlines

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipeline", "syncer", "workers", "diloco")
MADE = {"Backoff", "timedelta"}
ROWS = [row for kind in deadlines.HEADS for rows in deadlines.rows(kind).values() for row in rows]


def assigned(text: str) -> Iterator[tuple[str, ast.expr]]:
    """Names of a module and of its classes, each with what it is assigned."""
    tree = ast.parse(text)
    for body in (tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            value = getattr(node, "value", None)
            for target in targets if value is not None else ():
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from ((ast.unparse(name), value) for name in names)


def times(text: str) -> Iterator[str]:
    """Constants that are times by their name (`X_S`, no rate) or by their type."""
    for name, value in assigned(text):
        made = isinstance(value, ast.Call) and ast.unparse(value.func) in MADE
        if made or (name.endswith("_S") and not name.endswith("_PER_S")):
            yield name


def test_times_are_found_however_they_are_written() -> None:
    text = "A_S = 1.0\nN, B_S = 2, 3\nC = Backoff(1, 2)\nclass X:\n    D = timedelta(hours=1)\nE_PER_S = 1\nF = 2\n"
    assert list(times(text)) == ["A_S", "B_S", "C", "D"]


def test_no_constant_is_missing_on_the_page() -> None:
    """A new one gets a row in docs/deadlines.toml, or stands there among those that are no deadlines."""
    told = {(row.file, name) for row in ROWS for name in row.names}
    told |= {(file, name) for file, names in deadlines.REGISTRY["others"].items() for name in names}
    there = {
        (str(path.relative_to(ROOT)), name)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "testing" not in path.parts
        for name in times(path.read_text("utf-8"))
    }
    assert len(there) > 100
    assert sorted(there - told) == []


def test_no_setting_that_is_a_time_is_missing_on_the_page() -> None:
    kinds: tuple[type[Settings], ...] = (RunProcess, DemoProcess, ChaosProcess)
    there = {
        name
        for kind in (SyncerProcess, LearnerProcess, EvaluatorProcess, *kinds)
        for name, info in kind.model_fields.items()
        if any(getattr(rule, "func", None) is parse_duration for rule in info.metadata)
    }
    told = {name for row in ROWS if not row.file for name in row.names}
    assert {"lease_s", "leave_s"} <= there
    assert sorted(there - told) == []


def test_each_row_says_what_comes_after_it_and_has_a_value_of_the_code() -> None:
    for row in ROWS:
        own = {name for name, _ in assigned((ROOT / row.file).read_text("utf-8"))} if row.file else deadlines.SETTINGS
        assert any(name in own for name in row.names), f"{row} is of another file"
    for rows in deadlines.rows("deadlines").values():
        assert all(row.passes for row in rows)


def test_times_are_written_as_people_do() -> None:
    assert [deadlines.time(one) for one in (0.0, 0.05, 0.25, 5.0, 60.0, 90.0, 150.0, 3600.0)] == [
        *("0 s", "50 ms", "0.25 s", "5 s", "60 s", "90 s", "2.5 min", "1 h")
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what[:40])
def test_each_row_can_be_read_alone(row: deadlines.Row) -> None:
    """Who finds it by a search reads no other: none begins with "The same", or means something of another one."""
    for cell in (row.what, row.follows, row.passes):
        assert not re.match(r"(The same|As)\b", cell), cell
        assert not re.search(r"\b(next|last|previous|first) row\b|\b(above|below)$", cell), cell
    assert not re.match(r"(It|They|And|Another|Again|This|That|Its|Their)\b", row.what), row.what


def test_the_summary_says_what_operators_ask_with_figures_of_the_code() -> None:
    """Seven things that happen to a run; no figure in it is typed."""
    happens = " ".join(deadlines.REGISTRY["summary"])
    for what in ("killed", "hangs", "slow", "rank", "syncer", "Redis is gone", "older state"):
        assert what in happens
    assert 5 <= len(deadlines.REGISTRY["summary"]) <= 8
    for parts in deadlines.REGISTRY["summary"].values():
        assert any("{" in text for _, text in parts)
        for _, text in parts:
            assert not re.search(r"\d", deadlines.FORMULA.sub("", text)), text
    lines = list(deadlines.summary())
    assert any("has a gap after 1 s" in line and "on after 10 s" in line for line in lines)
