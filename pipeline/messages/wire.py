"""The base of all wire types: the message class with its bounds, and bounded field types. Pure.

The messages are in the neighbouring modules, by subject: `spec`, `payload`, `fragment`, `run`, `moments` and `shards`.
They are frozen. Every bound on a peer's input is a field constraint there. A message is encoded as the msgpack of its
field dict; `codec.encode` and `codec.decode` are the only way in and out. Units are in the names. Digests are
xxh3-128 (16 bytes): they protect integrity, but do not protect against forgery.
"""

import math
import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, SerializationInfo
from pydantic_core import PydanticCustomError

from diloco.pipeline.errors import OtherFormat

# The wire format covers messages, keys and scripts. All parties of a run must have the same number, so a change to any
# of them must raise it (`tests/recorded`).
FORMAT = 1


def check_format(said: object) -> object:
    """Return `said` if it is the wire format of this build.

    Raises:
        OtherFormat: it is a different one; the message names both, and how the run can continue.
    """
    if type(said) is not int or said != FORMAT:
        raise OtherFormat(
            f"wire format {said!r:.20}, but this build speaks {FORMAT} (`diloco --version`)",
            f"use a build that speaks {said!r:.20}, or stop all parties, update them, and continue from the run's "
            "checkpoint",
        )
    return said


# Measured on two busy cores: 1,024 fragments join within 30 s; with 4,096 the syncer was so busy that leases lapsed.
MAX_FRAGMENTS = 1024
MAX_LEARNERS = 4096
# Most learners in one merge: a head names the learners of two merges, `MAX_LEARNERS` at most.
MAX_MEMBERS = MAX_LEARNERS // 2
MAX_TENSORS = 100_000
# Dimensions of a tensor.
MAX_DIMS = 16
MAX_TEXT_CHARS = 512
MAX_CHUNKS = 10**6
# Upper bound on a sync interval, and on tau (the steps during which a sync may run in the background).
MAX_STEPS = 10**6
# Longest lease: everything that a syncer holds expires within this time unless it is renewed.
MAX_LEASE_S = 3600
MAX_CHUNK_BYTES = 16 * 2**20
# Upper bound on what an encoded chunk has in addition to its data.
CHUNK_EXTRA_BYTES = 256

# Format of a delta's elements: floats, or quantized (`quantize`). Momentum is always fp32.
Codec = Literal["bf16", "fp32", "int8", "int4"]

# Format in which learners read globals: exact, or rounded (`transfer.globals`). Syncers always have the exact values.
GlobalCodec = Literal["fp32", "bf16"]

MAX_NAME_CHARS = 64
# Names become folders and log files: a name of only dots ("..") would point outside the folder meant for it.
PARTY = r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*"
PartyId = Annotated[str, Field(pattern=f"^{PARTY}$", max_length=MAX_NAME_CHARS)]


def party_name(name: str) -> str:
    """Validate a user-given name of a run, a learner or a syncer, and return it unchanged.

    Raises:
        ValueError: it is not a valid name.
    """
    if len(name) > MAX_NAME_CHARS or not re.fullmatch(PARTY, name):
        raise ValueError(
            f"cannot be a name: use at most {MAX_NAME_CHARS} letters, digits, '.', '_' and '-', and not only dots"
        )
    return name


# A `PartyId` given by a user: it has the same rules, with a readable error message.
PartyName = Annotated[str, AfterValidator(party_name)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
Digest = Annotated[bytes, Field(min_length=16, max_length=16)]
FragmentId = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]
Version = Annotated[int, Field(ge=0, le=2**48)]
SignedCount = Annotated[int, Field(ge=-(2**53), le=2**53)]
MAX_TOKENS = 2**62
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
MAX_ELEMENTS = 2**110
HEX_ELEMENTS = re.compile("[0-9a-f]{32}")


def _from_wire(value: object) -> object:
    return int(value, 16) if isinstance(value, str) and HEX_ELEMENTS.fullmatch(value) else value


def _to_wire(value: int, info: SerializationInfo) -> int | str:
    return value if info.mode == "json" or value <= MAX_TOKENS else f"{value:032x}"


# Tokens times the elements of a fragment, summed. Large models exceed msgpack's 64-bit integers, so values above
# `MAX_TOKENS` are 32 hexadecimal digits on the wire. Redis' scripts cannot unpack bytes.
TokenElements = Annotated[
    int, Field(ge=0, le=MAX_ELEMENTS), BeforeValidator(_from_wire), PlainSerializer(_to_wire, return_type=int | str)
]
# More than three thousand years, yet small enough that sums and differences of times stay finite and precise floats.
MAX_SECONDS = 1e11
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
# Duration of a step or a pull. It is bounded because windows compute their timeouts from what learners report.
StepSeconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
UnixSeconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
# A norm or a rate, bounded so that its square and the sum of many are still finite floats.
Measure = Annotated[float, Field(ge=0, le=1e60, allow_inf_nan=False)]
MAX_LOSS = 1e9


def _loss(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > MAX_LOSS else value


# A diverging model's loss may be NaN or infinite; values beyond `MAX_LOSS` count as infinite.
Loss = Annotated[float, AfterValidator(_loss)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


def printable(text: str, kept: str = "") -> str:
    """Replace characters that a terminal might interpret as control characters by `?`, except those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else "?" for c in text)


# Text from a peer that is shown to people.
Shown = Annotated[Text, AfterValidator(printable)]

MAX_SAMPLES = 64
# (Unix time, settled tokens, merged tokens) of the whole run in the last minutes, oldest first (`merged_share`).
Samples = Annotated[tuple[tuple[UnixSeconds, Count, Count], ...], Field(max_length=MAX_SAMPLES, fail_fast=True)]


def _first(said: object) -> object:
    if type(said) is not int or said != 1:
        raise PydanticCustomError("literal_error", "Input should be 1", {"expected": "1"})
    return said


# Format number of a file; there has been one format so far. It must be exactly the integer 1, not `true` or 1.0.
FirstFormat = Annotated[Literal[1], BeforeValidator(_first)]

# How a tensor is merged: `syncer.algorithm.MERGE_RULES`.
MergeRule = Literal["rda", "rda-row", "mean", "average", "variance"]
# Rules that merge each row of a tensor independently.
BY_ROWS: Final[frozenset[MergeRule]] = frozenset({"rda-row", "mean"})
# Rules of average-only tensors (a model's buffers): the mean, at rate 1 and without momentum; "variance" never goes
# below 0.
AVERAGED: Final[frozenset[MergeRule]] = frozenset({"average", "variance"})
# The run's merge setting; `fragments.merge_rule` derives each tensor's rule from it.
MergeName = Literal["rda", "rda-row", "mean"]
# Merge weights: `syncer.algorithm.WEIGHTS`.
WeightsName = Literal["tokens", "equal"]
# The outer optimizer: `syncer.algorithm.OUTER`. Halley orthogonalises matrices; it needs a momentum and a second pass.
OuterName = Literal["nesterov", "halley"]


class Message(BaseModel):
    """Base of all wire types: immutable, exact types, unknown fields refused. Bytes are hex in its JSON form.

    A message is at most `max_bytes` long and has at most `max_parts` arrays and maps, and none of its arrays is longer
    than `max_items`. `codec` checks all three limits before it builds any object.
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
