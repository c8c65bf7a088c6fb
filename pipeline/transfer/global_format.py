"""How a run's globals lie on the bus: what every format is asked, by those who publish and those who read. Pure.

The plainest, fp32, stands here; `global_bf16` and `global_int8` are the others, and `global_formats` is their table. A
new one is a file and a line there.

A published version has payloads of these kinds, which are also the names of their keys:

    global     what learners pull, or the key frame that updates lead on from
    rest       what the global payload lacks of the exact values
    update     the step that led to the version, quantized
    merged     the pseudogradient of that step, quantized, where the update does not tell it
    momentum   the outer optimizer's
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
    """Values (elements,) that somebody has, by version and digest."""

    version: int
    digest: bytes
    values: Float32


def alone(staged: Mapping[Kind, Staged], payloads: Mapping[Kind, Payload]) -> Published:
    """A version that needs no other one; `payloads`: what was staged."""
    rest = staged.get("rest")
    lacking = None if rest is None else Rest(rest.key, rest.chunks, payloads["global"].digest)
    return Published(staged["global"], lacking, staged.get("momentum"))


def published_by(head: Head, elements: int, sync: SyncSpec) -> Published:
    """What a head names already."""
    rest = Rest(head.rest, head.chunks, head.payload_digest or b"") if head.rest else None
    momentum = Staged(head.momentum, chunk_count(elements, "fp32", sync.chunk_bytes)) if head.momentum else None
    return Published(Staged(head.payload, head.chunks), rest, momentum, head.updates, head.behind)


def key_of(keys: RunKeys, kind: Kind, fragment: int, version: int, nonce: str) -> str:
    """Where a payload of a version lies."""
    key: str = getattr(keys, f"{kind}_payload")(fragment, version, nonce)
    return key


def check(head: Head, digest: bytes, due: bytes) -> None:
    """Whether what was pulled is what the head says.

    Raises:
        BadPayload: it is not.
    """
    if digest != due:
        raise BadPayload(f"the payload of fragment {head.fragment} version {head.version} is not its head's")


# --- the momentum ------------------------------------------------------------------------------------


class Momentum(NamedTuple):
    """The outer optimizer's momentum, b' = mu b + D, of a whole fragment or of some of its elements."""

    before: Float32 | None
    """(elements,) b; None: zeros."""
    after: Float32
    """(elements,), overwritten with the new b; it may be `before`."""
    mu: float

    def part(self, piece: slice) -> "Momentum":
        """Of some elements, sharing memory."""
        return Momentum(None if self.before is None else self.before[piece], self.after[piece], self.mu)

    def add(self, pseudogradient: Float32) -> None:
        """Make it what it is after a step of this pseudogradient D (elements,)."""
        if self.before is None:
            self.after.fill(0)
        else:
            np.multiply(self.before, self.mu, out=self.after)
        np.add(self.after, pseudogradient, out=self.after)

    def follow(self, step: Float32, lr: float) -> None:
        """Make it what it is after a step of which only this is known: what was subtracted from the values.

        With Nesterov's step s = lr (D + mu b') (`syncer.merging.outer`) the momentum follows from it:

            D = (s/lr - mu^2 b) / (1 + mu)   so   b' = (mu b + s/lr) / (1 + mu)

        A matrix that was orthogonalised does not tell D, so there D itself must be known.

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
    """What an outer step goes from."""

    theta: Float32
    """(elements,) values before it."""
    lr: float
    momentum: Momentum | None
    """None: the step keeps none."""


class StepWriter(Protocol):
    """A writer while the outer step is taken."""

    def reduced(self) -> None:
        """All of the pseudogradient is where the values will be, and no element of it has been stepped yet."""

    def written(self, stop: int) -> int:
        """All elements before `stop` are as the outer step makes them. How many are values now, with their momentum."""


