"""The spec: the layout and settings that all parties of a run share, set once by its first learner. Wire types."""

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from diloco.pipeline.messages.wire import (
    AVERAGED,
    BY_ROWS,
    FORMAT,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_FRAGMENTS,
    MAX_MEMBERS,
    MAX_STEPS,
    MAX_TENSORS,
    Codec,
    Digest,
    FragmentId,
    GlobalCodec,
    MergeName,
    MergeRule,
    Message,
    OuterName,
    Text,
    WeightsName,
    check_format,
)


class TensorSpec(Message):
    """One tensor of the model, or some of its rows: the fragment it belongs to and how it is merged."""

    name: Text
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=2**40)], ...], Field(max_length=MAX_DIMS, fail_fast=True)]
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    rule: MergeRule
    fragment: FragmentId
    matrix: bool = False
    """True if an outer step may orthogonalise it (`workers.proposed.Trained.matrix`)."""
    rows: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(le=2**40)]] | None = None
    """[first, last) of the whole tensor's first dimension; None: the whole tensor (`pipeline.fragments.level`)."""

    @property
    def by_rows(self) -> bool:
        """True if merge and outer step treat each row independently, so that several fragments may share the tensor."""
        return self.rule in BY_ROWS and not self.matrix and len(self.shape) > 0

    @property
    def whole(self) -> "TensorSpec":
        """The spec of the whole tensor without its place: equal for all its parts, and in all layouts."""
        return self.model_copy(update={"rows": None, "fragment": 0})

    @property
    def part(self) -> str:
        """The tensor's name, with its rows if this is a part of it: `embedding.weight[0:1000]`."""
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of this part: `shape` with the first dimension limited to `rows`."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])

    @property
    def elements(self) -> int:
        """Number of elements in this part."""
        return math.prod(self.held)


class SyncSpec(Message):
    """The protocol's constants, equal for all parties (settings of the paper's experiments, arXiv:2604.21428)."""

    fragments: Annotated[int, Field(ge=1, le=MAX_FRAGMENTS)]
    sync_interval: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    quorum: Annotated[int, Field(ge=1, le=MAX_MEMBERS)]
    overlap_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    grace_gamma: Annotated[float, Field(ge=0, lt=1)]
    codec: Codec
    merge: MergeName
    outer_lr: Annotated[float, Field(gt=0, le=100)]
    outer_momentum: Annotated[float, Field(ge=0, lt=1)]
    tokens: Annotated[int, Field(ge=1, le=2**62)]
    groups: Annotated[int, Field(ge=1, le=MAX_FRAGMENTS)]
    chunk_bytes: Annotated[int, Field(ge=16, le=MAX_CHUNK_BYTES)]
    first_interval: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    """0: sync_interval from the start (`ramps.interval_at`)."""
    doubling: Annotated[int, Field(ge=1, le=10**6)]
    """Outer steps of each fragment after which a growing interval doubles."""
    outer_warmup: Annotated[int, Field(ge=0, le=10**6)]
    """Number of outer steps at the start of each fragment that only average (`syncer.merging.outer.outer_at`)."""
    weights: WeightsName
    global_codec: GlobalCodec
    """Format of the globals that learners pull (`pipeline.transfer.globals`)."""
    outer: OuterName
    delta_clip: Annotated[float, Field(ge=0, le=1e6)]
    """Upper bound on a delta's norm, in multiples of the window's median norm: longer deltas are scaled down. 0: no
    bound."""
    stretch: bool = True
    """True if the interval grows when round trips take long (`ramps.stretched`)."""


class Wanted(Message):
    """Settings published by a syncer that waits for a run's first learner, which proposes them in its spec."""

    max_bytes: ClassVar[int] = 2**12

    sync: Annotated[dict[str, str | int | float | bool], Field(max_length=64)]
    """Values by name of the fields of `pipeline.settings.SyncSettings`."""


