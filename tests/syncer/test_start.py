"""One start command of a syncer is right in all of a run's life: what it does, by what the bus and its disk have."""

import asyncio
import copy
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from diloco.pipeline.bus.ports import START
from diloco.pipeline.errors import BusUnavailable, RunReplaced, SpecMismatch, UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.run import InitialUpload, Phase, RunState, moment
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.transfer.payloads import push
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.pipeline.view.status import Status
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.checkpoints import restoring
from diloco.syncer.checkpoints.loading import known_elements, newest_of_run
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.replay.replay import replay
from diloco.syncer.serving.start import OnBus, StartMode, start_mode
from diloco.tape import read_archive
from diloco.workers.exchange import newest
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.syncer.test_bus_recovery import flush
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, end, sync_spec, under_way, until_joined

BUDGET = 12_000
SETTLED_S = 4.0
"""By then syncers that start have said which checkpoints they have, and one of them has put its own on the bus."""


def state(began: float, tokens: int, phase: Phase = Phase.RUNNING) -> RunState:
    return RunState(
        phase=phase,
        tokens=tokens,
        base_tokens=0,
        budget_tokens=1000,
        started_unix_s=began,
        reason="",
        manifest=(),
    )


SAVED = {
    "none": None,
    "this run": state(5.0, 100),
    "finished": state(5.0, 100, Phase.FINISHED),
    "another": state(3.0, 90),
}
ON_BUS = {
    "nothing": None,
    "served": OnBus(state(5.0, 150), served=True, whole=True),
    "nobody there": OnBus(state(5.0, 150), served=False, whole=True, newer=True),
    "nobody there, tokens not told yet": OnBus(state(5.0, 50), served=False, whole=True),
    "older, served": OnBus(state(5.0, 50), served=True, whole=True, older=True),
    "older": OnBus(state(5.0, 150), served=False, whole=True, older=True),
    "half": OnBus(state(5.0, 150), served=False, whole=False),
    "half of an older one, served": OnBus(state(5.0, 50), served=True, whole=False, older=True),
    "a head is lost": OnBus(state(5.0, 50), served=True, whole=False, newer=True),
    "half, finished": OnBus(state(5.0, 100, Phase.FINISHED), served=False, whole=False),
    "finished": OnBus(state(5.0, 200, Phase.FINISHED), served=False, whole=True, older=True),
}
JOINS: dict[str, StartMode | None] = {
    "none": StartMode.JOIN,
    "this run": StartMode.JOIN,
    "finished": StartMode.JOIN,
    "another": None,
}
RESUMES = JOINS | {"this run": StartMode.RESUME, "finished": StartMode.FINISHED}
TABLE = {
    "nothing": {
        "none": StartMode.BEGIN,
        "this run": StartMode.RESUME,
        "finished": StartMode.FINISHED,
        "another": StartMode.RESUME,
    },
    "served": JOINS,
    "nobody there, tokens not told yet": JOINS,
    "nobody there": JOINS,
    "older, served": JOINS,
    "older": RESUMES,
    "half": RESUMES,
    "half of an older one, served": RESUMES,
    "a head is lost": JOINS,
    "half, finished": RESUMES | {"another": StartMode.JOIN},
    "finished": JOINS | {"another": StartMode.JOIN},
}
"""None: refused."""


@pytest.mark.parametrize("bus", ON_BUS)
def test_what_a_start_means(bus: str) -> None:
    """Of a run that is on the bus under the same name, and began at another time, the checkpoint is not taken."""
    for saved, mode in TABLE[bus].items():
        given = ON_BUS[bus], SAVED[saved]
        if mode is None:
            with pytest.raises(UsageError, match="--overwrite"):
                start_mode(*given, None, False, RUN)
            assert start_mode(*given, None, True, RUN) is StartMode.JOIN
        else:
            assert start_mode(*given, None, False, RUN) is mode, (bus, saved)
    assert start_mode(None, SAVED["this run"], None, True, RUN) is StartMode.BEGIN
    assert start_mode(None, SAVED["finished"], 101, False, RUN) is StartMode.RESUME
    assert start_mode(None, SAVED["finished"], 100, False, RUN) is StartMode.FINISHED


