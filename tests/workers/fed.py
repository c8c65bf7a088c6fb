"""Batches fed by hand, without a bus: what is claimed at once, what is acknowledged, what was trained on."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from diloco.pipeline.messages.shards import ClaimedShard, DataOrder
from diloco.workers.batches import Batches
from diloco.workers.exchange.shared import Shared
from diloco.workers.exchange.work_queue import ShardsInTurn, cut_epoch

SEED = 3


class Numbers(Dataset[int]):
    """Row i is i."""

    def __init__(self, length: int) -> None:
        self.rows: npt.NDArray[np.int64] = np.arange(length)

    def __len__(self) -> int:
        """Rows."""
        return len(self.rows)

    def __getitem__(self, at: int) -> int:
        """The row's number."""
        return int(self.rows[at])


class Fed:
    """Batches of one learner that is alone: each claim is answered at once, until `cut_off`."""

    def __init__(
        self,
        length: int,
        batch_size: int,
        accumulate: int = 1,
        per_shard: int = 0,
    ) -> None:
        self.length, self.shared = length, Shared()
        self.per_shard = per_shard or 3 * batch_size
        self.cut_off = False
        self.finished: list[str] = []
        self.drawn: list[str] = []
        self.trained: list[int] = []
        self._claims = self._claimed()
        self.first = next(self._claims)
        self.sampler = Batches(
            DataOrder(length=length, seed=SEED),
            batch_size,
            accumulate,
            self.first,
            self.shared,
            drawn=self.tell_drawn,
            finished=self.finished.append,
            next_shard=ShardsInTurn(self.shared, random.Random(0)).after,
            check=lambda: None,
            dry_s=0.0,
        )
        self._claim()

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(Numbers(self.length), batch_sampler=self.sampler, **options)

    def step(self, *batches: torch.Tensor | list[int]) -> None:
        """A step on these."""
        for batch in batches:
            self.trained += [int(at) for at in batch]
        self.sampler.stepped()

    @property
    def acknowledged(self) -> int:
        """Indices that are acknowledged: of whole shards, and up to the position in the one in hand."""
        done = sum(self._sizes[entry_id] for entry_id in self.finished)
        return done + (self.shared.shard_position[1] if self.shared.shard_position else 0)

    def _claimed(self) -> Iterator[ClaimedShard]:
        self._sizes: dict[str, int] = {}
        epoch = 0
        while True:
            for shard in cut_epoch(epoch, self.length, self.per_shard):
                entry_id = f"{len(self._sizes) + 1}-0"
                self._sizes[entry_id] = shard.stop - shard.start
                yield ClaimedShard(entry_id=entry_id, shard=shard, position=0)
            epoch += 1

    def _claim(self) -> None:
        if not self.cut_off:
            self.shared.shards.put(next(self._claims))

    def tell_drawn(self, entry_id: str) -> None:
        """Nothing is left to draw of a shard."""
        self.drawn.append(entry_id)
        self._claim()
