"""Global fragments on the bus. asyncio.

    global_codec   the global payload                           beside it
    fp32           the values                                   nothing
    bf16           the values, rounded (`halves`: high)         the rest: what they lack (`halves`: low)
    int8           the values of a key frame                    the last updates (`updates`), of which some led to it

With bf16 learners train from the rounded values: they are the base that deltas are measured from, so a delta holds what
was trained and nothing of the rounding. Whoever keeps the values (syncers, checkpoints, the evaluator) reads both
payloads and has them bit for bit: deltas are added to what was never rounded, and no error adds up.

With int8 the values are what the updates lead to, so all have the same. A learner that has one of the versions before
pulls the updates that it lacks; whoever has none of them, or cannot get them, pulls the key frame and those after it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .codec import PayloadReader, as_bytes, payload_digest
from .commits import Rest, Staged
from .errors import BadPayload
from .halves import complete, split, widened
from .head_messages import Head
from .payload_messages import Update
from .payloads import pull, push
from .ports import Bus
from .spec_messages import SyncSpec
from .updates import advance, gather
from .wire import Codec

Float32 = npt.NDArray[np.float32]
Offload = Callable[..., Awaitable[Any]]
KEPT_S = 60.0
"""What a pull needs lives on for so long at least."""


class Held(NamedTuple):
    """Values (elements,) that somebody has, by version and digest."""

    version: int
    digest: bytes
    values: Float32


async def push_global(
    bus: Bus, fragment: int, version: int, nonce: str, values: Float32, sync: SyncSpec, ttl_s: float
) -> tuple[Staged, Rest | None]:
    """Upload a global (elements,) that is here in full, for a commit: its payload and its rest.

    nonce: the same one and the same values may be uploaded again.
    """
    key = bus.keys.global_payload(fragment, version, nonce)
    if sync.global_codec != "bf16":
        return await push(bus, key, values, sync.chunk_bytes, ttl_s), None
    high, low = np.empty(len(values), np.uint16), np.empty(len(values), np.uint16)
    split(values, high, low)
    staged = await push(bus, key, high, sync.chunk_bytes, ttl_s)
    rest = await push(bus, bus.keys.rest_payload(fragment, version, nonce), low, sync.chunk_bytes, ttl_s)
    return staged, Rest(rest.key, rest.chunks, payload_digest(as_bytes(high), sync.chunk_bytes))


async def pull_state(
    bus: Bus, head: Head, elements: int, sync: SyncSpec, offload: Offload
) -> tuple[Float32, Float32 | None]:
    """The values and the outer momentum (None: all zeros) at a head, each (elements,), as they were merged.

    offload: runs heavy work.

    Raises:
        BadPayload: as `pull`, or the values do not have the head's digest. The head may have moved: read it again.
    """
    if sync.global_codec == "int8":
        return await _pull_whole(bus, head, elements, sync, offload, momentum=True)
    theta = await pull_exact(bus, head, elements, sync, offload)
    return theta, await _pull_momentum(bus, head, elements, sync)


async def pull_exact(bus: Bus, head: Head, elements: int, sync: SyncSpec, offload: Offload) -> Float32:
    """The values (elements,) at a head, bit for bit as they were merged.

    offload: as `pull_state`.

    Raises:
        BadPayload: as `pull_state`.
    """
    if sync.global_codec == "int8":
        return (await _pull_whole(bus, head, elements, sync, offload))[0]
    reader = await _pull(bus, head.payload, elements, sync.global_codec, sync)
    if not head.rest:
        _check(head, reader.digest, head.digest)
        exact: Float32 = reader.array()
        return exact
    values: Float32 = await offload(widened, reader.array())
    del reader  # many owners begin at once: no more than one half of each fragment is here beside its values
    rest = await pull(bus, head.rest, elements, "bf16", sync.chunk_bytes)  # as many bytes
    _check(head, await offload(_completed, values, rest.array(), sync.chunk_bytes), head.digest)
    return values


async def pull_shown(
    bus: Bus,
    head: Head,
    elements: int,
    sync: SyncSpec,
    offload: Offload,
    extend_s: float = KEPT_S,
    held: Held | None = None,
) -> Float32:
    """The values (elements,) that learners train from at a head, in an array that nobody else has.

    offload, extend_s: as `pull_state`; as `pull`. held: what is here already; it is left as it is.

    Raises:
        BadPayload: as `pull_state`.
    """
    if sync.global_codec != "int8":
        reader = await _pull(bus, head.payload, elements, sync.global_codec, sync, extend_s)
        _check(head, reader.digest, head.payload_digest or head.digest)
        values: Float32 = reader.array() if sync.global_codec == "fp32" else await offload(widened, reader.array())
        return values
    lacking = updates_after(head, held)
    if held is not None and lacking:
        try:
            values, _ = await _follow(bus, (held.values, None), lacking, sync, offload, extend_s, own=False)
            await _check_values(head, values, sync, offload)
            return values
        except BadPayload:
            pass  # one of them has gone, or led elsewhere: a key frame begins anew
    return (await _pull_whole(bus, head, elements, sync, offload, extend_s))[0]


def updates_after(head: Head, held: Held | None) -> tuple[Update, ...]:
    """The updates that lead from what somebody holds to a head; none if it holds no base of any of them."""
    count = 0 if held is None else head.version - held.version
    if held is None or not 0 < count <= len(head.updates) or head.updates[-count].base != held.digest:
        return ()
    return head.updates[-count:]


# --- parts -------------------------------------------------------------------------------------------


def _after_key_frame(head: Head) -> tuple[Update, ...]:
    return head.updates[len(head.updates) - head.behind :]


async def _pull_whole(
    bus: Bus,
    head: Head,
    elements: int,
    sync: SyncSpec,
    offload: Offload,
    extend_s: float = KEPT_S,
    *,
    momentum: bool = False,
) -> tuple[Float32, Float32 | None]:
    """The key frame and the updates after it; the momentum too, where it is wanted."""
    theta: Float32 = (await _pull(bus, head.payload, elements, "fp32", sync, extend_s)).array()
    begun = theta, await _pull_momentum(bus, head, elements, sync) if momentum else None
    state = await _follow(bus, begun, _after_key_frame(head), sync, offload, extend_s, momentum=momentum)
    await _check_values(head, state[0], sync, offload)
    return state


async def _pull_momentum(bus: Bus, head: Head, elements: int, sync: SyncSpec) -> Float32 | None:
    """That which the head names; None: all zeros."""
    return (await _pull(bus, head.momentum, elements, "fp32", sync)).array() if head.momentum else None


async def _follow(
    bus: Bus,
    state: tuple[Float32, Float32 | None],
    updates: Sequence[Update],
    sync: SyncSpec,
    offload: Offload,
    extend_s: float = KEPT_S,
    *,
    own: bool = True,
    momentum: bool = False,
) -> tuple[Float32, Float32 | None]:
    """Values and momentum after some updates.

    own: the arrays may be written to. momentum: it is wanted.
    """
    theta, gathered = state
    for update in updates:
        reader = await _pull(bus, update.payload, len(theta), "int8", sync, extend_s)
        outer = None
        if momentum and (update.averaged or not sync.outer_momentum):
            gathered = None
        elif momentum:
            outer = (sync.outer_lr, sync.outer_momentum)
        if outer and update.merged:
            merged = await _pull(bus, update.merged, len(theta), "int8", sync, extend_s)
            gathered, outer = await offload(gather, gathered, merged.vector(), sync.outer_momentum), None
        theta, gathered = await offload(advance, theta, gathered, reader.vector(), outer, own)
        own = True
    return theta, gathered


async def _pull(
    bus: Bus, key: str, elements: int, codec: Codec, sync: SyncSpec, extend_s: float = KEPT_S
) -> PayloadReader:
    return await pull(bus, key, elements, codec, sync.chunk_bytes, extend_s)


def _completed(values: Float32, low: npt.NDArray[Any], chunk_bytes: int) -> bytes:
    complete(values, low)
    return payload_digest(as_bytes(values), chunk_bytes)


async def _check_values(head: Head, values: Float32, sync: SyncSpec, offload: Offload) -> None:
    _check(head, await offload(payload_digest, as_bytes(values), sync.chunk_bytes), head.digest)


def _check(head: Head, digest: bytes, due: bytes) -> None:
    if digest != due:
        raise BadPayload(f"the payload of fragment {head.fragment} version {head.version} is not its head's")
