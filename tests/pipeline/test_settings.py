"""Settings: where a value comes from, how a wrong one is named, and how a party agrees with its run."""

import os
from pathlib import Path
from threading import Thread
from typing import Annotated, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from diloco.cli import main
from diloco.options import ALL_FIELDS, DemoProcess
from diloco.pipeline.agreement import agree
from diloco.pipeline.errors import BadMessage, SpecMismatch, UsageError
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.messages.wire import PartyId, party_name
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.settings import (
    PARTIES,
    BusSettings,
    EvaluatorProcess,
    LearnerProcess,
    LearnerSettings,
    RankProcess,
    SyncerProcess,
    SyncSettings,
    TrainerSettings,
    is_expert,
    load,
)
from diloco.pipeline.site import Site
from diloco.pipeline.sources import check_variables
from diloco.pipeline.wrong_values import allowed, format_problem
from diloco_studies.strikes.settings import ChaosProcess
from tests import samples

pytestmark = pytest.mark.usefixtures("own_environment")


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_an_empty_variable_is_no_value(monkeypatch):
    """Compose sets variables that have no value to the empty text."""
    monkeypatch.setenv("DILOCO_QUORUM", "")
    assert load(SyncSettings).quorum == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("10s", 10.0), ("5m", 300.0), ("1h", 3600.0), ("1.5 s", 1.5), (7, 7.0)]
)
def test_durations_are_read(text, seconds):
    """With a unit, or a number of seconds."""
    assert load(LearnerSettings, {"pace": text}).pace == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        *[("2.5M", 2_500_000), ("2.3m", 2_300_000), ("4e3", 4000), ("1.1 B", 1_100_000_000), ("12k", 12_000)],
        *[("2G", 2 * 10**9), ("1_000", 1000), ("700", 700), (4e3, 4000), (7, 7)],
    ],
)
def test_whole_numbers_are_read_as_people_write_them(given, tokens, tmp_path, monkeypatch):
    """By flag, variable and file alike, and to the last digit."""
    assert load(SyncSettings, {"tokens": given}).tokens == tokens
    assert load(SyncSettings, config=toml(tmp_path, f"tokens = {given!r}\n")).tokens == tokens
    monkeypatch.setenv("DILOCO_TOKENS", str(int(given) if isinstance(given, float) else given))
    assert load(SyncSettings).tokens == tokens


@pytest.mark.parametrize(
    "given", ["2.5", "0.0005k", "M", "2.5Mega", "1e-3", "1.2.3", "", "nan", "1e400", "1e99999", 2.5]
)
def test_what_is_not_whole_is_refused_with_the_value_as_it_was_given(given):
    """Nothing is rounded, and nothing is larger than the wire can say."""
    with pytest.raises(UsageError) as error:
        load(SyncSettings, {"tokens": given})
    for word in (f"tokens={given!r}", "at least 1, at most", "--tokens", "DILOCO_TOKENS"):
        assert word in str(error.value)


def test_every_number_that_is_allowed_is_so_on_the_wire_too():
    """The largest of each protocol constant makes a spec; more is refused before that."""
    for name, info in SyncSettings.model_fields.items():
        if info.annotation is int:
            (most,) = (rule.le for rule in info.metadata if hasattr(rule, "le"))
            load(SyncSettings, {name: most}).sync_spec()


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_refused(text):
    """But for the clipping norm, of which infinity is none at all."""
    for kind, name in ((SyncSettings, "outer_lr"), (LearnerSettings, "pace"), (TrainerSettings, "weight_decay")):
        with pytest.raises(UsageError, match=f"{name}='{text}'"):
            load(kind, {name: text})
    if text == "inf":
        assert load(TrainerSettings, {"clip": text}).clip == float("inf")
    else:
        with pytest.raises(UsageError, match=f"clip='{text}'"):
            load(TrainerSettings, {"clip": text})


def test_text_that_no_file_can_hold_is_refused():
    """A path whose bytes are no UTF-8, as the system hands it to a program."""
    with pytest.raises(UsageError, match=r"data='book\\x00': has a NUL character; set it with --data"):
        load(LearnerProcess, {"data": "book\0"})
    with pytest.raises(UsageError, match=r"data='book\\udcff': not UTF-8; set it with --data"):
        load(TrainerSettings, {"data": "book\udcff"})


