"""Promises about what a user says to a `Learner`: taken, or refused at once by name."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import SyncSettings
from diloco.workers.checks.arguments import one_loss, one_number, whole_tokens
from diloco.workers.learner import Learner
from tests.workers.test_parameters import Net


def learner(**given: Any) -> Learner:
    return Learner(Net(), **({"redis_url": "redis://localhost"} | given))


@pytest.mark.parametrize(
    "tokens",
    [
        7,
        7.0,
        np.int32(7),
        np.uint64(7),
        np.float32(7),
        np.array(7),
        np.array([7]),
        torch.tensor(7),
        torch.tensor([7.0]),
    ],
    ids=repr,
)
def test_whole_numbers_of_every_kind_are_tokens(tokens: Any) -> None:
    counted = whole_tokens(tokens)
    assert counted == 7
    assert type(counted) is int


@pytest.mark.parametrize("tokens", [0, 0.0, -0.0, np.int64(0), torch.tensor(0)], ids=repr)
def test_no_tokens_are_a_number_too(tokens: Any) -> None:
    assert whole_tokens(tokens) == 0


@pytest.mark.parametrize(
    "tokens",
    [
        *(-1, 0.5, float("nan"), float("inf"), -float("inf"), 2**41, 1e300, 10**5000, True, "7", None, [7], 7j),
        *(np.bool_(True), np.float64("nan"), np.array([7, 8]), np.datetime64("2020-01-01"), object()),
        *(torch.tensor(True), torch.tensor([3, 4]), torch.tensor(-2), torch.tensor(float("nan")), torch.tensor(1j)),
        torch.tensor([]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_of_tokens_is_refused_by_name(tokens: Any) -> None:
    """At once, and not when a header cannot be written."""
    with pytest.raises(UsageError, match=r"^tokens(=|: a tensor of shape)"):
        whole_tokens(tokens)


@pytest.mark.parametrize(
    "loss", [2.5, np.float32(2.5), torch.tensor(2.5), torch.tensor([[2.5]]), np.array(2.5), np.array([2.5])], ids=repr
)
def test_one_number_of_every_kind_is_a_loss(loss: Any) -> None:
    taken = one_loss(loss)
    assert taken is not None
    assert taken.number() == 2.5


def test_a_loss_holds_on_to_no_graph() -> None:
    parameter = nn.Parameter(torch.ones(3))
    taken = one_number(parameter.sum(), "")
    assert isinstance(taken, torch.Tensor)
    assert taken.grad_fn is None


def test_a_loss_that_has_diverged_is_shown_as_it_is() -> None:
    taken = one_loss(torch.tensor(float("nan")))
    assert taken is not None
    assert np.isnan(taken.number())
    assert one_loss(None) is None


@pytest.mark.parametrize(
    "loss",
    [
        torch.ones(4),
        torch.ones(0),
        torch.tensor(1j),
        np.ones(4),
        "2.5",
        b"2",
        True,
        np.bool_(True),
        [1.0],
        object(),
        10**400,
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_one_number_is_no_loss(loss: Any) -> None:
    with pytest.raises(UsageError, match=r"step\(loss="):
        one_loss(loss)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_tensor_whose_number_cannot_be_read_is_no_loss() -> None:
    """Of the meta device, of either layout of nested tensors, and of several numbers in one."""
    for loss, told in (
        (torch.ones(1, device="meta"), "a tensor on the meta device"),
        (torch.nested.nested_tensor([torch.ones(1)]), "a nested tensor"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "a nested tensor"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    ):
        with pytest.raises(UsageError, match=told):
            one_loss(loss)


def test_a_learner_whose_program_names_neither_run_nor_learner_takes_those_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `diloco join -- COMMAND` says. A program that names them is right."""
    monkeypatch.setenv("DILOCO_RUN", "theirs")
    monkeypatch.setenv("DILOCO_LEARNER_ID", "anna")
    model = torch.nn.Linear(2, 2)
    told = Learner(model, redis_url="redis://127.0.0.1:1")
    assert (told._given.run, told.id) == ("theirs", "anna")
    said = Learner(model, run="own", learner_id="bert", redis_url="redis://127.0.0.1:1")
    assert (said._given.run, said.id) == ("own", "bert")
    monkeypatch.delenv("DILOCO_RUN")
    assert Learner(model, redis_url="redis://127.0.0.1:1")._given.run == "run"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("run", "my run"), ("run", ""), ("run", 3), ("run", "r" * 65)),
        *(("learner_id", "my learner"), ("learner_id", "a/b"), ("learner_id", 3)),
        *(("leave_s", -1.0), ("leave_s", float("nan")), ("leave_s", float("inf")), ("leave_s", "20s")),
        *(("state_every_s", 0), ("state_every_s", -1), ("state_every_s", float("nan"))),
        *(("recover", "never"), ("encode_on", "gpu"), ("log_losses", "yes"), ("same_frozen", None)),
        *(("state_dir", 3), ("state_dir", ""), ("state_dir", __file__), ("sync", {"fragments": 2}), ("redis_url", 3)),
        *(("trainer", {"a": [1]}), ("trainer", {"a": float("nan")}), ("trainer", [1])),
        ("trainer", {str(i): i for i in range(65)}),
        *(("state", [1]), ("state", {"data": 3}), ("state", {1: 3})),
    ],
    ids=repr,
)
def test_a_learner_refuses_by_name_what_it_was_told(argument: str, value: Any) -> None:
    """When it is made, before anything is connected."""
    with pytest.raises(UsageError, match=f"Learner: {argument}.*: ") as refused:
        learner(**{argument: value})
    assert ("=***:" in str(refused.value)) is (argument == "redis_url")
    assert "Input" not in str(refused.value), "these are pydantic's words"


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("tokens", 2**63, "too large (allowed: at least 1, at most 2^62)"),
        ("sync_interval", 10**7, "too large (allowed: at least 1, at most 1000000)"),
        ("fragments", [["head"], ["body"]], "not a whole number (allowed: at least 1, at most 1024)"),
        ("fragmens", 3, "unknown (did you mean 'fragments'?)"),
    ],
)
def test_constants_that_no_spec_can_hold_are_refused_by_name(name: str, value: Any, wrong: str) -> None:
    with pytest.raises(UsageError) as refused:
        SyncSettings(**{name: value})
    assert str(refused.value) == f"SyncSettings: {name}={value}: {wrong}"


def test_settings_show_what_was_given() -> None:
    """The rest are not the defaults where there is a method."""
    assert repr(SyncSettings(method="streaming")) == str(SyncSettings(method="streaming"))
    assert repr(SyncSettings(method="streaming")) == "SyncSettings(method='streaming')"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOSPC, errno.EROFS, errno.EISDIR])
def test_a_state_folder_is_refused_for_a_wrong_path_and_not_for_a_passing_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that returns while its disk is full or its file server restarts must train."""

    def write(path: Path, data: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "write_bytes", write)
    if number in (errno.EROFS, errno.EISDIR):
        with pytest.raises(UsageError, match="Learner: state_dir="):
            learner(state_dir=tmp_path)
    else:
        learner(state_dir=tmp_path)


def test_what_is_allowed_is_taken(tmp_path: Any) -> None:
    made = learner(
        run="a.run-1_x", learner_id="l0", leave_s=0, state_every_s=1, state_dir=str(tmp_path), trainer={"a": None}
    )
    assert made.id == "l0"
