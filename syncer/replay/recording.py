"""Recording of a run's merges on disk: all their inputs, so that `replay` can make them again.

    <directory>/spec.msgpack                                    the run's spec
    <directory>/<fragment>/<version>-<digest>-<writer>.merge    one merge, written before its commit
    <directory>/<fragment>/<version>-<digest>-<writer>.global   values that an owner read from the bus: installed
                                                                ones, and those with which it took over

A file is one header, followed by the arrays that it describes (little endian). It is written under a temporary name and
renamed, so it is whole or not there. It is not synced to the disk: a power failure may cut it short, which its reader
detects. A commit may be refused after its merge was recorded; no tape record names such a file, and it does no harm.
Sizes come from the spec and the header's length is bounded, so a file cannot make its reader allocate more than its own
size.
"""

import asyncio
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
from pydantic import Field

from diloco.pipeline.errors import BadMessage, BadPayload, OtherFormat, UsageError
from diloco.pipeline.files.writable import error_text
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import Contribution
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import MAX_LEARNERS, Digest, FirstFormat, FragmentId, Measure, Message, Version
from diloco.pipeline.payload.codec import Vector, as_bytes, as_vector, decode, encode, payload_bytes, payload_digest
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.merging.fragment import Delta, FragmentState, Merged
from diloco.syncer.merging.merge import Float32, Float64
from diloco.syncer.merging.outer import matrix_elements
from diloco.syncer.replay.disk import Disk

SPEC_FILE = "spec.msgpack"
MERGE, GLOBAL = ".merge", ".global"
MAGIC = b"DLRC"
_PREFIX = struct.Struct("<4sI")  # magic, length of the header
HEADER_LIMIT_BYTES = 4 * 2**20

M = TypeVar("M", bound=Message)


class MergeHeader(Message):
    """Header of one merge.

    These arrays follow: directions (tensors,) and norms (contributions, tensors), float64; the orthogonalised step
    (matrix elements,) float32, if there is one; the deltas.
    """

    format: FirstFormat = 1
    fragment: FragmentId
    version: Version
    digest: Digest
    base_digest: Digest
    contributions: Annotated[tuple[Contribution, ...], Field(min_length=1, max_length=MAX_LEARNERS)]
    """The contributions, in the order in which they were summed."""
    deltas: tuple[Digest, ...]
    """Digest of each delta's values."""
    norm: Measure
    """L2 norm of the pseudogradient."""
    orthogonal: Digest | None = None
    """Digest of the orthogonalised step; None for a step that orthogonalises nothing."""


class GlobalHeader(Message):
    """Header of the values at one version.

    These arrays follow: theta (elements,), then the momentum (elements,) unless it is all zeros; both float32.
    """

    format: FirstFormat = 1
    fragment: FragmentId
    version: Version
    digest: Digest
    """Digest of theta."""
    momentum: Digest | None
    """Digest of the momentum; None if it is all zeros."""


@dataclass(frozen=True, slots=True)
class RecordedMerge:
    """A `.merge` file in memory."""

    header: MergeHeader
    directions: Float64
    """(tensors,): see `merge.Reduced`."""
    norms: tuple[Float64, ...]
    """`merge.delta_norms` (tensors,) of each contribution as it was merged, rebased or not."""
    deltas: tuple[Vector, ...]
    """(elements,) of each contribution, as it was sent."""
    orthogonal: Float32 | None = None
    """See `outer.Stepped`."""


@dataclass(frozen=True, slots=True)
class RecordedGlobal:
    """A `.global` file in memory, with values and momentum checked against the digests in the header."""

    header: GlobalHeader
    theta: Float32
    momentum: Float32 | None


class Name(NamedTuple):
    """The parts of a file's name."""

    fragment: int
    version: int
    digest: str
    kind: str


