"""Promises about `bench compare`: environments, the lines spoken with drivers, and what is made of the figures."""

import io
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from diloco.pipeline.errors import UsageError
from diloco_studies.bench.beside import crew, environments
from diloco_studies.bench.beside.command import notes, rows, sizes
from diloco_studies.bench.beside.compare import OURS, WAYS, Comparison, Outcome, Rival, Size, measure, shapes, systems
from diloco_studies.bench.beside.crew import Crew, alike
from diloco_studies.bench.beside.environments import PEERS, Peer, Unavailable, python_of, version_wanted
from diloco_studies.bench.end_to_end import PYTHONPATH
from diloco_studies.bench.machine import family, peaks_mb
from tests import HANGING_S

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import json, os, subprocess, sys, time
given = json.loads(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
def say(what): print(json.dumps(what), flush=True)
say({"versions": {"fake": "1.0"}, "settings": "none", "address": f"at {given['number']}", "child": child.pid})
for line in sys.stdin:
    command = line.strip()
    if given.get("bad") == command:
        if given["how"] == "hang": time.sleep(1000)
        if given["how"] == "die": sys.exit("something is wrong")
        if given["how"] == "noise": print("no JSON", flush=True)
        if given["how"] == "flood": print("x" * 200000, flush=True)
        if given["how"] == "empty": say({})
    if command == "round":
        now = time.monotonic()
        said = {"began": now - 100 - 100 * given["number"], "adopted": now, "from": given["address"]}
        say(said | {"blocked_s": 0.5 + given["number"], "server_cpu_s": 2.0})
    elif command == "check":
        say({"lengths": [3.0 + given["number"] * given.get("apart", 0.0)]})
    else:
        say({})
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(DRIVER)
    return path


def fake(driver: Path, processes: int = 2, **given: object) -> Crew:
    return Crew("fake", Path(sys.executable), driver, {"learners": 2, "fragments": [{}]} | given, processes, 1e9)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    """Whether they end; those that were killed may take a moment."""
    until = time.monotonic() + HANGING_S
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(pids) and not any(map(alive, pids))


def all_of(running: Crew) -> list[int]:
    return [pid for one in running._drivers for pid in family(one.pid)]


# --- environments ------------------------------------------------------------------------------------


def test_an_environment_is_taken_as_it_is_where_it_has_the_right_version(tmp_path: Path) -> None:
    """However it was made: here by hand, with a package of this Python's. Else it is said how to make it."""
    (tmp_path / "numpy" / "bin").mkdir(parents=True)
    python = tmp_path / "numpy" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "numpy.txt").write_text(f"# versions\nnumpy=={version('numpy')}\n")
    peer = Peer("numpy", tmp_path)
    assert python_of(peer, tmp_path) == python
    (tmp_path / "numpy.txt").write_text("numpy==0.1\n")
    with pytest.raises(
        Unavailable, match=r"no environment with numpy 0\.1; create it: python3\.12 -m venv .*/numpy && .* -c .*"
    ):
        python_of(peer, tmp_path)
    with pytest.raises(Unavailable, match="no environment with numpy"):
        python_of(peer, tmp_path / "none")


def test_every_peer_has_a_driver_and_its_versions() -> None:
    assert {name: version_wanted(peer) for name, peer in PEERS.items()} == {
        "gradientmail": "0.0.2",
        "torchft": "0.2.0",
        "hivemind": "1.1.12",
    }
    for peer in PEERS.values():
        compile(peer.driver.read_text(), peer.name, "exec")


# --- drivers -----------------------------------------------------------------------------------------


