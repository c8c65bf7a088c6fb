"""Other ways to cut a model into fragments than production's, which is balanced (`pipeline.fragments.balance`). Pure.

They need no more than a table of tensors in the order of the model, which is that of its depth.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from diloco.pipeline.messages.spec import TensorSpec

Packing = Literal["contiguous", "strided"]


def packed(tensors: Sequence[TensorSpec], fragments: int, packing: Packing) -> tuple[TensorSpec, ...]:
    """The same whole tensors in other fragments: each has one at least, if there are as many tensors.

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
