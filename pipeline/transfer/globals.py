"""Globals on the bus, in the run's `global_codec`: written while the outer step is taken, and read. Pure.

A published version has payloads of these kinds, which are also the names of their keys:

global_codec   global               rest                     momentum
fp32           the values           none                     the outer optimizer's, fp32; none for all zeros
bf16           the rounded values   what rounding removed    the same

Learners train from the rounded values. These are also the base that deltas are measured from, so a delta contains what
was trained and no rounding error. Parties that keep the values (syncers, checkpoints, the evaluator) read both payloads
and have them bit for bit: deltas are added to values that were never rounded, so no error accumulates.

The two are halves of 16 bits, in as many bytes as the float32 vector:

    high   bfloat16: the values rounded to nearest, ties away from zero
    low    the lower 16 bits of the float32

As integers, bits = (high << 16) + low modulo 2^32, with low as a signed number, -32768..32767. Ties are not rounded to
even: then the tie above an even number and the one below it would both become that number, which makes 65537 floats,
one more than 16 bits can tell apart. Values from 3.396e38 on, which are finite in float32, round to infinity.
"""

from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus.commits import Published, Remainder, Staged
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, as_bytes, chunk_count, do_nothing, payload_digest
from diloco.pipeline.transfer.payloads import Offload, pull, push_payload

Float32 = npt.NDArray[np.float32]
Half = npt.NDArray[np.uint16]
Kind = Literal["global", "rest", "momentum"]

# Elements processed at a time, such that intermediate arrays stay in the cache.
BLOCK = 128 * 1024
# Bytes per element in either half.
ITEM = 2

_BITS = np.uint32(16)
_HALF = np.uint32(0x8000)


def key_of(keys: RunKeys, kind: Kind, fragment: int, version: int, nonce: str) -> str:
    """Return the key of a version's payload."""
    key: str = getattr(keys, f"{kind}_payload")(fragment, version, nonce)
    return key


# --- halves of 16 bits -------------------------------------------------------------------------------


def split(values: Float32, high: Half, low: Half) -> None:
    """Split `values` into both halves; all three are (elements,)."""
    scratch = np.empty(min(BLOCK, len(values)), np.uint32)
    for start in range(0, len(values), BLOCK):
        piece = slice(start, start + BLOCK)
        bits = values[piece].view(np.uint32)
        rounded = scratch[: len(bits)]
        np.add(bits, _HALF, out=rounded)
        np.right_shift(rounded, _BITS, out=rounded)
        np.copyto(high[piece], rounded, casting="unsafe")
        np.copyto(low[piece], bits, casting="unsafe")  # modulo 2^16


def widened(high: npt.NDArray[np.generic]) -> Float32:
    """Return the rounded values (elements,) from the high half, which has 16 bits per element."""
    values = pooled(len(high), np.float32)
    for start in range(0, len(high), BLOCK):
        piece = slice(start, start + BLOCK)
        np.copyto(values[piece], high[piece].view(ml_dtypes.bfloat16))
    return values


def complete(values: Float32, low: npt.NDArray[np.generic]) -> None:
    """Restore in place the exact values (elements,) from rounded ones that `widened` returned.

    low: (elements,) of 16 bits each.
    """
    signed = np.empty(min(BLOCK, len(values)), np.int32)
    for start in range(0, len(values), BLOCK):
        piece = slice(start, start + BLOCK)
        bits = values[piece].view(np.uint32)
        np.copyto(signed[: len(bits)], low[piece].view(np.int16))
        np.add(bits, signed[: len(bits)].view(np.uint32), out=bits)


class Halves:
    """Both halves of a vector that is written from front to back, as payloads."""

    def __init__(self, elements: int, chunk_bytes: int, grown: Grown = do_nothing) -> None:
        """Allocate both halves; `grown` is called as in `Payload`."""
        self._high, self._low = pooled(elements, np.uint16), pooled(elements, np.uint16)
        self._done = 0
        self.high = Payload(as_bytes(self._high), chunk_bytes, grown)
        self.low = Payload(as_bytes(self._low), chunk_bytes, grown)

    def grow_to(self, values: Float32, stop: int) -> None:
        """Declare all of `values` (elements,) before `stop` final."""
        piece = slice(self._done, stop)
        split(values[piece], self._high[piece], self._low[piece])
        self._done = stop
        self.high.grow_to(ITEM * stop)
        self.low.grow_to(ITEM * stop)


# --- publishing --------------------------------------------------------------------------------------


