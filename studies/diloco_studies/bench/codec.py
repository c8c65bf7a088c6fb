"""Codecs of deltas: speed and error in memory, and a fragment's way through Redis, on loopback and behind a slow link.

    python -m diloco_studies.bench.codec --params 12.5e6,100e6 --link 1 --json FILE

Encoding and decoding run on one core, as a learner's background thread and a syncer's merge do it, and count the
float32 bytes that go in or come out. The way through Redis is the learner's and the syncer's own code: subtract, encode
(with the error that is fed back), push, and beside it follow, then decode for the norms. With `--link` each of the two
has a line of that many Gbit/s in each direction. The codecs take turns, so that what drifts on a machine meets all.

`--device cuda` encodes there too, as a learner whose model is there does: from base, snapshot and residual there to the
wire in host memory. In fp32 that is the copy of the floats themselves.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import FragmentLayout, layout_of
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload import quantize
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import (
    DTYPES,
    TRAITS,
    Payload,
    PayloadReader,
    Vector,
    as_bytes,
    as_vector,
    payload_bytes,
)
from diloco.pipeline.payload.quantize import KINDS
from diloco.pipeline.transfer.payloads import arriving, push_growing
from diloco.syncer.downloads import feed
from diloco.syncer.merging.merge import BLOCK, DeltaNorms
from diloco.workers.device_encoding import OnDevice
from diloco.workers.encoding import encode_delta
from diloco.workers.trainer.recipe import choose_device
from diloco_studies.bench.figures import shown, spread, table, write_json
from diloco_studies.bench.lines import GBIT, lines
from diloco_studies.bench.machine import describe
from diloco_studies.goodput.commands.options import whole

CHUNK_BYTES = 512 * 1024
TTL_S = 600.0
RUN = "bench-codec"
DELTA_SIZE = 1e-4
"""Standard deviation of a delta's elements; they are normal, as the sum of many steps is."""

Float32 = np.ndarray[Any, np.dtype[np.float32]]
Found = dict[str, dict[str, list[float]]]
"""Codec -> figure -> measurements."""


def _layout(elements: int) -> FragmentLayout:
    tensor = TensorSpec(name="delta", shape=(elements,), dtype="float32", rule="rda", fragment=0)
    return layout_of([tensor]).fragments[0]


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _decode(vector: Vector) -> None:
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, len(vector), BLOCK):
        piece = vector[start : start + BLOCK]
        np.copyto(scratch[: len(piece)], piece)


def in_memory(delta: Float32, codec: Codec, error: Float32) -> dict[str, float]:
    """Rates in GB/s of float32, bytes an element, what is lost of the length. `error`: (elements,) scratch."""
    elements, size = len(delta), delta.nbytes / 1e9
    found = {"bytes_per_element": payload_bytes(elements, codec) / elements}
    wire: np.ndarray[Any, Any]
    if codec in KINDS:
        found["encode_gb_s"] = size / _timed(lambda: quantize.encode(delta, codec))
        found["encode_with_error_gb_s"] = size / _timed(lambda: quantize.encode(delta, codec, error=error))
        wire = quantize.encode(delta, codec)
    else:
        wire = np.empty(elements, DTYPES[codec])
        found["encode_gb_s"] = size / _timed(lambda: np.copyto(wire, delta, casting="unsafe"))
    vector = as_vector(wire.view(np.uint8), elements, codec)
    found["decode_gb_s"] = size / _timed(lambda: _decode(vector))
    lost = total = 0.0
    for start in range(0, elements, BLOCK):
        piece = delta[start : start + BLOCK].astype(np.float64)
        lost += float(np.square(piece - vector[start : start + BLOCK]).sum())
        total += float(np.square(piece).sum())
    found["relative_error"] = float(np.sqrt(lost / total))
    return found


def on_device(delta: Float32, codec: Codec, encoder: OnDevice) -> float:
    """GB/s of float32 that become a wire in host memory."""
    base, snapshot = encoder.keep(delta), encoder.keep(np.zeros_like(delta))
    residual = encoder.keep(np.zeros_like(delta)) if TRAITS[codec].feedback else None
    wire = pooled(payload_bytes(len(delta), codec))

    def encode() -> None:
        encoder.encode(base, lambda: snapshot, codec, residual, wire, lambda upto: None)

    return delta.nbytes / 1e9 / _timed(encode)


# --- through Redis -----------------------------------------------------------------------------------


@contextmanager
def _links(redis: EmbeddedRedis, bytes_per_s: float | None) -> Iterator[tuple[str, str]]:
    """Two URLs of the server, the learner's and the syncer's; with a rate each is a line of its own."""
    if bytes_per_s is None:
        yield redis.url, redis.url
        return
    with lines(redis.socket_path, ("learner", "syncer"), bytes_per_s) as urls:
        yield urls["learner"], urls["syncer"]


async def _forget(server: Path, key: str) -> None:
    reader, writer = await asyncio.open_unix_connection(server)
    writer.write(f"UNLINK {key}\r\n".encode())
    await reader.readline()
    writer.close()


