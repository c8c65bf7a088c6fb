"""Global fragments on the bus. asyncio.

    global_codec   the global payload, which learners pull      its rest
    fp32           the values                                   none
    bf16           the values, rounded (`halves`: high)         what they lack (`halves`: low)

Learners train from the rounded values: they are the base that deltas are measured from, so a delta holds what was
trained and nothing of the rounding. Whoever keeps the values (syncers, checkpoints, the evaluator) reads both payloads
and has them bit for bit: deltas are added to what was never rounded, and no error adds up.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import PayloadReader, as_bytes, payload_digest
from .errors import BadPayload
from .halves import complete, split, widened
from .messages import Head, SyncSpec
from .payloads import pull, push
from .ports import Bus, Rest, Staged

Float32 = npt.NDArray[np.float32]
Offload = Callable[..., Awaitable[Any]]


async def push_global(
    bus: Bus, fragment: int, version: int, nonce: str, values: Float32, sync: SyncSpec, ttl_s: float
) -> tuple[Staged, Rest | None]:
    """Upload a global (elements,) that is here in full, for a commit: its payload and its rest.

    nonce: the same one and the same values may be uploaded again.
    """
    key = bus.keys.global_payload(fragment, version, nonce)
    if sync.global_codec == "fp32":
        return await push(bus, key, values, sync.chunk_bytes, ttl_s), None
    high, low = np.empty(len(values), np.uint16), np.empty(len(values), np.uint16)
    split(values, high, low)
    staged = await push(bus, key, high, sync.chunk_bytes, ttl_s)
    rest = await push(bus, bus.keys.rest_payload(fragment, version, nonce), low, sync.chunk_bytes, ttl_s)
    return staged, Rest(rest.key, rest.chunks, payload_digest(as_bytes(high), sync.chunk_bytes))


async def pull_exact(bus: Bus, head: Head, elements: int, sync: SyncSpec, offload: Offload) -> Float32:
    """The values (elements,) at a head, bit for bit as they were merged.

    offload: runs heavy work.

    Raises:
        BadPayload: as `pull`, or they do not have the head's digest. The head may have moved: read it again.
    """
    reader = await _pull(bus, head, elements, sync)
    if not head.rest:
        _check(head, reader.digest, head.digest)
        exact: Float32 = reader.array()
        return exact
    values: Float32 = await offload(widened, reader.array())
    del reader  # many owners begin at once: no more than one half of each fragment is here beside its values
    rest = await pull(bus, head.rest, elements, "bf16", sync.chunk_bytes)  # as many bytes
    _check(head, await offload(_completed, values, rest.array(), sync.chunk_bytes), head.digest)
    return values


async def pull_shown(bus: Bus, head: Head, elements: int, sync: SyncSpec, offload: Offload, extend_s: float) -> Float32:
    """The values (elements,) that learners train from at a head.

    offload, extend_s: as `pull_exact`; as `pull`.

    Raises:
        BadPayload: as `pull_exact`.
    """
    reader = await _pull(bus, head, elements, sync, extend_s)
    _check(head, reader.digest, head.payload_digest or head.digest)
    values: Float32 = reader.array() if sync.global_codec == "fp32" else await offload(widened, reader.array())
    return values


async def _pull(bus: Bus, head: Head, elements: int, sync: SyncSpec, extend_s: float = 60.0) -> PayloadReader:
    return await pull(bus, head.payload, elements, sync.global_codec, sync.chunk_bytes, extend_s)


def _completed(values: Float32, low: npt.NDArray[Any], chunk_bytes: int) -> bytes:
    complete(values, low)
    return payload_digest(as_bytes(values), chunk_bytes)


def _check(head: Head, digest: bytes, due: bytes) -> None:
    if digest != due:
        raise BadPayload(f"the payload of fragment {head.fragment} version {head.version} is not its head's")
