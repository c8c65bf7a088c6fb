"""Broken input for every decoder: encoded messages of every kind and whole payloads, changed at random, and bombs.

    python -m tests.fuzz --inputs 1000000      # `make fuzz`; the same seed gives the same inputs

Only `BadMessage` and `BadPayload` may come out, in bounded time, and with no more memory than the bytes that came
justify. The inputs are changed as trees (values, names, sizes, nesting) and as bytes (flipped, cut, spliced,
sizes announced that do not follow).
"""

import argparse
import copy
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
from rich.progress import Progress

from diloco.pipeline.bus import schema
from diloco.pipeline.errors import BadMessage, BadPayload
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages import spec as spec_messages
from diloco.pipeline.messages.fragment import NOTHING_MERGED, Committed, MergedBase, Rewound, WindowChanged
from diloco.pipeline.messages.payload import Chunk
from diloco.pipeline.messages.run import Event, InitialUpload
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard, ShardQueue
from diloco.pipeline.messages.spec import Wanted
from diloco.pipeline.messages.wire import Codec, Message
from diloco.pipeline.payload.codec import TRAITS, PayloadReader, as_bytes, decode, decode_tape, encode
from diloco.syncer.merging.merge import BLOCK, delta_norms
from tests import samples
from tests.samples import encode_chunks

SLOW_S = 1.0
"""No input may keep a processor busy for longer; the largest are 64 KiB."""
LONGEST_BYTES = 64 * 1024
LONGEST_REASON = 1000
"""Characters of what is said about refused bytes."""
TRACED_EVERY = 50
"""Watching memory makes decoding several times slower."""
SCRATCH_BYTES = 4 * BLOCK
"""Norms take so much for any delta."""
ELEMENTS, CHUNK_BYTES = 300, 256
LAYOUT = layout_of(
    [spec_messages.TensorSpec(name="t", shape=(ELEMENTS,), dtype="float32", rule="rda", fragment=0)]
).fragments[0]

CONTRIBUTION = samples.contribution()
BASE = MergedBase(learner="l0", incarnation="0" * 8, base_version=3, tokens=400)
SHARD = Shard(epoch=0, index=1, start=8, stop=16)
SPEC = samples.spec().model_copy(update={"frozen": (("base.weight", bytes(16)), ("base.bias", bytes(16)))})
EXAMPLES: dict[type[Message], Message] = {
    type(one): one
    for one in (
        SPEC,
        SPEC.sync,
        Wanted(sync={"tokens": 7, "method": "paper", "outer_lr": 0.7, "stretch": False}),
        SPEC.tensors[0],
        samples.header(),
        Chunk(index=0, data=b"data", digest=bytes(16), total=bytes(16)),
        samples.head(
            merged=(BASE,),
            window=samples.IDLE.model_copy(update={"members": ("l0", "l1")}),
        ),
        samples.IDLE.model_copy(update={"members": ("l0", "l1"), "deadline_unix_s": 5.0}),
        BASE,
        schema.MergedBases(merged=(BASE, BASE), norms=(0.5, 1.5)),
        InitialUpload(learner="l0", nonce="ab" * 8),
        samples.moments_offer().kind,
        samples.moments_wish(),
        samples.moments_offer(),
        samples.report(),
        samples.seen(),
        samples.evaluation(),
        Event(name="learner_joined", who="l0", detail="", unix_s=1.0),
        samples.run_state(manifest=((3, bytes(16)), (4, bytes(16)))),
        DataOrder(length=16, seed=3),
        SHARD,
        ClaimedShard(entry_id="1-0", shard=SHARD, position=3),
        ShardQueue(epochs=1, open=((SHARD, 3),)),
        CONTRIBUTION,
        Committed(
            fragment=0,
            version=1,
            digest=bytes(16),
            reason="",
            syncer="s",
            unix_s=1.0,
            **NOTHING_MERGED | {"contributions": (CONTRIBUTION, CONTRIBUTION)},
        ),
        samples.rejected(),
        WindowChanged(fragment=1, version=2, attempt=0, reason="open", unix_s=1.0),
        Rewound(fragment=1, version=2, was_version=4, unix_s=1.0),
    )
}
KINDS = tuple(EXAMPLES)
VALUES = np.arange(ELEMENTS, dtype=np.float32)
CODECS = tuple(TRAITS)
SENT = {codec: np.asarray(as_bytes(samples.on_wire(VALUES, codec))) for codec in CODECS}
SENT_BYTES = {sent.tobytes() for sent in SENT.values()}
CHUNKS = {codec: tuple(encode_chunks(SENT[codec], CHUNK_BYTES)) for codec in CODECS}

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**62, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "x" * 65, "x" * 600, "\n", "\0", "../..", "{a}:b", "é", b"", b"\0" * 16, b"x" * 17, b"x" * 5000),
    *((), {}, [[]], [0] * 300, [{}] * 300, {"format": 2}, {"": 0}, {"x" * 5000: 0}, {0: 0}, {b"a": 0}),
    *(msgpack.Timestamp(1, 1), msgpack.ExtType(5, b"x" * 100)),
)
ANNOUNCED = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x01\x00\x00", b"\xdc\xff\xff"),  # arrays
    *(b"\xdf\xff\xff\xff\xff", b"\xdf\x00\x01\x00\x00", b"\xde\xff\xff"),  # maps
    *(b"\xc6\xff\xff\xff\xff", b"\xc6\x00\x10\x00\x00", b"\xdb\xff\xff\xff\xff"),  # bytes, text
    *(b"\xc9\xff\xff\xff\xff\x05", b"\xc8\xff\xff\x05", b"\xd8\x05", b"\xc1"),  # extensions, and what is never used
)
"""Sizes of which nothing follows."""


