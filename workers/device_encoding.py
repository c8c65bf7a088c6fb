"""Encode deltas on the model's device; the bytes that leave it are exactly those that numpy would make.

`quantize` defines the codes; here torch does the same single float32 operations, on as many blocks at a time as suits a
device. So every operation must give the same result on every device: a division by a number is a product with its
reciprocal on CUDA, while a division by a tensor is a true division. (Only a NaN may become another NaN, where
elements have a type of their own; such a delta is refused.)

On CUDA everything runs in a stream of its own, from threads other than the training thread, which never waits for it:
the training thread only queues a copy on the device when a snapshot is taken and when a fragment is adopted
(`FragmentTensors`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import TRAITS
from diloco.pipeline.payload.quantize import BLOCK, GROUP, MIN_ABSMAX, Kind
from diloco.workers.encoding import grown

# Elements encoded at a time. With intermediate values this takes about 25 bytes per element, 100 MB.
PIECE = 64 * GROUP

_LARGEST = {"int8": 127.0, "int4": 7.0}
_MAGNITUDE, _INFINITE, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


def encoded(delta: torch.Tensor, kind: Codec) -> Iterator[torch.Tensor]:
    """Yield a delta's wire bytes, in parts (bytes,) of uint8, on its device.

    Args:
        delta: (elements,) float32, contiguous. With error feedback it is overwritten with the encoding error.
        kind: of codec.
    """
    match kind:
        case "fp32":
            yield delta.view(torch.uint8)
        case "bf16":
            yield delta.to(torch.bfloat16).view(torch.uint8)
        case "int8" | "int4":
            whole = len(delta) // GROUP
            for part, groups in ((delta[: whole * GROUP], whole), (delta[whole * GROUP :], 1)):
                if len(part):
                    missing = -len(part) % BLOCK
                    wire, decoded = _quantized(F.pad(part, (0, missing)).view(groups, -1, BLOCK), kind)
                    part -= decoded.view(-1)[: len(part)]
                    yield wire.view(-1)
        case _:
            assert_never(kind)


def _quantized(values: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the wires (groups, bytes) of groups (groups, blocks, BLOCK), and their decoded values, shaped as given."""
    largest = (values.view(torch.int32) & _MAGNITUDE).amax(-1, keepdim=True)
    sound = largest < _INFINITE
    values = torch.where(sound, values, 0.0)
    largest = torch.where(sound, largest, 0).view(torch.float32)
    most = torch.full_like(largest, _LARGEST[kind])  # a tensor, so that `/` is a true division on every device
    exact = (largest / most).view(torch.int32)
    scales = torch.where(largest >= MIN_ABSMAX, (exact + 0xFFFF & -0x10000).view(torch.float32), 0.0)
    factors = torch.where(scales > 0, scales.reciprocal(), 0.0)
    codes = (values * factors).round_().to(torch.int8)
    decoded = codes.to(torch.float32).mul_(scales)
    codes = codes.view(torch.uint8)
    if kind == "int4":
        codes = codes[..., 0::2] & 15 | codes[..., 1::2] << 4
    short = (torch.where(sound, scales.view(torch.int32), _NAN) >> 16).to(torch.int16)
    wire = torch.cat([short.flatten(1).view(torch.uint8), codes.flatten(1)], 1)
    return wire, torch.where(sound, decoded, math.nan)


class OnDevice:
    """An `encoding.Encoder` whose vectors are tensors on one device.

    Its memory on the device: four bytes per parameter for the bases; with a codec that quantizes, as much again for the
    residuals and for each undecided delta; snapshots that are not uploaded yet (`Rounds.publications`); globals that
    are pulled and not adopted; and the intermediate values of one `PIECE`.
    """

    at_once = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Allocate and compute in the encoder's stream, without gradients."""
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                yield
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"not enough memory on {self._device} to encode deltas: encode them in host memory "
                f"(DILOCO_ENCODE_ON=cpu, encode_on='cpu'), or train in smaller batches ({error})"
            ) from error

    def keep(self, values: npt.NDArray[np.float32]) -> torch.Tensor:
        """Copy a global to the device; the copy is complete when this returns."""
        with self._work():
            return torch.from_numpy(values).to(self._device)

    def read(self, kept: torch.Tensor) -> npt.NDArray[np.float32]:
        """Copy a vector to host memory."""
        with self._work():
            values: npt.NDArray[np.float32] = kept.cpu().numpy()
            return values

    def encode(
        self,
        base: torch.Tensor,
        values: Callable[[], torch.Tensor],
        kind: Codec,
        residual: torch.Tensor | None,
        out: npt.NDArray[np.uint8],
        grow_to: Callable[[int], object],
    ) -> torch.Tensor | None:
        """Encode a delta (`Encoder.encode`); this waits for the device, but only for the encoder's stream."""
        host, done = torch.from_numpy(out), 0
        with self._work():
            current = values()
            for start in range(0, len(base), PIECE):
                delta = current[start : start + PIECE]
                torch.sub(base[start : start + PIECE], delta, out=delta)
                if residual is not None:
                    delta += residual[start : start + PIECE]
                for wire in encoded(delta, kind):
                    host[done : done + len(wire)].copy_(wire)
                    done += len(wire)
                grow_to(done)
        return current if TRAITS[kind].feedback else None

    def grown(self, error: torch.Tensor, now: torch.Tensor | None, fed: torch.Tensor | None) -> torch.Tensor:
        """Compute `grown` on the device (`Encoder.grown`)."""
        with self._work():
            found: torch.Tensor = grown(error, now, fed)
            return found
