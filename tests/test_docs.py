"""The documents are true where a machine can tell: links, commands, files, tests, generated pages."""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

from diloco.options import as_written
from diloco.pipeline.messages.fragment import RefusalReason
from docs import generate

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = [
    ROOT / name for name in ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
]
DOCS_PAGES = sorted((ROOT / "docs").rglob("*.md"))
PAGES_OF_THE_CODE = generate.pages()
GENERATED = list(PAGES_OF_THE_CODE)
COMMANDS = generate.commands()
WRITTEN = [page for page in [*ROOT_PAGES, *DOCS_PAGES] if page not in GENERATED]
"""Pages whose sentences are people's: the generated ones have those of the code."""

SOURCES = ("pipeline", "syncer", "workers", "studies", "diloco", "tests", "examples", "deploy", "docs")


# Reading Markdown: as much of it as these pages use.


def code_blocks(text: str) -> str:
    fenced = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(fenced + re.findall(r"^    (.*)", text, re.MULTILINE))


def anchors(text: str) -> set[str]:
    """Of the headings: those that the site and the repository's hosts make alike. Of `A & B` they do not."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"\s", "-", one) for one in words if not re.search(r"[\s-]{2}", one)}


def links(text: str) -> list[tuple[str, str]]:
    """(path, anchor) of all links within the repository."""
    found = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", re.sub(r"`[^`\n]*`", "", text))
    return [(path, anchor) for path, anchor in found if "://" not in path]


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, test or "") of all `test_x.py`, `test_x.py::test_y` and `::test_y`, which is of the file before."""
    found: list[tuple[str, str]] = []
    for code in re.findall(r"`([^`\n]+)`", text):
        match = re.fullmatch(r"(?:tests/)?(test_\w+\.py)?(?:::(test_\w+))?", code)
        if match and (match[1] or match[2]):
            found.append((match[1] or found[-1][0], match[2] or ""))
    return found


def named_files(text: str) -> list[str]:
    """Files, folders and globs of the sources: by their path (`pipeline/bus/`, `tests/*/test_{a,b}.py`), as a folder
    within one (`merging/`), or as a module's name (`merge.py`).
    """
    found = re.findall(r"`([\w.*{},/-]+)`", text)
    return [
        one for one in found if one.startswith(tuple(f"{top}/" for top in SOURCES)) or re.search(r"\w(/|\.py)$", one)
    ]


def matches(named: str) -> bool:
    """Whether there is such a file or folder; of `{a,b}` each."""
    if braces := re.search(r"\{([^{}]*)\}", named):
        return all(matches(named[: braces.start()] + one + named[braces.end() :]) for one in braces[1].split(","))
    if named.startswith(tuple(f"{top}/" for top in SOURCES)):
        return any(ROOT.glob(named))
    return any(any((ROOT / top).rglob(named)) for top in SOURCES)


def test_markdown_is_read_in_every_form() -> None:
    """A reader that sees nothing finds every page in order."""
    assert links("Text `[no](code.md)`.\n- [Next](x.md#y). **Last.** End") == [("x.md", "y")]
    assert anchors("# A learner, and `how()` it\n```\n# no\n```\n# A & B\n") == {"a-learner-and-how-it"}
    text = "`test_a.py`, `test_b.py::test_c`, `::test_d`, `tests/test_e.py`, `tests/`, `other.py`"
    assert named_tests(text) == [("test_a.py", ""), ("test_b.py", "test_c"), ("test_b.py", "test_d"), ("test_e.py", "")]
    text = "`pipeline/bus/`, `tests/*/test_{a,b}.py`, `merging/`, `merge.py`, `tests/x.txt`, `/status`, `a/b`, `--x`"
    assert named_files(text) == text.replace("`", "").split(", ")[:5]


def test_what_is_not_there_is_found_missing() -> None:
    """By each way to name it."""
    there = ["pipeline/bus/", "tests/world/*.py", "tests/syncer/test_{merge,outer}.py", "merging/", "merge.py"]
    gone = ["pipeline/buses/", "tests/world/*.lua", "tests/syncer/test_{merge,none}.py", "merge/", "merges.py"]
    assert [matches(named) for named in there] == [True] * 5
    assert [matches(named) for named in gone] == [False] * 5


# What they say is there.


