"""What `diloco simulate` keeps of its runs: when it is read, and what is wrong with it."""

from pathlib import Path

import pytest

from diloco.cli import main
from diloco_studies.goodput import calibrate
from diloco_studies.goodput.commands import runs
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.table import Cell

ONE = ["simulate", "table", "--chips", "1000", "--learners", "2", "--seeds", "1", "--days", "0.1", "--jobs", "1"]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "--chips", "1000"],
        ["mtbi", "--chips", "1000", "--learners", "2"],
        ["calibrate"],
        ["link", "--chips", "1000", "--link-trace", str(Path(__file__).parents[2] / "examples" / "link-trace.txt")],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_cache_neither_reads_nor_writes_what_is_kept(arguments, monkeypatch, tmp_path):
    """In every command that keeps results: it computes all of them again, and leaves none."""
    made = runs.one(runs.Task(Constants(), Cell("decoupled", 2, 1000), 0.1, 0))
    computed = []
    monkeypatch.setattr(runs, "one", lambda task: computed.append(task) or made)
    monkeypatch.setattr(calibrate, "calibrate", lambda constants, *_, **__: constants)
    given = ["simulate", *arguments, "--jobs", "1", "--days", "0.1"]

    def called(*more):
        computed.clear()
        assert main([*given, *more]) == 0
        return len(computed), len(list((tmp_path / "cache").rglob("*.json")))

    cells_made, kept = called("--no-cache")
    assert cells_made > 0
    assert kept == 0
    assert called() == (cells_made, cells_made)
    assert called() == (0, cells_made)
    assert called("--no-cache") == (cells_made, cells_made)


@pytest.mark.parametrize("damaged", ["", "[]", '{"a": 1}', '{"goodput": 0.5}'])
def test_a_kept_file_that_is_no_result_is_made_anew(damaged, tmp_path, capsys):
    """And the table is the same."""
    assert main(ONE) == 0
    said, kept = capsys.readouterr().out, list((tmp_path / "cache" / "diloco").rglob("*.json"))
    made = [path.read_text() for path in kept]
    for path in kept:
        path.write_text(damaged)
    assert main(ONE) == 0
    assert capsys.readouterr().out == said
    assert [path.read_text() for path in kept] == made


def test_a_cache_that_cannot_be_written_says_how_to_do_without(tmp_path, capsys):
    """A file lies where its folder should."""
    (tmp_path / "cache").write_text("")
    assert main(ONE) == 2
    assert "Say --no-cache, or set XDG_CACHE_HOME" in " ".join(capsys.readouterr().err.split())
    assert main([*ONE, "--no-cache"]) == 0
