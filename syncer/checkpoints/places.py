"""Places of checkpoints: a folder, or an address in an object store (`s3://bucket/path`), through fsspec.

In both, a file is either whole or not there: on a disk because of a rename, in a store because the last request creates
the object. That does not hold for all file systems of fsspec (sftp, ftp, hdfs), so other stores are refused.
Credentials and endpoints come only from the environment, where each store's own tools take them from.
"""

import importlib
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from diloco.pipeline.errors import UsageError, missing
from diloco.pipeline.files.address import is_address
from diloco.pipeline.files.replacing import Part, replace
from diloco.pipeline.files.writable import TRIED, try_folder

# Bytes given to a store's file at a time; the file buffers them and sends its own parts.
PIECE_BYTES = 8 * 2**20
# Options of a store's client, by protocol: an unreachable network is reported within about a minute, and retried later.
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}}
}
# Protocol -> package, and the extra of this project that installs it.
STORES: Final[Mapping[str, tuple[str, str]]] = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "memory": ("fsspec", "s3"),  # in the memory of the process, for tests: nothing survives a kill
}
# Meaning of errors of the stores' clients, by type name, so that the clients need not be imported for it.
WORDS: Final[Mapping[str, str]] = {
    "NoCredentialsError": "there are no credentials in the environment",
    "PartialCredentialsError": "the credentials in the environment are incomplete",
    "PermissionError": "the credentials in the environment do not permit it",
    "FileNotFoundError": "no such bucket or folder",
    "EndpointConnectionError": "the network or the store cannot be reached",
    "ConnectTimeoutError": "the network or the store cannot be reached",
    "ReadTimeoutError": "the store is not answering",
    "ClientConnectorError": "the network or the store cannot be reached",
}


class Place(Protocol):
    """A folder on a disk or in a store. Its calls block, and raise OSError with a readable message."""

    def below(self, name: str) -> "Place":
        """Return the folder of this name in it, whether or not it exists."""

    def check(self) -> None:
        """Check by a trial that files can be written; nothing of it remains.

        Raises:
            UsageError: this user has no permission.
            OSError: nothing can be written.
        """

    def names(self) -> frozenset[str]:
        """Return the names of the files and folders in it; none if it does not exist."""

    def age_s(self) -> float:
        """Return the seconds since anything in it was written; 0 if it is empty or does not exist."""

    def size_bytes(self) -> int:
        """Return the size of all files in it."""

    def read(self, name: str) -> bytes:
        """Return a file's bytes; raise FileNotFoundError if it does not exist."""

    def write(self, name: str, parts: Iterable[Part]) -> None:
        """Write or replace a file, atomically; the folder is made."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all its content, if it exists."""


def place_of(place: str | Path) -> Place:
    """Return the place of a path or an address.

    Raises:
        UsageError: the address is not valid, its store is not one of `STORES`, or its package is missing; the message
            says what to give or to install.
    """
    if isinstance(place, Path) or not is_address(place):
        return Folder(Path(place))
    protocol, slashes, path = place.partition("://")
    if not slashes:
        raise UsageError(
            f"{place}: write an address with two slashes, {place.replace(':/', '://', 1)}, or a folder as ./{place}"
        )
    if protocol == "file":
        raise UsageError(f"{place}: give only the folder, {path or '/path'}")
    if protocol not in STORES:
        raise UsageError(
            f"{place}: this kind of store is not supported, since a killed syncer may leave a partial file in it; use "
            "a folder, s3://bucket/path or gs://bucket/path"
        )
    if not path.strip("/") or path.startswith("/"):
        raise UsageError(f"{place} names no bucket: use {protocol}://bucket/path")
    package, extra = STORES[protocol]
    try:
        fsspec = importlib.import_module("fsspec")
        files = fsspec.filesystem(protocol, **OPTIONS.get(protocol, {}))
    except ImportError as error:
        raise UsageError(missing(package, extra, place)) from error
    except Exception as error:  # the store's client rejects its settings in the environment
        raise UsageError(f"{place}: {error}") from error
    return Store(files, place.rstrip("/"))


class Folder(Place):
    """A `Place` on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def below(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def check(self) -> None:
        try_folder(self.path)

    def names(self) -> frozenset[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return frozenset(entry.name for entry in self.path.iterdir())
        return frozenset()

    def age_s(self) -> float:
        """Return the seconds since anything in it was written; the path may also be a file."""
        with suppress(FileNotFoundError):  # another syncer may remove it meanwhile
            return time.time() - max(p.stat().st_mtime for p in (self.path, *map(self.path.joinpath, self.names())))
        return 0.0

    def size_bytes(self) -> int:
        with suppress(FileNotFoundError):  # another syncer may remove it meanwhile
            return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        return 0

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, parts: Iterable[Part]) -> None:
        """Write to a temporary file in the folder, then rename it."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace(self.path / name, parts)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):  # another syncer may remove it too
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)
            else:
                (self.path / name).unlink()


class Store(Place):
    """A `Place` in an object store: an address in a file system of fsspec."""

    def __init__(self, files: Any, address: str) -> None:
        self._files, self._address = files, address

    def __str__(self) -> str:
        return self._address

    def below(self, name: str) -> "Store":
        return Store(self._files, f"{self._address}/{name}")

    def check(self) -> None:
        name = f"{TRIED}{secrets.token_hex(4)}"
        self.write(name, ())
        self.remove(name)

    def names(self) -> frozenset[str]:
        with self._in_words():
            self._files.invalidate_cache()  # other syncers write there too
            try:
                found = self._files.ls(self._address, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return frozenset()
        return frozenset(str(one).rstrip("/").rpartition("/")[2] for one in found)

    def age_s(self) -> float:
        names = self.names()
        with self._in_words(), suppress(FileNotFoundError):  # another syncer may remove it meanwhile
            written = [self._files.modified(f"{self._address}/{name}").timestamp() for name in names]
            return time.time() - max(written) if written else 0.0
        return 0.0

    def size_bytes(self) -> int:
        with self._in_words(), suppress(FileNotFoundError):  # another syncer may remove it meanwhile
            return int(self._files.du(self._address))
        return 0

    def read(self, name: str) -> bytes:
        with self._in_words():
            try:
                data: bytes = self._files.cat_file(f"{self._address}/{name}")
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{self._address}/{name} does not exist") from error
        return data

    def write(self, name: str, parts: Iterable[Part]) -> None:
        """Write an object, which exists only once all of it is sent."""
        with self._in_words():
            file = self._files.open(f"{self._address}/{name}", "wb")
            try:
                for part in parts:
                    for begin in range(0, len(part), PIECE_BYTES):
                        file.write(part[begin : begin + PIECE_BYTES])
            except BaseException:
                file.discard()  # `close` would make an object that is cut short
                file.closed = True
                raise
            file.close()

    def remove(self, name: str) -> None:
        with self._in_words(), suppress(FileNotFoundError):
            self._files.rm(f"{self._address}/{name}", recursive=True)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn any exception of the store's client into an OSError with a readable message."""
        try:
            yield
        except FileNotFoundError as error:
            if str(error).startswith(self._address):
                raise
            raise OSError(_said(self._address, error)) from error
        except Exception as error:
            raise OSError(_said(self._address, error)) from error


def _said(address: str, error: BaseException) -> str:
    """Return the message for a client's error, followed by the client's own."""
    kinds = [kind.__name__ for one in (error, error.__cause__) if one for kind in type(one).__mro__]
    words = next((WORDS[kind] for kind in kinds if kind in WORDS), type(error).__name__)
    return f"{address}: {words} ({str(error)[:300]})"
