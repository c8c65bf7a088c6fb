"""Promises about the text of installed packages: whole packages, each text once, the same for the same packages."""

from importlib.metadata import distributions
from pathlib import Path

import pytest

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data.text import open_text
from diloco_studies.quality import packages
from diloco_studies.quality.packages import write_packages

LONG = "# text that is long enough\n" * 40


def installed(site: Path, name: str, files: dict[str, bytes]) -> None:
    """A package as pip leaves it."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file, data in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes(data)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, "gone/away.py"]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packages, "stdlib_files", list)
    site = tmp_path / "site"
    vendored = (LONG + "vendored").encode()
    installed(site, "Big_One", {"big/a.py": (LONG + "a").encode(), "big/v.py": vendored, "big/data.bin": b"x" * 999})
    installed(
        site, "small", {"small/v.py": vendored, "small/s.py": (LONG + "s").encode(), "small/no.py": b"\xff" * 999}
    )
    installed(site, "empty", {"empty/__init__.py": b"import x\n", "empty/zero.py": b"\0" * 999})
    return site


def test_each_package_is_a_file_and_a_text_that_several_carry_is_there_once(site: Path, tmp_path: Path) -> None:
    """What is no text, too short or not there is left out."""
    made = write_packages(tmp_path / "text", distributions(path=[str(site)]))
    texts = {file.name: file.read_text() for file in (tmp_path / "text").iterdir()}
    assert texts == {"big-one.txt": f"{LONG}a\n{LONG}vendored", "small.txt": f"{LONG}s"}
    assert (made.packages, made.files, made.again) == (2, 3, 1)
    assert made.bytes == sum(map(len, texts.values()))
    again = write_packages(tmp_path / "again", reversed(list(distributions(path=[str(site)]))))
    assert again.fingerprint == made.fingerprint


def test_a_large_package_and_copies_of_others_are_no_large_part(site: Path, tmp_path: Path) -> None:
    """Of a large one there are whole files, drawn by their names and not the first ones, up to a megabyte."""
    files = {f"large/{number:03}.py": f"{number:03} ".encode() * 12_500 for number in range(60)}
    installed(site, "large", files | {"large/_vendor/other.py": (LONG + "copied").encode()})
    write_packages(tmp_path / "text", distributions(path=[str(site)]))
    parts = (tmp_path / "text" / "large.txt").read_text().split("\n")
    assert len(parts) == 20
    assert all(len(part) == 50_000 for part in parts)
    numbers = [int(part[:3]) for part in parts]
    assert numbers == sorted(numbers) != list(range(20))
    assert "copied" not in "".join(parts)


def test_a_held_out_text_is_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "stdlib_files", list)
    for number in range(40):
        installed(tmp_path / "site", f"p{number}", {f"p{number}/a.py": f"only_in_{number:02} ".encode() * 200})
    write_packages(tmp_path / "text", distributions(path=[str(tmp_path / "site")]))
    text = open_text(str(tmp_path / "text"))
    trained, held_out = (set(bytes(part).split()) - {b""} for part in (text.train, text.validation))
    words = [{word.strip(b"\0") for word in part} - {b""} for part in (trained, held_out)]
    assert words[1]
    assert len(words[0] | words[1]) == 40
    assert not words[0] & words[1]


def test_what_is_there_is_not_mixed_with_other_text(site: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="text is not an empty folder: choose a different one"):
        write_packages(tmp_path / "text", distributions(path=[str(site)]))
    with pytest.raises(UsageError, match=r"text/mine\.txt is not an empty folder"):
        write_packages(tmp_path / "text" / "mine.txt", distributions(path=[str(site)]))
    with pytest.raises(UsageError, match="none of the installed packages has Python source text"):
        write_packages(tmp_path / "none", [])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["site", "text"]


def test_a_package_that_is_damaged_or_called_python_is_left_out(site: Path, tmp_path: Path) -> None:
    installed(site, "Python", {"mine.py": (LONG + "mine").encode()})
    installed(site, "broken", {"broken.py": (LONG + "broken").encode()})
    (site / "broken-1.0.dist-info" / "RECORD").write_text("broken.py,,many\n")
    (site / "nameless-1.0.dist-info").mkdir()
    (site / "nameless-1.0.dist-info" / "RECORD").write_text("big/a.py,,\n")
    write_packages(tmp_path / "text", distributions(path=[str(site)]))
    assert sorted(file.name for file in (tmp_path / "text").iterdir()) == ["big-one.txt", "small.txt"]


def test_what_is_interrupted_leaves_nothing(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_packages(tmp_path / "text", distributions(path=[str(site)]))
    assert [file.name for file in tmp_path.iterdir()] == ["site"]
