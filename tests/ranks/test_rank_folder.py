"""What ranks find again in their learner's state folder."""

import fcntl
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.workers.moments.saved_moments import Moments
from diloco.workers.moments.state_folder import LOCK_FILE, RunIdentity, SavedState, StateRefused
from diloco.workers.ranks.placement import Block, Blocks, local_layout
from diloco.workers.ranks.rank_folder import RankFolder
from tests import samples

WHOLE = layout_of((samples.tensor("t", (4,), rule="mean"),))
RUN = RunIdentity(run="run", started_unix_s=5.0)
KIND = OptimizerKind(optimizer="SGD", moments=("momentum",), numbers=())
NOTHING = OptimizerKind(optimizer="SGD", moments=(), numbers=())
"""That of a rank whose shards are all empty."""


def rows(first: int, last: int) -> Block:
    """Rows of a vector."""
    return Block(first, last, 0, 1)


HALVES: list[Blocks] = [{"t": rows(0, 2)}, {"t": rows(2, 4)}]
REPLICAS: list[Blocks] = [{"t": rows(0, 4)}, {"t": rows(0, 4)}]


def folder(path: Path, held: list[Blocks], rank: int) -> RankFolder:
    return RankFolder(path, local_layout(WHOLE, held[rank]), WHOLE, held, rank, rank)


def save(path: Path, held: list[Blocks], rank: int, chance: bytes, steps: int = 7) -> None:
    """What a rank of that random state saves."""
    start, stop, *_ = held[rank]["t"]
    kind = KIND if start < stop else NOTHING
    moments = Moments(kind, ({name: np.arange(start, stop, dtype=np.float32) for name in kind.moments},), {})
    state = SavedState(
        identity=RUN,
        learner="l0",
        layout=local_layout(WHOLE, held[rank]).digest,
        kind=kind,
        moments_file=f"moments-{steps}.safetensors",
        numbers={},
        steps=steps,
        torch_rng=chance,
        python_rng=(3, (1, 2), None),
        shard=None,
        objects={"data": chance},
    )
    one = folder(path, held, rank)
    one.save(lambda: (state, moments))
    one.close(60.0)


@pytest.mark.parametrize("then", [REPLICAS, HALVES])
def test_each_rank_goes_on_with_its_own_random_state_and_data_position(tmp_path: Path, then: list[Blocks]) -> None:
    """Also a replica that saves no moments, and where as many ranks hold other rows now: none draws its data again."""
    for rank, chance in enumerate((b"zero", b"one")):
        save(tmp_path, REPLICAS, rank, chance)
    for rank, chance in enumerate((b"zero", b"one")):
        found = folder(tmp_path, then, rank).load(RUN, KIND)
        assert found is not None
        assert (found[0].torch_rng, found[0].python_rng) == (chance, (3, (1, 2), None))
        assert found[0].objects == {"data": chance}
        start, stop, *_ = then[rank]["t"]
        assert list(found[1].flats[0]["momentum"]) == list(range(start, stop))


def test_what_ranks_of_other_blocks_hold_alike_comes_back_once_and_alike(tmp_path: Path) -> None:
    """Undivided layers beside divided ones: each rank has saved its own copy, at its own step."""
    whole = layout_of((samples.tensor("t", (4,), rule="mean"), samples.tensor("u", (3,), rule="mean")))
    pair: list[Blocks] = [{"t": rows(0, 2), "u": rows(0, 3)}, {"t": rows(2, 4), "u": rows(0, 3)}]

    def folder(held: list[Blocks], rank: int) -> RankFolder:
        return RankFolder(tmp_path, local_layout(whole, held[rank]), whole, held, rank, 0)

    for rank in range(2):
        local = local_layout(whole, pair[rank])
        values = np.full(local.elements, 10.0 * rank, np.float32)
        given = {"identity": RUN, "learner": "l0", "layout": local.digest, "kind": KIND, "numbers": {}, "shard": None}
        given |= {
            "moments_file": "moments-7.safetensors",
            "steps": 7 + rank,
            "torch_rng": b"",
            "python_rng": (3, (1,), None),
        }
        one = folder(pair, rank)
        one.save(lambda: (SavedState(**given), Moments(KIND, ({"momentum": values},), {})))  # noqa: B023  # saved at once
        one.close(60.0)
    for then in (pair, [{"t": rows(0, 4), "u": rows(0, 3)}]):
        for rank in range(len(then)):
            found = folder(then, rank).load(RUN, KIND)
            assert found is not None
            here = dict(
                zip((slot.name for slot in local_layout(whole, then[rank]).fragments[0].slots), "tu", strict=True)
            )
            flat = found[1].flats[0]["momentum"].tolist()
            assert flat[-3:] == [0.0] * 3, here


