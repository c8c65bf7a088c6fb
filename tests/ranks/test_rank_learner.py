"""What a rank does at which step, with a learner of one rank: no threads, no connections."""

import asyncio
import itertools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.exchange.shared import Shared
from diloco.workers.moments.recovery import FoundMoments
from diloco.workers.ranks.placement import Block, Shares
from diloco.workers.ranks.rank_carrier import InFlight, SnapshotRequests
from diloco.workers.ranks.rank_learner import JoinedRank, Rank
from diloco.workers.ranks.step_agreement import DataPlace
from diloco.workers.rounds import Base, OpenWindow, Publication, Rounds
from diloco.workers.stopping import Stopping
from tests import HANGING_S, samples

TENSOR = samples.tensor("t", (2,), rule="mean")


class Alone:
    """Sums over one rank."""

    rank, place = 0, DataPlace(0, 1, 0)

    def start_sum(self, numbers: Sequence[int]) -> Any:
        """It is there at once."""
        return SimpleNamespace(done=True, wait=lambda within_s=None: list(numbers))

    def broadcast(self, source: int, elements: int, make: Callable[[], Any]) -> Any:
        """It has it."""
        return make()


class NoTransport:
    """Of one rank, which hears at once."""

    ranks = 1

    def handle(self, **handlers: Any) -> None:
        """What it hears."""
        self._handlers = handlers

    def notify(self, rank: int, what: str, *said: Any) -> None:
        """It does it."""
        asyncio.run(self._handlers[what](rank, *said))


def learner(interval: int, told: list[tuple[Publication, int]], sums: Alone | None = None) -> JoinedRank:
    """Rank 0 of one that has adopted version 3; what it publishes is told, with the step of its snapshot."""
    layout = layout_of((TENSOR,))
    rounds = Rounds(layout, SyncSettings(fragments=1, sync_interval=interval, first_interval=0).sync_spec())
    parameters = SimpleNamespace(overwrite=lambda p, own: None, snapshot=lambda p: SimpleNamespace(numpy=None))
    shared = Shared()
    part: Any = SimpleNamespace(pulled={(0, 1): np.zeros(2)}, adopted=lambda p, number: None, send=lambda items: None)
    exchange = SimpleNamespace(publishing=SimpleNamespace(queue=lambda items, adopted: told.extend(items)))
    rank: Any = SimpleNamespace(
        transfers=part,
        shared=shared,
        exchange=exchange,
        carrier=SimpleNamespace(adopted=lambda p, number: None),
        in_flight=InFlight([2], [0]),
        snapshot_requests=SnapshotRequests(NoTransport()),  # type: ignore[arg-type]
        when_done=lambda told, do: do(),
        late=False,
        begin={0: 1},
        bases={0: Base(0, 3, b"", 1)},
        exit_barrier=SimpleNamespace(steps=0),
        shard_broadcast=None,
    )
    training: Any = SimpleNamespace(rounds=rounds, layout=layout, parameters=parameters)
    thread: Any = SimpleNamespace(call=lambda what, *args: what(*args))
    return JoinedRank(training, rank, thread, sums or Alone(), Shares(layout, [{"t": Block(0, 2, 0, 1)}]), Stopping())


@pytest.mark.parametrize("interval", [3, 4, 24])
def test_a_snapshot_is_of_the_step_at_which_its_fragment_is_due(interval: int) -> None:
    """The interval is as long as for a learner of one process, though ranks agree some steps ahead."""
    told: list[tuple[Publication, int]] = []
    joined = learner(interval, told)
    joined.adopt()
    for _ in range(2 * interval + 3):
        joined.stepped(10)
    publication, step = told[0]
    first = interval + 1  # the first round of one who joins later has its fragment's turn on top
    assert (step, publication.steps, publication.tokens, publication.due) == (first, first, 10 * first, True)


def test_a_window_that_opens_is_followed_at_the_end_of_the_step() -> None:
    """As by a learner of one process: the exchange tells all ranks at once."""
    told: list[tuple[Publication, int]] = []
    joined = learner(24, told)
    joined.adopt()
    for _ in range(5):
        joined.stepped(10)
    joined.shared.windows[0] = OpenWindow(3, 0, member=False)
    joined.shared.window_seen()
    assert told == []
    joined.stepped(10)
    ((publication, taken),) = told
    assert taken == 6
    assert (publication.steps, publication.tokens, publication.due) == (6, 60, False)


def follower() -> Any:
    """A rank that rank 0 reports for, and its mutable inside."""
    joined: Any = learner(24, [])
    joined._rank.exchange = joined._rank.in_flight = joined._rank.carrier = None
    joined._rank.bases = {}
    joined._rank.transfers.training_idle = SimpleNamespace(set=lambda: None)
    joined.adopt()
    return joined


def test_a_rank_that_counts_nothing_keeps_nothing_of_its_steps() -> None:
    """However many there are: rank 0 alone counts what was done at each."""
    joined = follower()
    for _ in range(100):
        joined.stepped(10)
    assert joined._adopted == []
    assert joined.training.rounds.steps == 99


