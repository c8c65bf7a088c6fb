"""What a run needs, as `diloco plan` says it, the syncer checks it and the simulator's planner counts it."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from diloco.cli import main
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.moments import MAX_OFFERED_BYTES
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import Codec, GlobalCodec
from diloco.pipeline.needs import GLOBALS, LINK_SHARE, SYNCER_MEMORY_BYTES, needs_of, pace_of
from diloco.pipeline.outer_cost import CHEAPER, CORE_FLOPS, matrix_operations
from diloco.pipeline.party_memory import LEARNER_PROCESS_BYTES, SYNCER_SPARE, syncer_bytes, syncer_share
from diloco.pipeline.redis_memory import CODECS, offered_bytes, redis_bytes
from diloco.pipeline.settings import SyncSettings, defaults, load
from diloco.pipeline.site import Site, outer_operations, params_of, shape_of
from diloco_studies.goodput.constants import Constants

LARGE = {"params": "70B", "step_time": "3s", "link": "5Gbps"}


def test_every_codec_of_a_run_is_known() -> None:
    """By the bytes that it has on the wire, scales included."""
    assert set(CODECS) == set(get_args(Codec))
    assert set(GLOBALS) == set(get_args(GlobalCodec))
    assert CODECS["int8"] == 1 + 2 / 256


def test_offers_of_moments_are_no_larger_than_a_learner_makes_them() -> None:
    """Two of 8 bytes a parameter, up to the size above which moments are nobody's to ask for: so 7B need 198 GB."""
    assert offered_bytes(1e6) == 2 * 8e6
    assert offered_bytes(MAX_OFFERED_BYTES / 8) == offered_bytes(7e9) == 2 * MAX_OFFERED_BYTES
    assert redis_bytes(7e9, 4, "bf16") == pytest.approx(198e9, rel=1e-3)


def test_a_syncer_has_room_for_what_a_dead_one_served() -> None:
    """Alone or with one other it needs room for all fragments; of five, for a quarter, in whole fragments."""
    assert [syncer_share(8, syncers) for syncers in (1, 2, 3, 5)] == [1, 1, 0.5, 0.25]
    assert syncer_share(8, 4) == 3 / 8
    whole, half = (syncer_bytes(1e9, 4, "bf16", "nesterov", share) for share in (1.0, 0.5))
    assert whole - half == pytest.approx(0.5 * SYNCER_SPARE * 28e9)
    assert syncer_bytes(1e9, 4, "bf16", "halley") == whole + SYNCER_SPARE * 4e9
    assert syncer_bytes(1e9, 8, "bf16", "nesterov") == whole + SYNCER_SPARE * 8e9


@pytest.mark.parametrize("params", ["1B", "7B", "30B", "70B", "500B"])
@pytest.mark.parametrize("learners", [2, 8, 64])
@pytest.mark.parametrize("link", ["1Gbps", "100Gbps"])
def test_syncers_fit_their_machines_or_it_is_said(params: str, learners: int, link: str) -> None:
    """A fragment cannot be divided: as few as fit in whole fragments, and never more than one beyond the fragments."""
    site = Site(params=params, link=link)
    made = needs_of(site, pace_of(site, learners, 2, "auto", "fp32", "nesterov"), learners, 2, "nesterov")
    room = SYNCER_MEMORY_BYTES * LINK_SHARE
    said = any("use more fragments or larger machines" in warning for warning in made.warnings)
    assert 2 <= made.syncers <= made.fragments + 1
    assert said or made.syncer_memory_bytes <= room
    assert not said or made.syncers == made.fragments + 1


def party(name: str, **told: Any) -> Any:
    """One of the parties of a plan for 8B in 16 fragments."""
    site = Site(params="8B", step_time="3s", link="25Gbps")
    pace = pace_of(site, 4, 2, told.pop("codec", "bf16"), "fp32", "nesterov")._replace(fragments=16)
    made = needs_of(site, pace, 4, 2, "nesterov", **told)
    return next(one for one in made.parties if one.name == name)


