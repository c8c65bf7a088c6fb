"""The benchmarks: what they make of measurements, what they refuse, and one small round of each with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from diloco.cli import main
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.needs import needs_of, pace_of
from diloco.pipeline.redis_memory import offered_bytes
from diloco.pipeline.settings import SyncSettings, defaults
from diloco.pipeline.site import Site
from diloco_studies.bench import floor, machine
from diloco_studies.bench.end_to_end import PYTHONPATH, Case
from diloco_studies.bench.figures import spread
from diloco_studies.bench.merging import Sizes, Work, alternate
from diloco_studies.bench.plain import Plain
from tests import HANGING_S

ROOT = Path(__file__).resolve().parents[2]
OUTER = defaults(SyncSettings)["outer"]
KEYS = ("publish_to_adopted_s", "trainer_blocked_s", "syncer_cpu_s_per_gb", "syncer_rss_mb", "redis_floor_ratio")


def bench(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    environ |= {"PYTHONPATH": PYTHONPATH} | ({"PATH": path} if path is not None else {})
    command = [sys.executable, "-m", "diloco", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)


def test_ways_take_turns_and_the_first_turn_does_not_count():
    order: list[str] = []
    ways = {name: lambda name=name: float(order.append(name) or len(order)) for name in "ab"}
    found = alternate(ways, 2, Console(quiet=True), "")
    assert order == ["a", "b"] * 3
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_bytes_through_redis_are_those_of_one_round():
    """Deltas go in and out once, the global in once and out to each learner, its momentum in once."""
    case = Case(1000, fragments=4, learners=3, wire="bf16", momentum=0.9, global_codec="fp32")
    assert case.into_bytes == 3 * 2000 + 2 * 4000
    assert case.out_bytes == 3 * 2000 + 3 * 4000
    assert Case(1000, fragments=4, learners=3, wire="bf16", in_turn=True).into_bytes == (3 * 2000 + 4000) / 4
    rounded = Case(1000, learners=3, wire="int8", global_codec="bf16", link_gbit=1)
    deltas = 3 * (1000 + 2 * 1000 / 256)
    assert rounded.into_bytes == deltas + 4000
    assert rounded.out_bytes == deltas + 3 * 2000
    assert rounded.lines_s == (deltas + 4000 + 2000) / 125e6


def test_production_code_and_plain_numpy_merge_the_same():
    """Else the comparison would compare two things."""
    work = Work(Sizes(elements=300_000, learners=3, wire="bf16"))
    made, plain = work.step().theta, work.plain()
    assert work.close(work.summed(2)).theta.tobytes() == made.tobytes()
    assert abs(made - plain).max() < 1e-4
    assert abs(made - work.theta).max() > 1e-2


def test_a_machine_in_its_usual_state_is_not_spoken_of_and_each_other_state_is():
    usual = {
        "others_share": spread([0.01, 0.05]),
        "steal_share": spread([0.0]),
        "fresh_page_us": spread([0.5, 1.9]),
        "memory_gb_s": spread([20.0, 25.0]),
        "floor_in_gb_s": spread([2.0, 3.0]),
    }
    assert machine.unusual(usual) == []
    assert machine.unusual({}) == []
    for name, found, said in (
        ("others_share", [0.0, 0.5, 0.6], "other processes took 50%"),
        ("steal_share", [0.3], "the host of this machine took 30%"),
        ("fresh_page_us", [0.5, 20.0], "up to 20 us"),
        ("memory_gb_s", [5.0, 25.0], "5 to 25 GB/s"),
        ("floor_in_gb_s", [1.0, 3.0], "1 to 3 GB/s"),
    ):
        (only,) = machine.unusual(usual | {name: spread(found)})
        assert said in only


def test_what_others_take_is_without_what_these_processes_do():
    taken = machine.Taken([])
    began, until = time.perf_counter(), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    busy = taken.shares()
    own_share = 0.3 / (time.perf_counter() - began) / os.cpu_count()
    assert 0 <= busy["others_share"] <= 1 - own_share / 2
    assert 0 <= busy["steal_share"] <= 1
    assert machine.fresh_page_us() > 0


def test_what_does_not_fit_is_said_before_it_is_started(capsys):
    assert main(["bench", "end-to-end", "--params", "1e12"]) == 2
    said = capsys.readouterr().err
    assert "needs about" in said
    assert "free here" in said
    machine.need_memory(1e6, "little")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("merge", "--wire", "fp64"), "--wire fp64: use one of"),
        (("end-to-end", "--global-codec", "int4"), "--global-codec int4: use one of fp32, bf16"),
        (("end-to-end", "--link", "1", "--redis-url", "redis://localhost:1"), "--link is only for the embedded Redis"),
        (
            ("end-to-end", "--server", __file__, "--redis-url", "redis://localhost:1"),
            "--server is only for the embedded Redis",
        ),
        (("merge", "--json", "no/such/folder/x.json"), "the folder no/such/folder does not exist"),
        (("codec", "--params", "1e6,x"), "--params 1e6,x: give positive numbers"),
        (("step", "--model", "huge"), "one of nano"),
        (("cost", "--model", "huge"), "one of nano"),
        (("cost", "--steps", "0"), "steps"),
        (("end-to-end", "--redis-url", "rediss://localhost:1"), "not rediss://"),
        (("end-to-end", "--redis-url", "redis://localhost:1"), "Redis does not answer"),
    ],
)
def test_a_mistake_is_named(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.redis
def test_the_stand_in_moves_all_bytes_and_says_that_it_is_one():
    with EmbeddedRedis() as redis, Plain(redis.url) as plain:
        rates = floor.rates(redis.url, 65536, 2**21, 2**21, None)
        assert rates.into > 0
        assert rates.out > 0
        assert "not on PATH" in rates.client
        assert len(plain.ask("GET", floor.KEY)) == 65536
        plain.remove("key:*")
        assert plain.ask("DBSIZE") == 0


@pytest.mark.slow
@pytest.mark.redis
def test_end_to_end_measures_real_processes_and_leaves_none(tmp_path):
    """Every key that is promised, with median, least and most."""
    file = tmp_path / "e.json"
    done = bench(
        *(
            "end-to-end",
            "--params",
            "200e3",
            "--fragments",
            "2",
            "--momentum",
            "0.9",
            "--rounds",
            "2",
            "--wire",
            "fp32",
        ),
        *("--global-codec", "bf16", "--link", "1", "--aof", "both"),
        *("--json", str(file)),
        path="/usr/bin:/bin",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    for key in KEYS:
        assert 0 < report[key]["min"] <= report[key]["median"] <= report[key]["max"]
        assert report[key]["n"] == 2
        assert report["with_aof"][key]["n"] == 2
        assert report["with_aof"][key] != report[key]
    assert report["redis_cpu_ratio"]["min"] > 0
    assert report["all_cpu_s"]["min"] > report["redis_cpu_s"]["min"]
    into, out = 0.2 * (2 * 4 + 2 + 2 + 4), 0.2 * 2 * (4 + 2)  # MB: deltas, global, rest, momentum; deltas, globals
    assert into <= report["redis_in_mb"]["min"] < 1.5 * into
    assert out <= report["redis_out_mb"]["min"] < 1.5 * out
    assert {"others_share", "steal_share", "fresh_page_us", "redis_fresh_pages"} <= report.keys()
    assert 0 < report["merged_share"] <= 1
    assert "merged share of what was trained" in done.stdout
    assert "append-only file on" in done.stdout
    assert report["settings"]["fragments"] == 2
    assert {"cores", "cpu", "python", "torch", "numpy", "redis"} <= report["machine"].keys()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [
        one for one in commands if b"diloco_studies.bench.beside.party" in one and report["run"].encode() in one
    ]


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_takes_what_the_plan_says(tmp_path: Path) -> None:
    """Redis and the syncer, at their peaks, no more than planned and no less than 0.4 of it; offers of moments are not
    in it, for there are none.
    """
    file, params = tmp_path / "e.json", 40e6
    sizes = ("--params", str(params), "--fragments", "8", "--global-codec", "fp32", "--rounds", "3")
    done = bench("end-to-end", *sizes, "--outer", OUTER, "--momentum", "0.7", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report, site = json.loads(file.read_text()), Site(params=params)
    planned = needs_of(site, pace_of(site, 2, 2, "bf16", "fp32", OUTER)._replace(fragments=8), 2, 2, OUTER)
    redis = planned.redis_memory_bytes - offered_bytes(int(params))
    assert 0.4 * redis < 1e6 * report["redis_peak_mb"] < redis
    assert 0.4 * planned.syncer_memory_bytes < 1e6 * report["syncer_rss_mb"]["max"] < planned.syncer_memory_bytes


@pytest.mark.redis
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_signal_ends_all_processes_and_leaves_no_folder(number, tmp_path, popen):
    """In the middle of the rounds."""
    environ = os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "diloco", "bench", "end-to-end", "--params", "100e3", "--rounds", "1000"]
    process = popen(command, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list(tmp_path.glob("diloco_bench_*/learner-1.log")):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(number)
    _, said = process.communicate(timeout=HANGING_S)
    assert process.returncode not in (0, -number)
    assert b"Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.redis
def test_fragments_in_turn_and_merge(tmp_path):
    runs = {
        "turn": ("end-to-end", "--params", "200e3", "--fragments", "3", "--in-turn", "--rounds", "4", "--aof", "on"),
        "merge": ("merge", "--params", "100e3", "--rounds", "2"),
    }
    for name, arguments in runs.items():
        file = tmp_path / f"{name}.json"
        done = bench(*arguments, "--json", str(file))
        assert done.returncode == 0, done.stderr
        assert json.loads(file.read_text())["benchmark"] == arguments[0]


@pytest.mark.slow
def test_step_and_cost(tmp_path):
    runs = {
        "step": ("step", "--model", "tiny", "--tokens", "32", "--rounds", "1"),
        "cost": ("cost", "--steps", "5", "--model", "tiny", "--rounds", "1"),
    }
    for name, arguments in runs.items():
        file = tmp_path / f"{name}.json"
        done = bench(*arguments, "--json", str(file))
        assert done.returncode == 0, done.stderr
        assert json.loads(file.read_text())["benchmark"] == name
