"""A model as a run sees it: what a framework tells of its tensors, and the table that a spec has of them. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from diloco.pipeline.fragments import balance, fragments_of, level, merge_rule
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.settings import SyncSettings, check_outer

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


class Trained(NamedTuple):
    """A trained tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    embedding: bool
    """True if each of its rows is a vector of its own."""

    @property
    def matrix(self) -> bool:
        """True if it is no embedding and has several rows and columns: one alone leaves nothing to orthogonalise."""
        return len(self.shape) == 2 and min(self.shape) > 1 and not self.embedding


@dataclass(frozen=True, slots=True)
class Proposed:
    """All that a run must know of a model."""

    trained: Sequence[Trained]
    averaged: Sequence[TensorSpec] = ()
    """Average-only tensors, in any fragment."""
    embeddings: Sequence[tuple[int, ...]] = ()
    """Shapes of its embeddings, frozen ones too."""
    frozen: Callable[[], tuple[tuple[str, bytes], ...]] = tuple
    """Returns (name, xxh3-128) of every frozen parameter; raises UsageError if one cannot be read."""

    def fitting_fragments(self, wanted: int) -> int:
        """Return the number of fragments if nobody asked for a number (`fragments_of`)."""
        return fragments_of(wanted, len(self.trained), len(self.averaged))

    def tensor_table(self, sync: SyncSettings | SyncSpec) -> tuple[TensorSpec, ...]:
        """Return the spec's table of tensors: trained ones, then averaged ones.

        A tensor that does not fit into one fragment is listed in parts (`fragments.level`); so is an untied output
        head.

        Raises:
            UsageError: see `whole_tensors`.
        """
        return level(self.whole_tensors(sync), self.heads())

    def whole_tensors(self, sync: SyncSettings | SyncSpec) -> tuple[TensorSpec, ...]:
        """Return the same table with every tensor in one fragment.

        With an orthogonalised outer step it marks the tensors that are treated as matrices (`Trained.matrix`).

        Raises:
            UsageError: there are fewer tensors than fragments, or nothing to orthogonalise.
        """
        check_outer(sync)
        sizes = ((one.name, math.prod(one.shape)) for one in self.trained)
        fragment = balance(sizes, sync.fragments, [one.name for one in self.averaged])
        trained = (
            TensorSpec(
                name=one.name,
                shape=one.shape,
                dtype=one.dtype,
                rule=merge_rule(sync.merge, one.embedding, len(one.shape)),
                fragment=fragment[one.name],
                matrix=sync.outer == "halley" and one.matrix,
            )
            for one in self.trained
        )
        return *trained, *(one.model_copy(update={"fragment": fragment[one.name]}) for one in self.averaged)

    def heads(self) -> frozenset[str]:
        """Return the names of the output heads: trained tensors with the shape of the largest embedding.

        Nothing else in a model has that shape.
        """
        largest = max(self.embeddings, key=math.prod, default=None)
        return frozenset(one.name for one in self.trained if one.shape == largest)
