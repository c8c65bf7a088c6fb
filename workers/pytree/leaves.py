"""Between the leaves of a pytree and the flat float32 vectors that travel.

JAX's arrays never change, but a jitted function may take their memory (`donate_argnums`). So a snapshot copies a
fragment's leaves on their device, in order with what computes them: the training thread only queues that. The other
thread fetches the copies. An adoption makes new arrays.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, Slot
from diloco.pipeline.payload.buffers import pooled
from diloco.workers.pytree.tree import Leaf, Tree

Float32 = npt.NDArray[np.float32]


class Where:
    """The device that the leaves lie on, in words. No torch thread trains there, whatever it is."""

    type = "jax"

    def __init__(self, leaf: Any) -> None:
        self._devices = leaf.devices()

    def __str__(self) -> str:
        first = min(self._devices, key=lambda device: int(device.id))
        name = first.platform if first.platform == "cpu" else f"{first.platform}:{first.id}"
        return name if len(self._devices) == 1 else f"{name} and {len(self._devices) - 1} more"


class Copied:
    """A fragment's leaves at one moment."""

    def __init__(self, parts: Sequence[tuple[Slot, Leaf, Any]], elements: int) -> None:
        self._parts, self._elements = parts, elements

    def numpy(self) -> Float32:
        """The flat vector (elements,), to be overwritten; waits for the device."""
        flat = pooled(self._elements, np.float32)
        for slot, leaf, part in self._parts:
            flat[slot.start : slot.stop].reshape(slot.shape)[...] = np.asarray(part).transpose(leaf.axes)
        return flat


class PytreeParameters:
    """Copies fragments out of the present leaves, and puts others in their place. The training thread's."""

    def __init__(self, tree: Tree, layout: Layout, leaves: Sequence[Any]) -> None:
        """layout: of the tree's tensors. leaves: all of the pytree's, to begin with."""
        self._tree, self._layout = tree, layout
        self._by_name = {leaf.name: leaf for leaf in tree.leaves}
        self._leaves = list(leaves)
        self.device = Where(self._leaves[tree.leaves[0].at])

    @property
    def params(self) -> Any:
        """The pytree as it is now."""
        return jax.tree_util.tree_unflatten(self._tree.structure, self._leaves)

    def take(self, leaves: Sequence[Any]) -> None:
        """The leaves were trained. leaves: of `Tree.flatten`."""
        self._leaves = list(leaves)

    def snapshot(self, p: int) -> Copied:
        """Fragment p as it is now; later steps do not change it. Waits for no device.

        Raises:
            UsageError: a leaf is no longer there.
        """
        fragment = self._layout.fragments[p]
        return Copied([(slot, *self._copied(slot)) for slot in fragment.slots], fragment.elements)

    def _copied(self, slot: Slot) -> tuple[Leaf, Any]:
        leaf = self._by_name[slot.tensor.name]
        array = self._leaves[leaf.at]
        if array.is_deleted():
            raise UsageError(
                f"leaf {leaf.path} was donated to a jitted function, and no step() has said what came of it"
            )
        if slot.tensor.rows is None:
            return leaf, jnp.copy(array)
        return leaf, jax.lax.slice_in_dim(array, *slot.tensor.rows, axis=leaf.axes[0])

    def overwrite(self, p: int, flat: Float32) -> None:
        """Put a flat vector (elements,) into fragment p. It is not written to afterwards, nor kept."""
        for slot in self._layout.fragments[p].slots:
            leaf = self._by_name[slot.tensor.name]
            part = leaf.own(flat[slot.start : slot.stop].reshape(slot.shape))
            old = self._leaves[leaf.at]
            if slot.tensor.rows is not None:
                new = jax.lax.dynamic_update_slice_in_dim(old, part, slot.tensor.rows[0], axis=leaf.axes[0])
            else:
                new = placed(part, old)
            self._leaves[leaf.at] = new

    def look(self, now: float) -> None:
        """As `ModelWatch`: `Tree.flatten` looks at each step."""

    def whole(self, flats: Sequence[Float32]) -> Any:
        """The pytree with other values. flats: of each fragment its vector (elements,)."""
        leaves = list(self._leaves)
        for name, values in self._layout.whole(flats).items():
            leaf = self._by_name[name]
            leaves[leaf.at] = placed(leaf.own(values), leaves[leaf.at])
        return jax.tree_util.tree_unflatten(self._tree.structure, leaves)


def placed(values: npt.NDArray[Any], old: Any) -> Any:
    """Values as an array where another one lies. One that jit may put where it likes stays such a one, or it would
    compile anew.
    """
    return jax.device_put(values, old.sharding) if old.committed else jnp.asarray(values)
