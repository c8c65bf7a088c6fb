"""What was run is not run again, what another code gave is not taken for this one's, and the report says both."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from diloco.cli import main
from diloco.pipeline.errors import UsageError
from diloco_studies.quality.command import _read_csv
from diloco_studies.quality.experiment import read_experiment
from diloco_studies.quality.results import source
from diloco_studies.quality.results.report import markdown, table_of
from diloco_studies.quality.results.store import (
    Store,
    code_of,
    settings_digest,
    told_digest,
)
from diloco_studies.quality.results.summary import RunName, decode, encode, summary_of
from diloco_studies.quality.settings import LabRun
from tests.studies.test_lab_settings import SWEEP


def result(value, **more):
    points = [
        {"tokens": n, "merged_tokens": n, "virtual_s": n, "train_loss": 1.0, "measures": {"value": value + 1 / n}}
        for n in (1, 2, 3)
    ]
    return {
        "measure": "loss",
        "higher_is_better": False,
        "final": {"value": value},
        "points": points,
        "virtual_s": 3600.0,
        "goodput": 0.5,
        "merged_share": 0.9,
        "tokens": 2000,
        "learner_bytes": 7000,
        "syncer_s": 0.25,
        "wall_s": 1.0,
        **more,
    }


# --- the store --------------------------------------------------------------------------------------------


def test_a_result_is_found_by_settings_data_and_code(text, tmp_path, monkeypatch):
    """Another setting, a changed text or changed code, and it is not done; `any_code` shows the old one."""
    store, run = Store(tmp_path / "out"), LabRun(data=str(text))
    assert store.read(run) is None
    store.write(run, result(1.0))
    assert store.read(run) == result(1.0)
    assert store.read(run.model_copy(update={"lr": 1.0})) is None
    monkeypatch.setattr("diloco_studies.quality.results.store.code_digest", lambda module: "other")
    assert store.read(run) is None
    assert store.read(run, any_code=True) == result(1.0)
    monkeypatch.setattr("diloco_studies.quality.results.store.data_fingerprint", lambda run: "other")
    assert store.read(run, any_code=True) is None


def test_a_result_is_whole_or_not_there(text, tmp_path):
    """Nothing but results lies in the folder afterwards."""
    store, run = Store(tmp_path / "out"), LabRun(data=str(text))
    with pytest.raises(TypeError):
        store.write(run, {"final": object()})
    assert store.read(run) is None
    store.write(run, result(1.0))
    assert [path.suffix for path in store.folder.iterdir()] == [".json"]


OTHERS = (
    *({"points": []}, {"goodput": None}, {"merged_share": "x"}, {"final": {"value": []}}, {"virtual_s": 10**400}),
    *({"final": {"value": "3"}}, {"final": {"value": True}}),
)
"""What is not a result's, though all else is."""


@pytest.mark.parametrize(
    "damaged",
    [
        *("", '{"final": {"val', "[]", "{}", '{"final": 1}', '"word"', "\xff", 100_000 * "["),
        *(json.dumps(result(1.0, **other)) for other in OTHERS),
    ],
)
def test_a_damaged_result_is_named_and_done_again(text, tmp_path, capsys, damaged):
    """No error; where another code's is whole, that one is shown."""
    store, run = Store(tmp_path / "out"), LabRun(data=str(text))
    store.write(run, result(1.0))
    store.path(run).write_text(damaged, "latin-1")
    assert store.read(run) is None
    assert f"warning: {store.path(run)} is not a complete result" in capsys.readouterr().err
    assert store.summary(run) is None
    store.path(run).unlink()
    store.path(run).mkdir()  # nor is a folder
    assert store.summary(run) is None
    other = store.folder / f"{settings_digest(run)}-other.json"
    other.write_text(json.dumps(result(2.0)))
    assert store.read(run, any_code=True) == result(2.0)


def test_the_text_itself_is_part_of_a_run(text):
    """Not only its path: with other contents it is another run."""
    before = settings_digest(LabRun(data=str(text)))
    other = text.with_name("other.txt")
    other.write_text(text.read_text() + "one more line\n")
    assert settings_digest(LabRun(data=str(other))) != before