async def through_redis(
    base: Float32, values: Float32, residual: Float32, codec: Codec, server: Path, urls: tuple[str, str]
) -> float:
    """Seconds from a snapshot to a judged delta."""
    elements, layout = len(base), _layout(len(base))
    learner, syncer = [await connect(url, RUN) for url in urls]
    snapshot = values.copy()
    key = learner.keys.initial_payload(0, "codec")
    try:
        began = time.perf_counter()

        async def send() -> None:
            loop, more, wire = asyncio.get_running_loop(), asyncio.Event(), pooled(payload_bytes(elements, codec))
            payload = Payload(as_bytes(wire), CHUNK_BYTES, partial(loop.call_soon_threadsafe, more.set))
            encoding = asyncio.to_thread(encode_delta, base, lambda: snapshot, codec, residual, wire, payload.grow_to)
            await asyncio.gather(encoding, push_growing(learner, key, payload, CHUNK_BYTES, TTL_S, more))

        async def receive() -> None:
            norms, reader = DeltaNorms(layout), PayloadReader(elements, codec, CHUNK_BYTES)

            async for chunks in arriving(syncer, key, reader):
                if TRAITS[codec].quick:
                    feed(reader, norms, chunks)
                else:
                    await asyncio.to_thread(feed, reader, norms, chunks)

        await asyncio.gather(send(), receive())
        return time.perf_counter() - began
    finally:
        await learner.close()
        await syncer.close()
        await _forget(server, key)


def measure(
    elements: int, repeats: int, link_gbit: float | None, console: Console, encoder: OnDevice | None = None
) -> Found:
    """All figures of all codecs, each `repeats` times, after one turn that does not count."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(elements, np.float32) * np.float32(0.02)
    delta = rng.standard_normal(elements, np.float32) * np.float32(DELTA_SIZE)
    values, error = base - delta, np.zeros_like(delta)
    error.fill(0)  # its memory is there now
    found: Found = {codec: {} for codec in TRAITS}
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        ways = {"loopback_s": stack.enter_context(_links(redis, None))}
        if link_gbit:
            ways["link_s"] = stack.enter_context(_links(redis, link_gbit * GBIT))
        runner = stack.enter_context(asyncio.Runner(loop_factory=fast_loop))
        what = f"{elements / 1e6:g}M elements"
        for turn in track(range(repeats + 1), what, console=console, transient=True):
            for codec in TRAITS:
                measured = in_memory(delta, codec, error)
                if encoder is not None:
                    measured["device_gb_s"] = on_device(delta, codec, encoder)
                for name, urls in ways.items():
                    gc.collect()
                    measured[name] = runner.run(through_redis(base, values, error, codec, redis.socket_path, urls))
                if turn:
                    for name, value in measured.items():
                        found[codec].setdefault(name, []).append(value)
    return found


# --- showing it --------------------------------------------------------------------------------------

COLUMNS = {
    "bytes_per_element": "bytes an element",
    "relative_error": "relative error",
    "encode_gb_s": "encode, GB/s",
    "encode_with_error_gb_s": "with its error, GB/s",
    "device_gb_s": "encode on the device, GB/s",
    "decode_gb_s": "decode, GB/s",
    "loopback_s": "through Redis, s",
    "link_s": "behind the link, s",
}


def main(
    params: Annotated[str, typer.Option(metavar="N,N,...", help="Elements of the fragment")] = "12.5e6,100e6",
    link: Annotated[
        float, typer.Option(min=0.0, help="Also measure behind a link of this many Gbit/s; 0: do not")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements per figure")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything as JSON")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Also encode on this device with torch: cpu or cuda")] = None,
) -> None:
    """Codecs of deltas: GB/s, bytes and error in memory; seconds through Redis, on loopback and behind a slow link.

    Relative error: length of what one encoding loses, over the length of a delta of normal elements, without feedback.
    """
    console = Console()
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {device}: use cpu or cuda")
    encoder = None if device is None else OnDevice(choose_device(device))
    machine = describe("embedded") | {"device": device}
    report: dict[str, Any] = {"benchmark": "codec", "link_gbit": link, "machine": machine, "sizes": []}
    for elements in whole(params, "params"):
        found = measure(elements, rounds, link or None, console, encoder)
        spreads = {codec: {name: spread(values) for name, values in found[codec].items()} for codec in TRAITS}
        names = [name for name in COLUMNS if any(name in figures for figures in found.values())]
        rows = [(codec, *(shown(one[n]) if n in one else "-" for n in names)) for codec, one in spreads.items()]
        title = f"{elements / 1e6:g}M elements, {rounds} rounds, median (least - most)"
        console.print(table(title, ("", *(COLUMNS[name] for name in names)), rows))
        report["sizes"].append({"elements": elements} | spreads)
    write_json(json_file, report)


if __name__ == "__main__":
    typer.run(main)
