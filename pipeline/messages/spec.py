"""The spec: what all parties of a run agree on, proposed by its first learner and set once. Frozen wire types."""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from diloco.pipeline.messages.wire import (
    AVERAGED,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_FRAGMENTS,
    MAX_LEARNERS,
    MAX_TENSORS,
    MAX_UPDATES,
    MOST_STEPS,
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
)


class TensorSpec(Message):
    """One tensor of the model: where it lives and how it is merged."""

    name: Text
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=2**40)], ...], Field(max_length=MAX_DIMS, fail_fast=True)]
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    rule: MergeRule
    fragment: FragmentId
    matrix: bool = False
    """Whether an outer step orthogonalises it (`workers.parameters.tensor_table`)."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class SyncSpec(Message):
    """The protocol's constants, equal for all parties (paper, settings of the experiments; arXiv:2604.21428)."""

    fragments: Annotated[int, Field(ge=1, le=MAX_FRAGMENTS)]
    sync_interval: Annotated[int, Field(ge=1, le=MOST_STEPS)]
    quorum: Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
    overlap_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)]
    grace_gamma: Annotated[float, Field(ge=0, lt=1)]
    codec: Codec
    merge: MergeName
    outer_lr: Annotated[float, Field(gt=0, le=100)]
    outer_momentum: Annotated[float, Field(ge=0, lt=1)]
    tokens: Annotated[int, Field(ge=1, le=2**62)]
    groups: Annotated[int, Field(ge=1, le=MAX_FRAGMENTS)]
    chunk_bytes: Annotated[int, Field(ge=16, le=MAX_CHUNK_BYTES)]
    first_interval: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """0: sync_interval from the start (`ramps.interval_at`)."""
    doubling: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Outer steps of each fragment after which a growing interval doubles."""
    outer_warmup: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Outer steps of each fragment that only average (`syncer.merging.outer.outer_at`)."""
    weights: WeightsName = "tokens"
    global_codec: GlobalCodec = "fp32"
    """What learners pull (`pipeline.transfer.global_formats`)."""
    key_frame_interval: Annotated[int, Field(ge=1, le=MAX_UPDATES)] = 8
    """Outer steps of each fragment between two key frames, where globals are updates."""
    outer: OuterName = "nesterov"


def frozen_head(shape: tuple[int, ...], dtype: str) -> bytes:
    """What the digest of a frozen parameter begins with, before its values. dtype: in torch's words, `torch.bool`."""
    return f"{shape} {dtype}".encode()


class Spec(Message):
    """What all parties of a run agree on; proposed by the first learner, set once."""

    max_bytes: ClassVar[int] = 64 * 2**20
    max_parts: ClassVar[int] = 3 * MAX_TENSORS + 16
    max_items: ClassVar[int] = MAX_TENSORS

    format: Literal[1] = 1
    sync: SyncSpec
    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)]
    trainer: Annotated[dict[str, str | int | float | bool | None], Field(max_length=64)]
    """Settings of the built-in trainer (model, data, seed ...): opaque to the syncer, equal for learners."""
    frozen: Annotated[tuple[tuple[Text, Digest], ...], Field(max_length=MAX_TENSORS, fail_fast=True)] | None = None
    """Digest of each frozen parameter by name (`workers.checks.frozen_digests`), equal for learners; the syncer ignores
    it.
    None: not agreed on, as the first learner asked (`same_frozen=False`), or by an earlier build."""

    @model_validator(mode="after")
    def _fragments_are_filled(self) -> Self:
        """Every fragment 0..P-1 has elements, not too many to send, of average-only tensors or of others.

        Every tensor has a name of its own.
        """
        elements = [0] * self.sync.fragments
        averaged: dict[int, bool] = {}
        for tensor in self.tensors:
            if tensor.fragment >= len(elements):
                raise ValueError(f"tensor {tensor.name!r} is in fragment {tensor.fragment} of {len(elements)}")
            elements[tensor.fragment] += tensor.elements
            if averaged.setdefault(tensor.fragment, tensor.rule in AVERAGED) is not (tensor.rule in AVERAGED):
                raise ValueError(f"fragment {tensor.fragment} has average-only tensors beside others")
            if tensor.matrix and (len(tensor.shape) != 2 or min(tensor.shape) < 2):
                raise ValueError(f"tensor {tensor.name!r} of shape {tensor.shape} has no rows and columns")
            if tensor.matrix and tensor.rule in AVERAGED:
                raise ValueError(f"tensor {tensor.name!r} is average-only: it is never orthogonalised")
        if 0 in elements:
            raise ValueError(f"fragment {elements.index(0)} has no elements")
        chunk_bytes = self.sync.chunk_bytes
        if (most := max(elements) * 4) > MAX_CHUNKS * chunk_bytes:
            raise ValueError(f"a fragment of {most} bytes has over {MAX_CHUNKS} chunks of {chunk_bytes} bytes")
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("two tensors have the same name")
        return self