def test_the_code_that_decides_is_found_by_its_imports():
    """The protocol decides a decoupled run and not a data-parallel one; neither depends on tables and pictures."""
    ours, loop = (
        source.closure("diloco_studies.quality.decoupled"),
        source.closure("diloco_studies.quality.synchronous"),
    )
    assert {
        "diloco.syncer.window",
        "diloco.syncer.merging.outer",
        "diloco.workers.rounds",
        "diloco_studies.virtual.memory",
        "diloco_studies.quality.tasks.text",
    } <= ours
    assert {
        "diloco.workers.trainer.models.gpt",
        "diloco.workers.schedule",
        "diloco_studies.quality.schedule",
    } <= loop
    assert not {"diloco.syncer.window", "diloco.workers.rounds"} & loop
    assert not {
        "diloco.workers.learner",
        "diloco.workers.trainer.trainer",
        "diloco.pipeline.bus.redis_streams",
        "tests.world.world",
    } & (ours | loop)
    assert not {
        "diloco_studies.quality.results.report",
        "diloco_studies.quality.results.plot",
        "diloco_studies.quality.sweep",
        "diloco_studies.quality.command",
    } & (ours | loop)
    assert code_of(LabRun()) != code_of(LabRun(method="single")) == code_of(LabRun(method="data-parallel"))


def test_words_about_code_do_not_make_it_another(tmp_path):
    """Comments, docstrings and line breaks; a changed number does."""
    file = tmp_path / "module.py"

    def meaning(text):
        file.write_text(text)
        return source._meaning(file)

    plain = meaning('"""A."""\nX = 1\n"""What X is."""\ndef f():\n    """Does."""\n    return X\n')
    assert meaning("X = 1  # more\n\n\ndef f():\n    return (\n        X\n    )\n") == plain
    assert meaning("X = 2\ndef f():\n    return X\n") != plain


# --- the report -------------------------------------------------------------------------------------------


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_text(SWEEP)
    return read_experiment(path)


def told(experiment, values, **more):
    """A table of results by variant and rate: a value a seed."""

    def find(row, run):
        if (row.variant, run.lr) not in values:
            return None
        return summary_of(result(values[row.variant, run.lr][run.seed], **more), told_digest(run))

    return table_of(experiment, find)


def test_the_table_has_medians_spreads_and_the_distance_to_the_reference_s_best(experiment):
    """Best of the sweep first; what was not run is marked, and is nobody's best."""
    values = {("dp", 1e-3): (2.0, 2.1, 2.5), ("dp", 2e-3): (1.9, 2.0, 1.95), ("ours", 2e-3): (2.0, 2.145, 2.2)}
    table = told(experiment, values)
    written = markdown(table)
    best = written.split("All:")[0]
    assert " 3 | +0.00 % | 90.0 % | 3.5 | 0.25 | 50.0 % | 1.00 |" in best
    assert "| dp, lr=0.002 | 1.9500 | 0.0500 | " in best
    assert "| ours, lr=0.002 | 2.1450 | 0.1033 | " in best
    assert " | 3 | +10.00 % (" in best
    assert "lr=0.001" not in best
    assert "| ours, lr=0.001 | not run | | | 0 of 3 | | | | | | |" in " ".join(written.split("  "))
    assert [line.mid if line.done else None for line in table.lines] == [2.1, 1.95, None, 2.145]
    assert table.best() == [table.lines[1], table.lines[3]]


def test_values_and_differences_stand_by_seed_beside_the_medians(tmp_path):
    """Seed 0 first, wherever the file has it; a value is compared with the reference's of the same seed."""
    path = tmp_path / "trial.toml"
    path.write_text(SWEEP.replace("[0, 1, 2]", "[2, 0, 1]"))
    written = markdown(told(read_experiment(path), {("dp", 2e-3): (2.0, 1.0, 1.5), ("ours", 2e-3): (2.2, 0.99, 1.5)}))
    assert "| run | loss: median | +- | by seed | seeds | against dp | tokens merged |" in written
    assert "| dp, lr=0.002 | 1.5000 | 0.5000 | 2.000, 1.000, 1.500 | 3 | +0.00 % | 90.0 % |" in written
    assert "| 2.200, 0.9900, 1.500 | 3 | +0.00 % (+10.00, -1.00, +0.00) | 90.0 % |" in written


