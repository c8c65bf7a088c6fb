"""Promises about a learner's own checkpoint, and about the order in which it looks for moments."""

import asyncio
import errno
import json
import multiprocessing
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import structlog
import torch
from torch import nn

from diloco.pipeline.errors import BadPayload, UsageError
from diloco.pipeline.files.sums import file_sha256
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.pipeline.settings import SyncSettings
from diloco.workers.copies.losses import loss_copy
from diloco.workers.exchange.shared import Shared
from diloco.workers.learner import Learner
from diloco.workers.moments import keeper, recovery, state_folder
from diloco.workers.moments.keeper import Keeper
from diloco.workers.moments.local_state import RecoveryOptions, has_moments, own_moments
from diloco.workers.moments.optimizer_state import OptimizerState, StateCopy
from diloco.workers.moments.recovery import Recovery
from diloco.workers.moments.saved_moments import Moments
from diloco.workers.moments.state_folder import SavedState, StateFolder, StateRefused
from diloco.workers.parameters import tensor_table
from diloco.workers.rounds import Rounds
from diloco.workers.times import LearnerTimes
from tests import HANGING_S, samples
from tests.parties import wait_for
from tests.workers.test_optimizer_state import MAKERS, step, taken
from tests.workers.test_parameters import Net, TiedWords

STATE = samples.run_state(started_unix_s=1234.5, tokens=100)


class FakePeers:
    """Stands for the other learners; counts who asks."""

    def __init__(self, answer: Moments | None = None) -> None:
        self.answer = answer
        self.asked = 0

    async def ask(self) -> Moments | None:
        self.asked += 1
        return self.answer


class Party:
    """A model, its optimizer and a `Recovery`, without a network."""

    def __init__(
        self,
        folder: Path | None = None,
        optimizer: str = "AdamW",
        fragments: int = 2,
        steps: int = 0,
        model: type[nn.Module] | nn.Module = Net,
        made: Any = None,
        **told: Any,
    ) -> None:
        """steps: made before. made: optimizers of the model that is given, instead of one of this name."""
        self.model = model if isinstance(model, nn.Module) else model()
        self.optimizer = made or MAKERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])
        for _ in range(steps):
            step(self.model, self.optimizer)
        sync = SyncSettings(fragments=fragments)
        self.layout = layout_of(tensor_table(self.model, sync))
        self.rounds = Rounds(self.layout, sync.sync_spec())
        self.shared = Shared()
        self.shared.state = STATE
        who = {"run": told.pop("run", "run"), "learner": "l0", "incarnation": "0" * 16}
        options = RecoveryOptions(**{"state_dir": folder, "state_every_s": 1000.0, **told})
        self.own = own_moments(self.model, self.optimizer, self.layout, **who, options=options)
        self.recovery, self.keeper = Recovery(self.own), Keeper(self.own, self.rounds)

    def join(self, versions: tuple[int, ...] = (3, 4), peers: FakePeers | None = None, state: Any = STATE) -> str:
        stands_in: Any = peers
        self.keeper.restore(asyncio.run(self.recovery.find(stands_in, versions, state)))
        return self.keeper.source

    def train(self, steps: int) -> None:
        for _ in range(steps):
            step(self.model, self.optimizer)
            self.rounds.trained(10)
            self.keeper.stepped(self.shared, 0.5, loss_copy(2.5))

    def leave(self) -> None:
        self.keeper.close(self.shared, save=True, within_s=60.0)

    def moments(self) -> Moments:
        state = self.own.state
        assert state is not None
        return taken(state)


def left(folder: Path, **told: Any) -> Party:
    """A learner that trained a little and left in order."""
    party = Party(folder, **told)
    party.join((0, 0))
    party.train(5)
    party.leave()
    return party


def same(a: Moments, b: Moments) -> bool:
    flats = zip(a.flats, b.flats, strict=True)
    return a.numbers == b.numbers and all(np.array_equal(x[n], y[n]) for x, y in flats for n in a.kind.moments)


