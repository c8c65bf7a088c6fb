"""The interface of the formats in which a run's globals lie on the bus, and the plainest format, fp32. Pure.

`global_bf16` and `global_int8` are the others, and `global_formats` is their table. A new format is a new file and a
line in that table.

A published version has payloads of these kinds, which are also the names of their keys:

    global     what learners pull, or the key frame on which the updates build
    rest       what the global payload lacks of the exact values
    update     the step that led to the version, quantized
    merged     the pseudogradient of that step, quantized, if it cannot be computed from the update
    momentum   the outer optimizer's momentum
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus.commits import Published, Rest, Staged
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, PayloadReader, as_bytes, chunk_count

Float32 = npt.NDArray[np.float32]
Kind = Literal["global", "rest", "update", "merged", "momentum"]


class Held(NamedTuple):
    """Values (elements,) that a caller already has, with their version and digest."""

    version: int
    digest: bytes
    values: Float32


def alone(staged: Mapping[Kind, Staged], payloads: Mapping[Kind, Payload]) -> Published:
    """Return what a head names for a version that depends on no other; `payloads` are those that were staged."""
    rest = staged.get("rest")
    lacking = None if rest is None else Rest(rest.key, rest.chunks, payloads["global"].digest)
    return Published(staged["global"], lacking, staged.get("momentum"))


def published_by(head: Head, elements: int, sync: SyncSpec) -> Published:
    """Return what a head already names."""
    rest = Rest(head.rest, head.chunks, head.payload_digest or b"") if head.rest else None
    momentum = Staged(head.momentum, chunk_count(elements, "fp32", sync.chunk_bytes)) if head.momentum else None
    return Published(Staged(head.payload, head.chunks), rest, momentum, head.updates, head.behind)


def key_of(keys: RunKeys, kind: Kind, fragment: int, version: int, nonce: str) -> str:
    """Return the key of a version's payload."""
    key: str = getattr(keys, f"{kind}_payload")(fragment, version, nonce)
    return key


def check(head: Head, digest: bytes, due: bytes) -> None:
    """Compare the digest of what was pulled with the digest that is due for the head.

    Raises:
        BadPayload: they differ.
    """
    if digest != due:
        raise BadPayload(f"the payload of fragment {head.fragment} version {head.version} does not match its head")


# --- the momentum ------------------------------------------------------------------------------------


class Momentum(NamedTuple):
    """The outer optimizer's momentum, b' = mu b + D, of a whole fragment or some of its elements."""

    before: Float32 | None
    """(elements,) b; None means zeros."""
    after: Float32
    """(elements,), overwritten with b'; may be `before` itself."""
    mu: float

    def part(self, piece: slice) -> "Momentum":
        """Return the momentum of some elements, sharing memory."""
        return Momentum(None if self.before is None else self.before[piece], self.after[piece], self.mu)

    def add(self, pseudogradient: Float32) -> None:
        """Compute the momentum after a step with the pseudogradient D (elements,)."""
        if self.before is None:
            self.after.fill(0)
        else:
            np.multiply(self.before, self.mu, out=self.after)
        np.add(self.after, pseudogradient, out=self.after)

    def follow(self, step: Float32, lr: float) -> None:
        """Compute the momentum after a step from what was subtracted from the values.

        With Nesterov's step s = lr (D + mu b') (`syncer.merging.outer`) the momentum follows from the step:

            D = (s/lr - mu^2 b) / (1 + mu)   so   b' = (mu b + s/lr) / (1 + mu)

        The step of an orthogonalised matrix does not determine D, so `add` is needed there.

        step: (elements,), overwritten.
        """
        np.divide(step, lr, out=step)
        if self.before is None:
            np.copyto(self.after, step)
        else:
            np.multiply(self.before, self.mu, out=self.after)
            np.add(self.after, step, out=self.after)
        np.divide(self.after, 1 + self.mu, out=self.after)


# --- publishing --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """The inputs of an outer step besides the pseudogradient."""

    theta: Float32
    """(elements,) values before the step."""
    lr: float
    momentum: Momentum | None
    """None if the step keeps no momentum."""


class StepWriter(Protocol):
    """Receives the progress of an outer step while it is computed."""

    def reduced(self) -> None:
        """The pseudogradient is complete in the array of the values, and no element has been stepped yet."""

    def written(self, stop: int) -> int:
        """The outer step has written all elements before `stop`. Return how many are final, with their momentum."""


