"""Describe a pytree for the proposal of a run, by the same rules as torch's models (`parameters.whole_tensors`)."""

from collections.abc import Iterable, Sequence

from diloco.pipeline.fragments import balance, fragments_of, level, merge_rule
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.settings import SyncSettings, check_outer
from diloco.workers.pytree.tree import Leaf, Tree


class PytreeModel:
    """A pytree as a run sees it, a `spec_proposal.Proposed`."""

    def __init__(self, tree: Tree) -> None:
        self._leaves = tree.leaves

    @property
    def trained(self) -> int:
        """The number of trained tensors (`Proposed.trained`)."""
        return len(self._leaves)

    def fitting_fragments(self, wanted: int) -> int:
        """Return how many of the `wanted` fragments the leaves can fill (`Proposed.fitting_fragments`)."""
        return fragments_of(wanted, self.trained)

    def tensor_table(self, sync: SyncSettings | SyncSpec, held: Sequence[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
        """Return the table of tensors for the spec (`Proposed.tensor_table`), in the order that the run has."""
        place = {name: at for at, name in enumerate(dict.fromkeys(tensor.name for tensor in held))}
        whole = _whole(sorted(self._leaves, key=lambda leaf: place.get(leaf.name, len(place))), sync)
        return level(whole, self._heads())

    def _heads(self) -> frozenset[str]:
        """Return the names of the output heads: leaves with the shape of the largest embedding."""
        embeddings = [leaf for leaf in self._leaves if leaf.embedding]
        if not embeddings:
            return frozenset()
        largest = max(embeddings, key=lambda leaf: leaf.elements).run_shape
        return frozenset(leaf.name for leaf in self._leaves if leaf.run_shape == largest)

    def frozen(self) -> tuple[tuple[str, bytes], ...]:
        """Return nothing: only trained arrays are in the pytree (`Proposed.frozen`)."""
        return ()


def _whole(leaves: Iterable[Leaf], sync: SyncSettings | SyncSpec) -> tuple[TensorSpec, ...]:
    """Return the table with every tensor in one fragment."""
    check_outer(sync)
    leaves = list(leaves)
    fragment = balance(((leaf.name, leaf.elements) for leaf in leaves), sync.fragments)
    return tuple(
        TensorSpec(
            name=leaf.name,
            shape=leaf.run_shape,
            dtype=leaf.dtype.name,
            rule=merge_rule(sync.merge, leaf.embedding, len(leaf.shape)),
            fragment=fragment[leaf.name],
            matrix=sync.outer == "halley" and len(leaf.shape) == 2 and min(leaf.shape) > 1 and not leaf.embedding,
        )
        for leaf in leaves
    )
