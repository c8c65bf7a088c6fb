"""Whole runs on a Redis that fails over: primaries are killed, for a time or for good, and cut off."""

import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.errors import UsageError
from diloco_studies.strikes.failing.network import Network
from tests.system.test_chaos_processes import chaos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc"),
]
LEASE = ["--lease-s", "2s"]


def struck(report: dict[str, Any], manner: str, party: str) -> int:
    found: int = report["strikes"][manner][party]
    return found


def test_primaries_killed_in_turn_while_sentinels_and_syncers_die_too_break_no_promise(tmp_path: Path) -> None:
    plan = ["--kill", "redis-primary:14s/6s,sentinel:10s/4s,syncer:9s", "--for", "45s", "--seed", 4]
    report = chaos(tmp_path / "out", "--redis", "sentinel", *plan, *LEASE)
    assert struck(report, "kill", "redis-primary") >= 2
    assert struck(report, "kill", "sentinel") >= 1
    assert len({one["name"] for one in report["failovers"]}) >= 2
    assert report["commits"] > 0


def test_a_run_goes_on_without_a_primary_that_is_dead_for_good(tmp_path: Path) -> None:
    plan = ["--kill", "redis-primary:8s/never,learner:15s", "--for", "35s", "--seed", 1]
    report = chaos(tmp_path / "out", "--redis", "sentinel", *plan, *LEASE)
    assert struck(report, "kill", "redis-primary") == 1, "of three servers no other one can be spared"
    (one,) = report["failovers"]
    assert one["at_s"] + one["without_merges_s"] < report["wall_s"], "merges went on"


@pytest.mark.parametrize("length", ["6s", "never"])
def test_primaries_of_a_cluster_killed_in_turn_break_no_promise(length: str, tmp_path: Path) -> None:
    plan = ["--kill", f"redis-primary:10s/{length},syncer:12s", "--for", "40s", "--seed", 2]
    report = chaos(tmp_path / "out", "--redis", "cluster", *plan, *LEASE)
    assert struck(report, "kill", "redis-primary") >= 2
    assert report["commits"] > 0


@pytest.mark.parametrize(("redis", "seed"), [("sentinel", 3), ("cluster", 2)])
def test_what_a_primary_takes_while_it_is_cut_off_is_lost_and_told(redis: str, seed: int, tmp_path: Path) -> None:
    """It goes on with a syncer and some learners on its side; they adopt the surviving heads when it is back."""
    try:
        with Network():
            pass
    except UsageError as refused:
        pytest.skip(str(refused))
    plan = ["--kill", "none", "--partition", "redis-primary:15s/8s", "--learners", 4, "--for", "45s", "--seed", seed]
    report = chaos(tmp_path / "out", "--redis", redis, *plan, *LEASE)
    assert struck(report, "partition", "redis-primary") >= 1
    told = [one["detail"] for one in report["failovers"]]
    lost = [int(detail.partition("; ")[2].split()[0]) for detail in told if "bytes of what" in detail]
    assert lost, told
    assert max(lost) > 0
