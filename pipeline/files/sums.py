"""Digests of a folder's files, in a file that `sha256sum -c SHA256SUMS` reads too.

They guard against damage, not against forgery.
"""

import hashlib
from pathlib import Path

from diloco.pipeline.errors import UsageError

SUMS_FILE = "SHA256SUMS"
CHECKED = (".safetensors", ".json")
"""Files of these kinds must be named there; people may put others beside them."""


def file_sha256(path: Path) -> str:
    """Digest of a file's bytes, in hex.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write the digests of all files that the folder has now.

    Raises:
        OSError: one cannot be read, or this one not be written.
    """
    names = sorted(file.name for file in folder.iterdir() if file.name != SUMS_FILE)
    (folder / SUMS_FILE).write_text("".join(f"{file_sha256(folder / name)}  {name}\n" for name in names))


def parse_sums(text: str, where: object) -> dict[str, str]:
    """Digests in hex by file name, of the file's text.

    Raises:
        UsageError: it is damaged; `where` says which one it is.
    """
    sums = {}
    for line in text.splitlines():
        digest, blanks, name = line.partition("  ")
        if not blanks or Path(name).name != name:
            raise UsageError(f"{where} is damaged: {line!r:.80} is no digest and name")
        sums[name] = digest
    return sums


def damaged(file: object) -> UsageError:
    """What to raise of a file with another digest."""
    return UsageError(
        f"{file} is damaged: it does not have the digest that {SUMS_FILE} says; take another checkpoint or copy"
    )


def check_sums(folder: Path) -> bool:
    """Compare all files with their digests; False if the folder has no digests.

    Raises:
        UsageError: naming the file that is missing, cannot be read, or is another one.
    """
    if not (folder / SUMS_FILE).is_file():
        return False
    try:
        missing = {file.name for file in folder.iterdir() if file.suffix in CHECKED}
        for name, digest in parse_sums((folder / SUMS_FILE).read_text(), folder / SUMS_FILE).items():
            if digest != file_sha256(folder / name):
                raise damaged(folder / name)
            missing.discard(name)
    except FileNotFoundError as error:
        raise UsageError(
            f"{error.filename} is missing: {SUMS_FILE} names it; take another checkpoint or copy"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot check {folder}: {error}") from error
    if missing:
        raise UsageError(f"{folder / SUMS_FILE} is damaged: it does not name {', '.join(sorted(missing))}")
    return True
