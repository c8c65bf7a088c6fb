"""What a run needs, as `diloco plan` says it, the syncer checks it and the simulator's planner counts it."""

import json
from pathlib import Path
from typing import get_args

import pytest

from diloco.cli import main
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import Codec, GlobalCodec
from diloco.pipeline.needs import (
    CODECS,
    GLOBALS,
    LINK_SHARE,
    Site,
    layers_of,
    needs_of,
    outer_operations,
    pace_of,
    redis_bytes,
    syncer_bytes,
)
from diloco.studies.goodput.constants import Constants

LARGE = {"params": "70B", "step_time": "3s", "link": "5Gbps"}


def test_every_codec_of_a_run_is_known() -> None:
    """By the bytes that it has on the wire, scales included."""
    assert set(CODECS) == set(get_args(Codec))
    assert set(GLOBALS) == set(get_args(GlobalCodec))
    assert CODECS["int8"] == 1 + 2 / 256


def test_layers_lie_between_those_of_the_known_sizes() -> None:
    assert [layers_of(size) for size in (1e6, 1e9, 10e9, 100e9, 1e12)] == [24, 24, 48, 108, 108]
    assert 24 < layers_of(3e9) < 48


def test_redis_must_hold_what_a_syncer_asks_of_it_at_its_start() -> None:
    """2 globals, 2 momenta, 4 deltas in bf16, 2 offers of two moments: 40 bytes a parameter."""
    assert redis_bytes(1e6, 4, "bf16", "fp32") == 40e6
    assert redis_bytes(1e6, 8, "bf16", "fp32") == 48e6
    assert redis_bytes(1e6, 4, "int8", "fp32") < 40e6


def test_more_fragments_take_less_of_a_syncers_memory() -> None:
    """Values, momentum and a merge's result stay; windows shrink."""
    whole, parts = (syncer_bytes(1e9, 4, fragments, "nesterov") for fragments in (1, 100))
    assert whole > parts > 12e9
    assert syncer_bytes(1e9, 4, 1, "muon") == whole + 4e9


def test_muon_takes_cores_that_nesterov_does_not() -> None:
    """By the width of its matrices: so much more a parameter, the larger the model. It is said what helps."""
    site = Site(**LARGE)
    plain, muon = (needs_of(site, pace_of(site, 4, 2, "bf16", "fp32", o), 4, o) for o in ("nesterov", "muon"))
    assert plain.warnings == []
    assert muon.syncer_cores > 100 * plain.syncer_cores
    assert muon.syncers > plain.syncers
    assert any("outer = nesterov" in warning for warning in muon.warnings)
    assert outer_operations(2e9, "muon") > 2 * outer_operations(1e9, "muon")
    small = Site(params="10M", step_time="1s", link="1Gbps")
    assert needs_of(small, pace_of(small, 4, 2, "auto", "fp32", "muon"), 4, "muon").warnings == []


def test_the_measured_cost_of_muon_is_met() -> None:
    """docs/performance.md: 8M elements as matrices of 768 x 768 take 0.73 s on two cores; 30 n a parameter there."""
    from diloco.pipeline.needs import OUTER_FLOPS

    assert pytest.approx(0.73, rel=0.1) == 30 * 768 * 8e6 / OUTER_FLOPS / 2


def test_a_longer_interval_is_taken_only_where_the_link_wants_it() -> None:
    slow, fast = (pace_of(Site(**LARGE | {"link": link}), 4, 2, "auto", "fp32") for link in ("5Gbps", "400Gbps"))
    assert slow.interval > fast.interval == 24
    site = Site(**LARGE)
    assert needs_of(site, slow, 4).link_load <= LINK_SHARE
    hopeless = pace_of(Site(**LARGE | {"link": "10Mbps"}), 4, 2, "bf16", "fp32")
    assert any("times the bandwidth" in warning for warning in hopeless.warnings)
    assert "outlasts" in hopeless.why["fragments"]


def test_a_plan_is_within_what_a_run_may_have() -> None:
    for params in ("10M", "1B", "70B", "1T"):
        pace = pace_of(Site(params=params), 8, 2, "auto", "fp32")
        for name, value in (("fragments", pace.fragments), ("sync_interval", pace.interval)):
            (bound,) = (rule.le for rule in SyncSpec.model_fields[name].metadata if hasattr(rule, "le"))
            assert 1 <= value <= bound


def test_the_simulators_world_is_a_site() -> None:
    """The same defaults, and the same needs for the same M."""
    assert {name: getattr(Constants(), name) for name in Site.model_fields} == Site().model_dump()


def test_the_command_says_what_it_chooses_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    given = ["--params", "70B", "--step-time", "3s", "--link", "5Gbps", "--outer", "nesterov"]
    assert main(["plan", *given, "--learners", "4", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    for word in ("4 learners", "256", "bf16", "Redis nodes", "merging"):
        assert word in shown
    made = json.loads(out.read_text())
    assert (made["learners"], made["sync_interval"], made["codec"]) == (4, 256, "bf16")
    assert main(["plan", "--codec", "fp8"]) == 2
    assert main(["plan", "--params", "many"]) == 2