@pytest.mark.parametrize(
    ("kind", "name"),
    [(LearnerProcess, "data"), (LearnerProcess, "state_dir"), (SyncerProcess, "checkpoint_dir"), (DemoProcess, "out")],
)
def test_an_empty_path_is_not_the_current_folder(kind, name):
    with pytest.raises(UsageError, match=f"{name}='': empty; set it with --"):
        load(kind, {name: ""})


@pytest.mark.parametrize("text", ["soon", "10 days", "1e308", "-5s", "ms", "1.2.3s"])
def test_what_is_no_duration_is_refused(text):
    """By name, not by a stack trace."""
    with pytest.raises(UsageError, match=r"pace="):
        load(LearnerSettings, {"pace": text})


@pytest.mark.parametrize("name", [".", "..", "...", "a/b", "../a", "a b", "", "a" * 65])
def test_a_name_that_could_lead_elsewhere_is_refused_in_words_and_on_the_wire(name, capsys):
    """Folders and logs are named by learners and runs."""
    for command in (["learner", "--learner-id"], ["learner", "--run"], ["acl", "--learner"]):
        assert main([*command, name, *(() if command == ["acl", "--learner"] else ("--redis-url", "redis://h"))]) == 2
        assert "cannot be a name: use at most" in capsys.readouterr().err
    with pytest.raises(ValidationError):
        TypeAdapter(PartyId).validate_python(name)
    for good in ("a", "a.b", "..a", "-", "_.", "a" * 64):
        assert TypeAdapter(PartyId).validate_python(good) == good == party_name(good)


def test_more_fragments_than_a_run_can_join_with_are_refused_with_their_number():
    """By whoever sets a run up, and by whoever finds its spec."""
    with pytest.raises(UsageError, match=r"^fragments=1025: too large \(allowed: at least 1, at most 1024\)"):
        load(SyncSettings, {"fragments": 1025})
    most = load(SyncSettings, {"fragments": 1024}).sync_spec()
    spec = samples.spec().model_copy(update={"sync": most.model_copy(update={"fragments": 1025})})
    with pytest.raises(BadMessage, match=r"sync\.fragments: .*1024\) \(got 1025\)"):
        decode(Spec, encode(spec))


def test_a_wrong_value_of_the_file_is_named_with_file_and_line(tmp_path, monkeypatch):
    """It is not blamed for what a flag or a variable says in its place."""
    config = toml(tmp_path, "# ours\nfragments = 4\n'quorum' = -1\n")
    with pytest.raises(UsageError, match=rf"^quorum=-1 in {config}, line 3: too small .* or that file$"):
        load(SyncSettings, {"quorum": None}, config)
    with pytest.raises(UsageError, match=r"^quorum=-2: too small"):
        load(SyncSettings, {"quorum": -2}, config)
    monkeypatch.setenv("DILOCO_QUORUM", "-3")
    with pytest.raises(UsageError, match=r"^quorum=-3: too small"):
        load(SyncSettings, config=config)


def test_a_misspelt_setting_in_the_file_is_refused(tmp_path):
    """Unless it belongs to another party: one file serves all of them."""
    config = toml(tmp_path, "qurum = 2\npace = '1s'\n")
    with pytest.raises(UsageError, match=r"run.toml, line 1: .* 'qurum' .did you mean 'quorum'"):
        load(SyncSettings, config=config, known=frozenset({"pace"}))
    assert load(SyncSettings, config=toml(tmp_path, "pace = '1s'\n"), known=frozenset({"pace"}))


@pytest.mark.parametrize("content", ["quorum = ", "\x00", None])
def test_an_unreadable_file_is_named(tmp_path, content):
    """Not TOML, or not there."""
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"run\.toml"):
        load(SyncSettings, config=path)