class GrowingGlobal:
    """Payloads of a new version, which can be uploaded while its values are written from front to back."""

    def __init__(self, values: Float32, momentum: Float32 | None, sync: SyncSpec, grown: Grown = do_nothing) -> None:
        """Allocate what the payloads need in addition to these arrays.

        Args:
            values: (elements,) exact values, to be written.
            momentum: (elements,) to be written; None: all zeros, which need no payload.
            sync: the run's settings.
            grown: called as in `Payload`.
        """
        rounded, chunk_bytes = sync.global_codec == "bf16", sync.chunk_bytes
        self._values = values
        self._exact = Payload(as_bytes(values), chunk_bytes, do_nothing if rounded else grown)
        self._halves = Halves(len(values), chunk_bytes, grown) if rounded else None
        self.payloads: dict[Kind, Payload] = {"global": self._exact}
        if self._halves is not None:
            self.payloads = {"global": self._halves.high, "rest": self._halves.low}
        if momentum is not None:
            self.payloads["momentum"] = Payload(as_bytes(momentum), chunk_bytes, grown)

    @property
    def digest(self) -> bytes:
        """Digest of the exact values, once all are written. It is the head's."""
        return self._exact.digest

    def grow_to(self, stop: int) -> None:
        """Declare all values and momenta of the elements before `stop` final."""
        if self._halves is not None:
            self._halves.grow_to(self._values, stop)
        self._exact.grow_to(4 * stop)
        if "momentum" in self.payloads:
            self.payloads["momentum"].grow_to(4 * stop)


def published(staged: Mapping[Kind, Staged], payloads: Mapping[Kind, Payload]) -> Published:
    """Return what a head names for a version; `payloads` are those that were staged."""
    rest = staged.get("rest")
    lacking = None if rest is None else Remainder(rest.key, rest.chunks, payloads["global"].digest)
    return Published(staged["global"], lacking, staged.get("momentum"))


def published_by(head: Head, elements: int, sync: SyncSpec) -> Published:
    """Return what a head already names."""
    rest = Remainder(head.rest, head.chunks, head.payload_digest or b"") if head.rest else None
    momentum = Staged(head.momentum, chunk_count(elements, "fp32", sync.chunk_bytes)) if head.momentum else None
    return Published(Staged(head.payload, head.chunks), rest, momentum)


async def push_global(
    bus: Bus,
    fragment: int,
    version: int,
    nonce: str,
    values: Float32,
    sync: SyncSpec,
    ttl_s: float,
    offload: Offload,
    momentum: Float32 | None = None,
) -> Published:
    """Upload values (elements,) as a version, for a commit.

    `nonce` is part of the keys: a repeated upload with the same nonce must have the same values. `momentum` is
    (elements,); None means zeros.
    """
    growing = GrowingGlobal(values, momentum, sync)
    await offload(growing.grow_to, len(values))
    staged = dict[Kind, Staged]()
    for kind, payload in growing.payloads.items():
        key = key_of(bus.keys, kind, fragment, version, nonce)
        staged[kind] = await push_payload(bus, key, payload, sync.chunk_bytes, ttl_s)
    return published(staged, growing.payloads)


# --- reading -----------------------------------------------------------------------------------------


async def pull_shown(bus: Bus, head: Head, elements: int, sync: SyncSpec, offload: Offload) -> Float32:
    """Return the values (elements,) that learners train from at a head, in an array that nothing else refers to.

    offload: runs heavy work.

    Raises:
        BadPayload: as in `pull`, or the values do not have the head's digest. The head may have moved: read it again.
    """
    reader = await pull(bus, head.payload, elements, sync.global_codec, sync.chunk_bytes)
    _check(head, reader.digest, head.payload_digest or head.digest)
    if sync.global_codec == "fp32":
        return reader.array()
    values: Float32 = await offload(widened, reader.array())
    return values


async def pull_exact(bus: Bus, head: Head, elements: int, sync: SyncSpec, offload: Offload) -> Float32:
    """Return the values (elements,) at a head, bit for bit as they were merged, as `pull_shown` does.

    Raises:
        BadPayload: as in `pull_shown`.
    """
    # Of many fragments that are read at once, each holds at most one half in addition to its values.
    values = await pull_shown(bus, head, elements, sync, offload)
    if sync.global_codec == "bf16":
        rest = await pull(bus, head.rest, elements, "bf16", sync.chunk_bytes)  # 16 bits of any kind: this is the size
        _check(head, await offload(_completed, values, rest.array(), sync.chunk_bytes), head.digest)
    return values


async def pull_state(
    bus: Bus, head: Head, elements: int, sync: SyncSpec, offload: Offload
) -> tuple[Float32, Float32 | None]:
    """Return the exact values (elements,) and the momentum (elements,) (None: zeros) at a head.

    Raises:
        BadPayload: as in `pull_shown`.
    """
    values = await pull_exact(bus, head, elements, sync, offload)
    if not head.momentum:
        return values, None
    return values, (await pull(bus, head.momentum, elements, "fp32", sync.chunk_bytes)).array()


def _check(head: Head, digest: bytes, due: bytes) -> None:
    if digest != due:
        raise BadPayload(f"the payload of fragment {head.fragment} version {head.version} does not match its head")


def _completed(values: Float32, low: npt.NDArray[Any], chunk_bytes: int) -> bytes:
    complete(values, low)
    return payload_digest(as_bytes(values), chunk_bytes)
