"""Token shards: a text as files of tokens with an index. `diloco data prepare` writes them.

    FOLDER/index.json             counts, vocabulary, a digest of each shard, and the fingerprint of all
    FOLDER/train-00000.bin ...    tokens one after the other, uint16 or uint32, little-endian
    FOLDER/validation-00000.bin
    FOLDER/tokenizer.json         the tokenizer that made the tokens and turns them into text

The fingerprint covers only the index, so that opening reads no shard; only a shard's size is compared with the index.
A shard's digest is computed when it is written. `check_shards` reads everything and compares the digests.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.payload.codec import as_bytes
from diloco.pipeline.wrong_values import complaint
from diloco.workers.trainer.data.tokens import MIN_BYTES, TextData, Tokens

INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT = "diloco token shards, 1"
_MARK = re.compile(rb'"format": *"diloco token shards')
_NAME = re.compile(r"(train|validation)-\d{5}\.bin")
_PROBE_BYTES = 4096
# Bytes that a check reads at a time.
_PIECE_BYTES = 2**20


class TokenShard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True)

    file: str = Field(pattern=r"^[a-z]+-\d{5}\.bin$")
    tokens: int = Field(ge=1)
    digest: str
    """xxh3-128 of the file's bytes, in hex."""


class Index(BaseModel):
    """The content of `index.json`. All shards in order are one text, whose first `train_tokens` are trained on."""

    model_config = ConfigDict(frozen=True)

    format: Literal["diloco token shards, 1"]
    dtype: Literal["uint16", "uint32"]
    entries: int = Field(ge=2)
    """Size of the tokenizer's vocabulary; tokens are below it."""
    separator: int = Field(ge=0)
    """Token after each document."""
    tokenizer: str
    """xxh3-128 of `tokenizer.json`, in hex."""
    made_by: str
    """xxh3-128 in hex of the file that the tokenizer was loaded from, which may differ in other respects; equals
    `tokenizer` if the tokenizer was trained for this text."""
    train_tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    skipped: int = Field(ge=0)
    text_bytes: int = Field(ge=0)
    shards: tuple[TokenShard, ...]
    fingerprint: str

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)


def fingerprint_of(index: Index) -> str:
    """Return xxh3-128 in hex over what affects a model's training, not over where the text came from."""
    decides = index.model_dump(include={"dtype", "entries", "separator", "tokenizer", "train_tokens"})
    shards = [[shard.tokens, shard.digest] for shard in index.shards]
    return xxhash.xxh3_128_hexdigest(dumps([FORMAT, decides, shards], sort_keys=True).encode())


def is_shards(path: Path) -> bool:
    """Return whether a folder holds token shards, intact or not; another kind of `index.json` does not count."""
    if not path.is_dir():
        return False
    return _has_index(path) or any((path / f"{part}-00000.bin").is_file() for part in ("train", "validation"))


def _has_index(folder: Path) -> bool:
    try:
        with (folder / INDEX_FILE).open("rb") as file:
            return _MARK.search(file.read(_PROBE_BYTES)) is not None
    except OSError:
        return False


def foreign_file(folder: Path, finished: bool = True) -> str:
    """Return the name of an entry in a folder that was not written by a preparation; "" if the folder may be replaced.

    finished: the folder must have an index.
    """
    names = sorted(path.name for path in folder.iterdir())
    ours = [name for name in names if name in (INDEX_FILE, TOKENIZER_FILE) or _NAME.fullmatch(name)]
    if strange := [name for name in names if name not in ours or not (folder / name).is_file()]:
        return strange[0]
    return "" if not finished or _has_index(folder) else f"not an {INDEX_FILE} of token shards"


def read_index(folder: Path) -> Index:
    """Read and check only the index; the shards need not exist.

    Raises:
        UsageError: the index is missing or damaged.
    """
    path = folder / INDEX_FILE
    again = "copy the folder again, or create it with `diloco data prepare`"
    try:
        index = Index.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing: {again}") from error
    except (OSError, ValidationError) as error:
        wrong = complaint(error) if isinstance(error, ValidationError) else error
        raise UsageError(f"{path} is damaged: {wrong}; {again}") from error
    if index.fingerprint != fingerprint_of(index) or index.train_tokens > index.tokens:
        raise UsageError(f"{path} is damaged: its fingerprint does not match its content; {again}")
    return index


