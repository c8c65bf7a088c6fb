"""The page's static files, served one by one or combined into a single file that needs no server.

There is no build step: browsers run `static/` directly. For the single file, the modules are concatenated without their
imports and exports, so no two of them may define the same name (a test checks that).
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from diloco.pipeline.files.strict_json import dumps

# Content-Security-Policy of everything that is served: nothing from other hosts, nothing inline.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# In order of concatenation: each module imports only modules before it.
MODULES = (
    *("palette.js", "words.js", "model.js", "stream.js"),
    *("layers.js", "lanes.js", "loss.js", "rates.js", "charts.js", "panels.js", "app.js"),
)
PLOT, PLOT_STYLE, STYLE, PAGE = "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "page.css", "index.html"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}


def _read(name: str) -> str:
    return files(__package__).joinpath("static", *name.split("/")).read_text("utf-8")


@cache
def served() -> dict[str, tuple[str, bytes]]:
    """Return path -> (content type, content). The files are the same for all runs."""
    names = (*MODULES, PLOT, PLOT_STYLE, STYLE)
    found = {f"/page/{name}": (TYPES[name[name.rindex(".") :]], _read(name).encode()) for name in names}
    return {"/": (TYPES[".html"], _read(PAGE).encode()), **found}


def one_file(model: Any, title: str) -> str:
    """Return the page of a finished run with its model inside: one HTML file, which makes no requests."""
    styles = "\n".join(map(_read, (PLOT_STYLE, STYLE)))
    plot, page = _read(PLOT), "\n".join(_without_imports(_read(name)) for name in MODULES)
    policy = (
        f"default-src 'none'; script-src {_hash(plot)} {_hash(page)}; style-src {_hash(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = dumps(model, separators=(",", ":")).replace("<", "\\u003c")  # no text in it can close the element
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
