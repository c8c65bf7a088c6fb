"""Experiment files: what a list means, what is refused and how, and what makes two runs the same."""

from pathlib import Path

import pytest

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import SyncSettings, TrainerSettings
from diloco_studies.quality.experiment import SKELETON, read_experiment, settings_help
from diloco_studies.quality.settings import LabRun

ROOT = Path(__file__).resolve().parents[2]
SWEEP = """
question = "Which?"
reference = "dp"
best_of = ["lr"]
[settings]
seed = [0, 1, 2]
lr = [1e-3, 2e-3]
[[variants]]
name = "dp"
method = "data-parallel"
[[variants]]
name = "ours"
"""


def experiment(tmp_path, text):
    path = tmp_path / "trial.toml"
    path.write_text(text)
    return read_experiment(path)


def test_lists_are_swept_and_crossed_and_seeds_stay_in_one_row(tmp_path):
    """Two rates by two intervals by three seeds: four rows of three runs; the other variant has its own sweep."""
    found = experiment(
        tmp_path,
        SWEEP + "sync_interval = [12, 24]",
    )
    assert [row.label for row in found.rows] == [
        "dp, lr=0.001",
        "dp, lr=0.002",
        "ours, lr=0.001, sync_interval=12",
        "ours, lr=0.001, sync_interval=24",
        "ours, lr=0.002, sync_interval=12",
        "ours, lr=0.002, sync_interval=24",
    ]
    assert [run.seed for run in found.rows[0].runs] == [0, 1, 2]
    assert len(found.runs) == 18


def test_a_method_brings_its_settings_and_the_file_has_the_last_word(tmp_path):
    """DiLoCo is one fragment, everybody, and waiting; a file may still say otherwise."""
    settings = '[settings]\nlearners = 3\nmethod = "diloco"\n'
    one, two = experiment(tmp_path, f'{settings}[[variants]]\nname = "a"\n[[variants]]\nname = "b"\nfragments = 2').rows
    assert (one.runs[0].fragments, one.runs[0].quorum, one.runs[0].wait) == (1, 3, True)
    assert (two.runs[0].fragments, two.runs[0].quorum, two.runs[0].wait) == (2, 3, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[settings]\nlearning_rate = 1", "unknown setting 'learning_rate'"),
        (
            "[settings]\nlr = -1.0",
            "variant 'trial': lr=-1.0: too small (allowed: more than 0) (Peak inner",
        ),
        ("[settings]\nlearners = 2\nquorum = 3", "quorum=3 of 2 learners"),
        ("[settings]\nmethod = 'magic'", "not a valid choice (allowed: 'decoupled'"),
        ("[settings]\nlr = []", "lr is an empty list"),
        ("lr = 1", "unknown 'lr' at the top"),
        ("question = 1", "question must be a str"),
        ("reference = 'x'", "reference='x' is not a variant"),
        ("best_of = ['x']", "best_of names 'x'"),
        ("[[variants]]\nlr = 1", "variant 1 needs a name"),
        ("[[variants]]\nname = 'a'\n[[variants]]\nname = 'a'", "two variants are named 'a'"),
        ("[settings]\nseed = " + str(list(range(101))) + "\nlearners = " + str(list(range(1, 101))), "more than 10000"),
        ("[settings]\nseed = [[0], [1]]", "seed=[0]: give one value, or a plain list"),
        ("variants = []", "variants is an empty list"),
        ("[settings]\nlr = [1e-3, 2e-3, 1e-3]", "two rows are 'trial, lr=0.001'"),
        (
            "[settings]\nlr = 1e-3\n[[variants]]\nname = 'a, batch=1'\n[[variants]]\nname = 'a'\nbatch = [1, 2]",
            "two rows are 'a, batch=1'",
        ),
        (SWEEP + "task = 'digits'", "tasks digits, text measure different things"),
        ("[settings", "cannot read experiment"),
        ("question = " + 5000 * "[", "cannot read experiment"),
        ("[settings]\nquorum = 0", "quorum=0: too small (allowed: at least 1) (K; 'all': M)"),
        (
            "[settings]\nmodel = 'huge'",
            "model='huge': task='text' does not have this size (Model size: nano, deep, tiny, 2m, small",
        ),
        ("[settings]\nmodel = 'lagre'", "does not have this size (did you mean 'large'?)"),
        ("[settings]\nfragments = 99\nmodel = 'nano'", "fragments=99 of the 11 tensors of model='nano'"),
        ("[settings]\nexperts = 2\nexperts_a_token = 3", "experts_a_token=3 is more than experts=2"),
        ("[settings]\nbatch = 1" + 400 * "0", "batch=1000000"),
        (
            "[settings]\nsteps = 1000000000\nbatch = 1000000\nlearners = 256\nseq_len = 65536",
            "steps x batch x learners x seq_len=",
        ),
        ("[settings]\nfail_every_s = 1e-2", "one step of 2.69e+43 would be done"),
        ("[[variants]]\nname = 'a\\u000db'".replace("'", '"'), "the name 'a\\rb' cannot be shown in a table"),
        ("[settings]\nmodel = 'nano'\ntask = 'digits'", "task='digits' does not have this size (Model size: "),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, text, said):
    """The file, the variant, the setting, the value and what it may be."""
    with pytest.raises(UsageError) as error:
        experiment(tmp_path, text)
    assert said in str(error.value)
    assert "trial.toml" in str(error.value)