@pytest.mark.parametrize("model", [Net, TiedWords])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD momentum", "Adafactor"])
def test_a_restarted_learner_has_its_moments_counters_and_random_numbers_again(
    tmp_path: Path, optimizer: str, model: type[nn.Module]
) -> None:
    """Also of a model whose tensors lie in several fragments."""
    torch.manual_seed(7)
    random.seed(7)
    first = left(tmp_path, optimizer=optimizer, model=model)
    drawn = torch.rand(3), random.random()
    again = Party(tmp_path, optimizer, model=model)
    torch.manual_seed(1)
    random.seed(1)
    assert again.join() == "checkpoint"
    assert same(again.moments(), first.moments())
    assert again.keeper.earlier_steps == 5
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]
    again.train(2)
    again.leave()
    third = Party(tmp_path, optimizer, model=model)
    third.join()
    assert third.keeper.earlier_steps == 7
    assert len(list(tmp_path.glob("moments-*"))) == 1


def test_moments_come_back_in_a_run_that_was_resumed_under_another_name(tmp_path: Path) -> None:
    """It says when its first part began; a run that does not is another one."""
    first = left(tmp_path)
    resumed = STATE.model_copy(update={"started_unix_s": 99.0, "origin_unix_s": STATE.started_unix_s})
    again = Party(tmp_path, run="other")
    assert again.join(state=resumed) == "checkpoint"
    assert same(again.moments(), first.moments())
    again.train(1)
    again.leave()
    assert Party(tmp_path, run="third").join(state=resumed.model_copy(update={"started_unix_s": 100.0})) == "checkpoint"
    assert Party(tmp_path).join(state=STATE.model_copy(update={"started_unix_s": 99.0})) == "fresh"


def test_above_what_a_peer_sends_moments_come_from_the_state_folder_else_they_are_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes back asks nobody, and its log says why, with their size, and where its moments are from."""
    first = left(tmp_path)
    size = 8 * sum(fragment.elements for fragment in first.layout.fragments)
    bus: Any = None
    monkeypatch.setattr(recovery, "MAX_OFFERED_BYTES", size)
    assert first.recovery.peers(bus, bus, 1024, samples.run_state) is not None
    monkeypatch.setattr(recovery, "MAX_OFFERED_BYTES", size - 1)
    for folder, source in ((tmp_path, "checkpoint"), (None, "fresh")):
        again = Party(folder)
        with structlog.testing.capture_logs() as log:
            peers: Any = again.recovery.peers(bus, bus, 1024, samples.run_state)
            assert again.join(peers=peers) == source
        told = [(one["event"], one.get("bytes"), one.get("source")) for one in log]
        assert told == [("moments_too_large_for_peers", size, None), ("moments_recovered", None, source)]
        assert log[0]["instead"] == "its own from --state-dir, otherwise fresh ones with the ramp"
        assert again.keeper.earlier_steps == 5 * (source == "checkpoint")
        assert folder is None or same(again.moments(), first.moments())


def test_the_checkpoint_is_safetensors_and_json_with_the_shard_in_hand(tmp_path: Path) -> None:
    party = Party(tmp_path)
    party.join((0, 0))
    party.train(5)
    party.shared.shard_position = ("5-0", 3)
    party.leave()
    told = json.loads((tmp_path / "state.json").read_text())
    assert (told["steps"], told["shard"]) == (5, ["5-0", 3])
    arrays = safetensors.numpy.load_file(tmp_path / told["moments_file"])
    state = party.optimizer.state[party.model.body.weight]
    np.testing.assert_array_equal(arrays["exp_avg_sq/body.weight"], state["exp_avg_sq"].numpy())


def test_it_is_saved_while_training_and_nobody_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the disk hanging, steps go on; the saved state is that of its steps, not of later ones."""
    go, write = threading.Event(), state_folder.replace

    def slow(path: Path, parts: Any) -> None:
        assert go.wait(HANGING_S)
        write(path, parts)

    monkeypatch.setattr(state_folder, "replace", slow)
    party = Party(tmp_path, state_every_s=1e-6)
    party.join((0, 0))
    assert party.own.folder is not None
    while party.own.folder.busy:  # it looks whether it can be written
        time.sleep(0.001)
    party.train(20)
    assert not list(tmp_path.glob("*.json"))
    go.set()
    party.keeper.close(party.shared, save=False, within_s=60.0)
    again = Party(tmp_path)
    assert again.join() == "checkpoint"
    assert again.keeper.earlier_steps == 2
    assert set(again.moments().numbers["step"]) == {1.0, 2.0}