def test_a_seed_that_was_not_done_keeps_its_place(experiment):
    """So that nobody takes one seed's value for another's; what has no partner is in no difference."""
    done = {("dp", 2e-3): {0, 1}, ("ours", 2e-3): {1, 2}}

    def find(row, run):
        return summary_of(result(2.0 + run.seed), "") if run.seed in done.get((row.variant, run.lr), ()) else None

    written = markdown(table_of(experiment, find))
    assert "| 2.000, 3.000, - | 2 of 3 | +0.00 % |" in written
    assert "| -, 3.000, 4.000 | 2 of 3 | +0.00 % (-, +0.00, -) |" in written


SAME = "ended with the same values to the last digit: their settings made no difference"


def test_rows_whose_settings_made_no_difference_are_named_under_the_table(experiment):
    """Whoever swept H in a run that ends before H has grown would else compare a run with itself."""
    values = {("dp", 1e-3): (2.0, 2.1, 2.2), ("dp", 2e-3): (2.0, 2.1, 2.3), ("ours", 2e-3): (2.0, 2.1, 2.2)}
    written = markdown(told(experiment, values))
    assert written.endswith(f" |\n\nrows 'dp, lr=0.001' and 'ours, lr=0.002' {SAME}\n")
    three = markdown(told(experiment, dict.fromkeys([*values, ("ours", 1e-3)], (2.0, 2.1, 2.2))))
    assert f"rows 'dp, lr=0.001', 'dp, lr=0.002', 'ours, lr=0.001' and 'ours, lr=0.002' {SAME}\n" in three
    assert three.count(SAME) == 1


def test_rows_of_one_end_and_another_course_are_not_called_the_same(experiment):
    """Accuracies on few images often end alike. Nor are rows that diverged called so."""
    one, other = summary_of(result(2.0), ""), summary_of(result(3.0), "")
    found = {"dp, lr=0.001": one, "ours, lr=0.002": replace(other, value=one.value)}
    assert SAME not in markdown(table_of(experiment, lambda row, run: found.get(row.label)))
    diverged = dict.fromkeys([("dp", 1e-3), ("ours", 2e-3)], (2.0, math.inf, 2.2))
    assert SAME not in markdown(told(experiment, diverged))


def test_where_more_is_better_the_best_is_the_highest(experiment):
    """Accuracies."""
    values = {("dp", 1e-3): (0.5, 0.5, 0.5), ("dp", 2e-3): (0.9, 0.9, 0.9)}
    assert [line.mid for line in told(experiment, values, higher_is_better=True).best() if line.done] == [0.9]


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("more", [True, False])
def test_a_row_of_which_a_seed_diverged_is_neither_best_nor_the_reference(experiment, lost, more):
    """Wherever it stands: its median is not a number, and it has no distance to the reference."""
    fine, diverged = (2.0, 2.0, 2.0), (1.0, lost, 3.0)
    for first, second in ((fine, diverged), (diverged, fine)):
        values = {("dp", 1e-3): first, ("dp", 2e-3): second, ("ours", 1e-3): diverged, ("ours", 2e-3): fine}
        table = told(experiment, values, higher_is_better=more)
        assert [line.mid for line in table.best()] == [2.0, 2.0]
        assert table.reference(table.lines[2]).mid == 2.0
        assert f"| ours, lr=0.001 | nan | nan | 1.000, {lost}, 3.000 | 3 |  | 90.0 %" in markdown(table)
    only = told(experiment, {("dp", 1e-3): diverged, ("ours", 2e-3): fine}, higher_is_better=more)
    assert only.reference(only.lines[3]) is None


def test_a_reference_of_nothing_is_at_no_distance(experiment):
    """An accuracy of 0: nothing is so many percent of it. Nor is it of two values whose middle is 0."""
    middle = {("dp", 1e-3): (-1.0, 0.0, 1.0), ("ours", 2e-3): (0.5, 0.5, 0.5)}
    found = told(experiment, middle)
    for line in found.lines:
        line.summaries.pop(1, None)
    assert found.distance(found.lines[-1]) is None
    values = {("dp", 1e-3): (0.0, 0.0, 0.0), ("ours", 2e-3): (0.5, 0.5, 0.5)}
    assert "| ours, lr=0.002 | 0.5000 | 0.0000 | 0.5000, 0.5000, 0.5000 | 3 |  | 90.0 %" in markdown(
        told(experiment, values)
    )


