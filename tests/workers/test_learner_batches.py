"""`Learner.batches` on a real Redis: with `step` and `attach`, what is refused, and never a wait in a worker."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.settings import SyncSettings
from diloco.workers.learner import Learner
from tests.workers.fed import Numbers
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import on_bus

pytestmark = [pytest.mark.redis, pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")]
SYNC = SyncSettings(fragments=1, sync_interval=4, first_interval=0, quorum=1, tokens=2**40)


def learner_of(url: str, run: str, optimizer: Callable[..., Any] = torch.optim.SGD, **more: Any) -> Learner:
    model = nn.Linear(1, 1)
    return Learner(model, optimizer(model.parameters(), lr=1e-3), run=run, redis_url=url, sync=SYNC, **more)


def on_queue(url: str, run: str) -> list[tuple[int, int]]:
    """(epoch, indices that are still to be trained) of the shards on the queue."""
    queue = on_bus(url, run, lambda bus: bus.read_shards())
    return [(shard.epoch, shard.stop - shard.start - read) for shard, read in queue.open]


def loss_of(learner: Learner, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = learner.model(batch[:, None].float() / 100).square().mean()
    return loss


def test_each_index_is_trained_once_and_acknowledged(redis_server: str) -> None:
    """By workers; what is drawn ahead when the learner leaves is on the queue."""
    trained: Counter[int] = Counter()
    with a_syncer(redis_server, "batches"), learner_of(redis_server, "batches") as learner:
        batches = learner.batches(130, 4, seed=1)
        assert len(batches) == 33
        loader = DataLoader(Numbers(130), batch_sampler=batches, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            loss_of(learner, batch).backward()
            learner.optimizer.step()
            trained.update(batch.tolist())
            learner.step(4)
        for _, batch in zip(range(5), loader, strict=False):
            trained.update(batch.tolist())
            learner.step(4)
    left = on_queue(redis_server, "batches")
    assert trained.total() == 4 * 38
    assert sum(rest for _, rest in left) == 130 * (1 + max(epoch for epoch, _ in left)) - 4 * 38
    assert set(trained) == set(range(130))


@pytest.mark.parametrize("fused", [False, True])
def test_attached_steps_acknowledge_what_they_take_and_what_a_scaler_skips(redis_server: str, fused: bool) -> None:
    """Accumulation 2. A step that a GradScaler skips has consumed its batches: they are acknowledged with the next."""
    run = f"attached-{fused}"
    with (
        a_syncer(redis_server, run),
        learner_of(redis_server, run, torch.optim.AdamW if fused else torch.optim.SGD) as learner,
    ):
        learner.optimizer.param_groups[0]["fused"] = fused
        learner.attach(tokens=8)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        batches = learner.batches(400, 4, accumulate=2)
        loader = DataLoader(Numbers(400), batch_sampler=batches, num_workers=1, multiprocessing_context="fork")
        in_hand = []
        for made, batch in enumerate(loader):
            skipped = made // 2 in (3, 4, 9)
            scaler.scale(loss_of(learner, batch) * (float("inf") if skipped else 1.0)).backward()
            if made % 2:
                scaler.step(learner.optimizer)
                scaler.update()
                learner.optimizer.zero_grad()
                in_hand.append(len(batches._prefetched._drawn))
            if made == 39:
                break
        assert learner.joined.training.rounds.steps == 17
    assert in_hand == [2, 2, 2, 4, 6, 2, 2, 2, 2, 4, *[2] * 10], "drawn ahead, and of skipped steps"


def test_who_says_another_length_or_seed_is_refused_and_may_say_it_again(redis_server: str) -> None:
    with a_syncer(redis_server, "disagree"), learner_of(redis_server, "disagree") as one:
        one.batches(100, 4, seed=2)
        with learner_of(redis_server, "disagree") as other:
            with pytest.raises(
                SpecMismatch, match=r"reads 101 indices with seed 2 .* its run reads 100 indices with seed 2"
            ):
                other.batches(101, 4, seed=2)
            with pytest.raises(
                SpecMismatch, match=r"reads 100 indices with seed 0 .* its run reads 100 indices with seed 2"
            ):
                other.batches(100, 4)
            with pytest.raises(SpecMismatch, match=r"reads 100 blocks in an order of its own"):
                other.blocks(100, 4)
            assert len(other.batches(100, 8, seed=2)) == 13, "the size of batches is its own"


def test_data_is_read_once_in_one_way(redis_server: str) -> None:
    with a_syncer(redis_server, "batches-twice"), learner_of(redis_server, "batches-twice") as learner:
        with pytest.raises(UsageError, match=r"batches\(\): length=0; pass a whole number from 1"):
            learner.batches(0, 4)
        learner.batches(100, 4)
        for again in (lambda: learner.batches(100, 4), lambda: learner.blocks(100, 4)):
            with pytest.raises(UsageError, match=r"already reading its data: call batches\(\) or blocks\(\) only once"):
                again()


def test_after_the_run_a_loader_says_that_the_learner_is_not_in_it(redis_server: str) -> None:
    with a_syncer(redis_server, "after"):
        with learner_of(redis_server, "after") as learner:
            loader = DataLoader(Numbers(100), batch_sampler=learner.batches(100, 4))
        with pytest.raises(UsageError, match="the learner is not in a run"):
            next(iter(loader))


class Streaming(IterableDataset[Any]):
    """A user who reads in the worker."""

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        """What the worker reads."""
        return iter(self.read())


def test_blocks_and_batches_in_a_worker_raise_and_do_not_hang(redis_server: str) -> None:
    """Begun there, or begun here and drawn there; forked or spawned."""
    here, there = "not in a DataLoader worker", "created in the process"
    ways: list[tuple[str, str, Callable[[Learner], Callable[[], Any]]]] = [
        ("inside", there, lambda learner: lambda: learner.blocks(100, 10)),
        ("inside", there, lambda learner: lambda: learner.batches(100, 4)),
        ("inside", here, lambda learner: partial(iter, learner.blocks(100, 10))),
        ("inside-too", here, lambda learner: partial(iter, learner.batches(100, 4))),
    ]
    with a_syncer(redis_server, "inside"), a_syncer(redis_server, "inside-too"):
        for run, words, way in ways:
            with learner_of(redis_server, run) as learner:
                inside = Streaming(way(learner))
                forked = DataLoader(inside, batch_size=None, num_workers=2, multiprocessing_context="fork")
                with pytest.raises(UsageError, match=words):
                    next(iter(forked))
        with learner_of(redis_server, "inside") as learner:
            blocks = learner.blocks(100, 10)
            spawned = DataLoader(Holding(blocks), num_workers=1, multiprocessing_context="spawn")
            with pytest.raises(UsageError, match=here):
                iter(spawned)


class Holding(Dataset[Any]):
    """A dataset that has the order of blocks in it."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __getitem__(self, at: int) -> Any:
        """Whatever comes next."""
        return next(self.blocks)

    def __len__(self) -> int:
        """Not of interest."""
        return 9
