"""Promises to whoever replays or resumes what an earlier tree of the same number wrote (`tests/recorded`)."""

import json
import shutil
from pathlib import Path

import pytest

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.settings import BusSettings
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.tape import check_replay, read_archive
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import recorded
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy: readers may lock what they read."""
    return Path(shutil.copytree(recorded.RUN, tmp_path / "run"))


def test_its_tape_and_its_deltas_are_read_and_replayed_bit_for_bit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merges = [one for one in read_archive(run / "tape") if isinstance(one, Committed)]
    assert sum(bool(one.contributions) for one in merges) >= 10
    assert check_replay(BusSettings(), run / "deltas", None, json_object=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["made_again"] == told["merges"] >= 10


@in_virtual_time
async def test_its_checkpoint_is_gone_on_from(run: Path) -> None:
    """A run with more tokens merges on top of the saved versions, and saves again."""
    saved = load_checkpoint(run / "checkpoints")
    assert all(fragment.version > 3 for fragment in saved.fragments)
    world = VirtualRun(sync_spec(tokens=2 * saved.spec.sync.tokens, quorum=2))
    world.start_syncer(resume=str(run / "checkpoints"), tokens=2 * saved.spec.sync.tokens)
    await world.finish(*(VirtualLearner(f"l{i}", world, 0.1, f"{i + 2:016x}").start() for i in range(2)))
    heads = await world.heads()
    assert all(head.version > one.version for head, one in zip(heads, saved.fragments, strict=True))


def rewrite(run: Path, change: dict[str, object]) -> None:
    (state,) = run.glob("checkpoints/*/checkpoint-*/state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"format": 99},
            "format 99 cannot be read by this build, which reads .*: a different build may have written it",
        ),
        ({"a_new_one": 1}, "a_new_one is unknown to this build: a different build may have written it"),
    ],
)
def test_a_checkpoint_of_another_format_is_refused_with_both(run: Path, change: dict[str, object], said: str) -> None:
    rewrite(run, change)
    with pytest.raises(UsageError, match=said):
        load_checkpoint(run / "checkpoints")


def test_a_checkpoint_does_not_have_the_wire_format(run: Path) -> None:
    """So a build of another number goes on from it."""
    (state,) = run.glob("checkpoints/*/checkpoint-*/state.json")
    assert "format" not in json.loads(state.read_text())["spec"]