async def cancelled(task: asyncio.Task[None] | None) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def saved_tokens(folder: Path) -> int:
    return newest_of_run(place_of(folder), RUN).state.tokens


def saved_ones(folder: Path) -> int:
    return len(list(folder.glob("*/checkpoint-*/state.json")))


def learners(world: VirtualRun, count: int = 2, first: int = 0) -> list[VirtualLearner]:
    return [VirtualLearner(f"l{i}", world, 0.1, f"{first + i:016x}").start() for i in range(count)]


async def killed(world: VirtualRun, party: Sequence[VirtualLearner]) -> None:
    """Syncer and learners, at once."""
    await cancelled(world.syncer)
    await end(*party)


async def killed_all(world: VirtualRun, party: Sequence[VirtualLearner]) -> None:
    """Redis too."""
    await killed(world, party)
    flush(world)


@in_virtual_time
async def test_the_same_command_is_right_from_the_first_start_to_the_end(tmp_path: Path) -> None:
    """Everything is killed three times; the run goes on from its newest checkpoint, and ends with 0 twice."""
    world = VirtualRun(sync_spec(tokens=BUDGET), checkpoint_dir=tmp_path, checkpoint_every=3.0)
    began = set()
    for life in range(3):
        had = saved_tokens(tmp_path) if life else 0
        service = world.start_syncer()
        party = learners(world, first=10 * life)
        await asyncio.sleep(9.0 + SETTLED_S)
        now = await world.bus.read_state()
        began.add(now.began_unix_s)
        assert now.tokens > had == now.base_tokens
        await killed_all(world, party)
    assert len(began) == 1
    service = world.start_syncer()
    await world.finish(*learners(world, first=50))
    assert service.status_at_exit == 0
    flush(world)
    again = world.start_syncer()
    await world.syncer
    assert again.status_at_exit == 0
    late = learners(world, first=60)
    async with asyncio.timeout(60):
        await asyncio.gather(*(one.task for one in late if one.task))
    assert [one.left for one in late] == [True, True], "who is started again ends with it"


@in_virtual_time
async def test_what_is_told_otherwise_than_the_checkpoint_has_it_is_named_before_anything_begins(
    tmp_path: Path,
) -> None:
    """A larger budget is taken. Another run's checkpoints in the same place count for nothing."""
    world = VirtualRun(sync_spec(tokens=10**8), checkpoint_dir=tmp_path)
    world.start_syncer()
    party = learners(world)
    await world.until_version(3)
    await world.stop_syncer()
    await killed_all(world, party)
    world.start_syncer(tokens=10**9, quorum=5, sync_interval=77)
    with pytest.raises(
        SpecMismatch, match=r"the checkpoint disagree:\n  sync_interval: here 77.*\n  quorum: here 5"
    ) as told:
        async with asyncio.timeout(60):
            await world.syncer
    assert "tokens" not in str(told.value)
    assert await world.bus.read_state() is None
    world.start_syncer(tokens=10**9)
    party = learners(world, first=20)
    await until_joined(*party)
    state = await world.bus.read_state()
    assert state.base_tokens == saved_tokens(tmp_path)
    assert state.budget_tokens == 10**9
    await killed_all(world, party)
    assert newest_of_run(place_of(tmp_path), "other") is None


@in_virtual_time
async def test_a_place_of_checkpoints_without_latest_goes_on_from_its_newest(tmp_path: Path) -> None:
    """A copy was broken off, or the syncer died in its first save: no run begins anew beside whole checkpoints."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path, checkpoint_every=3.0)
    world.start_syncer()
    party = learners(world)
    await asyncio.sleep(15.0)
    await killed_all(world, party)
    had = saved_tokens(tmp_path)
    latest = next(tmp_path.glob("*/latest"))  # noqa: ASYNC240  # virtual time
    latest.unlink()
    assert saved_tokens(tmp_path) == had
    world.start_syncer()
    party = learners(world, first=20)
    await asyncio.sleep(9.0 + SETTLED_S)
    now = await world.bus.read_state()
    assert now.base_tokens == had
    await killed_all(world, party)
    latest.unlink()
    latest.mkdir()
    with pytest.raises(UsageError, match="cannot look for a checkpoint"):
        newest_of_run(place_of(tmp_path), RUN)


async def come_back_older(folder: Path) -> VirtualRun:
    """A run that is saved there, and of which all have died: its Redis is back, with a dump that is minutes old."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=folder, checkpoint_every=3.0)
    world.start_syncer()
    party = learners(world)
    await world.until_version(2)
    dump, expiries = copy.deepcopy(world.store.values), dict(world.store.expiries)
    await asyncio.sleep(20.0)
    await killed_all(world, party)
    world.store.values.update({key: value for key, value in dump.items() if "lease" not in key})
    world.store.expiries.update(expiries)
    return world


