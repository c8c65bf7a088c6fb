"""Move a learner's payloads to and from the bus, and keep its bases and residuals. Runs on asyncio.

The rest of the exchange decides what to move: it follows heads, sends headers, reports. A learner that is one process
carries everything itself (`OwnCarrier`); the ranks of a larger one carry a part each (`ranks.rank_carrier`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Never, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import BadMessage, BadPayload, PayloadIncomplete, UsageError
from diloco.pipeline.messages.fragment import Contribution, Head, MergedBase
from diloco.pipeline.payload import codec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Payload
from diloco.pipeline.transfer.globals import pull_shown
from diloco.pipeline.transfer.payloads import push, push_growing
from diloco.workers.encoding import ErrorFeedback, Float32, Snapshot, offload_if_large
from diloco.workers.exchange.member import Member
from diloco.workers.rounds import Base, Publication
from diloco.workers.times import TIMES

S_contra = TypeVar("S_contra", contravariant=True)

# While a learner joins, one in this many fragments is in flight at a time.
PART = 32


class Feedback(Protocol):
    """The receiver of news about the fate of deltas (`ErrorFeedback`)."""

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """Note that these deltas were merged."""

    def passed(self, fragment: int, version: int) -> None:
        """Note that the fragment is at `version`, and that all merges until then were reported."""

    def reset(self, fragment: int) -> None:
        """Note that the fragment went back to an earlier version."""


class Carrier(Protocol[S_contra]):
    """The payload side of one learner; used by the exchange thread. S_contra: its form of a fragment's snapshot."""

    lanes: int
    """Payloads in flight at a time, each way: fragments p and q move independently if they differ modulo this number.
    """

    @property
    def feedback(self) -> Feedback:
        """The receiver of news about this learner's deltas."""

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """Fetch a head's global in the form that the training side adopts (`Base.values`); None: it was replaced.

        choose: returns the newest head of a fragment. It is called when the pull begins, and whenever it begins again;
        the last call counts.

        Raises:
            BusError: it cannot be read, unless the carrier retries on its own.
        """

    async def upload(self, publication: Publication, snapshot: S_contra, of_use: Callable[[], bool]) -> bool:
        """Encode and upload a delta, for as long as it is of use; return whether all of it is on the bus."""

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """Upload a fragment as version 0, as last pulled or else as it is in the model; return the number of chunks.

        Raises:
            UsageError: the values are not finite.
            BusError: the upload may be incomplete.
        """


NoDeltas = Carrier[Never]  # for a part of the exchange that uploads none


async def on_all_lanes(work: Callable[[int], Coroutine[Any, Any, None]], lanes: int) -> None:
    """Run `work` on all lanes concurrently; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for lane in range(lanes):
                group.create_task(work(lane))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def run_concurrently(work: Callable[[int], Coroutine[Any, Any, None]], fragments: Sequence[int]) -> None:
    """Run `work` for each fragment, one in `PART` of them at a time.

    So the number of consecutive round trips does not grow with the number of fragments.
    """
    lanes = max(1, len(fragments) // PART)

    async def on(lane: int) -> None:
        for p in fragments[lane::lanes]:
            await work(p)

    await on_all_lanes(on, lanes)


def delta_key(member: Member, fragment: int, serial: int) -> str:
    """Return the bus key of the payload of one of the learner's deltas."""
    return member.bus.keys.delta_payload(fragment, member.learner, member.incarnation, serial)