class Recorder:
    """Writes a recording for one syncer.

    A disk that is full, hangs, or is gone is reported once and does not stop the run; `replay` tells what is missing.
    """

    def __init__(self, directory: Path, spec: Spec, writer: str, offload: Offload = asyncio.to_thread) -> None:
        """Begin or continue the recording of a run. This blocks, so call it off the event loop.

        `writer` is unique to this syncer, since two may merge the same version (one is committed).

        Raises:
            UsageError: the folder cannot be written, or holds the recording of another run.
        """
        self._disk = Disk(offload)
        self._directory, self._writer, self._sync = directory, writer, spec.sync
        self._log = structlog.get_logger()
        self.problem = ""
        """What the recording lacks, in words; "" if nothing."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / SPEC_FILE).exists():
                _write(directory / SPEC_FILE, [encode(spec)], writer)
            if (directory / SPEC_FILE).read_bytes() != encode(spec):
                raise UsageError(
                    f"{directory} holds the recording of another run: choose a different folder for --record-deltas"
                )
        except OSError as error:
            raise UsageError(f"--record-deltas: cannot write to {directory}: {error_text(error)}") from error

    async def merge(self, base: FragmentState, deltas: Sequence[Delta], merged: Merged) -> None:
        """Record a merge that is about to be committed; deltas are in the order in which they were summed."""
        await self._record(merged.version, self._merge, base, deltas, merged)

    async def loaded(self, state: FragmentState) -> None:
        """Record values that were read from the bus, since this recording may have no merge that leads to them."""
        await self._record(state.version, self._loaded, state)

    async def _record(self, version: int, save: Callable[..., None], state: FragmentState, *more: object) -> None:
        """Save a file, or report that it is missing.

        A slow write may outlast this call, so it gets a copy of the state, which `advance` does not change.
        """
        try:
            await self._disk.do(save, copy(state), *more)
        except OSError as error:
            at = {"fragment": state.layout.id, "version": version}
            if not self.problem:
                safe = "the run continues, but its recording has gaps from here on"
                self._log.error("recording_failed", **at, error=str(error), safe=safe)
            self.problem = f"the recording has gaps, the last at fragment {state.layout.id} version {version}: {error}"

    def _merge(self, base: FragmentState, deltas: Sequence[Delta], merged: Merged) -> None:
        stepped = merged.stepped
        header = MergeHeader(
            fragment=base.layout.id,
            version=merged.version,
            digest=stepped.digest,
            base_digest=base.digest,
            contributions=merged.contributions,
            deltas=tuple(self._digest(delta.sent.values) for delta in deltas),
            norm=stepped.reduced.norm,
            orthogonal=None if stepped.orthogonal is None else self._digest(stepped.orthogonal),
        )
        steps = [] if stepped.orthogonal is None else [stepped.orthogonal]
        sent = [delta.sent.values for delta in deltas]
        self._save(header, MERGE, [stepped.reduced.directions, *(delta.norms for delta in deltas), *steps, *sent])

    def _loaded(self, state: FragmentState) -> None:
        kept = [] if state.momentum is None else [state.momentum]
        digest = self._digest(kept[0]) if kept else None
        header = GlobalHeader(fragment=state.layout.id, version=state.version, digest=state.digest, momentum=digest)
        self._save(header, GLOBAL, [state.theta, *kept])

    def _digest(self, values: Vector) -> bytes:
        return payload_digest(as_bytes(values), self._sync.chunk_bytes)

    def _save(self, header: MergeHeader | GlobalHeader, kind: str, arrays: Sequence[Vector]) -> None:
        folder = self._directory / str(header.fragment)
        packed = encode(header)
        folder.mkdir(exist_ok=True)
        name = f"{header.version}-{header.digest.hex()}-{self._writer}{kind}"
        parts: list[bytes | memoryview] = [_PREFIX.pack(MAGIC, len(packed)), packed, *map(as_bytes, arrays)]
        _write(folder / name, parts, self._writer)


def _write(path: Path, parts: Sequence[bytes | memoryview], writer: str) -> None:
    temporary = path.with_name(f".{path.name}.{writer}")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


# --- reading -----------------------------------------------------------------------------------------


def read_spec(directory: Path) -> Spec:
    """Return the recorded run's spec.

    Raises:
        UsageError: the folder is not a recording.
        BadMessage: the spec is damaged, or of another wire format.
    """
    try:
        return decode(Spec, (directory / SPEC_FILE).read_bytes())
    except OtherFormat as error:
        raise OtherFormat(f"{directory}: {error.found}", "replay it with the build that recorded it") from error
    except FileNotFoundError as error:
        raise UsageError(f"{directory} was not written by --record-deltas: it has no {SPEC_FILE}") from error


def list_recording(directory: Path) -> set[Path]:
    """Return all files that a recording has now."""
    fragments = [int(folder.name) for folder in directory.glob("[0-9]*") if folder.name.isdecimal()]
    return {path for fragment in fragments for path in list_files(directory, fragment)}


def list_files(directory: Path, fragment: int) -> dict[Path, Name]:
    """Return the files of one fragment, in the order of versions; files with other names are ignored."""
    found = {}
    for path in (directory / str(fragment)).glob("[0-9]*-*-*.*"):
        version, digest, _ = path.stem.split("-", 2)
        if version.isdecimal() and path.suffix in (MERGE, GLOBAL):
            found[path] = Name(fragment, int(version), digest, path.suffix)
    return dict(sorted(found.items(), key=lambda item: (item[1].version, item[0].name)))


def read_merge(path: Path, layout: FragmentLayout, spec: Spec) -> RecordedMerge:
    """Read a recorded merge. The digests of deltas and step are checked by the replay, which reports what is damaged.

    Raises:
        BadMessage: the file is cut short, too long, or not of this format.
        OSError: it cannot be read.
    """
    tensors, codec = len(layout.slots), layout.sync(spec.sync).codec
    size = payload_bytes(layout.elements, codec)

    def stepped(header: MergeHeader) -> int:
        return 0 if header.orthogonal is None else 4 * matrix_elements(layout)

    def due(header: MergeHeader) -> int:
        count = len(header.contributions)
        return 8 * tensors * (1 + count) + stepped(header) + count * size

    header, body = _read(path, MergeHeader, due)
    count = len(header.contributions)
    if len(header.deltas) != count:
        raise BadMessage(f"{path.name} is damaged: it has {count} contributions but {len(header.deltas)} deltas")
    reduced = body[: 8 * tensors * (1 + count)].view(np.float64).reshape(1 + count, tensors)
    if not np.isfinite(reduced).all():
        raise BadMessage(f"{path.name} is damaged: a length is not finite")
    first = reduced.nbytes + stepped(header)
    orthogonal = None if header.orthogonal is None else body[reduced.nbytes : first].view(np.float32)
    values = body[first:].reshape(count, size)
    try:
        deltas = tuple(as_vector(value, layout.elements, codec) for value in values)
    except BadPayload as error:
        raise BadMessage(f"{path.name} is damaged: {error}") from error
    return RecordedMerge(header, reduced[0], tuple(reduced[1:]), deltas, orthogonal)


def read_global(path: Path, layout: FragmentLayout, spec: Spec) -> RecordedGlobal:
    """Read recorded values.

    Raises:
        BadMessage: the file is cut short, too long, damaged, or not of this format.
        OSError: it cannot be read.
    """
    size = layout.elements * 4
    header, body = _read(path, GlobalHeader, lambda header: size * (2 if header.momentum else 1))
    theta, kept = body[:size].view(np.float32), body[size:].view(np.float32)
    digests = [("values", theta, header.digest)]
    if header.momentum is not None:
        digests.append(("momentum", kept, header.momentum))
    for what, values, digest in digests:
        if payload_digest(as_bytes(values), spec.sync.chunk_bytes) != digest:
            raise BadMessage(f"{path.name} is damaged: the digest in its header does not match its {what}")
    return RecordedGlobal(header, theta, None if header.momentum is None else kept)


def _read(path: Path, kind: type[M], due: Callable[[M], int]) -> tuple[M, npt.NDArray[np.uint8]]:
    """Return the header and the bytes after it, whose number must be `due(header)`."""
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        magic, length = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (b"", 0)
        if magic != MAGIC or length > HEADER_LIMIT_BYTES:
            raise BadMessage(f"{path.name} is damaged: it does not begin like a recording")
        packed = file.read(length)
        if len(packed) < length:
            raise BadMessage(f"{path.name} is truncated in its header")
        try:
            header = decode(kind, packed, HEADER_LIMIT_BYTES)
        except BadMessage as error:
            raise BadMessage(f"{path.name} cannot be read: {error}") from error
        there, expected = os.fstat(file.fileno()).st_size - file.tell(), due(header)
        if there != expected:
            how = "truncated" if there < expected else "too long"
            raise BadMessage(f"{path.name} is {how}: {there} bytes follow its header instead of {expected}")
        body = np.empty(expected, np.uint8)
        if file.readinto(as_bytes(body)) != expected:
            raise BadMessage(f"{path.name} shrank while it was being read")
    return header, body
