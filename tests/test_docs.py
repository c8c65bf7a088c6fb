"""What the documents name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, test or "") of all `test_x.py`, `test_x.py::test_y` and `::test_y`, which is of the file before."""
    found: list[tuple[str, str]] = []
    for code in re.findall(r"`([^`\n]+)`", text):
        match = re.fullmatch(r"(?:tests/)?(test_\w+\.py)?(?:::(test_\w+))?", code)
        if match and (match[1] or match[2]):
            found.append((match[1] or found[-1][0], match[2] or ""))
    return found


def test_names_are_read_in_every_form() -> None:
    text = "`test_a.py`, `test_b.py::test_c`, `::test_d`, `tests/test_e.py`, `tests/`, `other.py`"
    assert named_tests(text) == [("test_a.py", ""), ("test_b.py", "test_c"), ("test_b.py", "test_d"), ("test_e.py", "")]


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "SECURITY.md", "README.md"])
def test_every_test_that_a_document_names_exists(document: str) -> None:
    """A promise whose test was renamed is one that nobody can check."""
    missing = []
    for file, test in named_tests((ROOT / document).read_text()):
        path = ROOT / "tests" / file
        if not path.is_file() or (test and not re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE)):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_the_failure_matrix_is_read() -> None:
    assert len(named_tests((ROOT / "ARCHITECTURE.md").read_text())) > 50


def shown_pictures() -> list[tuple[str, Path]]:
    """(page, picture) of all that pages of the repository show and that lie in it."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [
        (str(page.relative_to(ROOT)), (page.parent / link).resolve())
        for page in pages
        for link in re.findall(r"""(?:!\[[^\]]*\]\(|<img[^>]* src=["'])([^)"'\s]+)""", page.read_text())
        if "://" not in link
    ]


def test_pictures_are_there_and_small() -> None:
    """Each under 150 KB, so that a page is there at once and a clone stays small; and no picture that no page shows."""
    shown = shown_pictures()
    assert [(page, path.name) for page, path in shown if not path.is_file()] == []
    kept = set((ROOT / "docs").rglob("*.png"))
    assert {path.name: path.stat().st_size for path in kept if path.stat().st_size >= 150_000} == {}
    assert kept - {path for _, path in shown} == set()