class OwnCarrier:
    """The carrier of a learner that is one process: everything is its own."""

    def __init__(self, member: Member, initial: Callable[[int], Float32]) -> None:
        """initial: fragment -> (elements,) of the initial parameters."""
        self.lanes = member.spec.sync.groups  # a lane per group: an unreachable node holds up only its own fragments
        self._member, self._initial = member, initial
        self._syncs = [fragment.sync(member.spec.sync) for fragment in member.layout.fragments]
        self.feedback = ErrorFeedback(member.learner, member.incarnation, member.encoder.grown)
        self._bases: dict[int, Base] = {}

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """Upload a fragment as version 0; see `Carrier.upload_initial`."""
        member, base = self._member, self._bases.get(fragment)
        flat = self._initial(fragment) if base is None else member.encoder.read(base.values)
        return await push_initial(member, fragment, nonce, flat)

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """Fetch a head's global; see `Carrier.pull`."""
        head = choose()
        member, p = self._member, head.fragment
        elements, sync = member.layout.fragments[p].elements, self._syncs[p]
        try:
            pulled = await pull_shown(member.bus, head, elements, sync, member.offload)
        except BadPayload as error:
            member.log.warning("pull_failed", fragment=p, version=head.version, error=str(error))
            return None
        values = await offload_if_large(member.encoder, member.offload, elements, member.encoder.keep, pulled)
        self._bases[p] = Base(p, head.version, head.digest, values)
        return values

    def drop(self, fragment: int) -> None:
        """Release what is held of a fragment: the learner has ended."""
        self._bases.pop(fragment, None)
        self.feedback.reset(fragment)

    async def upload(self, publication: Publication, snapshot: Snapshot, of_use: Callable[[], bool]) -> bool:
        """Encode and upload a delta; see `Carrier.upload`. The upload begins while the rest is still encoded."""
        if not of_use():
            return False
        member, base, loop = self._member, publication.base, asyncio.get_running_loop()
        sync, more = self._syncs[base.fragment], asyncio.Event()
        wire = pooled(codec.payload_bytes(len(base.values), sync.codec))
        payload = Payload(codec.as_bytes(wire), sync.chunk_bytes, partial(loop.call_soon_threadsafe, more.set))

        def all_but_last(upto: int) -> None:
            # The last byte is withheld until `feedback.sent` was called: a complete delta may be merged at once, and
            # `feedback.merged` would not know its encoding error yet.
            payload.grow_to(min(upto, payload.nbytes - 1))

        async def encode() -> None:
            residual = self.feedback.residual(base.fragment)
            given = base.values, snapshot, sync.codec, residual, wire, all_but_last
            error = await offload_if_large(
                member.encoder, member.offload, len(base.values), member.encoder.encode, *given
            )
            if error is not None:
                self.feedback.sent(base.fragment, (base.version, publication.tokens), residual, error)
            payload.grow_to(payload.nbytes)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(encode())
                return await self._push(publication, payload, more, of_use)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def upload_encoded(
        self, publication: Publication, wire: npt.NDArray[Any], of_use: Callable[[], bool]
    ) -> bool:
        """Upload a delta that is encoded already, by a codec without residuals; otherwise like `upload`."""
        payload = Payload(codec.as_bytes(wire), self._syncs[publication.base.fragment].chunk_bytes)
        await self._member.offload(payload.grow_to, payload.nbytes)
        return await self._push(publication, payload, asyncio.Event(), of_use)

    async def _push(
        self, publication: Publication, payload: Payload, more: asyncio.Event, of_use: Callable[[], bool]
    ) -> bool:
        """Upload a payload for as long as it is of use; return whether all of it is there."""
        member, base, whole = self._member, publication.base, False

        async def send() -> None:
            nonlocal whole
            if of_use():
                key = delta_key(member, base.fragment, publication.serial)
                chunk_bytes = self._syncs[base.fragment].chunk_bytes
                await push_growing(member.bus, key, payload, chunk_bytes, TIMES.payload_ttl_s, more)
                told = {"fragment": base.fragment, "base": base.version, "tokens": publication.tokens}
                member.log.debug("delta_published", **told)
                whole = True

        try:
            await member.outages.retry(send, unless=PayloadIncomplete)
        except PayloadIncomplete:  # the part on the bus is gone: the syncer refused it meanwhile, or the bus lost it
            pass
        except BadMessage as error:  # something foreign is under its key: treated as if it were gone
            member.outages.log_error(error, fragment=base.fragment)
        return whole


async def push_initial(member: Member, fragment: int, nonce: str, flat: Float32) -> int:
    """Upload values (elements,) as a fragment's version 0; return and raise as `Carrier.upload_initial` does."""
    if not np.isfinite(flat).all():
        raise UsageError("the model's initial parameters are not finite: check its initialisation")
    key = member.bus.keys.initial_payload(fragment, nonce)
    return (await push(member.bus, key, flat, member.spec.sync.chunk_bytes, TIMES.payload_ttl_s)).chunks