@in_virtual_time
async def test_a_bus_that_is_older_than_the_checkpoint_is_replaced_where_nobody_serves_it(tmp_path: Path) -> None:
    """Redis came back from a dump that is minutes old, and everybody else had died with it."""
    world = await come_back_older(tmp_path)
    had = saved_tokens(tmp_path)
    world.start_syncer()
    party = learners(world, first=20)
    await asyncio.sleep(9.0 + SETTLED_S)
    now = await world.bus.read_state()
    assert now.base_tokens == had
    await killed_all(world, party)


def damage(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        file.write_bytes(b"damaged")


@in_virtual_time
async def test_a_damaged_checkpoint_costs_nothing_of_what_the_bus_has(tmp_path: Path) -> None:
    """It is newer than the bus, and nobody serves that: the start is refused, with the file, and deletes nothing."""
    world = await come_back_older(tmp_path)
    heads = await world.versions()
    damage(tmp_path)
    world.start_syncer()
    with pytest.raises(UsageError, match="safetensors"):
        async with asyncio.timeout(60):
            await world.syncer
    assert await world.versions() == heads != []


@in_virtual_time
async def test_the_newest_checkpoint_of_several_syncers_is_taken(tmp_path: Path) -> None:
    """Each has a disk of its own; the others join what it puts there."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_every=3.0)
    for folder in ("old", "new"):
        world.start_syncer(checkpoint_dir=tmp_path / "old")
        party = learners(world, first=30 if folder == "new" else 0)
        await asyncio.sleep(12.0 + SETTLED_S)
        await killed_all(world, party)
        if folder == "old":
            shutil.copytree(tmp_path / "old", tmp_path / "copy")
    newest = saved_tokens(tmp_path / "old")
    assert newest > saved_tokens(tmp_path / "copy")
    first = world.start_syncer(checkpoint_dir=tmp_path / "copy", syncer_id="a")
    one = world.syncer
    await asyncio.sleep(1.0)
    second = world.start_syncer(checkpoint_dir=tmp_path / "old", syncer_id="b")
    party = learners(world, first=40)
    await asyncio.sleep(12.0)
    now = await world.bus.read_state()
    assert now.base_tokens == newest
    assert first.serving is not None
    assert second.serving is not None
    await cancelled(one)
    await killed_all(world, party)


@in_virtual_time
async def test_fresh_parameters_wait_for_a_syncer_that_has_trained_ones(tmp_path: Path) -> None:
    """One without a checkpoint starts first, with a fresh learner: the one with it resumes."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_every=3.0)
    world.start_syncer(checkpoint_dir=tmp_path)
    party = learners(world)
    await asyncio.sleep(9.0)
    await killed_all(world, party)
    had = saved_tokens(tmp_path)
    world.start_syncer(checkpoint_dir=tmp_path, syncer_id="saver")
    saver = world.syncer
    await asyncio.sleep(0.2)
    world.start_syncer(syncer_id="none")
    party = learners(world, first=40)
    await asyncio.sleep(9.0 + SETTLED_S)
    now = await world.bus.read_state()
    assert now.base_tokens == had
    await cancelled(saver)
    await killed_all(world, party)


@pytest.mark.parametrize(("half_of", "other_has"), [("new", None), ("new", "old"), ("old", None)])
@in_virtual_time
async def test_fresh_parameters_are_never_put_beside_those_of_half_a_checkpoint(
    half_of: str, other_has: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A syncer dies while it resumes. Another one, with none or an older one, leaves the rest to its successor."""
    push, half = restoring.push_global, asyncio.Event()

    async def push_half(bus: Any, fragment: int, *more: Any) -> Any:
        if fragment:
            half.set()
            await asyncio.sleep(1e9)
        return await push(bus, fragment, *more)

    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_every=3.0)
    world.start_syncer(checkpoint_dir=tmp_path / "new")
    party = learners(world)
    await asyncio.sleep(6.0)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    await asyncio.sleep(15.0)
    await killed_all(world, party)
    had = saved_tokens(tmp_path / "new")
    assert had > saved_tokens(tmp_path / "old")

    monkeypatch.setattr(restoring, "push_global", push_half)
    world.start_syncer(checkpoint_dir=tmp_path / half_of, syncer_id="resumes")
    resumes = world.syncer
    world.start_syncer(syncer_id="other", **({"checkpoint_dir": tmp_path / other_has} if other_has else {}))
    other = world.syncer
    party = learners(world, first=40)
    await half.wait()
    await cancelled(resumes)
    monkeypatch.setattr(restoring, "push_global", push)
    await asyncio.sleep(30.0)
    head, missing = await world.bus.read_heads([0, 1])
    assert head is not None
    assert missing is None
    world.start_syncer(checkpoint_dir=tmp_path / "new", syncer_id="again")
    await until_joined(*party)
    state = await world.bus.read_state()
    assert state.base_tokens == had
    installed = [one.record for one in await world.bus.read_tape({0: START}, limit=1000)]
    assert {one.fragment for one in installed if isinstance(one, Committed) and "restored" in one.reason} == {0, 1}
    assert not any(isinstance(one, Committed) and one.version == 0 for one in installed)
    await cancelled(other)
    await killed_all(world, party)


@in_virtual_time
async def test_a_syncer_that_is_replaced_beside_live_learners_goes_on_with_their_run(tmp_path: Path) -> None:
    """Its last checkpoint has more tokens than the state, which is written a few times a second, and no more merges."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path, checkpoint_every=3.0)
    world.start_syncer()
    party, lives, ahead = learners(world), 0, 0
    while not ahead and lives < 20:
        lives, seen = lives + 1, saved_ones(tmp_path)
        while saved_ones(tmp_path) <= seen:
            await asyncio.sleep(0.01)
        await cancelled(world.syncer)
        for p in range(2):
            world.store.delete(world.bus.keys.lease(p))  # as one that parts gives them back
        state = await world.bus.read_state()
        ahead = saved_tokens(tmp_path) - state.tokens
        world.start_syncer()
    assert ahead > 0
    await asyncio.sleep(10.0)
    again = await world.bus.read_state()
    assert again.started_unix_s == state.started_unix_s
    assert again.base_tokens == 0
    await killed_all(world, party)


@in_virtual_time
async def test_fresh_parameters_never_take_the_place_of_a_lost_head() -> None:
    """One node of a cluster comes back empty, and whoever remembers its fragments has died too."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    party = learners(world)
    await asyncio.sleep(10.0)
    await killed(world, party)
    world.store.delete(world.bus.keys.head(1))
    world.start_syncer()
    party = learners(world, first=40)
    await asyncio.sleep(60.0)
    upload = await world.bus.read_initial()
    assert upload.nonce in {f"{i:016x}" for i in (40, 41)}
    assert [head is None for head in await world.bus.read_heads([0, 1])] == [False, True]
    assert not any(one.joined for one in party)
    await killed_all(world, party)


@in_virtual_time
async def test_a_learner_that_has_trained_waits_for_nobodys_fresh_parameters() -> None:
    """A head is lost. Who was cut off finds another one's upload, which the syncer refuses, and puts its own there."""
    world, fresh = VirtualRun(sync_spec(tokens=10**9)), "f" * 16
    world.start_syncer()
    party = learners(world, 1)
    await asyncio.sleep(40.0)
    await cancelled(world.syncer)
    world.store.delete(world.bus.keys.head(1))
    world.start_syncer()
    bus = world.bus
    assert await bus.claim_initial(fresh, 30.0)
    await asyncio.sleep(25.0)  # the other one is about to upload
    values = np.zeros(layout_of(world.spec.tensors).fragments[1].elements, np.float32)
    await push(bus, bus.keys.initial_payload(1, fresh), values, world.spec.sync.chunk_bytes, 600.0)
    assert await bus.finish_initial(InitialUpload(learner="fresh", nonce=fresh), 600.0)
    await asyncio.sleep(20.0)
    head = (await bus.read_heads([1]))[0]
    assert head.version > 0
    await end(*party)
    await cancelled(world.syncer)


@in_virtual_time
async def test_fresh_parameters_wait_for_a_learner_that_has_trained_ones() -> None:
    """Nobody has a checkpoint. A fresh learner is first; the trained one is there, and its parameters are taken."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    trained = learners(world, 1)[0]
    await world.until_version(20)
    was = await world.bus.read_state()
    await cancelled(world.syncer)
    flush(world)
    await asyncio.sleep(1.0)
    world.start_syncer()
    fresh = VirtualLearner("fresh", world, 0.1, "f" * 16).start()
    await asyncio.sleep(5.0)
    assert await world.bus.read_state() is None, "it waits"
    await world.until_version(3)
    now = await world.bus.read_state()
    assert now.began_unix_s == was.began_unix_s
    assert now.base_merged > 0
    assert not trained.task.done()
    await killed_all(world, [trained, fresh])


@in_virtual_time
async def test_a_checkpoint_of_a_run_that_was_draining_is_gone_on_from(tmp_path: Path) -> None:
    """Its budget is used up, and it is not finished: it drains, and ends with 0."""
    world = VirtualRun(sync_spec(tokens=400), checkpoint_dir=tmp_path)
    world.start_syncer()
    party = learners(world)
    async with asyncio.timeout(60):
        while (now := await world.bus.read_state()) is None or now.phase is Phase.RUNNING:
            await asyncio.sleep(0.01)
    await world.stop_syncer()
    await killed_all(world, party)
    assert saved_tokens(tmp_path) >= 400
    service = world.start_syncer()
    await world.finish(*learners(world, first=20))
    assert service.status_at_exit == 0
    with capture_logs() as log:
        again = world.start_syncer(checkpoint_dir=None)
        await world.syncer
    (told,) = [one for one in log if one["event"] == "run_was_finished"]
    assert again.status_at_exit == 0
    assert f"run `diloco runs extend {RUN} --tokens N`" in told["detail"]


@in_virtual_time
async def test_a_finished_run_that_is_put_back_says_what_it_said(tmp_path: Path) -> None:
    """Its tokens by fate, and its time, though no learner's report is there."""
    world = VirtualRun(sync_spec(tokens=12_000), checkpoint_dir=tmp_path)
    world.start_syncer()
    died = VirtualLearner("died", world, 0.15, "d" * 16).start()
    party = learners(world)
    await world.until_version(6)
    await died.kill()
    await world.finish(*party)
    before = await read_status(world.bus, world.clock)
    assert min(before["tokens_lost"][cause] for cause in ("overwritten", "died")) > 0
    flush(world)
    await asyncio.sleep(1000.0)
    world.start_syncer()
    await world.syncer
    after = await read_status(world.bus, world.clock)
    assert (after["phase"], after["tokens"], after["merged_tokens"]) == (
        "finished",
        before["tokens"],
        before["merged_tokens"],
    )
    assert after["tokens_lost"] == pytest.approx(before["tokens_lost"], abs=2)
    assert after["elapsed_s"] == pytest.approx(before["elapsed_s"], abs=15.0)


@in_virtual_time
async def test_who_trained_does_not_go_on_in_a_run_that_began_anew() -> None:
    """Redis and syncer are lost; a fresh learner reaches the empty Redis first, while the trained one is cut off."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    trained = learners(world, 1)[0]
    await world.until_version(5)
    await cancelled(world.syncer)
    flush(world)

    async def away() -> None:
        raise BusUnavailable("cut off")

    trained.bus._turn = away
    world.start_syncer()
    fresh = VirtualLearner("fresh", world, 0.1, "f" * 16).start()
    await world.until_version(2)
    del trained.bus._turn
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(60):
            await trained.task
    assert ended.group_contains(RunReplaced, match="Learner l0 has version")
    await killed_all(world, [fresh])


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.DRAINING])
@in_virtual_time
async def test_globals_of_a_run_that_began_anew_are_not_given_out_as_the_earlier_ones(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner has left, asks for the run's model, and perhaps waits for its last merges. Redis is emptied, and the
    same spec begins anew: it is given an error, and not the other model."""
    world, party = await under_way(5)
    await killed(world, party)
    known = await world.bus.read_state()
    await world.bus.write_state(known.model_copy(update={"phase": phase}))

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[MemoryBus]:
        yield world.bus

    async def asked() -> list[np.ndarray]:
        layout = layout_of(world.spec.tensors)
        return await newest.read_newest("", RUN, world.spec, layout, range(2), known, left=True)

    monkeypatch.setattr(newest, "open_bus", opened)
    waiting = asyncio.create_task(asked())
    await asyncio.sleep(1.0)
    assert waiting.done() is (phase is Phase.RUNNING)
    flush(world)
    world.start_syncer()
    fresh = learners(world, 1, first=40)
    await world.until_version(2)
    await asyncio.sleep(1.0)
    with pytest.raises(RunReplaced, match="This learner was in"):
        await (asked() if phase is Phase.RUNNING else waiting)
    await killed(world, fresh)


def read_tape(folder: Path) -> tuple[list[Committed], list[list[str]]]:
    """Its merges, and the beginnings of the runs that it is said to be of, where it is of several."""
    with capture_logs() as log:
        records = read_archive(folder)
    commits = [one for one in records if isinstance(one, Committed)]
    return commits, [one["began"] for one in log if one["event"] == "tape_of_several_runs"]


@in_virtual_time
async def test_an_archive_of_two_runs_of_one_name_has_both_and_is_said_to_be_of_two(tmp_path: Path) -> None:
    """Not so where the run went on, from a learner's parameters or from a checkpoint. What was there stays as it was,
    and each merge of both is made again."""
    tape, saved, deltas = tmp_path / "tape", tmp_path / "saved", tmp_path / "deltas"
    world = VirtualRun(sync_spec(tokens=10**9), tape_dir=tape, record_deltas=deltas)
    world.start_syncer()
    party = learners(world)
    await world.until_version(5)
    await cancelled(world.syncer)
    flush(world)
    world.start_syncer(checkpoint_dir=saved)
    await asyncio.sleep(30.0)
    await world.until_version(2)
    assert "continues from what" in (await world.bus.read_state()).reason
    await world.stop_syncer()
    await killed_all(world, party)
    world.start_syncer(resume=saved)
    party = learners(world, first=20)
    await asyncio.sleep(9.0 + SETTLED_S)
    first = await world.bus.read_state()
    assert "resumed from" in first.reason
    await world.stop_syncer()
    await killed_all(world, party)
    before, said = read_tape(tape)
    assert said == []
    installed = [one for one in before if one.base_digest is None]
    assert len({one.reason for one in installed}) >= 3, "or nothing was installed again"
    assert {one.began_unix_s for one in installed} == {first.began_unix_s}
    files = {file: file.read_bytes() for file in tape.iterdir()}

    world.start_syncer()
    party = learners(world, first=40)
    await world.until_version(3)
    second = await world.bus.read_state()
    await world.stop_syncer()
    await killed_all(world, party)
    commits, said = read_tape(tape)
    assert said == [[moment(one.began_unix_s) for one in (first, second)]]
    assert commits[: len(before)] == before
    assert {file: file.read_bytes() for file in files} == files
    outcome = replay(deltas, commits, lambda merges: None)
    assert (outcome.differences, outcome.repeated) == ([], outcome.merges)
    assert outcome.merges == sum(bool(one.contributions) for one in commits)


@in_virtual_time
async def test_the_ledger_of_a_run_that_goes_on_from_a_learner_says_what_it_took_over() -> None:
    """Nobody has a checkpoint. What was merged stays merged, and the learner's earlier tokens count once."""
    world, party = await under_way(100)
    await cancelled(world.syncer)
    before = await read_status(world.bus, world.clock)
    flush(world)
    world.start_syncer()
    await asyncio.sleep(30.0)
    await world.until_version(5)
    after, now = await read_status(world.bus, world.clock), await world.bus.read_state()
    assert now.base_tokens == pytest.approx(before["tokens"], abs=100)
    assert before["tokens"] >= now.base_merged >= before["merged_tokens"] - 100
    assert after["merged_tokens"] > before["merged_tokens"]
    lost = after["tokens_lost"]["rejected"] - before["tokens_lost"]["rejected"]
    assert lost <= after["tokens"] - before["tokens"], "only what was trained while nobody merged"
    assert before["merged_tokens"] > 2 * lost, "or this shows nothing"
    for one in party:
        one.stop = True
    await asyncio.sleep(10.0)
    inputs = await read_ledger_inputs(world.bus, world.spec.sync.fragments, 5.0)
    end = await world.bus.read_state()
    assert end.tokens == end.base_tokens + sum(report.tokens for report in inputs.reports)
    await cancelled(world.syncer)


async def closed_status(world: VirtualRun) -> Status:
    """The status, whose tokens add up."""
    status = await read_status(world.bus, world.clock)
    assert status["tokens"] == status["merged_tokens"] + sum(status["tokens_lost"].values())
    return status


@in_virtual_time
async def test_the_status_of_a_run_that_goes_on_from_a_checkpoint_is_as_true_as_before(tmp_path: Path) -> None:
    """Learners outlive Redis and syncer. What was merged up to the checkpoint stays merged; what was merged after it
    is gone, and rejected is only what was trained while nobody merged. With other learners it is what was saved."""
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path, checkpoint_every=40.0)
    world.start_syncer()
    party = learners(world)
    await world.until_version(100)
    before = await closed_status(world)
    await cancelled(world.syncer)
    saved = newest_of_run(place_of(tmp_path), RUN)
    merged = known_elements(saved)[0] // saved.layout.elements
    assert before["merged_tokens"] - merged > 1000, "or this shows nothing"
    flush(world)
    lost_s = world.clock.now()
    await asyncio.sleep(5.0)
    world.start_syncer()
    while len(await world.heads()) < 2:
        await asyncio.sleep(0.1)
    alone_tokens = 200 * (world.clock.now() - lost_s)
    await asyncio.sleep(10.0)
    after, now = await closed_status(world), await world.bus.read_state()
    assert (now.base_tokens, now.base_merged) == (saved.state.tokens, merged)
    assert 0 < after["tokens_lost"]["rejected"] <= alone_tokens < 3000
    assert after["tokens_lost"]["died"] < 100
    assert after["tokens"] - saved.state.tokens <= alone_tokens + 200 * 10 + 100, "what they trained before counts once"
    assert merged + 1000 < after["merged_tokens"] < merged + 200 * 10

    await world.stop_syncer()
    had = await closed_status(world)
    await killed_all(world, party)
    world.start_syncer()
    fresh = learners(world, first=20)
    await until_joined(*fresh)
    again = await closed_status(world)
    lost, earlier = again["tokens_lost"], had["tokens_lost"]
    assert again["merged_tokens"] == pytest.approx(had["merged_tokens"], abs=100)
    assert lost["rejected"] == earlier["rejected"]
    assert lost["overwritten"] == pytest.approx(earlier["overwritten"], abs=100)
    await asyncio.sleep(10.0)
    for one in fresh:
        one.stop = True
    await asyncio.sleep(10.0)
    end, state = await closed_status(world), await world.bus.read_state()
    assert end["merged_tokens"] > again["merged_tokens"] + 1000
    assert end["tokens_lost"]["rejected"] == lost["rejected"]
    inputs = await read_ledger_inputs(world.bus, world.spec.sync.fragments, 5.0)
    assert state.tokens == state.base_tokens + sum(report.tokens for report in inputs.reports)
    await cancelled(world.syncer)


@in_virtual_time
async def test_a_finished_runs_start_is_no_error_and_a_stopped_ones_is_tried_again(tmp_path: Path) -> None:
    world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=tmp_path)
    service = world.start_syncer()
    party = learners(world)
    await world.until_version(3)
    await world.stop_syncer()
    assert service.status_at_exit == AGAIN_STATUS
    await killed_all(world, party)


@in_virtual_time
async def test_a_syncer_refuses_an_outer_step_that_cannot_be_taken_before_any_learner_comes() -> None:
    world = VirtualRun(sync_spec())
    world.start_syncer(outer_momentum=0.0)
    with pytest.raises(UsageError, match="needs an outer momentum above 0"):
        async with asyncio.timeout(60):
            await world.syncer