def test_a_pipe_is_no_settings_file(tmp_path):
    """Nobody may write to it, and a command would wait for ever; that of a shell, `--config <(...)`, has its writer."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = Thread(target=path.write_text, args=("",), daemon=True)
    writer.start()
    with pytest.raises(UsageError, match="pipe: it is a pipe; give a TOML file"):
        load(SyncSettings, config=path)
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    reading, writing = os.pipe()
    os.write(writing, b"quorum = 3\n")
    os.close(writing)
    assert load(SyncSettings, config=Path(f"/dev/fd/{reading}")).quorum == 3
    os.close(reading)


def test_secrets_are_not_shown():
    """Neither in the settings' text, nor in a complaint."""
    settings = load(SyncerProcess, {"redis_url": "redis://:hunter2@host"})
    assert "hunter2" not in repr(settings)
    assert settings.redis_url.get_secret_value() == "redis://:hunter2@host"
    with pytest.raises(UsageError) as error:
        load(SyncerProcess, {"redis_url": ["hunter2"]})
    assert "hunter2" not in str(error.value)


def test_every_bounded_field_says_what_it_takes():
    """Help and messages have words for each bound."""
    assert allowed(SyncSettings.model_fields["grace_gamma"]) == "at least 0, less than 1"
    closest = {"params": "at least 10k, at most 10T", "step_time": "more than 0", "link": "at least 1k"}
    assert {name: allowed(Site.model_fields[name]) for name in closest} == closest
    assert allowed(SyncSettings.model_fields["merge"]) == "one of rda, rda-row, mean"


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Annotated[int, Field(gt=2)], 2, "too small (allowed: more than 2)"),
        (Annotated[float, Field(le=2)], 3, "too large (allowed: at most 2)"),
        (Annotated[list[int], Field(min_length=1)], [], "too short (allowed: at least 1)"),
        (Annotated[str, Field(pattern="^a$")], "b", "not in the expected format"),
        (Literal["a", "b"], "c", "not a valid choice (allowed: 'a' or 'b')"),
        *((int, value, "not a whole number") for value in ("x", 1.5, None, "9" * 5000)),
        (bool, "x", "neither true nor false"),
        (SyncSpec, {}, "missing"),
    ],
)
def test_a_broken_rule_is_told_in_words_of_ours(kind, value, words):
    """Also of a value that is no setting's; pydantic's own words come up nowhere."""
    with pytest.raises(ValidationError) as error:
        TypeAdapter(kind).validate_python(value)
    assert format_problem(error.value.errors()[0]) == words


def test_the_settings_and_the_wire_type_have_the_same_fields():
    """A new protocol constant cannot be forgotten on one side; defaults are within the wire's bounds."""
    spec = load(SyncSettings).sync_spec()
    assert {*type(spec).model_fields, "method"} == set(SyncSettings.model_fields)


def test_a_party_follows_the_run_in_what_it_was_not_told():
    """A late joiner needs no settings but the address."""
    spec = load(SyncSettings, {"quorum": 3, "sync_interval": 7}).sync_spec().model_dump()
    agreed = agree(load(LearnerProcess, {"learner_id": "l9"}), spec, SyncSettings)
    assert (agreed.quorum, agreed.sync_interval, agreed.learner_id) == (3, 7, "l9")


def test_a_party_told_otherwise_is_refused_with_each_difference(monkeypatch):
    """By flag or by variable, default value or not; fields that agree are not listed."""
    spec = load(SyncSettings, {"quorum": 3, "fragments": 4}).sync_spec().model_dump()
    monkeypatch.setenv("DILOCO_FRAGMENTS", "8")
    with pytest.raises(SpecMismatch) as error:
        agree(load(SyncSettings, {"quorum": 1, "merge": "mean"}), spec, SyncSettings)
    text = str(error.value)
    assert "quorum: here 1, the run has 3" in text
    assert "fragments: here 8, the run has 4" in text
    assert "merge" not in text


def test_the_times_of_a_syncer_follow_from_its_lease():
    """No shorter than with the usual lease: a checkpoint takes its time, however short leases are."""
    usual, short, long = (load(SyncerProcess, {"lease_s": text}) for text in (None, "1s", "20s"))
    assert (usual.liveness_s, usual.drain_s, usual.shutdown_s) == (5.0, 30.0, 20.0)
    assert (short.liveness_s, short.drain_s, short.shutdown_s) == (5.0, 30.0, 20.0)
    assert (long.liveness_s, long.drain_s, long.shutdown_s) == (20.0, 120.0, 80.0)
    assert load(SyncerProcess, {"lease_s": "20s", "drain_s": "1s"}).drain_s == 1.0
    with pytest.raises(UsageError) as error:
        load(SyncerProcess, {"lease_s": "never"})
    assert len(str(error.value).splitlines()) == 1


