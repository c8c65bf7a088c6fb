"""Promises about deltas that are encoded on the model's device: the bytes that numpy makes, and nothing waits for them.

Here the device is torch's CPU, where the same operations run; what is marked `gpu` repeats it on CUDA.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import DTYPES, TRAITS, as_vector, digest_of, payload_bytes
from diloco.pipeline.payload.quantize import BLOCK, GROUP, MIN_ABSMAX
from diloco.pipeline.settings import SyncerProcess, SyncSettings
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco.workers import device_encoding
from diloco.workers.device_encoding import OnDevice
from diloco.workers.encoding import encode_delta, grown
from diloco.workers.exchange import carrier
from diloco.workers.learner import Learner
from diloco.workers.parameters import FragmentParameters, tensor_table
from tests import HANGING_S

CODECS: tuple[Codec, ...] = get_args(Codec)
BORDERS = (1, BLOCK - 1, BLOCK, BLOCK + 1, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + BLOCK + 7)
HARD = np.array(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F7FFFFF, 0x00000001, 0x80000001, 0x80000000, 0, 0x7F800001],
    np.uint32,
).view(np.float32)
"""Infinities, several NaN, the largest, the smallest, and both zeros."""


def arrays(elements: int, seed: int, hard: int) -> list[np.ndarray]:
    """Base, current values and residual, whose difference has all sizes from block to block; some elements are hard."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(3):
        sizes = np.repeat(10.0 ** rng.choice([-44, -38, -30.1, -8, -3, 0, 30, 38], -(-elements // BLOCK)), BLOCK)
        with np.errstate(over="ignore", under="ignore"):
            values = (rng.standard_normal(elements) * sizes[:elements]).astype(np.float32)
        values[rng.integers(0, elements, elements // 8)] = 0
        found.append(values)
    for values in found[: 3 if seed % 2 else 2]:
        at = rng.integers(0, elements, hard)
        values[at] = rng.choice(HARD, hard)
        ties = rng.integers(0, elements, 8)
        values[ties] = rng.choice([0.5, 1.5, 2.5, 3.5, 5, 6, 7, 127, 64, 1.25, -0.5, MIN_ABSMAX], 8).astype(np.float32)
    return found


def both(
    base: np.ndarray, current: np.ndarray, residual: np.ndarray | None, kind: Codec, device: str = "cpu"
) -> tuple[tuple[np.ndarray, Any], tuple[np.ndarray, Any]]:
    """(bytes, what is lost) by numpy, and by torch on the device."""
    size = payload_bytes(len(base), kind)
    expected, found = np.full(size, 1, np.uint8), np.full(size, 2, np.uint8)
    with np.errstate(all="ignore"):
        lost = encode_delta(base, current.copy, kind, residual, expected)
    encoder, upto = OnDevice(torch.device(device)), list[int]()
    kept = [None if one is None else encoder.keep(one.copy()) for one in (base, current, residual)]
    also = encoder.encode(kept[0], lambda: kept[1], kind, kept[2], found, upto.append)
    assert upto == sorted(upto)
    assert upto[-1] == size
    return (expected, lost), (found, None if also is None else encoder.read(also))


def check_same(elements: int, seed: int, hard: int, kind: Codec, fed: bool, device: str = "cpu") -> None:
    """Bytes and residual; of NaN in codecs of `DTYPES`, that they are."""
    base, current, residual = arrays(elements, seed, hard)
    feedback = TRAITS[kind].feedback
    (expected, lost), (found, also) = both(base, current, residual if fed and feedback else None, kind, device)
    if kind in DTYPES:
        for wire in (found, expected):
            vector = as_vector(wire, elements, kind)[:]
            vector[np.isnan(vector.astype(np.float32))] = np.nan
    np.testing.assert_array_equal(found, expected)
    assert (also is None) is (lost is None) is not feedback
    if lost is not None and also is not None:
        np.testing.assert_array_equal(also, lost)
        zeros = lost == 0
        np.testing.assert_array_equal(np.signbit(also[zeros]), np.signbit(lost[zeros]))


@settings(max_examples=150)
@given(st.integers(1, 3 * BLOCK), st.integers(0, 2**32), st.integers(0, 6), st.sampled_from(CODECS), st.booleans())
def test_the_bytes_are_numpys(elements, seed, hard, kind, fed):
    """Of any values, infinite, subnormal or none at all among them; and what is lost is the same to the last bit."""
    check_same(elements, seed, hard, kind, fed)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("elements", BORDERS)
def test_the_bytes_are_numpys_at_the_borders(elements, kind, monkeypatch):
    """Of blocks, groups, and of what is encoded at a time."""
    monkeypatch.setattr(device_encoding, "PIECE", GROUP)
    check_same(elements, 1, 0, kind, True)
    check_same(elements, 2, 3, kind, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("elements", [*BORDERS, 5_000_000])
def test_the_bytes_are_numpys_on_cuda(elements, kind):
    """The same on a GPU, whose arithmetic is its own."""
    for seed in range(4):
        check_same(elements, seed, 3 * (seed % 3), kind, seed < 2, "cuda")


@pytest.mark.parametrize("kind", CODECS)
def test_it_is_written_from_front_to_back(kind, monkeypatch):
    """What is said to be final is not touched again: it may have left already."""
    monkeypatch.setattr(device_encoding, "PIECE", GROUP)
    base = torch.arange(3 * GROUP, dtype=torch.float32)
    out, said = np.zeros(payload_bytes(len(base), kind), np.uint8), []

    def written(upto: int) -> None:
        said.append((upto, out[:upto].tobytes()))

    OnDevice(torch.device("cpu")).encode(base, lambda: torch.zeros_like(base), kind, None, out, written)
    assert [upto for upto, _ in said] == [payload_bytes(n * GROUP, kind) for n in (1, 2, 3)]
    assert all(out[:upto].tobytes() == bytes_then for upto, bytes_then in said)


def test_what_is_owed_adds_up_in_place() -> None:
    """As it does in host memory."""
    rng = np.random.default_rng(0)
    error, now, fed = (rng.standard_normal(1000).astype(np.float32) for _ in range(3))
    encoder = OnDevice(torch.device("cpu"))
    kept = encoder.keep(error.copy())
    assert encoder.grown(kept, encoder.keep(now), encoder.keep(fed)) is kept
    np.testing.assert_array_equal(encoder.read(kept), grown(error, now, fed))


def test_a_device_without_room_says_what_to_do(monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "from_numpy", full)
    with pytest.raises(UsageError, match="DILOCO_ENCODE_ON=cpu"):
        OnDevice(torch.device("cpu")).keep(np.ones(3, np.float32))


# --- snapshots and adoptions -----------------------------------------------------------------------


def test_a_snapshot_on_the_device_keeps_its_moment_and_an_adopted_base_is_not_trained() -> None:
    """Neither shares memory with the model."""
    model = nn.Linear(3, 2)
    fragments = FragmentParameters(model, layout_of(tensor_table(model, SyncSettings(fragments=1))))
    taken, before = fragments.on_device(0), fragments.snapshot(0).numpy()
    base = torch.arange(8, dtype=torch.float32)
    fragments.overwrite(0, base)
    with torch.no_grad():
        model.weight.add_(1.0)
    np.testing.assert_array_equal(taken().numpy(), before)
    np.testing.assert_array_equal(base.numpy(), np.arange(8))
    assert model.bias.tolist() == [6.0, 7.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_deltas_are_of_the_moment_of_their_snapshot() -> None:
    """Training goes on at once, in its own stream, while bases arrive and deltas are encoded in the encoder's."""
    model = nn.Linear(2048, 2048).to("cuda")
    fragments = FragmentParameters(model, layout_of(tensor_table(model, SyncSettings(fragments=1))))
    elements, encoder = 2048 * 2049, OnDevice(torch.device("cuda"))
    out = np.empty(payload_bytes(elements, "fp32"), np.uint8)
    for round_ in range(20):
        base = encoder.keep(np.full(elements, round_, np.float32))
        with torch.no_grad():
            fragments.overwrite(0, base)
            for _ in range(50):
                model.weight @ model.weight
            model.weight.add_(2.0)
            model.bias.add_(2.0)
            taken = fragments.on_device(0)
            model.weight.fill_(-1.0)
        encoder.encode(base, taken, "fp32", None, out, lambda _: None)
        delta = as_vector(out, elements, "fp32")[:]
        assert delta.min() == delta.max() == -2.0


# --- a whole learner ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODECS)
def test_what_is_copied_in_inference_mode_is_encoded_outside_of_it(kind: Codec) -> None:
    """A loop may step in that mode, whose tensors may not be written to elsewhere: the encoder does, in its thread."""
    model, encoder = Net(), OnDevice(torch.device("cpu"))
    fragments = FragmentParameters(model, layout_of(tensor_table(model, SyncSettings(fragments=1))))
    with torch.inference_mode():
        copied = fragments.on_device(0)
    out = np.zeros(payload_bytes(len(copied()), kind), np.uint8)
    encoder.encode(encoder.keep(np.ones(len(copied()), np.float32)), copied, kind, None, out, lambda _: None)
    assert out.any()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(300, 64)
        self.body = nn.Linear(256, 200)
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.normal_(0.0, 0.02, generator=generator)


@contextmanager
def a_syncer(url: str, run: str, **told: Any) -> Iterator[None]:
    """In a thread of its own, until the end of the block. told: further settings."""

    async def main() -> None:
        stopped.append((asyncio.get_running_loop(), stop := asyncio.Event()))
        started.set()
        bus = await connect(url, run)
        process = SyncerProcess(syncer_id="syncer", http_port=0, **told)
        try:
            await SyncerService(bus, LoopClock(), process, Metrics()).run(stop)
        finally:
            await bus.close()

    started, stopped = threading.Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # its loop is closed: the run has finished
            stopped[0][0].call_soon_threadsafe(stopped[0][1].set)
        thread.join()


def uploads(url: str, run: str, kind: Codec, encode_on: Any, device: str = "cpu") -> list[bytes]:
    """Of a learner that moves its weights, publishes and adopts what comes of it, in turns."""
    model, rng, found = Net().to(device), np.random.default_rng(0), list[bytes]()
    unstretched = {"overlap_steps": 10**6}  # a round trip of any length: every step publishes
    sync = SyncSettings(
        fragments=1, sync_interval=1, first_interval=0, quorum=1, codec=kind, tokens=2**40, **unstretched
    )
    push = carrier.push_growing

    async def pushing(bus: Any, key: str, payload: Any, *rest: Any) -> Any:
        pushed = await push(bus, key, payload, *rest)
        found.append(bytes(payload._data))
        return pushed

    with pytest.MonkeyPatch.context() as patch, a_syncer(url, run):
        patch.setattr(carrier, "push_growing", pushing)
        with Learner(model, run=run, redis_url=url, learner_id="l0", sync=sync, encode_on=encode_on) as learner:
            for _ in range(6):
                with torch.no_grad():
                    for tensor in model.parameters():
                        moved = rng.standard_normal(tuple(tensor.shape)).astype(np.float32) * np.float32(1e-3)
                        tensor.add_(torch.from_numpy(moved).to(device))
                learner.step(tokens=1)  # publishes
                until = time.monotonic() + HANGING_S
                while not learner.joined.shared.adoptions:
                    assert time.monotonic() < until, "nothing was merged"
                    time.sleep(0.005)
                learner.step(tokens=1)  # adopts
            assert isinstance(learner.joined.exchange.member.encoder, OnDevice) is (encode_on == "device")
    return found


def named(payloads: list[bytes]) -> list[str]:
    """What differs is told in a line."""
    return [f"upload {number}: {digest_of(one).hex()}" for number, one in enumerate(payloads)]


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_a_learners_uploads_are_the_same_bytes(redis_server, kind):
    """Round after round: what is merged of them, adopted, and owed, is the same too."""
    by_numpy, by_torch = (uploads(redis_server, f"{kind}-{where}", kind, where) for where in ("cpu", "device"))
    assert len(by_numpy) == len({*map(digest_of, by_numpy)}) == 6
    assert named(by_torch) == named(by_numpy)


@pytest.mark.redis
def test_what_a_delta_has_lost_is_known_before_it_can_be_merged(redis_server, monkeypatch):
    """However late the thread that encodes comes back: what is lost goes with the next one, as ever."""
    prompt, encode = uploads(redis_server, "prompt", "int4", "device"), OnDevice.encode

    def late(*given: Any) -> Any:
        lost = encode(*given)
        time.sleep(0.3)  # enough for an upload, a merge and its news
        return lost

    monkeypatch.setattr(OnDevice, "encode", late)
    assert named(uploads(redis_server, "late", "int4", "device")) == named(prompt)


@pytest.mark.gpu
@pytest.mark.redis
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_cuda_learners_uploads_are_the_same_bytes(redis_server, kind):
    """By numpy from pinned snapshots, and by the GPU."""
    by_numpy, by_cuda = (uploads(redis_server, f"gpu-{kind}-{w}", kind, w, "cuda") for w in ("cpu", "device"))
    assert named(by_cuda) == named(by_numpy)
