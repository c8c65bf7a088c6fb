"""Globals as int8 updates (`updates`) of a key frame in float32. Pure.

The values are defined as what the updates lead to, so every reader has the same. A learner that has one of the previous
versions pulls the updates since then. A reader that has none of them, or cannot get the updates, pulls the key frame
and the updates after it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy.typing as npt

from diloco.pipeline.bus.commits import Published, Staged
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.payload import Update
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.codec import Grown, Payload, as_bytes, payload_bytes, payload_digest
from diloco.pipeline.transfer.global_format import (
    Float32,
    GlobalFormat,
    GlobalWriter,
    Held,
    Kind,
    Source,
    Step,
    StepWriter,
    alone,
    check,
    published_by,
)
from diloco.pipeline.transfer.updates import CodedGradient, CodedStep, StepCoder, advance, gather

# How many updates are kept for learners that have an older version. More of them would be more bytes than the values.
KEPT_UPDATES = 4


def key_frame_due(sync: SyncSpec, fragment: int, version: int) -> bool:
    """Return whether a version is published in full. Fragments take turns."""
    return (version + fragment) % sync.key_frame_interval == 0


def updates_after(head: Head, held: Held | None) -> tuple[Update, ...]:
    """Return the updates that lead from held values to a head; empty if none of them starts from these values."""
    count = 0 if held is None else head.version - held.version
    if held is None or not 0 < count <= len(head.updates) or head.updates[-count].base != held.digest:
        return ()
    return head.updates[-count:]


# --- publishing --------------------------------------------------------------------------------------


class _StepWriter:
    def __init__(self, values: Float32, exact: Payload, coder: StepCoder, gradient: CodedGradient | None) -> None:
        self._values, self._exact, self._coder, self._gradient = values, exact, coder, gradient

    def reduced(self) -> None:
        """Quantize the pseudogradient if it is published, so that the step uses the values that readers will decode."""
        if self._gradient is not None:
            self._gradient.replace(self._values)

    def written(self, stop: int) -> int:
        done = self._coder.written(self._values, stop)
        self._exact.grow_to(self._values.itemsize * done)
        return done


class _Writer(GlobalWriter):
    takes_steps: ClassVar[bool] = True

    def __init__(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> None:
        super().__init__(fragment, elements, sync, grown)
        self._step = CodedStep(elements, sync.chunk_bytes, grown)
        self._gradient: CodedGradient | None = None
        """The pseudogradient, if it has to be published because the update does not determine it."""
        self._averaged = False

    def prepare(self, *, averaged: bool, told: bool) -> None:
        self._averaged = averaged
        if not told and self._gradient is None:
            self._gradient = CodedGradient(self._elements, self._sync.chunk_bytes, self._grown)

    def step_writer(self, step: Step) -> StepWriter:
        coder = self._step.coder(step.theta, step.lr, step.momentum if self._gradient is None else None)
        return _StepWriter(self.values, self.exact, coder, self._gradient)

    def is_alone(self, version: int) -> bool:
        return key_frame_due(self._sync, self._fragment, version)

    def uploads(self, version: int) -> dict[Kind, Payload]:
        found: dict[Kind, Payload] = {"update": self._step.payload}
        if self._gradient is not None:
            found["merged"] = self._gradient.payload
        if self.is_alone(version):
            found["global"] = self.exact
        return found

    def published(self, head: Head, staged: Mapping[Kind, Staged]) -> Published:
        led, merged = staged["update"], staged["merged"].key if "merged" in staged else ""
        update = Update(payload=led.key, chunks=led.chunks, base=head.digest, averaged=self._averaged, merged=merged)
        key_frame, behind = alone(staged, {}) if "global" in staged else None, 0
        if key_frame is None:
            key_frame, behind = published_by(head, self._elements, self._sync), head.behind + 1
        updates = (*head.updates, update)[-max(behind, KEPT_UPDATES) :]
        return Published(key_frame.payload, None, key_frame.momentum, updates, behind)


# --- reading -----------------------------------------------------------------------------------------


class Int8Globals(GlobalFormat):
    """Globals as a key frame and int8 updates."""

    follows: ClassVar[bool] = True

    def writer(self, fragment: int, elements: int, sync: SyncSpec, grown: Grown) -> GlobalWriter:
        return _Writer(fragment, elements, sync, grown)

    def whole(self, values: Float32) -> Mapping[Kind, npt.NDArray[Any]]:
        """Return a key frame."""
        return {"global": values}

    async def exact(self, source: Source) -> Float32:
        key_frame: Float32 = (await source.pull(source.head.payload, "fp32")).array()
        values, _ = await _follow(source, key_frame, None, _after_key_frame(source.head), told=False)
        await _check_values(source, values)
        return values

    async def state(self, source: Source) -> tuple[Float32, Float32 | None]:
        key_frame: Float32 = (await source.pull(source.head.payload, "fp32")).array()
        begun, told = await source.pull_momentum(), source.sync.outer_momentum > 0
        values, momentum = await _follow(source, key_frame, begun, _after_key_frame(source.head), told=told)
        await _check_values(source, values)
        return values, momentum

    async def shown(self, source: Source, held: Held | None) -> Float32:
        lacking = updates_after(source.head, held)
        if held is not None and lacking:
            try:
                values, _ = await _follow(source, held.values, None, lacking, told=False, own=False)
                await _check_values(source, values)
                return values
            except BadPayload:
                pass  # an update has expired, or led to other values: start from the key frame
        return await self.exact(source)

    def sizes(self, head: Head, elements: int) -> dict[str, int]:
        size = payload_bytes(elements, "int8")
        return {key: size for update in head.updates for key in update.payloads} | super().sizes(head, elements)


def _after_key_frame(head: Head) -> tuple[Update, ...]:
    return head.updates[len(head.updates) - head.behind :]


async def _follow(
    source: Source,
    theta: Float32,
    momentum: Float32 | None,
    updates: Sequence[Update],
    *,
    told: bool,
    own: bool = True,
) -> tuple[Float32, Float32 | None]:
    """Apply updates, and return values and momentum.

    Args:
        source: where the updates are read.
        theta: (elements,) values before them.
        momentum: (elements,) momentum before them; None means zeros.
        updates: the updates, in order.
        told: the momentum is wanted, and the run has one.
        own: the arrays may be overwritten.
    """
    lr, mu = source.sync.outer_lr, source.sync.outer_momentum
    for update in updates:
        reader = await source.pull(update.payload, "int8")
        following = None
        if not told or update.averaged:
            momentum = None
        elif update.merged:
            merged = await source.pull(update.merged, "int8")
            momentum = await source.work(gather, momentum, mu, merged.vector())
        else:
            following = lr, mu
        theta, momentum = await source.work(advance, theta, momentum, reader.vector(), following, own)
        own = True
    return theta, momentum


async def _check_values(source: Source, values: Float32) -> None:
    digest = await source.work(payload_digest, as_bytes(values), source.sync.chunk_bytes)
    check(source.head, digest, source.head.digest)
