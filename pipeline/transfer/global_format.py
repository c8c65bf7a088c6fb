"""How a run's globals lie on the bus: what every format is asked, by those who publish and those who read. Pure.

The plainest, fp32, stands here; `global_bf16` and `global_int8` are the others, and `global_formats` is their table. A
new one is a file and a line there.

A published version has payloads of these kinds, which are also the names of their keys:

    global     what learners pull, or the key frame that updates lead on from
    rest       what the global payload lacks of the exact values
    update     the step that led to the version, quantized
    merged     the pseudogradient of that step, quantized, where the update does not tell it
    momentum   the outer optimizer's state: its vectors one after another, in the order of the rule's names

An outer state of another rule, with other vectors, is one class here and one line in `STATE_RULES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus.commits import Rest, Staged, named
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.payload import Update
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import Codec, OuterName
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import Grown, Payload, PayloadReader, as_bytes, chunk_count

Float32 = npt.NDArray[np.float32]
OuterState = Mapping[str, Float32]
"""The outer optimizer's state of a fragment: name -> vector (elements,); one that is absent is all zeros."""
Kind = Literal["global", "rest", "update", "merged", "momentum"]


class Held(NamedTuple):
    """Values (elements,) that somebody has, by version and digest."""

    version: int
    digest: bytes
    values: Float32


@dataclass(frozen=True, slots=True)
class Published:
    """What a head names once a version is committed; as `Commit`."""

    payload: Staged
    rest: Rest | None = None
    outer_state: Staged | None = None
    updates: tuple[Update, ...] = ()
    behind: int = 0

    @property
    def keys(self) -> frozenset[str]:
        """All payloads."""
        return frozenset(one.key for one in named(self.payload, self.rest, self.outer_state, self.updates))


def alone(staged: Mapping[Kind, Staged], payloads: Mapping[Kind, Payload]) -> Published:
    """A version that needs no other one; `payloads`: what was staged."""
    rest = staged.get("rest")
    lacking = None if rest is None else Rest(rest.key, rest.chunks, payloads["global"].digest)
    return Published(staged["global"], lacking, staged.get("momentum"))


def published_by(head: Head, elements: int, sync: SyncSpec) -> Published:
    """What a head names already."""
    rest = Rest(head.rest, head.chunks, head.payload_digest or b"") if head.rest else None
    state = state_of(head, elements, sync)
    return Published(Staged(head.payload, head.chunks), rest, state, head.updates, head.behind)


def state_of(head: Head, elements: int, sync: SyncSpec) -> Staged | None:
    """The payload of the outer state that a head names; None: all zeros."""
    count = chunk_count(elements * len(STATE_RULES[sync.outer].names), "fp32", sync.chunk_bytes)
    return Staged(head.momentum, count) if head.momentum else None


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


# --- the outer state ---------------------------------------------------------------------------------


class StateRule(Protocol):
    """How the state goes on; all vectors given are of the same elements, a whole fragment's or some of them."""

    names: ClassVar[tuple[str, ...]]
    """Of its vectors, in their order on the bus."""

    def __init__(self, lr: float, mu: float) -> None:
        """lr, mu: outer learning rate and momentum."""
        ...

    def after_step(self, before: OuterState, step: Float32, after: OuterState) -> None:
        """The state after a step, of which only `step` is known: what was subtracted from the values.

        Args:
            before: the state before it.
            step: overwritten.
            after: overwritten with the new state; it may be `before`.
        """
        ...

    def after_pseudogradient(self, before: OuterState, pseudogradient: Float32, after: OuterState) -> None:
        """The state after a step that was made from `pseudogradient`; `after` as above."""
        ...


class MomentumState:
    """One momentum, as all of them have, b' = mu b + D.

    With Nesterov's step s = lr (D + mu b') (`syncer.merging.outer`), the momentum follows from the step too:

        D = (s/lr - mu^2 b) / (1 + mu)   so   b' = (mu b + s/lr) / (1 + mu)

    A matrix that was orthogonalised does not tell D, so there D itself must be known.
    """

    names: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(self, lr: float, mu: float) -> None:
        self._lr, self._mu = lr, mu

    def after_step(self, before: OuterState, step: Float32, after: OuterState) -> None:
        """As `StateRule`."""
        out, momentum = after["momentum"], before.get("momentum")
        np.divide(step, self._lr, out=step)
        if momentum is None:
            np.copyto(out, step)
        else:
            np.multiply(momentum, self._mu, out=out)
            np.add(out, step, out=out)
        np.divide(out, 1 + self._mu, out=out)

    def after_pseudogradient(self, before: OuterState, pseudogradient: Float32, after: OuterState) -> None:
        """As `StateRule`."""
        out, momentum = after["momentum"], before.get("momentum")
        if momentum is None:
            out.fill(0)
        else:
            np.multiply(momentum, self._mu, out=out)
        np.add(out, pseudogradient, out=out)