# --- bombs -------------------------------------------------------------------------------------------


def bombs() -> Iterator[tuple[str, bytes]]:
    """Few bytes that announce, nest or repeat as much as they can."""
    rest = b"\x00" * 50_000
    yield "arrays in arrays, each announced as long as the message", b"\xdd\x00\x00\xc0\x00" * 1000 + rest
    yield "maps in maps", b"\xdf\x00\x00\xc0\x00\x00" * 1000 + rest
    yield "arrays in a field", b"\x81\xa1a" + b"\xdd\x00\x00\xc0\x00" * 1000 + rest
    yield "a nest deeper than any stack", b"\x91" * LONGEST_BYTES
    yield "a nest of maps", b"\x81\x00" * (LONGEST_BYTES // 2)
    yield "as many empty maps as fit", b"\xdc\xff\x00" + b"\x80" * 0xFF00
    yield "as many small maps as fit", b"\xdc\x55\x00" + b"\x81\x00\xc0" * 0x5500
    yield "as many empty arrays as fit", b"\xdc\xff\x00" + b"\x90" * 0xFF00
    yield "a map of as many names as fit", b"\xde\x40\x00" + b"".join(msgpack.packb(n) + b"\xc0" for n in range(0x4000))
    yield "extensions", b"\xdc\x20\x00" + b"\xd6\xff\x00\x00\x00\x00" * 0x2000
    for announced in ANNOUNCED:
        yield f"only {announced.hex()}", announced
        yield f"{announced.hex()} and more", announced + rest


# --- changes -----------------------------------------------------------------------------------------


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield from _nodes(value, (*path, key))


def changed_tree(chance: random.Random, data: bytes) -> bytes:
    """A value, a name or a size of the message is another one; it is still msgpack."""
    tree = msgpack.unpackb(data, strict_map_key=False)
    for _ in range(chance.randint(1, 3)):
        *where, last = chance.choice(list(_nodes(tree))) or (None,)
        if last is None:
            tree = chance.choice((tree, [tree], {"a": tree}, copy.deepcopy(chance.choice(ODD))))
            continue
        parent = tree
        for key in where:
            parent = parent[key]
        match chance.randrange(5):
            case 0 if isinstance(parent, dict):
                parent[chance.choice(("", "x" * 300, 5, b"x", "format", "kind"))] = parent.pop(last)
            case 1:
                del parent[last]
            case 2:
                parent[last] = [parent[last]] * chance.choice((0, 1, 2, 40))
            case _:
                parent[last] = copy.deepcopy(chance.choice(ODD))
        if not isinstance(tree, (dict, list)):
            break
    packed: bytes = msgpack.packb(tree)
    return packed


def changed_bytes(chance: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, put in, repeated, or of another message."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(6):
            case 0 if at < len(made):
                made[at] ^= 1 << chance.randrange(8)
            case 1:
                del made[at : at + chance.choice((1, 2, 16, 1000))]
            case 2:
                made[at:at] = chance.choice(ANNOUNCED)
            case 3:
                made[at:at] = chance.choice((b"\x91", b"\x81\x00", b"\xdd\x00\x00\x10\x00")) * chance.choice(
                    (1, 30, 2000)
                )
            case 4:
                other = encode(EXAMPLES[chance.choice(KINDS)])
                made[at:] = other[chance.randrange(len(other)) :]
            case _:
                made[at : at + 4] = chance.randbytes(4)
    return bytes(made[:LONGEST_BYTES])


def changed(chance: random.Random, data: bytes) -> bytes:
    """One of both, or bytes of no origin."""
    kind = chance.random()
    if kind < 0.02:
        return chance.randbytes(chance.choice((0, 1, 5, 100, 2000)))
    return changed_tree(chance, data) if kind < 0.5 else changed_bytes(chance, data)


# --- what must hold ----------------------------------------------------------------------------------


def allowed_bytes(size: int) -> int:
    """Memory that decoding so many bytes may take for a moment: a map of nothing is the costliest."""
    return 2**18 + 100 * size


def feed(chunks: list[bytes], codec: Codec = "fp32") -> bool:
    """Read chunks as a payload; whether it is one that was sent.

    Of any codec: which one it is, the spec says, not the payload, and two of 4 bits are of one size.
    """
    reader = PayloadReader(ELEMENTS, codec, CHUNK_BYTES)
    for chunk in chunks:
        reader.feed(chunk)
    return as_bytes(reader.vector()).tobytes() in SENT_BYTES


def forged(chance: random.Random, codec: Codec) -> list[bytes]:
    """A payload whose digests are right, of bytes that nobody encoded: noise, all ones, or a few bytes changed."""
    wire = np.array(SENT[codec])
    match chance.randrange(3):
        case 0:
            wire[:] = np.frombuffer(chance.randbytes(len(wire)), np.uint8)
        case 1:
            wire[:] = 0xFF
        case _:
            for _ in range(chance.randint(1, 8)):
                wire[chance.randrange(len(wire))] = chance.randrange(256)
    return list(encode_chunks(wire, CHUNK_BYTES))


def judge(chunks: list[bytes], codec: Codec) -> None:
    """What a syncer does with a payload: its norms, which must be finite where its elements are.

    Raises:
        BadPayload: refused.
    """
    reader = PayloadReader(ELEMENTS, codec, CHUNK_BYTES)
    for chunk in chunks:
        reader.feed(chunk)
    vector = reader.vector()
    sound = bool(np.isfinite(vector[0:ELEMENTS].astype(np.float32)).all())
    assert np.isfinite(delta_norms(LAYOUT, vector)).all() == sound, "norms do not tell what is not finite"
    if not sound:
        raise BadPayload("not finite")


def one_payload(chance: random.Random, codec: Codec) -> list[bytes]:
    """A payload of which a chunk is changed, and some are missing, twice, exchanged, or of another codec."""
    chunks = list(CHUNKS[chance.choice(CODECS) if chance.random() < 0.1 else codec])
    at = chance.randrange(len(chunks))
    match chance.randrange(4):
        case 0:
            del chunks[at]
        case 1:
            chunks.insert(at, chunks[chance.randrange(len(chunks))])
        case _:
            chunks[at] = changed(chance, chunks[at])
    return chunks


def one_input(chance: random.Random) -> tuple[str, int, Callable[[], Any]]:
    """What it is, how many bytes, and the decoding."""
    if chance.random() < 0.2:
        codec = chance.choice(CODECS)
        if chance.random() < 0.2:
            chunks = forged(chance, codec)
            size = sum(map(len, chunks)) + SCRATCH_BYTES // 100
            return f"forged {codec} payload", size, lambda: judge(chunks, codec)
        chunks = one_payload(chance, codec)
        return f"{codec} payload", sum(map(len, chunks)), lambda: feed(chunks, codec)
    kind = chance.choice(KINDS)
    data = changed(chance, encode(EXAMPLES[kind]))
    if chance.random() < 0.1:
        return "tape", len(data), lambda: decode_tape(data)
    return kind.__name__, len(data), lambda: decode(kind, data)


def check(what: str, size: int, decoding: Callable[[], Any], traced: bool = False) -> str:
    """Decode one input; returns what became of it.

    Raises:
        AssertionError: it took too long, or too much memory.
    """
    if traced:
        tracemalloc.start()
    began, outcome, told = time.thread_time(), "taken", ""
    try:
        if decoding() is False:
            told = "other values than were sent were taken for a payload"
    except (BadMessage, BadPayload) as error:
        outcome = "refused"
        told = "a peer's bytes fill the log" if len(str(error)) > LONGEST_REASON else ""
    finally:
        took_s = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
        if traced:
            tracemalloc.stop()
    assert not told, f"{what}: {told}"
    assert took_s < SLOW_S, f"{what}: {took_s:.1f} s"
    assert peak <= allowed_bytes(size), f"{what}: {peak} bytes of memory for {size} of input"
    return outcome


def run(inputs: int, seed: int, progress: Callable[[int], None] = lambda _: None) -> Counter[str]:
    """Try so many inputs; returns how many were taken and refused.

    Raises:
        AssertionError: see `check`; any other error is a finding too. Its notes name seed and number.
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    for number in range(inputs):
        what, size, decoding = one_input(chance)
        try:
            outcomes[check(what, size, decoding, traced=number % TRACED_EVERY == TRACED_EVERY - 1)] += 1
        except Exception as error:
            error.add_note(f"input {number} of seed {seed}: {what}")
            raise
        if number % 1000 == 999:
            progress(1000)
    return outcomes


def main() -> int:
    """Entry point of `make fuzz`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.perf_counter()
    with Progress(disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("inputs", total=given.inputs)
        outcomes = run(given.inputs, given.seed, lambda done: bar.advance(task, done))
    took_s = time.perf_counter() - began
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{given.inputs:,} inputs in {took_s:.0f} s: {told}; nothing else came out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
