"""Threads below numpy: every process that merges has one, whoever starts it, and a user's own choice stands."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.pipeline.process import cores
from diloco.pipeline.process.cgroup import Limits, limits
from diloco.pipeline.process.cores import product_speed, usable_cores
from tests import HANGING_S

ROOT = Path(__file__).parents[2]
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "GOTO_NUM_THREADS")

LOOK = """
import json, sys
import numpy, threadpoolctl
threadpoolctl.threadpool_limits(2, user_api="blas")  # as on a machine of two cores, whatever this one has
def look():
    found = [one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
    print(json.dumps(found), flush=True)
"""

SYNCER = (
    LOOK
    + """
import asyncio
from diloco.cli import main
from diloco.syncer.serving import service
async def serve(settings):
    await asyncio.to_thread(look)  # where merges are made
    return 0
service.serve = serve
sys.exit(main(["syncer", "--redis-url", "redis://nowhere:1"]))
"""
)
CAMPAIGN = LOOK + "from tests.world.campaign import _begin\n_begin()\nlook()"
LAB = LOOK + "import os\nfrom diloco_studies.quality.sweep import _begin\n_begin(os.getppid(), None, None, 1)\nlook()"
REPLAY = (
    LOOK
    + """
from diloco.cli import main
from diloco import tape
tape.list_recording = lambda folder: look() or set()
main(["tape", "--replay", "nowhere"])
"""
)


def blas_threads(code: str, **environ: str) -> list[int]:
    """Of each BLAS library in a process that runs this code, started without any variable about threads but these."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES and "DILOCO" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines, done.stdout + done.stderr
    found: list[int] = json.loads(lines[0])
    assert found, "numpy has no BLAS library that can be looked at: is this test still about anything?"
    return found


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(SYNCER, id="syncer"),
        pytest.param(CAMPAIGN, marks=pytest.mark.slow, id="campaign"),
        pytest.param(LAB, marks=pytest.mark.slow, id="lab"),
        pytest.param(REPLAY, id="replay"),
    ],
)
def test_every_process_that_merges_takes_one_blas_thread_by_itself(code: str) -> None:
    """BLAS threads of a merge fight with the learners on the same cores; no variable in the environment is needed."""
    assert set(blas_threads(code)) == {1}


def test_what_the_launcher_tells_torch_does_not_give_the_syncer_more() -> None:
    """`diloco run` with one learner on two cores sets OMP_NUM_THREADS=2 for it."""
    assert set(blas_threads(SYNCER, OMP_NUM_THREADS="2")) == {1}


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", pytest.param("MKL_NUM_THREADS", marks=pytest.mark.slow)])
def test_a_users_own_choice_stands(name: str) -> None:
    """A syncer on a machine of its own may multiply on more cores."""
    assert set(blas_threads(SYNCER, **{name: "2"})) == {2}


def test_the_speed_of_products_is_measured() -> None:
    """Of one product, and how many go on beside each other; no core of today is outside these bounds."""
    speed = product_speed()
    assert 1e8 < speed.flops < 1e14
    assert 1 <= speed.at_once <= usable_cores()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1073741824\n", "cpu.max": "150000 100000\n"}, Limits(2.0**30, 1.5)),
        ({"memory.max": "max\n", "cpu.max": "max 100000\n"}, Limits(math.inf, math.inf)),
        (
            {
                "memory/memory.limit_in_bytes": "1073741824\n",
                "cpu/cpu.cfs_quota_us": "250000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            Limits(2.0**30, 2.5),
        ),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, Limits(math.inf, math.inf)),
        ({}, Limits(math.inf, math.inf)),
    ],
    ids=["2", "2, none set", "1", "1, none set", "not there"],
)
def test_a_containers_limits_are_read(files: dict[str, str], expected: Limits, tmp_path: Path) -> None:
    """Of both versions of control groups; without one there is none."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert limits(tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            "0::/slice/job/step\n",
            {
                "slice/memory.max": "1073741824\n",
                "slice/job/memory.max": "max\n",
                "slice/job/step/memory.max": "4294967296\n",
                "slice/cpu.max": "max 100000\n",
                "slice/job/cpu.max": "150000 100000\n",
                "slice/job/step/cpu.max": "400000 100000\n",
                "other/memory.max": "1\n",
            },
        ),
        (
            "4:memory:/slice/job\n3:cpu,cpuacct:/slice/job\n1:name=systemd:/slice\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slice/memory.limit_in_bytes": "1073741824\n",
                "memory/slice/job/memory.limit_in_bytes": "4294967296\n",
                "cpu/slice/cpu.cfs_quota_us": "150000\n",
                "cpu/slice/cpu.cfs_period_us": "100000\n",
                "cpu/slice/job/cpu.cfs_quota_us": "-1\n",
                "cpu/slice/job/cpu.cfs_period_us": "100000\n",
            },
        ),
        ("0::/../outside\n", {"memory.max": "1073741824\n", "cpu.max": "150000 100000\n"}),
        ("0::/docker/not-seen-from-inside\n", {"memory.max": "1073741824\n", "cpu.max": "150000 100000\n"}),
    ],
    ids=["2", "1", "outside its own tree", "another's path"],
)
def test_the_lowest_limit_of_all_groups_around_a_process_rules(own: str, files: dict[str, str], tmp_path: Path) -> None:
    """Also where a parent has less than the process's own group, as in jobs of a scheduler."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert limits(tmp_path, tmp_path / "own") == Limits(2.0**30, 1.5)


def test_usable_cores_are_whole_ones_of_the_containers_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "seen_cores", lambda: 8)
    for quota, usable in ((math.inf, 8), (16.0, 8), (2.9, 2), (0.5, 1)):
        monkeypatch.setattr(cores, "limits", lambda quota=quota: Limits(math.inf, quota))
        assert usable_cores() == usable
