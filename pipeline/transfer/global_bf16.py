"""Globals in two halves of 16 bits (`halves`): the rounded values, and the rest that rounding removed. Pure.

Learners train from the rounded values. These are also the base that deltas are measured from, so a delta contains what
was trained and no rounding error. Parties that keep the values (syncers, checkpoints, the evaluator) read both payloads
and have them bit for bit: deltas are added to values that were never rounded, so no error accumulates.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.codec import Grown, Payload, as_bytes, payload_digest
from diloco.pipeline.transfer.global_format import (
    Float32,
    Fp32Writer,
    GlobalFormat,
    GlobalWriter,
    Held,
    Kind,
    Source,
    check,
)
from diloco.pipeline.transfer.halves import Halves, complete, split, widened


class _Writer(Fp32Writer):
    def __init__(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> None:
        super().__init__(fragment, elements, sync, grown)
        self._halves = Halves(elements, sync.chunk_bytes, grown)

    def written(self, stop: int) -> int:
        self._halves.grow_to(self.values, stop)
        return super().written(stop)  # the exact values are not uploaded, but their digest is the head's

    def uploads(self, version: int) -> dict[Kind, Payload]:
        return {"global": self._halves.high, "rest": self._halves.low}


class Bf16Globals(GlobalFormat):
    """Globals as bf16 values and the 16 bits that these lack."""

    def writer(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> GlobalWriter:
        return _Writer(fragment, elements, sync, grown)

    def whole(self, values: Float32) -> Mapping[Kind, npt.NDArray[Any]]:
        high, low = np.empty(len(values), np.uint16), np.empty(len(values), np.uint16)
        split(values, high, low)
        return {"global": high, "rest": low}

    async def exact(self, source: Source) -> Float32:
        head = source.head
        reader = await source.pull(head.payload, "bf16")
        values: Float32 = await source.work(widened, reader.array())
        del reader  # free it now: many fragments are read at once, so each holds at most one half besides its values
        rest = await source.pull(head.rest, "bf16")  # 16 bits of any kind: "bf16" only gives the size
        check(head, await source.work(_completed, values, rest.array(), source.sync.chunk_bytes), head.digest)
        return values

    async def shown(self, source: Source, held: Held | None) -> Float32:
        head = source.head
        reader = await source.pull(head.payload, "bf16")
        check(head, reader.digest, head.payload_digest or head.digest)
        values: Float32 = await source.work(widened, reader.array())
        return values


def _completed(values: Float32, low: npt.NDArray[Any], chunk_bytes: int) -> bytes:
    complete(values, low)
    return payload_digest(as_bytes(values), chunk_bytes)
