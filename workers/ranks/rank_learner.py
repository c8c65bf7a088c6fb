"""A rank of a learner in its run: what its training thread does at each step and when it leaves (`JoinedRank`), and its
exchange thread, in particular how that ends after another rank is gone (`RankThread`).
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog
from typing_extensions import override

from diloco.pipeline.errors import RankGone, UsageError
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.waiting import in_background
from diloco.workers.background import OwnThread
from diloco.workers.encoding import Float32
from diloco.workers.exchange import redis_access
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.exchange_thread import ExchangeThread
from diloco.workers.joined import JoinedLearner, Read, is_over, progress_of
from diloco.workers.moments.recovery import FoundMoments
from diloco.workers.parameters import FragmentParameters
from diloco.workers.ranks.gather import Samples, TakeSnapshot, own_values, sample_layout
from diloco.workers.ranks.placement import Shares
from diloco.workers.ranks.rank_carrier import SnapshotAt
from diloco.workers.ranks.rank_exchange import GOODBYE_S, Rank, RankExchange
from diloco.workers.ranks.shutdown import RankStopping, hang_limit_s
from diloco.workers.ranks.step_agreement import Collectives, Decisions, StepSum, Sum, decode, encode
from diloco.workers.ranks.topology import RankGroup
from diloco.workers.ranks.transport import Transport
from diloco.workers.rounds import Base, Publication
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training


@dataclass(slots=True)
class _Step:
    """A step that this rank has trained and other ranks may still be training."""

    number: int
    total: Sum
    taken: Mapping[int, "_Taken"]
    adopted: list[Base]
    """The bases adopted at the end of the step; only at rank 0."""
    agreed: StepSum | None = None
    """The decoded sum, once the step is counted."""


class _Taken(NamedTuple):
    """A snapshot of a fragment that grants a request."""

    request: int
    snapshot: TakeSnapshot | None
    """None if this rank has nothing to send of the fragment."""


class JoinedRank:
    """A rank of a learner in its run. For the training thread."""

    def __init__(
        self,
        training: Training,
        rank: Rank,
        thread: ExchangeThread[object],
        group: Collectives,
        shares: Shares,
        stopping: Stopping,
        samples: Samples | None = None,
    ) -> None:
        """samples: copies rows that all ranks hold alike, for comparison; None if there are none."""
        self.training, self.thread, self.shared = training, thread, rank.shared
        self._rank, self._group, self._shares, self._stopping = rank, group, shares, stopping
        self.number, self.place = group.rank, group.place
        self._samples, self.shard_broadcast = samples, rank.shard_broadcast
        self.late = self.over = rank.late
        """`over` is True if the run was over in the last settled sum; the same on all ranks at the same step."""
        self.progress = 0.0
        """The run's progress in the last settled sum; the same on all ranks at the same step."""
        self._steps = 0
        self._step: _Step | None = None
        """The last step, until its sum is settled."""
        self._adopted: list[Base] = []
        """The bases adopted at this step. This and the next one are used only at rank 0."""
        self._bases: dict[int, Base] = {}
        """Maps a fragment to the base that is decided on but not adopted yet."""
        self._lock = threading.Lock()
        """Guards what is counted: the exchange thread counts a step too, if it has waited for the step's sum."""
        self._counted = 0
        """Number of steps counted."""
        if self._rank.exchange is not None:
            self.shared.window_seen = self._request_due

    @property
    def exchange(self) -> Exchange[SnapshotAt]:
        """The learner's exchange, which rank 0 has.

        Raises:
            UsageError: this is another rank.
        """
        if self._rank.exchange is None:
            raise UsageError(
                "only rank 0 has the learner's exchange and reads its work queue; this is a different rank"
            )
        return self._rank.exchange

    def newest(self, read: Read) -> list[Float32]:
        """Return this rank's shards of the newest globals.

        Each fragment's server reads it and broadcasts it, so that all ranks have the same versions.
        """
        own = []
        for fragment in self._shares.layout.fragments:
            reader = self._shares.servers[fragment.id]
            whole = self._group.broadcast(reader, fragment.elements, partial(self._whole, read, fragment.id))
            own.append(own_values(whole, self._shares.pieces(self.number, fragment.id)))
        return own

    @staticmethod
    def _whole(read: Read, p: int) -> Float32:
        (flat,) = read([p])
        return flat

    # --- a step -------------------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Adopt what training begins with."""
        for p, number in sorted(self._rank.begin.items()):
            self._adopt(p, number)
        for base in self._rank.bases.values():
            self.training.rounds.adopt(base)
        self._compare()
        return True

    def hand_over(self, publications: Iterable[Publication], adopted: bool) -> None:
        """Tell the exchange what was adopted when training begins."""
        if self._rank.exchange is not None:
            self.thread.call(self._queue, [], adopted)

    def stepped(self, tokens: int) -> int:
        """Count a step of `tokens` on this rank; return the tokens that all ranks trained in the step before.

        Ranks that train on the same data (`DataPlace`) are counted once.

        The result lags by one step, because a step's sum runs concurrently with the next step.
        """
        requests = self._rank.snapshot_requests
        newest = requests.newest  # read first: a request that arrives from now on is for the next step
        self._rank.exit_barrier.steps = self._steps = self._steps + 1
        self._compare()
        before, decided = self._settle(), self._decide()
        taken = {p: _Taken(request, self._own_snapshot(p)) for p, request in requests.ungranted(newest)}
        fragments, stop = len(self.training.layout.fragments), self._stopping.heard > 0
        counted = tokens if self.place.first == self.number else 0
        total = self._group.start_sum(encode(counted, stop, fragments, taken, decided))
        self._step = step = _Step(self._steps, total, taken, self._adopted)
        self._adopted = []
        if taken:
            self.thread.call(self._rank.when_done, total, partial(self._count, step))
        return before

    def _compare(self) -> None:
        """Compare the replicas from time to time. Call this before anything is adopted at the step."""
        if self._samples is not None and (both := self._samples.stepped(self._steps)) is not None:
            self.thread.call(self._rank.replicas.compare, self._steps, *both)

    def _decide(self) -> Decisions:
        in_flight, shared = self._rank.in_flight, self.shared
        if in_flight is None:
            return Decisions()
        adoptions = in_flight.adopt(list(shared.adoptions))  # a copy: the exchange thread adds to it meanwhile
        bases = {p: shared.adoptions.pop(p) for p in adoptions}
        self._bases |= bases
        self._request_due()
        values = {p: base.values for p, base in bases.items()}
        return Decisions(is_over(shared.state), progress_of(shared.state), values)

    def _request_due(self) -> None:
        """Request snapshots of the fragments to publish. The exchange thread calls this too, when it sees a window
        open."""
        rounds, shared, in_flight = self.training.rounds, self.shared, self._rank.in_flight
        assert in_flight is not None  # noqa: S101  # it is rank 0
        with self._lock:
            due = rounds.wanted(shared.windows, shared.uploaded, self._steps + 1 - self._counted)
            wanted = in_flight.snapshot([p for p in due if p not in shared.adoptions])
        if wanted:
            self.thread.call(self._rank.snapshot_requests.make, wanted)

    def _settle(self, within_s: float | None = None) -> int:
        """Read the last step's sum and carry out what it says; return the tokens of that step, 0 if there is none."""
        if (step := self._step) is None:
            return 0
        self._step = None
        # Wait outside the lock: otherwise the exchange thread, which counts only complete sums, would block on it.
        step.total.wait(within_s)
        agreed = self._count(step)
        for p, number in sorted(agreed.decided.adoptions.items()):
            self._adopt(p, number)
            if p in self._bases:
                self._adopted.append(self._bases.pop(p))
        self.progress, self.over = agreed.decided.progress, self.over or agreed.decided.over
        if agreed.stop:
            self._stopping.agree()
        return agreed.tokens

    def _adopt(self, p: int, number: int) -> None:
        if (own := self._rank.transfers.pulled.pop((p, number))) is not None:
            self.training.parameters.overwrite(p, own)
        self.thread.call(self._rank.transfers.adopted, p, number)
        if self._rank.carrier is not None:
            self.thread.call(self._rank.carrier.adopted, p, number)

    def _own_snapshot(self, p: int) -> TakeSnapshot | None:
        sent = self._shares.sent(self.number, p)
        return self.training.parameters.snapshot(p).numpy if sent else None

    def _count(self, step: _Step) -> StepSum:
        """Count a step whose sum is complete, and send its snapshots. Both threads call this; only the first call
        counts."""
        with self._lock:
            if step.agreed is None:
                step.agreed = decode(step.total.wait(), self._shares.ranks)
                self._count_agreed(step, step.agreed)
            return step.agreed

    def _count_agreed(self, step: _Step, agreed: StepSum) -> None:
        self._counted = step.number
        self.training.rounds.in_part(self.shared.state)
        self.training.rounds.trained(agreed.tokens)
        items = []
        for p in sorted(agreed.snapshots):
            taken = step.taken[p]
            self._rank.snapshot_requests.granted(p, taken.request)
            items.append((p, step.number, taken.snapshot))
        if items:
            self.thread.call(self._rank.transfers.send, items)
        if self._rank.exchange is not None:  # only rank 0 publishes
            self._publish(step, agreed)
        step.taken = {}  # each snapshot was sent or was taken too early: release the memory

    def _publish(self, step: _Step, agreed: StepSum) -> None:
        """Count the adoptions and snapshots at a step's end, and let the exchange publish. Only at rank 0."""
        rounds, shared, rank = self.training.rounds, self.shared, self._rank
        assert rank.in_flight is not None  # noqa: S101  # it is rank 0
        for base in step.adopted:
            rounds.adopt(base)
        if shared.offer_again:
            shared.offer_again = False
            rounds.offer_again()
        items = [(rounds.publication(p, shared.windows), step.number) for p in sorted(agreed.snapshots)]
        rank.in_flight.counted([*agreed.snapshots, *(base.fragment for base in step.adopted)])
        if items or step.adopted:
            self.thread.call(self._queue, items, bool(step.adopted))

    def _queue(self, items: Iterable[tuple[Publication, SnapshotAt]], adopted: bool) -> None:
        """Publish; runs in the exchange's thread of rank 0."""
        self.exchange.publishing.queue(items, adopted)

    # --- leaving ------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> bool:
        """Tell the other ranks to stop, and why. Always True: a rank cannot leave alone, so `leave` is skipped."""
        why = f"rank {self.number} of this learner left its loop at step {self._steps + 1} by {error!r:.300}"
        with suppress(CancelledError):
            self.thread.result_of(self.thread.ask(self._rank.break_off(error, why)))
        return True

    def leave(self, within_s: float, save_state: bool) -> bool:
        """Leave the run; all ranks call this after the same step.

        Raises:
            RankGone: the ranks do not leave together.
        """
        training, rank = self.training, self._rank
        self._settle(within_s + GOODBYE_S)
        with self._lock:
            for base in self._adopted:
                training.rounds.adopt(base)
            if rank.in_flight is not None:
                rank.in_flight.counted(base.fragment for base in self._adopted)
                rank.in_flight.leave()
            last = list(training.rounds.last(self.shared.windows, due=self.over)) if rank.exchange is not None else []
        # From here on this thread trains no more, so that the exchange thread may take snapshots itself.
        self.thread.call(rank.transfers.training_idle.set)
        if rank.exchange is None:
            leaving = self.thread.ask(rank.wait_for_goodbye(2 * within_s + GOODBYE_S))
        else:
            for publication in last:
                self.thread.call(self._queue, [(publication, None)], False)
            leaving = self.thread.ask(self._leave_all(rank.exchange, within_s))
        training.keeper.close(self.shared, save_state, within_s)
        return self.thread.left_in_order(leaving)

    def forget(self) -> None:
        """Release what the other ranks have sent, once the thread has ended."""
        self._rank.transfers.forget()

    async def _leave_all(self, exchange: Exchange[SnapshotAt], within_s: float) -> bool:
        await self._rank.exit_barrier.wait_for_all()
        in_order = await exchange.leave(within_s)
        await self._rank.send_goodbye(in_order)
        return in_order


