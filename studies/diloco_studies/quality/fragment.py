"""A global fragment of the lab: production's, with another outer step or another fate of stale deltas where a run asks
for it. Pure: numpy only."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.head import MergedBase
from diloco.pipeline.messages.spec import TensorSpec
from diloco.syncer.merging.fragment import Delta, Draft, FragmentState, Merged, Stepped
from diloco_studies.quality.outer import RULES, Memory, Merge
from diloco_studies.quality.settings import LabRun, Packing

Float32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class Stale:
    """What became of deltas whose base was one before the present one, all fragments."""

    deltas: int = 0
    dropped_tokens: Counter[int] = field(default_factory=Counter)
    """Fragment -> tokens of those that were left out; its head counts them as merged."""


class LabFragment(FragmentState):
    """As production's, where `outer` is production's and `stale` is off."""

    def __init__(self, run: LabRun, stale: Stale, *state: Any) -> None:
        """state: as `FragmentState`."""
        super().__init__(*state)
        self._run, self._stale = run, stale
        self._memory: Memory = {}
        self._next: tuple[Memory, int, int] = ({}, 0, 0)
        """Memory, stale deltas and dropped tokens of the merge in hand, for when it is committed."""

    def rebases(self, delta: Delta) -> bool:
        """As production's, unless the run has another fate for stale deltas."""
        return self._run.stale is None and super().rebases(delta)

    def merge(self, deltas: Sequence[Delta], before: Sequence[MergedBase], draft: Draft | None = None) -> Merged:
        """As production's; without stale deltas where the run drops them, unless there are no others."""
        stale = [d.offer.header for d in deltas if self.is_stale(d)]
        taken, dropped = list(deltas), 0
        if self._run.stale == "drop" and len(stale) < len(deltas):
            taken, dropped = [d for d in deltas if not self.is_stale(d)], sum(header.tokens for header in stale)
        if draft is not None and dropped:
            draft.discard_sum()  # they may be in it
        merged = super().merge(taken, before, draft)
        self._next = (self._next[0], len(stale), dropped)
        return merged

    def step(self, deltas: Sequence[Delta], shares: Sequence[float], draft: Draft) -> Stepped:
        """The run's outer step; where production only averages, its step."""
        lr, mu = self.outer(deltas)
        self._next = ({}, 0, 0)
        averages = self.version < self.sync.outer_warmup or (lr, mu) != (self.sync.outer_lr, self.sync.outer_momentum)
        if self._run.outer not in RULES or averages or self.layout.averaged:
            return super().step(deltas, shares, draft)
        values, norms = [d.values for d in deltas], [d.norms for d in deltas]
        reduced = draft.sum.close(values, norms, shares, factors=self.factors(deltas))
        squares = sum(share * d.norm**2 for share, d in zip(shares, deltas, strict=True)) / sum(shares)
        spread = squares / reduced.norm**2 if reduced.norm else 1.0
        step, delay = self.version - self.sync.outer_warmup, self._run.outer_delay
        given = Merge(self.theta, draft.theta.copy(), step, lr, mu, delay, spread, self.layout)
        draft.theta[:], memory = RULES[self._run.outer](given, self._memory)
        if draft.momentum is not None:
            draft.momentum.fill(0)  # a rule keeps its own
        draft.step_writer(self.theta, self.momentum, lr, mu).written(self.layout.elements)
        self._next = (memory, 0, 0)
        return Stepped(draft.theta, draft.momentum, reduced)

    def advance(self, merged: Merged) -> None:
        """The commit succeeded."""
        super().advance(merged)
        self._memory, stale, dropped = self._next
        self._stale.deltas += stale
        self._stale.dropped_tokens[self.layout.id] += dropped


# --- how a model is cut into them ----------------------------------------------------------------------------


def packed(tensors: Sequence[TensorSpec], fragments: int, packing: Packing) -> tuple[TensorSpec, ...]:
    """The same whole tensors in other fragments than production's, which are balanced (`pipeline.fragments.balance`).

    contiguous: neighbours together, cut where the fragments' elements are nearest to equal, as DiLoCo in parts would
    do; strided: each tensor in the fragment after its neighbour's, as Streaming DiLoCo's stride of layers.
    """
    if packing == "strided":
        return tuple(tensor.model_copy(update={"fragment": n % fragments}) for n, tensor in enumerate(tensors))
    total, chosen = sum(tensor.elements for tensor in tensors), 0
    table = []
    for n, (tensor, before) in enumerate(zip(tensors, _before(tensors), strict=True)):
        middle = (before + tensor.elements / 2) * fragments / total
        # Not so far that a fragment is left out, nor so few that the last ones get no tensor.
        chosen = min(max(int(middle), chosen, fragments - len(tensors) + n), chosen + 1) if n else 0
        table.append(tensor.model_copy(update={"fragment": chosen}))
    return tuple(table)


def _before(tensors: Sequence[TensorSpec]) -> list[int]:
    """Elements before each tensor."""
    return [0, *accumulate(tensor.elements for tensor in tensors)][:-1]
