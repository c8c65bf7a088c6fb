"""What all wire types are made of: the base of messages with its bounds, and bounded field types. Pure.

The messages lie beside it by what they are about: `spec`, `delta`, `payload`, `head`, `run`, `tape`, `moments` and
`shards`. They are frozen. Every bound that a peer's
bytes must keep stands there, as a field constraint. A message is msgpack of its field dict: `codec.encode` and
`codec.decode` are the only way in and out. Units are in the names. Digests are xxh3-128 (16 bytes): integrity, no
defence against forgery.
"""

import math
import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, SerializationInfo
from pydantic_core import PydanticCustomError

from diloco.pipeline.errors import OtherFormat
from diloco.pipeline.view.merged_share import MOST_SAMPLES

FORMAT = 1
"""The wire format: what messages, keys and scripts are. All parties of a run have the same number; whoever changes one
of these raises it (`tests/recorded`)."""


def spoken(said: object) -> object:
    """The wire format of this build.

    Raises:
        OtherFormat: it is another one; says both and how the run goes on.
    """
    if type(said) is not int or said != FORMAT:
        raise OtherFormat(
            f"wire format {said!r:.20}, this build speaks {FORMAT} (`diloco --version`)",
            f"take a build that speaks {said!r:.20}, or stop all parties, update them, and go on from the run's "
            "checkpoint",
        )
    return said


MAX_FRAGMENTS = 1024
"""So many join within 30 s on two busy cores. With 4,096 a syncer had so much to do there that its leases lapsed."""
MAX_LEARNERS = 4096
MAX_TENSORS = 100_000
MAX_DIMS = 16
"""Of a tensor."""
MAX_TEXT_CHARS = 512
MAX_CHUNKS = 10**6
MOST_STEPS = 10**6
"""Inner steps between two syncs, or that one may hide behind."""
MAX_UPDATES = 64
MOST_LEASE_S = 3600
"""What a syncer holds ends by then, unless it is prolonged."""
MAX_CHUNK_BYTES = 16 * 2**20
CHUNK_EXTRA_BYTES = 256
"""What an encoded chunk has besides its data, at most."""

Codec = Literal["bf16", "fp32", "int8", "int4"]
"""How an element of a delta travels: as it is, or quantized (`quantize`). Momentum is always fp32."""

GlobalCodec = Literal["fp32", "bf16", "int8"]
"""How learners read globals: as they are, rounded (`halves`), or as updates of what they have (`updates`). Syncers have
them in float32 in any case."""

MAX_NAME_CHARS = 64
PARTY = r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*"
"""A name of dots alone would be a place outside of where its folder or log is to lie."""
PartyId = Annotated[str, Field(pattern=f"^{PARTY}$", max_length=MAX_NAME_CHARS)]


def party_name(name: str) -> str:
    """The name of a run, a learner or a syncer, as a person gives it.

    Raises:
        ValueError: it cannot be one.
    """
    if len(name) > MAX_NAME_CHARS or not re.fullmatch(PARTY, name):
        raise ValueError(
            f"cannot be a name: letters, digits, '.', '_' and '-', {MAX_NAME_CHARS} at most, and not dots alone"
        )
    return name


PartyName = Annotated[str, AfterValidator(party_name)]
"""A `PartyId` that a person gives."""
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
Digest = Annotated[bytes, Field(min_length=16, max_length=16)]
FragmentId = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]
Version = Annotated[int, Field(ge=0, le=2**48)]
SignedCount = Annotated[int, Field(ge=-(2**53), le=2**53)]
MOST_TOKENS = 2**62
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
MOST_ELEMENTS = 2**110
ELEMENTS_BYTES = 16


def _from_wire(value: object) -> object:
    return int.from_bytes(value, "big") if isinstance(value, bytes) and len(value) == ELEMENTS_BYTES else value


def _to_wire(value: int, info: SerializationInfo) -> int | bytes:
    return value if info.mode == "json" or value <= MOST_TOKENS else value.to_bytes(ELEMENTS_BYTES, "big")


TokenElements = Annotated[
    int, Field(ge=0, le=MOST_ELEMENTS), BeforeValidator(_from_wire), PlainSerializer(_to_wire, return_type=int | bytes)
]
"""Tokens times the elements of a fragment, summed: a large model soon has more of them than msgpack's integers hold.
Those beyond `MOST_TOKENS` are 16 bytes on the wire, big-endian."""
MOST_SECONDS = 1e11
"""More than three thousand years, and far from where a float ends: a time plus or minus it is one."""
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
StepSeconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Of a step or a pull. What windows are timed by has an end, whatever a learner says."""
UnixSeconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Measure = Annotated[float, Field(ge=0, le=1e60, allow_inf_nan=False)]
"""A norm or a rate. The square of one, and the sum of many, is a float too."""
MOST_LOSS = 1e9


def _loss(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > MOST_LOSS else value


Loss = Annotated[float, AfterValidator(_loss)]
"""Of a model that diverges it is NaN, infinite, or beyond `MOST_LOSS`, which counts as infinite."""
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


def printable(text: str, kept: str = "") -> str:
    """Text for a terminal, which control characters might command: they become `?`, but for those `kept`."""
    return "".join(c if c.isprintable() or c in kept else "?" for c in text)


Shown = Annotated[Text, AfterValidator(printable)]
"""Text of a peer that people read."""

Samples = Annotated[tuple[tuple[UnixSeconds, Count, Count], ...], Field(max_length=MOST_SAMPLES, fail_fast=True)]
"""(Unix time, trained, merged tokens) of the whole run in the last minutes, oldest first (`merged_share`)."""


def _first(said: object) -> object:
    if type(said) is not int or said != 1:
        raise PydanticCustomError("literal_error", "Input should be 1", {"expected": "1"})
    return said


FirstFormat = Annotated[Literal[1], BeforeValidator(_first)]
"""The number of a file's format, of which there has been one so far: exactly this number, not `true` or 1.0."""

MergeRule = Literal["rda", "rda-row", "mean", "average", "variance"]
"""How a tensor is merged: `syncer.algorithm.MERGE_RULES`."""
BY_ROWS: Final[frozenset[MergeRule]] = frozenset({"rda-row", "mean"})
"""Rules that merge each row of a tensor by itself."""
AVERAGED: Final[frozenset[MergeRule]] = frozenset({"average", "variance"})
"""Of average-only tensors, a model's buffers: the mean, at rate 1 and without momentum; "variance": never below 0."""
MergeName = Literal["rda", "rda-row", "mean"]
"""Which tensor has which rule: `fragments.merge_rule`."""
WeightsName = Literal["tokens", "equal"]
"""Merge weights: `syncer.algorithm.WEIGHTS`."""
OuterName = Literal["nesterov", "halley"]
"""The outer optimizer: `syncer.algorithm.OUTER`. Halley's turns matrices, which needs a momentum and a second pass."""


class Message(BaseModel):
    """Base of all wire types: immutable, exact types, unknown fields refused. Bytes are hex in its JSON form.

    A message takes no more than `max_bytes`, and has no more than `max_parts` arrays and maps, of which no array is
    longer than `max_items`: `codec` looks at all three before it makes anything of it.
    """

    max_bytes: ClassVar[int] = 2 * 2**20
    max_parts: ClassVar[int] = 2 * MAX_LEARNERS
    max_items: ClassVar[int] = MAX_LEARNERS
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        ser_json_bytes="hex",
        val_json_bytes="hex",
        ser_json_inf_nan="constants",  # a checkpoint has to know `clip = inf` again
    )
