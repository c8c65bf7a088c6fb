"""Payloads, ramps and due times of a run, as an onlooker works them out: the oracle checks them by these. Pure.

By the descriptions in `pipeline` and with none of its code, so that a fault there shows as a difference. Merges and
outer steps are checked by `syncer.algorithm`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from diloco.pipeline.fragments import Slot
from diloco.pipeline.messages.fragment import DeltaHeader
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec

Float64 = npt.NDArray[np.float64]


def constants(sync: SyncSpec, tensors: Iterable[TensorSpec]) -> SyncSpec:
    """Those of a fragment: average-only tensors travel in float32 both ways, and their outer step keeps no momentum."""
    if not all(tensor.rule in ("average", "variance") for tensor in tensors):
        return sync
    return sync.model_copy(update={"codec": "fp32", "global_codec": "fp32", "outer_lr": 1.0, "outer_momentum": 0.0})


def has_lost_direction(slots: Iterable[Slot], published: Float64, rebased: Float64, close: float) -> bool:
    """Whether a tensor or row of a delta (elements,) that is merged by its direction has cancelled in rebasing.

    What is left of it then is how numbers are rounded, in float32 another way than in float64.
    """
    for slot in slots:
        if slot.tensor.rule in ("rda", "rda-row"):
            rows = slot.shape[0] if slot.tensor.rule == "rda-row" and slot.shape else 1
            was, left = (
                np.linalg.norm(delta[slot.start : slot.stop].reshape(rows, -1), axis=1)
                for delta in (published, rebased)
            )
            if np.any((was > 0) & (left <= close * was)):
                return True
    return False


def averages(sync: SyncSpec, version: int, steps: Sequence[int], told: int) -> bool:
    """Whether the step from this version, whose head says this interval, only averages learners of so many steps."""
    return version < sync.outer_warmup or all(2 * s < (told or interval(sync, version)) for s in steps)


def interval(sync: SyncSpec, version: int) -> int:
    """Inner steps between two syncs of a fragment at this version: H, or less on the first versions."""
    if not sync.first_interval:
        return sync.sync_interval
    return int(min(sync.sync_interval, sync.first_interval * 2 ** (version // sync.doubling)))


def wrongly_due(header: DeltaHeader, fragments: int, sync: SyncSpec, told: int, late: bool) -> str | None:
    """Whether a delta is called due, or not, against its interval; None: it is right.

    told: what the head of its base says; 0: H, or less on the first versions. late: it may be due later, since ranks
    agree some steps ahead, and upload one snapshot at a time, or since there is little room for snapshots.

    A first delta on version 0 is due in its fragment's turn within the interval; a first delta of one who joined later
    as long after it. Any other is due exactly when the interval is over.
    """
    version = header.base_version
    whole = told or interval(sync, version)
    first = min(sync.sync_interval, sync.first_interval or sync.sync_interval)
    turn = 1 + header.fragment * first // fragments
    moments = (turn, whole) if version == 0 else (whole, whole + turn)
    told = f"{'due' if header.due else 'not due'} after {header.steps} steps on version {version}"
    late = late or header.attempt > 0
    if header.due and header.steps not in moments and (header.steps < min(moments) or not late):
        return f"{told}, where {moments[0]} or {moments[1]} are an interval"
    if not header.due and header.steps >= max(moments):
        return f"{told}, where {max(moments)} are enough"
    return None


def joined(high: bytes, low: bytes) -> npt.NDArray[np.float32]:
    """A vector (elements,) from the bytes of its halves, by the description in `pipeline.transfer.globals`."""
    upper, lower = (np.frombuffer(half, kind).astype(np.int64) for half, kind in ((high, "<u2"), (low, "<i2")))
    bits: npt.NDArray[np.uint32] = np.mod(2**16 * upper + lower, 2**32).astype(np.uint32)
    return bits.view(np.float32)


def rounded(values: Float64) -> Float64:
    """To 8 significant bits (fewer below the least normal number), to nearest, ties away from zero: (elements,)."""
    quantum = np.ldexp(1.0, np.maximum(np.frexp(values)[1], -125) - 8)
    nearest: Float64 = np.copysign(np.floor(np.abs(values) / quantum + 0.5) * quantum, values)
    return nearest


def dequantized(wire: bytes, elements: int, codec: str) -> Float64:
    """A vector (elements,) from its bytes in int8 or int4, as `payload.quantize` describes them."""
    found, at = [], 0
    for start in range(0, elements, 256 * 256):
        blocks = -(-min(256 * 256, elements - start) // 256)
        scales = (np.frombuffer(wire, "<u2", blocks, at).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        size = 256 * blocks // (1 if codec == "int8" else 2)
        codes = np.frombuffer(wire, np.uint8, size, at + 2 * blocks).astype(np.int64)
        at += 2 * blocks + size
        if codec == "int4":
            codes = np.stack([codes % 16, codes // 16], axis=1).reshape(-1)
        half = 128 if codec == "int8" else 8
        values = np.where(codes < half, codes, codes - 2 * half)
        found.append(values * np.repeat(scales, 256))
    return np.concatenate(found)[:elements]
