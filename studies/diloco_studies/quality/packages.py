"""Text of the Python packages that are installed here: a file for each, so that whole packages are held out.

Of a large package it is a part, or a few of them would be most of what is trained on, and of what is held out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data.text_sources import stdlib_files
from diloco.workers.trainer.data.tokens import BOUNDARY, is_held_out

FOLDER = Path("packages-text")
"""Where `diloco lab packages` writes if nobody says otherwise."""
STDLIB = "python"
"""Name of Python's own source text among packages."""
MIN_FILE = 200
"""Bytes: shorter files are mostly lists of imports."""
MAX_CHARS = 1_000_000
"""Bytes of a package: of a larger one as many files, drawn by their names, as have room."""
COPIES = {"_vendor", "_vendored", "vendor", "vendored"}
"""Folders with copies of other packages, often with other imports, so that they are not found to be copies."""


@dataclass(slots=True)
class Corpus:
    """What was written."""

    packages: int = 0
    files: int = 0
    bytes: int = 0
    again: int = 0
    """Files left out, since the same text was there before: packages carry copies of others."""
    held_out: list[str] = field(default_factory=list)
    """Packages whose text is kept for validation."""
    fingerprint: str = ""
    """Of all the text: another environment has other packages."""


def write_packages(folder: Path, found: Iterable[Distribution] | None = None) -> Corpus:
    """Write the source text of packages as `NAME.txt`, and of the standard library as `python.txt`.

    Args:
        folder: where to; made if it is not there.
        found: the packages; None: all that this Python finds.

    Raises:
        UsageError: the folder is not empty or cannot be written, or no package has any text.
    """
    check_empty(folder)
    corpus, seen, digest = Corpus(), set[bytes](), xxhash.xxh3_128()
    texts: dict[str, bytes] = {}
    own = ((path.as_posix(), path) for path in stdlib_files())
    for name, paths in [(STDLIB, list(own)), *_of_packages(distributions() if found is None else found)]:
        kept, size = dict[str, bytes](), 0
        for place, path in sorted(paths, key=lambda one: xxhash.xxh3_64_digest(one[0].rpartition("/")[2].encode())):
            if (text := _text(path)) is None or size + len(text) > MAX_CHARS:
                continue
            if (one := xxhash.xxh3_128_digest(text)) in seen:
                corpus.again += 1
                continue
            seen.add(one)
            kept[place] = text
            size += len(text)
        if kept:
            text = texts[f"{name}.txt"] = b"\n".join(kept[place] for place in sorted(kept))
            digest.update(name.encode() + text)
            corpus.held_out += [name] if is_held_out(f"{name}.txt") else []
            corpus.packages, corpus.files = corpus.packages + 1, corpus.files + len(kept)
            corpus.bytes += len(text)
    if not corpus.packages:
        raise UsageError("none of the installed packages has Python source text")
    corpus.fingerprint = digest.hexdigest()[:16]
    write_texts(folder, texts)
    return corpus


def check_empty(folder: Path) -> None:
    """Where texts are to be written.

    Raises:
        UsageError: something is there.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder: choose a different one, or delete it")


def write_texts(folder: Path, texts: Mapping[str, bytes]) -> None:
    """All of them by their names, or nothing.

    Raises:
        UsageError: the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as unfinished:
            (made := Path(unfinished) / "made").mkdir()
            for name, text in texts.items():
                (made / name).write_bytes(text)
            made.rename(folder)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from error


def _of_packages(found: Iterable[Distribution]) -> Iterator[tuple[str, list[tuple[str, Path]]]]:
    """Each package's Python files as (place in it, path); of two that have one name, the first: Python imports it."""
    by_name: dict[str, Distribution] = {}
    for one in found:
        name = re.sub(r"[^a-z0-9]+", "-", str(one.metadata["Name"] or "").lower())
        by_name.setdefault(name, one)
    for name, one in sorted(by_name.items()):
        if name in ("", STDLIB):  # without metadata, or in the place of Python's own text
            continue
        try:
            listed = one.files or []
        except ValueError:  # its list of files is damaged
            continue
        files = [file for file in listed if file.suffix == ".py" and not COPIES & set(file.parts)]
        yield name, [(file.as_posix(), Path(str(one.locate_file(file)))) for file in files]


def _text(path: Path) -> bytes | None:
    """A file's bytes; None: it is too short, no text in UTF-8, or not there."""
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return data if len(data) >= MIN_FILE and BOUNDARY not in data else None
