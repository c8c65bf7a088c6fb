"""Where checkpoints lie: a folder, or an address of an object store (`s3://bucket/path`), by fsspec.

A file is whole or not there in both: on a disk by a rename, in a store because its last request makes the object. That
is not so in all that fsspec knows (sftp, ftp, hdfs), so other stores are refused. Credentials and endpoints come from
the environment, as each store's own tools have them, and from nowhere else.
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

PIECE_BYTES = 8 * 2**20
"""Given to a store's file at a time, which gathers what it sends."""
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}}
}
"""Of a store's client, by protocol: a network that is away is said within a minute or so, and tried again later."""
STORES: Final[Mapping[str, tuple[str, str]]] = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "memory": ("fsspec", "s3"),  # of the process, for tests: what is killed leaves nothing there
}
"""Protocol -> package, and the extra of this project that brings it."""
WORDS: Final[Mapping[str, str]] = {
    "NoCredentialsError": "there are no credentials in the environment",
    "PartialCredentialsError": "the credentials in the environment are not complete",
    "PermissionError": "the credentials in the environment do not permit it",
    "FileNotFoundError": "there is no such bucket or folder",
    "EndpointConnectionError": "the network or the store is away",
    "ConnectTimeoutError": "the network or the store is away",
    "ReadTimeoutError": "the store does not answer",
    "ClientConnectorError": "the network or the store is away",
}
"""What errors of stores' clients mean, by the names of their types: the clients are not imported for it."""


class Place(Protocol):
    """A folder of some kind. Its calls block, and raise OSError with words for people."""

    def below(self, name: str) -> "Place":
        """The folder of this name in it, there or not."""
        ...

    def check(self) -> None:
        """Raise where nothing can be written, a UsageError where this user may not; nothing is left there by it."""
        ...

    def names(self) -> frozenset[str]:
        """Files and folders in it; none where it is not there."""
        ...

    def age_s(self) -> float:
        """Seconds since anything in it was written; 0 where nothing is."""
        ...

    def size_bytes(self) -> int:
        """Of all files in it."""
        ...

    def read(self, name: str) -> bytes:
        """A file's bytes; raises FileNotFoundError where it is not there."""
        ...

    def write(self, name: str, parts: Iterable[Part]) -> None:
        """Write a file, whole or not at all, in the place of one that is there; the folder is made."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing is said if it is not there."""
        ...


def place_of(place: str | Path) -> Place:
    """The place that people mean.

    Raises:
        UsageError: it is no address, its store is not one of `STORES`, or its package is missing; says what to give or
            to install.
    """
    if isinstance(place, Path) or not is_address(place):
        return Folder(Path(place))
    protocol, slashes, path = place.partition("://")
    if not slashes:
        raise UsageError(f"{place}: an address has two slashes, {place.replace(':/', '://', 1)}; a folder is ./{place}")
    if protocol == "file":
        raise UsageError(f"{place}: give the folder itself, {path or '/path'}")
    if protocol not in STORES:
        raise UsageError(
            f"{place}: a killed syncer might leave half a file in a store of this kind; "
            "give a folder, s3://bucket/path or gs://bucket/path"
        )
    if not path.strip("/") or path.startswith("/"):
        raise UsageError(f"{place}: name a bucket, {protocol}://bucket/path")
    package, extra = STORES[protocol]
    try:
        fsspec = importlib.import_module("fsspec")
        files = fsspec.filesystem(protocol, **OPTIONS.get(protocol, {}))
    except ImportError as error:
        raise UsageError(missing(package, extra, place)) from error
    except Exception as error:  # of the store's client: its settings in the environment
        raise UsageError(f"{place}: {error}") from error
    return Store(files, place.rstrip("/"))


class Folder:
    """A `Place` on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def below(self, name: str) -> "Folder":
        """As `Place`."""
        return Folder(self.path / name)

    def check(self) -> None:
        """As `Place`."""
        try_folder(self.path)

    def names(self) -> frozenset[str]:
        """As `Place`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return frozenset(entry.name for entry in self.path.iterdir())
        return frozenset()

    def age_s(self) -> float:
        """As `Place`; also of a file."""
        with suppress(FileNotFoundError):  # another syncer removes it
            return time.time() - max(p.stat().st_mtime for p in (self.path, *map(self.path.joinpath, self.names())))
        return 0.0

    def size_bytes(self) -> int:
        """As `Place`."""
        with suppress(FileNotFoundError):  # another syncer removes it
            return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        return 0

    def read(self, name: str) -> bytes:
        """As `Place`."""
        return (self.path / name).read_bytes()

    def write(self, name: str, parts: Iterable[Part]) -> None:
        """As `Place`."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace(self.path / name, parts)

    def remove(self, name: str) -> None:
        """As `Place`."""
        with suppress(FileNotFoundError, NotADirectoryError):  # another syncer removes it too
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)
            else:
                (self.path / name).unlink()


class Store:
    """A `Place` in an object store."""

    def __init__(self, files: Any, address: str) -> None:
        """files: fsspec's."""
        self._files, self._address = files, address

    def __str__(self) -> str:
        return self._address

    def below(self, name: str) -> "Store":
        """As `Place`."""
        return Store(self._files, f"{self._address}/{name}")

    def check(self) -> None:
        """As `Place`."""
        name = f"{TRIED}{secrets.token_hex(4)}"
        self.write(name, ())
        self.remove(name)

    def names(self) -> frozenset[str]:
        """As `Place`."""
        with self._in_words():
            self._files.invalidate_cache()  # others write there too
            try:
                found = self._files.ls(self._address, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return frozenset()
        return frozenset(str(one).rstrip("/").rpartition("/")[2] for one in found)

    def age_s(self) -> float:
        """As `Place`."""
        names = self.names()
        with self._in_words(), suppress(FileNotFoundError):  # another syncer removes it
            written = [self._files.modified(f"{self._address}/{name}").timestamp() for name in names]
            return time.time() - max(written) if written else 0.0
        return 0.0

    def size_bytes(self) -> int:
        """As `Place`."""
        with self._in_words(), suppress(FileNotFoundError):  # another syncer removes it
            return int(self._files.du(self._address))
        return 0

    def read(self, name: str) -> bytes:
        """As `Place`."""
        with self._in_words():
            try:
                data: bytes = self._files.cat_file(f"{self._address}/{name}")
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{self._address}/{name} is not there") from error
        return data

    def write(self, name: str, parts: Iterable[Part]) -> None:
        """As `Place`."""
        with self._in_words():
            file = self._files.open(f"{self._address}/{name}", "wb")
            try:
                for part in parts:
                    for begin in range(0, len(part), PIECE_BYTES):
                        file.write(part[begin : begin + PIECE_BYTES])
            except BaseException:
                file.discard()  # closed, it would be there cut short
                file.closed = True
                raise
            file.close()

    def remove(self, name: str) -> None:
        """As `Place`."""
        with self._in_words(), suppress(FileNotFoundError):
            self._files.rm(f"{self._address}/{name}", recursive=True)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Whatever the store's client raises, as an OSError for people."""
        try:
            yield
        except FileNotFoundError as error:
            if str(error).startswith(self._address):
                raise
            raise OSError(_said(self._address, error)) from error
        except Exception as error:
            raise OSError(_said(self._address, error)) from error


def _said(address: str, error: BaseException) -> str:
    """In words, with what the client said."""
    kinds = [kind.__name__ for one in (error, error.__cause__) if one for kind in type(one).__mro__]
    words = next((WORDS[kind] for kind in kinds if kind in WORDS), type(error).__name__)
    return f"{address}: {words} ({str(error)[:300]})"
