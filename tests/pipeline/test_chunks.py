"""Chunks in parts are the chunks of the codec, byte for byte, and are read as those are."""

import msgpack
import numpy as np
import pytest

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.payload.codec import (
    MIN_PARTS,
    ChunkParts,
    Payload,
    PayloadReader,
    as_bytes,
    heading,
    payload_digest,
    split_chunk,
)
from diloco_studies.virtual.memory_fragments import chunk_size, whole_chunk
from tests.samples import encode_chunks

CHUNK = 2 * MIN_PARTS


def payload_of(array: np.ndarray, chunk_bytes: int = CHUNK) -> Payload:
    payload = Payload(as_bytes(array), chunk_bytes)
    payload.grow_to(array.nbytes)
    return payload


@pytest.mark.parametrize("elements", [1, 100, CHUNK // 4, CHUNK // 4 + 1, 3 * CHUNK // 4 + 20_000])
def test_parts_joined_are_what_the_codec_makes(elements):
    array = np.random.default_rng(0).standard_normal(elements, np.float32)
    payload = payload_of(array)
    made = [payload.encoded(i) for i in range(payload.chunks)]
    assert [whole_chunk(chunk) for chunk in made] == list(encode_chunks(array, CHUNK))
    assert [chunk_size(chunk) for chunk in made] == [len(whole_chunk(chunk)) for chunk in made]
    assert payload.digest == payload_digest(as_bytes(array), CHUNK)
    assert any(isinstance(chunk, ChunkParts) for chunk in made) == (array.nbytes >= MIN_PARTS)


@pytest.mark.parametrize("index", [0, 1, 127, 128, 255, 256, 65535, 65536, 10**6])
@pytest.mark.parametrize("count", [1, 255, 256, 65535, 65536])
def test_what_stands_before_the_data_is_msgpacks(index, count):
    packed = msgpack.packb({"index": index, "data": b"x" * count, "digest": bytes(16), "total": None})
    assert packed.startswith(heading(index, count) + b"x")
    assert split_chunk(packed, index, count) == (b"x" * count, bytes(16), None)


def test_a_payload_is_digested_as_it_is_written():
    """What is not whole yet has no digest; what is, has its own at once."""
    array = np.zeros(CHUNK, np.float32)  # 4 chunks
    payload = Payload(as_bytes(array), CHUNK)
    payload.grow_to(CHUNK - 1)
    assert payload.ready == 0
    array[: CHUNK // 4] = 1
    payload.grow_to(CHUNK)
    assert payload.ready == 1
    array[CHUNK // 4 :] = 2
    payload.grow_to(4 * CHUNK)
    assert payload.ready == 4
    assert [whole_chunk(payload.encoded(i)) for i in range(4)] == list(encode_chunks(array, CHUNK))


def test_a_chunk_written_in_another_way_is_read_too():
    """Another order of its fields is as good; it only takes longer."""
    array = np.arange(CHUNK // 2, dtype=np.float32)
    reader = PayloadReader(len(array), "fp32", CHUNK)
    for encoded in encode_chunks(array, CHUNK):
        fields = msgpack.unpackb(encoded)
        turned = msgpack.packb(dict(reversed(fields.items())))
        assert split_chunk(turned, fields["index"], CHUNK) is None
        reader.feed(memoryview(turned))
    assert (reader.array() == array).all()


@pytest.mark.parametrize("cut", [1, 17, 60, CHUNK])
def test_a_chunk_that_is_cut_short_or_too_long_is_refused(cut):
    array = np.arange(CHUNK // 4, dtype=np.float32)
    encoded = whole_chunk(payload_of(array).encoded(0))
    for changed in (encoded[:-cut], encoded + bytes(cut)):
        with pytest.raises(BadPayload):
            PayloadReader(len(array), "fp32", CHUNK).feed(changed)


def test_what_is_here_so_far_is_the_beginning():
    """Elements that a chunk's end cuts are not there yet."""
    array = np.arange(1000, dtype=np.float32)
    reader, chunk_bytes = PayloadReader(len(array), "fp32", 1001), 1001
    for i, encoded in enumerate(encode_chunks(array, chunk_bytes), 1):
        reader.feed(encoded)
        here = reader.so_far()
        assert len(here) == min(i * chunk_bytes, array.nbytes) // 4
        assert (here == array[: len(here)]).all()
