"""Promises about the objects of `Learner(state=...)`: a killed learner reads on where its saved state stood."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from diloco.pipeline.errors import UsageError
from diloco.workers.learner import Learner
from diloco.workers.moments import stateful
from tests.parties import wait_for
from tests.workers.test_parameters import Net
from tests.workers.test_recovery import Diary, Party


class Reader:
    """Stands for a stateful data loader: one batch a step."""

    def __init__(self) -> None:
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "kept": {1: (2.5, None, b"bytes", "text", [torch.arange(3)])}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["kept"][1][:4] == (2.5, None, b"bytes", "text")
        self.read = state_dict["read"]


class Told(Reader):
    """One whose state is what it was told."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


def save(party: Party, *readers: Reader) -> None:
    """Two steps, at the end of which a save is due: one for each fragment."""
    wait_for(lambda: not party.keeper.saves)
    party.keeper._next_save_s = 0.0
    train(party, 2, *readers)
    wait_for(lambda: not party.keeper.saves)


def train(party: Party, steps: int, *readers: Reader) -> None:
    for _ in range(steps):
        for one in readers:
            one.read += 1
        party.train(1)


def unknown(model: torch.nn.Module) -> Diary:
    """An optimizer whose moments cannot be saved."""
    return Diary(model.parameters(), lr=0.1)


@pytest.mark.parametrize("versions", [(0, 0), (3, 4)])
@pytest.mark.parametrize("made", [None, unknown])
def test_a_killed_learner_reads_on_at_the_step_of_its_saved_moments(
    tmp_path: Path, versions: tuple[int, int], made: Callable[[torch.nn.Module], Diary] | None
) -> None:
    """Even at the start of a run, and if the optimizer's moments cannot be saved."""

    def party_of(reader: Reader) -> Party:
        model = Net()
        party = Party(tmp_path, model=model, made=made and made(model), state={"data": reader})
        party.join(versions)
        return party

    reader = Reader()
    party = party_of(reader)
    train(party, 3, reader)
    save(party, reader)
    train(party, 4, reader)
    again = Reader()
    assert party.own.folder is not None
    party.own.folder.close(60.0)  # releases the lock, as the system does for a killed process
    party = party_of(again)
    assert (again.read, party.keeper.earlier_steps, reader.read) == (5, 5, 9)
    fresh = "start" if versions == (0, 0) else "fresh"
    assert party.keeper.source == ("checkpoint" if made is None else fresh)
    assert party.keeper.drop() is (made is None)
    train(party, 3, again)
    party.leave()
    last = Reader()
    party_of(last)
    assert last.read == 8


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (Path("a"), "pathlib"),
        (lambda: 0, "cannot be saved"),
        (bytes(stateful.MAX_STATES_BYTES), "at most"),
    ],
    ids=["class", "function", "size"],
)
def test_a_state_that_cannot_be_saved_is_refused_by_name_after_the_first_step(
    tmp_path: Path, state: Any, why: str
) -> None:
    party = Party(tmp_path, state={"good": Reader(), "data": Told(state)})
    party.join()
    with pytest.raises(UsageError, match=rf"state\['data'\].*{why}"):
        party.train(1)


def test_a_state_that_goes_wrong_later_does_not_end_the_training(tmp_path: Path) -> None:
    told = Told(1)
    party = Party(tmp_path, state={"data": told})
    party.join()
    party.train(1)
    told.state = lambda: 0
    with capture_logs() as logs:
        save(party)
    assert [one["event"] for one in logs if "state['data']" in str(one.get("error"))] == ["moments_not_copied"]


def test_an_object_that_does_not_take_its_state_ends_the_joining(tmp_path: Path) -> None:
    """Rather than reading everything again without a word."""
    party = Party(tmp_path, state={"data": Told(1)})
    party.join()
    party.train(1)
    party.leave()
    with pytest.raises(UsageError, match=rf"state\['data'\].*{tmp_path}"):
        Party(tmp_path, state={"data": Reader()}).join()


def test_what_is_not_restored_or_does_not_move_is_said(tmp_path: Path) -> None:
    """Once, and not of a schedule, nor of an object that has moved before: these may well stay as they are for long."""
    moved = Reader()
    objects: dict[str, Any] = {"data": Reader(), "moved": moved}
    party = Party(tmp_path, state=objects)
    objects["schedule"] = torch.optim.lr_scheduler.ConstantLR(party.optimizer)
    party.join()
    with capture_logs() as logs:
        for readers in ((), (moved,), (), ()):
            save(party, *readers)
    assert [one["name"] for one in logs if one["event"] == "state_unchanged"] == ["data"]
    party.leave()
    with capture_logs() as logs:
        Party(tmp_path, state={"data": Reader(), "moved": moved, "new": Reader()}).join()
    assert [one["names"] for one in logs if one["event"] == "state_not_restored"] == [["new"]]


def test_a_schedule_continues_with_the_same_rates(tmp_path: Path) -> None:
    """Even one that computes each rate from the one before."""

    def train(party: Party, schedule: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates.append(party.optimizer.param_groups[0]["lr"])
            party.train(1)
            schedule.step()
        return rates

    def scheduled(folder: Path) -> tuple[Party, Any]:
        objects: dict[str, Any] = {}
        party = Party(folder, state=objects)
        objects["schedule"] = torch.optim.lr_scheduler.CosineAnnealingLR(party.optimizer, T_max=10)
        party.join()
        return party, objects["schedule"]

    whole = train(*scheduled(tmp_path / "whole"), 8)
    party, schedule = scheduled(tmp_path / "parts")
    first = train(party, schedule, 5)
    party.leave()
    assert first + train(*scheduled(tmp_path / "parts"), 3) == pytest.approx(whole)
    assert len(set(whole)) == 8


def test_states_need_a_folder() -> None:
    with pytest.raises(UsageError, match="state_dir"):
        Learner(Net(), redis_url="redis://127.0.0.1:1", state={"data": Reader()})
