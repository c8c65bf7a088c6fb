"""Several runs in one place of checkpoints: none removes another's, and none goes on from another's unasked."""

import asyncio
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.export import export
from diloco.launcher.folder import output_of
from diloco.pipeline.errors import UsageError
from diloco.syncer.checkpoints.loading import load_checkpoint, runs_in
from diloco.syncer.checkpoints.places import Place, place_of
from diloco.syncer.checkpoints.saving import is_run_folder, run_folder
from diloco_studies.virtual.virtual_time import in_virtual_time, run_virtual
from tests import samples
from tests.syncer.test_checkpoint_places import endpoint, on_s3  # noqa: F401  # a fixture
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """One that nothing lies at yet."""
    return str(tmp_path / "place") if request.param == "folder" else on_s3(request, monkeypatch)


async def train(world: VirtualRun, place: str, versions: int, skew_s: float, **settings: Any) -> None:
    """Until so many more merges, and then an orderly stop of the syncer. skew_s: of its wall clock."""
    world.start_syncer(skew_s, checkpoint_dir=place, **settings)
    learner = VirtualLearner("l", world, incarnation=secrets.token_hex(8)).start()
    await world.until_version(versions)
    await world.stop_syncer()
    await learner.kill()


def run(place: str, versions: int = 20, skew_s: float = 0.0, **settings: Any) -> None:
    run_virtual(train(VirtualRun(sync_spec(tokens=10**9)), place, versions, skew_s, **settings))


def kept(place: str) -> dict[str, frozenset[str]]:
    return {str(one): frozenset(name for name in one.names() if name != "latest") for one in runs_in(place_of(place))}


def test_a_new_run_of_the_same_name_takes_nothing_from_the_one_before(place: str) -> None:
    """As in a volume that outlives its Redis: each keeps its newest three. The log says what the other one takes."""
    run(place, checkpoint_every=2.0)
    (first,) = kept(place)
    before = kept(place)[first]
    with capture_logs() as log:
        run(place, versions=60, skew_s=60.0, checkpoint_every=2.0, overwrite=True)
    assert kept(place).pop(first) == before
    assert sorted(map(len, kept(place).values())) == [3, 3]
    (told,) = [line for line in log if line["event"] == "other_runs_found"]
    assert (told["runs"], told["checkpoints"]) == ([first], 3)
    assert told["bytes"] == sum(place_of(first).below(name).size_bytes() for name in before) > 3 * 500


@in_virtual_time
async def test_two_runs_that_save_to_one_place_at_once_keep_their_own(tmp_path: Path) -> None:
    """Also what is half written: one saves every second, and the other needs seven seconds for a fragment."""
    from diloco.syncer.checkpoints import saving

    whole = saving.save_fragment

    async def slowly(bus: Any, spec: Any, folder: Place, fragment: int, offload: Any) -> None:
        await whole(bus, spec, folder, fragment, offload)
        await asyncio.sleep(7.0 * (spec.sync.tokens == 10**8))

    worlds = [VirtualRun(sync_spec(tokens=tokens), checkpoint_dir=tmp_path) for tokens in (10**8, 10**9)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "save_fragment", slowly)
        worlds[0].start_syncer(checkpoint_every=1.0)
        worlds[1].start_syncer(skew_s=60.0, checkpoint_every=1.0)
        learners = [VirtualLearner("l", world).start() for world in worlds]
        with capture_logs() as log:
            await asyncio.sleep(45.0)
        await end(*learners)
    assert not [line for line in log if line["event"] == "checkpoint_failed"]
    runs = runs_in(place_of(tmp_path))
    assert {load_checkpoint(str(one)).spec.sync.tokens for one in runs} == {10**8, 10**9}


def refused(place: str) -> None:
    """A syncer that resumes."""

    async def main() -> None:
        world = VirtualRun(sync_spec(tokens=10**9))
        world.start_syncer(resume=place)
        await world.syncer

    run_virtual(main())


def test_several_runs_in_a_place_are_told_apart_by_who_names_one(place: str, tmp_path: Path) -> None:
    """Neither resume nor export takes one of them by itself: they name all, and take the one that is named."""
    run(place)
    run(place, versions=40, skew_s=60.0, overwrite=True)
    first, second = sorted(kept(place))
    for ask in (load_checkpoint, lambda where: export(where, tmp_path / "x.safetensors"), refused):
        with pytest.raises(UsageError, match=rf"checkpoints of 2 runs; name .*: {re.escape(first)} \(checkpoint-\d+"):
            ask(place)
    older, newer = load_checkpoint(first), load_checkpoint(second)
    assert older.state.tokens < newer.state.tokens
    run(place, versions=60, skew_s=120.0, resume=first, overwrite=True)
    assert set(kept(place)) == {first, second}, "it goes on in its own folder"
    assert load_checkpoint(first).state.tokens > newer.state.tokens


def test_a_run_that_is_restarted_or_resumed_goes_on_in_its_folder(place: str) -> None:
    """With the same flags each time: its newest three are kept, of all parts."""

    async def restarted() -> None:
        world = VirtualRun(sync_spec(tokens=10**9))
        for versions in (10, 20):
            await train(world, place, versions, skew_s=float(versions), checkpoint_every=1.0)

    run_virtual(restarted())
    (folder,) = kept(place)
    for part in range(2):
        tokens = load_checkpoint(place).state.tokens
        run(place, 40 + 20 * part, skew_s=100.0 + part, resume=place, checkpoint_every=1.0)
        assert list(kept(place)) == [folder]
        assert len(kept(place)[folder]) == 3
        assert load_checkpoint(place).state.tokens > tokens


def test_a_runs_folder_is_its_names_and_its_beginnings() -> None:
    """Also in the parts that are resumed; runs that begin a millisecond apart have two."""
    began = samples.run_state(started_unix_s=1.7e9 + 0.25)
    resumed = samples.run_state(started_unix_s=1.8e9, origin_unix_s=began.started_unix_s)
    assert run_folder("mine", began) == run_folder("mine", resumed) == "mine-20231114-221320-250000"
    others = {run_folder("mine", samples.run_state(started_unix_s=1.7e9 + 0.251)), run_folder("m", began)}
    assert len(others | {run_folder("mine", began)}) == 3
    assert all(map(is_run_folder, others))
    for name in ("tape", "checkpoint-20231114-22132025", "checkpoint-7-deadbeef", "latest"):
        assert not is_run_folder(name)


def test_the_output_folder_of_a_checkpoint_is_found() -> None:
    """By it a resumed run finds method and moments."""
    assert output_of(Path("runs/mine/checkpoints/run-1/checkpoint-7-deadbeef")).path == Path("runs/mine")


def test_a_place_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    """Not first when there is something to save: a run may be over by then."""
    (tmp_path / "file").write_text("no folder")
    with capture_logs() as log:
        run(str(tmp_path / "file"), versions=3, checkpoint_every=1e6)
    told = [line["event"] for line in log if line["log_level"] == "error"]
    assert told[0] == "checkpoint_place_refused"