def test_ranks_share_what_a_learner_takes() -> None:
    """Training, bytes and cores by their number; bases by the fragments that each serves; not what is under way. While
    the bus is away a learner of one process holds snapshots of four of its 16 fragments."""
    alone, rank = party("learner"), party("rank", ranks=8)
    assert (alone.machines, rank.machines) == (4, 32)
    assert alone.training_bytes == 16 * 8e9
    for each in ("training_bytes", "bytes_per_s", "cores"):
        assert getattr(rank, each) == pytest.approx(getattr(alone, each) / 8), each
    fragment = 8e9 / 16
    exchange = {one.name: one.memory_bytes - LEARNER_PROCESS_BYTES for one in (alone, rank)}
    assert exchange["learner"] == 16 * 4 * fragment + (4 * 4 + 4 + 2) * fragment
    assert exchange["rank"] == 2 * 4 * fragment + (4 + 2 + 2 * 4) * fragment, "a global, a payload, rows of each way"
    assert party("rank", ranks=8, codec="int8").memory_bytes > rank.memory_bytes + 2 * 4 * fragment
    lossy = party("learner", codec="int8").memory_bytes
    assert lossy > alone.memory_bytes + (16 * 12 - 1) * fragment, "a residual, and two deltas while nothing is merged"
    assert party("rank", ranks=8, precision="bf16").training_bytes == 18 * 1e9


def test_a_rank_with_more_fragments_than_others_counts() -> None:
    """16 fragments over 5 ranks: one of them serves four. With more ranks than fragments it is said that some idle."""
    assert party("rank", ranks=5).bytes_per_s == pytest.approx(party("learner").bytes_per_s / 4)
    site = Site(params="10M", step_time="1s", link="1Gbps")
    pace = pace_of(site, 4, 2, "auto", "fp32", "halley")
    assert pace.fragments == 8
    (warning,) = needs_of(site, pace, 4, 2, "halley", ranks=12).warnings
    assert "4 of 12 ranks do not serve a fragment" in warning
    assert needs_of(site, pace, 4, 2, "halley", ranks=8).warnings == []


def test_the_default_step_takes_cores_that_nesterov_does_not() -> None:
    """By the width of its matrices: so much more a parameter, the larger the model. It is said what helps."""
    site = Site(**LARGE)
    plain, halley = (needs_of(site, pace_of(site, 4, 2, "bf16", "fp32", o), 4, 2, o) for o in ("nesterov", "halley"))
    assert plain.warnings == []
    assert halley.syncer_cores > 100 * plain.syncer_cores
    few = Site(**LARGE, syncer_cores=2)
    fewer = needs_of(few, pace_of(few, 4, 2, "bf16", "fp32", "halley"), 4, 2, "halley")
    assert fewer.syncers > halley.syncers
    assert any("--outer nesterov" in warning for warning in fewer.warnings)
    assert outer_operations(Site(params="2B"), "halley") > 2 * outer_operations(Site(params="1B"), "halley")
    small = Site(params="10M", step_time="1s", link="1Gbps")
    assert needs_of(small, pace_of(small, 4, 2, "auto", "fp32", "halley"), 4, 2, "halley").warnings == []


@pytest.mark.parametrize(
    ("rows", "columns", "measured_ms"), [(768, 768, 39), (768, 3072, 45), (2048, 2048, 110), (3072, 768, 45)]
)
def test_the_measured_cost_of_the_default_step_is_met(rows: int, columns: int, measured_ms: float) -> None:
    """Milliseconds of a core for a million elements as such matrices: `docs/results/outer-step.md`."""
    each = 1e6 / (rows * columns) * matrix_operations(rows, columns, "halley")
    assert pytest.approx(measured_ms, rel=0.1) == 1e3 * each / CORE_FLOPS


@pytest.mark.parametrize(("learners", "global_codec", "measured"), [(2, "bf16", 20), (4, "bf16", 32), (2, "fp32", 24)])
def test_redis_moves_what_was_measured_of_it(learners: int, global_codec: GlobalCodec, measured: float) -> None:
    """Bytes in and out per parameter and round, by `INFO stats`, with deltas in bf16; as its clients together."""
    site = Site(params="8M", step_time="1s", link="10Gbps")
    pace = pace_of(site, learners, 2, "bf16", global_codec, "nesterov")
    made = needs_of(site, pace, learners, 2, "nesterov")
    assert made.redis_bytes_per_s * made.round_s / 8e6 == pytest.approx(measured, rel=0.01)
    redis, clients = (
        sum(one.machines * one.bytes_per_s for one in made.parties if (one.name == "Redis node") is kind)
        for kind in (True, False)
    )
    assert redis == pytest.approx(clients)


def test_what_is_cheaper_than_the_default_step_can_be_set() -> None:
    """As it is said; and it multiplies no matrices."""
    words = CHEAPER.split()
    flags = [i for i, word in enumerate(words) if word.startswith("--")]
    given = {words[i][2:].replace("-", "_"): words[i + 1].rstrip(",") for i in flags}
    assert matrix_operations(9, 9, load(SyncSettings, given).outer) == 0


