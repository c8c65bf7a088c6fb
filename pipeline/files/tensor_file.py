"""safetensors files, read and written as raw bytes per tensor, so any element type is supported, numpy's or not.

A file is the length of its header (8 bytes, little-endian), the header as JSON, and the tensors' bytes.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps

# The limit of the format's own library.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
_LENGTH = 8
# Bits per element by type. Types that are newer than this table are accepted without a check of their size.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, in row-major order."""

    dtype: str
    """The format's name of the type: F32, BF16 ..."""
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Any]
    """Returns its bytes, as a buffer."""


class _Entry(BaseModel):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """First byte and the one after the last, relative to the end of the header."""


_HEADER = TypeAdapter(dict[str, _Entry])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name. The file is memory-mapped, so bytes are read on access.

    Raises:
        UsageError: the file cannot be read, or is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            return tensors_in(memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a safetensors file: {str(error).splitlines()[0]}") from error


def tensors_in(whole: memoryview) -> dict[str, Tensor]:
    """Return the tensors in a file's bytes, sharing that memory.

    Raises:
        ValueError: the bytes are not a safetensors file.
    """
    start = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
    if not _LENGTH < start <= min(len(whole), MAX_HEADER_BYTES):
        raise ValueError("its header is longer than the file")
    try:
        header = json.loads(bytes(whole[_LENGTH:start]))
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header names no tensors")
    entries = _HEADER.validate_python({name: entry for name, entry in header.items() if name != METADATA})
    return {name: _mapped(whole[start:], entry) for name, entry in entries.items()}


def _mapped(data: memoryview, entry: _Entry) -> Tensor:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor's bytes lie outside the file")
    bits = _BITS.get(entry.dtype)
    if min(entry.shape, default=0) < 0 or (bits and 8 * (end - begin) != bits * math.prod(entry.shape)):
        raise ValueError(f"a tensor of type {entry.dtype} and shape {entry.shape} cannot have {end - begin} bytes")
    return Tensor(entry.dtype, entry.shape, end - begin, lambda: data[begin:end])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new file, in the form that transformers and peft read.

    Raises:
        OSError: the file exists or cannot be written.
    """
    with path.open("xb") as file:
        file.writelines(parts_of(tensors))


def parts_of(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """Yield a file's bytes as buffers: the header, then each tensor, which is read only when its turn comes."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, begin + tensor.nbytes)}
        begin += tensor.nbytes
    encoded = dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH)  # pad it, so that the tensors are aligned
    yield len(encoded).to_bytes(_LENGTH, "little") + encoded
    for tensor in tensors.values():
        yield tensor.read()