def test_a_crew_is_joined_measured_and_gone(driver: Path) -> None:
    """From the last beginning to the last adoption; the others know where the first one is; nobody is left."""
    with fake(driver) as running:
        assert running.hello["address"] == "at 0"
        assert [one["from"] for one in running.all("round")] == [None, "at 0"]
        found = running.round()
        pids = all_of(running)
        assert len(pids) == 4
        assert running.hello["child"] in pids
    assert gone(pids)
    assert 99 < found["publish_to_adopted_s"] < 199
    assert found["trainer_blocked_s"] == 1.5
    assert found["server_cpu_s_per_gb"] == 4.0
    assert 0 <= found["cpu_s_per_learner"] < 5
    assert 5 < found["largest_process_mb"] < found["all_processes_mb"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hang", "fake-0 did not answer `round` within 1 s"),
        ("die", r"fake-0 has ended \(1\): something is wrong"),
        ("noise", "with something other than a JSON object: b'no JSON'"),
        ("flood", "with more than 65536 bytes"),
        ("empty", "something other than figures: KeyError"),
    ],
)
def test_a_driver_that_fails_is_named_with_the_reason_and_ended(
    how: str, said: str, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "ANSWER_S", 1.0 if how == "hang" else 30.0)
    monkeypatch.setattr(crew, "LEAVE_S", 0.5)
    with fake(driver, bad="round", how=how) as running:
        pids = all_of(running)
        with pytest.raises(Unavailable, match=said):
            running.round()
    assert len(pids) == 4
    assert gone(pids)


def test_a_driver_that_does_not_start_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package")
    with (
        pytest.raises(Unavailable, match=r"has ended \(1\): ModuleNotFoundError.*no_such_package"),
        fake(tmp_path / "broken.py"),
    ):
        pass


def test_an_interrupt_leaves_no_process(driver: Path) -> None:
    pids: list[int] = []
    with suppress(KeyboardInterrupt), fake(driver) as running:
        pids += all_of(running)
        raise KeyboardInterrupt
    assert len(pids) == 4
    assert gone(pids)


def test_learners_that_differ_after_a_round_have_synchronised_nothing(driver: Path) -> None:
    with fake(driver, apart=0.1) as running, pytest.raises(Unavailable, match=r"differ after a round: lengths 3, 3\.1"):
        running.round()
    with pytest.raises(Unavailable):
        alike([])


def test_memory_shared_by_processes_counts_once() -> None:
    """A fork has the pages of the one that it came from."""
    code = "import os, time\nx = bytearray(200_000_000)\nos.fork()\nprint(flush=True)\ntime.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        largest, together = peaks_mb(family(process.pid))
    finally:
        environments.end_group(process.pid)
        process.communicate()
    assert largest > 200
    assert together < 300


# --- figures -----------------------------------------------------------------------------------------


class Canned:
    """A system whose n-th round takes n seconds; from its `fails`-th on it fails."""

    def __init__(self, name: str, turns: int, fails: int = 1000) -> None:
        self.name, self.fails, self.count, self.turns = name, fails, 0, turns
        self.hello = {"versions": {name: "1"}, "settings": "canned", "address": "nowhere"}

    def warm_up(self) -> None:
        self.round()

    def round(self) -> dict[str, float]:
        self.count += 1
        if self.count >= self.fails:
            raise Unavailable(f"{self.name} broke")
        return {"publish_to_adopted_s": float(self.count), "all_processes_mb": 100.0}


def canned_outcome() -> tuple[Outcome, list[str]]:
    order: list[str] = []

    def starter(name: str, **how: int):
        def start(size: Size):
            if name == "large" and size.params > 5e6:
                raise UsageError("needs about 99 GB")
            order.append(name)
            return nullcontext(Canned(name, size.fragments, **how))

        return start

    starts = {
        OURS: starter(OURS),
        "other": starter("other"),
        "broken": starter("broken", fails=4),
        "large": starter("large"),
    }
    given = Comparison((Size(1_000_000), Size(10_000_000, 4)), rounds=2, passes=2, warm=2)
    return measure(given, starts, {"absent": "no Python"}, Console(quiet=True)), order


def test_systems_take_turns_and_a_failure_stops_none_of_the_others() -> None:
    """The first rounds of each do not count. What failed once has no figures, and is not tried again at that size."""
    outcome, order = canned_outcome()
    assert order == [OURS, "other", "broken", "large", OURS, "other", "large", OURS, "other", "broken", OURS, "other"]
    report = outcome.report()
    small, large = report["sizes"]["1M"], report["sizes"]["a 2.5M fragment of 10M"]
    assert small[OURS]["publish_to_adopted_s"] == {"median": 3.5, "min": 3.0, "max": 4.0, "n": 4}
    assert large[OURS]["publish_to_adopted_s"]["min"] == 9.0  # each of four fragments had two turns before
    assert small["broken"] == large["broken"] == {"not_available": "broken broke"}
    assert small["absent"] == {"not_available": "no Python"}
    assert large["large"] == {"not_available": "needs about 99 GB"}
    assert report["systems"]["other"] == {"versions": {"other": "1"}, "settings": "canned"}
    json.dumps(report)


