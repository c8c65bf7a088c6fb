"""Begin to read data from the run's work queue, for a learner that has joined. Used by the training thread."""

import queue
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from functools import partial

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder
from diloco.workers.batches import Batches, NextShard, whole_number
from diloco.workers.checks.own_process import OwnIterator
from diloco.workers.exchange.work_queue import STEPS_PER_SHARD, ShardsInTurn, read_blocks
from diloco.workers.ranks.rank_learner import Joined, JoinedRank
from diloco.workers.ranks.shard_broadcast import FollowingShards, leading, loader_arguments
from diloco.workers.stopping import Stopping
from diloco.workers.times import TIMES

NowJoined = Callable[[], Joined]  # returns `Learner.joined`, or raises what that raises


def begin_blocks(now_joined: NowJoined, stopping: Stopping, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
    """Begin `Learner.blocks`."""
    joined, first = _first_shard(now_joined, stopping, DataOrder(length=total, seed=None), per_shard)
    finish = partial(joined.thread.call, joined.exchange.claims.finish)
    order = read_blocks(joined.shared, first, finish, random.Random(joined.training.incarnation))
    return OwnIterator("learner.blocks(...)", order)


def begin_batches(
    now_joined: NowJoined, stopping: Stopping, length: int, batch_size: int, seed: int, accumulate: int
) -> Batches:
    """Begin `Learner.batches`."""
    order = DataOrder(length=whole_number("length", length), seed=whole_number("seed", seed, 0))
    size, accumulate = whole_number("batch_size", batch_size), whole_number("accumulate", accumulate)
    joined = now_joined()
    place = joined.place[:2] if isinstance(joined, JoinedRank) else (0, 1)  # ranks that divide layers share one
    make = partial(Batches, order, size, accumulate, check=now_joined, place=place)
    asked = loader_arguments(order, size, accumulate)
    if isinstance(joined, JoinedRank) and joined.number:
        _check_first(joined)
        joined.shared.shards_wanted = order.length, 0
        heard = FollowingShards(joined.shard_broadcast, asked, now_joined)
        first = heard.first(partial(_check, now_joined, stopping))
        return make(first, joined.shared, drawn=_nothing, finished=_nothing, next_shard=heard.after)
    joined, first = _first_shard(now_joined, stopping, order, place[1] * size * accumulate * STEPS_PER_SHARD)
    after: NextShard = ShardsInTurn(joined.shared, random.Random(joined.training.incarnation)).after
    call, claims = joined.thread.call, joined.exchange.claims
    if isinstance(joined, JoinedRank):
        after = leading(after, first, partial(call, joined.shard_broadcast.notify, asked))
    return make(
        first, joined.shared, drawn=partial(call, claims.drawn), finished=partial(call, claims.finish), next_shard=after
    )


def _nothing(entry_id: str) -> None:
    """Do nothing, on ranks other than 0: rank 0 reports the learner's shards to the run."""


def _check(now_joined: NowJoined, stopping: Stopping) -> None:
    now_joined()
    stopping.leave_if_asked()


def _check_first(joined: Joined) -> None:
    if joined.shared.shards_wanted is not None:
        raise UsageError(
            "the learner is already reading its data: call batches() or blocks() only once, and use the result for "
            "all loaders and epochs"
        )


def _first_shard(
    now_joined: NowJoined, stopping: Stopping, order: DataOrder, per_shard: int
) -> tuple[Joined, ClaimedShard]:
    """Agree with the run on what its shards refer to, and wait until one is claimed.

    Args:
        now_joined: returns the learner, which has not read yet; called repeatedly while this waits.
        stopping: tells whether the process should end.
        order: this learner's proposal.
        per_shard: blocks in a shard, if this learner queues an epoch.

    Raises:
        SpecMismatch: the run has another order.
        UsageError: the learner reads its data already, or is not in its run.
        Stopped: a signal came.
    """
    check, joined = partial(_check, now_joined, stopping), now_joined()
    _check_first(joined)
    claims, retry = joined.exchange.claims, joined.exchange.member.outages.retry
    agreed = joined.thread.ask(retry(claims.agree, order))
    while not wait({agreed}, TIMES.check_s).done:
        check()
    try:
        agreed.result()
    except CancelledError:  # the exchange thread has ended meanwhile: `now_joined` raises its error
        joined.thread.join()
        now_joined()
        raise
    joined.shared.shards_wanted = (order.length, per_shard)
    joined.thread.call(claims.want)
    while True:
        with suppress(queue.Empty):
            first = joined.shared.shards.get(timeout=TIMES.check_s)
            break
        check()
    if not joined.training.rounds.steps:
        joined.training.times.training_begins(time.perf_counter())
    return joined, first