def test_what_a_run_does_not_look_at_does_not_refuse_it(tmp_path):
    """One learner alone has no failures, and a preset's fragments are those that the model can have."""
    assert LabRun(method="single", fail_every_s=1e-2).method == "single"
    (row,) = experiment(tmp_path, "[settings]\nmethod = 'paper'\nmodel = 'nano'").rows
    assert row.runs[0].fragments == 11


def test_settings_that_a_method_does_not_look_at_do_not_make_another_run():
    """Swept over H, data-parallel is one run; a single learner is the same run beside any number of others."""

    def relevant(**told):
        return LabRun(**told).relevant()

    assert relevant(method="data-parallel", sync_interval=2) == relevant(method="data-parallel", sync_interval=24)
    assert relevant(method="single", learners=2) == relevant(method="single", learners=8)
    assert relevant(method="data-parallel", learners=2) != relevant(method="data-parallel", learners=8)
    assert relevant(sync_interval=2) != relevant(sync_interval=24)
    late = {"method": "data-parallel", "late_join_s": 9.0}
    assert relevant(**late) != relevant(method="data-parallel")
    assert relevant(**late, resize_s=1.0) != relevant(**late, resize_s=2.0)
    assert relevant(method="data-parallel", resize_s=1.0) == relevant(method="data-parallel", resize_s=2.0)
    assert relevant(fail_down_s=5.0) == relevant(fail_down_s=6.0)
    assert relevant(fail_every_s=9.0, fail_down_s=5.0) != relevant(fail_every_s=9.0, fail_down_s=6.0)


def test_what_is_off_is_no_part_of_a_run():
    """A new option that is None by default leaves the digests of results that are there as they were."""
    assert None not in LabRun().relevant().values()


@pytest.mark.parametrize("kind", [SyncSettings, TrainerSettings])
def test_defaults_are_those_of_a_real_run(kind):
    """What the lab says of the defaults it says of `diloco run`; what is off here is 0 there, or the usual."""
    off = {"weights": "tokens", "global_codec": "bf16", "stretch": True}
    names = set(kind.model_fields) & set(LabRun.model_fields)
    assert len(names) >= 8
    for name in names:
        default = LabRun.model_fields[name].default
        assert (off.get(name, 0) if default is None else default) == kind.model_fields[name].default, name


def test_the_how_to_shows_the_file_that_the_command_prints(tmp_path):
    """Short, with all that a file may have at its top; it can be read, and is the four rows that the page speaks of."""
    assert f"```toml\n{SKELETON}```" in (ROOT / "docs" / "howto" / "quality.md").read_text()
    assert len(SKELETON.splitlines()) <= 15
    found = experiment(tmp_path, SKELETON)
    assert [len(row.runs) for row in found.rows] == [3, 3, 3, 3]
    assert found.question
    assert (found.reference, found.best_of) == ("data-parallel", ("lr",))


def test_every_setting_is_explained():
    """One line each, with its default, below a file that they may stand in."""
    assert SKELETON in settings_help()
    lines = settings_help().splitlines()
    told = [line.split(" = ")[0] for line in lines[-len(LabRun.model_fields) :]]
    assert told == list(LabRun.model_fields)
    assert "method = decoupled [decoupled, paper, streaming, diloco, data-parallel, single]: Training method" in lines