def test_a_folder_that_another_process_saves_to_is_not_read(tmp_path: Path) -> None:
    """Its moments and its position in the data are another learner's."""
    whole = [{"t": rows(0, 4)}]
    save(tmp_path, whole, 0, b"any")
    with (tmp_path / LOCK_FILE).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StateRefused, match="another live learner saves to"):
            folder(tmp_path, whole, 0).load(RUN, KIND)
    assert folder(tmp_path, whole, 0).load(RUN, KIND) is not None


def test_ranks_that_divide_layers_take_the_first_ones_random_state_and_position(tmp_path: Path) -> None:
    """Each saves by its own clock, and they would train on different data."""
    for rank, chance in enumerate((b"zero", b"one")):
        save(tmp_path, HALVES, rank, chance)
    for rank in range(2):
        one = RankFolder(tmp_path, local_layout(WHOLE, HALVES[rank]), WHOLE, HALVES, rank, 0)
        found = one.load(RUN, KIND)
        assert found is not None
        assert (found[0].torch_rng, found[0].objects) == (b"zero", {"data": b"zero"})


def test_a_random_state_or_position_of_other_ranks_or_another_run_is_not_taken(tmp_path: Path) -> None:
    """A rank that was not there before goes on with what its process has."""
    for rank in range(2):
        save(tmp_path, REPLICAS, rank, b"old")
    here = {"torch_rng": torch.get_rng_state().numpy().tobytes(), "python_rng": random.getstate(), "objects": {}}
    found = folder(tmp_path, [{"t": rows(0, 4)}] * 3, 1).load(RUN, KIND)
    assert found is not None
    assert found[0].model_dump(include=set(here)) == here
    other = RunIdentity(run="run", started_unix_s=6.0)
    with pytest.raises(StateRefused, match="another run"):
        folder(tmp_path, REPLICAS, 1).load(other, KIND)


def test_positions_are_those_of_the_set_that_has_gone_furthest(tmp_path: Path) -> None:
    """Not those that as many ranks had saved before others went on."""
    thirds: list[Blocks] = [{"t": rows(0, 2)}, {"t": rows(2, 3)}, {"t": rows(3, 4)}]
    for held, steps in ((HALVES, 100), (thirds, 500)):
        for rank in range(len(held)):
            save(tmp_path, held, rank, b"%d" % steps, steps)
    for held, objects in ((HALVES, {}), (thirds, {"data": b"500"})):
        found = folder(tmp_path, held, 0).load(RUN, KIND)
        assert found is not None
        assert (found[0].steps, found[0].objects) == (500, objects)


def test_moments_of_other_rows_are_refused_where_no_set_is_whole(tmp_path: Path) -> None:
    """As many elements as this rank holds, but of another place: they would be taken for its own."""
    save(tmp_path, HALVES, 0, b"zero")
    with pytest.raises(StateRefused, match="held different rows"):
        folder(tmp_path, HALVES[::-1], 0).load(RUN, KIND)
    assert folder(tmp_path, HALVES, 0).load(RUN, KIND) is not None