def frozen_head(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the bytes that are hashed before a frozen parameter's values. dtype: torch's name, e.g. `torch.bool`."""
    return f"{shape} {dtype}".encode()


class Spec(Message):
    """The layout and settings that all parties of a run share; proposed by the first learner and set once."""

    max_bytes: ClassVar[int] = 64 * 2**20
    max_parts: ClassVar[int] = 4 * MAX_TENSORS + 16
    max_items: ClassVar[int] = MAX_TENSORS

    format: Annotated[int, BeforeValidator(check_format)] = FORMAT
    """The wire format of the run's parties."""
    sync: SyncSpec
    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
    trainer: Annotated[dict[str, str | int | float | bool | None], Field(max_length=64)]
    """Settings of the built-in trainer (model, data, seed ...): opaque to the syncer, equal for all learners."""
    frozen: Annotated[tuple[tuple[Text, Digest], ...], Field(max_length=MAX_TENSORS, fail_fast=True)] | None = None
    """Digest of each frozen parameter by name (`workers.checks.frozen_digests`), equal for all learners; the syncer
    ignores it. None: learners may differ, as the first learner asked (`same_frozen=False`)."""

    @model_validator(mode="after")
    def _fragments_are_filled(self) -> Self:
        """Check the layout.

        Every fragment 0..P-1 must have elements, but no more than can be sent, and must not mix average-only tensors
        with others. Tensor names must be unique, and every row of a tensor must occur exactly once.
        """
        elements = [0] * self.sync.fragments
        averaged: dict[int, bool] = {}
        for tensor in self.tensors:
            if tensor.fragment >= len(elements):
                raise ValueError(f"tensor {tensor.name!r} is in fragment {tensor.fragment} of {len(elements)}")
            elements[tensor.fragment] += tensor.elements
            if averaged.setdefault(tensor.fragment, tensor.rule in AVERAGED) is not (tensor.rule in AVERAGED):
                raise ValueError(f"fragment {tensor.fragment} mixes average-only tensors with others")
            if tensor.matrix and (len(tensor.shape) != 2 or min(tensor.shape) < 2):
                raise ValueError(f"tensor {tensor.name!r} of shape {tensor.shape} must have rows and columns")
            if tensor.matrix and tensor.rule in AVERAGED:
                raise ValueError(f"tensor {tensor.name!r} is average-only: it is never orthogonalised")
        if 0 in elements:
            raise ValueError(f"fragment {elements.index(0)} has no elements")
        chunk_bytes = self.sync.chunk_bytes
        if (most := max(elements) * 4) > MAX_CHUNKS * chunk_bytes:
            raise ValueError(f"a fragment of {most} bytes has more than {MAX_CHUNKS} chunks of {chunk_bytes} bytes")
        whole = [tensor.name for tensor in self.tensors if tensor.rows is None]
        parts = [tensor for tensor in self.tensors if tensor.rows is not None]
        names = {part.name for part in parts}
        if len({*whole, *names}) < len(whole) + len(names):
            raise ValueError("two tensors have the same name")
        _check_parts(parts)
        return self


def _check_parts(parts: Iterable[TensorSpec]) -> None:
    """Check that the parts of each tensor are all its rows, in order and without gaps.

    Raises:
        ValueError: they are not, or the tensor is not merged by rows.
    """
    first: dict[str, TensorSpec] = {}
    reached: dict[str, int] = {}
    for part in parts:
        begin, end = part.rows or (0, 0)
        if not part.by_rows or part.whole != first.setdefault(part.name, part).whole:
            how = "either it is not merged by rows or its parts disagree"
            raise ValueError(f"tensor {part.name!r} is split by rows, but {how}")
        if not reached.get(part.name, 0) == begin < end <= part.shape[0]:
            raise ValueError(
                f"tensor {part.name!r}: rows [{begin}, {end}) do not follow the previous part's (it has "
                f"{part.shape[0]})"
            )
        reached[part.name] = end
    for name, end in reached.items():
        if end < first[name].shape[0]:
            raise ValueError(f"tensor {name!r} has {first[name].shape[0]} rows, but its parts end at {end}")
