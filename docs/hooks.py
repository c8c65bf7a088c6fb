"""Hooks of the documentation's build (mkdocs.yml): pages of the repository's root are pages of the site too.

README.md is its front page. Links are written for the repository, as a reader on its host or in an editor follows them;
here those to pages of the root go to their place in the site, and those to sources become plain text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Path in the repository, and in the site."""
MOVED = {
    "howto/ranks": "eight-gpus.html",
    "howto/sizing": "plan.html#what-each-machine-takes",
    "howto/ssh": "second-machine.html#by-ssh-from-one-place",
    "howto/two-homes": "second-machine.html#across-the-internet-without-an-open-port",
}
"""Former page -> where its address leads."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages."""
    for source, target in ROOT_PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_post_build(config: Any) -> None:
    """Write a page that forwards to the new one at each former address."""
    for old, new in MOVED.items():
        text = f'<!doctype html><meta http-equiv="refresh" content="0; url={new}"><a href="{new}">Moved</a>\n'
        (Path(config["site_dir"]) / f"{old}.html").write_text(text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, uri: str) -> str:
    """The text of the page `uri` (of the site) with links for the site."""
    in_site = {target: source for source, target in ROOT_PAGES.items()}
    folder = posixpath.dirname(in_site.get(uri, f"docs/{uri}"))

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        if "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in ROOT_PAGES:
            there = ROOT_PAGES[path]
        elif path.startswith("docs/"):
            there = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            return text
        else:
            return found[0]  # the build says that it leads nowhere
        return f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor or ''})"

    return LINK.sub(link, markdown)