# A learner in its run, as its training thread uses it: one process, or one of its ranks.
Joined = JoinedLearner | JoinedRank

# Seconds that aborting the collectives in flight may take.
ABORT_S = 2.0


class RankThread(ExchangeThread[Rank]):
    """The exchange thread of one rank."""

    def __init__(
        self, url: str, run: str, training: Training, group: RankGroup, shares: Shares, stopping: RankStopping
    ) -> None:
        super().__init__(url, run, training)
        self._group, self._shares, self._stopping = group, shares, stopping
        self._log = structlog.get_logger().bind(learner=training.learner, rank=group.rank)
        self._noticed = threading.Event()
        self._aborting = OwnThread("abort", group.abort)
        self._exchange: RankExchange | None = None
        stopping.step_s, stopping.report = lambda: training.times.step_s, self._report_end

    def join_run(self, check: Callable[[], None]) -> tuple[JoinedRank, FoundMoments]:
        """Join, as `ExchangeThread.start` does; return the joined rank and the moments found."""
        rank, found = self.start(check)
        parameters, layout = self._training.parameters, sample_layout(self._shares)
        assert isinstance(parameters, FragmentParameters)  # noqa: S101  # ranks are torch's
        samples = None if layout is None else Samples(parameters, layout)
        given = self._group, self._shares, self._stopping, samples
        return JoinedRank(self._training, rank, self, *given), found

    @override
    def notice(self) -> None:
        self._noticed.set()

    def _report_end(self, why: str, within_s: float) -> str:
        """Implement `RankStopping.report`; also wait, within the same time, for a save of the moments in progress."""
        until_s = time.monotonic() + within_s
        try:
            if self._exchange is not None and self.works:
                return self.ask(self._exchange.report_end(why, within_s)).result(within_s + 1)
            return why
        finally:
            while self._training.keeper.saves and time.monotonic() < until_s:
                time.sleep(0.05)

    def join(self) -> None:
        """Wait a while for the thread; a learner that has not left leaks its groups first (`RankGroup.leak_groups`)."""
        self.notice()
        if not self.left:
            self._group.leak_groups()
        super().join()
        if self._aborting.ident is not None:  # a thread inside torch would crash Python's shutdown
            self._aborting.join(ABORT_S)

    def _work(self) -> None:
        super()._work()
        for connection in self._group.connections.values():  # the thread may have failed before it used them
            connection.close()
        if self.failure is None:
            return
        if isinstance(self.failure, RankGone):
            self._log.error("rank_gone", detail=str(self.failure))
        # The other ranks end too. The training thread may be waiting for one of them in a collective: forever with
        # gloo, which hears of a dead rank only where it exchanges with that very rank, or until the group's timeout,
        # which is long. First abort the collectives (in a thread, since an abort may block), then end the process if
        # training does not notice.
        self._group.leak_groups()
        self._aborting.start()
        within_s = hang_limit_s(self._training.times.step_s)
        if not self._noticed.wait(within_s):
            detail = (
                f"{self.failure}; no step in {within_s:.3g} s: training might wait forever, so the process is stopping"
            )
            self._log.error("rank_ended", detail=detail)
            os._exit(AGAIN_STATUS)

    async def _join_and_work(self) -> None:
        group, training = self._group, self._training
        bus, scripts = await redis_access.reach(self._url, self._run_name, training.learner)
        try:
            transport = Transport.over(group.rank, group.connections)
            given = bus, bus.clock, transport, training, self._shares, self._joined
            self._exchange = RankExchange(*given, abandoned=lambda: self._abandoned)
            async with in_background(scripts.watch()):
                await self._exchange.work()
        finally:
            await bus.close()
