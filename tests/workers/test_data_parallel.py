"""Promises about the data-parallel baseline: two real ranks over gloo on this machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.export import read_globals
from diloco.pipeline.bus.embedded import free_port
from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import RankProcess, load
from diloco.workers.trainer import data_parallel
from diloco.workers.trainer.data_parallel import block_order, run_rank
from diloco.workers.trainer.sample import load_model, sample
from tests import HANGING_S
from tests.parties import wait_for

RANK = """
import sys
from pathlib import Path
from diloco.pipeline.settings import RankProcess, load
from diloco.workers.trainer.data_parallel import run_rank
told = dict(pair.split("=", 1) for pair in sys.argv[4:])
sys.exit(run_rank(load(RankProcess, told), Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
"""


def start(out: Path, learners: int, **told: Any) -> list[subprocess.Popen[bytes]]:
    out.mkdir()
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    pairs = [f"{name}={value}" for name, value in told.items()]
    return [
        subprocess.Popen([sys.executable, "-c", RANK, str(out), str(learners), str(rank), *pairs], env=environ)
        for rank in range(learners)
    ]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    book = tmp_path_factory.mktemp("text") / "book.txt"
    book.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(400)))
    return {"data": str(book), "seq_len": 32, "batch": 4, "tokens": 10_000}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, told: dict[str, Any]) -> Path:
    """What two ranks leave behind; starting them is most of a test's time."""
    out = tmp_path_factory.mktemp("pair") / "out"
    ranks = start(out, 2, **told)
    try:
        assert [rank.wait(HANGING_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return out


def test_the_ranks_share_out_every_block_once() -> None:
    """Together they read each epoch to its end, without overlap."""
    orders = [block_order(10, rank, 3) for rank in range(3)]
    read = [next(order) for _ in range(10) for order in orders]
    assert sorted(read) == [(epoch, index) for epoch in range(3) for index in range(10)]


def test_two_ranks_train_one_model(pair: Path) -> None:
    """The loss falls, the tokens of all ranks make the budget, and the checkpoint can be sampled."""
    result = json.loads((pair / "result.json").read_text())
    assert result["tokens"] == 40 * 2 * 4 * 32  # the first multiple of a step that reaches the budget
    assert result["global_val_loss"] < 4.5
    assert [(row["id"], row["steps"]) for row in result["learners"]] == [("learner-0", 40), ("learner-1", 40)]
    assert all(0 < row["blocked_s"] < result["wall_s"] for row in result["learners"])
    assert sum(row["tokens"] for row in result["learners"]) == result["tokens"]
    last = json.loads((pair / "progress.jsonl").read_text().splitlines()[-1])
    assert last["val_loss"] == result["global_val_loss"]
    assert [row["step"] for row in last["learners"]] == [40, 40]
    found = read_globals(pair)
    assert sample(load_model(found.folder, found.trainer, found.tensors), "line", 5, 1.0, 0, 0).startswith("line")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can be one rank."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(data_parallel, "StopFlag", lambda: SimpleNamespace(asked=False))


def test_two_ranks_are_one_with_twice_the_batch(pair: Path, tmp_path: Path, told: dict[str, Any], alone: None) -> None:
    """The gradient mean over ranks is that of the whole batch: nearly the same held-out loss after 40 steps."""
    assert run_rank(load(RankProcess, told | {"batch": 8}), tmp_path, 1, 0) == 0
    losses = [json.loads((out / "result.json").read_text())["global_val_loss"] for out in (tmp_path, pair)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # without the mean: 17 % apart


def test_evaluations_are_as_many_and_as_long_as_asked_for(
    tmp_path: Path, told: dict[str, Any], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at every step with no time in between, and one at the end, each over two blocks."""
    measure, sizes = data_parallel.shared_held_out_loss, []

    def recorded(model: Any, validation: Any, device: Any) -> float:
        sizes.append(len(validation))
        return measure(model, validation, device)

    monkeypatch.setattr(data_parallel, "shared_held_out_loss", recorded)
    asked = told | {"tokens": 3 * 4 * 32, "eval_every": "0s", "eval_tokens": 2 * 32, "device": "auto"}
    assert run_rank(load(RankProcess, asked), tmp_path, 1, 0) == 0
    assert sizes == [2] * 4
    device = json.loads((tmp_path / "result.json").read_text())["device"]
    assert device.partition(":")[0] in ("cpu", "cuda", "mps"), "a real device, not the setting"


def test_a_signal_to_one_rank_ends_all_with_results(tmp_path: Path, told: dict[str, Any]) -> None:
    """All stop after the same step, and what was trained is kept."""
    out = tmp_path / "out"
    ranks = start(out, 2, **told | {"tokens": 10**9})
    try:
        wait_for((out / "progress.jsonl").exists)
        ranks[1].send_signal(signal.SIGTERM)
        assert [rank.wait(HANGING_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    result = json.loads((out / "result.json").read_text())
    assert 0 < result["tokens"] < 10**9
    assert len({row["steps"] for row in result["learners"]}) == 1


def test_one_rank_needs_an_address_too(tmp_path: Path, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by hand, it says what starts it."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(data_parallel, "StopFlag", lambda: None)
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        run_rank(load(RankProcess, told), tmp_path, 1, 0)
