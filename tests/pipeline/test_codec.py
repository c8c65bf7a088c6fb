"""Messages and payloads on the wire: what goes in comes out, and nothing else gets in."""

import msgpack
import numpy as np
import pytest

from diloco.pipeline.bus import schema
from diloco.pipeline.errors import BadMessage, BadPayload
from diloco.pipeline.messages import fragment as fragment_messages
from diloco.pipeline.messages.fragment import DeltaHeader, Head, WindowChanged
from diloco.pipeline.messages.payload import Chunk
from diloco.pipeline.messages.run import LearnerReport, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import (
    DTYPES,
    PayloadReader,
    as_bytes,
    as_vector,
    chunk_count,
    decode,
    decode_tape,
    encode,
    payload_digest,
)
from diloco.pipeline.payload.quantize import GROUP, wire_bytes
from diloco.pipeline.payload.quantize import KINDS as QUANTIZED
from diloco.pipeline.payload.quantize import encode as encode_delta
from tests import samples
from tests.samples import encode_chunks

FROZEN = samples.spec().model_copy(update={"frozen": (("base", bytes(16)),)})
EXAMPLES = [samples.header(), samples.report(), samples.spec(), FROZEN, samples.run_state(), samples.head()]
ARRAY = np.arange(1000, dtype=np.float32)
CHUNK_BYTES = 1024


def read(chunks, elements: int = len(ARRAY), codec: str = "fp32") -> PayloadReader:
    reader = PayloadReader(elements, codec, CHUNK_BYTES)
    for chunk in chunks:
        reader.feed(chunk)
    return reader


# --- messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_the_json_form_comes_back_too(message):
    """Checkpoints and tapes for people keep the same types, bytes as hex."""
    assert type(message).model_validate_json(message.model_dump_json()) == message


def test_a_head_keeps_any_norm_that_a_merge_may_have():
    """The tape and the head have the same bound: a diverging run's norms stop no syncer."""
    most = fragment_messages.Contribution.model_validate(
        {"learner": "l0", "incarnation": "0" * 8, "base_version": 0, "attempt": 0, "steps": 1, "tokens": 1}
        | {"weight": 1.0, "norm": 1e60}
    ).norm
    assert schema.MergedBases(merged=(), norms=(most,)).norms == samples.head(norms=(most,)).norms == (most,)


def test_a_tape_record_finds_its_kind():
    """The kind travels with the record; one without a known kind is refused."""
    record = WindowChanged(fragment=1, version=2, attempt=0, reason="open", unix_s=1.0)
    assert decode_tape(encode(record)) == record
    with pytest.raises(BadMessage):
        decode_tape(encode(samples.header()))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_truncated_message_is_refused_at_every_length(message):
    """A half-written message is never taken for a whole one."""
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(BadMessage):
            decode(type(message), data[:length])


def test_bytes_after_a_message_are_refused():
    """One message, one value."""
    with pytest.raises(BadMessage):
        decode(DeltaHeader, encode(samples.header()) + b"\x00")


@pytest.mark.parametrize(
    ("kind", "message", "field", "value"),
    [
        (DeltaHeader, samples.header(), "learner", "a/b"),
        (DeltaHeader, samples.header(), "learner", "name\n"),
        (DeltaHeader, samples.header(), "incarnation", "not hex!"),
        (DeltaHeader, samples.header(), "fragment", 4096),
        (DeltaHeader, samples.header(), "base_digest", bytes(15)),
        (DeltaHeader, samples.header(), "steps", 1.5),
        (DeltaHeader, samples.header(), "due", 1),
        (DeltaHeader, samples.header(), "chunks", 10**6 + 1),
        (DeltaHeader, samples.header(), "step_s", float("nan")),
        (DeltaHeader, samples.header(), "codec", "pickle"),
        (DeltaHeader, samples.header(), "surprise", 1),
        (LearnerReport, samples.report(), "tokens", 2**62 + 1),
        (LearnerReport, samples.report(), "host", "x" * 513),
        (LearnerReport, samples.report(), "versions", [0, -2]),
        (RunState, samples.run_state(), "phase", "paused"),
        (Head, samples.head(), "version", 2**48 + 1),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_name(kind, message, field, value):
    """Every size a peer controls has a bound, types are exact, and unknown fields are refused."""
    raw = msgpack.unpackb(encode(message))
    with pytest.raises(BadMessage, match=field):
        decode(kind, msgpack.packb({**raw, field: value}))


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ((samples.tensor("a", (2,)), samples.tensor("b", (2,), 2)), "fragment 2 of 2"),
        ((samples.tensor("a", (2,)), samples.tensor("b", (0,), 1)), "fragment 1 has no elements"),
        ((samples.tensor("a", (2,)), samples.tensor("a", (2,), 1)), "same name"),
    ],
)
def test_a_spec_whose_fragments_are_not_filled_is_refused(tensors, complaint):
    """Everything after the spec may count on fragments 0..P-1, each with elements, and on unique names."""
    raw = msgpack.unpackb(encode(samples.spec()))
    raw["tensors"] = [t.model_dump() for t in tensors]
    with pytest.raises(BadMessage, match=complaint):
        decode(Spec, msgpack.packb(raw))


