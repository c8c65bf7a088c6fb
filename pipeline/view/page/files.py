"""The files of the page: what a browser asks for, and the same as one file that needs no server.

There is no build: `static/` is what browsers run. For the one file the modules are put one after the other, without
their imports and exports: so no two of them may have a name in common (a test holds that).
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from diloco.pipeline.files.strict_json import dumps

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of all that is served: nothing from elsewhere, nothing inline."""
MODULES = (
    *("palette.js", "words.js", "model.js", "stream.js"),
    *("layers.js", "lanes.js", "charts.js", "panels.js", "app.js"),
)
"""Each imports only those before it."""
PLOT, PLOT_STYLE, STYLE, PAGE = "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "page.css", "index.html"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}


def _read(name: str) -> str:
    return files(__package__).joinpath("static", *name.split("/")).read_text("utf-8")


@cache
def served() -> dict[str, tuple[str, bytes]]:
    """Path -> content type and content. They tell nothing of any run."""
    names = (*MODULES, PLOT, PLOT_STYLE, STYLE)
    found = {f"/page/{name}": (TYPES[name[name.rindex(".") :]], _read(name).encode()) for name in names}
    return {"/": (TYPES[".html"], _read(PAGE).encode()), **found}


def one_file(model: Any, title: str) -> str:
    """The page of a run that is over, with its model in it: one HTML file, which asks nobody for anything."""
    styles = "\n".join(map(_read, (PLOT_STYLE, STYLE)))
    plot, page = _read(PLOT), "\n".join(_without_imports(_read(name)) for name in MODULES)
    policy = (
        f"default-src 'none'; script-src {_hash(plot)} {_hash(page)}; style-src {_hash(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = dumps(model, separators=(",", ":")).replace("<", "\\u003c")  # nothing in it can end the element
    text = _read(PAGE)
    text = re.sub(r" *<(?:script|link)[^>]*(?:></script>|>)\n", "", text)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{styles}</style>\n'
    tail = (
        f'<script type="application/json" id="model">{data}</script>\n'
        f'<script>{plot}</script>\n<script type="module">{page}</script>\n'
    )
    shown = title.replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"<title>.*?</title>", lambda _: f"<title>{shown}</title>", text)
    return text.replace("</head>", head + "</head>").replace("</body>", tail + "</body>")


def _without_imports(module: str) -> str:
    module = re.sub(r"^import\s[^;]*;\n", "", module, flags=re.MULTILINE)
    return re.sub(r"^export ", "", module, flags=re.MULTILINE)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