def test_the_models_shape_is_as_told() -> None:
    """Width and layers; of one of them the other follows; and the parameters, if only these are told."""
    assert shape_of(Site(params="1B", width=2048, layers=20)) == (2048, 20)
    assert shape_of(Site(params="1B", width=2048))[1] == pytest.approx(1e9 / 12 / 2048**2)
    assert shape_of(Site(params="1B", layers=20))[0] == pytest.approx((1e9 / 240) ** 0.5)
    assert params_of(Site(width=2048, layers=20)) == 12 * 2048**2 * 20
    assert params_of(Site(params="2B", width=2048, layers=20)) == 2e9
    wide, narrow = (outer_operations(Site(params="1B", width=n), "halley") for n in (4096, 1024))
    assert wide == pytest.approx(4 * narrow)
    for impossible in ({"width": 4096, "layers": 20}, {"width": 100_000}):
        with pytest.raises(UsageError, match="leave out --layers or --width"):
            shape_of(Site(params="1B", **impossible))


def test_a_plan_has_the_runs_own_defaults_where_nothing_stands_against_them() -> None:
    """H, P, codec, grace and the outer step's rates; with Nesterov's those that are its best."""
    site = Site(params="10M", step_time="1s", link="1Gbps")
    usual = defaults(SyncSettings)
    made = needs_of(site, pace_of(site, 4, 2, "auto", "bf16", "halley"), 4, 2, "halley")
    assert made.settings == {name: usual[name] for name in made.settings}
    assert {"fragments", "sync_interval", "grace_gamma", "outer", "outer_momentum"} < set(made.settings)
    load(SyncSettings, made.settings)
    other = needs_of(site, pace_of(site, 4, 2, "auto", "bf16", "nesterov"), 4, 2, "nesterov").settings
    assert (other["outer"], other["outer_momentum"], other["outer_warmup"]) == ("nesterov", 0.5, 24)


def test_a_syncer_is_told_the_threads_that_its_outer_step_needs() -> None:
    """1B, a second a step: on one core a fragment's step takes far longer than a round trip may."""
    site = Site(params="1B", step_time="1s", link="10Gbps")
    pace = pace_of(site, 4, 2, "auto", "fp32", "halley")
    assert 1 < pace.threads <= site.syncer_cores
    assert pace.trip_s <= 2.0
    made = needs_of(site, pace, 4, 2, "halley")
    assert {party.name: party.machines for party in made.parties} == {
        "learner": 4,
        "syncer": made.syncers,
        "Redis node": made.redis_nodes,
    }
    syncer = next(party for party in made.parties if party.name == "syncer")
    assert syncer.cores >= pace.threads
    assert syncer.cores * made.syncers >= made.syncer_cores > 1
    few = Site(params="4B", step_time="1s", link="40Gbps", syncer_cores=2)
    short = pace_of(few, 4, 2, "auto", "fp32", "halley")
    assert short.threads == 2
    assert any("--outer nesterov" in warning for warning in short.warnings)
    assert pace_of(site, 4, 2, "auto", "fp32", "nesterov").threads == 1


def test_a_longer_interval_is_taken_only_where_the_link_wants_it() -> None:
    slow, fast = (
        pace_of(Site(**LARGE | {"link": link}), 4, 2, "auto", "fp32", "nesterov") for link in ("5Gbps", "400Gbps")
    )
    assert slow.interval > fast.interval == 24
    site = Site(**LARGE)
    assert needs_of(site, slow, 4, 2, "nesterov").link_load <= LINK_SHARE
    hopeless = pace_of(Site(**LARGE | {"link": "10Mbps"}), 4, 2, "bf16", "fp32", "nesterov")
    assert any("times the bandwidth" in warning for warning in hopeless.warnings)
    assert "takes longer than" in hopeless.why["fragments"]
    assert any("is overwritten" in warning for warning in hopeless.warnings), "a round of 512 steps is not lengthened"


def test_the_busier_direction_of_a_slow_link_makes_the_interval_longer() -> None:
    """What is asked for stays."""

    def chosen(link: str, codec: str = "auto") -> tuple[str, int]:
        pace = pace_of(Site(**LARGE | {"link": link}), 4, 2, codec, "bf16", "nesterov")
        return pace.codec, pace.interval

    assert chosen("400Gbps") == ("bf16", 24)
    assert chosen("5Gbps") == ("bf16", 128)
    assert chosen("5Gbps", "int8") == ("int8", 128), "globals are the busier ones"
    assert chosen("5Gbps", "fp32") == ("fp32", 256), "deltas are the busier ones"
    assert chosen("10Mbps")[1] == 512, "too little for any"


