"""A rank of a learner in its run: what its training thread does at each step, and when it leaves (`step_agreement`)."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from typing_extensions import override

from diloco.pipeline.errors import RankGone, UsageError
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.payload import codec
from diloco.workers.exchange.exchange import Exchange
from diloco.workers.exchange.exchange_thread import ExchangeThread, JoinedLearner, Read
from diloco.workers.exchange.shared import Shared
from diloco.workers.moments.recovery import Found, Source
from diloco.workers.ranks.exit_barrier import Parting
from diloco.workers.ranks.gather import Float32, Part, Snapshot, own_of
from diloco.workers.ranks.inflight import UnderWay
from diloco.workers.ranks.rank_carrier import RanksCarrier
from diloco.workers.ranks.replicas import Replicas, Samples
from diloco.workers.ranks.row_ranges import Shares
from diloco.workers.ranks.shard_broadcast import ShardsTold
from diloco.workers.ranks.snapshot_requests import Wishes
from diloco.workers.ranks.step_agreement import Agreed, Decided, Meets, Sum, numbers, read
from diloco.workers.ranks.wires import TOLD_S, Wires
from diloco.workers.rounds import Base, Publication
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training

# Seconds beyond the time allowed for leaving (`within_s`) until the ranks give up on one that has not come to leave.
BYE_S = 30.0
# Seconds. When a rank dies, a collective may fail before its connections report it, so wait this long for the cause.
CAUSE_S = 2.0
# Seconds between two polls of a sum in flight: the first interval, and the longest to which it grows.
LOOKS_S = 0.001, 0.02


class Rank:
    """A rank's side in its exchange thread."""

    def __init__(
        self,
        wires: Wires,
        part: Part,
        training: Training,
        shared: Shared,
        joined: "Future[tuple[Any, Found]]",
        exchange: Exchange | None = None,
        carrier: RanksCarrier | None = None,
        under_way: UnderWay | None = None,
    ) -> None:
        """exchange, carrier, under_way: only at rank 0. joined: receives this rank and the first moments."""
        self.part, self.shared, self.exchange, self.under_way = part, shared, exchange, under_way
        self.carrier = carrier
        self._wires, self._training, self._joined = wires, training, joined
        self._found = Found("start")
        self.begin: Mapping[int, int] = {}
        """Maps a fragment to the number of the global that training begins with."""
        self.bases: dict[int, Base] = {}
        """The bases behind `begin`; filled only at rank 0."""
        self.late = False
        """True if the run was already over when all had joined."""
        self.wishes, self.parting, self.shards_told = Wishes(wires), Parting(wires), ShardsTold(wires)
        self.replicas = Replicas(wires)
        self._left_in_order: bool | None = None
        """True if the learner left in order, False if not, None until it has left."""
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wires.handle(recover=self._recover, know=self._know, enter=self._enter, bye=self._take_bye, go=self._go)

    def begin_with(self) -> list[tuple[int, int]]:
        """Take the adoptions that training begins with; return (fragment, number) of each. Only at rank 0."""
        adoptions = self.shared.adoptions
        self.bases = {p: adoptions.pop(p) for p in sorted(adoptions)}
        return [(p, base.values) for p, base in self.bases.items()]

    async def _recover(self, _: int, versions: list[int], encoded: bytes | None) -> Source:
        state = None if encoded is None else codec.decode(RunState, encoded)
        self.late = state is not None and state.phase is not Phase.RUNNING
        if self.exchange is None:
            self.shared.state = state
        self._found = await self._training.recovery.find(None, tuple(versions), state)
        return self._found.source

    async def _know(self, _: int, encoded: bytes) -> None:
        self.shared.state = codec.decode(RunState, encoded)

    async def _enter(self, _: int, source: Source, begin: list[tuple[int, int]]) -> None:
        self.begin = dict(begin)
        self.part.still.clear()
        if self._found.source != source:
            self._found = Found(source)
        self._joined.set_result((self, self._found))

    def once_there(self, told: Sum, do: Callable[[], object]) -> None:
        """Call `do` as soon as a sum is complete."""
        self._wires.go_on(self._once_there(told, do))

    @staticmethod
    async def _once_there(told: Sum, do: Callable[[], object]) -> None:
        pause_s, most_s = LOOKS_S
        while not told.there:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, most_s)
        do()

    async def break_off(self, error: BaseException, why: str) -> None:
        """Make all other ranks end because this rank's loop has failed, perhaps because another rank is gone."""
        if isinstance(error, (RuntimeError, RankGone)) and await self._wires.cause(CAUSE_S):
            # The cause is another rank, and this thread ends and reports it: usually before this sleep is over.
            await asyncio.sleep(CAUSE_S + TOLD_S)
        else:
            await self._wires.end(why)

    async def say_bye(self, in_order: bool) -> None:
        """Tell all ranks that the learner has left. Only at rank 0."""
        # Two rounds: all ranks must know before the first one goes, or the rest would take it for a dead rank.
        ranks = range(self._wires.ranks)
        await asyncio.gather(*(self._wires.ask(rank, "bye", in_order) for rank in ranks))
        gone = await asyncio.gather(*(self._wires.ask(rank, "go") for rank in ranks), return_exceptions=True)
        for error in gone:
            if isinstance(error, BaseException) and not isinstance(error, RankGone):
                raise error

    async def _take_bye(self, _: int, in_order: bool) -> None:
        self._wires.leaving, self._left_in_order = True, in_order

    async def _go(self, _: int) -> None:
        self._gone.set_result(None)

    async def hear_bye(self, within_s: float) -> bool:
        """Wait for rank 0's goodbye; return whether the learner left in order.

        Raises:
            RankGone: the goodbye did not come in time, or a rank has not left its loop.
        """
        await self.parting.all_leave()
        lost = asyncio.create_task(self._wires.until_gone(0))
        try:
            async with asyncio.timeout(within_s):
                await asyncio.wait({self._gone, lost}, return_when=asyncio.FIRST_COMPLETED)
                if self._left_in_order is None:  # rank 0 was lost before its goodbye: the wires end this thread
                    await self._gone
        except TimeoutError:
            raise RankGone("rank 0 of this learner has not left in time") from None
        finally:
            lost.cancel()
        return bool(self._left_in_order)


