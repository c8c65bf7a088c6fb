"""Globals as they are: the global payload has the values in float32, and there is nothing beside it. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.chunks import Grown, Payload
from diloco.pipeline.transfer.global_format import (
    Float32,
    GlobalFormat,
    GlobalWriter,
    Held,
    Kind,
    Source,
    Step,
    StepWriter,
    check,
)


class Fp32Writer(GlobalWriter):
    """As `GlobalWriter`."""

    def prepare(self, *, averaged: bool, told: bool) -> None:
        """As `GlobalWriter`: all steps are alike."""

    def begin(self, step: Step) -> StepWriter:
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