STATE_RULES: Final[Mapping[OuterName, type[StateRule]]] = {
    "nesterov": MomentumState,
    "halley": MomentumState,
}


def part(state: OuterState, piece: slice) -> OuterState:
    """Some elements of each vector, sharing memory."""
    return {name: vector[piece] for name, vector in state.items()}


def vectors(joined: Float32, names: Sequence[str]) -> dict[str, Float32]:
    """The state whose payload this is, (names * elements,), sharing its memory."""
    return dict(zip(names, joined.reshape(len(names), -1), strict=True))


def joined(state: OuterState, names: Sequence[str]) -> Float32:
    """The payload (names * elements,) of a state that has any of these; one vector alone is not copied."""
    if len(names) == 1:
        return state[names[0]]
    zeros = np.zeros_like(next(iter(state.values())))
    return np.concatenate([state.get(name, zeros) for name in names])


# --- publishing --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What an outer step goes from, and where the state after it is written."""

    theta: Float32
    """(elements,) values before it."""
    before: OuterState
    after: OuterState
    rule: StateRule | None
    """None: the step keeps no state."""


class StepWriter(Protocol):
    """A writer while the outer step is taken."""

    def reduced(self) -> None:
        """All of the pseudogradient is where the values will be, and no element of it has been stepped yet."""
        ...

    def written(self, stop: int) -> int:
        """All elements before `stop` are as the outer step makes them; how many are values now, and so is the state."""
        ...


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
            averaged: it only averages learners: no state is left after it.
            told: the state can be followed from the step alone.
        """

    @abstractmethod
    def step_writer(self, step: Step) -> StepWriter:
        """What writes this step; once for a writer."""

    def is_alone(self, version: int) -> bool:
        """Whether a version is published such that it needs no other one."""
        return True

    @abstractmethod
    def uploads(self, version: int) -> dict[Kind, Payload]:
        """What of a version goes to the bus, beside the outer state."""

    def published(self, head: Head, staged: Mapping[Kind, Staged]) -> Published:
        """What the next head names.

        Args:
            head: of the version before.
            staged: all uploads, with the outer state where the version is alone and has one.
        """
        return alone(staged, self.uploads(head.version + 1))


# --- reading -----------------------------------------------------------------------------------------


class Source(Protocol):
    """By what a format reads one head's payloads."""

    @property
    def head(self) -> Head:
        """What is read."""
        ...

    @property
    def sync(self) -> SyncSpec:
        """The run's."""
        ...

    async def pull(self, key: str, codec: Codec) -> PayloadReader:
        """A payload of the fragment's elements.

        Raises:
            BadPayload: as `payloads.pull`.
        """
        ...

    async def pull_state(self) -> OuterState:
        """The outer state that the head names; as `pull`."""
        ...

    def work(self, heavy: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Runs heavy work where it holds up nobody."""
        ...


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

    async def state(self, source: Source) -> tuple[Float32, OuterState]:
        """The exact values and the outer state."""
        return await self.exact(source), await source.pull_state()

    def sizes(self, head: Head, elements: int) -> dict[str, int]:
        """Bytes of each payload of values that a head names; what goes together counts as one."""
        return {head.payload: 4 * elements} | ({head.rest: 0} if head.rest else {})


# --- fp32: the payload has the values, and there is nothing beside it ------------------------------------


class Fp32Writer(GlobalWriter):
    """As `GlobalWriter`."""

    def prepare(self, *, averaged: bool, told: bool) -> None:
        """As `GlobalWriter`: all steps are alike."""

    def step_writer(self, step: Step) -> StepWriter:
        """As `GlobalWriter`."""
        return self

    def reduced(self) -> None:
        """As `StepWriter`."""

    def written(self, stop: int) -> int:
        """As `StepWriter`."""
        self.exact.grow_to(self.values.itemsize * stop)
        return stop

    def uploads(self, version: int) -> dict[Kind, Payload]:
        """As `GlobalWriter`."""
        return {"global": self.exact}


class Fp32Globals(GlobalFormat):
    """As `GlobalFormat`."""

    def writer(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> GlobalWriter:
        """As `GlobalFormat`."""
        return Fp32Writer(fragment, elements, sync, grown)

    def whole(self, values: Float32) -> Mapping[Kind, npt.NDArray[Any]]:
        """As `GlobalFormat`."""
        return {"global": values}

    async def exact(self, source: Source) -> Float32:
        """As `GlobalFormat`."""
        reader = await source.pull(source.head.payload, "fp32")
        check(source.head, reader.digest, source.head.digest)
        return reader.array()

    async def shown(self, source: Source, held: Held | None) -> Float32:
        """As `GlobalFormat`."""
        return await self.exact(source)