# --- payloads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", DTYPES)
@pytest.mark.parametrize("elements", [1, 255, 256, 257, 511, 512, 513, 1000])
def test_a_payload_comes_out_as_it_went_in(codec, elements):
    """Bit for bit, at, below and above chunk boundaries; the digest is that of the bytes."""
    dtype = DTYPES[codec]
    array = np.random.default_rng(0).standard_normal(elements).astype(dtype)
    chunks = list(encode_chunks(array, CHUNK_BYTES))
    assert len(chunks) == chunk_count(elements, codec, CHUNK_BYTES)
    reader = read(chunks, elements, codec)
    assert reader.complete
    assert reader.array().dtype == dtype
    assert reader.vector()[0:elements].tobytes() == array.tobytes()
    assert reader.array().tobytes() == array.tobytes()
    assert reader.digest == payload_digest(as_bytes(array), CHUNK_BYTES)


@pytest.mark.parametrize("codec", QUANTIZED)
@pytest.mark.parametrize("elements", [1, 2016, 2017, 5000])
def test_a_quantized_payload_is_as_many_chunks_as_its_header_says(codec, elements):
    """The vector has the bytes that were sent, and their digest; a payload of another codec's size is refused."""
    wire = encode_delta(np.random.default_rng(0).standard_normal(elements).astype(np.float32), codec)
    chunks = list(encode_chunks(wire, CHUNK_BYTES))
    assert len(chunks) == chunk_count(elements, codec, CHUNK_BYTES)
    reader = read(chunks, elements, codec)
    assert as_bytes(reader.vector()).tobytes() == wire.tobytes()
    assert reader.digest == payload_digest(as_bytes(reader.vector()), CHUNK_BYTES)
    with pytest.raises(BadPayload):
        read(chunks, elements, "bf16").vector()


@pytest.mark.parametrize("codec", QUANTIZED)
def test_what_has_come_of_a_quantized_payload_can_be_looked_at(codec):
    """Whole groups, as they are in the end; scales that are none are found as they come."""
    elements = 2 * GROUP + 100
    wire = encode_delta(np.random.default_rng(0).standard_normal(elements).astype(np.float32), codec)
    whole, reader, seen = as_vector(wire, elements, codec)[0:elements], PayloadReader(elements, codec, 2**14), set()
    for chunk in encode_chunks(wire, 2**14):
        reader.feed(chunk)
        part = reader.so_far()
        seen.add(len(part))
        assert part[0 : len(part)].tobytes() == whole[: len(part)].tobytes()
    assert {0, GROUP, elements} <= seen
    wire[wire_bytes(GROUP, codec) + 1] |= 0x80
    reader = PayloadReader(elements, codec, 2**15)
    for chunk in encode_chunks(wire, 2**15):
        reader.feed(chunk)
    with pytest.raises(BadPayload, match="scale of block 256 is negative"):
        reader.so_far()


def test_an_incomplete_payload_has_no_array():
    """Half a delta is never merged."""
    reader = read(list(encode_chunks(ARRAY, CHUNK_BYTES))[:-1])
    assert not reader.complete
    with pytest.raises(BadPayload, match="3 of 4"):
        reader.array()


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [0, 1, 2, 3, 0], [0, 1, 2, 3, 3]])
def test_chunks_out_of_order_are_refused(order):
    """Missing, repeated, and more than there should be."""
    chunks = list(encode_chunks(ARRAY, CHUNK_BYTES))
    with pytest.raises(BadPayload, match="was expected"):
        read(chunks[i] for i in order)


def test_a_payload_of_another_size_is_refused():
    """The reader's bounds come from the spec: shorter, longer and of another chunk size."""
    for elements in (len(ARRAY) - 1, len(ARRAY) + 1, len(ARRAY) * 2):
        with pytest.raises(BadPayload):
            read(encode_chunks(ARRAY, CHUNK_BYTES), elements).array()
    with pytest.raises(BadPayload):
        read(encode_chunks(ARRAY, 2 * CHUNK_BYTES))
    with pytest.raises(BadPayload):
        read(encode_chunks(ARRAY, CHUNK_BYTES // 2))


def test_corruption_is_found_at_every_position():
    """Any one byte changed in any chunk, envelope included, and the payload is not accepted."""
    array = np.arange(5, dtype=np.float32)
    (chunk,) = encode_chunks(array, CHUNK_BYTES)
    for position in range(len(chunk)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(chunk)
            bad[position] ^= flip
            with pytest.raises(BadPayload):
                read([bytes(bad)], len(array))


def test_a_chunk_exchanged_between_payloads_fails_the_digest_over_all():
    """Each chunk sound in itself, but not of this payload."""
    one, other = list(encode_chunks(ARRAY, CHUNK_BYTES)), list(encode_chunks(ARRAY + 1, CHUNK_BYTES))
    with pytest.raises(BadPayload, match="of all its chunks"):
        read([one[0], other[1], *one[2:]])


def test_the_total_stands_on_the_last_chunk():
    """Its absence there is found; an early one changes nothing."""
    chunks = [decode(Chunk, c) for c in encode_chunks(ARRAY, CHUNK_BYTES)]
    assert [c.total is None for c in chunks] == [True, True, True, False]
    chunks[-1] = chunks[-1].model_copy(update={"total": None})
    with pytest.raises(BadPayload, match="of all its chunks"):
        read(map(encode, chunks))


@pytest.mark.parametrize("elements", [0, 2**62, 2**62 + 1, 2**64, 10**15 * 10**13])
def test_token_elements_of_any_run_travel_in_reports(elements: int) -> None:
    """A 7B model has 2^62 of them after 0.66 billion tokens, and msgpack's integers end at 2^64."""
    told = samples.report(published=elements, overwritten=elements)
    assert decode(LearnerReport, encode(told)) == told
    assert LearnerReport.model_validate_json(told.model_dump_json()) == told
