"""Batches of the ranks of one learner: each index goes to one of them, and rank 0 alone acknowledges."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.pipeline.errors import RankGone, UsageError
from diloco.pipeline.messages.shards import DataOrder
from diloco.workers.batches import Batches
from diloco.workers.exchange.shared import Shared
from diloco.workers.exchange.work_queue import ShardsInTurn
from diloco.workers.ranks import shard_broadcast
from diloco.workers.ranks.shard_broadcast import FollowingShards, ShardBroadcast, leading, loader_arguments
from diloco.workers.stopping import Stopped
from tests.ranks.party import Party
from tests.workers.fed import SEED, Fed
from tests.workers.test_learner_batches import on_queue


class AtOnce:
    """Connections of ranks that hear at once."""

    def __init__(self, all_of_them: "list[AtOnce]", ranks: int) -> None:
        self._all, self.ranks = all_of_them, ranks
        self._handlers: dict[str, Any] = {}

    def handle(self, **handlers: Any) -> None:
        """As `Transport`."""
        self._handlers |= handlers

    def notify(self, rank: int, what: str, *said: Any) -> None:
        """As `Transport`."""
        asyncio.run(self._all[rank]._handlers[what](0, *said))


class Crew:
    """All ranks' batches of a learner that is alone."""

    def __init__(self, ranks: int, length: int, batch_size: int, accumulate: int = 1, per_shard: int = 0) -> None:
        transport = list[AtOnce]()
        transport += [AtOnce(transport, ranks) for _ in range(ranks)]
        self.told = [ShardBroadcast(one) for one in transport]  # type: ignore[arg-type]
        order = DataOrder(length=length, seed=SEED)
        self.asked = loader_arguments(order, batch_size, accumulate)
        self.fed = fed = Fed(length, batch_size, accumulate, per_shard or ranks * batch_size * accumulate * 3)
        make = partial(Batches, order, batch_size, accumulate, dry_s=0.0, check=lambda: None)
        nothing = {"drawn": lambda entry_id: None, "finished": lambda entry_id: None}
        telling = leading(
            ShardsInTurn(fed.shared, random.Random(0)).after, fed.first, partial(self.told[0].notify, self.asked)
        )
        self.batches = [
            make(
                fed.first,
                fed.shared,
                drawn=fed.tell_drawn,
                finished=fed.finished.append,
                next_shard=telling,
                place=(0, ranks),
            )
        ]
        for rank in range(1, ranks):
            heard = FollowingShards(self.told[rank], self.asked, lambda: None)
            begin = heard.first(lambda: None), Shared()
            self.batches.append(make(*begin, next_shard=heard.after, place=(rank, ranks), **nothing))  # type: ignore[arg-type]

    def steps(self) -> Iterator[list[list[int]]]:
        """A pass: what the ranks have trained at each step, one after the other."""
        for step in zip(*self.batches, strict=True):
            yield list(step)
            for one in self.batches:
                one.stepped()


