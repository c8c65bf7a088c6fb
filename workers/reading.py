"""How a joined learner begins to read its data from the run's work queue. The training thread's."""

import queue
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from functools import partial

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder
from diloco.workers.batches import Batches, whole_number
from diloco.workers.checks.own_process import OwnIterator
from diloco.workers.exchange.exchange_thread import JoinedLearner
from diloco.workers.exchange.work_queue import STEPS_PER_SHARD, read_blocks
from diloco.workers.stopping import Stopping

NowJoined = Callable[[], JoinedLearner]
"""`Learner.joined`; raises where it does."""

LOOK_S = 0.2


def begin_blocks(now_joined: NowJoined, stopping: Stopping, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
    """`Learner.blocks`."""
    joined, first = _first_shard(now_joined, stopping, DataOrder(length=total, seed=None), per_shard)
    finish = partial(joined.thread.call, joined.exchange.claims.finish)
    order = read_blocks(joined.shared, first, finish, random.Random(joined.training.incarnation))
    return OwnIterator("learner.blocks(...)", order)


def begin_batches(
    now_joined: NowJoined, stopping: Stopping, length: int, batch_size: int, seed: int, accumulate: int
) -> Batches:
    """`Learner.batches`."""
    order = DataOrder(length=whole_number("length", length), seed=whole_number("seed", seed, 0))
    size, accumulate = whole_number("batch_size", batch_size), whole_number("accumulate", accumulate)
    joined, first = _first_shard(now_joined, stopping, order, size * accumulate * STEPS_PER_SHARD)
    call, claims = joined.thread.call, joined.exchange.claims
    return Batches(
        order,
        size,
        accumulate,
        first,
        joined.shared,
        drawn=partial(call, claims.drawn),
        finished=partial(call, claims.finish),
        chance=random.Random(joined.training.incarnation),
        check=now_joined,
    )


def _first_shard(
    now_joined: NowJoined, stopping: Stopping, order: DataOrder, per_shard: int
) -> tuple[JoinedLearner, ClaimedShard]:
    """Agree with the run on what its shards are of, and wait until one is claimed.

    Args:
        now_joined: the learner, which has not read yet; asked while this waits.
        stopping: whether its process is to end.
        order: as this learner would have it.
        per_shard: blocks in a shard, where this learner queues an epoch.

    Raises:
        SpecMismatch: the run has another order.
        UsageError: the learner reads its data already, or is not in its run.
        Stopped: a signal came.
    """

    def check() -> None:
        now_joined()
        stopping.leave_if_asked()

    joined = now_joined()
    if joined.together and order.seed is not None:
        raise UsageError(
            "a learner of several ranks cannot read batches from the run's work queue, whose shards are not divided "
            "among ranks: give each rank its own rows, such as by a DistributedSampler"
        )
    if joined.shared.shards_wanted is not None:
        raise UsageError(
            "the learner reads its data already: call batches() or blocks() once; another loader and another epoch "
            "take the same one"
        )
    claims, retry = joined.exchange.claims, joined.exchange.member.outages.retry
    agreed = joined.thread.ask(retry(claims.agree, order))
    while not wait({agreed}, LOOK_S).done:
        check()
    try:
        agreed.result()
    except CancelledError:  # the learner's thread has ended meanwhile: its error says why
        joined.thread.join()
        now_joined()
        raise
    joined.shared.shards_wanted = (order.length, per_shard)
    joined.thread.call(claims.want)
    while True:
        with suppress(queue.Empty):
            first = joined.shared.shards.get(timeout=LOOK_S)
            break
        check()
    if not joined.training.rounds.steps:
        joined.training.times.training_begins(time.perf_counter())
    return joined, first