def test_a_learner_killed_while_it_writes_leaves_the_last_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moments' file and the one that names it: the older pair is what counts."""
    first, write = left(tmp_path), state_folder.replace

    def dies(path: Path, parts: Any) -> None:
        if path.name == "state.json":
            raise RuntimeError("killed")
        write(path, parts)

    monkeypatch.setattr(state_folder, "replace", dies)
    second = Party(tmp_path)
    second.join()
    second.train(3)
    second.leave()
    assert len(list(tmp_path.glob("moments-*"))) == 2
    third = Party(tmp_path)
    assert third.join() == "checkpoint"
    assert same(third.moments(), first.moments())


def spoil(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "state.json"
        told = json.loads(path.read_text())
        change(told)
        path.write_text(json.dumps(told))

    return apply


def flip(folder: Path) -> None:
    (file,) = folder.glob("moments-*")
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    file.write_bytes(data)


def poison(folder: Path) -> None:
    (file,) = folder.glob("moments-*")
    arrays = safetensors.numpy.load_file(file)
    arrays["exp_avg/body.bias"][0] = np.nan
    safetensors.numpy.save_file(arrays, file)
    spoil(lambda told: told.update(moments_sha256=file_sha256(file)))(folder)


def eight_bits(folder: Path) -> None:
    (file,) = folder.glob("moments-*")
    safetensors.torch.save_file({"exp_avg/body.bias": torch.zeros(3, dtype=torch.float8_e4m3fn)}, file)
    spoil(lambda told: told.update(moments_sha256=file_sha256(file)))(folder)


def add(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (file,) = folder.glob("moments-*")
        safetensors.numpy.save_file({**safetensors.numpy.load_file(file), name: np.zeros(3, np.float32)}, file)
        spoil(lambda told: told.update(moments_sha256=file_sha256(file)))(folder)

    return apply


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (spoil(lambda told: told["identity"].update(run="other", started_unix_s=9.0)), "another run, 'other'"),
        (spoil(lambda told: told.update(layout="00" * 16)), "a different model"),
        (spoil(lambda told: told["kind"].update(optimizer="torch.Lion")), r"torch\.Lion.*AdamW"),
        (spoil(lambda told: told.update(moments_file="../../etc/passwd")), "moments_file"),
        (spoil(lambda told: told.pop("steps")), "steps"),
        (lambda folder: (folder / "state.json").write_text("{"), "damaged"),
        (lambda folder: next(folder.glob("moments-*")).unlink(), "does not hold a complete state"),
        (flip, "its digest differs"),
        (poison, "exp_avg of fragment . is not finite"),
        (eight_bits, "does not hold a complete state"),
        (add("nothing"), "'nothing' that does not belong to any tensor"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name_and_the_next_way_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = left(tmp_path).moments()
    damage(tmp_path)
    party = Party(tmp_path)
    peers = FakePeers(moments)
    kind = moments.kind
    with pytest.raises(StateRefused, match=told):
        StateFolder(tmp_path, party.layout).load(party.own.identity(STATE), kind)
    assert party.join(peers=peers) == "peer"
    assert "state_refused" in capsys.readouterr().out
    assert same(party.moments(), moments)
    assert party.keeper.earlier_steps == 0


@pytest.mark.parametrize("damage", [lambda told: told["identity"].update(started_unix_s=9.0), dict.popitem])
def test_a_state_of_another_run_is_moved_and_not_replaced(
    tmp_path: Path, damage: Callable[[dict], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by a learner with which a run begins, which looks for no state. Where it is now it can be gone on from."""
    left(tmp_path)
    spoil(damage)(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.*") if file.name != ".lock"}
    for _ in range(2):
        party = Party(tmp_path)
        party.join((0, 0))
        party.train(3)
        party.leave()
    assert {file.name: file.read_bytes() for file in (tmp_path / "set-aside-1").iterdir()} == before
    assert not (tmp_path / "set-aside-2").exists()
    assert len(list(tmp_path.glob("moments-*"))) == 1
    assert capsys.readouterr().out.count("state_set_aside") == 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (add("row_var/body.weight"), "body.weight needs"),
        (add("exp_avg_sq_sq/nobody.weight"), "nobody.weight"),
        (spoil(lambda told: told.update(torch_rng="abcd")), "no random state"),
        (spoil(lambda told: told.update(python_rng=[3, [1, 2], None])), "no random state"),
    ],
)
def test_a_state_that_could_not_be_put_back_is_refused_before_it_is_chosen(
    tmp_path: Path, damage: Callable[[Path], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other tensors than the optimizer keeps, random states of another size: joining goes on without them."""
    moments = left(tmp_path).moments()
    damage(tmp_path)
    party = Party(tmp_path)
    assert party.join(peers=FakePeers(moments)) == "peer"
    said = capsys.readouterr().out
    assert "state_refused" in said
    assert told in said
    party.train(1)


def test_where_the_start_of_the_run_is_not_known_yet_that_is_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path)
    assert Party(tmp_path).join(state=None) == "fresh"
    said = capsys.readouterr().out
    assert "not known yet" in said
    assert "another run" not in said


def test_moments_that_could_not_be_loaded_never_replace_those_that_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training gone wrong is said so; the state saved before stays."""
    good = left(tmp_path).moments()
    party = Party(tmp_path)
    party.join()
    party.train(3)
    party.optimizer.state[party.model.body.weight]["exp_avg"][0] = torch.nan
    party.leave()
    assert "state_not_saved" in capsys.readouterr().out
    again = Party(tmp_path)
    assert again.join() == "checkpoint"
    assert same(again.moments(), good)


def test_whatever_breaks_in_a_save_is_said_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(path: Path, parts: Any) -> None:
        raise ValueError("no such luck")

    with monkeypatch.context() as patched:
        patched.setattr(state_folder, "replace", breaks)
        folder = left(tmp_path).own.folder
        assert folder is not None
        assert not folder.busy
    assert "no such luck" in capsys.readouterr().out
    left(tmp_path)
    assert Party(tmp_path).join() == "checkpoint"


def wide(folder: Path, side: int) -> tuple[Layout, SavedState, Moments]:
    """Of one square matrix, beside what a learner has left."""
    kind = OptimizerKind(optimizer="torch.AdamW", moments=("exp_avg", "exp_avg_sq"), numbers=())
    layout = layout_of((samples.tensor("wide", (side, side)),))
    flat = np.arange(side**2, dtype=np.float32)
    saved = SavedState.model_validate_json((folder / "state.json").read_bytes())
    saved = saved.model_copy(update={"layout": layout.digest, "kind": kind, "numbers": {}})
    return layout, saved, Moments(kind, ({"exp_avg": flat, "exp_avg_sq": flat},), {})


def test_two_learners_that_live_never_save_to_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one is told, again and again; what a killed one was writing is removed by the next.

    A forked child that outlives the first one, such as a DataLoader's worker, is no learner.
    """
    left(tmp_path)
    (tmp_path / ".writing-killed").write_bytes(b"half")
    layout, *pair = wide(tmp_path, 10)
    made: Any = tuple(pair)
    first, second = StateFolder(tmp_path, layout), StateFolder(tmp_path, layout)
    first.save(lambda: made)
    while first.busy:
        time.sleep(0.01)
    assert not list(tmp_path.glob(".writing-*"))
    assert "state_not_saved" not in capsys.readouterr().out
    second.save(lambda: made)
    second.close(60.0)
    assert "another live learner saves to" in capsys.readouterr().out
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(HANGING_S,))
    child.start()
    try:
        first.close(60.0)
        third = StateFolder(tmp_path, layout)
        third.save(lambda: made)
        third.close(60.0)
        assert "state_not_saved" not in capsys.readouterr().out
    finally:
        child.kill()
        child.join()


def test_moments_that_no_state_names_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has room for the moments, but not for the state that names them, would fill with each save."""
    left(tmp_path)
    layout, saved, moments = wide(tmp_path, 10)

    def full(path: Path, parts: Any) -> None:
        if path.name == state_folder.STATE_FILE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, parts)

    write = state_folder.replace
    monkeypatch.setattr(state_folder, "replace", full)
    folder = StateFolder(tmp_path, layout)
    folder.save(lambda: (saved, moments))
    folder.close(60.0)
    assert sorted(one.name for one in tmp_path.iterdir()) == [state_folder.LOCK_FILE, "set-aside-1"]


def test_saving_makes_no_second_copy_of_the_moments(tmp_path: Path) -> None:
    """They are written from where they lie: whoever packs them into one string holds the interpreter's lock."""
    left(tmp_path)
    layout, saved, moments = wide(tmp_path, 1000)
    folder = StateFolder(tmp_path, layout)
    tracemalloc.start()
    try:
        folder.save(lambda: (saved, moments))
        folder.close(60.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < moments.flats[0]["exp_avg"].nbytes
    found = folder.load(saved.identity, moments.kind)
    assert found is not None
    assert same(found[1], moments)


def test_any_array_is_written_as_safetensors_reads_it(tmp_path: Path) -> None:
    """All kinds that an optimizer may keep: narrow, wide, empty, without dimensions, not contiguous, of both signs."""
    arrays: dict[str, Any] = {
        "bool": np.array([True, False, True]),
        "f8": np.full((2, 2), -1.5),
        "f4 turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "f2": np.ones(3, np.float16),
        "i8": np.array(-7),
        "u1": np.arange(5, dtype=np.uint8),
        "big end first": np.arange(3, dtype=">i4"),
        "nothing": np.zeros((0, 3), np.float32),
    }
    state_folder.replace(tmp_path / "a", state_folder.to_safetensors(arrays))
    found = safetensors.numpy.load_file(tmp_path / "a")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_leaving_waits_no_longer_for_the_disk_than_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does the end of the process: what was saved before is what counts."""
    go = threading.Event()
    monkeypatch.setattr(state_folder, "replace", lambda path, parts: go.wait(HANGING_S))
    party = Party(tmp_path)
    party.join((0, 0))
    party.train(2)
    party.keeper.close(party.shared, save=True, within_s=0.1)
    assert "the disk took longer than 0.1 s" in capsys.readouterr().out
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("state"))
    go.set()


def test_no_wish_for_a_copy_takes_the_place_of_another() -> None:
    """Whichever comes first, and whenever the training thread looks: each is answered."""
    party = Party()
    party.join((0, 0))
    answered: list[str] = []

    async def ask(name: str) -> None:
        await party.recovery.copy()
        answered.append(name)

    async def play() -> None:
        first, second = asyncio.ensure_future(ask("first")), asyncio.ensure_future(ask("second"))
        await asyncio.sleep(0)
        party.train(4)
        await asyncio.wait_for(asyncio.gather(first, second), HANGING_S)

    asyncio.run(play())
    assert sorted(answered) == ["first", "second"]


def test_a_copy_with_moments_gone_wrong_is_given_to_nobody() -> None:
    party = Party()
    party.join((0, 0))
    party.train(2)
    party.optimizer.state[party.model.body.weight]["exp_avg"][0] = torch.nan

    async def play() -> None:
        asking = asyncio.ensure_future(party.recovery.copy())
        await asyncio.sleep(0)
        party.train(2)
        with pytest.raises(BadPayload, match="not finite"):
            await asking

    asyncio.run(play())


@pytest.mark.parametrize("fails", ["start_copy", "advance"])
def test_no_copy_for_others_or_for_a_restart_ever_ends_a_step(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, whoever has asked is answered with none, and training goes on; what was saved before stays."""

    def fail(*_: Any) -> Any:
        raise ValueError("memoryview assignment")

    left(tmp_path)
    saved = (tmp_path / "state.json").read_bytes()
    party = Party(tmp_path, state_every_s=1e-9, log_losses=True)
    party.join()
    monkeypatch.setattr(OptimizerState if fails == "start_copy" else StateCopy, fails, fail)

    async def play() -> None:
        asking = asyncio.ensure_future(party.recovery.copy())
        await asyncio.sleep(0)
        party.train(6)
        assert await asyncio.wait_for(asking, HANGING_S) is None

    with structlog.testing.capture_logs() as log:
        asyncio.run(play())
        party.train(6)
    (said,) = [one for one in log if one["log_level"] == "warning"]
    assert (said["event"], said["learner"], said["error"]) == ("moments_not_copied", "l0", "memoryview assignment")
    party.own.folder.close(HANGING_S)  # type: ignore[union-attr]
    assert (tmp_path / "state.json").read_bytes() == saved
    assert party.rounds.steps == 12


def test_at_the_start_of_a_run_nobody_is_asked_and_nothing_loaded(tmp_path: Path) -> None:
    left(tmp_path)
    peers, party = FakePeers(), Party(tmp_path)
    assert party.join((0, 0), peers) == "start"
    assert peers.asked == 0
    assert not party.optimizer.state


def test_the_way_can_be_forced_for_experiments(tmp_path: Path) -> None:
    moments = left(tmp_path).moments()
    peers = FakePeers(moments)
    assert Party(tmp_path, recover="fresh").join(peers=peers) == "fresh"
    assert peers.asked == 0
    assert Party(tmp_path, recover="peer").join(peers=peers) == "peer"
    assert Party(tmp_path, recover="peer").join(peers=FakePeers()) == "fresh"
    assert Party(tmp_path).join(peers=peers) == "checkpoint"
    assert peers.asked == 1


def test_an_optimizer_that_has_moments_keeps_them_unless_a_checkpoint_is_newer_or_it_is_to_be_fresh(
    tmp_path: Path,
) -> None:
    """A trainer has loaded them from its own checkpoint: a peer's are no better."""
    peers = FakePeers(left(tmp_path).moments())
    party = Party(steps=3)
    kept = party.moments()
    assert party.join(peers=peers) == "optimizer"
    assert same(party.moments(), kept)
    assert peers.asked == 0
    assert Party(steps=3, recover="peer").join(peers=FakePeers()) == "optimizer"
    assert Party(steps=3, recover="peer").join(peers=peers) == "peer"
    assert Party(tmp_path, steps=3).join(peers=peers) == "checkpoint"
    for versions, source in (((3, 4), "fresh"), ((0, 0), "start")):
        party = Party(tmp_path, steps=3, recover="fresh")
        assert party.join(versions, peers) == source
        assert not party.optimizer.state
        party.train(1)


class Diary(torch.optim.SGD):
    """Keeps what is neither a tensor nor a number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["written"] = ["a step"]


def test_a_state_that_no_step_has_made_is_no_moments_and_one_of_an_unknown_kind_is_not_emptied() -> None:
    """Adagrad's is there from the beginning."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad([parameter])
    assert optimizer.state
    assert not has_moments(optimizer)
    optimizer.step()
    assert has_moments(optimizer)
    optimizer = Diary([parameter])
    optimizer.step()
    model = torch.nn.ParameterList([parameter])
    layout = layout_of(tensor_table(model, SyncSettings(fragments=1)))
    who = {"run": "run", "learner": "l0", "incarnation": "0" * 16}
    with pytest.raises(UsageError, match=r"recover='fresh': Diary has stepped.*create a new optimizer"):
        own_moments(model, optimizer, layout, **who, options=RecoveryOptions(recover="fresh"))


def test_a_state_is_saved_though_the_losses_of_each_step_are_written_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of steps that take longer than the time between two writes."""
    append, written = StateFolder._append, threading.Event()

    def slowly(folder: StateFolder, lines: Any) -> None:
        assert written.wait(HANGING_S)
        append(folder, lines)

    monkeypatch.setattr(StateFolder, "_append", slowly)
    monkeypatch.setattr(keeper, "TIMES", LearnerTimes(losses_s=0.0))
    party = Party(tmp_path, log_losses=True, state_every_s=0.0)
    party.join((0, 0))
    for _ in range(4):
        written.clear()
        party.train(1)
        written.set()
        wait_for(lambda: not party.keeper.saves)
    assert (tmp_path / "state.json").exists()
    party.leave()
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {(line["loss"], line["progress"], line["incarnation"]) for line in lines} == {(2.5, 0.5, "0" * 16)}


def test_losses_cannot_be_logged_to_nowhere() -> None:
    """Asked for without a folder, they would be missed only when the run is over."""
    with pytest.raises(UsageError, match="--state-dir"):
        Learner(Net(), redis_url="redis://localhost", log_losses=True)


def test_without_a_folder_or_an_optimizer_nothing_is_kept(tmp_path: Path) -> None:
    party = Party()
    party.join()
    party.train(2)
    party.leave()
    own = own_moments(
        party.model,
        None,
        party.layout,
        run="run",
        learner="l0",
        incarnation="0" * 16,
        options=RecoveryOptions(state_dir=tmp_path),
    )
    bare = Keeper(own, party.rounds)
    bare.restore(asyncio.run(Recovery(own).find(None, (1, 1), STATE)))
    bare.stepped(party.shared, 0.5, None)
    bare.close(party.shared, save=True, within_s=60.0)
    assert bare.source == "fresh"
    assert not list(tmp_path.iterdir())


def looked(party: Party) -> None:
    """Joined, and its folder was looked at."""
    party.join((0, 0))
    party.leave()


def test_a_folder_that_cannot_be_written_is_said_on_joining(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And so is one that another learner has."""
    (tmp_path / "file").write_text("")
    looked(Party(tmp_path / "file"))
    assert capsys.readouterr().out.count("state_not_saved") == 1
    first = left(tmp_path / "shared")
    assert first.own.folder is not None
    first.own.folder._hold()
    looked(Party(tmp_path / "shared"))
    assert "give each learner its own folder" in capsys.readouterr().out
    first.own.folder.close(60.0)
