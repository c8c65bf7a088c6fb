"""Whether the ranks of one learner do the same at the same step, and what it publishes is what they have trained.

An account of one life, kept by what its training threads do with their parameters and by the tokens that they train.
It shares no state with the ranks' code.

Invariants: all ranks adopt a fragment at the same step, and all of it, and what is published they have snapshot so;
what they adopt together is one committed global; replicas stay alike; a delta has the very steps and tokens of all
ranks between its base's adoption and its snapshot, and the very values of that snapshot.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.wire import AVERAGED
from diloco.workers.rounds import Base, Publication
from tests.world.oracle import Oracle
from tests.world.together import Crew

Float32 = npt.NDArray[np.float32]
LATER = 4
"""Steps after which what was agreed on is done and counted on all ranks."""


@dataclass(slots=True)
class _Done:
    """What ranks did with a fragment at one step."""

    step: int
    parts: dict[int, Float32] = field(default_factory=dict)
    """Rank -> its own vector."""
    base: Base | None = None
    """Of an adoption: as rank 0 has counted it."""


class Alike:
    """One life's."""

    def __init__(self, crew: Crew, incarnation: str, oracle: Oracle) -> None:
        self._crew, self._incarnation, self._oracle = crew, incarnation, oracle
        fragments = range(len(crew.layout.fragments))
        self._averaged = [
            np.concatenate([np.full(slot.stop - slot.start, slot.tensor.rule in AVERAGED) for slot in fragment.slots])
            for fragment in crew.layout.fragments
        ]
        self.steps = [0] * crew.ranks
        """Of each rank."""
        self._trained_by_all = 0
        """Steps."""
        self._tokens: dict[int, int] = defaultdict(int)
        """Step -> trained in it by all ranks."""
        self._values: dict[int, list[Float32]] = {}
        """Step -> values of the first rank to have trained it, if all have the whole model."""
        self._said: dict[int, object] = {}
        """Step -> what the first rank knew of the run after it."""
        self._adoptions: list[list[_Done]] = [[] for _ in fragments]
        self._adopted = [[0] * crew.ranks for _ in fragments]
        """Of each fragment: adoptions that each rank has made."""
        self._counted = [0 for _ in fragments]
        """The same that rank 0 has counted."""
        self._snapshots: list[dict[int, _Done]] = [{} for _ in fragments]
        self._made: dict[int, tuple[int, int]] = {}
        """Serial -> (fragment's adoptions counted, steps counted) as it was made."""

    def _broken(self, promise: str, detail: str) -> None:
        self._oracle.broken(promise, f"{self._crew.name}: {detail}")

    # --- what training threads do ---------------------------------------------------------------------------

    def trained(self, rank: int, step: int, tokens: int, values: list[Float32]) -> None:
        """A rank has trained a step."""
        self.steps[rank] = step
        self._tokens[step] += tokens
        if self._crew.replicated:
            first = self._values.setdefault(step, [one.copy() for one in values])
            for p, (one, other) in enumerate(zip(first, values, strict=True)):
                if not np.array_equal(one[~self._averaged[p]], other[~self._averaged[p]]):
                    self._broken("replicas stay alike", f"fragment {p} at step {step}, rank {rank}: {other}, not {one}")
        least, before = min(self.steps), self._trained_by_all
        self._trained_by_all = least
        if least > before == 0:
            for p, adoptions in enumerate(self._adoptions):
                self._check_adopted(p, adoptions[0])
        self._values.pop(least - 1, None)
        for p, adoptions in enumerate(self._adoptions):
            if adoptions and adoptions[-1].step < least and len(adoptions[-1].parts) < self._crew.ranks:
                self._broken("all ranks adopt at the same step", f"fragment {p}: only {sorted(adoptions[-1].parts)}")

    def knows(self, rank: int, step: int, said: object) -> None:
        """What a rank knows of the run after a step."""
        if self._said.setdefault(step, said) != said:
            told = f"step {step}: rank {rank} knows {said}, another {self._said[step]}"
            self._broken("all ranks know the same at the same step", told)
        self._said.pop(step - LATER, None)

    def overwrote(self, rank: int, step: int, p: int, own: Float32) -> None:
        """A rank has adopted; while it joins, once more where a newer global is there."""
        if not step:
            self._adopted[p][rank] = 0
        number = self._adopted[p][rank]
        self._adopted[p][rank] += 1
        if number == len(self._adoptions[p]):
            self._adoptions[p].append(_Done(step))
        adoption = self._adoptions[p][number]
        if adoption.step != step:
            told = f"fragment {p}: rank {rank} at {step}, another at {adoption.step}"
            self._broken("all ranks adopt at the same step", told)
        adoption.parts[rank] = own.copy()
        self._check_adopted(p, adoption)

    def snapshot(self, rank: int, step: int, p: int, own: Float32) -> None:
        """A rank has taken one while it trains. It may be too early for the others, and never be published."""
        done = self._snapshots[p].setdefault(step, _Done(step))
        done.parts[rank] = own
        for other in [one for one in self._snapshots[p] if one < step - 8 * LATER]:
            del self._snapshots[p][other]

    def whole(self, p: int, parts: dict[int, Float32], what: str) -> Float32 | None:
        """A fragment (elements,) of what ranks have of it; of what each has for itself, rank 0's."""
        found = np.full(self._crew.layout.fragments[p].elements, np.inf, np.float32)
        for rank in sorted(parts, reverse=True):
            found[self._crew.indices[rank][p]] = parts[rank]
        if np.isinf(found).any() or (self._averaged[p].any() and 0 not in parts):
            self._broken("all ranks snapshot at the same step", f"fragment {p}, {what}: only {sorted(parts)}: {found}")
            return None
        return found

    # --- what rank 0 counts ---------------------------------------------------------------------------------

    def counted(self, base: Base) -> None:
        """Rank 0 has counted an adoption."""
        p = base.fragment
        self._oracle.heard(self._crew.name, base)
        if self._counted[p] == len(self._adoptions[p]):
            self._broken("what is counted was adopted", f"fragment {p} version {base.version}")
            return
        adoption = self._adoptions[p][self._counted[p]]
        self._counted[p] += 1
        adoption.base = base
        self._check_adopted(p, adoption)

    def _check_adopted(self, p: int, adoption: _Done) -> None:
        if not adoption.step and not self._trained_by_all:
            return  # a rank that joins may yet adopt a newer one
        if adoption.base is not None and len(adoption.parts) == self._crew.ranks:
            values = self.whole(p, adoption.parts, "adoption")
            if values is not None:
                self._oracle.check_adopted(self._crew.name, adoption.base, values)
                for rank, part in adoption.parts.items():  # replicas too
                    if not np.array_equal(part, values[self._crew.indices[rank][p]]):
                        self._broken("only committed values are adopted", f"fragment {p}, rank {rank}: {part}")

    def made(self, publication: Publication, steps: int) -> None:
        """Rank 0 has decided what a delta is of, having counted so many steps."""
        self._made[publication.serial] = self._counted[publication.base.fragment], steps

    def published(self, publication: Publication, tag: int | None, final: Callable[[int], dict[int, Float32]]) -> None:
        """A delta is about to be published.

        tag: step of its snapshot; None: it will be made of `final`, what ranks have when none trains any more.
        """
        p = publication.base.fragment
        adoptions, counted = self._made.pop(publication.serial, (self._counted[p], min(self.steps)))
        step = counted if tag is None else tag
        base = self._adoptions[p][adoptions - 1]
        tokens = sum(self._tokens[one] for one in range(base.step + 1, step + 1))
        if step != counted or (publication.steps, publication.tokens) != (step - base.step, tokens):
            told = (
                f"fragment {p}, step {step}, counted at {counted}: {publication.steps} steps and {publication.tokens}"
            )
            self._broken("a delta has all its ranks' tokens", f"{told} tokens instead of {step - base.step}, {tokens}")
        if base.base is None or (base.base.version, base.base.digest) != (
            publication.base.version,
            publication.base.digest,
        ):
            self._broken("a delta is of what was adopted", f"fragment {p} version {publication.base.version}")
            return
        delta = p, self._crew.name, self._incarnation, publication.serial
        if tag is None:
            self._oracle.published_later(delta, publication.base, lambda: self.whole(p, final(p), "last values"))
            return
        snapshot = self._snapshots[p].get(tag)
        values = None if snapshot is None else self.whole(p, snapshot.parts, f"snapshot of step {tag}")
        if values is None:
            self._broken("all ranks snapshot at the same step", f"fragment {p}: nobody did at {tag}")
            return
        self._oracle.published_later(delta, publication.base, lambda: values)

    def left(self, rank: int, counts: tuple[int, int]) -> None:
        """A rank has left in order, with what it has counted: steps and tokens."""
        trained = self.steps[rank], sum(self._tokens.values())
        if counts != trained:
            self._broken("all that ranks train is counted", f"rank {rank}: {counts} steps and tokens, not {trained}")
