"""What carries a learner's payloads to the bus and from it, and has its bases and residuals. asyncio.

The rest of the exchange decides: it follows heads, sends headers, reports. A learner that is one process carries all
itself (`OwnCarrier`); the ranks of a larger one carry a part each (`ranks.rank_carrier`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import BadMessage, BadPayload, PayloadIncomplete, UsageError
from diloco.pipeline.messages.head import Head, MergedBase
from diloco.pipeline.messages.tape import Contribution
from diloco.pipeline.payload import codec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Payload
from diloco.pipeline.transfer.global_format import Held
from diloco.pipeline.transfer.global_formats import FORMATS
from diloco.pipeline.transfer.payloads import pull_shown, push, push_growing
from diloco.workers.encoding import ErrorFeedback, apart
from diloco.workers.exchange.member import Member
from diloco.workers.rounds import Base, Publication

Float32 = npt.NDArray[np.float32]

DELTA_TTL_S = 600.0
"""A delta that nobody merged or refused is gone after this."""
INITIAL_TTL_S = 600.0
SLOW_PULL_S = 60.0
"""A payload that takes several reads is kept for so long from each one on."""
PART = 32
"""Of the fragments, one of so many is on its way at a time while a learner joins."""


class Feedback(Protocol):
    """What is told of the fate of deltas (`ErrorFeedback`)."""

    def merged(self, fragment: int, parts: Iterable[Contribution | MergedBase]) -> None:
        """These deltas were merged."""

    def passed(self, fragment: int, version: int) -> None:
        """The fragment is at `version`, and all merges until then were told."""

    def reset(self, fragment: int) -> None:
        """The fragment went back."""


class Carrier(Protocol):
    """One learner's. The exchange thread's."""

    lanes: int
    """Payloads under way at a time, each way: those of fragments p and q if p and q differ modulo this number."""

    @property
    def feedback(self) -> Feedback:
        """Of its deltas."""

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """Fetch a head's global: what the training side is to adopt (`Base.values`); None: it was replaced meanwhile.

        choose: gives the newest head of a fragment; called as the pull begins, and as it begins again: the last counts.

        Raises:
            BusError: it cannot be read, where that is not tried again by who carries it.
        """

    async def upload(self, publication: Publication, values: Any, of_use: Callable[[], bool]) -> bool:
        """Encode and upload a delta, for as long as it is of use; whether all of it is on the bus.

        values: the fragment at the snapshot, as the training side gave it.
        """

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """Upload a fragment as version 0: as last pulled, else as it is in the model. The number of chunks.

        Raises:
            UsageError: the values are not finite.
            BusError: it may not be there.
        """


async def on_all_lanes(work: Callable[[int], Coroutine[Any, Any, None]], lanes: int) -> None:
    """Do a work on each lane at the same time; the first error ends it on all of them."""
    try:
        async with asyncio.TaskGroup() as group:
            for lane in range(lanes):
                group.create_task(work(lane))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def some_at_once(work: Callable[[int], Coroutine[Any, Any, None]], fragments: Sequence[int]) -> None:
    """Do a work for each fragment, one of 32 of them at a time: so no number of round trips grows with theirs."""
    lanes = max(1, len(fragments) // PART)

    async def on(lane: int) -> None:
        for p in fragments[lane::lanes]:
            await work(p)

    await on_all_lanes(on, lanes)


def delta_key(member: Member, fragment: int, serial: int) -> str:
    """Of the payload of one of the learner's deltas."""
    return member.bus.keys.delta_payload(fragment, member.learner, member.incarnation, serial)


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Of a fragment."""

    version: int
    digest: bytes
    vectors: Mapping[str, Float32]


class OwnCarrier:
    """All of it is this process's own."""

    def __init__(self, member: Member, initial: Callable[[int], Float32]) -> None:
        """initial: fragment -> (elements,) of the initial parameters."""
        self.lanes = member.spec.sync.groups  # so that a node that is away holds up its own fragments alone
        self._member, self._initial = member, initial
        self._syncs = [fragment.sync(member.spec.sync) for fragment in member.layout.fragments]
        self.feedback = ErrorFeedback(member.learner, member.incarnation, member.encoder.grown)
        self._bases: dict[int, Base] = {}

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """As `Carrier`."""
        member, base = self._member, self._bases.get(fragment)
        flat = self._initial(fragment) if base is None else member.encoder.read(base.values)
        return await push_initial(member, fragment, nonce, flat)

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """As `Carrier`."""
        head = choose()
        member, p = self._member, head.fragment
        elements, sync, held = member.layout.fragments[p].elements, self._syncs[p], None
        if FORMATS[sync.global_codec].follows and (base := self._bases.get(p)) is not None:
            held = Held(base.version, base.digest, await member.offload(member.encoder.read, base.values))
        try:
            pulled = await pull_shown(member.bus, head, elements, sync, member.offload, SLOW_PULL_S, held)
        except BadPayload as error:
            member.log.warning("pull_failed", fragment=p, version=head.version, error=str(error))
            return None
        values = await apart(member.encoder, member.offload, elements, member.encoder.keep, pulled)
        self._bases[p] = Base(p, head.version, head.digest, values)
        return values

    def held(self, fragment: int) -> "HandedOver | None":
        """What another process needs to serve a fragment from here; None: the fate of a delta is not known yet."""
        if self.feedback.undecided(fragment):
            return None
        base, residual = self._bases[fragment], self.feedback.residual(fragment)
        vectors = {} if residual is None else {"residual": residual}
        if FORMATS[self._syncs[fragment].global_codec].follows:
            vectors["base"] = base.values
        return HandedOver(base.version, base.digest, vectors)

    def inherit(self, fragment: int, name: str, base: Base) -> None:
        """name: of a vector that another process has handed over, and which `base` has the values of."""
        if name == "base":
            self._bases[fragment] = base
        else:
            self.feedback.inherit(fragment, base.values)

    def drop(self, fragment: int) -> None:
        """Another process serves it."""
        self._bases.pop(fragment, None)
        self.feedback.reset(fragment)

    async def upload(self, publication: Publication, values: Any, of_use: Callable[[], bool]) -> bool:
        """As `Carrier`."""
        if not of_use():
            return False
        member, base, loop = self._member, publication.base, asyncio.get_running_loop()
        sync, more = self._syncs[base.fragment], asyncio.Event()
        wire = pooled(codec.payload_bytes(len(base.values), sync.codec))
        payload = Payload(codec.as_bytes(wire), sync.chunk_bytes, partial(loop.call_soon_threadsafe, more.set))

        def but_the_last(upto: int) -> None:
            """A delta whose last chunk is on the bus may be merged, and what it has lost has to be known by then."""
            payload.grow_to(min(upto, payload.nbytes - 1))

        async def encode() -> None:
            residual = self.feedback.residual(base.fragment)
            given = base.values, values, sync.codec, residual, wire, but_the_last
            error = await apart(member.encoder, member.offload, len(base.values), member.encoder.encode, *given)
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
        """As `upload`, of a payload that is made, by a codec that loses nothing that is kept."""
        payload = Payload(codec.as_bytes(wire), self._syncs[publication.base.fragment].chunk_bytes)
        await self._member.offload(payload.grow_to, payload.nbytes)
        return await self._push(publication, payload, asyncio.Event(), of_use)

    async def _push(
        self, publication: Publication, payload: Payload, more: asyncio.Event, of_use: Callable[[], bool]
    ) -> bool:
        """For as long as it is of use; whether all of it is there."""
        member, base, whole = self._member, publication.base, False

        async def send() -> None:
            nonlocal whole
            if of_use():
                key = delta_key(member, base.fragment, publication.serial)
                await push_growing(member.bus, key, payload, self._syncs[base.fragment].chunk_bytes, DELTA_TTL_S, more)
                told = {"fragment": base.fragment, "base": base.version, "tokens": publication.tokens}
                member.log.debug("delta_published", **told)
                whole = True

        try:
            await member.outages.retry(send, unless=PayloadIncomplete)
        except PayloadIncomplete:  # what was there is gone: the syncer refused it meanwhile, or the bus lost it
            pass
        except BadMessage as error:  # something else is there: as if it were gone
            member.outages.told(error, fragment=base.fragment)
        return whole


async def push_initial(member: Member, fragment: int, nonce: str, flat: Float32) -> int:
    """Upload values (elements,) as a fragment's version 0; as `Carrier.upload_initial`."""
    if not np.isfinite(flat).all():
        raise UsageError("the model's initial parameters are not finite: check its initialisation")
    key = member.bus.keys.initial_payload(fragment, nonce)
    return (await push(member.bus, key, flat, member.spec.sync.chunk_bytes, INITIAL_TTL_S)).chunks