@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 3, 4), (0, 4)])
def test_ranks_that_saved_at_different_steps_come_back_with_the_fewest(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """All with the same, as ramps of learning rates count them; each part of the moments is what was saved last."""
    then: list[Blocks] = [{"t": rows(*ends)} for ends in itertools.pairwise(cuts)]
    for rank, steps in enumerate((38, 35)):
        save(tmp_path, HALVES, rank, b"any", steps)
    for rank in range(len(then)):
        with structlog.testing.capture_logs() as logs:
            found = folder(tmp_path, then, rank).load(RUN, KIND)
        assert found is not None
        assert found[0].steps == 35
        start, stop, *_ = then[rank]["t"]
        assert list(found[1].flats[0]["momentum"]) == list(range(start, stop))
        assert [log["steps"] for log in logs if log["event"] == "state_of_several_steps"] == [[35, 38]]


def test_what_was_saved_under_another_name_comes_back_for_other_ranks_too(tmp_path: Path) -> None:
    """A resumed run has another name, and is the same run."""
    for rank in range(2):
        save(tmp_path, HALVES, rank, b"any")
    resumed = RunIdentity(run="resumed", started_unix_s=RUN.started_unix_s)
    found = folder(tmp_path, [{"t": rows(0, 4)}], 0).load(resumed, KIND)
    assert found is not None
    assert list(found[1].flats[0]["momentum"]) == list(range(4))


def test_ranks_that_hold_nothing_are_no_obstacle(tmp_path: Path) -> None:
    """Of a model with few rows some ranks have only empty shards: they keep no moments, and need none."""
    for rank in range(2):
        save(tmp_path, [{"t": rows(0, 4)}, {"t": rows(0, 0)}], rank, b"any")
    then: list[Blocks] = [{"t": rows(0, 2)}, {"t": rows(2, 4)}, {"t": rows(0, 0)}]
    for rank, kind in enumerate((KIND, KIND, NOTHING)):
        found = folder(tmp_path, then, rank).load(RUN, kind)
        assert found is not None
        start, stop, *_ = then[rank]["t"]
        assert [list(one) for one in found[1].flats[0].values()] == [list(range(start, stop))][: len(kind.moments)]


def test_columns_come_back_as_rows(tmp_path: Path) -> None:
    """What ranks of tensor parallelism have saved is read by ranks that hold rows, columns of others, and by one."""
    whole = layout_of((samples.tensor("t", (3, 4), rule="mean"),))
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    grid: list[Blocks] = [{"t": Block(*rows, *columns)} for rows in ((0, 2), (2, 3)) for columns in ((0, 1), (1, 4))]

    def folder(held: list[Blocks], rank: int) -> RankFolder:
        return RankFolder(tmp_path, local_layout(whole, held[rank]), whole, held, rank, rank)

    def part(held: list[Blocks], rank: int) -> list[float]:
        first, last, left, right = held[rank]["t"]
        return values[first:last, left:right].ravel().tolist()

    for rank in range(4):
        moments = Moments(KIND, ({"momentum": np.array(part(grid, rank), np.float32)},), {})
        given = {"identity": RUN, "learner": "l0", "layout": local_layout(whole, grid[rank]).digest, "kind": KIND}
        given |= {"moments_file": "moments-7.safetensors", "numbers": {}, "steps": 7, "torch_rng": b""}
        state = SavedState(**given, python_rng=(3, (1, 2), None), shard=None)
        one = folder(grid, rank)
        one.save(lambda: (state, moments))  # noqa: B023  # saved before the next
        one.close(60.0)
    others: list[list[Blocks]] = [
        [{"t": Block(0, 3, 0, 4)}],
        [{"t": Block(0, 1, 0, 4)}, {"t": Block(1, 3, 0, 4)}],
        [{"t": Block(0, 3, 0, 2)}, {"t": Block(0, 3, 2, 4)}],
        grid,
    ]
    for then in others:
        for rank in range(len(then)):
            found = folder(then, rank).load(RUN, KIND)
            assert found is not None
            assert found[1].flats[0]["momentum"].tolist() == part(then, rank)
    (tmp_path / "rank-3-of-4" / "state.json").unlink()
    assert folder(others[0], 0).load(RUN, KIND) is None
