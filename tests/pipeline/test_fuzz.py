"""Nothing that a peer can send ends a process, takes long, or takes memory out of proportion to its bytes."""

import random
import tracemalloc
from collections import Counter
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline import messages
from diloco.pipeline.bus import schema, stored_reports
from diloco.pipeline.errors import BadMessage, BadPayload
from diloco.pipeline.messages.fragment import DeltaHeader
from diloco.pipeline.messages.run import LearnerReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import MAX_CHUNKS, Codec, Message
from diloco.pipeline.payload.codec import PayloadReader, decode
from tests import fuzz, samples

MODULES = [
    schema,
    *(import_module(f"{messages.__name__}.{one.name}") for one in iter_modules(messages.__path__)),
]


def test_every_kind_of_message_is_fuzzed() -> None:
    """A kind that is added later must get an example."""
    kinds = {kind for module in MODULES for kind in vars(module).values() if isinstance(kind, type)}
    assert {kind for kind in kinds if issubclass(kind, Message) and kind is not Message} == set(fuzz.KINDS)
    for kind, example in fuzz.EXAMPLES.items():
        assert decode(kind, fuzz.encode(example)) == example


def test_payloads_of_every_codec_are_fuzzed() -> None:
    """By its row in the table of traits."""
    missing = set(get_args(Codec)) - fuzz.SENT.keys()
    assert not missing, f"give {', '.join(missing)} a row in TRAITS, pipeline/payload/codec.py"


@pytest.mark.parametrize("kind", [*fuzz.KINDS, "chunks"], ids=lambda k: k if isinstance(k, str) else k.__name__)
def test_bombs_take_no_more_memory_than_their_bytes_justify(kind: type[Message] | str) -> None:
    """64 KiB of arrays in arrays, each announced as long as the whole, would take hundreds of MB otherwise."""
    for what, data in fuzz.bombs():
        decoding = (lambda d=data: fuzz.feed([d])) if isinstance(kind, str) else (lambda d=data: decode(kind, d))
        assert fuzz.check(what, len(data), decoding, traced=True) == "refused"


@pytest.mark.parametrize("kind", fuzz.KINDS, ids=lambda kind: kind.__name__)
def test_a_long_array_of_nothing_is_refused_by_its_first_item(kind: type[Message]) -> None:
    """A complaint about each of a thousand empty maps is a thousand times a complaint."""
    raw = fuzz.msgpack.unpackb(fuzz.encode(fuzz.EXAMPLES[kind]), use_list=False)
    for name in [name for name, value in raw.items() if isinstance(value, tuple)]:
        data = fuzz.msgpack.packb(raw | {name: [{}] * 1000})
        assert fuzz.check(name, len(data), lambda d=data: decode(kind, d), traced=True) == "refused"


def test_twenty_thousand_changed_messages_are_taken_or_refused() -> None:
    """`make fuzz` tries a million."""
    outcomes = fuzz.run(20_000, seed=1)
    assert outcomes["refused"] > 10_000
    assert outcomes["taken"] > 100


@given(st.binary(max_size=400), st.sampled_from(fuzz.KINDS), st.integers(0, 60))
def test_any_bytes_in_the_middle_of_a_message(data: bytes, kind: type[Message], at: int) -> None:
    """Hypothesis looks for what the random changes did not think of, and makes it small."""
    whole = fuzz.encode(fuzz.EXAMPLES[kind])
    made = whole[:at] + data + whole[at + len(data) :]
    fuzz.check(kind.__name__, len(made), lambda: decode(kind, made))


@given(st.lists(st.binary(max_size=400) | st.sampled_from(fuzz.CHUNKS["fp32"]), max_size=6))
def test_any_chunks_make_the_payload_or_none(chunks: list[bytes]) -> None:
    """What is taken has the values that were sent."""
    fuzz.check("payload", sum(map(len, chunks)), lambda: fuzz.feed(chunks))


@pytest.mark.parametrize("codec", fuzz.CODECS)
def test_forged_payloads_are_judged_by_what_they_decode_to(codec: Codec) -> None:
    """Sound digests over bytes that nobody encoded: taken if all of it is finite, else refused, and nothing else."""
    chance = random.Random(2)
    outcomes = Counter[str]()
    for _ in range(300):
        chunks = fuzz.forged(chance, codec)
        outcomes[
            fuzz.check("forged", fuzz.SCRATCH_BYTES // 50, lambda c=chunks: fuzz.judge(c, codec), traced=True)
        ] += 1
    assert outcomes["refused"] > 30
    assert outcomes["taken"] > 30


def test_a_header_alone_takes_no_memory_for_its_payload() -> None:
    """Whoever announces deltas and sends nothing costs the syncer nothing."""
    tracemalloc.start()
    try:
        readers = [PayloadReader(10**8, "fp32", 2**19) for _ in range(100)]
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()
    assert not any(reader.complete for reader in readers)


def test_no_message_is_larger_than_its_kind_may_be() -> None:
    """A caller's own limit can only be lower."""
    assert DeltaHeader.max_bytes < LearnerReport.max_bytes
    with pytest.raises(BadMessage, match="exceeds the limit of 4096"):
        decode(DeltaHeader, b"\xc0" * 5000, limit=10**6)
    with pytest.raises(BadPayload, match="exceeds the limit"):
        PayloadReader(10, "fp32", 1024).feed(b"\xc0" * 2000)


def test_a_spec_that_could_not_be_sent_is_refused() -> None:
    """Fragments of more chunks than a payload may have, told before anybody makes room for them."""
    raw = samples.spec().model_dump()
    raw["tensors"][0]["shape"] = (2**40, 2**20)
    with pytest.raises(BadMessage, match=f"more than {MAX_CHUNKS} chunks of 1024 bytes"):
        decode(Spec, fuzz.msgpack.packb(raw))


@pytest.mark.parametrize("digits", [b"9" * 5000, b"9" * 21, b"9" * 20, b"%d" % (2**62 + 1)])
def test_counters_that_no_message_may_have_are_refused(digits: bytes) -> None:
    """Python refuses long numbers, and a message those out of bounds, with errors of other kinds: they end a syncer."""
    with pytest.raises(BadMessage):
        schema.decode_count("a count", digits)
    assert schema.live_syncers(0, {b"n": digits + b" 0 name"}) == []
    reports = {b"l0/00000000": fuzz.encode(samples.report())}
    assert stored_reports.seen_reports(0, reports, {b"l0/00000000": digits}, {}) == []