def test_a_plan_is_within_what_a_run_may_have() -> None:
    for params in ("10M", "1B", "70B", "1T"):
        pace = pace_of(Site(params=params), 8, 2, "auto", "fp32", "halley")
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
    for word in ("4 learners", "128", "bf16", "Redis nodes", "merging"):
        assert word in shown
    made = json.loads(out.read_text())
    assert (made["learners"], made["sync_interval"], made["codec"], made["global_codec"]) == (4, 128, "bf16", "bf16")
    assert made["settings"]["global_codec"] == "bf16"
    assert main(["plan", *given, "--learners", "4", "--global-codec", "fp32", "--json", str(out)]) == 0
    made = json.loads(out.read_text())
    assert (made["sync_interval"], made["codec"]) == (256, "bf16")
    assert main(["plan", "--codec", "fp8"]) == 2
    assert main(["plan", "--params", "many"]) == 2


def test_the_command_says_which_model_it_reckons_with_and_what_a_round_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 125M in bf16: 250 MB up and 250 MB down in 24 steps of a second; who knows its shape may say so."""
    given = ["plan", "--params", "125M", "--step-time", "1s", "--link", "1Gbps"]
    assert main(given) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for said in ("12 layers of width 932", "24 steps, 24 s", "sends 250MB and fetches 250MB", "83.3Mbit/s up"):
        assert said in shown
    assert "83.3Mbit/s down of 1Gbit/s, 8% busy" in shown
    assert main([*given, "--layers", "10", "--width", "1000"]) == 0
    assert "10 layers of width 1000" in " ".join(capsys.readouterr().out.split())


def test_who_calls_learner_is_told_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    """It takes no settings file. What is as usual is left out; what is printed is what a `Learner` takes."""
    assert main(["plan", "--params", "10M", "--step-time", "1s", "--link", "1Gbps"]) == 0
    assert "sets them for all: none, since these are the defaults" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--params", "7B", "--step-time", "4s", "--link", "500Mbps", "--outer", "nesterov"]) == 0
    (call,) = re.findall(r"Learner\(\.\.\., sync=(SyncSettings\(.*?\))\)", " ".join(capsys.readouterr().out.split()))
    made = eval(call, {"SyncSettings": SyncSettings})  # noqa: S307  # what we have printed
    assert (made.outer, made.outer_momentum, made.outer_warmup) == ("nesterov", 0.5, 24)
    assert made.sync_interval > 24
    assert "codec" in made.model_fields_set or made.codec == "bf16"


def test_the_command_plans_learners_of_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a rank takes of a machine stands in a row of its own, training beside exchange."""
    out = tmp_path / "plan.json"
    given = ["--params", "8B", "--step-time", "3s", "--link", "25Gbps", "--ranks", "8", "--precision", "bf16"]
    assert main(["plan", *given, "--json", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "memory of a rank: its process (400MB for Python, torch and the program) and what its exchange adds" in shown
    assert "a Redis node: memory is maxmemory, and its machine needs twice as much" in shown
    name, machines, *_, training_bytes = json.loads(out.read_text())["parties"][0]
    assert (name, machines, training_bytes) == ("rank", 32, 18e9)
    assert main(["plan", "--ranks", "0"]) == 2


def test_a_model_of_few_layers_has_no_more_fragments_than_tensors() -> None:
    """Seven tensors a layer, by the layers that are told, or that follow from the width."""
    for told in ({"layers": 1}, {"width": 280}):
        pace = pace_of(load(Site, {"params": "1M", "link": "1Mbps", **told}), 4, 2, "bf16", "fp32", "halley")
        assert pace.fragments == 7, told
    assert pace_of(load(Site, {"params": "1M", "link": "1Mbps"}), 4, 2, "bf16", "fp32", "halley").fragments > 7


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (["--learners", "0"], "at least 1"),
        (["--params", "1e308"], "at most 10T"),
        (["--params", "12"], "at least 10k"),
        (["--step-time", "0"], "more than 0"),
        (["--params", "1B", "--width", "100000"], "change --params"),
        (["--overlap-steps", "10000000"], "overlap_steps"),
        (["--syncer-cores", "100000"], "syncer_cores"),
        (["--width", "5", "--layers", "1"], "1 layers of width 5 have 300 parameters"),
        (["--width", "100000", "--layers", "10000"], "but a plan covers"),
        (["--json", "nowhere/plan.json"], "the folder nowhere does not exist"),
        (["--json", "."], "a folder, not a file"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_it_is_made(
    asked: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *asked]) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.out == ""