def test_every_setting_is_described_and_says_whether_it_is_for_experts():
    for kind in (DemoProcess, ChaosProcess, RankProcess, EvaluatorProcess):
        for name, info in kind.model_fields.items():
            assert info.description, name
            assert is_expert(kind, name) in (True, False)
    assert is_expert(SyncSettings, "chunk_bytes")
    assert not is_expert(SyncSettings, "fragments")


# --- variables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("DILOCO_TOKNES", "DILOCO_TOKENS"),
        ("DILOCO_TOKEN", "DILOCO_TOKENS"),
        ("DILOCO_QURUM", "DILOCO_QUORUM"),
        ("diloco_redis_ulr", "DILOCO_REDIS_URL"),
        ("DILOCO_SYNC_INTERVALL", "DILOCO_SYNC_INTERVAL"),
        ("DILOCO_CHECKPOINT_EVRY", "DILOCO_CHECKPOINT_EVERY"),
    ],
)
def test_a_misspelt_variable_is_refused_by_name_with_the_one_that_is_meant(variable, meant, monkeypatch):
    """As a misspelt key of a file is; also one of another party."""
    monkeypatch.setenv(variable, "hunter2")
    with pytest.raises(UsageError, match=f"unknown variable {variable}: did you mean {meant}[?]") as error:
        check_variables(ALL_FIELDS)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "variable", ["DILOCO_IMAGE", "DILOCO_REDIS_SERVICE_HOST", "DILOCO_REDIS_PORT_6379_TCP", "DILOCO_X"]
)
def test_a_variable_that_may_be_another_programs_is_warned_of(variable, monkeypatch):
    """Kubernetes sets some for a service of that name, and people for compose."""
    monkeypatch.setenv(variable, "1")
    (warning,) = check_variables(ALL_FIELDS)
    assert variable in warning


def test_the_variables_of_all_parties_are_known_to_each(monkeypatch):
    """One environment serves all of them, as one file does; so are those that are no settings, or empty."""
    for name in (*ALL_FIELDS, "launcher_pid", "test_redis_server"):
        monkeypatch.setenv(f"DILOCO_{name.upper()}", "1")
    monkeypatch.setenv("DILOCO_TOKNES", "")
    assert check_variables(ALL_FIELDS) == []


def test_of_a_library_only_what_it_would_read_is_looked_at(monkeypatch):
    """A program with a learner in it has its own settings: a warning, and only of Redis and the run's name."""
    for name in ("DILOCO_TOKNES", "DILOCO_LEARNERS", "DILOCO_REDIS_PORT", "DILOCO_REDIS_PASSWORD", "DILOCO_OUT"):
        monkeypatch.setenv(name, "1")
    assert check_variables(PARTIES, wanted=BusSettings.model_fields) == []
    monkeypatch.setenv("DILOCO_REDIS_ULR", "redis://x")
    (warning,) = check_variables(PARTIES, wanted=BusSettings.model_fields)
    assert "DILOCO_REDIS_ULR: did you mean DILOCO_REDIS_URL?" in warning


@pytest.mark.parametrize("command", ["run", "demo", "syncer", "learner", "evaluator", "status", "tape", "chaos"])
def test_every_command_looks_at_the_variables(command, monkeypatch, capsys):
    """Before it does anything."""
    monkeypatch.setenv("DILOCO_IMAGE", "mine")
    monkeypatch.setenv("DILOCO_TOKNES", "5")
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert "unknown variable DILOCO_TOKNES: did you mean DILOCO_TOKENS?" in said


@pytest.mark.parametrize("line", ["fragments = true", "lease_s = true", "lr = false"])
def test_true_is_no_number(line, tmp_path):
    """As Python has it; nobody means 1 by it."""
    file = tmp_path / "settings.toml"
    file.write_text(line + "\n")
    assert main(["run", "--config", str(file)]) == 2