def test_every_test_that_a_document_names_exists() -> None:
    """A promise whose test was renamed is one that nobody can check."""
    missing = []
    for page in WRITTEN:
        for file, test in named_tests(page.read_text()):
            sources = list((ROOT / "tests").rglob(file))
            if not sources or (
                test and not re.search(rf"^(async )?def {test}\(", sources[0].read_text(), re.MULTILINE)
            ):
                missing.append(f"{page.name}: {file}::{test}")
    assert missing == []


def test_the_failure_matrix_is_read() -> None:
    assert len(named_tests((ROOT / "docs" / "reference" / "failures.md").read_text())) > 50


def test_every_file_that_a_document_names_exists() -> None:
    """Whoever follows a page into the code finds what it says: files, folders, and something for each glob."""
    pages = [page for page in WRITTEN if page.name != "CHANGELOG.md"]
    assert [(page.name, named) for page in pages for named in named_files(page.read_text()) if not matches(named)] == []


def test_every_link_leads_somewhere() -> None:
    """Files and headings."""
    broken = []
    for page in [*ROOT_PAGES, *DOCS_PAGES]:
        for path, anchor in links(page.read_text()):
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{page.name}: {path}#{anchor}")
    assert broken == []


def test_every_page_is_reachable_from_the_navigation() -> None:
    nav = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert nav - {"index.md", *(page.name.lower() for page in ROOT_PAGES)} == {
        str(page.relative_to(ROOT / "docs")) for page in DOCS_PAGES
    }


def test_reference_pages_say_what_the_code_says() -> None:
    """Flags, settings and metrics are looked up there."""
    old = [page.name for page, text in PAGES_OF_THE_CODE.items() if page.read_text() != text]
    assert old == [], "run `make docs`, or `python -m docs.generate`"


def documented_commands() -> list[tuple[str, str]]:
    """(page, command) of all calls of `diloco` in code and in text."""
    found = []
    for page in WRITTEN:
        text = page.read_text().replace("\\\n", " ")
        spans = re.findall(r"`((?:\.venv/bin/)?diloco [^`]+)`", re.sub(r"\s*\n\s*", " ", text))
        for line in [*code_blocks(text).splitlines(), *spans]:
            command = re.search(r"(?:^|[ ;|]|bin/)diloco (?!\.)(.*)", re.sub(r"(^|\s)#.*", "", line))
            if command and page.name != "CHANGELOG.md":
                found.append((page.name, command[1]))
    return sorted(set(found))


def test_commands_of_the_documents_are_found() -> None:
    assert len(documented_commands()) > 50


def misunderstood(line: str) -> str:
    """What is wrong with a documented call of `diloco`: command, flags, number of arguments; empty: nothing."""
    line = re.split(r" (?:&|>|>>|\||\.\.\.)(?: |$)|&$", line.split(" && ")[0])[0]
    given = shlex.split(line.replace("<", "_").replace(">", "_"))
    name = next((" ".join(given[:n]) for n in (2, 1) if " ".join(given[:n]) in COMMANDS), None)
    if name is None:
        groups = {one.split()[0] for one in COMMANDS} | {"--version", "--help"}
        return "" if given and given[0] in groups else "no such command"
    command, arguments = COMMANDS[name], given[len(name.split()) :]
    if arguments and "--help" not in arguments:  # else a command that is spoken of
        try:
            command.make_context(name, arguments)
        except Exception as error:  # typer carries its own click: whatever refuses it says why
            return str(error)
    return ""


def test_every_command_of_the_documents_is_understood() -> None:
    assert misunderstood("run --no-such-flag")
    assert misunderstood("dance")
    assert [(page, line, why) for page, line in documented_commands() if (why := misunderstood(line))] == []


def test_make_targets_and_modules_of_the_documents_exist() -> None:
    text = "\n".join(page.read_text() for page in WRITTEN)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    modules = set(re.findall(r"python -m ([a-z_.]+[a-z])", text)) - {"pip", "pytest"}
    assert {module for module in modules if importlib.util.find_spec(module) is None} == set()