class _Files:
    """Memory-mapped shards: nothing is read before it is used."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._entries = index.entries
        self._paths = [folder / shard.file for shard in index.shards]
        dtype = np.dtype(index.dtype).newbyteorder("<")
        self._maps = [_mapped(p, shard.tokens, dtype) for p, shard in zip(self._paths, index.shards, strict=True)]
        self._starts = [0, *accumulate(len(tokens) for tokens in self._maps)]

    def read(self, start: int, stop: int) -> Tokens:
        """Return the tokens [start, stop) of the whole text; they are not copied if they lie in one shard."""
        at, found = bisect_right(self._starts, start) - 1, []
        while start < stop:
            end = min(stop, self._starts[at + 1])
            tokens = self._maps[at][start - self._starts[at] : end - self._starts[at]]
            if (largest := int(tokens.max())) >= self._entries:
                raise UsageError(
                    f"{self._paths[at]} is damaged: it has a token {largest}, but its index has a vocabulary of "
                    f"{self._entries}. Copy it again; `diloco data check {self._paths[at].parent}` reads all shards"
                )
            found.append(tokens)
            start, at = end, at + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [self._maps[0][:0]])


def _mapped(path: Path, tokens: int, dtype: np.dtype[np.unsignedinteger]) -> Tokens:
    _check_size(path, tokens * dtype.itemsize)
    try:
        return np.memmap(path, dtype, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _check_size(path: Path, size: int) -> None:
    """Raise UsageError if the file is not there or its size differs from that in the index."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UsageError(
            f"{path}, which is listed in the index, cannot be read: {error.strerror}; copy it again"
        ) from error
    if found != size:
        raise UsageError(
            f"{path} is damaged: it has {found} bytes, but {size} by the index. Copy it again, or prepare the text "
            "again"
        )


class _Part:
    """A part of the text in the shards, which can be sliced like an array."""

    def __init__(self, files: _Files, start: int, stop: int) -> None:
        self._files, self._start, self._stop = files, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice, /) -> Tokens:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of tokens must be contiguous, but this one has step {step}")
        return self._files.read(self._start + start, self._start + max(start, stop))


def open_shards(folder: Path) -> TextData:
    """Memory-map all shards.

    Raises:
        UsageError: there are too few tokens, or the index or a shard is missing or damaged; the message names it.
    """
    index = read_index(folder)
    if index.tokens < MIN_BYTES:
        raise UsageError(f"data={str(folder)!r}: {index.tokens} tokens are too few; give at least {MIN_BYTES}")
    files = _Files(folder, index)
    return TextData(
        train=_Part(files, 0, index.train_tokens),
        validation=_Part(files, index.train_tokens, index.tokens),
        fingerprint=index.fingerprint,
        files=index.documents,
        skipped=index.skipped,
        entries=index.entries,
        made_by=(index.made_by, index.tokenizer),
    )


def check_shards(folder: Path, told: Callable[[int], None] = lambda size: None) -> Index:
    """Read all shards and compare them with their digests. told: called with the number of bytes of each piece.

    Raises:
        UsageError: something is missing, truncated or altered; the message names it.
    """
    index = read_index(folder)
    size = np.dtype(index.dtype).itemsize
    for shard in index.shards:
        _check_size(folder / shard.file, shard.tokens * size)
    check_digest(folder / TOKENIZER_FILE, index.tokenizer, told)
    for shard in index.shards:
        check_digest(folder / shard.file, shard.digest, told)
    return index


def digest_of_file(path: Path, told: Callable[[int], None] = lambda size: None) -> str:
    """Return xxh3-128 of a file's bytes, in hex."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
            told(len(piece))
    return found.hexdigest()


def check_digest(path: Path, digest: str, told: Callable[[int], None] = lambda size: None) -> None:
    """Raise UsageError if the file cannot be read or its xxh3-128 differs."""
    try:
        found = digest_of_file(path, told)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; copy it again") from error
    if found != digest:
        raise UsageError(f"{path} was altered: its digest differs from that in {INDEX_FILE}; copy it again")


class ShardWriter:
    """Writes tokens to shards with a common name; all but the last one are full."""

    def __init__(self, folder: Path, name: str, dtype: str, max_tokens: int) -> None:
        self._folder, self._name, self._max_tokens = folder, name, max_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._digest = xxhash.xxh3_128()
        self._tokens = 0
        self._file: BinaryIO | None = None
        self.shards: list[TokenShard] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens; the caller has checked that they are below the vocabulary."""
        rest = np.asarray(tokens, self._dtype)
        while len(rest):
            if self._file is None:
                path = self._folder / f"{self._name}-{len(self.shards):05}.bin"
                self._file = path.open("xb")
            piece, rest = rest[: self._max_tokens - self._tokens], rest[self._max_tokens - self._tokens :]
            data = as_bytes(piece)
            self._file.write(data)
            self._digest.update(data)
            self._tokens += len(piece)
            if self._tokens == self._max_tokens:
                self.close()

    def close(self) -> None:
        """Finish the shard in progress, if there is one."""
        if self._file is None:
            return
        self._file.close()
        name = Path(self._file.name).name
        self.shards.append(TokenShard(file=name, tokens=self._tokens, digest=self._digest.hexdigest()))
        self._file, self._tokens, self._digest = None, 0, xxhash.xxh3_128()
