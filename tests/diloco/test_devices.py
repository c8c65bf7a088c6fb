"""Promises about which learner of a run on one machine gets which device."""

import re

import pytest

from diloco import cli
from diloco.launcher import launch
from diloco.launcher.devices import VISIBLE, Place, assign, devices_line
from diloco.options import RunProcess
from diloco.pipeline.errors import UsageError
from tests.diloco.test_run import flag, launched

TWO, UNNAMED = ["0", "1"], ["GPU-aa", "GPU-bb"]
C0, C1 = Place("cuda", "0", "cuda:0"), Place("cuda", "1", "cuda:1")
CPU, MPS, FREE = Place("cpu", "", "cpu"), Place("mps", "", "mps"), Place("auto")
BOTH, CPUS = Place("cuda:0+cuda:1", "0,1", "cuda:0+cuda:1"), Place("cpu+cpu", "", "cpu+cpu")
EIGHT = list(map(str, range(8)))


@pytest.mark.parametrize(
    ("asked", "learners", "gpus", "places"),
    [
        ("auto", 2, [], [FREE, FREE]),
        ("auto", 2, TWO, [C0, C1]),
        ("all", 5, TWO, [C0, C1, C0, C1, C0]),
        ("all", 1, TWO, [BOTH]),
        ("auto", 1, TWO, [C0]),
        ("0+1", 1, TWO, [BOTH]),
        ("cuda:1+cuda:0", 1, UNNAMED, [Place("cuda:0+cuda:1", "GPU-bb,GPU-aa", "cuda:1+cuda:0")]),
        ("0+1,cpu", 3, TWO, [BOTH, CPU, BOTH]),
        ("all", 4, EIGHT, [Place("cuda:0+cuda:1", f"{n},{n + 1}", f"cuda:{n}+cuda:{n + 1}") for n in (0, 2, 4, 6)]),
        ("1,0", 2, TWO, [C1, C0]),
        ("cuda:1", 1, UNNAMED, [Place("cuda", "GPU-bb", "cuda:1")]),
        ("cpu", 2, TWO, [CPU, CPU]),
        ("mps", 1, [], [MPS]),
        ("cuda:0,cpu", 3, TWO, [C0, CPU, C0]),
    ],
)
def test_learners_take_the_devices_in_turn(asked: str, learners: int, gpus: list[str], places: list[Place]) -> None:
    assert assign(asked, learners, gpus) == places


@pytest.mark.parametrize(
    ("asked", "gpus", "said"),
    [
        ("all", [], "torch cannot use a GPU on this machine; use --devices cpu"),
        ("cuda:0", [], "cuda:0 is not on this machine: torch cannot use a GPU"),
        ("cuda:0,cuda:2", TWO, "cuda:2 is not on this machine: use cuda:0 to cuda:1"),
        ("all", ["0", "1", "2"], "3 GPUs cannot be divided evenly among 2 learners: list them"),
        ("0+0", TWO, "'0[+]0' is not a device"),
        ("0+cpu", TWO, "not a device"),
        ("cuda", TWO, r"'cuda' is not a device: use cuda:0,cuda:1 and so on \(0\+1 for one learner\), or all, cpu"),
        ("cuda:-1", TWO, "not a device"),
        ("cuda:0,", TWO, "'' is not a device"),
        ("all,cpu", TWO, "'all' is not a device"),
    ],
)
def test_what_is_not_here_or_no_device_is_refused_by_name(asked: str, gpus: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        assign(asked, 2, gpus)


@pytest.mark.parametrize(
    ("places", "line"),
    [
        ([FREE, FREE], ""),
        ([C0, C1], "one device per learner: cuda:0, cuda:1"),
        ([C0, C1, C0], "3 learners share 2 devices in turn: cuda:0, cuda:1"),
        ([C0, C0], "2 learners share 1 device in turn: cuda:0"),
    ],
)
def test_who_shares_is_said_in_a_line(places: list[Place], line: str) -> None:
    assert devices_line(places) == line


def test_gpus_are_those_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is the second one of CUDA_VISIBLE_DEVICES, whatever that calls it."""
    monkeypatch.setattr(launch, "count_gpus", lambda: 2)
    asked = RunProcess(devices="all", learners=2)
    for visible, names in ((None, ["0", "1"]), ("3,1", ["3", "1"]), ("GPU-x,GPU-y,GPU-lost", ["GPU-x", "GPU-y"])):
        monkeypatch.delenv(VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(VISIBLE, visible)
        assert [place.visible for place in launch.places_of(asked)] == names


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--devices", "cpu+cpu+cpu", "--batch", "8"),
            "batch=8: a learner with 3 ranks divides .* number of ranks that divides it",
        ),
        (("--devices", "cpu,cpu+cpu", "--batch", "7"), "batch=7: a learner with 2 ranks"),
    ],
)
def test_a_batch_that_ranks_cannot_divide_is_refused_at_once(given, said, tmp_path, monkeypatch, capsys):
    """Before anything is made: not in a learner's log, once the others train."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *given, "--learners", "2", "--out", "mine"]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert list(tmp_path.iterdir()) == []


async def test_a_learners_process_sees_its_own_device_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "count_gpus", lambda: 2)
    _, children, screen, _ = launched(tmp_path, devices="all", learners=3)
    learners = children.named("learner-")
    assert [(flag(one, "--device"), one.environ["CUDA_VISIBLE_DEVICES"]) for one in learners] == [
        ("cuda", "0"),
        ("cuda", "1"),
        ("cuda", "0"),
    ]
    assert "3 learners share 2 devices in turn: cuda:0, cuda:1" in screen.notes
    assert "CUDA_VISIBLE_DEVICES" not in children["evaluator"].environ


async def test_ranks_share_the_cores_and_the_gpus_of_their_learner(tmp_path, monkeypatch) -> None:
    """A learner on a set is told of it as it sees it. Threads are divided among all processes that train."""
    monkeypatch.setattr(launch, "count_gpus", lambda: 4)
    monkeypatch.setattr(launch, "usable_cores", lambda: 12)
    _, children, screen, _ = launched(tmp_path, devices="2+3,0", learners=2)
    first, second = children.named("learner-")
    assert (flag(first, "--device"), first.environ["CUDA_VISIBLE_DEVICES"]) == ("cuda:0+cuda:1", "2,3")
    assert (flag(second, "--device"), second.environ["CUDA_VISIBLE_DEVICES"]) == ("cuda", "0")
    assert flag(first, "--threads") == flag(second, "--threads") == "4"
    assert "one device per learner: cuda:2+cuda:3, cuda:0" in screen.notes


def test_what_has_no_use_for_sets_refuses_them(capsys, tmp_path, monkeypatch) -> None:
    """The baseline, whose learners are ranks themselves; and pausing, which no one process of a learner can be."""
    out = ["--devices", "cpu+cpu", "--out", str(tmp_path / "out")]
    assert cli.main(["run", "--method", "data-parallel", *out]) == 2
    assert "a different --method for a set of devices per learner" in capsys.readouterr().err
    assert cli.main(["chaos", "--pause", "learner:5s", *out]) == 2
    assert "--pause with --devices cpu+cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["run", "chaos"])
def test_a_device_that_is_not_here_is_refused_before_anything_is_made(command, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    out = tmp_path / "out"
    assert cli.main([command, "--devices", "cuda:0", "--out", str(out)]) == 2
    assert "cuda:0 is not on this machine" in capsys.readouterr().err
    assert not out.exists()