def test_table_and_notes_name_every_system() -> None:
    outcome, _ = canned_outcome()
    report = outcome.report()
    made = {row[0]: row[1:] for row in rows(report["sizes"]["1M"], OURS)}
    assert made[OURS][:2] == ["1", "3.5 (3 - 4)"]
    assert made["other"][-1] == "0.1 (0.1 - 0.1)"
    assert made["absent"] == made["broken"] == ["not available"]
    console = Console(record=True, width=200, file=io.StringIO())
    notes(console, report)
    said = console.export_text()
    assert "other (other 1): canned" in said
    assert "absent at 1M, a 2.5M fragment of 10M: not available: no Python" in said
    assert "large at a 2.5M fragment of 10M: not available: needs about 99 GB" in said


def test_all_systems_move_the_same_elements_in_fragments_of_equal_size() -> None:
    for size in (Size(10_000_000), Size(100_000_000, 8), Size(65_536)):
        found = shapes(size)
        elements = [sum(height * width for height, width in one.values()) for one in found]
        assert len(found) == size.fragments
        assert sum(elements) == pytest.approx(size.params, rel=0.1)
        assert max(elements) < 1.3 * min(elements)
        assert sum("embedding" in one for one in found) == 1


def test_a_peer_without_an_environment_is_missing_in_all_its_settings(tmp_path: Path) -> None:
    starts, missing = systems(Comparison((Size(100_000),)), tmp_path)
    assert list(starts) == list(WAYS)
    assert set(missing) == {"gradientmail", "torchft", "torchft, buckets", "hivemind"}
    assert missing["torchft"] == missing["torchft, buckets"]


def test_a_peer_that_is_there_is_started_with_its_settings(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer("fake", driver.parent)
    monkeypatch.setattr("diloco_studies.bench.beside.compare.python_of", lambda *_: Path(sys.executable))
    rivals = [Rival("fake", peer), Rival("fake, apart", peer, options={"apart": 1.0})]
    starts, missing = systems(Comparison((Size(100_000),)), tmp_path, rivals)
    assert missing == {}
    with starts["fake"](Size(100_000)) as running:
        assert running.round()["publish_to_adopted_s"] > 0
    with starts["fake, apart"](Size(100_000)) as running, pytest.raises(Unavailable, match="differ"):
        running.round()


def test_sizes_are_read_or_refused() -> None:
    assert sizes("10e6,100e6/8") == [(10_000_000, 1), (100_000_000, 8)]
    for text in ("", "x", "10", "10e6/0", "10e6/x", "1e999", "10e6/65", "nan"):
        with pytest.raises(UsageError, match="--sizes"):
            sizes(text)


@pytest.mark.slow
@pytest.mark.redis
def test_the_command_measures_ours_and_names_those_that_are_not_there(tmp_path: Path) -> None:
    """And ends well."""
    file = tmp_path / "c.json"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    command = [sys.executable, "-m", "diloco", "bench", "compare", "--sizes", "100e3", "--rounds", "1", "--passes", "1"]
    command += ["--environments", str(tmp_path / "none"), "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ | {"PYTHONPATH": PYTHONPATH}
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    found = report["sizes"]["0.1M"]
    for name in WAYS:
        assert set(found[name]) == {
            "publish_to_adopted_s",
            "trainer_blocked_s",
            "server_cpu_s_per_gb",
            "cpu_s_per_learner",
            "largest_process_mb",
            "all_processes_mb",
        }
        assert all(figure["min"] > 0 for figure in found[name].values())
    for name in ("gradientmail", "torchft", "hivemind"):
        assert "-m venv" in found[name]["not_available"]
        assert f"{name} at 0.1M: not available" in done.stdout.replace("\n", " ")
    assert not (tmp_path / "none").exists()