class GlobalWriter(ABC):
    """The values of a version in the making, written from front to back, and its payloads while they grow."""

    takes_steps: ClassVar[bool] = False
    """It is given what the outer step subtracts from the values before, and makes the values of it."""

    def __init__(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> None:
        self._fragment, self._elements, self._sync, self._grown = fragment, elements, sync, grown
        self.values: Float32 = pooled(elements, np.float32)
        """(elements,) first the pseudogradient, then the steps or the values."""
        self.exact = Payload(as_bytes(self.values), sync.chunk_bytes, grown)
        """Of the values; not every format uploads it."""

    @abstractmethod
    def prepare(self, *, averaged: bool, told: bool) -> None:
        """Before the uploads begin: what the step will be.

        Args:
            averaged: it only averages learners: no momentum is left after it.
            told: the momentum can be followed from the step alone.
        """

    @abstractmethod
    def step_writer(self, step: Step) -> StepWriter:
        """What writes this step; once for a writer."""

    def is_alone(self, version: int) -> bool:
        """Whether a version is published such that it needs no other one."""
        return True

    @abstractmethod
    def uploads(self, version: int) -> dict[Kind, Payload]:
        """What of a version goes to the bus, beside the momentum."""

    def published(self, head: Head, staged: Mapping[Kind, Staged]) -> Published:
        """What the next head names.

        staged: all uploads, with the momentum where the version is alone and has one.
        """
        return alone(staged, self.uploads(head.version + 1))


# --- reading -----------------------------------------------------------------------------------------


class Source(Protocol):
    """By what a format reads one head's payloads."""

    @property
    def head(self) -> Head:
        """What is read."""

    @property
    def sync(self) -> SyncSpec:
        """The run's."""

    async def pull(self, key: str, codec: Codec) -> PayloadReader:
        """A payload of the fragment's elements.

        Raises:
            BadPayload: as `payloads.pull`.
        """

    async def pull_momentum(self) -> Float32 | None:
        """The momentum (elements,) that the head names; None: zeros. As `pull`."""

    def work(self, heavy: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Runs heavy work where it holds up nobody."""


class GlobalFormat(ABC):
    """One way in which globals lie on the bus. All that read raise BadPayload if what is there is not the head's."""

    follows: ClassVar[bool] = False
    """Whoever has a version before may go on from it."""

    @abstractmethod
    def writer(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> GlobalWriter:
        """A version in the making."""

    @abstractmethod
    def whole(self, values: Float32) -> Mapping[Kind, npt.NDArray[Any]]:
        """The payloads of values (elements,) that are all here, published alone."""

    @abstractmethod
    async def exact(self, source: Source) -> Float32:
        """The values (elements,), bit for bit as they were merged, in an array that nobody else has."""

    @abstractmethod
    async def shown(self, source: Source, held: Held | None) -> Float32:
        """The values that learners train from, as `exact`. held: what is here already; it is left as it is."""

    async def state(self, source: Source) -> tuple[Float32, Float32 | None]:
        """The exact values and the momentum; None: zeros."""
        return await self.exact(source), await source.pull_momentum()

    def sizes(self, head: Head, elements: int) -> dict[str, int]:
        """Bytes of each payload of values that a head names; what goes together counts as one."""
        return {head.payload: 4 * elements} | ({head.rest: 0} if head.rest else {})


# --- fp32: the payload has the values, and there is nothing beside it ------------------------------------


class Fp32Writer(GlobalWriter):
    """As `GlobalWriter`."""

    def prepare(self, *, averaged: bool, told: bool) -> None:
        """As `GlobalWriter`: all steps are alike."""

    def step_writer(self, step: Step) -> StepWriter:
        return self

    def reduced(self) -> None:
        """As `StepWriter`."""

    def written(self, stop: int) -> int:
        self.exact.grow_to(self.values.itemsize * stop)
        return stop

    def uploads(self, version: int) -> dict[Kind, Payload]:
        return {"global": self.exact}


class Fp32Globals(GlobalFormat):
    """As `GlobalFormat`."""

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
