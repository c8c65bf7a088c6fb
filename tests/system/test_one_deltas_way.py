"""Promises about one delta's way: ARCHITECTURE.md lists its files in order, and they are few."""

import re
from pathlib import Path

import pytest

from tests.way import BEGINS, ENDS, SCRIPTS, Trace, trace, trace_of

MAX_FILES = 33
"""Files: fewer are better, more want a reason. What carries payloads is apart from what decides, so that ranks can.
The planner goes by the rule that lengthens rounds. Globals in bf16 are two halves.
What is copied from a device while training goes on is apart from fragments: losses and moments are copied so, too."""

TEXT = (Path(__file__).resolve().parents[2] / "ARCHITECTURE.md").read_text()
SECTION = TEXT.partition("\n## One delta's way\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def way(redis_server: str) -> Trace:
    return trace(redis_server)


def listed() -> list[str]:
    """Files of the section's table, from its first row to its last."""
    rows = [row for row in SECTION.splitlines() if row.startswith("| ")]
    found = []
    for row in rows:
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder  # the second file of a folder is named without it
            found.append(f"{folder}/{name.rpartition('/')[2]}")
    return found


def test_a_function_is_on_the_way_if_every_delta_calls_it_and_nothing_else_does() -> None:
    """What some deltas call, and what is called while none is under way, is left out."""
    on, also, polls, offer = ("a.py", "on"), ("b.py", "also"), ("c.py", "polls"), (SCRIPTS, "offer")
    first = [(call, "one") for call in (on, polls, ("d.py", "sometimes"), offer, ENDS)]
    other = [(call, "one") for call in (on, polls, offer, ENDS)]
    found = trace_of([[*first, (also, "two")], [(also, "two"), *other]], {polls})
    assert found.files == {BEGINS: ["step"], "a.py": ["on"], ENDS[0]: [ENDS[1]], "b.py": ["also"]}
    assert found.scripts == ["offer"]
    assert ("a.py", ENDS[0]) in found.before
    assert not any("b.py" in pair for pair in found.before)


@pytest.mark.redis
def test_architecture_lists_the_files_of_one_deltas_way(way: Trace) -> None:
    """All of them, and no other: `python -m tests.way` says which functions put them there."""
    assert sorted(listed()) == sorted(way.files)


@pytest.mark.redis
def test_they_are_listed_in_the_order_in_which_a_delta_comes_to_them(way: Trace) -> None:
    """No file stands after one that it always leads to; what two tasks do at once has no order."""
    place = {file: at for at, file in enumerate(listed())}
    assert {(a, b) for a, b in way.before if place.get(a, 0) > place.get(b, len(place))} == set()


@pytest.mark.redis
def test_its_scripts_are_listed(way: Trace) -> None:
    assert set(re.findall(r"`(\w+)\.lua`", SECTION)) == set(way.scripts)


@pytest.mark.redis
def test_it_is_short(way: Trace) -> None:
    """A reader who follows it opens no more files than that."""
    assert len(way.files) <= MAX_FILES
