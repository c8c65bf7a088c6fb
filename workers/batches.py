"""Batches of dataset indices from the run's work queue: a `batch_sampler` for torch's DataLoader. No torch.

The loader draws in the training thread, ahead of the loop. A shard is acknowledged when its batches are trained on
(`prefetch`), not when they are drawn. All batches are full: they run across the ends of shards, passes and epochs. The
ranks of one learner draw the same global batches, and each yields its own indices of them, so all have the same number
of batches.
"""

import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard
from diloco.workers.checks.own_process import OwnProcess
from diloco.workers.exchange.shared import Shared
from diloco.workers.permutation import permuted
from diloco.workers.prefetch import Drawn, Prefetched, ShardProgress
from diloco.workers.times import TIMES

# Largest length, and largest seed.
MAX_EXACT_INT = 2**53


def whole_number(name: str, value: Any, minimum: int = 1, maximum: int = MAX_EXACT_INT) -> int:
    """Check an argument of `Learner.batches` and return it as an int.

    Raises:
        UsageError: it is not a whole number within bounds; names it.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not minimum <= number <= maximum:
        raise UsageError(f"batches(): {name}={value!r:.40}; pass a whole number from {minimum} to {maximum}")
    return number


# Returns the shard after a claimed one, with its claim or None if it is read again (`ShardsInTurn.after`).
NextShard = Callable[[ClaimedShard | None, float], tuple[ClaimedShard | None, Shard]]


class Batches(OwnProcess):
    """The batches of one learner or one rank. Each pass has `len` batches, and continues where the last one stopped."""

    drop_last = False  # an attribute of torch's `BatchSampler`: no index is left out

    def __init__(
        self,
        order: DataOrder,
        batch_size: int,
        accumulate: int,
        first: ClaimedShard,
        shared: Shared,
        *,
        drawn: Callable[[str], None],
        finished: Callable[[str], None],
        next_shard: NextShard,
        check: Callable[[], Any],
        place: tuple[int, int] = (0, 1),
        dry_s: float = TIMES.dry_s,
    ) -> None:
        """Begin with a claimed shard.

        Args:
            order: agreed with the run.
            batch_size: indices in a batch of this process.
            accumulate: batches in a step.
            first: the shard to begin with.
            shared: holds the claimed shards, and takes the position in the shard being read.
            drawn: called with the entry id of each shard whose last block was drawn.
            finished: called with the entry id of each shard that was trained on to its end.
            next_shard: gives the shards after the first one.
            check: raises if the learner is not in its run.
            place: number of this rank of the learner, and how many there are.
            dry_s: how long to wait for a shard.
        """
        super().__init__("learner.batches(...)")
        self._size, (self._rank, self._ranks) = batch_size, place
        self._length, self._seed = order.length, order.seed
        steps = -(-order.length // (batch_size * self._ranks * accumulate))
        self._batches = steps * accumulate
        self._prefetched = Prefetched(accumulate)
        self._shared, self._tell_drawn, self._tell_finished = shared, drawn, finished
        self._after, self._check, self._dry_s = next_shard, check, dry_s
        self._claimed: ClaimedShard | None = first  # None while the current shard is being re-read
        self._shard, self._at = first.shard, first.shard.start + first.position
        self._passes = 0
        self._thread = 0  # id of the thread that has drawn the last batch

    @property
    def batch_size(self) -> int:
        """Indices in a batch, an attribute of torch's `BatchSampler`.

        Raises:
            UsageError: the learner has several ranks; a library that asks would divide each rank's own batches once
                more.
        """
        if self._ranks > 1:
            raise UsageError(
                "in a learner with several ranks, batches() already yields only this rank's part: do not pass its "
                "loader to accelerator.prepare() or to anything else that divides batches among processes"
            )
        return self._size

    def __len__(self) -> int:
        """Return the batches in a pass: those of an epoch if this learner were alone, in whole steps."""
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of a pass, beginning with those that an earlier pass has drawn and no step has trained.

        Raises:
            UsageError: the learner is not in its run, this is another process, or another pass has begun meanwhile.
            DilocoError: the exchange thread has failed with this error.
        """
        self.check_process()
        self._prefetched.begin()
        self._passes += 1
        number = self._passes
        for _ in range(self._batches):
            self.check_process()
            if number != self._passes:
                raise UsageError(
                    "batches: an earlier pass continued after a newer one had started; iterate over one "
                    "loader at a time"
                )
            self._check()
            self._thread = threading.get_ident()
            yield list(self._prefetched.draw(self._new).indices)
        if number == self._passes:
            self._prefetched.end()

    def stepped(self) -> None:
        """Acknowledge what a finished step has trained.

        Raises:
            UsageError: batches are drawn in another thread, or steps train another number of batches than `accumulate`.
        """
        if self._thread not in (0, threading.get_ident()):
            raise UsageError(
                "batches are drawn in a different thread from the one that trains: iterate over the loader in the "
                "training thread"
            )
        for batch in self._prefetched.stepped():
            for reached in batch.reached:
                position = None if reached.whole else (reached.entry_id, reached.read)
                self._shared.shard_position = self._shared.shard_handed_out = position
                if reached.whole:
                    self._tell_finished(reached.entry_id)

    def _new(self) -> Drawn:
        """Return a batch that was never drawn."""
        indices: list[int] = []
        reached: list[ShardProgress] = []
        size = self._ranks * self._size
        while len(indices) < size:
            if self._at == self._shard.stop:
                self._next_shard()
            stop = min(self._shard.stop, self._at + size - len(indices))
            key = b"/%d/%d" % (self._seed or 0, self._shard.epoch)
            indices += (permuted(at, self._length, key) for at in range(self._at, stop))
            self._at, whole = stop, stop == self._shard.stop
            if self._claimed is not None:
                reached.append(ShardProgress(self._claimed.entry_id, stop - self._shard.start, whole))
                if whole:
                    self._tell_drawn(self._claimed.entry_id)
        own = slice(self._rank * self._size, (self._rank + 1) * self._size)
        return Drawn(tuple(indices[own]), tuple(reached))

    def _next_shard(self) -> None:
        """Take the next claimed shard, or an earlier one again if there is none."""
        self._claimed, self._shard = self._after(self._claimed, self._dry_s)
        self._at = self._shard.start + (0 if self._claimed is None else self._claimed.position)