class GlobalWriter(ABC):
    """The values of a new version, written from front to back, and its payloads, which can be uploaded as they grow."""

    takes_steps: ClassVar[bool] = False
    """True if the outer step writes what is to be subtracted from the old values, and the writer computes the new ones.
    """

    def __init__(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> None:
        self._fragment, self._elements, self._sync, self._grown = fragment, elements, sync, grown
        self.values: Float32 = pooled(elements, np.float32)
        """(elements,) first the pseudogradient, then the steps or the new values, in place."""
        self.exact = Payload(as_bytes(self.values), sync.chunk_bytes, grown)
        """Payload of the values. Not every format uploads it; its digest is the head's in any case."""

    @abstractmethod
    def prepare(self, *, averaged: bool, told: bool) -> None:
        """Announce the kind of step, before the uploads begin.

        Args:
            averaged: the step only averages learners, and leaves no momentum.
            told: the momentum can be computed from the step alone.
        """

    @abstractmethod
    def step_writer(self, step: Step) -> StepWriter:
        """Return the writer for this step. Called once."""

    def is_alone(self, version: int) -> bool:
        """Return whether a version is published in full, so that it depends on no other one."""
        return True

    @abstractmethod
    def uploads(self, version: int) -> dict[Kind, Payload]:
        """Return the payloads of a version to upload, besides the momentum."""

    def published(self, head: Head, staged: Mapping[Kind, Staged]) -> Published:
        """Return what the next head names.

        staged: all uploads, including the momentum if the version is published in full and has one.
        """
        return alone(staged, self.uploads(head.version + 1))


# --- reading -----------------------------------------------------------------------------------------


class Source(Protocol):
    """Access to one head's payloads, from which a format reads."""

    @property
    def head(self) -> Head:
        """The head to read."""

    @property
    def sync(self) -> SyncSpec:
        """The run's settings."""

    async def pull(self, key: str, codec: Codec) -> PayloadReader:
        """Pull a payload with the fragment's number of elements.

        Raises:
            BadPayload: as in `payloads.pull`.
        """

    async def pull_momentum(self) -> Float32 | None:
        """Pull the momentum (elements,) that the head names; None means zeros. Raises as `pull`."""

    def work(self, heavy: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Run heavy work where it does not block the event loop."""


class GlobalFormat(ABC):
    """One format of globals on the bus. All reads raise BadPayload if what is there does not have the head's digest."""

    follows: ClassVar[bool] = False
    """True if a reader that has an earlier version can continue from it."""

    @abstractmethod
    def writer(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> GlobalWriter:
        """Return a writer for a new version."""

    @abstractmethod
    def whole(self, values: Float32) -> Mapping[Kind, npt.NDArray[Any]]:
        """Return the payloads that publish these values (elements,) in full."""

    @abstractmethod
    async def exact(self, source: Source) -> Float32:
        """Return the values (elements,), bit for bit as they were merged, in an array that nothing else refers to."""

    @abstractmethod
    async def shown(self, source: Source, held: Held | None) -> Float32:
        """Return the values that learners train from, in a new array. `held` are values at hand, not to be changed."""

    async def state(self, source: Source) -> tuple[Float32, Float32 | None]:
        """Return the exact values and the momentum (None: zeros)."""
        return await self.exact(source), await source.pull_momentum()

    def sizes(self, head: Head, elements: int) -> dict[str, int]:
        """Return the bytes of each payload of values that a head names; payloads that belong together count as one."""
        return {head.payload: 4 * elements} | ({head.rest: 0} if head.rest else {})


# --- fp32: the payload has the values, and there is nothing beside it ------------------------------------


class Fp32Writer(GlobalWriter):
    """Writer of fp32 globals: the values are the payload."""

    def prepare(self, *, averaged: bool, told: bool) -> None:
        """Do nothing: all kinds of steps are written alike."""

    def step_writer(self, step: Step) -> StepWriter:
        return self

    def reduced(self) -> None:
        """Do nothing: the pseudogradient is not published."""

    def written(self, stop: int) -> int:
        self.exact.grow_to(self.values.itemsize * stop)
        return stop

    def uploads(self, version: int) -> dict[Kind, Payload]:
        return {"global": self.exact}


class Fp32Globals(GlobalFormat):
    """Globals in fp32: the payload has the values, and nothing else is needed."""

    def writer(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> GlobalWriter:
        return Fp32Writer(fragment, elements, sync, grown)

    def whole(self, values: Float32) -> Mapping[Kind, npt.NDArray[Any]]:
        return {"global": values}

    async def exact(self, source: Source) -> Float32:
        reader = await source.pull(source.head.payload, "fp32")
        check(source.head, reader.digest, source.head.digest)
        return reader.array()

    async def shown(self, source: Source, held: Held | None) -> Float32:
        return await self.exact(source)