@dataclass(slots=True)
class _Step:
    """A step that this rank has trained and other ranks may still be training."""

    number: int
    told: Sum
    taken: Mapping[int, "_Taken"]
    adopted: list[Base]
    """The bases adopted at the end of the step; only at rank 0."""
    agreed: Agreed | None = None
    """The decoded sum, once the step is counted."""


class _Taken(NamedTuple):
    """A snapshot of a fragment that grants a wish."""

    wish: int
    server: int
    snapshot: Snapshot | None
    """None if this rank has nothing to send of the fragment."""


class JoinedRank(JoinedLearner):
    """A rank of a learner in its run. For the training thread."""

    def __init__(
        self,
        training: Training,
        rank: Rank,
        thread: ExchangeThread,
        meeting: Meets,
        shares: Shares,
        stopping: Stopping,
        samples: Samples | None = None,
    ) -> None:
        """samples: copies rows that all ranks hold alike, for comparison; None if there are none."""
        self.training, self.thread, self.shared = training, thread, rank.shared
        self._rank, self._meeting, self._shares, self._stopping = rank, meeting, shares, stopping
        self._number, self.place = meeting.rank, (meeting.rank, shares.ranks)
        """(number of this rank, number of ranks)."""
        self._samples, self.shards_told = samples, rank.shards_told
        self.late = self._over = rank.late
        self._progress = 0.0
        self._steps = 0
        self._step: _Step | None = None
        """The last step, until its sum is settled."""
        self._servers: dict[int, int] = {}
        """Maps a fragment to the rank that has the base of what was adopted."""
        self._adopted: list[Base] = []
        """The bases adopted at this step. This and the next one are used only at rank 0."""
        self._bases: dict[int, Base] = {}
        """Maps a fragment to the base that is decided on but not adopted yet."""
        self._lock = threading.Lock()
        """Guards what is counted: the exchange thread counts a step too, if it has waited for the step's sum."""
        self._counted = 0
        """Number of steps counted."""
        if self._rank.exchange is not None:
            self.shared.window_seen = self._want_due

    @property
    def exchange(self) -> Exchange:
        """The learner's exchange, which rank 0 has.

        Raises:
            UsageError: this is another rank.
        """
        if self._rank.exchange is None:
            raise UsageError("only rank 0 has the learner's exchange and reads its work queue; this is another rank")
        return self._rank.exchange

    @property
    def over(self) -> bool:
        """True if the run was over in the last settled sum; the same on all ranks at the same step."""
        return self._over

    @property
    def progress(self) -> float:
        """The run's progress in the last settled sum; the same on all ranks at the same step."""
        return self._progress

    def ended(self, stopping: Stopping) -> bool:
        """Return whether the loop is to be left; all ranks return the same at the same step."""
        return stopping.asked or self._over

    def newest(self, read: Read) -> list[Float32]:
        """Return this rank's shards of the newest globals.

        The ranks take turns in reading fragments and broadcast them, so that all have the same versions.
        """
        own = []
        for fragment in self._shares.layout.fragments:
            reader = fragment.id % self._shares.ranks
            whole = self._meeting.hand_round(reader, fragment.elements, partial(self._whole, read, fragment.id))
            own.append(own_of(whole, self._shares.pieces(self._number, fragment.id)))
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
            self.thread.call(self._told, [], adopted)

    def stepped(self, tokens: int) -> int:
        """Count a step of `tokens` on this rank; return the tokens that all ranks trained in the step before.

        The result lags by one step, because a step's sum runs beside the next step.
        """
        wishes = self._rank.wishes
        heard = wishes.heard  # read first: a wish that arrives from now on is for the next step
        self._rank.parting.steps = self._steps = self._steps + 1
        self._compare()
        before, decided = self._settle(), self._decide()
        taken = {p: _Taken(wish, self._servers[p], self._own_snapshot(p)) for p, wish in wishes.open(heard)}
        fragments, stop = len(self.training.layout.fragments), self._stopping.heard > 0
        told = self._meeting.start_sum(numbers(tokens, stop, fragments, taken, decided))
        self._step = step = _Step(self._steps, told, taken, self._adopted)
        self._adopted = []
        if taken:
            self.thread.call(self._rank.once_there, told, partial(self._count, step))
        return before

    def _compare(self) -> None:
        """Compare the replicas from time to time. Call this before anything is adopted at the step."""
        if self._samples is not None and (both := self._samples.stepped(self._steps)) is not None:
            self.thread.call(self._rank.replicas.compare, self._steps, *both)

    def _decide(self) -> Decided:
        under_way, shared = self._rank.under_way, self.shared
        if under_way is None:
            return Decided()
        adoptions = under_way.adopt(list(shared.adoptions))  # a copy: the exchange thread adds to it meanwhile
        bases = {p: shared.adoptions.pop(p) for p in adoptions}
        self._bases |= bases
        self._want_due()
        over, progress = JoinedLearner.over.fget(self), JoinedLearner.progress.fget(self)  # type: ignore[attr-defined]
        return Decided(over, progress, {p: base.values for p, base in bases.items()})

    def _want_due(self) -> None:
        """Request snapshots of the fragments to publish. The exchange thread calls this too, when it sees a window
        open."""
        rounds, shared, under_way = self.training.rounds, self.shared, self._rank.under_way
        assert under_way is not None  # noqa: S101  # it is rank 0
        with self._lock:
            due = rounds.wanted(shared.windows, shared.uploaded, self._steps + 1 - self._counted)
            wanted = under_way.snapshot([p for p in due if p not in shared.adoptions], self._servers)
        if wanted:
            self.thread.call(self._rank.wishes.make, wanted)

    def _settle(self, within_s: float | None = None) -> int:
        """Read the last step's sum and carry out what it says; return the tokens of that step, 0 if there is none."""
        if (step := self._step) is None:
            return 0
        self._step = None
        # Wait outside the lock: otherwise the exchange thread, which counts only complete sums, would block on it.
        step.told.wait(within_s)
        agreed = self._count(step)
        for p, number in sorted(agreed.decided.adoptions.items()):
            self._adopt(p, number)
            if p in self._bases:
                self._adopted.append(self._bases.pop(p))
        self._progress, self._over = agreed.decided.progress, self._over or agreed.decided.over
        if agreed.stop:
            self._stopping.agree()
        return agreed.tokens

    def _adopt(self, p: int, number: int) -> None:
        server, own = self._rank.part.pulled.pop((p, number))
        if own is not None:
            self.training.parameters.overwrite(p, own)
        self._servers[p] = server
        self.thread.call(self._rank.part.adopted, p, number)
        if self._rank.carrier is not None:
            self.thread.call(self._rank.carrier.adopted, p, number)

    def _own_snapshot(self, p: int) -> Snapshot | None:
        sent = self._shares.sent(self._number, p, self._servers[p])
        return self.training.parameters.snapshot(p).numpy if sent else None

    def _count(self, step: _Step) -> Agreed:
        """Count a step whose sum is complete, and send its snapshots. Both threads call this; only the first call
        counts."""
        with self._lock:
            if step.agreed is None:
                step.agreed = read(step.told.wait(), self._shares.ranks)
                self._count_agreed(step, step.agreed)
            return step.agreed

    def _count_agreed(self, step: _Step, agreed: Agreed) -> None:
        self._counted = step.number
        self.training.rounds.in_part(self.shared.state)
        self.training.rounds.trained(agreed.tokens)
        items = []
        for p in sorted(agreed.snapshots):
            taken = step.taken[p]
            self._rank.wishes.granted(p, taken.wish)
            items.append((p, step.number, taken.server, taken.snapshot))
        if items:
            self.thread.call(self._rank.part.send, items)
        if self._rank.exchange is not None:  # only rank 0 publishes
            self._publish(step, agreed)
        step.taken = {}  # each snapshot was sent or was taken too early: release the memory

    def _publish(self, step: _Step, agreed: Agreed) -> None:
        """Count the adoptions and snapshots at a step's end, and let the exchange publish. Only at rank 0."""
        rounds, shared, rank = self.training.rounds, self.shared, self._rank
        assert rank.under_way is not None  # noqa: S101  # it is rank 0
        for base in step.adopted:
            rounds.adopt(base)
        if shared.offer_again:
            shared.offer_again = False
            rounds.offer_again()
        items = []
        for p in sorted(agreed.snapshots):
            taken = step.number, step.taken[p].server
            items.append((rounds.publication(p, shared.windows), taken))
        rank.under_way.counted([*agreed.snapshots, *(base.fragment for base in step.adopted)])
        if items or step.adopted:
            self.thread.call(self._told, items, bool(step.adopted))

    # --- leaving ------------------------------------------------------------------------------------------

    def breaks_off(self, error: BaseException) -> bool:
        """Make the other ranks end too and tell them why. Return True."""
        why = f"rank {self._number} of this learner has left its loop at step {self._steps + 1} by {error!r:.300}"
        with suppress(CancelledError):
            self.thread.result_of(self.thread.ask(self._rank.break_off(error, why)))
        return True

    def leave(self, within_s: float, save_state: bool) -> bool:
        """Leave the run; all ranks call this after the same step.

        Raises:
            RankGone: the ranks do not leave together.
        """
        training, rank = self.training, self._rank
        self._settle(within_s + BYE_S)
        with self._lock:
            for base in self._adopted:
                training.rounds.adopt(base)
            if rank.under_way is not None:
                rank.under_way.counted(base.fragment for base in self._adopted)
                rank.under_way.leave()
            last = list(training.rounds.last(self.shared.windows, due=self.over)) if rank.exchange is not None else []
        # From here on this thread trains no more, so that the exchange thread may take snapshots itself.
        self.thread.call(rank.part.still.set)
        if rank.exchange is None:
            leaving = self.thread.ask(rank.hear_bye(2 * within_s + BYE_S))
        else:
            for publication in last:
                server = self._servers[publication.base.fragment]
                self.thread.call(self._told, [(publication, (None, server))], False)
            leaving = self.thread.ask(self._leave_all(rank.exchange, within_s))
        training.keeper.close(self.shared, save_state, within_s)
        return self._left(leaving)

    @override
    def forget(self) -> None:
        self._rank.part.forget()

    async def _leave_all(self, exchange: Exchange, within_s: float) -> bool:
        await self._rank.parting.all_leave()
        in_order = await exchange.leave(within_s)
        await self._rank.say_bye(in_order)
        return in_order
