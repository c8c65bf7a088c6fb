"""Convert between the leaves of a pytree and the flat float32 vectors that travel.

JAX arrays never change, but a jitted function may take over their memory (`donate_argnums`). So a snapshot copies a
fragment's leaves on their device, in order with the computation of them; the training thread only queues that. The
exchange thread fetches the copies. An adoption makes new arrays.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, Slot
from diloco.pipeline.payload.buffers import pooled
from diloco.workers.encoding import Float32
from diloco.workers.pytree.tree import Leaf, Tree


class Copied:
    """Copies of a fragment's leaves at one moment."""

    def __init__(self, parts: Sequence[tuple[Slot, Leaf, Any]], elements: int) -> None:
        self._parts, self._elements = parts, elements

    def numpy(self) -> Float32:
        """Return the flat vector (elements,), which the caller may overwrite; waits for the device."""
        flat = pooled(self._elements, np.float32)
        for slot, leaf, part in self._parts:
            flat[slot.start : slot.stop].reshape(slot.shape)[...] = np.asarray(part).transpose(leaf.axes)
        return flat


class PytreeParameters:
    """Copies fragments out of the current leaves, and replaces leaves by others. Used by the training thread."""

    def __init__(self, tree: Tree, layout: Layout, leaves: Sequence[Any]) -> None:
        """Begin with these leaves.

        Args:
            tree: describes the pytree.
            layout: of the tree's tensors.
            leaves: all leaves of the pytree.
        """
        self._tree, self._layout = tree, layout
        self._by_name = {leaf.name: leaf for leaf in tree.leaves}
        self._leaves = list(leaves)
        self.device = device_name(self._leaves[tree.leaves[0].at].devices())

    @property
    def params(self) -> Any:
        """The current pytree."""
        return jax.tree_util.tree_unflatten(self._tree.structure, self._leaves)

    def take(self, leaves: Sequence[Any]) -> None:
        """Replace all leaves by trained ones, which come from `Tree.flatten`."""
        self._leaves = list(leaves)

    def snapshot(self, p: int) -> Copied:
        """Copy fragment p; later steps do not change the copy. Does not wait for a device.

        Raises:
            UsageError: a leaf was donated.
        """
        fragment = self._layout.fragments[p]
        return Copied([(slot, *self._copied(slot)) for slot in fragment.slots], fragment.elements)

    def _copied(self, slot: Slot) -> tuple[Leaf, Any]:
        leaf = self._by_name[slot.tensor.name]
        array = self._leaves[leaf.at]
        if array.is_deleted():
            raise UsageError(
                f"leaf {leaf.path} was donated to a jitted function, and step() has not been called with its new value"
            )
        if slot.tensor.rows is None:
            return leaf, jnp.copy(array)
        return leaf, jax.lax.slice_in_dim(array, *slot.tensor.rows, axis=leaf.axes[0])

    def overwrite(self, p: int, flat: Float32) -> None:
        """Put a flat vector (elements,) into fragment p. The vector is neither changed nor kept."""
        for slot in self._layout.fragments[p].slots:
            leaf = self._by_name[slot.tensor.name]
            part = leaf.own(flat[slot.start : slot.stop].reshape(slot.shape))
            old = self._leaves[leaf.at]
            if slot.tensor.rows is not None:
                new = jax.lax.dynamic_update_slice_in_dim(old, part, slot.tensor.rows[0], axis=leaf.axes[0])
            else:
                new = placed(part, old)
            self._leaves[leaf.at] = new

    def whole(self, flats: Sequence[Float32]) -> Any:
        """Return the pytree with other values. flats: the vector (elements,) of each fragment."""
        leaves = list(self._leaves)
        for name, values in self._layout.whole(flats).items():
            leaf = self._by_name[name]
            leaves[leaf.at] = placed(leaf.own(values), leaves[leaf.at])
        return jax.tree_util.tree_unflatten(self._tree.structure, leaves)


def device_name(devices: Collection[Any]) -> str:
    """Return the devices of the leaves in words, for reports."""
    first = min(devices, key=lambda device: int(device.id))
    name = first.platform if first.platform == "cpu" else f"{first.platform}:{first.id}"
    return name if len(devices) == 1 else f"{name} and {len(devices) - 1} more"


def placed(values: npt.NDArray[Any], old: Any) -> Any:
    """Return values as an array on the devices of another one.

    An array that jit may place freely stays uncommitted; otherwise jit would recompile.
    """
    return jax.device_put(values, old.sharding) if old.committed else jnp.asarray(values)
