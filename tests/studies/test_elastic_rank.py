"""The ranks of the elastic baseline go on exactly where their last checkpoint was; what cannot be is said once."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from diloco.workers.trainer.data_parallel import block_order
from diloco.workers.trainer.models.gpt import build
from diloco.workers.trainer.recipe import add_gradients, make_optimizer, update
from diloco_studies.strikes.elastic import agent
from diloco_studies.strikes.elastic.rank import load_state, save_state


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = build("tiny", 0)
    optimizer = make_optimizer(model, 1e-3, 0.1)
    for step in range(steps):
        one_step(model, optimizer, step)
    return model, optimizer


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(step))
    add_gradients(model, [batch], 1)
    update(model, optimizer, 1e-3, 1.0)


def test_a_rank_goes_on_from_its_checkpoint_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Parameters and moments: the next step is the same, bit for bit."""
    model, optimizer = trained(2)
    save_state(model, optimizer, 2, tmp_path / "state")
    again, its = trained(0)
    assert load_state(again, its, tmp_path / "state") == 2
    one_step(model, optimizer, 2)
    one_step(again, its, 2)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [path.name for path in tmp_path.iterdir()] == ["state"], "nothing half written is left"


def test_without_a_checkpoint_a_rank_begins_at_the_beginning(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    assert load_state(model, optimizer, tmp_path / "nothing") == 0


def test_a_rank_that_goes_on_reads_what_it_would_have_read() -> None:
    order = block_order(10, 1, 3)
    first = list(islice(order, 8))
    assert list(islice(islice(block_order(10, 1, 3), 8, None), 4)) == list(islice(order, 4))
    assert first[-1] == (2, 2)


def test_what_cannot_be_trained_is_said_by_the_agent_and_no_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that fails is only started again."""
    monkeypatch.setattr(agent, "elastic_launch", None)
    (tmp_path / "settings.toml").write_text("model = 'none'\n")
    assert agent.main(str(tmp_path / "settings.toml"), str(tmp_path), "2", "1.0", "1") == 2
    assert "model='none': no such size" in capsys.readouterr().err
