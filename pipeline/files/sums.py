"""Digests of a folder's files, in the format of `sha256sum -c SHA256SUMS`.

They protect against damage, not against forgery.
"""

import hashlib
from pathlib import Path

from diloco.pipeline.errors import UsageError

SUMS_FILE = "SHA256SUMS"
# Files with these suffixes must be listed. Other files, which people may add, need not be.
CHECKED = (".safetensors", ".json")


def file_sha256(path: Path) -> str:
    """Return the digest of a file's bytes in hex.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write the digests of all files that are in the folder now.

    Raises:
        OSError: a file cannot be read, or the digests cannot be written.
    """
    names = sorted(file.name for file in folder.iterdir() if file.name != SUMS_FILE)
    (folder / SUMS_FILE).write_text("".join(f"{file_sha256(folder / name)}  {name}\n" for name in names))


def parse_sums(text: str, where: object) -> dict[str, str]:
    """Parse the text of a digest file to hex digests by file name.

    Raises:
        UsageError: it is damaged; the message names it by `where`.
    """
    sums = {}
    for line in text.splitlines():
        digest, blanks, name = line.partition("  ")
        if not blanks or Path(name).name != name:
            raise UsageError(f"{where} is damaged: {line!r:.80} is not a digest followed by a name")
        sums[name] = digest
    return sums


def damaged(file: object) -> UsageError:
    """Return the error for a file whose digest differs."""
    return UsageError(f"{file} is damaged: its digest differs from that in {SUMS_FILE}; use another checkpoint or copy")


def check_sums(folder: Path) -> bool:
    """Verify the digests of all files. Return False if the folder has no digests.

    Raises:
        UsageError: a file is missing, cannot be read, or differs; the message names it.
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
            f"{error.filename} is missing but listed in {SUMS_FILE}; use another checkpoint or copy"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot check {folder}: {error}") from error
    if missing:
        raise UsageError(f"{folder / SUMS_FILE} is damaged: it does not list {', '.join(sorted(missing))}")
    return True