def test_an_experiment_that_was_not_run_is_reported_as_such(experiment, tmp_path, capsys):
    """No error, no figure."""
    assert main(["lab", "report", str(tmp_path / "trial.toml"), "--out", str(tmp_path / "none")]) == 0
    written = capsys.readouterr().out
    assert written.count("not run") == 6
    assert "### trial" in written


def test_a_row_that_a_csv_lacks_is_not_said_to_be_not_run(experiment, tmp_path, capsys):
    """It may have been, and stand there under another experiment's name."""
    csv = tmp_path / "kept.csv"
    csv.write_text(encode(dict(told(experiment, {("ours", 2e-3): (2.0, 2.1, 2.2)}).named())))
    assert main(["lab", "report", str(tmp_path / "trial.toml"), "--from", str(csv)]) == 0
    written = capsys.readouterr().out
    assert written.count("| dp, lr=0.001 | not in kept.csv | ") == 2
    assert "not run" not in written


def test_a_row_whose_settings_were_others_is_not_taken_for_one_of_this_file(experiment, tmp_path, capsys):
    """Whoever edits a file sees no figure of before; it is said which rows of the CSV those are."""
    csv = tmp_path / "kept.csv"
    csv.write_text(encode(dict(told(experiment, {("ours", 2e-3): (2.0, 2.1, 2.2)}).named())))
    file = tmp_path / "trial.toml"
    file.write_text(file.read_text().replace('name = "ours"', 'name = "ours"\nsteps = 3'))
    assert main(["lab", "report", str(file), "--from", str(csv)]) == 0
    written = capsys.readouterr()
    assert "| ours, lr=0.002 | not in kept.csv | " in written.out
    assert written.err.count("kept.csv has 'ours, lr=0.002' with settings that differ from the current trial.toml") == 1


def test_a_table_s_lines_hold_whatever_a_row_is_called(tmp_path):
    """A bar is no border of a cell."""
    path = tmp_path / "trial.toml"
    path.write_text('[[variants]]\nname = "a | b"\n')
    written = markdown(table_of(read_experiment(path), lambda row, run: summary_of(result(2.0), "")))
    assert "| a \\| b | 2.0000 |" in written


def test_the_picture_is_drawn(experiment, tmp_path):
    """With one row unfinished and curves of different length."""
    plot = pytest.importorskip("diloco_studies.quality.results.plot")
    drawn = told(experiment, {("dp", 1e-3): (2.0, 2.1, 2.5), ("ours", 2e-3): (2.0, 2.1, 2.2)})
    first = drawn.lines[0].summaries
    first[0] = replace(first[0], curve=first[0].curve[:-1])
    plot.draw([drawn, told(experiment, {})], tmp_path / "trial.png")
    assert (tmp_path / "trial.png").stat().st_size > 10_000


SIZED = """
question = "How far?"
reference = "dp"
[settings]
data = "{text}"
model = "{model}"
seed = [0, 1, 2]
[[variants]]
name = "dp"
method = "data-parallel"
[[variants]]
name = "ours"
[[variants]]
name = "of this size alone, {model}"
merge = "rda"
"""


def sized(folder, text, model, losses):
    """A table of one size: variant -> losses of seeds 0, 1, 2."""
    (folder / f"{model}.toml").write_text(SIZED.format(text=text, model=model))
    experiment = read_experiment(folder / f"{model}.toml")
    return table_of(experiment, lambda row, run: summary_of(result(losses.get(row.variant, (9, 9, 9))[run.seed]), ""))


def with_experts(experiment):
    """The same rows, of a mixture."""

    def mixtures(row):
        return row.model_copy(update={"runs": tuple(run.model_copy(update={"experts": 8}) for run in row.runs)})

    return experiment.model_copy(update={"rows": tuple(map(mixtures, experiment.rows))})


@pytest.mark.parametrize("name", ["cost $x_{$", "H=$8, now $16", "_hidden"])
def test_a_picture_shows_names_as_they_are(tmp_path, name):
    """They are no formulas, and none is left out of the legend."""
    plot = pytest.importorskip("diloco_studies.quality.results.plot")
    path = tmp_path / "trial.toml"
    path.write_text(f"[[variants]]\nname = '{name}'\n")
    table = table_of(read_experiment(path), lambda row, run: summary_of(result(2.0), ""))
    axes = plot.Figure().subplots()
    plot._curves(axes, table, table.lines, "tokens", "tokens", 1)
    (shown,) = axes.legend().get_texts()
    assert shown.get_text().endswith(name)
    assert not shown.get_parse_math()
    plot.draw([table], tmp_path / "trial.png")


