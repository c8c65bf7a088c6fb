"""What whoever takes a fragment over makes of a head whose global is updates, computed once more. Pure.

By the description in `pipeline.updates`; no code is shared with it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.codec import payload_digest
from pipeline.messages import SyncSpec
from pipeline.payload_messages import Update

from . import reference

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


class Followed(NamedTuple):
    """Values bit for bit, and momentum, each (elements,)."""

    theta: Float32
    momentum: Float64


def follow(
    theta: Float32,
    momentum: Float64,
    updates: Sequence[Update],
    read: Callable[[str], bytes],
    sync: SyncSpec,
) -> Followed | str:
    """From a key frame, or from a version; or why that cannot be.

    Args:
        theta, momentum: (elements,) each.
        updates: that lead on from there.
        read: a payload's bytes by its key; as many as there are.
        sync: the run's.
    """
    for update in updates:
        if payload_digest(memoryview(theta.tobytes()), sync.chunk_bytes) != update.base:
            return f"{update.payload} does not lead on from what is before it"
        wire = read(update.payload)
        blocks = -(-len(theta) // 256)
        if len(wire) != blocks * 258:
            return f"{update.payload} has {len(wire)} bytes"
        step = reference.dequantized(wire, len(theta), "int8")
        theta = theta - step.astype(np.float32)
        if sync.outer == "nesterov":
            momentum = reference.momentum_after(momentum, step, sync, averaged=update.averaged)
    return Followed(theta, momentum)


def badly_coded(wire: bytes, due: Float64, allowed: float) -> str | None:
    """What is wrong with the code of a step; None: it is the nearest one.

    Args:
        wire: of the update.
        due: (elements,) the step as it should be.
        allowed: what float32 may make of an element.
    """
    found = reference.dequantized(wire, len(due), "int8")
    for start in range(0, len(due), 256):
        block, code = due[start : start + 256], found[start : start + 256]
        scale = float(np.abs(block).max()) / 127 * (1 + 2**-7)
        if np.abs(code - block).max() > scale / 2 * (1 + 1e-5) + allowed:
            return f"{code} for {block}"
    return None
