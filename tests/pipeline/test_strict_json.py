"""What the project writes as JSON is JSON for every parser."""

import ast
import io
import json
import math
from pathlib import Path
from typing import Any

import structlog
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.files.strict_json import dumps, number
from diloco.pipeline.process import logs
from tests.test_layers import PEERS, parsed, sources

ELSEWHERE = {
    "pipeline/files/strict_json.py",
    "diloco/launcher/folder.py",
    "workers/trainer/models/hf_config.py",
}
"""The one itself; a string in TOML; a config of transformers, where an infinity is one and only it is the reader.
Drivers of other programs import nothing of ours."""

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def strictly(text: str) -> Any:
    """Parsed as other languages do."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def same(read: Any, value: Any) -> bool:
    if isinstance(value, dict):
        return read.keys() == value.keys() and all(same(read[key], one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return len(read) == len(value) and all(map(same, read, value))
    if isinstance(value, float) and not math.isfinite(value):
        return read is None
    return bool(read == value)


@given(TREES)
def test_any_tree_is_read_again_with_null_for_what_is_no_number(tree: Any):
    assert same(strictly(dumps(tree)), tree)
    assert same(strictly(dumps((tree, {"a": (tree,)}), indent=1)), [tree, {"a": [tree]}])


def test_what_was_null_is_no_number_again():
    assert math.isnan(number(strictly(dumps([math.inf]))[0]))
    assert number(2.5) == 2.5


def test_nothing_else_writes_json() -> None:
    """Losses and norms of a run that diverges go through all of it."""
    writers = set()
    for path in sources():
        if path not in ELSEWHERE and not path.startswith(PEERS):
            named = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute))
            if {"json.dumps", "json.dump"} & {ast.unparse(one) for one in named if one.attr in ("dumps", "dump")}:
                writers.add(path)
    assert writers == set()


def test_a_log_line_is_json():
    stream = io.StringIO()
    logs.configure("info", stream)
    structlog.get_logger().info("evaluated", loss=math.nan, path=Path("a"))
    line = strictly(stream.getvalue())
    assert line["loss"] is None
    assert "a" in line["path"]