def test_each_reason_of_a_refusal_is_explained_where_one_watches() -> None:
    page = (ROOT / "docs/howto/watch.md").read_text()
    table = page.partition("## Why deltas are refused\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)) == sorted(RefusalReason)


def shown_messages(text: str) -> list[str]:
    """Messages and names of log events: the code in the first column of the tables of docs/reference/errors.md."""
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def texts_of_the_product() -> list[str]:
    """All strings of the product's code except docstrings, with a space for each value of an f-string."""
    found = []
    for file in (one for top in ("pipeline", "syncer", "workers", "diloco") for one in (ROOT / top).rglob("*.py")):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if id(node) not in docstrings:
                found.append(" ".join(str(one.value) for one in parts if isinstance(one, ast.Constant)))
    return found


def test_the_messages_that_are_explained_are_those_of_the_code() -> None:
    """Their fixed parts: words in capitals are placeholders, and a colon may join parts from two places."""
    texts = texts_of_the_product()

    def is_said(message: str) -> bool:
        fixed = [one.strip(" :,;") for one in re.split(r"\b(?:N|NAME|HOST|FOLDER)\b|: ", message)]
        return all(any(part in text for text in texts) for part in fixed)

    messages = shown_messages((ROOT / "docs" / "reference" / "errors.md").read_text())
    assert len(messages) > 40
    assert not is_said("the run in FOLDER is asleep")
    assert [message for message in messages if not is_said(message)] == []


def test_what_readme_imports_is_there() -> None:
    """`from diloco import ...` of all pages."""
    names = {
        name.strip()
        for page in WRITTEN
        for line in re.findall(r"^from diloco import (.*)", page.read_text(), re.MULTILINE)
        for name in line.split(",")
    }
    assert "Learner" in names
    package = importlib.import_module("diloco")
    assert names <= set(package.__all__)
    assert all(getattr(package, name) for name in package.__all__)


def test_the_first_result_is_on_the_first_screen() -> None:
    """The command that shows it, and its picture, which loads at once."""
    screen = (ROOT / "README.md").read_text().splitlines()[:25]
    assert any(line.startswith("make demo") for line in screen)
    assert any(line.startswith("![") for line in screen)


# The site.


def test_former_addresses_lead_to_pages_that_are_there() -> None:
    """Links from elsewhere, and bookmarks, to a page and its heading."""
    for old, new in importlib.import_module("docs.hooks").MOVED.items():
        page, _, anchor = new.partition("#")
        target = (ROOT / "docs" / old).parent / page.replace(".html", ".md")
        assert not (ROOT / "docs" / f"{old}.md").exists()
        assert not anchor or anchor in anchors(target.read_text())
        assert target.exists()


def test_links_lead_to_pages_of_the_site() -> None:
    """A page of the root has its place there; a source is no page."""
    relinked = importlib.import_module("docs.hooks").relinked
    assert relinked("[a](../../ARCHITECTURE.md#merge)", "howto/x.md") == "[a](../architecture.md#merge)"
    assert relinked("![p](docs/a.png) [l](docs/howto/replay.md)", "index.md") == "![p](a.png) [l](howto/replay.md)"
    assert relinked("[own](examples/own_model.py)", "index.md") == "own"
    assert relinked("[none](../none.md) [w](https://x.org)", "howto/x.md") == "[none](../none.md) [w](https://x.org)"


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


def test_a_flag_is_listed_for_the_commands_that_have_it() -> None:
    """Of settings of one name, each row names the commands whose setting it is, with the default that they have."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in PAGES_OF_THE_CODE[generate.REFERENCE / "settings.md"].splitlines()
        if line.startswith("| `")
    ]
    settings = [(row[0].strip("`"), row[2].strip("`"), row[3].split(", ")) for row in rows if len(row) == 5]
    found = {(name, command): default for name, default, users in settings for command in users}
    assert found["http_port", "syncer"] == "8080"
    assert found["http_port", "run"] == "0"
    assert (found["syncers", "run"], found["syncers", "chaos"]) == ("1", "2")
    assert found["overlap_steps", "plan"] == "2"
    for name, command in COMMANDS.items():
        kind = getattr(command.callback, "kind", None)
        for parameter in command.params if kind is not None else ():
            info = kind.model_fields.get(parameter.name)
            if info is not None:
                written = as_written(kind, parameter.name)
                default = "follows" if info.default_factory else "" if written is None else str(written)
                assert found[parameter.name, name] == default, (name, parameter.name)
    sections = re.split(r"^## ", PAGES_OF_THE_CODE[generate.REFERENCE / "settings.md"], flags=re.MULTILINE)
    (protocol,) = [one for one in sections if one.startswith("Synchronisation")]
    assert "simulate" not in protocol