@given(
    ranks=st.integers(2, 4),
    length=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    per_shard=st.integers(1, 40),
)
@settings(max_examples=60)
def test_each_index_of_each_epoch_goes_to_one_rank_once(ranks, length, batch_size, per_shard) -> None:
    """Whatever divides what; all ranks have as many batches, all are full, and what is acknowledged is trained."""
    crew, trained = Crew(ranks, length, batch_size, per_shard=per_shard), list[int]()
    for _ in range(3):
        for step in crew.steps():
            assert [len(batch) for batch in step] == [batch_size] * ranks
            assert crew.fed.acknowledged == len(trained)
            trained += [index for batch in step for index in batch]
    assert crew.fed.acknowledged == len(trained) == 3 * ranks * batch_size * len(crew.batches[0])
    assert [len(one) for one in crew.batches] == [-(-length // (ranks * batch_size))] * ranks
    for first in range(0, len(trained) - length + 1, length):
        assert sorted(trained[first : first + length]) == list(range(length))


def test_a_loop_that_breaks_off_goes_on_alike_on_all_ranks() -> None:
    """What was drawn and not trained comes again, on the rank that had it."""
    crew, trained = Crew(3, 90, 2), list[int]()
    for at, step in enumerate(crew.steps()):
        if at == 4:
            break
        trained += [index for batch in step for index in batch]
    for step in crew.steps():
        trained += [index for batch in step for index in batch]
        if len(trained) >= 90:
            break
    assert Counter(trained) == Counter(range(90))


def test_what_is_read_again_while_the_bus_is_away_is_the_same_on_all_ranks() -> None:
    """Rank 0 chooses it; no rank waits, and nothing of it is acknowledged."""
    crew = Crew(2, 96, 4)
    crew.fed.cut_off = True
    steps = [step for _, step in zip(range(12), crew.steps(), strict=False)]
    indices = [sorted(step[0] + step[1]) for step in steps]
    assert crew.fed.acknowledged < 8 * len(steps)
    assert [one._claimed for one in crew.batches] == [None, None]
    again = indices[6:]
    assert all(one in indices[:6] for one in again)


def test_ranks_that_read_otherwise_than_rank_0_are_refused() -> None:
    """As they begin: else they would train other indices than rank 0 acknowledges."""
    crew = Crew(2, 96, 4)
    crew.told[0].notify(crew.asked, crew.fed.first, crew.fed.first.shard)
    heard = FollowingShards(crew.told[1], (96, SEED, 8, 1), lambda: None)
    with pytest.raises(UsageError, match=r"this rank uses length=96, seed=3, batch_size=8.*rank 0 .*batch_size=4"):
        heard.first(lambda: None)


def test_a_rank_that_waits_for_rank_0_says_so_and_hears_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that draws further ahead than rank 0's would wait for ever without a word."""
    monkeypatch.setattr(shard_broadcast, "LOOK_S", 0.001)
    monkeypatch.setattr(shard_broadcast, "PATIENCE_S", 0.01)

    def check() -> None:
        if logs:
            raise RankGone("rank 0 is gone")

    with structlog.testing.capture_logs() as logs, pytest.raises(RankGone):
        FollowingShards(Crew(2, 96, 4).told[1], (96, SEED, 4, 1), check).after(None)
    assert [one["event"] for one in logs] == ["batches_awaited"]


def test_a_rank_that_rank_0_never_follows_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training: with what to change. Before, rank 0 may itself wait for the run's first shard, however long."""
    monkeypatch.setattr(shard_broadcast, "LOOK_S", 0.001)
    monkeypatch.setattr(shard_broadcast, "PATIENCE_S", 0.01)
    monkeypatch.setattr(shard_broadcast, "GIVES_UP_S", 0.05)
    crew = Crew(2, 96, 4)
    heard, began = FollowingShards(crew.told[1], crew.asked, lambda: None), time.monotonic()
    with pytest.raises(UsageError, match=r"rank 0 did not draw .* same num_workers and prefetch_factor"):
        heard.after(None)

    def stop() -> None:
        if time.monotonic() > began + 0.5:
            raise Stopped(15)

    with pytest.raises(Stopped):
        heard.first(stop)


def test_a_rank_may_be_ended_before_it_trains_and_later_at_a_step_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for its first shard; in training SIGTERM to one rank ends all of them after the same step."""
    monkeypatch.setattr(shard_broadcast, "LOOK_S", 0.001)
    looked = list[int]()

    def stop() -> None:
        raise Stopped(15)

    crew = Crew(2, 96, 4)
    heard = FollowingShards(crew.told[1], crew.asked, lambda: looked.append(1))
    with pytest.raises(Stopped):
        heard.first(stop)
    late = threading.Timer(0.1, crew.told[0].notify, [crew.asked, crew.fed.first, crew.fed.first.shard])
    late.start()
    assert heard.after(None) == (crew.fed.first, crew.fed.first.shard)
    assert looked
    late.join()


def test_who_would_divide_the_batches_once_more_is_refused() -> None:
    """As Accelerate's `prepare`, which asks for the size: each rank would let go by what the others have not got."""
    crew = Crew(2, 96, 4)
    with pytest.raises(UsageError, match=r"do not pass its loader to accelerator\.prepare"):
        getattr(crew.batches[1], "batch_size", None)
    assert Fed(96, 4).sampler.batch_size == 4


@pytest.mark.redis
@pytest.mark.slow
def test_ranks_and_one_process_read_one_queue(tmp_path: Path) -> None:
    """DDP, FSDP2 and tensor parallelism of two ranks beside a plain learner: all indices as often, the rest is on the
    queue. Ranks that divide layers read the same."""
    length = 203
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=60_000) as party:
        kinds = {"ddp": ("pair", 2), "fsdp": ("shard", 2), "tp": ("half", 2), "plain": ("one", 1)}
        started = [
            process
            for kind, (name, ranks) in kinds.items()
            for process in party.learner(kind, name, ranks, TEST_BATCHES=str(length))
        ]
        assert party.ended(*started) == [0] * 7, party.shown()
        rows = Counter[int]()
        for kind, (name, ranks) in kinds.items():
            steps = [party.said(f"{name}-{rank}", "rows") for rank in range(ranks)]
            assert len({len(one) for one in steps}) == 1, party.shown()
            if kind == "tp":
                assert steps[0] == steps[1], party.shown()
                steps = steps[:1]
            rows.update(int(row) for one in steps for line in one for row in line.split()[1:])
        left = on_queue(party.url, "ranks")
        assert rows.total() > 2 * length
        assert sum(rest for _, rest in left) == length * (1 + max(epoch for epoch, _ in left)) - rows.total()
        assert max(rows.values()) - min(rows[at] for at in range(length)) <= 1 + max(e for e, _ in left) - min(
            e for e, _ in left
        )