def test_ranks_save_their_moments_at_the_end_of_a_run_too() -> None:
    """As one process does: the learner may come back in a run that is resumed."""
    joined, saved = follower(), []
    joined.training.keeper = SimpleNamespace(close=lambda shared, save, within_s: saved.append(save))
    joined._rank.wait_for_goodbye = lambda within_s: True
    joined.thread.ask = joined.thread.left_in_order = lambda given: given
    joined.over = True
    assert joined.leave(1.0, True)
    assert saved == [True]


async def test_moments_of_which_another_rank_has_no_part_are_let_go_of() -> None:
    """They are of no use: all begin fresh."""
    moments: Any = np.zeros(2)
    seen, joined = weakref.ref(moments), Future[tuple[Any, FoundMoments]]()
    found = [FoundMoments("checkpoint", moments)]
    del moments

    async def find(*_: object) -> FoundMoments:
        return found.pop()

    transport, part = NoTransport(), SimpleNamespace(training_idle=asyncio.Event())
    training = SimpleNamespace(recovery=SimpleNamespace(find=find))
    given: Any = transport, part, training, Shared()
    rank = Rank(*given, joined)
    assert await rank._recover(0, [3], None) == "checkpoint"
    await rank._enter(0, "fresh", [])
    assert joined.result() == (rank, FoundMoments("fresh"))
    assert seen() is None


@pytest.mark.parametrize(("steps", "due"), [(7, False), (8, True), (12, True)])
def test_what_is_due_as_a_learner_leaves_may_open_a_window(steps: int, due: bool) -> None:
    """A snapshot that had to wait for another's upload is no less due for that; what is not due opens none."""
    sync = SyncSettings(fragments=1, sync_interval=8, first_interval=0).sync_spec()
    rounds = Rounds(layout_of((TENSOR,)), sync)
    for version in (3, 4):
        rounds.adopt(Base(0, version, b"", 1))
    for _ in range(steps):
        rounds.trained(10)
    (publication,) = rounds.last({}, due=False)
    assert (publication.steps, publication.due) == (steps, due)


class Late(Alone):
    """Sums that are there once `come` is set; which takes a moment, so that threads meet there."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.come.set()

    def start_sum(self, numbers: Sequence[int]) -> Any:
        """Of one rank."""

        def wait(within_s: float | None = None) -> list[int]:
            self.come.wait(HANGING_S)
            time.sleep(1e-3)
            return list(numbers)

        return SimpleNamespace(done=True, wait=wait)


def test_the_exchange_never_waits_for_a_sum_that_is_not_there() -> None:
    """The training thread does, beside the lock that both take: a window that opens meanwhile is seen at once."""
    joined = learner(24, [], sums := Late())
    joined.adopt()
    for _ in range(3):
        joined.stepped(10)
    sums.come.clear()
    training = threading.Thread(target=joined._settle)
    training.start()
    joined.shared.windows[0] = OpenWindow(3, 0, member=False)
    seen = threading.Thread(target=joined.shared.window_seen)
    seen.start()
    seen.join(HANGING_S)
    waited, trains = seen.is_alive(), training.is_alive()
    sums.come.set()
    training.join()
    seen.join()
    assert trains
    assert not waited


def race(locked: bool) -> bool:
    """Have two threads count the same steps, with something to be published at each; whether each was counted once."""
    interval_s = sys.getswitchinterval()
    told: list[tuple[Publication, int]] = []
    joined: Any = learner(24, told, Late())
    joined.adopt()
    if not locked:
        joined._lock = nullcontext()
    asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    joined.thread.call = lambda what, *given: asked.put(partial(what, *given))
    steps, attempts, errors = 200, itertools.count(), list[BaseException]()

    def exchange() -> None:
        try:
            while (do := asked.get()) is not None:
                do()
                joined._rank.in_flight.uploaded(0)
                joined.shared.windows[0] = OpenWindow(3, next(attempts), member=False)
                joined.shared.window_seen()
        except Exception as error:  # whatever half a count leads to
            errors.append(error)

    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=exchange, daemon=True)
    try:
        thread.start()
        asked.put(lambda: None)
        for _ in range(steps):
            joined.stepped(10)
        joined._settle()
    except Exception as error:
        errors.append(error)
    finally:
        sys.setswitchinterval(interval_s)
    asked.put(None)
    thread.join(HANGING_S)
    assert not thread.is_alive()
    rounds = joined.training.rounds
    of_their_steps = all((one.steps, one.tokens) == (step, 10 * step) for one, step in told)
    in_order = [one.serial for one, _ in told] == list(range(1, len(told) + 1))
    met = len(told) > 10
    return met and (rounds.steps, rounds.tokens) == (steps, 10 * steps) and of_their_steps and in_order and not errors


def test_two_threads_count_each_step_once() -> None:
    """The training thread as it settles a step, the exchange's as that step's sum is there; without the lock, twice."""
    assert race(locked=True)
    assert not all(race(locked=False) for _ in range(10))