def test_a_picture_that_cannot_be_written_is_told_before_the_table(experiment, tmp_path, capsys):
    """In words."""
    picture = tmp_path / "none" / "trial.png"
    for option in ("--plot", "--sizes", "--csv"):
        assert main(["lab", "report", str(tmp_path / "trial.toml"), option, str(picture)]) == 2
        told = capsys.readouterr()
        assert f"{picture}: the folder {picture.parent} does not exist" in told.err
        assert not told.out


def test_distances_are_drawn_for_what_has_several_sizes(tmp_path, text):
    """With an error over seeds, each against its own size's reference."""
    plot = pytest.importorskip("diloco_studies.quality.results.plot")
    tables = [
        sized(tmp_path, text, "nano", {"dp": (2.0, 2.0, 2.0), "ours": (2.2, 2.0, 2.1)}),
        sized(tmp_path, text, "deep", {"dp": (1.0, 1.1, 1.2), "ours": (1.1, 1.21, 1.32)}),
    ]
    assert list(plot._by_variant(tables)) == ["ours"]
    (places,) = plot._by_variant(tables)["ours"].values()
    assert [round(at, 1) for at, _ in places] == [0.2, 0.9]
    assert [round(one.of_medians, 6) for _, one in places] == [5.0, 10.0]
    assert [round(one, 6) for one in places[0][1].by_seed.values()] == [10.0, 0.0, 5.0]
    plot.draw_sizes(tables, tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").stat().st_size > 5_000
    other = tables[1].experiment.model_copy(update={"reference": "ours"})
    with pytest.raises(UsageError, match="the same reference"):
        plot.draw_sizes([tables[0], replace(tables[1], experiment=other)], tmp_path / "none.png")
    with pytest.raises(UsageError, match="at two or more sizes"):
        plot.draw_sizes(tables[:1], tmp_path / "none.png")
    mixture = table_of(with_experts(tables[0].experiment), lambda row, run: summary_of(result(2.0), ""))
    with pytest.raises(UsageError, match="only dense text models"):
        plot.draw_sizes([mixture], tmp_path / "none.png")


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_what_diverged_does_not_spoil_the_picture(experiment, lost):
    """The axes show what is finite."""
    plot = pytest.importorskip("diloco_studies.quality.results.plot")
    table = told(experiment, {("dp", 1e-3): (2.0, 2.1, lost), ("ours", 2e-3): (2.0, 2.1, 2.2)})
    axes = plot.Figure().subplots()
    plot._curves(axes, table, [table.lines[0], table.lines[3]], "tokens", "tokens", 1)
    low, high = axes.get_ylim()
    assert 2.2 < low < 2.34
    assert 2.7 < high < 2.8


# --- the CSV ----------------------------------------------------------------------------------------------


def test_what_is_kept_as_csv_is_read_again(experiment):
    """To eight digits; what is not there stays away, what is not finite stays so, and names may have commas."""
    table = told(experiment, {("ours", 2e-3): (2.0123456789, 2.1, math.inf)})
    kept = dict(table.named())
    assert list(kept) == [RunName("trial", "ours, lr=0.002", seed) for seed in range(3)]
    read = decode(encode(kept))
    assert list(read) == list(kept)
    assert [one.value for one in read.values()] == [2.0123457, 2.1, math.inf]
    for name, one in read.items():
        assert replace(one, value=0.0, curve=()) == replace(kept[name], value=0.0, curve=())
        assert [mark.tokens for mark in one.curve] == [1, 2, 3]
    assert [mark.value for mark in read[RunName("trial", "ours, lr=0.002", 1)].curve] == [3.1, 2.6, 2.4333]
    assert decode(encode({})) == {}


def test_exact_answers_are_a_column_of_their_own(experiment):
    """Where a task has answers: their median in percent; kept in the CSV with each mark of the curve."""
    points = [{"tokens": n, "virtual_s": n, "measures": {"value": 1.0, "exact": n / 8}} for n in (1, 2, 3)]
    table = told(experiment, {("ours", 2e-3): (2.0, 2.1, 2.2)}, points=points)
    written = markdown(table)
    assert "| against dp | exact | tokens merged |" in written
    assert "| ours, lr=0.002 | 2.1000 | 0.1000 | 2.000, 2.100, 2.200 | 3 |  | 37.5 % | 90.0 % | 3.5 |" in written
    kept = decode(encode(dict(table.named())))[RunName("trial", "ours, lr=0.002", 0)]
    assert [mark.exact for mark in kept.curve] == [0.125, 0.25, 0.375]
    assert kept.exact == 0.375
    assert "exact" not in markdown(told(experiment, {("ours", 2e-3): (2.0, 2.1, 2.2)}))


@pytest.mark.parametrize(("marks", "kept"), [(1, 1), (15, 15), (16, 8), (20, 10), (10_000, 15)])
def test_a_long_curve_is_thinned(marks, kept):
    """Evenly, with its end."""
    points = [{"tokens": n, "virtual_s": n, "measures": {"value": 1.0}} for n in range(marks)]
    name = RunName("trial", "ours", 0)
    curve = decode(encode({name: summary_of(result(1.0, points=points), "")}))[name].curve
    tokens = [mark.tokens for mark in curve]
    assert len(tokens) == kept
    assert tokens[-1] == marks - 1
    assert len({b - a for a, b in pairwise(tokens)}) <= 1


def test_a_broken_csv_says_where(experiment):
    """Other columns, a line too short or there twice, a word for a number, a cell larger than the csv module reads."""
    whole = encode(dict(told(experiment, {("dp", 1e-3): (2.0, 2.1, 2.5)}).named()))
    for broken, reason in [
        ("", "columns are"),
        (whole.replace("merged_share", "merged", 1), "columns are"),
        (whole.replace(",loss", "", 1), "line 2 has 13 cells, but there are 14 columns"),
        (whole.replace("2.5,", "two,", 1), "line 4"),
        (whole.replace("less", "worse", 1), "line 2"),
        (whole.replace(",0.5,3600,", ",1e400,3600,", 1), "line 2 is not a summary: 1e400 is not a finite number"),
        (whole + whole.splitlines()[3], "line 5 repeats the run of an earlier line"),
        (whole.replace("less", "l" * 2**18, 1), "line 2 is not a summary: field larger"),
    ]:
        with pytest.raises(UsageError, match=reason):
            decode(broken)


def test_the_csv_gives_the_tables_of_the_results(experiment, text, tmp_path, capsys):
    """`--csv` keeps summaries of a folder, `--from` shows the same without it; other runs' lines stay."""
    file, out, csv = tmp_path / "trial.toml", tmp_path / "out", tmp_path / "results.csv"
    file.write_text(file.read_text().replace("[settings]", f"[settings]\ndata = {str(text)!r}"))
    store, runs = Store(out), read_experiment(file).runs
    for number, run in enumerate(runs[:-1]):
        store.write(run, result(2.0 + 0.0123 * number))
    assert main(["lab", "report", str(file), "--out", str(out), "--csv", str(csv)]) == 0
    tables = capsys.readouterr().out
    assert tables.count("| 2 of 3 |") == 1
    none = str(tmp_path / "none")
    assert main(["lab", "report", str(file), "--out", none, "--from", str(csv)]) == 0
    assert capsys.readouterr().out == tables
    before = csv.read_text()
    assert main(["lab", "report", str(file), "--out", none, "--csv", str(csv)]) == 0
    assert csv.read_text() == before
    store.write(runs[-1], result(1.9))
    assert main(["lab", "report", str(file), "--out", str(out), "--csv", str(csv)]) == 0
    assert len(csv.read_text().splitlines()) == len(before.splitlines()) + 1
    csv.write_text("a,b\n")
    assert main(["lab", "report", str(file), "--from", str(csv)]) == 2
    assert f"cannot read summaries {csv}: the columns are a, b" in capsys.readouterr().err


def test_a_table_that_a_spreadsheet_saved_is_read(experiment, tmp_path):
    """With the mark of its encoding, and its ends of lines."""
    summaries = dict(told(experiment, {("ours", 2e-3): (2.0, 2.1, 2.2)}).named())
    plain, marked = tmp_path / "plain.csv", tmp_path / "marked.csv"
    plain.write_text(encode(summaries))
    marked.write_bytes(b"\xef\xbb\xbf" + encode(summaries).replace("\n", "\r\n").encode())
    assert _read_csv(marked) == _read_csv(plain)
